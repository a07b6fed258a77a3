"""Where stored rows go: which rows and floats of a stored table, into which arrays.

    tables held + schemas stored -> destinations (scatter.py fills them) + joins (done afterwards)

A stored table may be cut by columns otherwise than the tables held, and its rows divided otherwise:
any such difference is resolved here, so that a checkpoint of N processes loads into M.

Of the floats of a row, and of row state with one number for each float, a process takes those it
holds. Row state that is of the row (row-wise Adagrad's one sum) exists once for each stored cut:

- a table held that lies inside one stored cut takes over that cut's number, bit by bit;
- one that spans several takes their mean, weighted by how many of its floats lie in each. That is
  what the sum would be had the row not been cut: a sum of means of squares is linear in them.

An array may be of a wider number type than its stored column (fused kernels keep float32 state,
torch's optimizers that of the weights): the same numbers, widened. A narrower one is refused.

Invariant: every array of a table held is filled whole for the rows held, or its table is refused.

Not here: reading (restore.py), decoding and scattering (scatter.py).

# M rows held, N rows of a segment, D floats of a column
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.errors import InvalidRequestError
from holdfast.model.dtypes import array_dtype, for_users, from_float32, name_of
from holdfast.model.schema import BFLOAT16, TableSchema, cuts_of, holds, is_of_floats
from holdfast.model.shard import Shard


@dataclass(frozen=True, slots=True)
class Into:
    """Some floats of a stored column, and the array they go to (its rows are those held)."""

    column: int
    floats: slice
    array_MD: np.ndarray


@dataclass(frozen=True, slots=True)
class Destination:
    """Rows of a stored table on their way to one holder: which rows, which floats, where to.

    ``words_W``: where rows are marked that were stored since the base, by their local number.
    """

    shard: Shard
    columns: tuple[Into, ...]
    words_W: np.ndarray | None = None


Targets = Mapping[str, Sequence[np.ndarray]]  # whole tables, or their first columns
Destinations = Mapping[str, Sequence[Destination]]


@dataclass(frozen=True, slots=True)
class Held:
    """A table as a process holds it: its shard, its arrays by the names of their columns."""

    table: str
    shard: Shard
    arrays: Mapping[str, np.ndarray]
    words_W: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Join:
    """Numbers of rows that several cuts had, each of its own, into one: the weighted mean; or the
    numbers of one into an array of a wider type."""

    parts: tuple[np.ndarray, ...]
    widths: tuple[int, ...]
    array_MD: np.ndarray

    def run(self) -> None:
        """Fill the array."""
        only = len(self.parts) == 1
        joined_MD = self.parts[0] if only else weighted_mean(self.parts, self.widths)
        is_same = joined_MD.dtype == self.array_MD.dtype
        self.array_MD[:] = joined_MD if is_same else for_users(joined_MD)


def weighted_mean(parts: Sequence[np.ndarray], widths: Sequence[int]) -> np.ndarray:
    """The mean of arrays, weighted by the floats each stands for.

    >>> weighted_mean([np.float32([1, 2]), np.float32([4, 2])], [2, 1])
    array([2., 2.], dtype=float32)
    """
    total = np.zeros(parts[0].shape, np.float64)
    for part, width in zip(parts, widths, strict=True):
        total += width * for_users(part).astype(np.float64)
    mean = total / sum(widths)
    if parts[0].dtype != array_dtype(BFLOAT16):
        return mean.astype(parts[0].dtype)
    return from_float32(mean.astype(np.float32), BFLOAT16)


def join_columns(
    parts: Sequence[TableSchema], read: Sequence[Sequence[np.ndarray]]
) -> list[np.ndarray]:
    """The columns of a whole table, of the columns that each of its cuts has for the same rows."""
    if len(parts) == 1:
        return list(read[0])
    widths = [part.width for part in parts]
    columns = list(zip(*read, strict=True))
    return [
        np.concatenate(found, axis=1)
        if is_of_floats(tuple(parts), index)
        else weighted_mean(found, widths)
        for index, found in enumerate(columns)
    ]


def _check_array(
    schema: TableSchema, column: int, array_MD: np.ndarray, *, may_be_wider: bool = False
) -> None:
    wanted = array_dtype(schema.columns[column].dtype)
    found = name_of(array_MD)
    is_wider = found is not None and holds(found, schema.columns[column].dtype)
    if array_MD.dtype != wanted and not (may_be_wider and is_wider):
        raise InvalidRequestError(
            "an array is of another type than the rows it is for",
            table=schema.name,
            column=schema.columns[column].name,
            stored=schema.columns[column].dtype,
            array=str(array_MD.dtype),
            todo=f"give an array of {wanted}",
        )


def whole(
    targets: Targets,
    schemas: Mapping[str, TableSchema],
    changed: Mapping[str, np.ndarray] | None = None,
) -> Destinations:
    """Destinations of stored tables that are wanted whole; the first columns may be enough.

    ``changed``: bitmaps by table.

    Raises:
        InvalidRequestError: an array is not of its column's type.
    """
    for name, arrays in targets.items():
        for index, array_MD in enumerate(arrays):
            _check_array(schemas[name], index, array_MD)
    return {
        name: [
            Destination(
                Shard(schemas[name].rows, schemas[name].width),
                tuple(
                    Into(index, slice(0, array_MD.shape[1]), array_MD)
                    for index, array_MD in enumerate(arrays)
                ),
                None if changed is None else changed[name],
            )
        ]
        for name, arrays in targets.items()
    }


def plan_destinations(
    held: Sequence[Held], schemas: Sequence[TableSchema]
) -> tuple[dict[str, list[Destination]], list[Join]]:
    """Where the rows of stored tables go, and what is to be joined once they are all there.

    Raises:
        InvalidRequestError: an array is of a type that does not hold its column's numbers.
    """
    cuts = cuts_of(schemas)
    found: dict[str, list[Destination]] = {}
    joins: list[Join] = []
    widened: list[Join] = []  # after the others: their parts may be joined first
    for one in held:
        parts = cuts[one.table]
        floats = one.shard.floats
        near = [p for p in parts if p.start < floats.stop and floats.start < p.start + p.width]
        columns: dict[str, list[Into]] = {part.name: [] for part in near}
        for index, column in enumerate(parts[0].columns):
            array_MD = one.arrays.get(column.name)
            if array_MD is None:
                continue
            _check_array(parts[0], index, array_MD, may_be_wider=True)
            if array_MD.dtype != array_dtype(column.dtype):
                wide_MD, array_MD = array_MD, np.empty(array_MD.shape, array_dtype(column.dtype))
                widened.append(Join((array_MD,), (1,), wide_MD))
            if is_of_floats(parts, index) and (index == 0 or array_MD.shape[1] == len(floats)):
                for part in near:
                    columns[part.name].append(_floats_of(part, index, floats, array_MD))
            elif len(near) == 1:
                columns[near[0].name].append(Into(index, slice(0, column.width), array_MD))
            else:
                own = tuple(np.empty_like(array_MD) for _ in near)
                for part, part_MD in zip(near, own, strict=True):
                    columns[part.name].append(Into(index, slice(0, column.width), part_MD))
                joins.append(Join(own, tuple(_shared(p, floats) for p in near), array_MD))
        for part in near:
            found.setdefault(part.name, []).append(
                Destination(one.shard, tuple(columns[part.name]), one.words_W)
            )
    return found, [*joins, *widened]


def _shared(part: TableSchema, floats: range) -> int:
    return min(part.start + part.width, floats.stop) - max(part.start, floats.start)


def _floats_of(part: TableSchema, index: int, floats: range, array_MD: np.ndarray) -> Into:
    """The floats that a stored cut and a table held have in common."""
    lo, hi = max(part.start, floats.start), min(part.start + part.width, floats.stop)
    into_MD = array_MD[:, lo - floats.start : hi - floats.start]
    return Into(index, slice(lo - part.start, hi - part.start), into_MD)
