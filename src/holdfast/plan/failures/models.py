"""How long training runs until a failure: models, chosen from few numbers or given a log.

    a failure log -> log.py -> hours -> fitting.py -> models, the best first  -> overheads,
                                            -> Trace (the log itself)                -> simulation
    a mean and a median -> from_mean_median                                          ->

Recommendation training fails after 14-30 hours in the mean and 8-17 in the median, and a gamma
follows those times best (CPR, section 3.1): many early failures, then a nearly constant rate.

Invariants:
- Every time is in hours, and greater than zero.
- A model's survival falls from 1 to 0; its mean and median are those of its samples.

Not here: reading logs (log.py), fitting (fitting.py), what failures cost (plan/overhead.py), jobs
that live through them (plan/simulate.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt

from holdfast.errors import InvalidRequestError
from holdfast.plan.checks import check_number, check_positive

Floats = npt.NDArray[np.float64]

# Outside these, times are a clock's (all the same) or beyond what a float holds: no cluster's.
_SHAPE_MIN, _SHAPE_MAX = 0.01, 1e9
_SIGMA_MIN, _SIGMA_MAX = 1e-9, 30.0
_EXPONENTIAL_SLACK = 0.005  # a median given with three digits still fits


class FailureModel(Protocol):
    """The time from a start, or from the last failure, to the next failure."""

    family: ClassVar[str]

    @property
    def mean_h(self) -> float:
        """The mean time between failures, MTBF."""
        ...

    @property
    def median_h(self) -> float:
        """The time that half of the runs survive."""
        ...

    def survival(self, t_h: npt.ArrayLike) -> Floats:
        """The chance of no failure up to ``t_h``, in the shape of ``t_h``."""
        ...

    def sample(self, rng: np.random.Generator, shape: int | tuple[int, ...]) -> Floats:
        """Independent times to failure."""
        ...


@dataclass(frozen=True, slots=True)
class Gamma:
    """Below shape 1 failures crowd at the start; at 1 it is the exponential.

    >>> Gamma(shape=2, scale_h=7.0).mean_h
    14.0
    """

    family: ClassVar[str] = "gamma"
    shape: float
    scale_h: float

    def __post_init__(self) -> None:
        check_number("shape", self.shape, _SHAPE_MIN, _SHAPE_MAX)
        check_positive("scale_h", self.scale_h)

    @property
    def mean_h(self) -> float:
        """The mean time between failures, MTBF."""
        return self.shape * self.scale_h

    @property
    def median_h(self) -> float:
        """The time that half of the runs survive."""
        return float(_import_scipy().special.gammaincinv(self.shape, 0.5)) * self.scale_h

    def survival(self, t_h: npt.ArrayLike) -> Floats:
        """The chance of no failure up to ``t_h``."""
        t = _moments(t_h) / self.scale_h
        return np.asarray(_import_scipy().special.gammaincc(self.shape, t), dtype=np.float64)

    def sample(self, rng: np.random.Generator, shape: int | tuple[int, ...]) -> Floats:
        """Independent times to failure."""
        return np.asarray(rng.gamma(self.shape, self.scale_h, shape))

    def log_density(self, t_h: npt.ArrayLike) -> Floats:
        """The logarithm of the density at times greater than zero."""
        t = _moments(t_h) / self.scale_h
        norm = math.lgamma(self.shape) + math.log(self.scale_h)
        return np.asarray((self.shape - 1) * np.log(t) - t - norm)

    @classmethod
    def likeliest(cls, times_h: Floats) -> Self:
        """The gamma under which these times are most likely: log k - digamma(k) = spread."""
        scipy = _import_scipy()
        mean = float(times_h.mean())
        spread = max(math.log(mean) - float(np.log(times_h).mean()), 1e-15)
        shape = 0.5 / spread
        if shape < _SHAPE_MAX:
            # 1/(2k) < log k - digamma(k) < 1/k for every k > 0: a bracket that never misses.
            shape = scipy.optimize.brentq(
                lambda k: math.log(k) - scipy.special.digamma(k) - spread, shape, 2 * shape
            )
        shape = min(max(shape, _SHAPE_MIN), _SHAPE_MAX)
        return cls(shape, mean / shape)

    @classmethod
    def from_mean_median(cls, mean_h: float, median_h: float) -> Self:
        """The one gamma with this mean and median; the median must be below the mean."""
        scipy = _import_scipy()

        def log_ratio(log_shape: float) -> float:
            shape = math.exp(log_shape)
            return math.log(scipy.special.gammaincinv(shape, 0.5) / shape)

        low, high = math.log(_SHAPE_MIN), math.log(1e6)
        wanted = math.log(median_h / mean_h)
        if not log_ratio(low) < wanted < log_ratio(high):
            raise _no_such_model(cls.family, mean_h, median_h, math.exp(log_ratio(high)))
        shape = math.exp(
            scipy.optimize.brentq(lambda x: log_ratio(x) - wanted, low, high, xtol=1e-14)
        )
        return cls(shape, mean_h / shape)


@dataclass(frozen=True, slots=True)
class Exponential:
    """A constant rate of failures: what the closed forms assume.

    >>> round(Exponential(28.0).median_h, 2)
    19.41
    """

    family: ClassVar[str] = "exponential"
    mean_h: float

    def __post_init__(self) -> None:
        check_positive("mean_h", self.mean_h)

    @property
    def median_h(self) -> float:
        """The time that half of the runs survive."""
        return self.mean_h * math.log(2)

    def survival(self, t_h: npt.ArrayLike) -> Floats:
        """The chance of no failure up to ``t_h``."""
        return np.asarray(np.exp(-_moments(t_h) / self.mean_h))

    def sample(self, rng: np.random.Generator, shape: int | tuple[int, ...]) -> Floats:
        """Independent times to failure."""
        return np.asarray(rng.exponential(self.mean_h, shape))

    def log_density(self, t_h: npt.ArrayLike) -> Floats:
        """The logarithm of the density at times greater than zero."""
        return np.asarray(-_moments(t_h) / self.mean_h - math.log(self.mean_h))

    @classmethod
    def likeliest(cls, times_h: Floats) -> Self:
        """The exponential under which these times are most likely."""
        return cls(float(times_h.mean()))

    @classmethod
    def from_mean_median(cls, mean_h: float, median_h: float) -> Self:
        """The exponential with this mean; its median is 0.693 of it, so the one given must be."""
        model = cls(mean_h)
        if abs(median_h / model.median_h - 1) > _EXPONENTIAL_SLACK:
            raise InvalidRequestError(
                "no exponential has this mean and median: its median is 0.693 of its mean",
                mean_h=mean_h, median_h=median_h, median_of_exponential_h=round(model.median_h, 3),
                todo="use 'gamma', or drop the median: Exponential(mean_h)",
            )  # fmt: skip
        return model


@dataclass(frozen=True, slots=True)
class Weibull:
    """Below shape 1 the rate of failures falls with time, above 1 it rises.

    >>> Weibull(shape=1, scale_h=14.0).mean_h
    14.0
    """

    family: ClassVar[str] = "weibull"
    shape: float
    scale_h: float

    def __post_init__(self) -> None:
        check_number("shape", self.shape, _SHAPE_MIN, _SHAPE_MAX)
        check_positive("scale_h", self.scale_h)

    @property
    def mean_h(self) -> float:
        """The mean time between failures, MTBF."""
        return self.scale_h * math.gamma(1 + 1 / self.shape)

    @property
    def median_h(self) -> float:
        """The time that half of the runs survive."""
        return self.scale_h * math.pow(math.log(2), 1 / self.shape)

    def survival(self, t_h: npt.ArrayLike) -> Floats:
        """The chance of no failure up to ``t_h``."""
        with np.errstate(over="ignore"):  # exp(-inf) is the 0 that is meant
            return np.asarray(np.exp(-((_moments(t_h) / self.scale_h) ** self.shape)))

    def sample(self, rng: np.random.Generator, shape: int | tuple[int, ...]) -> Floats:
        """Independent times to failure."""
        return np.asarray(rng.weibull(self.shape, shape) * self.scale_h)

    def log_density(self, t_h: npt.ArrayLike) -> Floats:
        """The logarithm of the density at times greater than zero."""
        t = _moments(t_h) / self.scale_h
        norm = math.log(self.shape) - math.log(self.scale_h)
        return np.asarray((self.shape - 1) * np.log(t) - t**self.shape + norm)

    @classmethod
    def likeliest(cls, times_h: Floats) -> Self:
        """The Weibull under which these times are most likely."""
        logs = np.log(times_h)
        top = float(logs.max())
        below = logs - top  # at most 0, so that no power overflows

        def slope(log_shape: float) -> float:  # of the likelihood, downwards; it rises with shape
            shape = math.exp(log_shape)
            weight = np.exp(shape * below)
            return float((weight * below).sum() / weight.sum() - below.mean() - 1 / shape)

        low, high = math.log(_SHAPE_MIN), math.log(_SHAPE_MAX)
        if slope(low) >= 0 or slope(high) <= 0:
            shape = _SHAPE_MIN if slope(low) >= 0 else _SHAPE_MAX
        else:
            shape = math.exp(_import_scipy().optimize.brentq(slope, low, high))
        scale = math.exp(top + math.log(float(np.exp(shape * below).mean())) / shape)
        return cls(shape, scale)

    @classmethod
    def from_mean_median(cls, mean_h: float, median_h: float) -> Self:
        """The Weibull with this mean and median, the more spread one where there are two.

        The median may exceed the mean by 1.4 %; between the mean and that there are two.
        """
        scipy = _import_scipy()

        def log_ratio(inverse_shape: float) -> float:
            return inverse_shape * math.log(math.log(2)) - math.lgamma(1 + inverse_shape)

        # The ratio rises from 1 (shape infinite) to its peak, then falls for ever.
        peak = scipy.optimize.brentq(
            lambda x: scipy.special.digamma(1 + x) - math.log(math.log(2)), 0, 1
        )
        wanted, end = math.log(median_h / mean_h), 1 / _SHAPE_MIN
        if not log_ratio(end) < wanted < log_ratio(peak):
            raise _no_such_model(cls.family, mean_h, median_h, math.exp(log_ratio(peak)))
        inverse = scipy.optimize.brentq(lambda x: log_ratio(x) - wanted, peak, end, xtol=1e-14)
        return cls(1 / inverse, mean_h / math.gamma(1 + inverse))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Logarithms of times are normal: early failures are rarer than in a gamma, late ones not.

    >>> round(LogNormal(median_h=8, sigma=1).mean_h, 2)
    13.19
    """

    family: ClassVar[str] = "log-normal"
    median_h: float
    sigma: float  # of the natural logarithm of the time

    def __post_init__(self) -> None:
        check_positive("median_h", self.median_h)
        check_number("sigma", self.sigma, _SIGMA_MIN, _SIGMA_MAX)

    @property
    def mean_h(self) -> float:
        """The mean time between failures, MTBF."""
        return self.median_h * math.exp(self.sigma**2 / 2)

    def survival(self, t_h: npt.ArrayLike) -> Floats:
        """The chance of no failure up to ``t_h``."""
        with np.errstate(divide="ignore"):  # log(0) is the -inf that is meant
            score = np.log(_moments(t_h) / self.median_h) / self.sigma
        return np.asarray(_import_scipy().special.ndtr(-score), dtype=np.float64)

    def sample(self, rng: np.random.Generator, shape: int | tuple[int, ...]) -> Floats:
        """Independent times to failure."""
        return np.asarray(rng.lognormal(math.log(self.median_h), self.sigma, shape))

    def log_density(self, t_h: npt.ArrayLike) -> Floats:
        """The logarithm of the density at times greater than zero."""
        logs = np.log(_moments(t_h))
        score = (logs - math.log(self.median_h)) / self.sigma
        return np.asarray(-logs - score**2 / 2 - math.log(self.sigma * math.sqrt(2 * math.pi)))

    @classmethod
    def likeliest(cls, times_h: Floats) -> Self:
        """The log-normal under which these times are most likely."""
        logs = np.log(times_h)
        sigma = min(max(float(logs.std()), _SIGMA_MIN), _SIGMA_MAX)
        return cls(math.exp(float(logs.mean())), sigma)

    @classmethod
    def from_mean_median(cls, mean_h: float, median_h: float) -> Self:
        """The log-normal with this mean and median; the median must be below the mean."""
        sigma = math.sqrt(2 * max(math.log(mean_h / median_h), 0.0))
        if not _SIGMA_MIN <= sigma <= _SIGMA_MAX:
            raise _no_such_model(cls.family, mean_h, median_h, 1.0)
        return cls(median_h, sigma)


