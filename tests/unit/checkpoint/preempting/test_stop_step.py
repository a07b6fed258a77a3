"""Ranks agree on one step to save at, however far apart they are: threads on a real store."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist

from holdfast.checkpoint.preempting.stop_step import Agreed, Said, StopStep, plan_stop
from holdfast.checkpoint.ranks.mailbox import Mailbox
from holdfast.errors import UnavailableError


@dataclass
class OneOf:
    """What StopStep needs of Ranks."""

    rank: int
    size: int
    mailbox: Mailbox
    timeout_s: float = 60.0

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0


@dataclass
class Trainer:
    """A rank: a thread that trains, and one that watches."""

    ranks: Any
    chance: random.Random
    barrier: threading.Barrier | None
    rings_at: int | None
    step: int = 0
    stopped: list[int] = field(default_factory=list)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        reason = "" if self.rings_at is None else "a notice"
        self.stop = StopStep(self.ranks, lambda: Said(self.step, reason))
        self.is_over = threading.Event()
        self.is_ringing = threading.Event()

    def watch(self) -> None:
        while not self.is_over.is_set():
            if self.is_ringing.is_set() and not self.stop.is_open:
                self.stop.ring()
            self.stop.poll()
            time.sleep(self.chance.choice([0, 0, 0.001, 0.01]))

    def train(self) -> None:
        try:
            while not self.stopped:
                if self.chance.random() < 0.3:
                    time.sleep(self.chance.random() * 0.003)
                if self.barrier is not None:
                    self.barrier.wait(30)  # as a collective
                self.step += 1
                if self.step == self.rings_at:
                    self.is_ringing.set()
                if self.stop.is_due(self.step):
                    self.stopped.append(self.step)
        except BaseException as error:
            self.error = error
            if self.barrier is not None:
                self.barrier.abort()


@pytest.mark.parametrize("is_coupled", [True, False])
@pytest.mark.parametrize("seed", range(15))
def test_all_ranks_stop_at_one_step_that_none_has_passed(seed: int, is_coupled: bool) -> None:
    chance = random.Random(seed)
    size = chance.choice([2, 3, 4, 8])
    store = dist.HashStore()
    barrier = threading.Barrier(size) if is_coupled else None
    ringing = set(chance.sample(range(size), chance.randint(1, size)))
    trainers = [
        Trainer(
            OneOf(rank, size, Mailbox(store)),
            random.Random(f"{seed}/{rank}"),
            barrier,
            chance.randint(1, 30) if rank in ringing else None,
        )
        for rank in range(size)
    ]
    watchers = [threading.Thread(target=one.watch, daemon=True) for one in trainers]
    threads = [threading.Thread(target=one.train, daemon=True) for one in trainers]
    for thread in (*watchers, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    for one, watcher in zip(trainers, watchers, strict=True):
        one.is_over.set()
        watcher.join()
    assert [one.error for one in trainers] == [None] * size, seed
    stopped = {tuple(one.stopped) for one in trainers}
    assert len(stopped) == 1, (seed, stopped)
    assert {one.step for one in trainers} == set(stopped.pop())


def test_the_next_notice_has_an_agreement_of_its_own() -> None:
    store = dist.HashStore()
    counts = [3, 5]
    ranks: list[Any] = [OneOf(rank, 2, Mailbox(store)) for rank in range(2)]
    stops = [StopStep(one, lambda rank=one.rank: Said(counts[rank])) for one in ranks]
    assert not any(stop.is_due(9) for stop in stops)
    for expected in (6, 9):
        stops[1].ring()
        stops[1].ring()  # once is enough, twice does no harm
        stops[0].poll()
        assert stops[0].is_open and stops[0].agreed is None
        stops[1].poll()
        stops[0].poll()
        assert [stop.agreed.step for stop in stops if stop.agreed] == [expected] * 2
        assert [stop.is_due(expected - 1) for stop in stops] == [False, False]
        assert [stop.is_due(expected) for stop in stops] == [True, True]
        stops[0].say_done()
        assert not stops[0].are_all_done()
        stops[1].say_done()
        assert stops[0].are_all_done()
        for stop in stops:
            stop.finish()
            assert not stop.is_open
            stop.poll()
            assert not stop.is_due(expected)
        counts[:] = [8, 8]


def test_a_rank_that_never_answers_ends_the_wait() -> None:
    store = dist.HashStore()
    ranks: Any = OneOf(0, 2, Mailbox(store), timeout_s=0.05)
    stop = StopStep(ranks, lambda: Said(1))
    stop.ring()
    stop.poll()
    with pytest.raises(UnavailableError, match="did not agree"):
        stop.is_due(2)


def test_a_signal_counts_more_than_a_notice_and_the_shortest_deadline_counts() -> None:
    said = [Said(4, "ck.preempt()", None, 60.0), Said(9), Said(3, "SIGTERM", 15, 30.0)]
    assert plan_stop(said) == Agreed(10, "SIGTERM at rank 2", 15, 30.0)
    assert plan_stop(said[:2]) == Agreed(10, "ck.preempt() at rank 0", None, 60.0)


def test_what_a_rank_says_survives_its_message() -> None:
    for said in (Said(3), Said(7, "SIGTERM", 15, 2.5)):
        assert Said.from_bytes(said.to_bytes()) == said
