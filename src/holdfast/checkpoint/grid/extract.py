"""Extraction: moves the versions that new checkpoints replaced out of the live row of the grid.

    RoundPlan -> a ChunkPlan for each chunk (round_plan.py) -> bundles -> one commit -> deletion

A round takes every increment that came since the last one. It carries out what is planned, chunk by
chunk, and writes at most three objects: a bundle of what stays alive, a bundle of what was
extracted, and the deletion vectors of what was left where it is. One commit swaps old chunks for
new (swap.py); objects that hold nothing alive any more are deleted after it.

Invariants:
- Until its commit a round touches nothing that exists; a crash leaves objects that the next writer
  deletes.
- Chunks move as codes (Segment.take): nothing is decoded and encoded again.

Not here: when rounds run (extractor.py), what is moved (round_plan.py, decide.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from holdfast.checkpoint.format import deletion_vectors
from holdfast.checkpoint.format.catalog import Catalog, SegmentEntry
from holdfast.checkpoint.format.checksum import checksum
from holdfast.checkpoint.format.deletion_vectors import DeletionVector
from holdfast.checkpoint.format.object import DELETION_VECTORS, ROWS, Extent, ObjectBuilder
from holdfast.checkpoint.format.segment import EncodedSegment
from holdfast.checkpoint.grid.chunk_cache import PartCache
from holdfast.checkpoint.grid.decide import Extract, plan_moves
from holdfast.checkpoint.grid.round_plan import ChunkPlan, RoundPlan, RoundPlanner
from holdfast.checkpoint.grid.swap import RoundResult, Swap, garbage_bytes, swap_chunks
from holdfast.checkpoint.restoring import fetch
from holdfast.checkpoint.store.writer import RunWriter, store_segment

LIVE, EXTRACTED = "live", "extracted"  # bundles: row 0 of the grid, and the row a round adds
_VECTORS_NAME = "kills"  # of deletion vectors in their object, since format 2


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


class Round:
    """One round of extraction, carried out."""

    def __init__(
        self,
        writer: RunWriter,
        plan: RoundPlan,
        rules: Extract,
        *,
        cache: PartCache,
        pause: Callable[[], None],
    ) -> None:
        """``pause`` is called between chunks: it may wait, or raise to give the round up."""
        self._writer = writer
        self._plan = plan
        self._rules = rules
        self._pause = pause
        self._segments = fetch.SegmentReader(writer.storage)
        self._cache = cache
        self._planner = RoundPlanner(
            plan,
            rules,
            parts=fetch.PartReader(writer.storage),
            cache=cache,
            vectors=fetch.read_deletion_vectors(writer.storage, plan.grid),
        )
        self._swaps: list[Swap] = []
        self._objects: list[tuple[str, int]] = []
        self._bundles: dict[str, ObjectBuilder] = {}
        self._open = contextlib.ExitStack()
        self._counts: Counter[str] = Counter()
        self._wait_s = 0.0

    def run(self) -> RoundStats | None:
        """Carry the round out and commit it; None if the run changed so much that it is void."""
        started = time.perf_counter()
        committed: Catalog | None = None
        try:
            with self._open:
                self._extract()
                moves = self._move_from_garbage()
                self._close_bundles()
            vectors = self._store_vectors()
            result = RoundResult(tuple(self._swaps), moves, tuple(self._objects), vectors)
            committed = self._writer.update(lambda now: swap_chunks(now, self._plan, result))
        finally:
            named = {name for name, _ in self._writer.catalog.objects}
            self._writer.forget(name for name, _ in self._objects if name not in named)
        if committed is None:
            return None
        decided = self._planner.counts
        return RoundStats(
            step=self._plan.through,
            chunks=decided["chunks"],
            by_range=decided["by_range"],
            by_filter=decided["by_filter"],
            by_ratio=decided["by_ratio"],
            extracted=decided["rewritten"],
            closed=decided["closed"],
            garbage_bytes=garbage_bytes(committed),
            seconds=time.perf_counter() - started,
            wait_s=self._wait_s,
            **self._counts,
        )

    def _wait(self) -> None:
        started = time.perf_counter()
        self._pause()
        self._wait_s += time.perf_counter() - started

    def _count(self, **more: int) -> None:
        self._counts.update(more)

    def _extract(self) -> None:
        self._wait()
        for plan in self._planner.chunk_plans():
            if plan is not None and plan.outcome == "closed":
                self._swaps.append(Swap(plan.entry, _closed(plan)))
            elif plan is not None and plan.outcome == "rewritten":
                self._swaps.append(Swap(plan.entry, tuple(self._rewrite(plan))))
            self._wait()

    def _rewrite(self, plan: ChunkPlan) -> Iterator[SegmentEntry]:
        """Write a chunk's rows to where its plan says; the chunks they are from now on."""
        entry, split, ids_N = plan.entry, plan.split, plan.ids_N
        assert split is not None and ids_N is not None
        segment = self._segments.read(entry, plan.schema)
        self._count(read_bytes=entry.extent.bytes)
        if len(split.alive_N):
            taken = segment.take(split.alive_N, has_filter=True, deaths_K=None)
            live = self._append(LIVE, entry, taken, died=entry.died)
            self._cache.note_ids(live, ids_N[split.alive_N])
            yield live
        for cell in split.cells:
            taken = segment.take(cell.positions_N, deaths_K=cell.deaths_N)
            self._count(rows=taken.rows)
            yield self._append(EXTRACTED, entry, taken, died=cell.died)

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

    def _move_from_garbage(self) -> dict[Extent, Extent]:
        """Copy what still lives in objects that are mostly garbage, so that those can go."""
        catalog = self._plan.catalog
        replaced = {swap.old.extent: swap for swap in self._swaps}
        planned = [
            new
            for s in catalog.segments
            for new in (replaced[s.extent].new if s.extent in replaced else (s,))
        ]
        sizes = dict(catalog.objects)
        # What this round wrote, and what belongs to a base or a rollup, stays where it is.
        below = {entry.base for entry in catalog.checkpoints}
        below |= {grid.rollup for grid in catalog.grids}
        here = [s for s in planned if s.extent.object in sizes]
        pinned = {s.extent.object for s in here if s.born in below}
        moves: dict[Extent, Extent] = {}
        for entry in sorted(plan_moves(sizes, here, pinned=pinned), key=lambda s: s.born):
            self._wait()
            data = self._segments.read_bytes(entry)
            bundle = LIVE if entry.died in (None, self._plan.grid.end) else EXTRACTED
            with self._bundle(bundle) as builder:
                extent = builder.append(ROWS, entry.table, (data,), entry.extent.checksum)
            moves[entry.extent] = extent
            self._count(moved=1, read_bytes=extent.bytes, written_bytes=extent.bytes)
        return moves

    def _store_vectors(self) -> Extent | None:
        living = {(s.table, s.born) for s in self._plan.catalog.segments}
        vectors: dict[tuple[str, int], DeletionVector] = {
            key: vector
            for key, vector in self._planner.vectors.items()
            if key in living and len(vector)
        }
        self._count(deleted_rows=sum(map(len, vectors.values())))
        if not vectors:
            return None
        data = deletion_vectors.to_bytes(vectors)
        with self._writer.new_object(DELETION_VECTORS) as builder:
            extent = builder.append(DELETION_VECTORS, _VECTORS_NAME, (data,), checksum(data))
            self._objects.append((builder.name, builder.close()))
        self._count(written_bytes=extent.bytes)
        return extent


def _closed(plan: ChunkPlan) -> tuple[SegmentEntry, ...]:
    """A chunk that died whole; nothing where no step that is kept needs it."""
    return () if plan.died is None else (dataclasses.replace(plan.entry, died=plan.died),)
