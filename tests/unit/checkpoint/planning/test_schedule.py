"""When a checkpoint is due, by steps, by time or by a tolerated loss, with a clock of our own."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

import holdfast as hf
from holdfast.checkpoint.planning.schedule import Schedule
from holdfast.checkpoint.settings import make_settings


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Grants:
    """A reader that checks that it is never asked for more than it was granted."""

    def __init__(self) -> None:
        self.given: list[int] = []
        self.left = 0

    def __call__(self, batches: int) -> None:
        assert batches >= 1
        self.given.append(batches)
        self.left = batches

    def read(self) -> None:
        assert self.left > 0, "the reader was not granted this batch"
        self.left -= 1


def run(
    schedule: Schedule,
    clock: Clock,
    first: int,
    seconds: Iterable[float],
    *,
    grants: Grants | None = None,
) -> list[int]:
    """Take steps of so many seconds each; the steps that are due."""
    due = []
    for step, step_s in enumerate(seconds, start=first + 1):
        if grants is not None:
            grants.read()
        clock.now += step_s
        if schedule.is_due(step):
            if grants is not None:
                assert grants.left == 0, "a step is due only if it was announced"
            due.append(step)
            schedule.saved(step)
    return due


def times(due: list[int], seconds: list[float]) -> list[float]:
    """When the steps were due, from the start."""
    return [sum(seconds[:step]) for step in due]


@pytest.mark.parametrize(("start", "due"), [(0, [4, 8, 12]), (3, [4, 8, 12]), (4, [8, 12])])
def test_every_so_many_steps_wherever_training_went_on(start: int, due: list[int]) -> None:
    clock = Clock()
    schedule = Schedule(4, clock=clock)
    schedule.start(start)
    assert run(schedule, clock, start, [1] * (13 - start)) == due


def test_without_an_interval_nothing_is_due() -> None:
    clock, grants = Clock(), Grants()
    schedule = Schedule(None, clock=clock, grant=grants)
    schedule.start(0)
    assert run(schedule, clock, 0, [1] * 50) == []
    assert schedule.steps_left(50) is None
    assert not grants.given


def test_time_is_counted_from_the_save_before() -> None:
    clock = Clock()
    schedule = Schedule("30min", clock=clock)
    schedule.start(0)
    assert run(schedule, clock, 0, [6] * 900) == [300, 600, 900]


@pytest.mark.parametrize("has_grant", [False, True])
def test_three_steps_an_hour_save_at_the_first_step_after_half_an_hour(has_grant: bool) -> None:
    clock, grants = Clock(), Grants() if has_grant else None
    schedule = Schedule("30min", clock=clock, grant=grants)
    schedule.start(0)
    assert run(schedule, clock, 0, [1200] * 7, grants=grants) == [2, 4, 6]


@pytest.mark.parametrize("has_grant", [False, True])
def test_one_slow_first_step_does_not_delay_the_first_save(has_grant: bool) -> None:
    clock, grants = Clock(), Grants() if has_grant else None
    seconds = [60.0, *[0.5] * 5000]
    schedule = Schedule("10min", clock=clock, grant=grants)
    schedule.start(0)
    when = times(run(schedule, clock, 0, seconds, grants=grants), seconds)
    assert when[0] == pytest.approx(600, abs=2)
    for a, b in itertools.pairwise(when):
        assert 600 <= b - a <= 602


@pytest.mark.parametrize("seed", range(20))
def test_a_granted_reader_is_never_short_and_saves_are_late_by_a_step_at_most(seed: int) -> None:
    chance = random.Random(seed)
    seconds = [
        speed * chance.uniform(0.8, 1.2)
        for _ in range(30)
        for speed in [10 ** chance.uniform(-2, 1)]
        for _ in range(chance.randrange(1, 300))
    ]
    clock, grants = Clock(), Grants()
    schedule = Schedule("1min", clock=clock, grant=grants)
    schedule.start(0)
    due = run(schedule, clock, 0, seconds, grants=grants)
    assert due, seed
    for a, b in itertools.pairwise([0, *due]):
        assert sum(seconds[a:b]) >= 60 - 1e-6
        assert sum(seconds[a : b - 2]) < 60, (seed, a, b)  # one step more, to announce it


def test_at_a_steady_speed_a_granted_reader_costs_a_step_at_most() -> None:
    clock, grants = Clock(), Grants()
    schedule = Schedule("30min", clock=clock, grant=grants)
    schedule.start(0)
    due = run(schedule, clock, 0, [6.0] * 2000, grants=grants)
    assert {b - a for a, b in itertools.pairwise([0, *due])} <= {300, 301}


def test_steps_or_seconds_whichever_comes_first() -> None:
    clock = Clock()
    schedule = Schedule(hf.Every(steps=100, seconds=60), clock=clock)
    schedule.start(0)
    # 150 fast steps, then slow ones: the time, until steps are fast again
    assert run(schedule, clock, 0, [0.1] * 150) == [100]
    assert run(schedule, clock, 150, [30] * 5) == [152, 154]  # 5 s had passed since step 100
    assert run(schedule, clock, 155, [0.1] * 145) == [200, 300]


def test_steps_or_seconds_with_a_granted_reader() -> None:
    clock, grants = Clock(), Grants()
    schedule = Schedule(hf.Every(steps=100, seconds=60), clock=clock, grant=grants)
    schedule.start(0)
    due = run(schedule, clock, 0, [0.1] * 150 + [30] * 6 + [0.1] * 200, grants=grants)
    assert due == [100, 153, 155, 200, 300]


def test_a_clock_that_is_set_back_delays_by_an_interval_at_most() -> None:
    clock = Clock()
    schedule = Schedule("1min", clock=clock)
    schedule.start(0)
    assert run(schedule, clock, 0, [10] * 4) == []
    clock.now -= 100_000
    assert run(schedule, clock, 4, [10] * 6) == [6 + 1]
    clock.now += 100_000
    assert run(schedule, clock, 10, [10]) == [11]


def test_an_interval_shorter_than_a_step_saves_at_every_step() -> None:
    for every in (hf.Pls(1e-9, mtbf_h=1, servers=1), "1ms"):
        clock = Clock()
        schedule = Schedule(every, clock=clock)
        schedule.start(0)
        assert run(schedule, clock, 0, [10] * 4) == [1, 2, 3, 4]


def test_a_tolerated_loss_is_a_time() -> None:
    # 2 * 0.1 * 8 servers * 0.25 h = 0.4 h = 1440 s
    every = hf.Pls(0.1, mtbf_h=0.25, servers=8)
    assert every.interval_h == pytest.approx(0.4)
    clock = Clock()
    schedule = Schedule(every, clock=clock)
    schedule.start(0)
    due = run(schedule, clock, 0, [6] * 1000)
    assert due[0] in (240, 241)
    assert {b - a for a, b in itertools.pairwise(due)} <= {240, 241}
    later = run(schedule, clock, 1000, [3] * 2000)  # training became twice as fast
    assert later[-1] - later[-2] == pytest.approx(480, abs=1)


@pytest.mark.parametrize("every", [hf.Pls(0.1, mtbf_h=0.25, servers=8), "24min"])
def test_a_part_of_the_rows_is_saved_in_a_part_of_the_interval(every: Any) -> None:
    clock = Clock()
    settings = make_settings({"every": every})
    schedule = Schedule(settings.interval_of(hf.Priority(by="mfu", r=0.125)), clock=clock)
    schedule.start(0)
    due = run(schedule, clock, 0, [6] * 400)
    assert {b - a for a, b in itertools.pairwise(due)} <= {30, 31}


def test_a_reader_is_granted_the_steps_until_the_next_checkpoint() -> None:
    clock, grants = Clock(), Grants()
    schedule = Schedule(4, clock=clock, grant=grants)
    schedule.start(1)
    assert run(schedule, clock, 1, [1] * 8, grants=grants) == [4, 8]
    assert grants.given == [3, 4, 4]
    schedule.close()
    schedule.start(9)
    assert len(grants.given) == 3


class Meeting:
    """Ranks that take steps in turn: what rank 0 says reaches the others in the same step."""

    def __init__(self) -> None:
        self.said: list[int] = []
        self.heard: dict[int, int] = {}

    def share(self, rank: int) -> Callable[[int], int]:
        def exchange(number: int) -> int:
            if rank == 0:
                self.said.append(number)
                return number
            at = self.heard.get(rank, 0)
            self.heard[rank] = at + 1
            return self.said[at]  # an IndexError: this rank asks where rank 0 did not

        return exchange


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("every", ["1min", hf.Every(steps=70, seconds=60)])
def test_all_ranks_save_the_same_steps_whatever_their_clocks_say(every: Any, seed: int) -> None:
    chance = random.Random(seed)
    clocks = [Clock() for _ in range(4)]
    for clock in clocks[1:]:
        clock.now += chance.uniform(-1e6, 1e6)
    meeting = Meeting()
    schedules = [
        Schedule(every, clock=clock, share=meeting.share(rank)) for rank, clock in enumerate(clocks)
    ]
    for schedule in schedules:
        schedule.start(0)
    seconds = [10 ** chance.uniform(-2, 0.5) for _ in range(20) for _ in range(50)]
    due: list[list[int]] = [[] for _ in schedules]
    for step, step_s in enumerate(seconds, start=1):
        for rank, (schedule, clock) in enumerate(zip(schedules, clocks, strict=True)):
            clock.now += step_s if rank == 0 else chance.uniform(-5, 50)
            if schedule.is_due(step):
                due[rank].append(step)
                schedule.saved(step)
    assert due[0] and all(other == due[0] for other in due[1:]), seed
    assert set(meeting.heard.values()) == {len(meeting.said)}
    for a, b in itertools.pairwise([0, *due[0]]):
        by_time = sum(seconds[a:b]) >= 60 - 1e-6
        assert by_time or (isinstance(every, hf.Every) and b % 70 == 0)


def test_ranks_meet_at_few_steps() -> None:
    clock, meeting = Clock(), Meeting()
    schedule = Schedule("30min", clock=clock, share=meeting.share(0))
    schedule.start(0)
    due = run(schedule, clock, 0, [0.1] * 60_000)
    assert len(due) == 3
    assert len(meeting.said) < 60_000 / 50
