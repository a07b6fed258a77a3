"""Saves one after the other, and what each one's end means; all of it on the training thread.

    begin -> (background) -> finish or report -> committed: the model descends from it
                                              -> failed: its rows are given back, the error raised

Invariants:
- Two saves never overlap: the running one is waited for or cancelled first.
- A failure in the background is raised exactly once; one that nobody asked for any more is printed
  when the process ends.
- Lineage, claimed rows and lost samples move on here and nowhere else, and only by a commit.

Not here: how a save proceeds (checkpoint/saving/save.py), when one begins (checkpointer.py).
"""

from __future__ import annotations

import atexit
import functools
import sys
import weakref

from holdfast.checkpoint.changed import Changed
from holdfast.checkpoint.format.catalog import BASE
from holdfast.checkpoint.planning.lineage import Lineage
from holdfast.checkpoint.restoring.lost_samples import LostSamples
from holdfast.checkpoint.saving.running import RunningSave
from holdfast.checkpoint.store.writer import FollowingWriter, RunWriter
from holdfast.errors import CommitUnknownError


class Succession:
    """The saves of one training process: the one that runs, and the last one."""

    def __init__(
        self,
        lineage: Lineage,
        writer: RunWriter | FollowingWriter,
        *,
        changed: Changed,
        lost: LostSamples,
    ) -> None:
        self.running: RunningSave | None = None
        self.last: RunningSave | None = None
        self._lineage = lineage
        self._writer = writer
        self._changed = changed
        self._lost = lost
        self._at_exit = functools.partial(_report_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    @property
    def is_saved(self) -> bool:
        """Whether the last save is of this very step, and committed."""
        return self.of_this_step() is not None and self._lineage.step == self._lineage.at

    @property
    def is_as_restored(self) -> bool:
        """Whether the model is at the step it was restored from."""
        return self.of_this_step() is None and self._lineage.step == self._lineage.at

    def durable_step(self) -> int | None:
        """The last step that is committed, also where that is not settled yet; any thread asks."""
        last = self.last
        return last.step if last is not None and last.is_committed else self._lineage.at

    def of_this_step(self) -> RunningSave | None:
        """The last save, if it is of the step that training is at."""
        is_again = self.last is not None and self.last.step == self._lineage.step
        return self.last if is_again else None

    def begin(self, save: RunningSave) -> RunningSave:
        """A save has begun; its rows are claimed."""
        assert self.running is None
        self.running = self.last = save
        return save

    def abandon(self, error: BaseException) -> None:
        """The snapshot failed: what was claimed is given back, and nothing is left waiting."""
        if self.running is not None:
            self.running.abandon(error)
        self._settle()

    def finish(self, *, cancel: bool = False) -> None:
        """Wait for the running save or cancel it.

        Raises:
            HoldfastError: it failed.
        """
        if self.running is None:
            return
        if cancel:
            self.running.handle.cancel()
        else:
            self.running.join()
        self.report()

    def report(self) -> None:
        """Draw the conclusions of a save that is over; one that runs is left alone.

        Raises:
            HoldfastError: it failed, and nobody has heard of it.
        """
        save = self.running
        if save is None or not save.is_over:
            return
        self._settle()
        if save.error is not None and not save.is_reported:
            save.is_reported = True
            raise save.error

    def settle_commit(self) -> None:
        """A commit whose answer was lost: if it was carried out, the model descends from it.

        Raises:
            HoldfastError: storage cannot tell, or another writer owns the run.
        """
        self._writer.settle()
        last = self.last
        if last is None or not isinstance(last.error, CommitUnknownError):
            return
        if last.error.entry in self._writer.catalog.checkpoints:
            self._move_to(last)

    def forget_last(self) -> None:
        """The model is overwritten: the same step may come again, with other values."""
        self.last = None

    def close(self) -> None:
        """No more saves; what failed was raised."""
        atexit.unregister(self._at_exit)

    def _settle(self) -> None:
        save, self.running = self.running, None
        is_committed = save is not None and save.is_committed
        if save is not None and is_committed:
            self._move_to(save)
        self._changed.settle(
            is_committed=is_committed, kind=BASE if save is None else save.plan.kind
        )

    def _move_to(self, save: RunningSave) -> None:
        """The model descends from a save that is committed."""
        is_base = save.plan.kind == BASE
        if save.step != self._lineage.at:
            self._lost.saved(self._lineage.step - save.step, is_base=is_base)
            if is_base:
                self._changed.based()
        self._lineage.committed(save.step)


def _report_at_exit(reference: weakref.ref[Succession]) -> None:
    """Nothing is swallowed: a last save that failed after the last ``step()`` is printed."""
    succession = reference()
    save = None if succession is None else succession.running
    if save is not None and save.error is not None and not save.is_reported:
        print(f"holdfast: the last save failed: {save.error}", file=sys.stderr)
