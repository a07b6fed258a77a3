"""What many emulated runs say together: the paper's figures 7, 9, 10, 11 and 12.

Invariants:
- Losses are paired: a run is compared with the run without failures of its own seed.
- The noise of seeds stands beside every loss.

Not here: a run (emulation.py), how a study looks (research/report.py), figure 6 (update_size.py).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from holdfast.errors import InvalidRequestError
from holdfast.plan.checks import check_count, is_whole
from holdfast.plan.overhead import Overhead
from holdfast.plan.pls import interval_part
from holdfast.research.emulation import (
    CPR,
    FULL,
    HOT,
    NONE,
    SCENARIOS,
    STRATEGIES,
    Emulated,
    Job,
    Outcome,
    R,
    Runner,
    RunPlan,
    plan_run,
    servers_of,
)

SHARES = (0.0625, 0.125, 0.25, 0.5)  # section 6.5
FAILURES_MAX = 32  # section 6.5
SAVES_MAX = 16  # of a random scenario, of everything: hot rows are saved eight times as often


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean over some runs and its standard error; 0 where there is only one."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Of one number a run.

        >>> Mean.of([1.0, 3.0])
        Mean(mean=2.0, error=1.0)
        """
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
        return cls(statistics.fmean(values), error)


@dataclass(frozen=True, slots=True)
class Line:
    """One setting over all seeds. Losses of AUC are paired: against no failure, same seed.

    What needs training is None where nothing was trained.
    """

    strategy: str
    failures: int
    share: float
    pls_target: float
    interval_h: float | None
    overhead: Overhead  # means
    overhead_total: Mean
    of_full: float | None  # overhead, of that of full recovery under the same failures
    has_benefit: bool | None
    reason: str
    pls: Mean | None
    auc: Mean | None
    loss: Mean | None


@dataclass(frozen=True, slots=True)
class Point:
    """One run: the portion of samples it lost, and what that cost."""

    strategy: str
    failures: int
    share: float
    interval_h: float
    seed: int
    pls: float
    auc: float
    loss: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A straight line through points; Pearson's correlation is None where it is undefined."""

    runs: int
    pearson: float | None
    slope: float
    slope_error: float | None
    intercept: float


@dataclass(frozen=True, slots=True)
class Study:
    """What a figure shows. ``noise`` is the standard deviation of the AUC without failures over
    the seeds (None with one seed, or untrained): what a difference between unpaired runs means."""

    figure: int
    title: str
    job: Job
    seeds: int
    auc: float | None = None  # without failures
    noise: float | None = None
    lines: tuple[Line, ...] = ()
    points: tuple[Point, ...] = ()
    fits: Mapping[str, Fit] = field(default_factory=dict)


def study_strategies(
    runner: Runner,
    *,
    seeds: int,
    strategies: Sequence[str] = STRATEGIES,
    failures: int = 2,
    share: float = 0.125,
    pls: float = 0.1,
) -> Study:
    """Figure 7: what each strategy costs in time, and in AUC."""
    settings = [
        Emulated(strategy=strategy, failures=failures, share=share, pls=pls)
        for strategy in dict.fromkeys(strategies)
    ]
    return _compare(runner, settings, seeds, 7, f"Strategies at a PLS of {pls:g}")


def study_targets(
    runner: Runner,
    *,
    seeds: int,
    strategies: Sequence[str] = (CPR, "cpr-ssu"),
    targets: Sequence[float] = (0.02, 0.1, 0.2),
    failures: int = 2,
    share: float = 0.125,
) -> Study:
    """Figure 9: time against AUC, by the PLS that is tolerated."""
    settings = [
        Emulated(strategy=strategy, failures=failures, share=share, pls=pls)
        for strategy in dict.fromkeys(strategies)
        for pls in targets
    ]
    return _compare(runner, settings, seeds, 9, "What a tolerated PLS costs and saves")


