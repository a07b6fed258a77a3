"""Every row once: what segments claim to hold, checked from the ids that a restore reads.

A restore writes segments in layers, inside a layer in any order (restore.py). That gives the right
rows only if no row of a layer comes twice, if every row that is left out as dead is there in a
newer version, and if the base holds every row. A catalog proves the first and the last by itself
where the ranges of ids of a table's segments do not meet. Where they do (rows of servers lie
between each other, chunks of a grid over each other), it is noted for every row when the version
was born that was placed, and which versions were left out; that is compared when the layer is done.

Invariants:
- What a restore returns without an error was written, row by row, exactly once in each layer.
- Births are noted without a lock: two threads write to one row only if it is stored twice, and then
  more rows were placed than are noted.

Not here: what else a catalog may claim (checkpoint/format/claims.py), lifetimes over all steps
(checkpoint/verify.py).

# S segments, M rows held, T tables
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from holdfast.checkpoint.format.catalog import SegmentEntry
from holdfast.checkpoint.restoring.destination import Destination, Destinations
from holdfast.errors import CorruptDataError, DataLossError
from holdfast.kernels.segments.scatter import Placed

_TODO = "run 'holdfast verify', and restore another step"


def do_ranges_meet(segments: Sequence[SegmentEntry]) -> bool:
    """Whether the ranges of ids of some segments of one table overlap.

    >>> from holdfast.checkpoint.format.object import Extent
    >>> at = Extent("o", 16, 8, 0)
    >>> one, other = (SegmentEntry("t", 0, None, 2, a, a + 3, at) for a in (0, 4))
    >>> do_ranges_meet([other, one]), do_ranges_meet([one, one])
    (False, True)
    """
    first_S, last_S = np.array([(s.first, s.last) for s in segments], np.int64).reshape(-1, 2).T
    order_S = np.argsort(first_S)
    return bool((first_S[order_S][1:] <= last_S[order_S][:-1]).any())


def unproven_tables(segments: Sequence[SegmentEntry]) -> frozenset[str]:
    """The tables of which the catalog alone does not prove that no row comes twice."""
    by_table: dict[str, list[SegmentEntry]] = {}
    for segment in segments:
        by_table.setdefault(segment.table, []).append(segment)
    return frozenset(table for table, found in by_table.items() if do_ranges_meet(found))


class RowCheck:
    """Notes of one layer: when the version was born that was placed, for each row of some tables,
    and which rows were left out as dead."""

    def __init__(
        self,
        destinations: Destinations,
        segments: Sequence[SegmentEntry],
        tables: Collection[str],
        only: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """``tables``: those that are noted; ``only``: by table the rows that the segments of the
        layer may hold; None: any."""
        self._tables = list(destinations)
        self._only = only
        self._births = {born: at for at, born in enumerate(sorted({s.born for s in segments}), 1)}
        self._lock = threading.Lock()
        self._notes: dict[tuple[str, int], _Notes] = {
            (table, place): _Notes(destination)
            for table in tables
            for place, destination in enumerate(destinations.get(table, ()))
        }

    def birth_of(self, entry: SegmentEntry) -> int:
        """The place of a segment's birth among those of the layer, from 1 on."""
        return self._births[entry.born]

    def addresses(self) -> np.ndarray:
        """Where the kernel notes births, by table; it serves tables with one destination."""
        notes = [self._notes.get((table, 0)) for table in self._tables]
        return np.array([0 if n is None else n.births_M.ctypes.data for n in notes], np.int64)

    def add(self, entries: Sequence[SegmentEntry], placed: Placed) -> None:
        """What the kernel did with some segments."""
        end = 0
        for entry, count, dead in zip(
            entries, placed.placed_S.tolist(), placed.dead_S.tolist(), strict=True
        ):
            if count or dead:
                dead_K = placed.dead_K[end : end + dead]
                end += dead
                self._add(self._notes[entry.table, 0], entry, count, dead_K)

    def note(
        self, entry: SegmentEntry, place: int, local_N: np.ndarray, dead_N: np.ndarray | None
    ) -> None:
        """Rows of a segment for one destination, by their local numbers (-1: not held)."""
        notes = self._notes.get((entry.table, place))
        if notes is None:
            return
        is_held_N = local_N >= 0
        is_placed_N = is_held_N if dead_N is None else is_held_N & ~dead_N
        notes.births_M[local_N[is_placed_N]] = self.birth_of(entry)
        dead_K = local_N[is_held_N & ~is_placed_N]
        self._add(notes, entry, int(np.count_nonzero(is_placed_N)), dead_K)

    def _add(self, notes: _Notes, entry: SegmentEntry, count: int, dead_K: np.ndarray) -> None:
        with self._lock:
            notes.placed += count
            if len(dead_K):
                notes.dead.append((self.birth_of(entry), dead_K))

    def check(self, *, is_base: bool) -> None:
        """Compare the notes, when the layer is done.

        Raises:
            CorruptDataError: a row came twice, one was left out although no newer version was
                placed, or one has no place in this layer.
            DataLossError: a row of the base is nowhere.
        """
        for (table, _), notes in self._notes.items():
            notes.check(table, None if self._only is None else self._only[table], is_base=is_base)


class _Notes:
    """The births of the rows that one destination holds of one table (0: none was placed), and the
    rows that were left out, with the births of what was left out."""

    def __init__(self, destination: Destination) -> None:
        self._shard = destination.shard
        self.births_M = np.zeros(self._shard.local_rows, np.int32)
        self.dead: list[tuple[int, np.ndarray]] = []
        self.placed = 0

    def check(self, table: str, only: np.ndarray | None, *, is_base: bool) -> None:
        placed = np.count_nonzero(self.births_M)
        if self.placed != placed:
            raise CorruptDataError("a row is stored twice", table=table, todo=_TODO)
        if any((self.births_M[dead_K] <= birth).any() for birth, dead_K in self.dead):
            raise CorruptDataError(
                "a row is said to be dead that no newer version replaces", table=table, todo=_TODO
            )
        wanted = len(self.births_M)
        if only is not None:
            local_K = self._shard.local_of(only)
            local_K = local_K[local_K >= 0]
            wanted = len(local_K)
            if placed != np.count_nonzero(self.births_M[local_K]):
                raise CorruptDataError(
                    "a segment of one server holds rows of another", table=table, todo=_TODO
                )
        if is_base and placed != wanted:
            raise DataLossError(
                "the base does not hold every row", table=table, rows=wanted - placed, todo=_TODO
            )
