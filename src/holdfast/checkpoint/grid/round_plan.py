"""Plan a round of extraction: what becomes of each chunk that new increments replaced rows of.

    catalog -> plan_round -> RoundPlan -> RoundPlanner.chunk_plans -> a ChunkPlan for each chunk

Nothing is written here. Which chunks are worth a look follows from the catalog alone; what becomes
of one needs its ids, or its filter, which are read when its turn comes, so that a plan of a whole
round never has to fit into memory.

Invariants:
- Of a base and of a rollup nothing is read or moved: a grid is what was born above them.
- Memory: one chunk, the ids the new increments touched, the deletion vectors, and filters and ids
  of chunks as far as the rules allow.

Not here: carrying a plan out (extract.py), the rules (decide.py).

# N rows of a chunk, K ids an increment touched
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from holdfast.checkpoint.format import deletion_vectors
from holdfast.checkpoint.format.catalog import Catalog, GridEntry, SegmentEntry
from holdfast.checkpoint.format.deletion_vectors import NO_DELETIONS, DeletionVector
from holdfast.checkpoint.grid.chunk_cache import PartCache
from holdfast.checkpoint.grid.decide import (
    Extract,
    Split,
    choose_threshold,
    plan_split,
    rows_allowed,
)
from holdfast.checkpoint.restoring import fetch
from holdfast.kernels.rows import bloom
from holdfast.kernels.segments import deaths
from holdfast.model.schema import TableSchema


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """One round over one grid: the increments it works off, and the chunks it looks at.

    ``chunks`` are those that were not dead before the new increments came, by table.
    """

    catalog: Catalog
    grid: GridEntry
    births: tuple[int, ...]
    chunks: Mapping[str, Sequence[SegmentEntry]]

    @property
    def through(self) -> int:
        """The step to which the grid is worked off after the round."""
        return self.births[-1]

    @property
    def schemas(self) -> Sequence[TableSchema]:
        """The grid's tables."""
        catalog = self.catalog
        entry = next(e for e in reversed(catalog.checkpoints) if catalog.grid_of(e) == self.grid)
        return catalog.schema_of(entry)


def plan_round(catalog: Catalog) -> RoundPlan | None:
    """The round over the oldest grid that increments wait for; None where none waits."""
    for grid in catalog.grids:
        own = [
            segment
            for segment in catalog.segments
            if segment.born > grid.rollup and (grid.end is None or segment.born < grid.end)
        ]
        births = sorted({segment.born for segment in own if segment.born > grid.through})
        if not births:
            continue
        chunks: dict[str, list[SegmentEntry]] = defaultdict(list)
        for segment in own:
            if segment.died is None or segment.died > births[0]:
                chunks[segment.table].append(segment)
        return RoundPlan(catalog, grid, tuple(births), chunks)
    return None


Outcome = Literal["by_range", "by_filter", "by_ratio", "closed", "rewritten"]


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """What becomes of one chunk.

    Passed over (``by_range``, ``by_filter``, ``by_ratio``): it stays as it is. ``closed``: it dies
    whole at ``died``; None: no step that is kept needs it. ``rewritten``: its rows move as
    ``split`` says; then ``ids_N`` are its ids.
    """

    entry: SegmentEntry
    schema: TableSchema
    outcome: Outcome
    died: int | None = None
    split: Split | None = None
    ids_N: np.ndarray | None = None


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
            each = [
                DeletionVector(ids_K, np.full(len(ids_K), born, np.int64))
                for born, ids_K in self._ids[lo:hi]
            ]
            replaced = deletion_vectors.join(each)
            rows = max(len(ids_K) for _, ids_K in self._ids[lo:hi])
            self._known[lo, hi] = _New(replaced, rows)
        return self._known[lo, hi]


