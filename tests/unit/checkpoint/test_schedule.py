"""When a checkpoint is due, by steps or by a tolerated loss, with a clock that is told the time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import holdfast as hf
from holdfast.checkpoint.schedule import STEPS_TIMED, Schedule, check_every
from holdfast.errors import InvalidRequestError


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def run(schedule: Schedule, clock: Clock, first: int, last: int, *, step_s: float) -> list[int]:
    """The steps that are due."""
    due = []
    for step in range(first + 1, last + 1):
        clock.now += step_s
        left = schedule.steps_left(step)
        if schedule.is_due(step):
            due.append(step)
            assert left in (0, None)
            schedule.saved(step)
        elif left is not None:
            assert left > 0
    return due


@pytest.mark.parametrize(("start", "due"), [(0, [4, 8, 12]), (3, [4, 8, 12]), (4, [8, 12])])
def test_every_so_many_steps_wherever_training_went_on(start: int, due: list[int]) -> None:
    clock = Clock()
    schedule = Schedule(4, clock=clock)
    schedule.start(start)
    assert run(schedule, clock, start, 13, step_s=1) == due


def test_without_an_interval_nothing_is_due() -> None:
    clock = Clock()
    schedule = Schedule(None, clock=clock)
    schedule.start(0)
    assert run(schedule, clock, 0, 50, step_s=1) == []
    assert schedule.steps_left(50) is None


def test_hours_become_steps_by_how_long_a_step_takes() -> None:
    # 2 * 0.1 * 8 servers * 0.25 h = 0.4 h = 1440 s
    every = hf.Pls(0.1, mtbf_h=0.25, servers=8)
    assert every.interval_h == pytest.approx(0.4)
    clock = Clock()
    schedule = Schedule(every, clock=clock)
    schedule.start(0)
    due = run(schedule, clock, 0, 1000, step_s=6)
    assert due[0] == STEPS_TIMED + 240
    assert {b - a for a, b in itertools.pairwise(due)} == {240}
    later = run(schedule, clock, 1000, 3000, step_s=3)  # training became twice as fast
    assert later[-1] - later[-2] == pytest.approx(480, abs=1)


def test_a_part_of_the_rows_is_saved_in_a_part_of_the_interval() -> None:
    clock = Clock()
    schedule = Schedule(hf.Pls(0.1, mtbf_h=0.25, servers=8), clock=clock, part=0.125)
    schedule.start(0)
    due = run(schedule, clock, 0, 400, step_s=6)
    assert {b - a for a, b in itertools.pairwise(due)} == {30}


def test_interval_shorter_than_a_step_saves_at_every_step() -> None:
    clock = Clock()
    schedule = Schedule(hf.Pls(1e-9, mtbf_h=1, servers=1), clock=clock)
    schedule.start(0)
    due = run(schedule, clock, 0, 40, step_s=10)
    assert due[0] == STEPS_TIMED + 1


def test_a_reader_is_granted_the_steps_until_the_next_checkpoint_once_they_are_known() -> None:
    clock = Clock()
    granted: list[int] = []
    schedule = Schedule(4, clock=clock, grant=granted.append)
    schedule.start(1)
    assert run(schedule, clock, 1, 9, step_s=1) == [4, 8]
    assert granted == [3, 4, 4]
    schedule.close()
    schedule.start(9)
    assert len(granted) == 3
    granted.clear()
    schedule = Schedule(hf.Pls(0.1, mtbf_h=0.25, servers=8), clock=clock, grant=granted.append)
    schedule.start(0)
    run(schedule, clock, 0, STEPS_TIMED - 1, step_s=6)
    assert not granted  # nobody knows yet how long a step takes
    run(schedule, clock, STEPS_TIMED - 1, STEPS_TIMED + 241, step_s=6)
    assert granted == [240, 240]


@pytest.mark.parametrize(
    "wrong", [
        {"target": 0}, {"target": 1.5}, {"target": float("nan")}, {"target": "much"},
        {"mtbf_h": 0}, {"mtbf_h": -3}, {"servers": 0}, {"lost": 9},
    ],
)  # fmt: skip
def test_nonsense_is_refused_where_it_is_written(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        hf.Pls(**{"target": 0.1, "mtbf_h": 28, "servers": 8, **wrong})


@pytest.mark.parametrize("every", [0, -1, 1.5, float("inf"), float("nan"), True, "often"])
def test_what_is_no_interval_is_refused(every: Any) -> None:
    with pytest.raises(InvalidRequestError, match="whole number"):
        check_every(every)
