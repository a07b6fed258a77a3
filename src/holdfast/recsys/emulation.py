"""CPR's emulation (sections 5.1, 6.1 to 6.5): real training, real saves, a clock that is virtual.

    Job, Emulated -> plan_run -> RunPlan -> carry_out -> Outcome ; studies: many of them -> Study

A job of ``hours`` is scaled down to ``steps`` of training a small DLRM. Saves and failures fall at
hours; a failure overwrites the lost servers' rows with NaN, and the Checkpointer brings back what
it had saved of them. What saving and failing cost is charged in hours of the job, as equations 1
and 2 charge it, when it happens: so it is what the equations only expect.

Invariants:
- A run is a function of its job and its Emulated: one seed, one result, to the bit.
- All strategies of a seed start from the same values, see the same samples and the same failures.
- Full recovery goes back to the very bits of its last save and trains on with the same samples.
  So its model is that of the run without failures; it is not trained again, its time is charged.
- The values that training starts from are everybody's first save, free of charge.

Not here: the equations (plan/), saving and recovering (checkpoint/), showing (report/emulation.py).

# N rows, S samples of a line's fit
"""

from __future__ import annotations

import dataclasses
import functools
import math
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.priority import Priority, large_tables
from holdfast.checkpoint.strategy import Strategy
from holdfast.errors import InvalidRequestError
from holdfast.placement import Placement
from holdfast.plan.checks import check_count, check_positive, is_number, is_whole
from holdfast.plan.overhead import Costs, Overhead, interval_full
from holdfast.plan.paper import KAGGLE
from holdfast.plan.pls import Recovery, check_pls, choose_recovery, interval_part
from holdfast.recsys.batch import Batch
from holdfast.recsys.presets import make_model
from holdfast.recsys.skew import Skew
from holdfast.recsys.train import Plan, Reader, Recipe, Training, evaluate, make_training, train
from holdfast.tables import ModelState, lose_rows

NONE, FULL, PARTIAL, CPR = "none", "full", "partial", "cpr"
HOT = {"cpr-scar": "scar", "cpr-mfu": "mfu", "cpr-ssu": "ssu"}
STRATEGIES = (NONE, FULL, PARTIAL, CPR, *HOT)
R = 0.125  # of the rows, saved every r·T (section 5.1)

SERVERS = (8, 16)  # the smaller number of which a share is a whole number of servers
SHARES = (0.0625, 0.125, 0.25, 0.5)  # section 6.5
FAILURES_MAX = 32  # section 6.5
SAVES_MAX = 16  # of a random scenario, of everything: hot rows are saved eight times as often

_WHOLE = 1e-9  # of an interval: 56 h saving every 5.6 h makes 10 saves, whatever 56 / 5.6 is
_FAILURES, _SCENARIOS = 1, 2  # what a seed is used for


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What all runs of a study share: the training, and the job it stands for.

    The recipe's seed is that of the data; a run's own seed draws its first values and its failures.
    """

    steps: int = 800
    hours: float = KAGGLE.job_h
    costs: Costs = KAGGLE.costs
    recipe: Recipe = field(
        default_factory=lambda: Recipe(rows=20_000, batch_size=512, optimizer="sgd")
    )
    skew: Skew = field(default_factory=Skew)
    files: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        check_positive("hours", self.hours)
        if self.recipe.model != "dlrm" or self.recipe.optimizer == "sparse-adam":
            raise InvalidRequestError(
                "the emulation trains a DLRM whose row state exists from the start",
                model=self.recipe.model,
                optimizer=self.recipe.optimizer,
                todo="use dlrm with sgd or adagrad",
            )

    def step_at(self, hour: float) -> int:
        """Steps trained by an hour of the job."""
        return min(self.steps, int(hour * self.steps / self.hours + _WHOLE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulated:
    """One run: how it saves and recovers, and what befalls it.

    ``failures`` strike at uniformly random moments, each takes ``share`` of the servers.
    ``interval_h`` replaces the interval that the strategy would choose.
    """

    strategy: str = CPR
    failures: int = 2
    share: float = 0.125
    pls: float = 0.1
    seed: int = 0
    interval_h: float | None = None

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise InvalidRequestError(
                "unknown strategy", strategy=self.strategy, known=list(STRATEGIES)
            )
        for name in ("failures", "seed"):
            value = getattr(self, name)
            if not is_whole(value) or value < 0:
                raise InvalidRequestError(
                    f"{name} must be a whole number of zero or more", **{name: value}
                )
        servers_of(self.share)
        check_pls(self.pls)
        if self.interval_h is not None:
            check_positive("interval_h", self.interval_h)

    @property
    def trained(self) -> Emulated:
        """The run whose model this one ends with."""
        if self.strategy in (NONE, FULL):
            return Emulated(strategy=NONE, failures=0, seed=self.seed)
        return self


def servers_of(share: float) -> tuple[int, int]:
    """How many servers there are, and how many of them a failure takes.

    >>> servers_of(0.25), servers_of(0.0625)
    ((8, 2), (16, 1))

    Raises:
        InvalidRequestError: it is no whole number of 8 or 16 servers.
    """
    for servers in SERVERS:
        if is_number(share) and 0 < share <= 1 and (share * servers) % 1 == 0:
            return servers, int(share * servers)
    raise InvalidRequestError(
        "a failure takes a whole number of 8 or 16 servers",
        share=share,
        todo="use 0.0625, 0.125, 0.25, 0.5 or another multiple of 1/16 up to 1",
    )


@dataclass(frozen=True, slots=True)
class Action:
    """A save (no servers) or a failure (the servers it takes), at an hour of the job."""

    hour: float
    step: int  # trained by then
    servers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What will happen in a run, and what it costs."""

    emulated: Emulated
    servers: int
    lost: int
    interval_h: float | None  # from save to save of everything; None: nothing is saved
    actions: tuple[Action, ...]  # in order
    overhead: Overhead
    choice: Recovery | None  # what the benefit analysis says; None where nothing is to be chosen

    @property
    def has_benefit(self) -> bool | None:
        """Whether partial recovery at the target PLS is expected to pay (section 4.1)."""
        return None if self.choice is None else self.choice.kind == "partial"


