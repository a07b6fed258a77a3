"""A save that runs: what the training thread and the save's own thread tell each other.

    training thread: complete, or abandon        save's thread: succeed or fail, then end

Invariants:
- A failure is kept for whoever waits; it is never swallowed.
- Whatever happens, every staging buffer goes back to the pool.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref

from holdfast import events
from holdfast.checkpoint.planning.save_plan import SavePlan
from holdfast.checkpoint.saving.cancellation import Cancellation
from holdfast.checkpoint.saving.commit import Committed
from holdfast.checkpoint.saving.pending import PendingSave, SaveStats
from holdfast.checkpoint.saving.snapshot import DenseState
from holdfast.checkpoint.saving.staged import Staged
from holdfast.checkpoint.saving.store_rows import StoreSeconds
from holdfast.errors import SaveCancelledError


class RunningSave:
    """One save, as the training thread and the save's own thread share it."""

    def __init__(self, plan: SavePlan, copies: Staged, log: events.EventLog) -> None:
        self.plan = plan
        self.copies = copies
        self.error: BaseException | None = None
        self.is_reported = False
        """The error was raised to the user."""
        self.cancellation = Cancellation(plan.step)
        self._log = log
        self._stats = SaveStats(step=plan.step, kind=plan.kind, is_rollup=plan.choice.is_rollup,
                                rows=copies.rows, staged_bytes=copies.bytes)  # fmt: skip
        self._is_committed = False
        self._over = threading.Event()
        # Weak: in a cycle the staging memory would stay until the garbage collector finds it.
        self._handle: weakref.ref[PendingSave] | None = None

    @property
    def step(self) -> int:
        """The step this save is of."""
        return self.plan.step

    @property
    def handle(self) -> PendingSave:
        """What the user gets; the same object for as long as the user holds it."""
        handle = None if self._handle is None else self._handle()
        if handle is None:
            handle = PendingSave(self)
            self._handle = weakref.ref(handle)
        return handle

    @property
    def stats(self) -> SaveStats:
        """What it has cost so far."""
        return self._stats

    @property
    def is_over(self) -> bool:
        """Whether it is committed, cancelled or failed."""
        return self._over.is_set()

    @property
    def is_committed(self) -> bool:
        """Whether the checkpoint exists, as far as is known."""
        return self._is_committed

    @property
    def has_error(self) -> bool:
        """Whether the save is over, and not well."""
        return self.is_over and self.error is not None

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the save is over, well or not; whether it is."""
        return self._over.wait(timeout)

    # What the training thread calls.

    def complete(self, dense: DenseState, *, stall_s: float) -> None:
        """The snapshot is complete."""
        self._stats = dataclasses.replace(self._stats, stall_s=stall_s)
        self.copies.complete(dense, stall_s=stall_s)

    def abandon(self, error: BaseException) -> None:
        """The snapshot failed: end the background half too."""
        self.error = error
        self.is_reported = True
        self.cancellation.ask()
        self.copies.abandon()
        self._over.wait()

    def confirm(self) -> None:
        """The commit, whose answer was lost, was carried out after all."""
        self.error = None
        self._is_committed = True

    # What its thread calls.

    def succeed(self, committed: Committed, spent: StoreSeconds) -> None:
        """The checkpoint exists."""
        self._is_committed = True
        self._stats = dataclasses.replace(
            self._stats,
            bytes=committed.bytes,
            full_bytes=committed.full_bytes,
            encode_s=spent.encode_s,
            store_s=spent.store_s,
            durable_s=committed.durable_s,
        )

    def fail(self, error: BaseException) -> None:
        """Keep the error for the training thread, and free a snapshot that waits."""
        if isinstance(error, SaveCancelledError):
            self.is_reported = True
        self.error = self.error or error
        text = str(self.error) or repr(self.error)
        if isinstance(self.error, SaveCancelledError):
            self._log.emit(events.SaveCancelled(step=self.step, reason=text))
        else:
            self._log.emit(events.SaveFailed(step=self.step, error=text))
        self.copies.fail(error)

    def end(self) -> None:
        """Nothing more is done for this save."""
        self.copies.close()
        self._over.set()
