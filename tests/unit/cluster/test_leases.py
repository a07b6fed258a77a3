"""Leases against a plain simulation: workers that come, finish, stage, commit and get lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cluster.leases import Lease, Leases

WORKERS = 3
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("next", "next", "done", "done", "lost", "lost committed", "join")),
        st.integers(0, WORKERS - 1),
    ),
    max_size=80,
)
BATCHES = st.builds(range, st.integers(0, 5), st.integers(5, 30))


class Run:
    """What workers hold and have done, kept apart from the leases."""

    def __init__(self, leases: Leases, *, batches: range) -> None:
        self.leases = leases
        self.batches = batches
        self.open: dict[int, Lease] = {}
        self.staged: set[int] = set()
        self.done: list[int] = []
        self.last_number: dict[int, int] = {}
        self.members: dict[int, int] = {}
        self.names = WORKERS
        for worker in range(WORKERS):
            self.join(worker)

    def join(self, worker: int) -> None:
        self.leases.join(worker)
        self.members[worker] = min(self.members.values(), default=0)

    def next(self, worker: int) -> Lease | None:
        if worker in self.open:
            return None
        lease = self.leases.next(worker)
        if lease is not None:
            assert lease.worker == worker
            assert lease.number > self.last_number.get(worker, -1)
            assert lease.batch in self.batches
            assert lease.batch not in self.done
            assert lease.batch not in {other.batch for other in self.open.values()}
            self.last_number[worker] = lease.number
            self.open[worker] = lease
        expected = self.open[worker].number if worker in self.open else None
        assert self.leases.open_number(worker) == expected
        return lease

    def finish(self, worker: int) -> None:
        lease = self.open.pop(worker)
        self.leases.done(worker, lease.number)
        self.leases.done(worker, lease.number)  # said twice, counted once
        self.done.append(lease.batch)
        self.members[worker] += 1

    def lose(self, worker: int, *, is_committed: bool) -> None:
        """A worker is gone; another takes part in its place."""
        lease = self.open.pop(worker, None)
        self.members.pop(worker)
        number = -1 if lease is None else lease.number
        given_back = self.leases.lost(worker, committed=number if is_committed else number - 1)
        assert self.leases.lost(worker, committed=number) == []
        if lease is not None and is_committed:
            self.done.append(lease.batch)
        is_back = lease is not None and not is_committed
        assert given_back == ([lease.batch] if is_back and lease is not None else [])
        if lease is not None:
            self.staged.discard(lease.batch)
        self.join(self.names)
        self.names += 1

    def worker(self, pick: int) -> int:
        return sorted(self.members)[pick % len(self.members)]

    def check(self) -> None:
        assert len(set(self.done)) == len(self.done)
        assert self.leases.finished == len(self.done)
        assert self.leases.is_over == (sorted(self.done) == list(self.batches))


def play(run: Run, events: list[tuple[str, int]]) -> None:
    for what, pick in events:
        worker = run.worker(pick)
        match what:
            case "next":
                run.next(worker)
            case "done" if worker in run.open:
                run.finish(worker)
            case "lost" | "lost committed":
                run.lose(worker, is_committed=what == "lost committed")
            case "join" if len(run.members) < 5:
                run.join(run.names)
                run.names += 1
        run.check()


def finish_all(run: Run) -> None:
    """The slowest first: whatever happened before, somebody can always go on."""
    while not run.leases.is_over:
        before = len(run.done)
        for worker in sorted(run.members, key=run.members.__getitem__):
            run.next(worker)
            if worker in run.open:
                run.finish(worker)
        assert len(run.done) > before
    run.check()
    assert sorted(run.done) == list(run.batches)
    assert all(run.next(worker) is None for worker in run.members)


@settings(deadline=None)
@given(BATCHES, EVENTS)
def test_every_batch_is_done_once_whoever_is_lost(
    batches: range, events: list[tuple[str, int]]
) -> None:
    run = Run(Leases(batches), batches=batches)
    play(run, events)
    finish_all(run)


@settings(deadline=None)
@given(BATCHES, EVENTS, st.integers(0, 3))
def test_nobody_is_given_a_batch_who_is_too_far_ahead(
    batches: range, events: list[tuple[str, int]], ahead_max: int
) -> None:
    class Bounded(Run):
        def next(self, worker: int) -> Lease | None:
            is_free = worker not in self.open
            ahead = self.members[worker] - min(self.members.values())
            lease = super().next(worker)
            if lease is not None:
                assert ahead <= ahead_max
            elif is_free and ahead <= ahead_max:
                given_out = len(self.open) + len(self.done)
                assert given_out == len(self.batches)  # none is left
            return lease

    run = Bounded(Leases(batches, ahead_max=ahead_max), batches=batches)
    play(run, events)
    finish_all(run)


class Rounds(Run):
    """Workers that stage, and commit when it is their turn."""

    def __init__(self, leases: Leases, *, batches: range, round_batches: int) -> None:
        super().__init__(leases, batches=batches)
        self.round_batches = round_batches

    def round_of(self, batch: int) -> range:
        start = (batch - self.batches.start) // self.round_batches * self.round_batches
        return self.batches[start : start + self.round_batches]

    def next(self, worker: int) -> Lease | None:
        lease = super().next(worker)
        if lease is not None:
            earlier = range(self.batches.start, self.round_of(lease.batch).start)
            assert set(earlier) <= set(self.done)
        return lease

    def stage(self, worker: int) -> None:
        self.leases.stage(worker)
        self.staged.add(self.open[worker].batch)

    def may_commit(self, worker: int) -> bool:
        batch = self.open[worker].batch
        around = self.round_of(batch)
        is_turn = {b for b in around if b not in self.done} <= self.staged and set(
            range(self.batches.start, batch)
        ) <= set(self.done)
        assert self.leases.may_commit(worker) == is_turn
        return is_turn


ROUND_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("next", "next", "stage", "stage", "commit", "commit", "lost")),
        st.integers(0, WORKERS - 1),
    ),
    max_size=100,
)


@settings(max_examples=150, deadline=None)
@given(BATCHES, ROUND_EVENTS, st.integers(1, WORKERS))
def test_rounds_are_staged_whole_and_committed_in_order(
    batches: range, events: list[tuple[str, int]], round_batches: int
) -> None:
    leases = Leases(batches, round_batches=round_batches)
    run = Rounds(leases, batches=batches, round_batches=round_batches)
    for what, pick in events:
        worker = run.worker(pick)
        if what == "next":
            run.next(worker)
        elif what == "lost":
            # A push is committed only where it was its turn.
            is_turn = worker in run.open and run.may_commit(worker)
            run.lose(worker, is_committed=is_turn and pick % 2 == 0)
        elif worker in run.open and what == "stage":
            run.stage(worker)
        elif worker in run.open and run.may_commit(worker):
            run.finish(worker)
        run.check()
    while not leases.is_over:
        before = len(run.done)
        for worker in sorted(run.members):
            run.next(worker)
            if worker in run.open:
                run.stage(worker)
        for _ in run.members:
            for worker in sorted(run.open):
                if run.may_commit(worker):
                    run.finish(worker)
        assert len(run.done) > before
        run.check()
    assert run.done == list(batches)


def test_outside_of_rounds_it_is_always_a_workers_turn() -> None:
    leases = Leases(range(2))
    leases.next(0)
    assert leases.may_commit(0)


def test_a_worker_that_comes_late_does_not_hold_the_others_up() -> None:
    leases = Leases(range(20), ahead_max=1)
    leases.join(0)
    for number in range(10):
        assert leases.next(0) == Lease(0, number, number)
        leases.done(0, number)
    leases.join(1)
    assert leases.next(0) == Lease(0, 10, 10)


def test_no_batches_are_over_at_once() -> None:
    leases = Leases(range(0))
    assert leases.is_over
    assert leases.next(0) is None


def test_a_worker_has_one_batch_at_a_time() -> None:
    leases = Leases(range(2))
    leases.next(0)
    with pytest.raises(AssertionError):
        leases.next(0)


def test_going_back_takes_of_another_run_what_fits_this_one() -> None:
    leases = Leases(range(4))
    leases.rewind({"start": 0, "started": 9, "again": [2, 7, -1]})
    assert [leases.next(0), leases.next(1)] == [Lease(0, 0, 2), None]
    leases.done(0, 0)
    assert leases.is_over
