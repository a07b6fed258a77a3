"""Read one grid of a run for ``holdfast inspect --grid``: the catalog, ids and deaths, no rows.

Invariants:
- What is dead is counted row by row, from deletion vectors and the cells' own deaths; a vector's
  false hits are not counted.
- What a step reads is what cli/commands/restore.py plans for it.

Not here: drawing (report/grid.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.checkpoint.format import deletion_vectors
from holdfast.checkpoint.format.catalog import Catalog, CheckpointEntry, GridEntry, SegmentEntry
from holdfast.checkpoint.format.deletion_vectors import NO_DELETIONS, DeletionVectors
from holdfast.checkpoint.format.object import Extent, read_index
from holdfast.checkpoint.restoring import fetch, restore
from holdfast.checkpoint.run import Run
from holdfast.errors import InvalidRequestError, NotFoundError
from holdfast.report.grid import Bundle, GridCell, GridView, StepRead


def look(
    run: Run, *, base: int | None = None, step: int | None = None, table: str | None = None
) -> GridView:
    """The grid over a base or rollup (default: the step's, or the newest), and what ``step`` reads.

    Raises:
        NotFoundError: no grid, no such base, step or table; lists those that exist.
        InvalidRequestError: the step stands on another base or rollup.
    """
    catalog = run.catalog
    grid = _choose_grid(run, base, step)
    members = [entry for entry in catalog.checkpoints if catalog.grid_of(entry) == grid]
    bottom_step = members[0].base if members else grid.rollup
    names = _choose_tables(catalog, members, table)
    above = [
        s
        for s in catalog.segments
        if s.born > grid.rollup and (grid.end is None or s.born < grid.end) and s.table in names
    ]
    bottom = [s for s in catalog.segments if s.born == bottom_step and s.table in names]
    below = [s for s in catalog.segments if s.born == grid.rollup and s.table in names]
    below = below if grid.rollup > bottom_step else []
    vectors = fetch.read_deletion_vectors(run.storage, grid)
    read = [] if step is None else _read_by(catalog, step, names)
    chunks = _look_at_chunks(run, grid, above, vectors, step, {s.extent for s in read})
    births = {s.born for s in above}
    kept = {entry.step for entry in members if entry.step > grid.rollup}
    return GridView(
        url=run.url,
        rollups=tuple(item.rollup for item in catalog.grids),
        base=bottom_step,
        rollup=grid.rollup,
        end=grid.end,
        through=grid.through,
        tables=names,
        checkpoints=tuple(sorted(births | kept)),
        cells=_make_cells(chunks, grid),
        bundles=_look_at_objects(run, above),
        base_chunks=len(bottom),
        base_rows=sum(s.rows for s in bottom),
        base_bytes=sum(s.extent.bytes for s in bottom),
        rollup_chunks=len(below),
        rollup_rows=sum(s.rows for s in below),
        rollup_bytes=sum(s.extent.bytes for s in below),
        deleted_rows=sum(len(vector) for (name, _), vector in vectors.items() if name in names),
        deletion_vector_bytes=0 if grid.deletion_vectors is None else grid.deletion_vectors.bytes,
        waiting=tuple(sorted(born for born in births if born > grid.through)),
        read=None if step is None else _add_up(grid, bottom_step, step, read, chunks),
    )


def _choose_grid(run: Run, base: int | None, step: int | None) -> GridEntry:
    grids = {grid.rollup: grid for grid in run.catalog.grids}
    if not grids:
        raise NotFoundError(
            "the run has no grid",
            url=run.url,
            todo="a grid is made of increments: train with strategy='incrcp'",
        )
    if base is not None and base not in grids:
        raise NotFoundError("no grid of this base or rollup", base=base, grids=list(grids))
    if step is None:
        return grids[max(grids) if base is None else base]
    entry = run.catalog.checkpoint(step)
    grid = run.catalog.grid_of(entry)
    rollup = run.catalog.rollup_of(entry)
    if base is not None and rollup != base:
        raise InvalidRequestError(
            "the step stands on another base or rollup", step=step, its_own=rollup, base=base,
            todo=f"leave --base out, or give --base {rollup}",
        )  # fmt: skip
    if grid is None:
        raise NotFoundError("the step is in no grid", step=step, its_own=rollup, grids=list(grids))
    return grid


def _choose_tables(
    catalog: Catalog, members: Sequence[CheckpointEntry], table: str | None
) -> tuple[str, ...]:
    known = dict.fromkeys(schema.name for entry in members for schema in catalog.schema_of(entry))
    if table is None:
        return tuple(known)
    if table not in known:
        raise NotFoundError("no such table", table=table, tables=list(known))
    return (table,)


def _read_by(catalog: Catalog, step: int, names: Sequence[str]) -> list[SegmentEntry]:
    restore.check_complete(catalog, step)
    return [
        s
        for layer in restore.plan_layers(catalog, step, names, catalog.alive(step))
        for s in layer.segments
    ]


@dataclass(frozen=True, slots=True)
class _Chunk:
    entry: SegmentEntry
    died: int | None
    dead: int
    masked: int
    is_read: bool


def _look_at_chunks(
    run: Run,
    grid: GridEntry,
    segments: Sequence[SegmentEntry],
    vectors: DeletionVectors,
    step: int | None,
    read: set[Extent],
) -> list[_Chunk]:
    parts = fetch.PartReader(run.storage)
    chunks = []
    for entry in segments:
        # A chunk that lives until the next base or rollup is row 0 of a grid that is finished.
        died = None if entry.died == grid.end else entry.died
        dead = masked = 0
        is_read = entry.extent in read
        has_vector = (entry.table, entry.born) in vectors
        may_have_deaths = died is not None or entry.deaths_through is not None
        if entry.born <= grid.through and (has_vector or may_have_deaths):
            ids_N, deaths_N = parts.ids_and_deaths(entry)
            outer_N = deletion_vectors.look_up(
                vectors.get((entry.table, entry.born), NO_DELETIONS), ids_N
            )
            until = grid.through if died is None else died - 1
            dead = _count_dead(until, outer_N, deaths_N)
            if is_read and step is not None:
                masked = _count_dead(step, outer_N, deaths_N)
        chunks.append(_Chunk(entry, died, dead, masked, is_read))
    return chunks


def _count_dead(until: int, *deaths: np.ndarray | None) -> int:
    """How many rows died by a step, told by one source or the other (-1: it knows of no death)."""
    known = [(found_N >= 0) & (found_N <= until) for found_N in deaths if found_N is not None]
    return int(np.logical_or.reduce(known).sum())


def _make_cells(chunks: Sequence[_Chunk], grid: GridEntry) -> tuple[GridCell, ...]:
    cells: dict[tuple[int, int | None], list[_Chunk]] = {}
    for chunk in chunks:
        cells.setdefault((chunk.entry.born, chunk.died), []).append(chunk)
    last = grid.through + 1
    return tuple(
        GridCell(
            born=born,
            died=died,
            chunks=len(found),
            rows=sum(chunk.entry.rows for chunk in found),
            bytes=sum(chunk.entry.extent.bytes for chunk in found),
            dead_rows=sum(chunk.dead for chunk in found),
            is_read=any(chunk.is_read for chunk in found),
            masked_rows=sum(chunk.masked for chunk in found),
        )
        for (born, died), found in sorted(
            cells.items(), key=lambda item: (item[0][0], last if item[0][1] is None else item[0][1])
        )
    )


def _look_at_objects(run: Run, segments: Sequence[SegmentEntry]) -> tuple[Bundle, ...]:
    """The objects that hold these segments; what is alive in them is counted over all tables."""
    sizes = dict(run.catalog.objects)
    living: dict[str, list[Extent]] = {}
    for entry in run.catalog.segments:
        living.setdefault(entry.extent.object, []).append(entry.extent)
    named = {entry.dense for entry in run.catalog.checkpoints}
    named |= {
        grid.deletion_vectors for grid in run.catalog.grids if grid.deletion_vectors is not None
    }
    bundles = []
    for name in sorted({s.extent.object for s in segments}):
        alive = set(living[name])
        index = read_index(run.storage, name, sizes[name])
        garbage = sum(e.bytes for e in index.extents() if e not in alive and e not in named)
        bundles.append(
            Bundle(
                object=name,
                kind=name.rpartition("/")[2].partition("-")[0],
                bytes=sizes[name],
                chunks=len(alive),
                chunk_bytes=sum(extent.bytes for extent in alive),
                garbage_bytes=garbage,
            )
        )
    return tuple(bundles)


def _add_up(
    grid: GridEntry,
    bottom_step: int,
    step: int,
    read: Sequence[SegmentEntry],
    chunks: Sequence[_Chunk],
) -> StepRead:
    base = [s for s in read if s.born <= bottom_step]
    rollup = [s for s in read if bottom_step < s.born <= grid.rollup]
    above = [s for s in read if s.born > grid.rollup]
    return StepRead(
        step=step,
        base_segments=len(base),
        base_rows=sum(s.rows for s in base),
        base_bytes=sum(s.extent.bytes for s in base),
        rollup_segments=len(rollup),
        rollup_rows=sum(s.rows for s in rollup),
        rollup_bytes=sum(s.extent.bytes for s in rollup),
        segments=len(above),
        rows=sum(s.rows for s in above),
        bytes=sum(s.extent.bytes for s in above),
        masked_rows=sum(chunk.masked for chunk in chunks),
        waiting_segments=sum(s.born > grid.through for s in above),
    )
