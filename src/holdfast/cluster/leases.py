"""Leases: which worker trains which batch. Pure bookkeeping, no clock and no network.

A worker is given one batch at a time, with the number of the push that will carry its gradients. A
lease ends when the push is known to be committed, or when its worker is lost and the push is known
not to be; then the batch goes to somebody else.

Three ways to keep workers together: not at all; no worker more than ``ahead_max`` batches ahead of
the slowest (bounded staleness); or in rounds of ``round_batches``, where all gradients of a round
are computed on the same weights and committed in the order of batches (synchronous training).

Paused, no batch is leased (in rounds: no round is begun), until all that are out are done; then
what is done can be said in a few numbers, and gone back to.

Invariants:
- Every batch is leased to one worker at a time, and done once.
- Numbers of one worker rise.
- In rounds a batch is leased only when every batch of the rounds before is done, and committed only
  when every batch of its round is staged and those before it are done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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

    def __init__(
        self, batches: range, *, ahead_max: int | None = None, round_batches: int | None = None
    ) -> None:
        self._batches = batches
        self._started = 0
        self._again: deque[int] = deque()
        self._round = round_batches
        self._staged: set[int] = set()
        self._done: set[int] = set()
        self._open: dict[int, Lease] = {}
        self._next_number: dict[int, int] = {}
        self._ahead_max = ahead_max
        self._done_by: dict[int, int] = {}
        self._is_paused = False
        self._started_max: int | None = None
        self.total = len(batches)
        self.finished = 0

    @property
    def has_rounds(self) -> bool:
        """Whether workers wait for each other between staging and committing."""
        return self._round is not None

    def join(self, worker: int) -> None:
        """A worker begins to take part."""
        self._next_number.setdefault(worker, 0)
        self._done_by[worker] = min(self._done_by.values(), default=0)

    def next(self, worker: int) -> Lease | None:
        """The next batch for a worker that has none; None: nothing for it now."""
        assert worker not in self._open
        if self._is_ahead(worker) or (self._is_paused and not self._is_mid_round):
            return None
        batch = self._take()
        if batch is None:
            return None
        number = self._next_number.get(worker, 0)
        self._next_number[worker] = number + 1
        lease = self._open[worker] = Lease(worker, number, batch)
        return lease

    def _take(self) -> int | None:
        if self._again:
            return self._again.popleft()
        if self._started == self.total:
            return None
        is_held = self._started_max is not None and self._started >= self._started_max
        if is_held and not self._is_mid_round:
            return None
        if self._round is not None and self._started // self._round * self._round > self.finished:
            return None  # the round before is not over
        self._started += 1
        return self._batches[self._started - 1]

    def stage(self, worker: int) -> None:
        """A worker's push is staged everywhere."""
        self._staged.add(self._open[worker].batch)

    def may_commit(self, worker: int) -> bool:
        """Whether it is a worker's turn to commit what it staged."""
        if self._round is None:
            return True
        at = self._batches.index(self._open[worker].batch)
        start = at // self._round * self._round
        around = self._batches[start : start + self._round]
        before = self._batches[start:at]
        return all(b in self._staged for b in around) and all(b in self._done for b in before)

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
            self._finish(lease.batch)
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
            self._finish(lease.batch)
            return []
        self._staged.discard(lease.batch)
        self._again.append(lease.batch)
        return [lease.batch]

    def _finish(self, batch: int) -> None:
        self.finished += 1
        if self._round is not None:
            self._staged.add(batch)
            self._done.add(batch)
            first = self._batches[max(0, self._started - 2 * self._round)]
            self._staged = {b for b in self._staged if b >= first}
            self._done = {b for b in self._done if b >= first}

    def hold_after(self, batches: int | None) -> None:
        """Lease no batch beyond so many, but end a round that has begun; None: lease all.

        >>> leases = Leases(range(9)); leases.hold_after(1)
        >>> leases.next(0).batch, leases.next(1)
        (0, None)
        >>> leases.hold_after(None); leases.next(1).batch
        1
        """
        self._started_max = batches

    # Going back.

    def pause(self) -> None:
        """Lease nothing until ``resume``."""
        self._is_paused = True

    def resume(self) -> None:
        """Lease again."""
        self._is_paused = False

    @property
    def _is_mid_round(self) -> bool:
        if self._round is None:
            return False
        return bool(self._again) or (
            self._started < self.total and self._started % self._round != 0
        )

    @property
    def is_quiet(self) -> bool:
        """Whether no batch is out."""
        return not self._open and not self._is_mid_round

    @property
    def done_up_to(self) -> int:
        """How many batches of the run are done, counted from batch 0."""
        return self._batches.start + self.finished

    def state(self) -> dict[str, Any]:
        """What is done while no batch is out, as plain JSON."""
        assert self.is_quiet
        return {
            "start": self._batches.start,
            "started": self._started,
            "again": list(self._again),
        }

    def rewind(self, state: Mapping[str, Any] | None) -> None:
        """Go back to what ``state`` said (None: to the beginning); who had batches has none.

        It may be of a run of more batches, or say what cannot be: then as far as it fits this one.

        >>> leases = Leases(range(9)); _ = leases.next(0); leases.done(0, 0)
        >>> state = leases.state(); _ = leases.next(0); leases.rewind(state)
        >>> leases.next(1).batch, leases.finished
        (1, 1)
        """
        is_same = state is not None and int(state["start"]) == self._batches.start
        started = int(state["started"]) if state is not None and is_same else 0
        self._started = min(started, self.total)
        begun = self._batches[: self._started]
        again = state["again"] if state is not None and is_same else ()
        self._again = deque(batch for batch in again if batch in begun)
        self.finished = self._started - len(self._again)
        self._open.clear()
        self._done_by.clear()
        self._staged.clear()
        self._done.clear()

    @property
    def is_over(self) -> bool:
        """Whether every batch is done."""
        return self.finished == self.total
