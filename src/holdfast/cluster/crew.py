"""The crew: workers as a coordinator sees them, and the batches they are given.

Invariants:
- A worker that is retired is given nothing more, and what it says is done does not count.
- While batches are paused none is given out, except to finish a round that was begun.

Not here: the rules of batches (leases.py), pushes of lost workers (commit.py, coordinator.py),
processes of workers (cluster.py starts them).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from holdfast import events
from holdfast.cluster.engine import Engine, Process
from holdfast.cluster.leases import Leases
from holdfast.cluster.message import Message
from holdfast.errors import InvalidRequestError

_POLL_S = 1.0  # how long a question for a turn is kept waiting
_TICK_S = 0.05


class Crew:
    """Who trains, and who no longer does."""

    def __init__(
        self,
        engine: Engine,
        *,
        log: events.EventLog,
        changed: threading.Condition,
        check: Callable[[], None],
        count_workers: Callable[[], int],
    ) -> None:
        """``check`` raises what cannot be made good; ``count_workers`` says how many numbers of
        workers were given out."""
        self.leases: Leases | None = None
        self._engine, self._log, self._changed = engine, log, changed
        self._check, self._count_workers = check, count_workers
        self._workers: dict[str, tuple[int, Process]] = {}
        self._retired: set[int] = set()
        self._dead_early: set[str] = set()  # before they took part

    @property
    def retired(self) -> list[int]:
        """Workers that are not heard any more."""
        return sorted(self._retired)

    def join(self, process: Process, worker: int) -> bool:
        """A worker process takes part; whether it is still alive. One that was ready, and given a
        batch, may have died before it is known here."""
        with self._changed:
            is_alive = process.name not in self._dead_early
            is_late = worker in self._retired
            self._workers[process.name] = (worker, process)
            if self.leases is not None:
                self.leases.join(worker)
        if is_late:  # all were stopped while it was starting
            self._workers.pop(process.name)
            self._engine.kill(process)
            return True
        self._log.emit(events.WorkerStarted(worker=worker, pid=process.pid))
        return is_alive

    def leave(self, process: Process) -> int | None:
        """A worker's process is gone: which worker it was; None if it is none any more."""
        with self._changed:
            if process.name not in self._workers:
                self._dead_early.add(process.name)
                return None
            return self._workers.pop(process.name)[0]

    def stay(self, process: Process, worker: int) -> None:
        """It is not settled yet what a lost worker did."""
        with self._changed:
            self._workers[process.name] = (worker, process)

    def retire(self, worker: int, *, committed: int) -> list[int]:
        """A lost worker's pushes up to ``committed`` count; batches that are given back."""
        with self._changed:
            self._retired.add(worker)
            if self.leases is None:
                return []
            return self.leases.lost(worker, committed=committed)

    def retire_all(self) -> None:
        """Stop all workers: what they keep is of a time that is gone."""
        with self._changed:
            self._retired |= set(range(self._count_workers()))
            stopped = [process for _, process in self._workers.values()]
            self._workers.clear()
        for process in stopped:
            self._engine.kill(process)

    def rewind(self, batches: Mapping[str, Any] | None) -> None:
        """Go back to what was done at a checkpoint."""
        with self._changed:
            if self.leases is not None:
                self.leases.rewind(batches)

    def pause(self, timeout_s: float, *, is_wanted: Callable[[], bool]) -> bool:
        """Lease no batches until ``resume``; whether none is out any more."""
        ends_at = time.monotonic() + timeout_s
        with self._changed:
            if self.leases is None:
                return True
            self.leases.pause()
            while not self.leases.is_quiet:
                if not is_wanted() or time.monotonic() > ends_at:
                    return False
                self._check()
                self._changed.wait(_TICK_S)
            return True

    def resume(self) -> None:
        """Lease batches again."""
        with self._changed:
            if self.leases is not None:
                self.leases.resume()

    def answer_turn(self, worker: int) -> Message:
        """A worker has staged: may it commit? Waits a while for its turn."""
        ends_at = time.monotonic() + _POLL_S
        with self._changed:
            leases = self.leases
            if leases is None or leases.open_number(worker) is None:
                raise InvalidRequestError("this worker has no batch", worker=worker)
            leases.stage(worker)
            self._changed.notify_all()
            while not leases.may_commit(worker):
                self._check()
                if not self._changed.wait(max(0.0, ends_at - time.monotonic())):
                    return Message("wait")
        return Message("turn")

    def answer_lease(self, worker: int, done: int | None) -> Message:
        """A worker has done its batch, if one is named, and asks for the next."""
        with self._changed:
            self._check()
            if self.leases is None:
                raise InvalidRequestError("this cluster has no batches to give")
            if worker >= self._count_workers():
                raise InvalidRequestError("no such worker", worker=worker)
            if worker in self._retired:
                return Message("wait")
            if done is not None:
                self.leases.done(worker, int(done))
                self._changed.notify_all()
            if self.leases.open_number(worker) is not None:
                raise InvalidRequestError("this worker has a batch already", worker=worker)
            lease = self.leases.next(worker)
            if lease is None:
                return Message("over" if self.leases.is_over else "wait")
            return Message("lease", {"number": lease.number, "batch": lease.batch})