def study_failures(
    job: Job,
    *,
    seeds: int,
    strategies: Sequence[str] = ("cpr-ssu",),
    failures: Sequence[int] = (2, 20, 40),
    shares: Sequence[float] = (0.125, 0.25, 0.5),
    pls: float = 0.02,
) -> Study:
    """Figure 10: overheads against full recovery's, by failures and their size; none is trained."""
    check_count("seeds", seeds)
    lines = []
    for strategy in dict.fromkeys(strategies):
        for count in failures:
            for share in shares:
                setting = Emulated(strategy=strategy, failures=count, share=share, pls=pls)
                plans = [
                    plan_run(job, dataclasses.replace(setting, seed=seed)) for seed in range(seeds)
                ]
                lines.append(_line(job, plans))
    title = f"Overhead of a PLS of {pls:g}, against full recovery"
    return Study(10, title, job, seeds, lines=tuple(lines))


def study_pls(
    runner: Runner, *, runs: int, seeds: int, strategies: Sequence[str] = (CPR,), figure: int = 11
) -> Study:
    """Figures 11 and 12: AUC lost against PLS, over random failures, shares and intervals.

    Every strategy runs through the same scenarios.
    """
    check_count("seeds", seeds)
    wanted = [
        dataclasses.replace(scenario, strategy=strategy)
        for scenario in draw_scenarios(runner.job, runs, seeds=seeds, strategies=strategies)
        for strategy in strategies
    ]
    plain = _without_failures(range(seeds))
    found = runner.run([*plain, *wanted])
    points = [_point(found[e], found[plain[e.seed]]) for e in wanted]
    return Study(
        figure,
        "AUC lost against the portion of lost samples",
        runner.job,
        seeds,
        *_unharmed([found[e].auc for e in plain]),
        points=tuple(points),
        fits={
            strategy: fit_line(
                [p.pls for p in points if p.strategy == strategy],
                [p.loss for p in points if p.strategy == strategy],
            )
            for strategy in dict.fromkeys(strategies)
        },
    )


def draw_scenarios(
    job: Job, runs: int, *, seeds: int, strategies: Sequence[str] = (CPR,)
) -> list[Emulated]:
    """Random failures, shares and intervals, so that the expected PLS falls within 0 to 1.

    Intervals are as long as the job at most; from hot save to hot save there is a step at least.
    """
    if not is_whole(runs) or runs < 3:
        raise InvalidRequestError(
            "a line needs three runs or more", runs=runs, todo="30 make a clear picture"
        )
    rng = np.random.default_rng([SCENARIOS, job.recipe.seed])
    part = min(R if strategy in HOT else 1.0 for strategy in strategies)
    shortest_h = max(job.hours / SAVES_MAX, job.hours / job.steps / part * 1.01)
    scenarios = []
    for index in range(runs):
        failures = int(rng.integers(1, FAILURES_MAX + 1))
        share = float(rng.choice(SHARES))
        servers, lost = servers_of(share)
        longest_h = min(
            job.hours,
            interval_part(1.0, mtbf_h=job.hours / failures, servers=servers, lost=lost),
        )
        interval_h = max(shortest_h, longest_h * float(rng.uniform()))
        scenarios.append(
            Emulated(failures=failures, share=share, seed=index % seeds, interval_h=interval_h)
        )
    return scenarios


def _compare(
    runner: Runner, settings: Sequence[Emulated], seeds: int, figure: int, title: str
) -> Study:
    check_count("seeds", seeds)
    plain = _without_failures(range(seeds))
    wanted = [
        [dataclasses.replace(setting, seed=seed) for seed in range(seeds)] for setting in settings
    ]
    found = runner.run([*plain, *(e for runs in wanted for e in runs)])
    base = [found[e] for e in plain]
    lines = [
        _line(runner.job, [found[e].plan for e in runs], [found[e] for e in runs], base)
        for runs in wanted
    ]
    unharmed = _unharmed([outcome.auc for outcome in base])
    return Study(figure, title, runner.job, seeds, *unharmed, lines=tuple(lines))


