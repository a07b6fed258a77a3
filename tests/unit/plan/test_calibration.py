"""From a loss to a PLS: the line, and which side noise pushes the answer to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidRequestError
from holdfast.plan.calibration import Calibration, calibrate, target_pls


@given(
    slope=st.floats(1e-4, 1.0),
    pls=st.lists(st.floats(0.01, 1.0), min_size=3, max_size=40),
    loss=st.floats(1e-6, 1.0),
)
def test_exact_runs_give_the_exact_answer(slope: float, pls: list[float], loss: float) -> None:
    found = calibrate(pls, [slope * x for x in pls])
    assert found.slope == pytest.approx(slope)
    target = target_pls(found, loss)
    assert target.pls == pytest.approx(min(loss / slope, max(pls)), rel=1e-6)


@given(error=st.floats(0, 1.0), more=st.floats(0.001, 1.0))
def test_noise_makes_the_target_smaller(error: float, more: float) -> None:
    sure, unsure = (Calibration(0.01, e, 30, 1.0) for e in (error, error + more))
    assert target_pls(unsure, 0.001).pls <= target_pls(sure, 0.001).pls


def test_nothing_is_promised_beyond_what_was_seen() -> None:
    assert target_pls(Calibration(0.001, 0.0, 30, 0.4), 0.1).pls == 0.4
    assert target_pls(Calibration(-0.001, 0.0001, 30, 0.4), 0.1).pls == 0.4


@pytest.mark.parametrize(
    ("pls", "losses"), [
        ([], []), ([0.1, 0.2], [0.1, 0.1]), ([0.1, 0.2, 0.3], [0.1, 0.1]), ([0, 0, 0], [1, 2, 3]),
        ([0.1, 0.2, -0.3], [0.1] * 3), ([0.1, 0.2, float("nan")], [0.1] * 3),
        ([0.1, 0.2, "x"], [0.1] * 3),
    ],
)  # fmt: skip
def test_runs_that_say_nothing_are_refused(pls: Any, losses: Any) -> None:
    with pytest.raises(InvalidRequestError):
        calibrate(pls, losses)


@pytest.mark.parametrize("loss", [0, -1, float("nan"), "much"])
def test_loss_that_is_none_is_refused(loss: Any) -> None:
    with pytest.raises(InvalidRequestError):
        target_pls(Calibration(0.01, 0.001, 30, 1.0), loss)
