"""Enter a checkpoint in the catalog: the commit of one writer's rows, or of many writers'.

The one place where a checkpoint comes to exist, whoever stored its rows: a process (alone.py), many
ranks (joint.py) or the servers of a cluster (cluster/clustersave.py).

Invariants:
- What is entered is durable already.
- A base holds every row of its tables once, or is refused.

Not here: the atomic put (commit.py, writer.py), storing rows.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast import events
from holdfast.checkpoint.catalog import BASE, Catalog, CheckpointEntry, GridEntry, SegmentEntry
from holdfast.checkpoint.retention import Keep, choose_kept
from holdfast.checkpoint.writer import RunWriter
from holdfast.errors import DataLossError
from holdfast.placement import Placement
from holdfast.schema import TableSchema


@dataclass(frozen=True, slots=True, kw_only=True)
class Entering:
    """How a new checkpoint relates to those before it.

    ``rewind_to`` is the step after which everything is let go, because training went on from there;
    ``replaces_since`` the step whose successors it holds every row of.
    """

    schemas: tuple[TableSchema, ...]
    keep: Keep
    replaces_since: int | None
    rewind_to: int | None = None
    is_floor: bool = False
    has_grid: bool = False
    placement: Placement | None = None


@dataclass(frozen=True, slots=True)
class Entered:
    """A checkpoint as it was committed, and those that went with it."""

    entry: CheckpointEntry
    rewound: tuple[int, ...]
    expired: tuple[int, ...]

    def tell(self, log: events.EventLog, *, durable_s: float) -> None:
        """Say so, as events."""
        entry = self.entry
        log.emit(
            events.SaveDurable(
                step=entry.step,
                checkpoint=entry.kind,
                codec=entry.codec,
                rows=entry.rows,
                bytes=entry.bytes,
                full_bytes=entry.full_bytes,
                stall_s=entry.stall_s,
                durable_s=durable_s,
            )
        )
        for steps, reason in ((self.rewound, "rewind"), (self.expired, "retention")):
            if steps:
                log.emit(events.CheckpointsDropped(steps=steps, reason=reason))


def check_whole(schemas: Sequence[TableSchema], segments: Sequence[SegmentEntry]) -> None:
    """Refuse a base that lacks rows, or holds some twice.

    Raises:
        DataLossError: names the table.
    """
    found: Counter[str] = Counter()
    for segment in segments:
        found[segment.table] += segment.rows
    for schema in schemas:
        if found[schema.name] != schema.rows:
            raise DataLossError(
                "a base holds every row of its tables once",
                table=schema.name,
                rows=schema.rows,
                found=found[schema.name],
                todo="see that the pieces of all processes make up the table",
            )


def enter_checkpoint(
    writer: RunWriter,
    entry: CheckpointEntry,
    segments: tuple[SegmentEntry, ...],
    objects: tuple[tuple[str, int], ...],
    entering: Entering,
    *,
    on_entry: Callable[[CheckpointEntry], None] = lambda entry: None,
) -> Entered:
    """Commit a checkpoint, and let those go that are not kept.

    ``on_entry`` hears it before the commit is tried, whose answer may be lost.

    Raises:
        HoldfastError: as ``RunWriter.update`` does.
    """
    before: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()
    kept: frozenset[int] = frozenset()
    final = entry
    if entry.kind == BASE:
        check_whole(entering.schemas, segments)

    def change(current: Catalog) -> Catalog:
        nonlocal before, taken, kept, final
        before = current.steps
        rewind_to = entering.rewind_to
        catalog = current if rewind_to is None else current.rewound(rewind_to)
        if entering.schemas not in catalog.schemas:
            schemas = (*catalog.schemas, entering.schemas)
            catalog = dataclasses.replace(catalog, schemas=schemas)
        final = dataclasses.replace(
            entry,
            schema=catalog.schemas.index(entering.schemas),
            ordinal=catalog.last.ordinal + 1 if catalog.last is not None else 0,
        )
        on_entry(final)
        catalog = catalog.with_checkpoint(
            final,
            segments,
            objects,
            replaces_since=entering.replaces_since,
            is_floor=entering.is_floor,
            placement=entering.placement,
        )
        if entering.has_grid and catalog.grid_of(final) is None:
            catalog = catalog.with_grid(GridEntry(final.base, None, final.base, None))
        taken = catalog.steps
        kept = choose_kept(catalog.checkpoints, entering.keep, now=writer.clock())
        return catalog.keeping(kept)

    writer.update(change)
    rewound = tuple(step for step in before if step not in taken)
    expired = tuple(step for step in taken if step not in kept)
    return Entered(final, rewound, expired)