@dataclass(frozen=True, slots=True, repr=False)
class Trace:
    """Recorded times themselves, in the order recorded; samples are drawn from them with return.

    >>> trace = Trace((3.0, 1.0, 8.0, 2.0))
    >>> trace, trace.mean_h, trace.median_h, float(trace.survival(2.0))
    (Trace(4 times, mean_h=3.5, median_h=2.5), 3.5, 2.5, 0.5)
    """

    family: ClassVar[str] = "trace"
    times_h: tuple[float, ...]
    _sorted: Floats = field(init=False, compare=False)

    def __post_init__(self) -> None:
        times = check_times(self.times_h)
        object.__setattr__(self, "times_h", tuple(times.tolist()))
        object.__setattr__(self, "_sorted", np.sort(times))
        self._sorted.setflags(write=False)

    def __repr__(self) -> str:
        """Its size and centre: a log may be long."""
        count, mean, median = len(self.times_h), self.mean_h, self.median_h
        return f"Trace({count} times, mean_h={mean:.4g}, median_h={median:.4g})"

    @property
    def mean_h(self) -> float:
        """The mean time between failures, MTBF."""
        return float(self._sorted.mean())

    @property
    def median_h(self) -> float:
        """The middle time; between the two middle ones where their number is even."""
        return float(np.median(self._sorted))

    def survival(self, t_h: npt.ArrayLike) -> Floats:
        """The share of recorded times longer than ``t_h``."""
        gone = np.searchsorted(self._sorted, _moments(t_h), side="right")
        return np.asarray(1 - gone / len(self._sorted), dtype=np.float64)

    def sample(self, rng: np.random.Generator, shape: int | tuple[int, ...]) -> Floats:
        """Independent draws of recorded times."""
        return np.asarray(rng.choice(self._sorted, shape))