class RoundPlanner:
    """Reads ids and filters, and plans a round chunk by chunk.

    ``vectors``, the deletion vectors by table and birth, are those of the grid at first, and those
    after the round when every chunk is planned. ``counts`` are of chunks, by outcome.
    """

    def __init__(
        self,
        plan: RoundPlan,
        rules: Extract,
        *,
        parts: fetch.PartReader,
        cache: PartCache,
        vectors: Mapping[tuple[str, int], DeletionVector],
    ) -> None:
        self._plan = plan
        self._rules = rules
        self._parts = parts
        self._cache = cache
        self.vectors = dict(vectors)
        self.counts: Counter[str] = Counter()
        self._born_with: dict[tuple[str, int], list[SegmentEntry]] = defaultdict(list)
        for chunks in plan.chunks.values():
            for entry in chunks:
                self._born_with[entry.table, entry.born].append(entry)
        cache.keep_only({s.extent for chunks in plan.chunks.values() for s in chunks})

    def chunk_plans(self) -> Iterator[ChunkPlan | None]:
        """What becomes of each chunk, oldest birth first; None where nothing came while it lived.

        So chunks lie in their bundle in the order of their births, and what a restore of a step
        reads of it, the chunks born until then, is one piece.
        """
        updates = {}
        for schema in self._plan.schemas:
            found = self._read_updates(schema)
            if found is not None:
                updates[schema.name] = found
        chunks = [s for name in updates for s in self._plan.chunks.get(name, ())]
        for entry in sorted(chunks, key=lambda s: s.born):
            table = updates[entry.table]
            new = table.since(entry)
            if new is None:
                yield None
                continue
            plan = self._plan_chunk(entry, table, new)
            self.counts.update(("chunks", plan.outcome))
            yield plan

    def _read_updates(self, schema: TableSchema) -> _Updates | None:
        fresh: dict[int, list[SegmentEntry]] = {born: [] for born in self._plan.births}
        for s in self._plan.chunks.get(schema.name, ()):
            if s.born in fresh:
                fresh[s.born].append(s)
        sizes = [sum(s.extent.bytes for s in chunks) for chunks in fresh.values() if chunks]
        if not sizes:
            return None
        threshold = self._rules.threshold
        if threshold is None:
            threshold = choose_threshold(sum(sizes) / len(sizes))
        ids = [
            (born, np.sort(np.concatenate([self._cache.ids(self._parts, s) for s in chunks])))
            for born, chunks in fresh.items()
            if chunks
        ]
        return _Updates(schema, ids, threshold)

    def _plan_chunk(self, entry: SegmentEntry, table: _Updates, new: _New) -> ChunkPlan:
        """Take a chunk through the three stages; what passes all is rewritten, or closed whole."""
        rules, replaced = self._rules, new.replaced
        lo, hi = np.searchsorted(replaced.ids_N, (entry.first, entry.last + 1))
        if rules.by_range and lo == hi:
            return ChunkPlan(entry, table.schema, "by_range")
        key = (entry.table, entry.born)
        known = self.vectors.get(key, NO_DELETIONS)
        allowed = rows_allowed(table.threshold, entry.rows, new.rows)
        if rules.by_filter and not self._cache.has_ids(entry):
            near = DeletionVector(replaced.ids_N[lo:hi], replaced.deaths_N[lo:hi])
            if self._is_passed_over(entry, known, near, allowed):
                return ChunkPlan(entry, table.schema, "by_filter")
        ids_N, inner_N = self._cache.ids_and_deaths(self._parts, entry)
        deaths_N = np.full(len(ids_N), -1, np.int64) if inner_N is None else inner_N.copy()
        deaths.mark_deaths(ids_N, known.ids_N, known.deaths_N, deaths_N)
        if not deaths.mark_deaths(ids_N, replaced.ids_N, replaced.deaths_N, deaths_N):
            return ChunkPlan(entry, table.schema, "by_ratio")
        is_dead_N = deaths_N >= 0
        dead = np.count_nonzero(is_dead_N)
        if rules.by_ratio and dead <= allowed and dead < entry.rows:
            exact = DeletionVector(ids_N[is_dead_N], deaths_N[is_dead_N])
            self.vectors[key] = self._replaced(known, entry, ids_N, exact)
            return ChunkPlan(entry, table.schema, "by_ratio")
        self.vectors[key] = self._replaced(known, entry, ids_N, NO_DELETIONS)
        split = plan_split(
            deaths_N, born=entry.born, kept=self._plan.catalog.steps, allowed=allowed
        )
        if not split.cells and not len(split.alive_N):
            return ChunkPlan(entry, table.schema, "closed")
        only = split.cells[0] if len(split.cells) == 1 else None
        is_whole = only is not None and len(only.positions_N) == entry.rows
        if inner_N is None and is_whole and only is not None and only.deaths_N is None:
            # All of it died at once: nothing needs to move.
            return ChunkPlan(entry, table.schema, "closed", died=only.died)
        return ChunkPlan(entry, table.schema, "rewritten", split=split, ids_N=ids_N)

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
        self.vectors[entry.table, entry.born] = vector
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
