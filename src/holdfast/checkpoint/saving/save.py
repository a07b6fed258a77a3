"""A save, from the plan to the commit: the order of its steps, in one place.

    begin_save starts a thread, then the caller takes the snapshot (training waits for that alone)
    the thread: store_rows -> Committer.commit -> what follows a commit

Invariant: until the commit nothing that existed before is touched; after it nothing can undo it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol

from holdfast.checkpoint.planning.save_plan import SavePlan
from holdfast.checkpoint.saving.commit import CommitInput, Committed, Committer
from holdfast.checkpoint.saving.running import RunningSave
from holdfast.checkpoint.saving.snapshot import StagedPart
from holdfast.checkpoint.saving.staged import Staged
from holdfast.checkpoint.saving.store_rows import StoreSeconds, store_rows
from holdfast.checkpoint.saving.workbench import Workbench
from holdfast.checkpoint.selecting.selection import Selection
from holdfast.checkpoint.store.writer import FollowingWriter, RunWriter
from holdfast.model.schema import TableSchema


class SaveObserver(Protocol):
    """What learns from a save in its own threads, so that it need not do so in the next stall."""

    def see_part(self, staged: StagedPart) -> None:
        """A part was copied; called by the threads that encode."""
        ...

    def see_commit(self) -> None:
        """The checkpoint exists."""
        ...


def begin_save(
    plan: SavePlan,
    selections: Sequence[tuple[TableSchema, Selection]],
    *,
    writer: RunWriter | FollowingWriter,
    committer: Committer,
    bench: Workbench,
    observer: SaveObserver | None = None,
) -> RunningSave:
    """Start the background half of a save; its snapshot goes into ``copies`` and is then
    completed, or abandoned."""
    started = time.perf_counter()
    copies = Staged(
        bench.pool,
        rows=sum(selection.rows for _, selection in selections),
        bytes_=sum(selection.rows * schema.row_bytes for schema, selection in selections),
    )
    save = RunningSave(plan, copies, writer.log)

    def run() -> None:
        try:
            with committer.taking_part():
                committed, spent = _store_and_commit(
                    save, started, writer=writer, committer=committer, bench=bench,
                    observer=observer,
                )  # fmt: skip
            save.succeed(committed, spent)
            if observer is not None:
                observer.see_commit()
        except BaseException as error:  # a thread's edge: kept for the training thread
            save.fail(error)
        finally:
            save.end()

    # Not a daemon: a process that ends waits for its last checkpoint.
    threading.Thread(target=run, name=f"holdfast-save-{plan.step}").start()
    return save


def _store_and_commit(
    save: RunningSave,
    started: float,
    *,
    writer: RunWriter | FollowingWriter,
    committer: Committer,
    bench: Workbench,
    observer: SaveObserver | None,
) -> tuple[Committed, StoreSeconds]:
    try:
        rows, spent = store_rows(
            save.plan,
            save.copies,
            writer=writer,
            bench=bench,
            name=committer.rows_object,
            cancellation=save.cancellation,
            on_staged=None if observer is None else observer.see_part,
        )
        try:
            committed = committer.commit(
                CommitInput(save.plan, rows, save.copies.dense, started, save.cancellation)
            )
        except BaseException:
            writer.forget(name for name, _ in rows.objects)
            raise
        return committed, spent
    except BaseException as error:
        committer.give_up(error)
        raise
