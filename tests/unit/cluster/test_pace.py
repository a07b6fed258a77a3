"""A sweep rests while workers are at work, by its share; short in a frozen range; never alone."""

from __future__ import annotations

import pytest

from holdfast.cluster.coordinator import Settings
from holdfast.cluster.pace import Pace
from holdfast.errors import InvalidRequestError


class Clock:
    """Time passes by sleeping alone; traffic of so many rows a second until some moment."""

    def __init__(self, busy_until: float) -> None:
        self.time = 0.0
        self.busy_until = busy_until

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def count(self) -> int:
        return int(min(self.time, self.busy_until) * 1000)

    def pace(self, share: float) -> Pace:
        return Pace(share, self.count, now=lambda: self.time, sleep=self.sleep)


def work(pace: Pace, clock: Clock, pieces: int, *, most_s: float = float("inf")) -> float:
    rested = 0.0
    for _ in range(pieces):
        clock.time += 0.01
        pace.work(0.01)
        rested += pace.rest(most_s)
    return rested


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 1.0])
def test_with_traffic_work_is_its_share_of_the_time(share: float) -> None:
    clock = Clock(busy_until=1e9)
    work(clock.pace(share), clock, 100)
    assert 1.0 / clock.time == pytest.approx(share)


def test_without_traffic_there_is_no_rest() -> None:
    clock = Clock(busy_until=0)
    assert work(clock.pace(0.1), clock, 100) == 0


def test_a_rest_ends_soon_after_the_traffic_did() -> None:
    clock = Clock(busy_until=0.5)
    pace = clock.pace(0.01)
    work(pace, clock, 1)
    assert clock.time < 1.0
    pace.work(5.0)
    assert pace.rest() == 0


def test_what_was_not_rested_is_made_up_for() -> None:
    clock = Clock(busy_until=1e9)
    pace = clock.pace(0.5)
    assert work(pace, clock, 10, most_s=0.001) == pytest.approx(0.01)
    assert pace.rest() == pytest.approx(0.09)


@pytest.mark.parametrize("share", [0, -1, 1.5, float("nan"), "0.5", True])
def test_what_is_no_share_is_refused(share: float) -> None:
    with pytest.raises(InvalidRequestError, match="share of the time"):
        Settings(recovery_share=share)
