"""The commit of one process: its rows are stored; dense state follows, then the catalog.

    StoredPart -> dense object -> entry -> enter_checkpoint -> the save is committed

Rank 0 of many does the same once it has everybody's part (joint.py).

Invariant: after an error nothing is left of what was written here, unless the commit may have been
carried out.

Not here: storing rows (save.py), the catalog's change (enter.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager

from holdfast.checkpoint import tree
from holdfast.checkpoint.catalog import CheckpointEntry
from holdfast.checkpoint.checksum import checksum
from holdfast.checkpoint.enter import enter_checkpoint
from holdfast.checkpoint.object import DENSE
from holdfast.checkpoint.part import StoredPart
from holdfast.checkpoint.save import Save
from holdfast.checkpoint.snapshot import DenseState
from holdfast.checkpoint.strategy import state_codec_name
from holdfast.checkpoint.writer import RunWriter


class Alone:
    """The committer of a process that trains by itself."""

    rows_object: str | None = None

    def __init__(self, writer: RunWriter) -> None:
        self._writer = writer

    def taking_part(self) -> AbstractContextManager[None]:
        """Nobody else does."""
        return contextlib.nullcontext()

    def finish(self, save: Save, part: StoredPart, dense: DenseState) -> None:
        """Commit."""
        commit_parts(self._writer, save, part, dense)

    def give_up(self, error: BaseException) -> None:
        """Nobody waits for it."""


def commit_parts(
    writer: RunWriter,
    save: Save,
    part: StoredPart,
    dense: DenseState,
    own: Sequence[bytes] = (),
) -> None:
    """Store dense state and commit a checkpoint whose rows are durable; ``own`` is what each of
    many ranks has of its own.

    Raises:
        HoldfastError: it is not committed, or that is not known.
    """
    objects = list(part.objects)
    try:
        # Dense state has an object of its own: it dies with its checkpoint, while the rows of a
        # base are needed as long as its deltas are.
        with save.new_object(DENSE, objects) as builder:
            data = tree.to_bytes(dense.structure, dense.tensors)
            extent = builder.append(DENSE, "dense", (data,), checksum(data))
            ranks = tuple(
                builder.append(DENSE, f"rank-{rank}", (state,), checksum(state))
                for rank, state in enumerate(own)
            )
            save.check_cancelled()
        order = save.order
        schemas = order.entering.schemas
        entry = CheckpointEntry(
            step=order.step,
            ordinal=0,
            kind=order.kind,
            base=order.base,
            schema=0,
            time=writer.clock(),
            codec=order.codecs.weights.name,
            state_codec=state_codec_name(schemas, order.codecs),
            rows=sum(segment.rows for segment in part.segments),
            row_bytes=sum(segment.extent.bytes for segment in part.segments),
            bytes=sum(size for _, size in objects),
            full_bytes=sum(t.rows * t.row_bytes for t in schemas) + dense.bytes,
            stall_s=part.stall_s,
            reason=order.reason,
            dense=extent,
            build_s=save.seconds,
            ranks=ranks,
        )
        entered = enter_checkpoint(
            writer, entry, part.segments, tuple(objects), order.entering, on_entry=save.expect
        )
    except BaseException:
        writer.forget(name for name, _ in objects)
        raise
    save.committed(bytes_=entry.bytes, full_bytes=entry.full_bytes)
    entered.tell(writer.log, durable_s=save.stats.durable_s)
    save.on_commit()