Family = Gamma | Exponential | Weibull | LogNormal
FAMILIES: dict[str, type[Family]] = {
    model.family: model for model in (Gamma, Exponential, Weibull, LogNormal)
}


def from_mean_median(family: str, mean_h: float, median_h: float) -> Family:
    """The model of a family that has this mean and this median.

    >>> model = from_mean_median("gamma", 28.0, 16.0)
    >>> round(model.mean_h, 9), round(model.median_h, 9)
    (28.0, 16.0)

    Raises:
        InvalidRequestError: No model of the family has them; a gamma's median, for one, is always
            below its mean.
    """
    if family not in FAMILIES:
        raise InvalidRequestError(
            "unknown family of failure models",
            family=family, todo=f"use one of {', '.join(FAMILIES)}",
        )  # fmt: skip
    check_positive("mean_h", mean_h)
    check_positive("median_h", median_h)
    return FAMILIES[family].from_mean_median(float(mean_h), float(median_h))


def _no_such_model(
    family: str, mean_h: float, median_h: float, ratio_max: float
) -> InvalidRequestError:
    if median_h / mean_h >= ratio_max:
        limit = "its mean" if family != "weibull" else f"{ratio_max:.4f} of its mean"
        why = f"no {family} has this mean and median: its median stays below {limit}"
    else:
        why = f"no {family} of use has this mean and median: half of its times would be all but 0"
    return InvalidRequestError(
        why, mean_h=mean_h, median_h=median_h,
        todo="check that they are not swapped, or record a log and use Trace",
    )  # fmt: skip