def plan_run(job: Job, emulated: Emulated) -> RunPlan:
    """When a run saves, when servers fail and which, and what that costs the job."""
    servers, lost = servers_of(emulated.share)
    interval_h, choice = _choose_interval(job, emulated, servers, lost)
    is_none = emulated.strategy == NONE
    saves = [] if interval_h is None else _saves(job, interval_h * _part(emulated))
    failures = [] if is_none else _failures(job, emulated, servers, lost)
    # a save at the very moment of a failure came first
    actions = sorted([*saves, *failures], key=lambda action: (action.hour, bool(action.servers)))
    return RunPlan(
        emulated,
        servers,
        lost,
        interval_h,
        tuple(actions),
        _charge(job, emulated, actions),
        choice,
    )


def _part(emulated: Emulated) -> float:
    return R if emulated.strategy in HOT else 1.0


def _choose_interval(
    job: Job, emulated: Emulated, servers: int, lost: int
) -> tuple[float | None, Recovery | None]:
    if emulated.strategy == NONE:
        return None, None
    if emulated.interval_h is not None or not emulated.failures:
        return emulated.interval_h, None  # who expects no failure does not save
    mtbf_h = job.hours / emulated.failures
    if emulated.strategy in (FULL, PARTIAL):
        return interval_full(job.costs.save_h, mtbf_h=mtbf_h), None
    choice = choose_recovery(job.costs, mtbf_h=mtbf_h, servers=servers, pls=emulated.pls, lost=lost)
    return choice.part_interval_h, choice


def _saves(job: Job, every_h: float) -> list[Action]:
    count = int(job.hours / every_h + _WHOLE)
    hours = [min(job.hours, every_h * (index + 1)) for index in range(count)]
    return [Action(hour, job.step_at(hour)) for hour in hours]


def _failures(job: Job, emulated: Emulated, servers: int, lost: int) -> list[Action]:
    rng = np.random.default_rng([_FAILURES, emulated.seed])
    hours = np.sort(rng.uniform(0, job.hours, emulated.failures)).tolist()
    struck = [rng.choice(servers, lost, replace=False).tolist() for _ in hours]
    return [
        Action(hour, job.step_at(hour), tuple(sorted(lost_servers)))
        for hour, lost_servers in zip(hours, struck, strict=True)
    ]


