"""What ``every=`` takes, and what it refuses."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import holdfast as hf
from holdfast.checkpoint.planning.interval import as_every
from holdfast.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("every", "seconds"), [
        ("30min", 1800), ("90s", 90), ("2h", 7200), ("1.5h", 5400), ("500ms", 0.5), ("1d", 86400),
        ("30m", 1800), (" 90 sec ", 90), ("2H", 7200), (".5min", 30),
        (timedelta(minutes=30), 1800), (timedelta(milliseconds=250), 0.25),
        (hf.Every(seconds=12.5), 12.5),
    ],
)  # fmt: skip
def test_a_time_is_seconds(every: Any, seconds: float) -> None:
    assert as_every(every) == hf.Every(seconds=seconds)


@pytest.mark.parametrize("every", [1000, 1000.0, "1000", hf.Every(steps=1000)])
def test_a_number_without_a_unit_counts_steps(every: Any) -> None:
    assert as_every(every) == hf.Every(steps=1000)


def test_none_is_no_interval_and_a_loss_stays_one() -> None:
    assert as_every(None) is None
    pls = hf.Pls(0.1, mtbf_h=28, servers=8)
    assert as_every(pls) is pls


@pytest.mark.parametrize(
    "every", [
        0, -1, 1.5, float("inf"), float("nan"), True, "often", "", "0", "-5min", "0s", "1e3s",
        "30 years", "1h30min", "s", timedelta(0), timedelta(seconds=-1), [], b"30min",
    ],
)  # fmt: skip
def test_what_is_no_interval_is_refused(every: Any) -> None:
    with pytest.raises(InvalidRequestError, match="whole number of steps, or a time"):
        as_every(every)


@pytest.mark.parametrize(
    "wrong", [
        {}, {"steps": 0}, {"steps": 1.5}, {"steps": True}, {"seconds": 0}, {"seconds": -1},
        {"seconds": float("inf")}, {"seconds": float("nan")}, {"steps": 10, "seconds": 0},
        {"seconds": "30min"},
    ],
)  # fmt: skip
def test_nonsense_in_an_every_is_refused_where_it_is_written(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="whole number of steps, or a time"):
        hf.Every(**wrong)


@pytest.mark.parametrize(
    "wrong", [
        {"target": 0}, {"target": 1.5}, {"target": float("nan")}, {"target": "much"},
        {"mtbf_h": 0}, {"mtbf_h": -3}, {"servers": 0}, {"lost": 9},
    ],
)  # fmt: skip
def test_nonsense_in_a_loss_is_refused_where_it_is_written(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        hf.Pls(**{"target": 0.1, "mtbf_h": 28, "servers": 8, **wrong})
