"""The catalog: what exists, as a value; every change makes a new one.

A catalog is a whole description of a run: its checkpoints, the segments they are made of, the
objects those lie in, the grids that were made of them. Catalogs are numbered; the highest number is
the run's state. Restoring step ``s`` reads the segments with ``born <= s < died`` in the order they
were born: later wins. Up to the step a grid is worked off ``through``, it is also known which rows
of a segment are dead at ``s``, so that there no order is needed (checkpoint/restoring/restore.py).

A **rollup** is a delta that holds every row changed since the base: what was born between the two
is dead from then on, and the grid begins anew on it.

Invariants:
- Every object a kept checkpoint needs is in ``objects``; nothing else is.
- Going back in time forgets every death after that time (``rewound``).

Not here: its bytes and its commit (checkpoint/store/catalogs.py), choosing rows
(checkpoint/selecting/selection.py), what to drop (checkpoint/planning/retention.py), deleting
(checkpoint/store/writer.py), filling a grid (checkpoint/grid/decide.py,
checkpoint/grid/extract.py).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from holdfast.checkpoint.format.annotations import Annotations
from holdfast.checkpoint.format.object import Extent
from holdfast.checkpoint.format.stored_json import COUNT_MAX
from holdfast.errors import NotFoundError
from holdfast.model.placement import Placement
from holdfast.model.schema import TableSchema

BASE, DELTA = "base", "delta"


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """Some versions of one table's rows: born at one checkpoint, all dead from another on.

    A segment may know which of its rows died before the others (segment.py); what it says of steps
    after ``deaths_through`` is void, because training went back behind them.
    """

    table: str
    born: int
    died: int | None
    rows: int
    first: int
    last: int
    extent: Extent
    deaths_through: int | None = None

    def is_alive(self, step: int) -> bool:
        """Whether a restore of ``step`` reads this segment."""
        return self.born <= step and (self.died is None or step < self.died)


_BORN = operator.attrgetter("born")


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """One checkpoint: what kind it is, what it cost, and where its dense state lies."""

    step: int
    ordinal: int
    kind: str
    base: int
    schema: int
    time: float
    codec: str
    state_codec: str
    rows: int
    row_bytes: int
    bytes: int
    full_bytes: int
    stall_s: float
    reason: str
    dense: Extent
    build_s: float = 0.0
    ranks: tuple[Extent, ...] = ()
    """Where many processes train: what each has of its own, its reader and random state."""
    annotations: Annotations = dataclasses.field(default_factory=Annotations)
    """What the user said of it: metrics and metadata."""


_STEP = operator.attrgetter("step")


@dataclass(frozen=True, slots=True)
class GridEntry:
    """The grids of all tables over one rollup, or one base: how far they are worked off.

    ``rollup`` is the step of the rollup it stands on, or of the base where there is none below it.
    ``deletion_vectors`` is where those lie: for rows of segments that are not extracted, the step
    they died at (deletion_vectors.py). They are complete for every checkpoint up to ``through``;
    what they say of later ones is void. ``end`` is the rollup or base that ended this grid.
    """

    rollup: int
    end: int | None
    through: int
    deletion_vectors: Extent | None


_ROLLUP = operator.attrgetter("rollup")


@dataclass(frozen=True, slots=True)
class Growth:
    """What a checkpoint added: bytes of rows, and how long it took to build.

    A delta in another codec than its base counts as the bytes that the base takes for as many rows,
    so that sizes can be compared.
    """

    step: int
    row_bytes: int
    build_s: float


@dataclass(frozen=True, slots=True)
class RestoreTiming:
    """A restore that was measured: what was read of the base and of what changed since."""

    base_bytes: int
    base_s: float
    delta_bytes: int
    delta_s: float


@dataclass(frozen=True, slots=True)
class Rewind:
    """Training went back to ``to`` and on from there: steps up to ``last`` were let go."""

    to: int
    last: int


@dataclass(frozen=True, slots=True)
class Sharding:
    """From the base ``since`` on, no segment holds rows of two servers."""

    placement: Placement
    since: int

    def held_by(
        self, segments: Sequence[SegmentEntry], servers: Collection[int]
    ) -> list[SegmentEntry]:
        """Those of some segments that hold rows of these servers; none may be older."""
        firsts_S = np.array([segment.first for segment in segments], np.int64)
        is_held_S = np.isin(self.placement.servers_of(firsts_S), list(servers))
        return [s for s, is_held in zip(segments, is_held_S.tolist(), strict=True) if is_held]


@dataclass(frozen=True, slots=True)
class Catalog:
    """A run's state as of one commit."""

    run: str
    number: int
    writer: str
    restores: int = 0
    schemas: tuple[tuple[TableSchema, ...], ...] = ()
    checkpoints: tuple[CheckpointEntry, ...] = ()
    segments: tuple[SegmentEntry, ...] = ()
    objects: tuple[tuple[str, int], ...] = ()
    rewinds: tuple[Rewind, ...] = ()
    growth: tuple[Growth, ...] = ()
    """The last base and every delta since, retained or not."""
    grids: tuple[GridEntry, ...] = ()
    restore_timings: tuple[RestoreTiming, ...] = ()
    """The last two."""
    sharding: Sharding | None = None

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that can be restored, ascending."""
        return tuple(entry.step for entry in self.checkpoints)

    @property
    def last(self) -> CheckpointEntry | None:
        """The newest checkpoint."""
        return self.checkpoints[-1] if self.checkpoints else None

    def checkpoint(self, step: int) -> CheckpointEntry:
        """The checkpoint of a step.

        Raises:
            NotFoundError: lists the steps that exist.
        """
        at = bisect.bisect_left(self.checkpoints, step, key=_STEP)
        if at < len(self.checkpoints) and self.checkpoints[at].step == step:
            return self.checkpoints[at]
        shown = list(self.steps)
        if len(shown) > 12:
            shown = [*shown[:5], "...", *shown[-5:]]  # type: ignore[list-item]
        raise NotFoundError("no checkpoint of this step", step=step, steps=shown)

    def schema_of(self, entry: CheckpointEntry) -> tuple[TableSchema, ...]:
        """The tables as they were at a checkpoint."""
        return self.schemas[entry.schema]

    def alive(self, step: int, table: str | None = None) -> list[SegmentEntry]:
        """What a restore of ``step`` reads, oldest born first; one table's, or every table's."""
        found = [segment for segment in self.segments if segment.is_alive(step)]
        if table is not None:
            found = [segment for segment in found if segment.table == table]
        return sorted(found, key=_BORN)

    def grid_of(self, entry: CheckpointEntry) -> GridEntry | None:
        """The grid that a checkpoint is part of."""
        at = bisect.bisect_right(self.grids, entry.step, key=_ROLLUP)
        if at == 0:
            return None
        grid = self.grids[at - 1]
        is_over = grid.end is not None and grid.end <= entry.step
        return None if grid.rollup < entry.base or is_over else grid

    def rollup_of(self, entry: CheckpointEntry) -> int:
        """The last rollup up to a checkpoint, or its base: what its increments stand on."""
        at = bisect.bisect_right(self.grids, entry.step, key=_ROLLUP)
        return entry.base if at == 0 else max(entry.base, self.grids[at - 1].rollup)

    def restore_bytes(self) -> dict[int, int]:
        """How many bytes of rows a restore of each step reads."""
        steps = self.steps
        change = [0] * (len(steps) + 1)
        for segment in self.segments:
            change[bisect.bisect_left(steps, segment.born)] += segment.extent.bytes
            if segment.died is not None:
                change[bisect.bisect_left(steps, segment.died)] -= segment.extent.bytes
        return dict(zip(steps, itertools.accumulate(change), strict=False))

    def with_checkpoint(
        self,
        entry: CheckpointEntry,
        segments: tuple[SegmentEntry, ...],
        objects: tuple[tuple[str, int], ...],
        *,
        replaces_since: int | None,
        is_rollup: bool = False,
        placement: Placement | None = None,
    ) -> Self:
        """This catalog and one more checkpoint.

        ``replaces_since`` is the step whose successors this checkpoint holds every row of: older
        segments born after it die now (a base replaces all that came before). A rollup also ends
        the grid and begins the next. ``placement`` says by which servers its rows are apart; that
        can change only with a base.
        """
        assert not is_rollup or replaces_since == entry.base
        sharding = self.sharding
        if (None if sharding is None else sharding.placement) != placement:
            assert entry.kind == BASE
            sharding = None if placement is None else Sharding(placement, entry.step)
        replaced = -1 if entry.kind == BASE else replaces_since
        older, grids = self.segments, self.grids
        if replaced is not None:
            older = tuple(
                dataclasses.replace(segment, died=entry.step)
                if segment.died is None and segment.born > replaced
                else segment
                for segment in older
            )
        if entry.kind == BASE or is_rollup:
            grids = tuple(
                dataclasses.replace(grid, end=entry.step) if grid.end is None else grid
                for grid in grids
            )
        if is_rollup:
            grids = (*grids, GridEntry(entry.step, None, entry.step, None))
        grown = _growth(entry) if entry.kind == BASE else self._delta_growth(entry, segments)
        return dataclasses.replace(
            self,
            checkpoints=(*self.checkpoints, entry),
            segments=(*older, *segments),
            objects=(*self.objects, *objects),
            growth=(grown,) if entry.kind == BASE else (*self.growth, grown),
            grids=grids,
            sharding=sharding,
        )

    def _delta_growth(self, entry: CheckpointEntry, segments: Sequence[SegmentEntry]) -> Growth:
        """What a delta adds to this catalog, in bytes as the base's codec makes them."""
        last, grown = self.last, _growth(entry)
        if not self.growth or last is None:
            return grown
        # Where the last one counted as it is, it had the base's codec.
        is_as_base = self.growth[-1] == _growth(last) and _codecs_of(last) == _codecs_of(entry)
        return grown if is_as_base else self._in_codec_of(self.growth[0], grown, entry, segments)

    def _in_codec_of(
        self,
        base: Growth,
        grown: Growth,
        entry: CheckpointEntry,
        segments: Sequence[SegmentEntry],
    ) -> Growth:
        """What a delta counts as beside a base in another codec: by its rows."""
        schemas = {table.name: table for table in self.schemas[entry.schema]}
        rows_bytes = sum(s.rows * schemas[s.table].row_bytes for s in segments)
        all_bytes = sum(table.rows * table.row_bytes for table in schemas.values())
        counted = round(base.row_bytes * rows_bytes / max(1, all_bytes))
        return dataclasses.replace(grown, row_bytes=counted)

    def annotated(self, step: int, annotations: Annotations) -> Self:
        """This catalog, and more said of a checkpoint.

        Raises:
            NotFoundError: there is none of this step.
            InvalidRequestError: with what is said already it is too much.
        """
        entry = self.checkpoint(step)
        joined = entry.annotations.updated(annotations)
        checkpoints = tuple(
            dataclasses.replace(entry, annotations=joined) if each is entry else each
            for each in self.checkpoints
        )
        return dataclasses.replace(self, checkpoints=checkpoints)

    def with_grid(self, grid: GridEntry) -> Self:
        """This catalog with one grid begun, or moved on."""
        others = [item for item in self.grids if item.rollup != grid.rollup]
        grids = tuple(sorted((*others, grid), key=_ROLLUP))
        return dataclasses.replace(self, grids=grids)

    def delta_sizes(self) -> list[float] | None:
        """The deltas since the last base as fractions of its bytes, as if all had its codec; None
        without a base."""
        if not self.growth:
            return None
        base_bytes = max(1, self.growth[0].row_bytes)
        return [item.row_bytes / base_bytes for item in self.growth[1:]]

    def rewound(self, step: int) -> Self:
        """This catalog without what came after ``step``."""
        last = self.last
        if last is None or last.step <= step:
            return self
        kept = tuple(entry for entry in self.checkpoints if entry.step <= step)
        segments = tuple(_revived(s, step) for s in self.segments if s.born <= step)
        growth = tuple(item for item in self.growth if item.step <= step)
        if kept and not growth:  # behind the last base: what is still known of the one before
            base_bytes = sum(s.extent.bytes for s in segments if s.born == kept[-1].base)
            deltas = [e for e in kept if e.base == kept[-1].base and e.kind == DELTA]
            build_s = next((e.build_s for e in kept if e.step == kept[-1].base), 0.0)
            base = Growth(kept[-1].base, base_bytes, build_s)
            codecs = next((_codecs_of(e) for e in kept if e.base == kept[-1].base), None)
            growth = (base,)
            for delta in deltas:
                born = [s for s in segments if s.born == delta.step]
                is_as_base = _codecs_of(delta) == codecs
                grown = _growth(delta)
                grown = grown if is_as_base else self._in_codec_of(base, grown, delta, born)
                growth = (*growth, grown)
        rewound = dataclasses.replace(
            self,
            checkpoints=kept,
            segments=segments,
            rewinds=(*self.rewinds, Rewind(step, last.step)),
            growth=growth,
            grids=self._grids_until(step),
            sharding=self._sharding_until(step),
        )
        return rewound.without_dead()

    def without_future(self) -> Self:
        """This catalog without claims about steps after its last checkpoint.

        No writer of ours makes such claims. A forged run may, and training that goes on in it
        would reach those steps.
        """
        last = self.last
        if last is None:
            return self
        step = last.step
        segments = tuple(
            _revived(s, step) if max(s.died or 0, s.deaths_through or 0) > step else s
            for s in self.segments
            if s.born <= step
        )
        return dataclasses.replace(
            self,
            segments=segments,
            growth=tuple(item for item in self.growth if item.step <= step),
            grids=self._grids_until(step),
            sharding=self._sharding_until(step),
        )

    def _grids_until(self, step: int) -> tuple[GridEntry, ...]:
        """The grids as training at a step knew them."""
        return tuple(
            dataclasses.replace(
                grid,
                through=min(grid.through, step),
                end=None if grid.end is not None and grid.end > step else grid.end,
            )
            for grid in self.grids
            if grid.rollup <= step
        )

    def _sharding_until(self, step: int) -> Sharding | None:
        is_later = self.sharding is not None and self.sharding.since > step
        return None if is_later else self.sharding

    def with_restore(self, timing: RestoreTiming | None = None) -> Self:
        """This catalog with one restore more; what the last two took is kept, where it is known."""
        restore_timings = self.restore_timings
        if timing is not None:
            restore_timings = (*restore_timings, timing)[-2:]
        restores = min(self.restores + 1, COUNT_MAX - 1)
        return dataclasses.replace(self, restores=restores, restore_timings=restore_timings)

    def keeping(self, steps: frozenset[int]) -> Self:
        """This catalog with only these checkpoints, and only what they need."""
        kept = tuple(entry for entry in self.checkpoints if entry.step in steps)
        return dataclasses.replace(self, checkpoints=kept).without_dead()

    def without_dead(self) -> Self:
        """This catalog without segments that no checkpoint reads and objects that hold none."""
        steps = self.steps

        def is_read(segment: SegmentEntry) -> bool:
            at = bisect.bisect_left(steps, segment.born)
            return at < len(steps) and segment.is_alive(steps[at])

        segments = tuple(segment for segment in self.segments if is_read(segment))
        used = {self.grid_of(entry) for entry in self.checkpoints}
        grids = tuple(grid for grid in self.grids if grid in used)
        needed = {s.extent.object for s in segments} | {e.dense.object for e in self.checkpoints}
        needed |= {extent.object for e in self.checkpoints for extent in e.ranks}
        needed |= {
            grid.deletion_vectors.object for grid in grids if grid.deletion_vectors is not None
        }
        objects = tuple(item for item in self.objects if item[0] in needed)
        return dataclasses.replace(self, segments=segments, objects=objects, grids=grids)


def _revived(segment: SegmentEntry, step: int) -> SegmentEntry:
    """A segment as training at ``step`` knew it: deaths after that are forgotten."""
    if segment.died is not None and segment.died <= step:
        return segment
    known = step if segment.deaths_through is None else min(step, segment.deaths_through)
    return dataclasses.replace(segment, died=None, deaths_through=known)


def _codecs_of(entry: CheckpointEntry) -> tuple[str, str]:
    return entry.codec, entry.state_codec


def _growth(entry: CheckpointEntry) -> Growth:
    return Growth(entry.step, entry.row_bytes, entry.build_s)
