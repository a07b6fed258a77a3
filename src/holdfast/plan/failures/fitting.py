"""Which model of failures a log follows best: maximum likelihood, and how good the fit is.

Invariant: the same log and seed give the same fits.

Not here: the models (models.py), reading a log (log.py). Jobs that ended without a failure
are not part of a log, as in the paper, so its times are slightly too short.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from holdfast.errors import InvalidRequestError
from holdfast.plan.failures.models import FAMILIES, Family, Floats, check_times

# Log of the mean over the geometric mean: below it, times are all the same but for rounding.
_SPREAD_MIN = 1e-8
# The null distribution of sqrt(n) * distance hardly moves past this many times.
_RESAMPLE_MAX = 500


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted model and how well it follows the times."""

    model: Family
    times: int
    ks: float  # Kolmogorov-Smirnov: the largest gap between recorded and modelled survival
    ks_p: float  # chance of a gap at least so large were the model true, its parameters fitted
    survival_rmse: float  # root mean square of that gap over the times; the paper's 4.4 %
    aic: float  # 2 * parameters - 2 * log-likelihood; lower is better


def fit(times_h: npt.ArrayLike, *, draws: int = 200, seed: int = 0) -> tuple[Fit, ...]:
    """Every family fitted by maximum likelihood, the lowest AIC first.

    A difference in AIC below about 2 is noise. ``ks_p`` comes from ``draws`` logs drawn from the
    fitted model and fitted again: the textbook p assumes parameters known beforehand and would
    accept too much.

    >>> best = fit([0.5, 1, 2, 3, 5, 8, 13, 21, 34])[0]
    >>> best.model.family, round(best.model.mean_h, 2)
    ('exponential', 9.72)

    Raises:
        InvalidRequestError: No times, fewer than two different ones, or one that is not a number
            of hours greater than zero.
    """
    times = np.sort(check_times(times_h))
    _check_draws(draws)
    if len(times) < 2:
        raise InvalidRequestError(
            "one time between failures cannot be fitted",
            time_h=float(times[0]), todo="record more failures, or use Exponential(mean_h)",
        )  # fmt: skip
    if math.log(float(times.mean())) - float(np.log(times).mean()) < _SPREAD_MIN:
        raise InvalidRequestError(
            "all times between failures are the same: no model of chance fits them",
            times=len(times), time_h=float(times[0]), todo="check the log, or use Trace(times_h)",
        )  # fmt: skip
    rng = np.random.default_rng(seed)
    fits = [_fit_family(family, times, draws, rng) for family in FAMILIES.values()]
    return tuple(sorted(fits, key=lambda found: found.aic))


def _fit_family(family: type[Family], times: Floats, draws: int, rng: np.random.Generator) -> Fit:
    model = family.likeliest(times)
    survival = model.survival(times)
    middle = 1 - (np.arange(len(times)) + 0.5) / len(times)  # halfway down each recorded step
    distance = _ks_distance(survival)
    # Two times fit some families always equally well: rounding must not decide then.
    bar = _ks_scaled(distance, len(times)) * (1 - 1e-9)
    reached = 0
    for _ in range(draws):
        drawn = model.sample(rng, min(len(times), _RESAMPLE_MAX))
        drawn = np.sort(np.maximum(drawn, np.finfo(np.float64).tiny))  # tiny shapes underflow
        again = _ks_distance(family.likeliest(drawn).survival(drawn))
        reached += _ks_scaled(again, len(drawn)) >= bar
    return Fit(
        model=model,
        times=len(times),
        ks=distance,
        ks_p=(reached + 1) / (draws + 1),
        survival_rmse=float(np.sqrt(np.mean((survival - middle) ** 2))),
        aic=2 * len(fields(family)) - 2 * float(model.log_density(times).sum()),
    )


def _ks_distance(survival: Floats) -> float:
    """The largest gap between the recorded steps and a model's survival at the sorted times."""
    steps = 1 - np.arange(len(survival) + 1) / len(survival)
    return float(max(np.max(steps[:-1] - survival), np.max(survival - steps[1:])))


def _ks_scaled(distance: float, times: int) -> float:
    """The distance made comparable between numbers of times (Stephens, 1974)."""
    root = math.sqrt(times)
    return distance * (root + 0.12 + 0.11 / root)


def _check_draws(draws: int) -> None:
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 1:
        raise InvalidRequestError(
            "draws must be a whole number of 1 or more", draws=draws, todo="200 is usual"
        )
