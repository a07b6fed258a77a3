"""Commit what is stored: dense state follows the rows, then the catalog.

    StoredRows -> dense object -> entry -> append_checkpoint -> Committed

A process by itself commits its own rows. Rank 0 of many does the same once it has what all ranks
stored (checkpoint/ranks/rank_commit.py).

Invariant: after an error nothing is left of what was written here, unless the commit may have been
carried out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from holdfast.checkpoint.format import tree
from holdfast.checkpoint.format.catalog import CheckpointEntry
from holdfast.checkpoint.format.checksum import checksum
from holdfast.checkpoint.format.object import DENSE
from holdfast.checkpoint.format.stored_rows import StoredRows
from holdfast.checkpoint.planning.codecs import state_codec_name
from holdfast.checkpoint.planning.save_plan import SavePlan
from holdfast.checkpoint.saving.cancellation import Cancellation
from holdfast.checkpoint.saving.snapshot import DenseState
from holdfast.checkpoint.store.append import append_checkpoint
from holdfast.checkpoint.store.writer import RunWriter


@dataclass(frozen=True, slots=True)
class Committed:
    """What a save came to: a checkpoint exists."""

    bytes: int
    """What this process wrote of it."""
    full_bytes: int
    """What the whole model takes as it is."""
    durable_s: float
    """From the save's beginning to its commit."""


@dataclass(frozen=True, slots=True)
class CommitInput:
    """All that one process has for a checkpoint, before its commit."""

    plan: SavePlan
    rows: StoredRows
    dense: DenseState
    started: float
    """When the save began, by ``time.perf_counter``."""
    cancellation: Cancellation

    @property
    def seconds(self) -> float:
        """How long the save has taken so far."""
        return time.perf_counter() - self.started


class Committer(Protocol):
    """How stored rows become a checkpoint: alone, or with those of other ranks."""

    @property
    def rows_object(self) -> str | None:
        """The name of the object of rows; None: as the writer likes."""
        ...

    def taking_part(self) -> AbstractContextManager[None]:
        """For as long as the save lasts."""
        ...

    def commit(self, stored: CommitInput) -> Committed:
        """Commit, or see it committed.

        Raises:
            CommitUnknownError: it may be committed.
            HoldfastError: it is not committed.
        """
        ...

    def give_up(self, error: BaseException) -> None:
        """The save failed: tell those who wait for this process."""
        ...


class Alone:
    """The committer of a process that trains by itself."""

    rows_object: str | None = None

    def __init__(self, writer: RunWriter) -> None:
        self._writer = writer

    def taking_part(self) -> AbstractContextManager[None]:
        """No-op: there are no other ranks."""
        return contextlib.nullcontext()

    def commit(self, stored: CommitInput) -> Committed:
        """Commit."""
        return commit_stored(self._writer, stored)

    def give_up(self, error: BaseException) -> None:
        """No-op: nobody waits for this process."""


def commit_stored(
    writer: RunWriter, stored: CommitInput, rank_states: Sequence[bytes] = ()
) -> Committed:
    """Store dense state and commit a checkpoint whose rows are durable. ``rank_states``: what each
    of many ranks has for itself.

    Raises:
        CommitUnknownError: it may be committed.
        HoldfastError: it is not committed.
    """
    plan, rows, dense = stored.plan, stored.rows, stored.dense
    objects = list(rows.objects)
    try:
        # Dense state has an object of its own: it dies with its checkpoint, while the rows of a
        # base are needed as long as its deltas are.
        with writer.new_object(DENSE) as builder:
            data = tree.to_bytes(dense.structure, dense.tensors)
            extent = builder.append(DENSE, "dense", (data,), checksum(data))
            ranks = tuple(
                builder.append(DENSE, f"rank-{rank}", (state,), checksum(state))
                for rank, state in enumerate(rank_states)
            )
            stored.cancellation.check()
            objects.append((builder.name, builder.close()))
        entry = CheckpointEntry(
            step=plan.step,
            ordinal=0,
            kind=plan.kind,
            base=plan.base,
            schema=0,
            time=writer.clock(),
            codec=plan.codecs.weights.name,
            state_codec=state_codec_name(plan.schemas, plan.codecs),
            rows=sum(segment.rows for segment in rows.segments),
            row_bytes=sum(segment.extent.bytes for segment in rows.segments),
            bytes=sum(size for _, size in objects),
            full_bytes=sum(t.rows * t.row_bytes for t in plan.schemas) + dense.bytes,
            stall_s=rows.stall_s,
            reason=plan.choice.reason,
            dense=extent,
            build_s=stored.seconds,
            ranks=ranks,
            annotations=plan.annotations,
        )
        appended = append_checkpoint(writer, plan, entry, rows.segments, tuple(objects))
    except BaseException:
        writer.forget(name for name, _ in objects)
        raise
    committed = Committed(entry.bytes, entry.full_bytes, stored.seconds)
    appended.emit(writer.log, durable_s=committed.durable_s)
    return committed
