"""Extraction: moves the versions that new checkpoints replaced out of the live row of the grid.

    new increments -> ids they replaced -> chunks worth it -> bundles -> one commit -> deletion

A round takes every increment that came since the last one. It reads ids and filters of the chunks
alive, decides chunk by chunk (decide.py), and writes at most three objects: a bundle of what stays
alive, a bundle of what was extracted, and the deletion vectors of what was left where it is. One
commit swaps old chunks for new; objects that hold nothing alive any more are deleted after it.

Invariants:
- Of a base and of a rollup nothing is read or moved: a grid is what was born above them.
- Until its commit a round touches nothing that exists; a crash leaves objects that the next writer
  deletes.
- Chunks move as codes (Segment.take): nothing is decoded and encoded again.
- Memory: one chunk, the ids the new increments touched, the deletion vectors, and filters and ids
  of chunks as far as the rules allow.
- What a save commits meanwhile stays: the swap is made to the catalog as it is then, or not at all.

Not here: when rounds run (extractor.py), the rules (decide.py).

# N rows of a chunk, K ids an increment touched
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.checkpoint.format import deletion_vectors
from holdfast.checkpoint.format.catalog import Catalog, GridEntry, SegmentEntry
from holdfast.checkpoint.format.checksum import checksum
from holdfast.checkpoint.format.deletion_vectors import NO_DELETIONS, DeletionVector
from holdfast.checkpoint.format.object import DELETION_VECTORS, ROWS, Extent, ObjectBuilder
from holdfast.checkpoint.format.segment import EncodedSegment
from holdfast.checkpoint.grid.chunk_cache import PartCache
from holdfast.checkpoint.grid.decide import (
    Extract,
    choose_threshold,
    plan_moves,
    plan_split,
    rows_allowed,
)
from holdfast.checkpoint.restoring import fetch
from holdfast.checkpoint.store.writer import RunWriter, store_segment
from holdfast.kernels.rows import bloom
from holdfast.kernels.segments import deaths
from holdfast.model.schema import TableSchema

LIVE, EXTRACTED = "live", "extracted"  # bundles: row 0 of the grid, and the row a round adds


@dataclass(frozen=True, slots=True)
class RoundStats:
    """What a round did; chunks are counted where they were decided."""

    step: int
    chunks: int = 0
    by_range: int = 0
    by_filter: int = 0
    by_ratio: int = 0
    extracted: int = 0
    closed: int = 0
    moved: int = 0
    rows: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    deleted_rows: int = 0
    garbage_bytes: int = 0
    seconds: float = 0.0
    wait_s: float = 0.0


def next_grid(catalog: Catalog) -> tuple[GridEntry, list[int]] | None:
    """The oldest grid that increments wait for, and when those were born."""
    for grid in catalog.grids:
        born = {
            segment.born
            for segment in catalog.segments
            if segment.born > grid.through and (grid.end is None or segment.born < grid.end)
        }
        if born:
            return grid, sorted(born)
    return None


@dataclass(frozen=True, slots=True)
class _Swap:
    """One chunk's replacement: none where it is only closed or dropped."""

    old: SegmentEntry
    new: tuple[SegmentEntry, ...]


@dataclass(frozen=True, slots=True)
class _New:
    """What new increments replaced of older versions, and the rows of the largest of them."""

    replaced: DeletionVector
    rows: int


class _Updates:
    """What new increments brought for one table: (birth, ids) each, oldest first."""

    def __init__(
        self, schema: TableSchema, ids: Sequence[tuple[int, np.ndarray]], threshold: float
    ) -> None:
        self.schema = schema
        self.threshold = threshold
        self._ids = ids
        self._births = [born for born, _ in ids]
        self._known: dict[tuple[int, int], _New] = {}

    def since(self, entry: SegmentEntry) -> _New | None:
        """What replaced versions of a chunk; None if nothing came while it lived."""
        lo = bisect.bisect_right(self._births, entry.born)
        hi = len(self._ids) if entry.died is None else bisect.bisect_left(self._births, entry.died)
        if lo >= hi:
            return None
        if (lo, hi) not in self._known:
            replaced = deletion_vectors.join(
                DeletionVector(ids_K, np.full(len(ids_K), born, np.int64))
                for born, ids_K in self._ids[lo:hi]
            )
            rows = max(len(ids_K) for _, ids_K in self._ids[lo:hi])
            self._known[lo, hi] = _New(replaced, rows)
        return self._known[lo, hi]


