"""Lifetimes of row versions: whether what segments and deletion vectors say of them fits together.

A version of a row lives from the checkpoint it was born at to the one that replaced it. A restore
of a step reads the versions that live then, and there are two ways to find them: newest birth first
(a read of some rows), or all at once with the dead ones left out (a restore of a whole table). Both
give the same rows only if the lifetimes of a row's versions follow each other without an overlap
and without a gap, at every step that is kept. ``verify`` collects the ids of all segments here.

Invariants, of a run that is sound:
- A version is stored once: segments of one table and birth have no row in common.
- A row never goes back to an older version: when the segment dies that holds its newest one, a
  segment with a newer one is there at the next kept step (a new base apart).
- In a grid, as far as it is worked off, every row has at most one living version at each kept step;
  a version dies exactly when the next one of its row is born, as far as kept steps can tell; the
  last one does not die.

Of every version that must be compared 16 bytes are kept; they are compared some rows at a time.

Not here: one restore's own check of what it reads (row_check.py).

# S segments, N versions, K kept steps
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.checkpoint.format import deletion_vectors
from holdfast.checkpoint.format.catalog import Catalog, GridEntry, SegmentEntry
from holdfast.checkpoint.format.deletion_vectors import DeletionVectors
from holdfast.checkpoint.restoring.fetch import deaths_of
from holdfast.checkpoint.restoring.row_check import do_ranges_meet

_EVER = np.iinfo(np.int64).max
_VERSIONS_AT_ONCE = 1 << 19  # comparing takes about 100 bytes for each


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Something that cannot be true of a table's versions, and the steps it concerns."""

    table: str
    error: str
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Versions:
    """The rows of a segment and the step each died at."""

    entry: SegmentEntry
    ids_N: np.ndarray
    deaths_N: np.ndarray


class Lifetimes:
    """The versions of a run, collected segment by segment; only those are kept that are needed."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._kept = catalog.steps
        by_birth: dict[tuple[str, int], list[SegmentEntry]] = {}
        for segment in catalog.segments:
            by_birth.setdefault((segment.table, segment.born), []).append(segment)
        self._meeting: dict[tuple[str, int], list[_Versions]] = {
            key: [] for key, found in by_birth.items() if do_ranges_meet(found)
        }
        self._steps: dict[GridEntry, list[int]] = {}
        for entry in catalog.checkpoints:
            grid = catalog.grid_of(entry)
            if grid is not None:
                self._steps.setdefault(grid, []).append(entry.step)
        self._in_grid: dict[GridEntry, dict[str, list[_Versions]]] = {}
        self._base_steps: dict[int, list[int]] = {}
        for entry in catalog.checkpoints:
            self._base_steps.setdefault(entry.base, []).append(entry.step)
        self._over_base: dict[tuple[int, str], list[_Versions]] = {}
        self._left_out: set[str] = set()
        for segment in catalog.segments:
            base = self._base_of(segment)
            if base is not None and not segment.is_alive(self._base_steps[base][-1]):
                self._over_base[base, segment.table] = []

    def add(self, entry: SegmentEntry, ids_N: np.ndarray, deaths_N: np.ndarray | None) -> None:
        """Note what a segment holds, and what it says itself of its rows' deaths."""
        meeting = self._meeting.get((entry.table, entry.born))
        grid = self._grid_of(entry)
        base = self._base_of(entry)
        over_base = None if base is None else self._over_base.get((base, entry.table))
        if grid is None and meeting is None and over_base is None:
            return
        own_N = deaths_of(entry, deaths_N)
        until_N = np.full(len(ids_N), _EVER if entry.died is None else entry.died)
        if own_N is not None:
            until_N = np.where(own_N >= 0, np.minimum(own_N, until_N), until_N)
        versions = _Versions(entry, ids_N, until_N)
        for found in (meeting, over_base):
            if found is not None:
                found.append(versions)
        if grid is not None:
            self._in_grid.setdefault(grid, {}).setdefault(entry.table, []).append(versions)

    def leave_out(self, table: str) -> None:
        """Say nothing of a table: a segment of it cannot be read, and that was told."""
        self._left_out.add(table)

    def _grid_of(self, entry: SegmentEntry) -> GridEntry | None:
        """The grid that has worked a segment off, if checkpoints of it are kept."""
        grids = self._catalog.grids
        at = bisect.bisect_left(grids, entry.born, key=operator.attrgetter("rollup"))
        if at == 0 or entry.born > grids[at - 1].through or grids[at - 1] not in self._steps:
            return None
        return grids[at - 1]

    def _base_of(self, entry: SegmentEntry) -> int | None:
        """The base that a segment lies over; None: it is of one, or no checkpoint reads it."""
        at = bisect.bisect_left(self._kept, entry.born)
        if at == len(self._kept):
            return None
        base = self._catalog.checkpoints[at].base
        return base if entry.born > base else None

    def stored_twice(self) -> Iterator[Contradiction]:
        """Tables and births of which some version is stored more than once."""
        for (table, born), held in sorted(self._meeting.items(), key=operator.itemgetter(0)):
            if table in self._left_out:
                continue
            twice = sum(map(_count_twice, _parts_of(held)))
            if twice:
                lo = bisect.bisect_left(self._kept, born)
                ends = [_EVER if v.entry.died is None else v.entry.died for v in held]
                readers = self._kept[lo : bisect.bisect_left(self._kept, max(ends))]
                error = f"{twice} rows born at step {born} are stored twice"
                yield Contradiction(table, error, readers)

    def gone_back(self) -> Iterator[Contradiction]:
        """Tables of which some row goes back to an older version, without a new base."""
        for (base, table), held in self._over_base.items():
            if table in self._left_out:
                continue
            steps = self._base_steps[base]
            rows = _count_gone_back(held, np.array(steps, np.int64))
            if rows:
                error = f"{rows} rows go back to an older version"
                yield Contradiction(table, error, tuple(steps))

    def broken(self, grid: GridEntry, vectors: DeletionVectors) -> Iterator[Contradiction]:
        """Tables of a grid whose versions overlap or leave a gap at a kept step."""
        steps = tuple(self._steps.get(grid, ()))
        for table, held in self._in_grid.get(grid, {}).items():
            if table in self._left_out:
                continue
            rows = _count_broken(held, vectors, np.array(steps, np.int64))
            if rows:
                error = (
                    f"{rows} rows have two versions, or none, at some step: "
                    "the deletion vectors contradict the segments"
                )
                yield Contradiction(table, error, steps)


