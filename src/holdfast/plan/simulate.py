"""Many jobs played out by chance: what saving and failing cost where the closed forms do not hold.

A job trains ``job_h`` hours of useful work. After every interval of work it saves, also where a
save falls due as the work ends. Times between failures are drawn one after another (a renewal
process that starts with the job) on the clock of the wall: they go on while the job saves,
reschedules and loads. So overheads prolong the exposure, and

- a failure in a save undoes that save: the last whole one counts, and partial recovery saves
  again at once;
- a failure while rescheduling or loading starts both over, and adds to PLS once more;
- full recovery trains again all work since the last whole save, saves included;
- partial recovery keeps the work, and adds lost / servers of the work since the last whole save,
  over all work, to PLS (CPR eq. 3). Everyone waits for the reload, as in equation 2.

All jobs advance together, one failure a round; between two failures a job is arithmetic.

Invariants:
- For each job that ends: wall time = useful work + save + load + lost + reschedule.
- One seed gives one result.

Not here: distributions of failures (plan/failures/models.py); ``Costs.lost_of_interval`` is not
read, it follows from when failures strike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from holdfast.errors import InvalidRequestError
from holdfast.plan.checks import check_count, check_positive, check_servers
from holdfast.plan.overhead import Costs, Overhead
from holdfast.plan.pls import Kind

# J jobs, A those of them that still run, F those of these that a failure strikes

Floats = npt.NDArray[np.float64]

_WHOLE = 1e-9  # of an interval: a job of 56 h saving every 5.6 h makes 10 saves, whatever 56/5.6 is


class FailureTimes(Protocol):
    """What the simulation needs of a model of failures; those of plan/failures/models.py have
    it."""

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        """Times between failures, in hours, independent of each other."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """A job to play out: its work, how it saves and how it recovers."""

    job_h: float  # useful work
    interval_h: float  # of useful work, from save to save
    costs: Costs
    kind: Kind
    servers: int = 1
    lost: int = 1  # servers gone at each failure

    def __post_init__(self) -> None:
        check_positive("job_h", self.job_h)
        check_positive("interval_h", self.interval_h)
        check_servers(self.servers, self.lost)
        if self.kind not in ("full", "partial"):
            raise InvalidRequestError(
                "there is no such recovery", kind=self.kind, todo="use 'full' or 'partial'"
            )

    @property
    def load_h(self) -> float:
        """What loading costs this kind of recovery."""
        return self.costs.load_h if self.kind == "full" else self.costs.partial_load_h


@dataclass(frozen=True, slots=True)
class Spread:
    """How a quantity is distributed over the jobs."""

    mean: float
    standard_error: float  # of the mean
    p5: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, value_J: Floats) -> Spread:
        """The spread of one number a job."""
        p5, p50, p95, p99 = np.percentile(value_J, (5, 50, 95, 99)).tolist()
        error = value_J.std(ddof=1) / np.sqrt(value_J.size) if value_J.size > 1 else np.nan
        return cls(float(value_J.mean()), float(error), p5, p50, p95, p99)


@dataclass(frozen=True, slots=True)
class Simulation:
    """What came of the jobs; overheads are shares of the useful work, as in the closed forms.

    Jobs in ``unfinished`` were given up; they count with what they had spent until then, so means
    are too low where it is above zero.
    """

    jobs: int
    overhead: Spread
    parts: Overhead  # means
    pls: Spread  # of full recovery: zeros
    failures: Spread
    wall_h: Spread
    unfinished: float  # share of the jobs


@dataclass(frozen=True, slots=True)
class Played:
    """What each job came to, in hours."""

    wall_J: Floats
    save_J: Floats
    load_J: Floats
    lost_J: Floats
    reschedule_J: Floats
    pls_J: Floats
    failures_J: npt.NDArray[np.int64]
    finished_J: npt.NDArray[np.bool_]


def simulate(
    job: Job,
    failures: FailureTimes,
    *,
    rng: np.random.Generator,
    jobs: int = 100_000,
    failures_max: int = 10_000,
) -> Simulation:
    """The distributions of overhead, PLS and failures over ``jobs`` jobs.

    A job is given up at its ``failures_max``-th failure: one whose interval is long against the
    time between failures may never end.
    """
    played = play(job, failures, rng=rng, jobs=jobs, failures_max=failures_max)
    parts = (played.save_J, played.load_J, played.lost_J, played.reschedule_J)
    return Simulation(
        jobs=jobs,
        overhead=Spread.of(sum(parts[1:], parts[0]) / job.job_h),
        parts=Overhead(*(float(part_J.mean()) / job.job_h for part_J in parts)),
        pls=Spread.of(played.pls_J),
        failures=Spread.of(played.failures_J.astype(np.float64)),
        wall_h=Spread.of(played.wall_J),
        unfinished=float(1 - played.finished_J.mean()),
    )


def play(
    job: Job,
    failures: FailureTimes,
    *,
    rng: np.random.Generator,
    jobs: int,
    failures_max: int = 10_000,
) -> Played:
    """Every job from its start to its end; what ``simulate`` sums up."""
    check_count("jobs", jobs)
    check_count("failures_max", failures_max)
    save_h, reschedule_h = job.costs.save_h, job.costs.reschedule_h
    played = Played(
        wall_J=np.zeros(jobs),
        save_J=np.zeros(jobs),
        load_J=np.zeros(jobs),
        lost_J=np.zeros(jobs),
        reschedule_J=np.zeros(jobs),
        pls_J=np.zeros(jobs),
        failures_J=np.zeros(jobs, np.int64),
        finished_J=np.zeros(jobs, np.bool_),
    )

    running_A = np.arange(jobs)
    work_A, saved_A = np.zeros(jobs), np.zeros(jobs)  # useful work done, and at the last whole save
    reload_h = 0.0  # nothing to load at the start
    for _ in range(failures_max):
        gap_A = _gaps(failures, rng, running_A.size)
        spent_A = np.minimum(gap_A, reload_h)
        rescheduling_A = np.minimum(spent_A, reschedule_h)
        played.reschedule_J[running_A] += rescheduling_A
        played.load_J[running_A] += spent_A - rescheduling_A

        saves_due_A = np.floor((job.job_h - saved_A) / job.interval_h + _WHOLE)
        finish_A = reload_h + (job.job_h - work_A) + saves_due_A * save_h
        ends_A = gap_A >= finish_A
        ended = running_A[ends_A]
        played.wall_J[ended] += finish_A[ends_A]
        played.save_J[ended] += saves_due_A[ends_A] * save_h
        played.finished_J[ended] = True

        struck_A = ~ends_A
        running_A, gap_A = running_A[struck_A], gap_A[struck_A]  # from here on A = F
        if not running_A.size:
            break
        work_A, saved_A, saving_A = _advance(
            job, np.maximum(gap_A - reload_h, 0), work_A[struck_A], saved_A[struck_A]
        )
        played.wall_J[running_A] += gap_A
        played.failures_J[running_A] += 1
        played.save_J[running_A] += saving_A
        if job.kind == "full":
            played.lost_J[running_A] += work_A - saved_A
            work_A = saved_A.copy()
        else:
            gone = job.lost / (job.servers * job.job_h)
            played.pls_J[running_A] += (work_A - saved_A) * gone
        reload_h = reschedule_h + job.load_h
    return played


def _advance(
    job: Job, time_A: Floats, work_A: Floats, saved_A: Floats
) -> tuple[Floats, Floats, Floats]:
    """Work done, work at the last whole save, and hours spent saving, after so long a time.

    A job trains up to its next save, then repeats: save, train an interval.
    """
    save_h, interval_h = job.costs.save_h, job.interval_h
    to_save_A = np.maximum(saved_A + interval_h - work_A, 0)
    past_A = time_A - to_save_A  # the first save; below zero: not reached
    rounds_A = np.maximum(np.floor(past_A / (interval_h + save_h)), 0)
    rest_A = past_A - rounds_A * (interval_h + save_h)
    whole_A = np.where(past_A >= 0, rounds_A + (rest_A >= save_h), 0)
    broken_A = np.where((past_A >= 0) & (rest_A < save_h), rest_A, 0)
    saving_A = whole_A * save_h + broken_A
    done_A = np.minimum(work_A + time_A - saving_A, job.job_h)
    return done_A, np.minimum(saved_A + whole_A * interval_h, done_A), saving_A


def _gaps(failures: FailureTimes, rng: np.random.Generator, count: int) -> Floats:
    gap_A = np.asarray(failures.sample(rng, (count,)), dtype=np.float64)
    if gap_A.shape != (count,) or not (gap_A >= 0).all():
        raise InvalidRequestError(
            "a model of failures drew times that are none",
            asked=(count,),
            drawn=gap_A.shape,
            smallest=float(gap_A.min()) if gap_A.size else None,
            todo="draw one time of zero or more for each job",
        )
    return gap_A
