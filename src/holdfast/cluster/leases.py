"""Leases: which worker trains which batch. Pure bookkeeping, no clock and no network.

A worker is given one batch at a time, with the number of the push that will carry its gradients. A
lease ends when the push is known to be committed, or when its worker is lost and the push is known
not to be; then the batch goes to somebody else.

Invariants:
- Every batch is leased to one worker at a time, and done once.
- Numbers of one worker rise.
- In lockstep no worker is more than ``ahead_max`` batches ahead of the slowest that still trains.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lease:
    """One batch for one worker."""

    worker: int
    number: int
    batch: int


class Leases:
    """The batches of a run, and who has them.

    >>> leases = Leases(range(2))
    >>> leases.next(0), leases.next(1)
    (Lease(worker=0, number=0, batch=0), Lease(worker=1, number=0, batch=1))
    >>> leases.lost(1, committed=-1)
    [1]
    >>> leases.done(0, 0); leases.next(0)
    Lease(worker=0, number=1, batch=1)
    """

    def __init__(self, batches: range, *, ahead_max: int | None = None) -> None:
        self._fresh = iter(batches)
        self._again: deque[int] = deque()
        self._open: dict[int, Lease] = {}
        self._next_number: dict[int, int] = {}
        self._ahead_max = ahead_max
        self._done_by: dict[int, int] = {}
        self.total = len(batches)
        self.finished = 0

    def join(self, worker: int) -> None:
        """A worker begins to take part."""
        self._next_number.setdefault(worker, 0)
        self._done_by[worker] = min(self._done_by.values(), default=0)

    def next(self, worker: int) -> Lease | None:
        """The next batch for a worker that has none; None: nothing for it now."""
        assert worker not in self._open
        if self._is_ahead(worker):
            return None
        batch = self._again.popleft() if self._again else next(self._fresh, None)
        if batch is None:
            return None
        number = self._next_number.get(worker, 0)
        self._next_number[worker] = number + 1
        lease = self._open[worker] = Lease(worker, number, batch)
        return lease

    def _is_ahead(self, worker: int) -> bool:
        if self._ahead_max is None:
            return False
        slowest = min((self._done_by.get(w, 0) for w in self._done_by), default=0)
        return self._done_by.get(worker, 0) - slowest > self._ahead_max

    def done(self, worker: int, number: int) -> None:
        """A worker's push is committed."""
        lease = self._open.get(worker)
        if lease is not None and lease.number == number:
            del self._open[worker]
            self.finished += 1
            self._done_by[worker] = self._done_by.get(worker, 0) + 1

    def open_number(self, worker: int) -> int | None:
        """The push that is awaited of a worker."""
        lease = self._open.get(worker)
        return None if lease is None else lease.number

    def lost(self, worker: int, *, committed: int) -> list[int]:
        """A worker is lost; its pushes up to ``committed`` happened. Returns batches given back."""
        self._done_by.pop(worker, None)
        lease = self._open.pop(worker, None)
        if lease is None:
            return []
        if lease.number <= committed:
            self.finished += 1
            return []
        self._again.append(lease.batch)
        return [lease.batch]

    @property
    def is_over(self) -> bool:
        """Whether every batch is done."""
        return self.finished == self.total