def _charge(job: Job, emulated: Emulated, actions: Sequence[Action]) -> Overhead:
    """The virtual clock: what each save and each failure costs, as shares of the job."""
    costs, is_full = job.costs, emulated.strategy == FULL
    save_h = load_h = lost_h = reschedule_h = saved_at = 0.0
    for action in actions:
        if not action.servers:
            save_h += costs.save_h * _part(emulated)
            saved_at = action.hour
            continue
        reschedule_h += costs.reschedule_h
        load_h += costs.load_h if is_full else costs.partial_load_h
        lost_h += action.hour - saved_at if is_full else 0.0
    return Overhead(*(hours / job.hours for hours in (save_h, load_h, lost_h, reschedule_h)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: its held-out AUC, its PLS (eq. 3), and a hash of its model's bits."""

    plan: RunPlan
    auc: float
    pls: float
    digest: str


def carry_out(job: Job, plan: RunPlan) -> Outcome:
    """Train, save and fail as planned.

    Raises:
        InvalidRequestError: saves fall closer than a step, or the data do not suffice.
    """
    check_steps(job, plan)
    training = start_training(job, seed=plan.emulated.seed)
    if plan.emulated.trained.strategy == NONE:
        _train(job, training, lambda step: None)
        return _finish(plan, training, pls=0.0)
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-emulate-") as folder,
        Checkpointer(
            folder,
            model=training.model,
            optimizer=training.optimizers,
            strategy=as_saved(plan.emulated),
            servers=plan.servers,
            total_steps=job.steps,
            keep=1,
            threads=1,
        ) as ck,
    ):
        state = ModelState(training.model, training.optimizers)
        ck.save().durable()
        by_step: dict[int, list[Action]] = {}
        for action in plan.actions:
            by_step.setdefault(action.step, []).append(action)

        def act(step: int) -> None:
            if step:
                ck.step()
            for action in by_step.get(step, ()):
                if action.servers:
                    strike(ck, state, Placement(plan.servers), action.servers)
                else:
                    ck.save().durable()

        act(0)
        _train(job, training, act)
        pls = ck.pls
    assert pls is not None
    return _finish(plan, training, pls=pls)


def check_steps(job: Job, plan: RunPlan) -> None:
    """Refuse a run in which two saves would fall on one step.

    Raises:
        InvalidRequestError: says how many steps it takes.
    """
    if plan.interval_h is None or plan.emulated.trained.strategy == NONE:
        return
    every_h = plan.interval_h * _part(plan.emulated)
    needed = math.ceil(job.hours / every_h)
    if every_h < job.hours and needed > job.steps:
        raise InvalidRequestError(
            "saves fall closer than a step",
            strategy=plan.emulated.strategy,
            steps=job.steps,
            saves=needed,
            todo=f"train at least {needed} steps, or tolerate a larger PLS",
        )


def as_saved(emulated: Emulated) -> Strategy:
    """How the Checkpointer saves: everything, or hot rows on top of the first save.

    Never a new base in between, as cpr-mfu and the others take one where that makes recovery
    faster: it would depend on the speed of this machine, and save more than the paper does.
    """
    by = HOT.get(emulated.strategy)
    if by is None:
        return Strategy(emulated.strategy, base="full", codec="fp32")
    hot = Priority(by=by, r=R, seed=emulated.seed)
    return Strategy(emulated.strategy, base="consecutive", codec="fp32", priority=hot)


def start_training(job: Job, *, seed: int) -> Training:
    """The job's model and data, with the first values of a seed."""
    plan = Plan(job.recipe, job.skew)
    training = make_training(plan, files=job.files, steps=job.steps)
    torch.manual_seed(seed)
    first = make_model(job.recipe.preset, job.recipe.table_rows, kind=job.recipe.model)
    training.model.load_state_dict(first.state_dict())
    return training


def strike(
    ck: Checkpointer, state: ModelState, placement: Placement, servers: Sequence[int]
) -> None:
    """Servers fail: their rows, weights and row state, are gone, and come back as last saved."""
    lose_rows(state.tables, placement, servers)
    ck.recover(servers)


def _train(job: Job, training: Training, act: Callable[[int], None]) -> None:
    """All steps; ``act`` after each, with its number."""
    steps = iter(range(1, job.steps + 1))
    last = train(
        training,
        start=0,
        steps=job.steps,
        after_step=lambda: act(next(steps)),
        emit=lambda event: None,
    )
    if last < job.steps:
        raise InvalidRequestError("the data ended too early", steps=job.steps, trained=last)


def _finish(plan: RunPlan, training: Training, *, pls: float) -> Outcome:
    auc = evaluate(training.model, training.heldout())
    if auc is None:
        raise InvalidRequestError(
            "the held-out samples do not hold both classes", todo="give more data"
        )
    digest = xxhash.xxh3_64()
    for name, value in training.model.state_dict().items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().numpy().tobytes())
    return Outcome(plan, auc, pls, digest.hexdigest())


Tell = Callable[[Outcome, int, int], None]  # a run ended; how many did, of how many


