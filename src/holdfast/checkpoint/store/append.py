"""Append a checkpoint to the catalog: the moment at which it comes to exist.

The one place for it, whoever stored the rows: a process (checkpoint/saving/commit.py), many ranks
(checkpoint/ranks/rank_commit.py) or the servers of a cluster (cluster/clustersave.py).

Invariants:
- What is appended is durable already.
- A base holds every row of its tables once, or is refused.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast import events
from holdfast.checkpoint.format.catalog import (
    BASE,
    Catalog,
    CheckpointEntry,
    GridEntry,
    SegmentEntry,
)
from holdfast.checkpoint.planning.retention import choose_kept
from holdfast.checkpoint.planning.save_plan import SavePlan
from holdfast.checkpoint.store.writer import RunWriter
from holdfast.errors import CommitUnknownError, DataLossError, UnavailableError
from holdfast.model.schema import TableSchema


@dataclass(frozen=True, slots=True)
class Appended:
    """A checkpoint as it was committed, and the steps of those that were dropped with it."""

    entry: CheckpointEntry
    rewound: tuple[int, ...]
    expired: tuple[int, ...]

    def emit(self, log: events.EventLog, *, durable_s: float) -> None:
        """Emit SaveDurable and CheckpointsDropped."""
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
                todo="see that the shards of all processes make up the table",
            )


def plan_append(
    current: Catalog,
    plan: SavePlan,
    entry: CheckpointEntry,
    segments: tuple[SegmentEntry, ...],
    objects: tuple[tuple[str, int], ...],
    *,
    now: float,
) -> tuple[Catalog, Appended]:
    """The run's next catalog: with a checkpoint more, and without those that are not kept. Pure;
    ``entry`` gets its place among the others."""
    catalog = current if plan.rewind_to is None else current.rewound(plan.rewind_to)
    if plan.schemas not in catalog.schemas:
        catalog = dataclasses.replace(catalog, schemas=(*catalog.schemas, plan.schemas))
    final = dataclasses.replace(
        entry,
        schema=catalog.schemas.index(plan.schemas),
        ordinal=catalog.last.ordinal + 1 if catalog.last is not None else 0,
    )
    catalog = catalog.with_checkpoint(
        final,
        segments,
        objects,
        replaces_since=plan.replaces_since,
        is_rollup=plan.choice.is_rollup,
        placement=plan.rules.placement,
    )
    if plan.rules.has_grid and catalog.grid_of(final) is None:
        catalog = catalog.with_grid(GridEntry(final.base, None, final.base, None))
    kept = choose_kept(catalog.checkpoints, plan.rules.keep, now=now)
    appended = Appended(
        final,
        rewound=tuple(step for step in current.steps if step not in catalog.steps),
        expired=tuple(step for step in catalog.steps if step not in kept),
    )
    return catalog.keeping(kept), appended


def append_checkpoint(
    writer: RunWriter,
    plan: SavePlan,
    entry: CheckpointEntry,
    segments: tuple[SegmentEntry, ...],
    objects: tuple[tuple[str, int], ...],
) -> Appended:
    """Commit a checkpoint, and drop those that are not kept.

    Raises:
        CommitUnknownError: the commit may have been carried out; ``entry`` says what it was.
        HoldfastError: as ``RunWriter.update`` does; nothing was committed.
    """
    if entry.kind == BASE:
        check_whole(plan.schemas, segments)
    appended: Appended | None = None

    def change(current: Catalog) -> Catalog:
        nonlocal appended
        catalog, appended = plan_append(current, plan, entry, segments, objects, now=writer.clock())
        return catalog

    try:
        writer.update(change)
    except UnavailableError as error:
        if appended is None or not writer.is_unsure:
            raise
        raise CommitUnknownError(
            "storage did not say whether the checkpoint is committed",
            entry=appended.entry,
            step=entry.step,
            error=str(error),
        ) from error
    assert appended is not None
    return appended
