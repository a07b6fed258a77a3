"""From a tolerated loss of accuracy to a target PLS, by runs that show how the two go together.

Invariants:
- Nothing lost, no loss: the line goes through the origin.
- The target is for the steepest slope the runs leave likely (``SURE`` standard errors above the
  fitted one), so that noise makes it smaller and never larger.

Not here: the runs (research/studies.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import InvalidRequestError
from holdfast.plan.checks import check_positive, is_number

SURE = 2.0
RUNS_MIN = 3


@dataclass(frozen=True, slots=True)
class Calibration:
    """Accuracy lost a PLS of 1, its standard error, and what it was fitted to."""

    slope: float
    slope_error: float
    runs: int
    pls_max: float


@dataclass(frozen=True, slots=True)
class Target:
    """The PLS to plan with, and why."""

    pls: float
    reason: str


def calibrate(pls: Sequence[float], losses: Sequence[float]) -> Calibration:
    """The straight line from the origin through runs of known PLS and loss.

    >>> found = calibrate([0.1, 0.2, 0.4], [0.001, 0.002, 0.004])
    >>> round(found.slope, 6), round(found.slope_error, 9)
    (0.01, 0.0)
    """
    if len(pls) != len(losses) or len(pls) < RUNS_MIN:
        raise InvalidRequestError(
            "too few runs to calibrate with", runs=len(pls), todo=f"use {RUNS_MIN} or more"
        )
    for value in (*pls, *losses):
        if not is_number(value) or not math.isfinite(value):
            raise InvalidRequestError("a run's PLS or loss is no number", found=value)
    squares = sum(x * x for x in pls)
    if min(pls) < 0 or squares == 0:
        raise InvalidRequestError(
            "runs that lost nothing say nothing", todo="add failures, or save less often"
        )
    slope = sum(x * y for x, y in zip(pls, losses, strict=True)) / squares
    rest = sum((y - slope * x) ** 2 for x, y in zip(pls, losses, strict=True))
    error = math.sqrt(rest / (len(pls) - 1) / squares)
    return Calibration(slope, error, len(pls), max(pls))


def target_pls(calibration: Calibration, loss: float) -> Target:
    """The largest PLS that costs no more than ``loss``, as far as the runs can tell.

    >>> target_pls(Calibration(slope=0.008, slope_error=0.001, runs=30, pls_max=1.0), 0.001).pls
    0.1
    """
    check_positive("loss", loss)
    steepest = calibration.slope + SURE * calibration.slope_error
    shown = f"{calibration.slope:.2g} ± {calibration.slope_error:.1g} a PLS of 1"
    if steepest <= 0 or loss / steepest >= calibration.pls_max:
        return Target(
            min(1.0, calibration.pls_max),
            f"the runs lost {shown}, less than {loss:g} at every PLS they reached "
            f"({calibration.pls_max:.2g})",
        )
    pls = loss / steepest
    return Target(
        pls,
        f"{calibration.runs} runs lost {shown}; a loss of {loss:g} allows a PLS of {pls:.2g}, "
        f"{SURE:g} standard errors on the safe side",
    )