def _parts_of(held: Sequence[_Versions]) -> Iterator[list[_Versions]]:
    """The versions of one table in parts: of some rows all versions, then of the next rows."""
    most = max(1, _VERSIONS_AT_ONCE // max(1, len(held)))
    samples = [versions.ids_N[::most] for versions in held]
    sample_N = np.sort(np.concatenate([np.empty(0, np.int64), *samples]))
    cuts = np.unique(sample_N[:: max(1, _VERSIONS_AT_ONCE // most)]).tolist()[1:]
    at_C = [np.searchsorted(versions.ids_N, cuts).tolist() for versions in held]
    for part in range(len(cuts) + 1):
        found = []
        for versions, at in zip(held, at_C, strict=True):
            lo = at[part - 1] if part else 0
            hi = at[part] if part < len(cuts) else len(versions.ids_N)
            if lo < hi:
                ids_N, deaths_N = versions.ids_N[lo:hi], versions.deaths_N[lo:hi]
                found.append(_Versions(versions.entry, ids_N, deaths_N))
        if found:
            yield found


def _count_twice(held: Sequence[_Versions]) -> int:
    """How many versions of one table and birth are there more than once."""
    ids_N = np.concatenate([versions.ids_N for versions in held])
    return len(ids_N) - len(np.unique(ids_N))


def _count_broken(held: Sequence[_Versions], vectors: DeletionVectors, steps_K: np.ndarray) -> int:
    """How many versions of one table end at another kept step than the next one begins."""
    count = 0
    for part in _parts_of(held):
        ends_N, needed_N = _ends(part, [_until(v, vectors) for v in part], steps_K)
        count += int(np.count_nonzero(ends_N != needed_N))
    return count


def _count_gone_back(held: Sequence[_Versions], steps_K: np.ndarray) -> int:
    """How many versions of one table leave with their segment before a newer one is there."""
    count = 0
    for part in _parts_of(held):
        died = [_EVER if v.entry.died is None else v.entry.died for v in part]
        deaths = [np.full(len(v.ids_N), at) for v, at in zip(part, died, strict=True)]
        ends_N, needed_N = _ends(part, deaths, steps_K)
        count += int(np.count_nonzero(ends_N < needed_N))
    return count


def _ends(
    held: Sequence[_Versions], deaths: Sequence[np.ndarray], steps_K: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """For every version of one table, in the order of rows and births: at which of the kept steps
    it ends, and at which the next version of its row begins (after the last step: there is none).

    A step between two kept ones counts as the next kept one: no reader can tell them apart.
    """
    ids_N = np.concatenate([v.ids_N for v in held])
    births_N = np.concatenate([np.full(len(v.ids_N), v.entry.born) for v in held])
    order_N = np.lexsort((births_N, ids_N))
    ids_N = ids_N[order_N]
    begins_N = np.searchsorted(steps_K, births_N[order_N])
    ends_N = np.searchsorted(steps_K, np.concatenate(deaths)[order_N])
    needed_N = np.full(len(ids_N), len(steps_K))
    is_followed_N = ids_N[1:] == ids_N[:-1]
    needed_N[:-1][is_followed_N] = begins_N[1:][is_followed_N]
    return ends_N, needed_N


def _until(versions: _Versions, vectors: DeletionVectors) -> np.ndarray:
    """The step each version dies at, by whatever says so first."""
    vector = vectors.get((versions.entry.table, versions.entry.born))
    if vector is None:
        return versions.deaths_N
    death_N = deletion_vectors.look_up(vector, versions.ids_N)
    return np.where(death_N >= 0, np.minimum(death_N, versions.deaths_N), versions.deaths_N)
