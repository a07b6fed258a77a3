"""Diff: which rows changed between two steps, and how much.

    candidates (rows that may differ) -> both versions, piece by piece -> compare -> add up

Over one base only rows of segments that one of the steps reads and the other does not can differ:
their ids are read first, without rows. Across bases every row may differ, and tables are compared
whole.

Invariants:
- Exact: a row counts as changed exactly when a bit of it differs, also between NaNs and zeros.
- Nothing is written; memory is one bit a row of one table and a few times
  ``PIECE_BYTES``.

Not here: printing (cli/commands/diff.py).

# N rows of a piece, D floats of one column
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from holdfast.checkpoint.format.catalog import Catalog
from holdfast.checkpoint.restoring import fetch, restore
from holdfast.checkpoint.run import Run
from holdfast.errors import InvalidRequestError, NotFoundError
from holdfast.kernels.rows import bitmap
from holdfast.model.dtypes import as_bits
from holdfast.model.schema import TableSchema

PIECE_BYTES = 16 << 20  # of rows of one step, at a time


@dataclass(frozen=True, slots=True)
class RowChange:
    """How far one row's weights moved (L2); infinite where that is not a number."""

    row: int
    l2: float
    before: float
    """The row's own length at the earlier step."""


@dataclass(frozen=True, slots=True)
class TableDiff:
    """What became of one table; lengths are of the weights' change, over changed rows."""

    table: str
    rows: int
    rewritten: int
    """Rows of which the later step reads another stored version than the earlier one."""
    changed: int
    l2_mean: float
    l2_max: float
    not_finite: int
    """Changed rows whose change has no length, because of NaN or infinity; not in the mean."""
    state_changed: tuple[tuple[str, int], ...]
    """By column of row state: rows that differ."""
    top: tuple[RowChange, ...]

    @property
    def share(self) -> float:
        """Changed rows, of all."""
        return self.changed / self.rows if self.rows else 0.0


@dataclass(frozen=True, slots=True)
class StepDiff:
    """What changed from step ``a`` to step ``b`` (``a`` <= ``b``)."""

    a: int
    b: int
    is_swapped: bool
    is_across_bases: bool
    tables: tuple[TableDiff, ...]
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    """Tables that only one of the steps has, or whose weights have another shape in it."""

    @property
    def changed(self) -> int:
        """Changed rows of all tables."""
        return sum(table.changed for table in self.tables)


def diff_steps(
    run: Run,
    a: int,
    b: int,
    tables: Sequence[str] | None = None,
    *,
    top: int = 10,
    on_table: Callable[[int, int], None] = lambda done, total: None,
) -> StepDiff:
    """Compare two steps, in either order; ``tables`` None: all. The ``top`` most moved rows each.

    Raises:
        NotFoundError: no such step or table; lists those that exist.
        InvalidRequestError: a table that was asked for has another shape at the other step.
        CorruptDataError: a stored byte that was read is damaged.
    """
    is_swapped = a > b
    a, b = min(a, b), max(a, b)
    at = {step: {t.name: t for t in run.tables(step)} for step in (a, b)}
    wanted = _choose(at[a], at[b], tables)
    is_across = run.catalog.checkpoint(a).base != run.catalog.checkpoint(b).base
    found = []
    for done, name in enumerate(wanted):
        on_table(done, len(wanted))
        found.append(_diff_table(run, a, b, at[a][name], at[b][name], is_across, top))
    on_table(len(wanted), len(wanted))
    return StepDiff(
        a=a,
        b=b,
        is_swapped=is_swapped,
        is_across_bases=is_across,
        tables=tuple(found),
        only_in_a=() if tables is not None else tuple(n for n in at[a] if n not in wanted),
        only_in_b=() if tables is not None else tuple(n for n in at[b] if n not in wanted),
    )


def _choose(
    before: dict[str, TableSchema], after: dict[str, TableSchema], tables: Sequence[str] | None
) -> list[str]:
    """The tables to compare, in the order of the later step."""

    def is_same(name: str) -> bool:
        old, new = before.get(name), after.get(name)
        return (
            old is not None
            and new is not None
            and (old.rows, old.columns[0]) == (new.rows, new.columns[0])
        )

    if tables is None:
        return [name for name in after if is_same(name)]
    for name in tables:
        if name not in before and name not in after:
            raise NotFoundError("no such table", table=name, tables=list(after))
        if not is_same(name):
            raise InvalidRequestError(
                "the two steps have this table in different shapes", table=name
            )
    return list(dict.fromkeys(tables))


