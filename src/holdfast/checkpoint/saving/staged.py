"""Rows on their way from the snapshot to the background: copied parts, then dense state.

    snapshot (training thread): parts, then complete or abandon -> store_rows (a thread)

Invariants:
- Whatever happens, every staging buffer goes back to the pool.
- The background begins when the snapshot is complete, so that it does not take processor time from
  the stall; or at once where the staging buffer is too small for the snapshot.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future

from holdfast.checkpoint.saving.snapshot import DenseState, PartQueue, StagedPart
from holdfast.checkpoint.saving.staging import StagingPool


class Staged:
    """What one snapshot has copied."""

    def __init__(self, pool: StagingPool, *, rows: int, bytes_: int) -> None:
        """``rows`` and ``bytes_``: how many will be copied."""
        self.rows = rows
        self.bytes = bytes_
        self.parts: PartQueue = queue.SimpleQueue()
        self.stall_s = 0.0
        self._pool = pool
        self._dense: DenseState | None = None
        self._may_begin = threading.Event()
        self._is_over = threading.Event()
        pool.begin(on_starved=self._may_begin.set)

    # The training thread's side.

    def complete(self, dense: DenseState, *, stall_s: float) -> None:
        """The snapshot is complete: nothing more will be put into ``parts``."""
        self._dense = dense
        self.stall_s = stall_s
        self.abandon()

    def abandon(self) -> None:
        """The snapshot ends, complete or not."""
        self._is_over.set()
        self._may_begin.set()
        self.parts.put(None)

    # The background thread's side.

    @property
    def dense(self) -> DenseState:
        """The dense state; only of a snapshot that is complete."""
        assert self._dense is not None
        return self._dense

    def wait_until_begin(self) -> None:
        """Wait until encoding may begin."""
        self._may_begin.wait()

    def wait_until_over(self) -> None:
        """Wait until the snapshot has ended."""
        self._is_over.wait()

    def give_back(self, copy: Future[StagedPart]) -> None:
        """Return the buffer of a part, once it is copied; one that failed has none."""
        if copy.exception() is None:
            self._pool.release(copy.result().buffer)

    def fail(self, error: BaseException) -> None:
        """Nothing more will be stored: wake the snapshot, and return the buffers that are left."""
        self._pool.fail(error)
        while True:
            try:
                item = self.parts.get(block=not self._is_over.is_set())
            except queue.Empty:
                return
            if item is None:
                return
            self.give_back(item)

    def close(self) -> None:
        """The background half is over."""
        self._dense = None
        self._pool.trim()