def check_times(times_h: npt.ArrayLike) -> Floats:
    try:
        times = np.asarray(times_h)
    except ValueError as error:  # ragged
        raise _not_numbers(times_h) from error
    if times.size == 0:
        raise InvalidRequestError(
            "no times between failures", todo="give at least one, in hours, or choose a model"
        )
    if times.dtype.kind not in "iuf" or times.ndim != 1:
        raise _not_numbers(times_h)
    wrong = np.flatnonzero(~(np.isfinite(times) & (times > 0)))
    if len(wrong):
        raise InvalidRequestError(
            "a time between failures is not a number greater than zero",
            index=int(wrong[0]), value=float(times[wrong[0]]), todo="give hours that passed",
        )  # fmt: skip
    return times.astype(np.float64)


def _not_numbers(times_h: object) -> InvalidRequestError:
    shown = repr(times_h)
    return InvalidRequestError(
        "times between failures are not a list of numbers",
        found=shown if len(shown) <= 80 else shown[:77] + "...", todo="give hours",
    )  # fmt: skip


def _moments(t_h: npt.ArrayLike) -> Floats:
    """Times to ask a model about: zero or more, infinity allowed."""
    t = np.asarray(t_h, dtype=np.float64)
    if not np.all(t >= 0):
        raise InvalidRequestError(
            "a time is negative or not a number", t_h=float(t[~(t >= 0)].flat[0]),
            todo="give hours of zero or more",
        )  # fmt: skip
    return t


def _import_scipy() -> Any:
    """Imported when first needed: it takes half a second, and is an extra."""
    try:
        import scipy.optimize
        import scipy.special
    except ImportError as error:
        raise InvalidRequestError(
            "failure models need scipy", todo="run: pip install holdfast[plan]"
        ) from error
    return scipy
