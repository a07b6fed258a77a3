"""What a table looks like, without its values: names, rows, columns. Needs nothing, not even NumPy.

A model's tables (tables.py), a cluster's (cluster/store.py) and a catalog's are described alike.

A table may be **cut** by columns (column-wise sharding): then it is stored as several, each with
all rows and some of the floats of a row, and each with row state of its own. ``cuts_of`` says which
stored tables make up which table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.errors import InvalidRequestError

WEIGHT = "weight"

FLOAT32, FLOAT16, BFLOAT16, FLOAT64 = "float32", "float16", "bfloat16", "float64"
DTYPE_BYTES = {FLOAT32: 4, FLOAT16: 2, BFLOAT16: 2, FLOAT64: 8}
"""The number types that a column may have, by the names torch gives them, and their sizes."""


def holds(wide: str, dtype: str) -> bool:
    """Whether one number type holds every number of another.

    >>> holds("float32", "bfloat16"), holds("bfloat16", "float16"), holds("float16", "float16")
    (True, False, True)
    """
    return wide == dtype or DTYPE_BYTES[wide] > DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class Column:
    """One kind of number a row holds: its weights, or one part of its optimizer state."""

    name: str
    width: int
    dtype: str = FLOAT32

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of it, as the model holds them."""
        return DTYPE_BYTES[self.dtype] * self.width


@dataclass(frozen=True, slots=True)
class Cut:
    """Which floats of a wider table's rows a stored table holds: from ``start`` on, as many as it
    is wide."""

    table: str
    start: int
    width: int
    """Floats of a whole row."""


@dataclass(frozen=True, slots=True)
class TableSchema:
    """What a stored table looks like, without its values; a whole table where ``cut`` is None."""

    name: str
    rows: int
    columns: tuple[Column, ...]
    cut: Cut | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row with its state, as the model holds them."""
        return sum(column.row_bytes for column in self.columns)

    @property
    def has_other_dtypes(self) -> bool:
        """Whether some column is not float32."""
        return any(column.dtype != FLOAT32 for column in self.columns)

    @property
    def width(self) -> int:
        """Floats of a row's weights."""
        return self.columns[0].width

    @property
    def start(self) -> int:
        """Where its floats begin in a whole row."""
        return 0 if self.cut is None else self.cut.start

    @property
    def whole_name(self) -> str:
        """The name of the table it is, or is a cut of."""
        return self.name if self.cut is None else self.cut.table

    @property
    def whole_width(self) -> int:
        """Floats of a whole row's weights."""
        return self.width if self.cut is None else self.cut.width


def cuts_of(schemas: Iterable[TableSchema]) -> dict[str, tuple[TableSchema, ...]]:
    """The stored tables of each table, by the floats they hold, ascending.

    Raises:
        InvalidRequestError: cuts of a table overlap, leave floats out, or differ in rows or state.
    """
    found: dict[str, list[TableSchema]] = {}
    for schema in schemas:
        found.setdefault(schema.whole_name, []).append(schema)
    return {name: _check_cuts(name, parts) for name, parts in found.items()}


def _check_cuts(name: str, parts: list[TableSchema]) -> tuple[TableSchema, ...]:
    parts = sorted(parts, key=lambda part: part.start)
    end = 0
    for part in parts:
        is_next = part.start == end and part.rows == parts[0].rows
        has_same_state = _kinds(part) == _kinds(parts[0])
        if not is_next or not has_same_state or part.whole_width != parts[0].whole_width:
            raise InvalidRequestError(
                "the cuts of a table do not make it up",
                table=name,
                cuts=[(p.start, p.start + p.width, p.rows) for p in parts],
                todo="cut every row at the same floats, and give every cut the same row state",
            )
        end += part.width
    if end != parts[0].whole_width:
        raise InvalidRequestError(
            "the cuts of a table do not make it up",
            table=name,
            width=parts[0].whole_width,
            found=end,
        )
    return tuple(parts)


def _kinds(part: TableSchema) -> list[tuple[str, str]]:
    return [(column.name, column.dtype) for column in part.columns]


def whole_schema(parts: tuple[TableSchema, ...]) -> TableSchema:
    """A table as it is without cuts.

    Row state is as wide as the weights (one number a float) or not (numbers of a row): the first
    is cut with them, of the second every cut has its own, and the whole table one.

    >>> cut = TableSchema("t[0:4]", 9, (Column("weight", 4), Column("sum", 1)), Cut("t", 0, 8))
    >>> other = TableSchema("t[4:8]", 9, (Column("weight", 4), Column("sum", 1)), Cut("t", 4, 8))
    >>> [(column.name, column.width) for column in whole_schema((cut, other)).columns]
    [('weight', 8), ('sum', 1)]
    """
    if len(parts) == 1 and parts[0].cut is None:
        return parts[0]
    columns = tuple(
        Column(c.name, sum(p.columns[index].width for p in parts) if is_of_floats(parts, index)
               else c.width, c.dtype)
        for index, c in enumerate(parts[0].columns)
    )  # fmt: skip
    return TableSchema(parts[0].whole_name, parts[0].rows, columns)


def state_shape(
    parts: tuple[TableSchema, ...], column: int, stored: Sequence[int], *, width: int
) -> list[int]:
    """The shape of one row's state where rows are so many floats wide, given that of all rows as
    the first cut has it.

    >>> cut = TableSchema("t[0:4]", 9, (Column("weight", 4), Column("sum", 4)), Cut("t", 0, 8))
    >>> other = TableSchema("t[4:8]", 9, (Column("weight", 4), Column("sum", 4)), Cut("t", 4, 8))
    >>> state_shape((cut, other), 1, [9, 4], width=8)
    [8]
    """
    rest = list(stored)[1:]
    return [width] if rest == [parts[0].width] and is_of_floats(parts, column) else rest


def is_of_floats(parts: tuple[TableSchema, ...], column: int) -> bool:
    """Whether a column holds one number for each float of a row, rather than numbers of a row."""
    return all(part.columns[column].width == part.width for part in parts)