def _silent(outcome: Outcome, done: int, total: int) -> None:
    """Nobody watches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Carries out runs of a job, each once, ``workers`` at a time in processes of their own."""

    job: Job
    workers: int = 1
    tell: Tell = _silent

    def __post_init__(self) -> None:
        check_count("workers", self.workers)

    def run(self, wanted: Iterable[Emulated]) -> dict[Emulated, Outcome]:
        """The outcome of every wanted run; nothing is trained if any of them cannot be."""
        plans = {emulated: plan_run(self.job, emulated) for emulated in wanted}
        needed = {e.trained: plan_run(self.job, e.trained) for e in plans}
        for plan in needed.values():
            check_steps(self.job, plan)
        found: dict[Emulated, Outcome] = {}
        for outcome in self._outcomes(list(needed.values())):
            found[outcome.plan.emulated] = outcome
            self.tell(outcome, len(found), len(needed))
        return {
            emulated: dataclasses.replace(found[emulated.trained], plan=plan)
            for emulated, plan in plans.items()
        }

    def _outcomes(self, plans: Sequence[RunPlan]) -> Iterator[Outcome]:
        if self.workers == 1 or len(plans) == 1:
            yield from (carry_out(self.job, plan) for plan in plans)
            return
        context = multiprocessing.get_context("spawn")
        workers = min(self.workers, len(plans))
        with ProcessPoolExecutor(workers, context, initializer=_start_worker) as pool:
            try:
                for done in as_completed([pool.submit(carry_out, self.job, p) for p in plans]):
                    yield done.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _start_worker() -> None:
    torch.set_num_threads(1)
    # torch warns when nobody has chosen; its own optimizers make the sparse tensors
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]


# Studies: many runs, and what they say together.


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
    rng = np.random.default_rng([_SCENARIOS, job.recipe.seed])
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


@dataclass(frozen=True, slots=True)
class TableUse:
    """How often rows of a table were used against how far they moved: over all its rows."""

    table: int
    rows: int
    used: int
    pearson: float | None


@dataclass(frozen=True, slots=True)
class Updates:
    """Figure 6: rows of the large tables, after ``job.steps`` without failures."""

    job: Job
    pearson: float | None  # over all rows
    pearson_used: float | None  # over rows that were used
    pearson_log: float | None  # of the logarithms, over rows that were used
    tables: tuple[TableUse, ...]
    counts_N: np.ndarray = field(repr=False)
    changes_N: np.ndarray = field(repr=False)

    figure: int = 6


class _Counted:
    """A reader that counts how often each row of some tables is used."""

    def __init__(self, reader: Reader, rows: Mapping[int, int]) -> None:
        self._reader = reader
        self.counts = {table: np.zeros(count, np.int64) for table, count in rows.items()}

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._reader:
            ids_BT = batch.ids.numpy()
            for table, counts_N in self.counts.items():
                counts_N += np.bincount(ids_BT[:, table], minlength=len(counts_N))
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return self._reader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._reader.load_state_dict(state)


def correlate_updates(job: Job, *, seed: int = 0) -> Updates:
    """Figure 6: how far a row has moved (L2) against how often it was used."""
    training = start_training(job, seed=seed)
    rows = dict(enumerate(job.recipe.table_rows))
    share = Priority(by="mfu").share
    large = {
        int(t): rows[int(t)] for t in large_tables({str(t): n for t, n in rows.items()}, share)
    }
    counted = _Counted(training.reader, large)
    weights = functools.partial(_weights, training)
    first = {table: weights(table).clone() for table in large}
    _train(job, dataclasses.replace(training, reader=counted), lambda step: None)
    changes = {
        table: (weights(table) - first[table]).norm(dim=1).double().numpy() for table in large
    }
    tables = [
        TableUse(
            table,
            count,
            int((counted.counts[table] > 0).sum()),
            pearson(counted.counts[table].astype(np.float64), changes[table]),
        )
        for table, count in large.items()
    ]
    counts_N = np.concatenate([counted.counts[table] for table in large]).astype(np.float64)
    changes_N = np.concatenate([changes[table] for table in large])
    used_N = (counts_N > 0) & (changes_N > 0)
    return Updates(
        job,
        pearson(counts_N, changes_N),
        pearson(counts_N[used_N], changes_N[used_N]),
        pearson(np.log(counts_N[used_N]), np.log(changes_N[used_N])),
        tuple(tables),
        counts_N,
        changes_N,
    )


def _weights(training: Training, table: int) -> torch.Tensor:
    module = training.model.get_submodule(f"tables.{table}")
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach()