class Round:
    """One round of extraction over one grid, planned on one catalog."""

    def __init__(
        self,
        writer: RunWriter,
        catalog: Catalog,
        rules: Extract,
        *,
        cache: PartCache,
        pause: Callable[[], None],
    ) -> None:
        """``pause`` is called between chunks: it may wait, or raise to give the round up."""
        found = next_grid(catalog)
        assert found is not None
        self._grid, self._births = found
        self._writer = writer
        self._catalog = catalog
        self._rules = rules
        self._cache = cache
        self._pause = pause
        self._parts = fetch.PartReader(writer.storage)
        self._segments = fetch.SegmentReader(writer.storage)
        self._vectors = dict(fetch.read_deletion_vectors(writer.storage, self._grid))
        # Everything of this grid that was not dead before the new increments came, by table.
        self._segments_of: dict[str, list[SegmentEntry]] = defaultdict(list)
        self._born_with: dict[tuple[str, int], list[SegmentEntry]] = defaultdict(list)
        rollup, end, first = self._grid.rollup, self._grid.end, self._births[0]
        for s in catalog.segments:
            if (
                (s.died is None or s.died > first)
                and s.born > rollup
                and (end is None or s.born < end)
            ):
                self._segments_of[s.table].append(s)
                self._born_with[s.table, s.born].append(s)
        cache.keep_only({s.extent for found in self._segments_of.values() for s in found})
        self._swaps: list[_Swap] = []
        self._moves: dict[Extent, Extent] = {}
        self._objects: list[tuple[str, int]] = []
        self._bundles: dict[str, ObjectBuilder] = {}
        self._open = contextlib.ExitStack()
        self._counts: Counter[str] = Counter()
        self._wait_s = 0.0

    def run(self) -> RoundStats | None:
        """Carry the round out and commit it; None if the run changed so much that it is void."""
        started = time.perf_counter()
        is_committed = False
        try:
            with self._open:
                self._extract()
                self._move_from_garbage()
                self._close_bundles()
            vectors = self._store_vectors()
            is_committed = self._writer.update(lambda now: self._apply(now, vectors)) is not None
        finally:
            named = {name for name, _ in self._writer.catalog.objects}
            self._writer.forget(name for name, _ in self._objects if name not in named)
        if not is_committed:
            return None
        seconds = time.perf_counter() - started
        return RoundStats(
            step=self._births[-1], seconds=seconds, wait_s=self._wait_s, **self._counts
        )

    def _wait(self) -> None:
        started = time.perf_counter()
        self._pause()
        self._wait_s += time.perf_counter() - started

    def _count(self, **more: int) -> None:
        self._counts.update(more)

    # Which chunks the new increments replaced rows of.

    def _tables(self) -> list[TableSchema]:
        catalog = self._catalog
        entry = next(e for e in reversed(catalog.checkpoints) if catalog.grid_of(e) == self._grid)
        return list(catalog.schema_of(entry))

    def _extract(self) -> None:
        """Look at every chunk, oldest birth first.

        So chunks lie in their bundle in the order of their births, and what a restore of a step
        reads of it, the chunks born until then, is one piece.
        """
        updates = {}
        for schema in self._tables():
            found = self._read_updates(schema)
            if found is not None:
                updates[schema.name] = found
        chunks = [s for name in updates for s in self._segments_of[name]]
        for entry in sorted(chunks, key=lambda s: s.born):
            self._wait()
            self._extract_chunk(entry, updates[entry.table])

    def _read_updates(self, schema: TableSchema) -> _Updates | None:
        fresh: dict[int, list[SegmentEntry]] = {born: [] for born in self._births}
        for s in self._segments_of[schema.name]:
            if s.born in fresh:
                fresh[s.born].append(s)
        sizes = [sum(s.extent.bytes for s in parts) for parts in fresh.values() if parts]
        if not sizes:
            return None
        threshold = self._rules.threshold
        if threshold is None:
            threshold = choose_threshold(sum(sizes) / len(sizes))
        ids = [
            (born, np.sort(np.concatenate([self._cache.ids(self._parts, s) for s in parts])))
            for born, parts in fresh.items()
            if parts
        ]
        return _Updates(schema, ids, threshold)

    def _extract_chunk(self, entry: SegmentEntry, table: _Updates) -> None:
        """Take a chunk through the three stages, and extract it if it passes all."""
        new = table.since(entry)
        if new is None:
            return
        self._counts["chunks"] += 1
        rules, replaced = self._rules, new.replaced
        lo, hi = np.searchsorted(replaced.ids_N, (entry.first, entry.last + 1))
        if rules.by_range and lo == hi:
            self._counts["by_range"] += 1
            return
        key = (entry.table, entry.born)
        known = self._vectors.get(key, NO_DELETIONS)
        allowed = rows_allowed(table.threshold, entry.rows, new.rows)
        if rules.by_filter and not self._cache.has_ids(entry):
            near = DeletionVector(replaced.ids_N[lo:hi], replaced.deaths_N[lo:hi])
            if self._is_passed_over(entry, known, near, allowed):
                self._counts["by_filter"] += 1
                return
        ids_N, inner_N = self._cache.ids_and_deaths(self._parts, entry)
        deaths_N = np.full(len(ids_N), -1, np.int64) if inner_N is None else inner_N.copy()
        deaths.mark_deaths(ids_N, known.ids_N, known.deaths_N, deaths_N)
        if not deaths.mark_deaths(ids_N, replaced.ids_N, replaced.deaths_N, deaths_N):
            self._counts["by_ratio"] += 1
            return
        is_dead_N = deaths_N >= 0
        dead = np.count_nonzero(is_dead_N)
        if rules.by_ratio and dead <= allowed and dead < entry.rows:
            exact = DeletionVector(ids_N[is_dead_N], deaths_N[is_dead_N])
            self._vectors[key] = self._replaced(known, entry, ids_N, exact)
            self._counts["by_ratio"] += 1
            return
        self._vectors[key] = self._replaced(known, entry, ids_N, NO_DELETIONS)
        self._split(entry, table.schema, ids_N, deaths_N, allowed, may_close=inner_N is None)

    def _is_passed_over(
        self, entry: SegmentEntry, known: DeletionVector, near: DeletionVector, allowed: float
    ) -> bool:
        """Whether a chunk's filter says that too few of its rows are dead; those are noted."""
        words_W = self._cache.filter(self._parts, entry)
        if words_W is None:
            return False
        is_hit_K = bloom.has(words_W, near.ids_N)
        hits = DeletionVector(near.ids_N[is_hit_K], near.deaths_N[is_hit_K])
        vector = deletion_vectors.join([known, hits])
        before, count = (
            int(np.diff(np.searchsorted(one.ids_N, (entry.first, entry.last + 1)))[0])
            for one in (known, vector)
        )
        if count != before and (count > allowed or count >= entry.rows):
            return False
        self._vectors[entry.table, entry.born] = vector
        return True

    def _replaced(
        self, known: DeletionVector, entry: SegmentEntry, ids_N: np.ndarray, exact: DeletionVector
    ) -> DeletionVector:
        """A vector with other deletions of one chunk's rows, without its filter's false hits."""
        if self._has_siblings(entry):
            is_other_N = ~np.isin(known.ids_N, ids_N, assume_unique=True)
            others = DeletionVector(known.ids_N[is_other_N], known.deaths_N[is_other_N])
            return deletion_vectors.join([others, exact])
        lo, hi = np.searchsorted(known.ids_N, (entry.first, entry.last + 1))
        if hi - lo == len(known):
            return exact
        return DeletionVector(
            np.concatenate([known.ids_N[:lo], exact.ids_N, known.ids_N[hi:]]),
            np.concatenate([known.deaths_N[:lo], exact.deaths_N, known.deaths_N[hi:]]),
        )

    def _has_siblings(self, entry: SegmentEntry) -> bool:
        """Whether another chunk of the same birth lies in the same range of ids.

        Rows divided among servers make such, and going back in time, which brings extracted rows to
        life again.
        """
        return any(
            s is not entry and s.first <= entry.last and entry.first <= s.last
            for s in self._born_with[entry.table, entry.born]
        )

    # Moving rows.

    def _split(
        self,
        entry: SegmentEntry,
        schema: TableSchema,
        ids_N: np.ndarray,
        deaths_N: np.ndarray,
        allowed: float,
        *,
        may_close: bool,
    ) -> None:
        split = plan_split(deaths_N, born=entry.born, kept=self._catalog.steps, allowed=allowed)
        cells = split.cells
        is_whole = len(cells) == 1 and len(cells[0].positions_N) == entry.rows
        if may_close and is_whole and cells[0].deaths_N is None:
            # All of it died at once: nothing needs to move.
            closed = dataclasses.replace(entry, died=cells[0].died)
            self._swaps.append(_Swap(entry, (closed,)))
            self._counts["closed"] += 1
            return
        if not cells and not len(split.alive_N):
            self._swaps.append(_Swap(entry, ()))
            self._counts["closed"] += 1
            return
        segment = self._segments.read(entry, schema)
        self._count(read_bytes=entry.extent.bytes)
        new = []
        if len(split.alive_N):
            taken = segment.take(split.alive_N, has_filter=True, deaths_K=None)
            new.append(self._append(LIVE, entry, taken, died=entry.died))
            self._cache.note_ids(new[0], ids_N[split.alive_N])
        for cell in cells:
            taken = segment.take(cell.positions_N, deaths_K=cell.deaths_N)
            new.append(self._append(EXTRACTED, entry, taken, died=cell.died))
            self._count(rows=taken.rows)
        self._swaps.append(_Swap(entry, tuple(new)))
        self._counts["extracted"] += 1

    def _append(
        self, bundle: str, old: SegmentEntry, encoded: EncodedSegment, *, died: int | None
    ) -> SegmentEntry:
        with self._bundle(bundle) as builder:
            entry = store_segment(builder, encoded, table=old.table, born=old.born, died=died)
        self._count(written_bytes=entry.extent.bytes)
        return entry

    @contextlib.contextmanager
    def _bundle(self, kind: str) -> Iterator[ObjectBuilder]:
        """Where the next chunk goes: a bundle that stays open, or an object of its own."""
        if not self._rules.bundles:
            with self._writer.new_object(kind) as builder:
                yield builder
                self._objects.append((builder.name, builder.close()))
            return
        if kind not in self._bundles:
            self._bundles[kind] = self._open.enter_context(self._writer.new_object(kind))
        yield self._bundles[kind]

    def _close_bundles(self) -> None:
        for builder in self._bundles.values():
            self._objects.append((builder.name, builder.close()))

    def _move_from_garbage(self) -> None:
        """Copy what still lives in objects that are mostly garbage, so that those can go."""
        replaced = {swap.old.extent: swap for swap in self._swaps}
        planned = [
            new
            for s in self._catalog.segments
            for new in (replaced[s.extent].new if s.extent in replaced else (s,))
        ]
        sizes = dict(self._catalog.objects)
        # What this round wrote, and what belongs to a base or a rollup, stays where it is.
        below = {entry.base for entry in self._catalog.checkpoints}
        below |= {grid.rollup for grid in self._catalog.grids}
        here = [s for s in planned if s.extent.object in sizes]
        pinned = {s.extent.object for s in here if s.born in below}
        for entry in sorted(plan_moves(sizes, here, pinned=pinned), key=lambda s: s.born):
            self._wait()
            data = self._segments.read_bytes(entry)
            bundle = LIVE if entry.died in (None, self._grid.end) else EXTRACTED
            with self._bundle(bundle) as builder:
                extent = builder.append(ROWS, entry.table, (data,), entry.extent.checksum)
            self._moves[entry.extent] = extent
            self._count(moved=1, read_bytes=extent.bytes, written_bytes=extent.bytes)

    def _store_vectors(self) -> Extent | None:
        living = {(s.table, s.born) for s in self._catalog.segments}
        self._vectors = {
            k: vector for k, vector in self._vectors.items() if k in living and len(vector)
        }
        self._count(deleted_rows=sum(len(vector) for vector in self._vectors.values()))
        if not self._vectors:
            return None
        data = deletion_vectors.to_bytes(self._vectors)
        with self._writer.new_object(DELETION_VECTORS) as builder:
            extent = builder.append(DELETION_VECTORS, "kills", (data,), checksum(data))
            self._objects.append((builder.name, builder.close()))
        self._count(written_bytes=extent.bytes)
        return extent

    # The commit.

    def _apply(self, now: Catalog, vectors: Extent | None) -> Catalog | None:
        """The run's catalog with this round's chunks; None where they no longer fit it."""
        grid = next((g for g in now.grids if g.rollup == self._grid.rollup), None)
        if (
            grid is None
            or grid.through != self._grid.through
            or now.rewinds != (self._catalog.rewinds)
        ):
            return None
        swaps = {swap.old.extent: swap for swap in self._swaps}
        touched = {extent.object for extent in (*swaps, *self._moves)}
        segments: list[SegmentEntry] = []
        for current in now.segments:
            if current.extent.object not in touched:  # most, and cheaper than looking up extents
                segments.append(current)
                continue
            swap = swaps.get(current.extent)
            for new in (current,) if swap is None else _carried_over(swap, current):
                extent = self._moves.get(new.extent, new.extent)
                is_same = extent == new.extent
                segments.append(new if is_same else dataclasses.replace(new, extent=extent))
        swapped = dataclasses.replace(
            now, segments=tuple(segments), objects=(*now.objects, *self._objects)
        )
        moved_on = dataclasses.replace(grid, through=self._births[-1], deletion_vectors=vectors)
        result = swapped.with_grid(moved_on).without_dead()
        living = sum(s.extent.bytes for s in result.segments)
        rows_in = {s.extent.object for s in result.segments}
        stored = sum(size for name, size in result.objects if name in rows_in)
        self._counts["garbage_bytes"] = stored - living
        return result


def _carried_over(swap: _Swap, current: SegmentEntry) -> tuple[SegmentEntry, ...]:
    """A chunk's replacement, where a new base or rollup may have ended the chunk meanwhile."""
    if current.died == swap.old.died:
        return swap.new
    return tuple(
        dataclasses.replace(new, died=current.died) if new.died == swap.old.died else new
        for new in swap.new
    )
