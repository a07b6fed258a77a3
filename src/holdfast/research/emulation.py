"""CPR's emulation (sections 5.1, 6.1 to 6.5): real training, real saves, a clock that is virtual.

    Job, Emulated -> plan_run -> RunPlan -> carry_out -> Outcome -> studies.py: many of them

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

Not here: what many runs say together (studies.py), the equations (plan/), saving and recovering
(checkpoint/), showing (research/report.py).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import multiprocessing
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash

from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.selecting.priority import Priority
from holdfast.checkpoint.strategy import Strategy
from holdfast.errors import InvalidRequestError
from holdfast.model.model_state import ModelState
from holdfast.model.placement import Placement
from holdfast.model.tables import lose_rows
from holdfast.plan.checks import check_count, check_positive, is_number, is_whole
from holdfast.plan.overhead import Costs, Overhead, interval_full
from holdfast.plan.paper import KAGGLE
from holdfast.plan.pls import RecoveryChoice, check_pls, choose_recovery
from holdfast.recsys.data.batch import Batch
from holdfast.recsys.data.clicks import ClickStream
from holdfast.recsys.data.skew import Skew
from holdfast.recsys.models.presets import make_model
from holdfast.recsys.train import CLICKS, Plan, Recipe, Training, evaluate, make_training, train

NONE, FULL, PARTIAL, CPR = "none", "full", "partial", "cpr"
HOT = {"cpr-scar": "scar", "cpr-mfu": "mfu", "cpr-ssu": "ssu"}
STRATEGIES = (NONE, FULL, PARTIAL, CPR, *HOT)
R = 0.125  # of the rows, saved every r·T (section 5.1)

SERVERS = (8, 16)  # the smaller number of which a share is a whole number of servers

_WHOLE = 1e-9  # of an interval: 56 h saving every 5.6 h makes 10 saves, whatever 56 / 5.6 is
FAILURES, SCENARIOS = 1, 2  # what a seed is used for

# of the click stream. All seeds share the held-out samples, so that their chance does not average
# out over the seeds; measured: with 32,768 of them losses are off by 0.0001 to 0.0003
_HELD_OUT_SAMPLES = 131_072
_HELD_OUT_BATCH = 2048


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
    choice: (
        RecoveryChoice | None
    )  # what the benefit analysis says; None where nothing is to be chosen

    @property
    def has_benefit(self) -> bool | None:
        """Whether partial recovery at the target PLS is expected to pay (section 4.1)."""
        return None if self.choice is None else self.choice.kind == "partial"


def plan_run(job: Job, emulated: Emulated) -> RunPlan:
    """When a run saves, when servers fail and which, and what that costs the job."""
    servers, lost = servers_of(emulated.share)
    interval_h, choice = _choose_interval(job, emulated, servers, lost)
    is_none = emulated.strategy == NONE
    saves = () if interval_h is None else _saves(job, interval_h * part_of(emulated))
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


def part_of(emulated: Emulated) -> float:
    """Which share of its interval lies between two saves."""
    return R if emulated.strategy in HOT else 1.0


def _choose_interval(
    job: Job, emulated: Emulated, servers: int, lost: int
) -> tuple[float | None, RecoveryChoice | None]:
    if emulated.strategy == NONE:
        return None, None
    if emulated.interval_h is not None or not emulated.failures:
        return emulated.interval_h, None  # who expects no failure does not save
    mtbf_h = job.hours / emulated.failures
    if emulated.strategy in (FULL, PARTIAL):
        return interval_full(job.costs.save_h, mtbf_h=mtbf_h), None
    choice = choose_recovery(job.costs, mtbf_h=mtbf_h, servers=servers, pls=emulated.pls, lost=lost)
    return choice.part_interval_h, choice


@functools.lru_cache(maxsize=4)  # a study of overheads plans the same thousands for every seed
def _saves(job: Job, every_h: float) -> tuple[Action, ...]:
    count = int(job.hours / every_h + _WHOLE)
    hours = [min(job.hours, every_h * (index + 1)) for index in range(count)]
    return tuple(Action(hour, job.step_at(hour)) for hour in hours)


def _failures(job: Job, emulated: Emulated, servers: int, lost: int) -> list[Action]:
    rng = np.random.default_rng([FAILURES, emulated.seed])
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
            save_h += costs.save_h * part_of(emulated)
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
        train_job(job, training, lambda step: None)
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
            save_last=False,
        ) as ck,
    ):
        state = ModelState(training.model, training.optimizers)
        ck.save().result()
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
                    ck.save().result()

        act(0)
        train_job(job, training, act)
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
    every_h = plan.interval_h * part_of(plan.emulated)
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


def train_job(job: Job, training: Training, act: Callable[[int], None]) -> None:
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
    auc = evaluate(training.model, _heldout(training))
    if auc is None:
        raise InvalidRequestError(
            "the held-out samples do not hold both classes", todo="give more data"
        )
    digest = xxhash.xxh3_64()
    for name, value in training.model.state_dict().items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().numpy().tobytes())
    return Outcome(plan, auc, pls, digest.hexdigest())


def _heldout(training: Training) -> Iterable[Batch]:
    recipe, skew = training.plan.recipe, training.plan.skew
    if recipe.data != CLICKS:
        return training.heldout()
    batches = _HELD_OUT_SAMPLES // _HELD_OUT_BATCH
    stream = ClickStream(
        recipe.table_rows, batch_size=_HELD_OUT_BATCH, seed=recipe.seed, skew=skew
    ).heldout(batches)
    return (stream[index] for index in range(batches))


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
