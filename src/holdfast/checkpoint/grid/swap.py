"""The commit of a round of extraction: old chunks for new ones in a catalog. Pure.

Invariant: what a save committed meanwhile stays. The swap is made to the catalog as it is then, or
not at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.checkpoint.format.catalog import Catalog, SegmentEntry
from holdfast.checkpoint.format.object import Extent
from holdfast.checkpoint.grid.round_plan import RoundPlan


@dataclass(frozen=True, slots=True)
class Swap:
    """One chunk's replacement: none where no step needs it any more."""

    old: SegmentEntry
    new: tuple[SegmentEntry, ...]


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What a round wrote: replaced chunks, chunks copied as they are (from, to), new objects."""

    swaps: tuple[Swap, ...]
    moves: Mapping[Extent, Extent]
    objects: tuple[tuple[str, int], ...]
    vectors: Extent | None


def swap_chunks(now: Catalog, plan: RoundPlan, result: RoundResult) -> Catalog | None:
    """The run's catalog with a round's chunks; None where they no longer fit it."""
    grid = next((g for g in now.grids if g.rollup == plan.grid.rollup), None)
    if grid is None or grid.through != plan.grid.through or now.rewinds != plan.catalog.rewinds:
        return None
    swaps = {swap.old.extent: swap for swap in result.swaps}
    touched = {extent.object for extent in (*swaps, *result.moves)}
    segments: list[SegmentEntry] = []
    for current in now.segments:
        if current.extent.object not in touched:  # most, and cheaper than looking up extents
            segments.append(current)
            continue
        swap = swaps.get(current.extent)
        for new in (current,) if swap is None else _carried_over(swap, current):
            extent = result.moves.get(new.extent, new.extent)
            is_same = extent == new.extent
            segments.append(new if is_same else dataclasses.replace(new, extent=extent))
    swapped = dataclasses.replace(
        now, segments=tuple(segments), objects=(*now.objects, *result.objects)
    )
    moved_on = dataclasses.replace(grid, through=plan.through, deletion_vectors=result.vectors)
    return swapped.with_grid(moved_on).without_dead()


def garbage_bytes(catalog: Catalog) -> int:
    """Bytes of objects with rows that no checkpoint reads."""
    living = sum(s.extent.bytes for s in catalog.segments)
    rows_in = {s.extent.object for s in catalog.segments}
    return sum(size for name, size in catalog.objects if name in rows_in) - living


def _carried_over(swap: Swap, current: SegmentEntry) -> tuple[SegmentEntry, ...]:
    """A chunk's replacement, where a new base or rollup may have ended the chunk meanwhile."""
    if current.died == swap.old.died:
        return swap.new
    return tuple(
        dataclasses.replace(new, died=current.died) if new.died == swap.old.died else new
        for new in swap.new
    )