def _diff_table(
    run: Run, a: int, b: int, old: TableSchema, new: TableSchema, is_across: bool, top: int
) -> TableDiff:
    common = [c for c in new.columns[1:] if c in old.columns[1:]]
    sums = _Sums(top, {column.name: 0 for column in common})
    restore.check_complete(run.catalog, a)  # before a lying row count costs memory
    restore.check_complete(run.catalog, b)
    row_bytes = max(schema.row_bytes for schema in (old, new))
    piece = max(1, PIECE_BYTES // row_bytes)
    if new.rows <= 4 * piece:  # then a read of a piece takes the whole table anyway
        piece = max(1, new.rows)
    pieces = _ranges(new.rows, piece) if is_across else _may_differ(run, a, b, new, piece)
    for ids_N in pieces:
        before = run.read(a, new.name, ids_N)
        after = run.read(b, new.name, ids_N)
        sums.add(ids_N, before.weight, after.weight)
        for column in common:
            sums.add_state(column.name, before.state[column.name], after.state[column.name])
    return sums.result(new)


def _ranges(rows: int, piece: int) -> Iterator[np.ndarray]:
    for start in range(0, rows, piece):
        yield np.arange(start, min(rows, start + piece))


def _may_differ(run: Run, a: int, b: int, schema: TableSchema, piece: int) -> Iterator[np.ndarray]:
    """The rows whose version at ``b`` may be another than at ``a``, ascending, a piece at a time.

    Those of segments that only one of the two steps reads: any other row has the same version.
    """

    def read(catalog: Catalog) -> np.ndarray:
        names = {part.name for part in run.stored(b, schema.name)}
        segments = [
            s for s in catalog.segments if s.table in names and s.is_alive(a) != s.is_alive(b)
        ]
        fetch.check_objects(run.storage, catalog, (s.extent for s in segments))
        parts = fetch.PartReader(run.storage)
        found = bitmap.new(schema.rows)
        for entry in segments:
            bitmap.mark(found, parts.ids(entry), schema.rows)
        return found

    is_born = run.settled(read)
    for lo, hi in itertools.pairwise(bitmap.split(is_born, piece).tolist()):
        yield bitmap.ids(is_born, lo, hi)


@dataclass(slots=True)
class _Sums:
    """What the pieces of one table add up to."""

    top: int
    state: dict[str, int]
    rewritten: int = 0
    changed: int = 0
    l2_sum: float = 0.0
    l2_max: float = 0.0
    not_finite: int = 0
    largest: list[tuple[float, int, float]] = field(default_factory=list)

    def add(self, ids_N: np.ndarray, before_ND: np.ndarray, after_ND: np.ndarray) -> None:
        """Compare the weights of one piece."""
        self.rewritten += len(ids_N)
        at_K = np.flatnonzero(_differs(before_ND, after_ND))
        self.changed += len(at_K)
        if not len(at_K):
            return
        old_KD = before_ND[at_K].astype(np.float64)
        with np.errstate(all="ignore"):  # what is not finite is counted, not warned about
            l2_K = np.sqrt(((after_ND[at_K] - old_KD) ** 2).sum(axis=1))
            own_K = np.sqrt((old_KD**2).sum(axis=1))
        is_finite_K = np.isfinite(l2_K)
        self.not_finite += int((~is_finite_K).sum())
        l2_K = np.where(is_finite_K, l2_K, np.inf)
        if is_finite_K.any():
            self.l2_sum += float(l2_K[is_finite_K].sum())
            self.l2_max = max(self.l2_max, float(l2_K[is_finite_K].max()))
        ids_K = ids_N[at_K]
        # Of equal changes the lowest rows are shown, so that the answer is always the same.
        for at in np.lexsort((ids_K, -l2_K))[: self.top]:
            item = (float(l2_K[at]), -int(ids_K[at]), float(own_K[at]))
            if len(self.largest) < self.top:
                heapq.heappush(self.largest, item)
            else:
                heapq.heappushpop(self.largest, item)

    def add_state(self, name: str, before_ND: np.ndarray, after_ND: np.ndarray) -> None:
        """Compare one column of row state of one piece."""
        self.state[name] += int(_differs(before_ND, after_ND).sum())

    def result(self, schema: TableSchema) -> TableDiff:
        """The sums as values."""
        finite = self.changed - self.not_finite
        return TableDiff(
            table=schema.name,
            rows=schema.rows,
            rewritten=self.rewritten,
            changed=self.changed,
            l2_mean=self.l2_sum / finite if finite else 0.0,
            l2_max=self.l2_max,
            not_finite=self.not_finite,
            state_changed=tuple(self.state.items()),
            top=tuple(
                RowChange(-row, l2, own) for l2, row, own in sorted(self.largest, reverse=True)
            ),
        )


def _differs(before_ND: np.ndarray, after_ND: np.ndarray) -> np.ndarray:
    """Which rows differ in any bit."""
    bits = (as_bits(np.ascontiguousarray(rows_ND)) for rows_ND in (before_ND, after_ND))
    differs_N: np.ndarray = operator.ne(*bits).any(axis=1)
    return differs_N