def _without_failures(seeds: Iterable[int]) -> list[Emulated]:
    return [Emulated(strategy=NONE, failures=0, seed=seed) for seed in seeds]


def _unharmed(aucs: Sequence[float]) -> tuple[float, float | None]:
    return statistics.fmean(aucs), statistics.stdev(aucs) if len(aucs) > 1 else None


def _line(
    job: Job,
    plans: Sequence[RunPlan],
    outcomes: Sequence[Outcome] = (),
    base: Sequence[Outcome] = (),
) -> Line:
    plan, e = plans[0], plans[0].emulated
    parts = [dataclasses.astuple(p.overhead) for p in plans]
    total = Mean.of([p.overhead.total for p in plans])
    full = statistics.fmean(_full_overhead(job, p.emulated) for p in plans)
    losses = [b.auc - o.auc for b, o in zip(base, outcomes, strict=True)]
    return Line(
        strategy=e.strategy,
        failures=0 if e.strategy == NONE else e.failures,
        share=e.share,
        pls_target=e.pls,
        interval_h=plan.interval_h,
        overhead=Overhead(*(statistics.fmean(part) for part in zip(*parts, strict=True))),
        overhead_total=total,
        of_full=total.mean / full if full else None,
        has_benefit=plan.has_benefit,
        reason="" if plan.choice is None else plan.choice.reason,
        pls=Mean.of([_pls(o) for o in outcomes]) if outcomes else None,
        auc=Mean.of([o.auc for o in outcomes]) if outcomes else None,
        loss=Mean.of(losses) if outcomes else None,
    )


def _full_overhead(job: Job, emulated: Emulated) -> float:
    return plan_run(job, dataclasses.replace(emulated, strategy=FULL)).overhead.total


def _pls(outcome: Outcome) -> float:
    return 0.0 if outcome.plan.emulated.strategy in (NONE, FULL) else outcome.pls


def _point(outcome: Outcome, base: Outcome) -> Point:
    e = outcome.plan.emulated
    assert e.interval_h is not None
    return Point(
        strategy=e.strategy,
        failures=e.failures,
        share=e.share,
        interval_h=e.interval_h,
        seed=e.seed,
        pls=outcome.pls,
        auc=outcome.auc,
        loss=base.auc - outcome.auc,
    )


def fit_line(x: Sequence[float], y: Sequence[float]) -> Fit:
    """The least-squares line of y over x.

    >>> fit = fit_line([0.0, 1.0, 2.0], [1.0, 3.0, 5.0])
    >>> round(fit.slope, 6), round(fit.intercept, 6), fit.pearson
    (2.0, 1.0, 1.0)
    """
    x_S, y_S = np.asarray(x, np.float64), np.asarray(y, np.float64)
    dx_S, dy_S = x_S - x_S.mean(), y_S - y_S.mean()
    spread = float(dx_S @ dx_S)
    if len(x_S) < 2 or spread == 0:
        return Fit(len(x_S), None, 0.0, None, float(y_S.mean()))
    slope = float(dx_S @ dy_S) / spread
    rest_S = dy_S - slope * dx_S
    error = math.sqrt(float(rest_S @ rest_S) / (len(x_S) - 2) / spread) if len(x_S) > 2 else None
    intercept = float(y_S.mean() - slope * x_S.mean())
    return Fit(len(x_S), pearson(x_S, y_S), slope, error, intercept)


def pearson(x_N: np.ndarray, y_N: np.ndarray) -> float | None:
    """The correlation of two quantities; None where one of them does not vary."""
    dx_N, dy_N = x_N - x_N.mean(), y_N - y_N.mean()
    norms = math.sqrt(float(dx_N @ dx_N) * float(dy_N @ dy_N))
    return None if norms == 0 else float(dx_N @ dy_N) / norms
