"""Simulated jobs against a plain event-by-event job, the closed forms, and where those break."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from holdfast.errors import InvalidRequestError
from holdfast.plan.failures.models import Exponential, Gamma
from holdfast.plan.overhead import (
    Costs,
    interval_full,
    overhead_full,
    overhead_memoryless,
    overhead_part,
)
from holdfast.plan.paper import KAGGLE, TERABYTE, Experiment
from holdfast.plan.pls import expected_pls
from holdfast.plan.simulate import Job, Played, Simulation, play, simulate

Floats = npt.NDArray[np.float64]
SMALL = Costs(save_h=0.01, load_h=0.02, reschedule_h=0.03)


@dataclass
class Told:
    """Times given in advance, the same for every job; then no failure any more."""

    gaps_h: list[float]
    drawn: int = field(default=0)

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        self.drawn += 1
        is_over = self.drawn > len(self.gaps_h)
        return np.full(shape, math.inf if is_over else self.gaps_h[self.drawn - 1])


def run(job: Job, failures: Any, *, jobs: int = 20_000, seed: int = 4) -> Simulation:
    return simulate(job, failures, rng=np.random.default_rng(seed), jobs=jobs)


def play_one(job: Job, gaps_h: list[float]) -> dict[str, float]:
    return only(play(job, Told(gaps_h), rng=np.random.default_rng(0), jobs=1))


def only(played: Played) -> dict[str, float]:
    assert played.finished_J.all()
    names = ("wall", "save", "load", "lost", "reschedule", "pls", "failures")
    return {name: float(getattr(played, f"{name}_J")[0]) for name in names}


def play_by_events(job: Job, gaps_h: list[float]) -> dict[str, float]:
    """The same job, one activity after another, as a person would tell it."""
    out = dict.fromkeys(("wall", "save", "load", "lost", "reschedule", "pls", "failures"), 0.0)
    strikes = iter(np.cumsum(gaps_h).tolist())
    strike = next(strikes, math.inf)
    work = saved = 0.0
    reloading: list[tuple[str, float]] = []

    def spend(what: str, hours: float) -> bool:
        """Whether it could be done before the next failure; time passes either way."""
        spent = min(hours, strike - out["wall"])
        is_done = out["wall"] + hours <= strike
        out["wall"] += spent
        if what == "train":
            nonlocal work
            work += spent
        else:
            out[what] += spent
        return is_done

    while True:
        is_due = work >= saved + job.interval_h - 1e-9
        if reloading:
            is_done = spend(*reloading[0])
            if is_done:
                reloading.pop(0)
        elif is_due:
            is_done = spend("save", job.costs.save_h)
            if is_done:
                saved += job.interval_h
        elif work >= job.job_h - 1e-9:
            return out
        else:
            is_done = spend("train", min(saved + job.interval_h, job.job_h) - work)
        if not is_done:
            out["failures"] += 1
            strike = next(strikes, math.inf)
            reloading = [("reschedule", job.costs.reschedule_h), ("load", job.load_h)]
            if job.kind == "full":
                out["lost"] += work - saved
                work = saved
            else:
                out["pls"] += (work - saved) / job.job_h * job.lost / job.servers


# --- one job at a time


def test_without_failures_only_saves_cost() -> None:
    job = Job(job_h=10, interval_h=2.5, costs=SMALL, kind="full")
    assert play_one(job, [])["save"] == pytest.approx(4 * 0.01)
    assert play_one(job, [])["wall"] == pytest.approx(10.04)


def test_full_recovery_trains_again_what_was_done_since_the_save() -> None:
    job = Job(job_h=10, interval_h=2, costs=Costs(0.1, 0.2, 0.3), kind="full")
    out = play_one(job, [3.0])  # 2 h, a save, 0.9 h
    assert out["lost"] == pytest.approx(0.9)
    assert (out["load"], out["reschedule"]) == pytest.approx((0.2, 0.3))
    assert out["save"] == pytest.approx(5 * 0.1)
    assert out["pls"] == 0


def test_partial_recovery_keeps_the_work_and_pays_in_pls() -> None:
    job = Job(10, 2, Costs(0.1, 0.2, 0.3, load_part_h=0.05), "partial", servers=8, lost=2)
    out = play_one(job, [3.0])
    assert out["lost"] == 0
    assert out["load"] == pytest.approx(0.05)
    assert out["pls"] == pytest.approx(0.9 / 10 * 2 / 8)
    assert out["wall"] == pytest.approx(10 + 0.5 + 0.35)


def test_a_failure_in_a_save_leaves_the_save_before_it() -> None:
    costs = Costs(0.1, 0.2, 0.3)
    full = play_one(Job(10, 2, costs, "full"), [4.15])  # the second save runs from 4.1 to 4.2
    assert full["lost"] == pytest.approx(2)
    assert full["save"] == pytest.approx(5 * 0.1 + 0.05)
    part = play_one(Job(10, 2, costs, "partial"), [4.15])
    assert part["pls"] == pytest.approx(2 / 10)
    assert part["save"] == pytest.approx(5 * 0.1 + 0.05)


def test_a_failure_while_reloading_starts_the_reload_over() -> None:
    job = Job(10, 2, Costs(0.1, 0.2, 0.3), "partial", servers=4)
    out = play_one(job, [1.0, 0.4])  # 0.3 rescheduling, 0.1 of the load, and again
    assert out["reschedule"] == pytest.approx(0.6)
    assert out["load"] == pytest.approx(0.1 + 0.2)
    assert out["pls"] == pytest.approx(2 * 1.0 / 10 / 4)
    assert out["failures"] == 2


def test_a_failure_in_the_last_save_does_not_lose_the_end_of_the_job() -> None:
    out = play_one(Job(4, 2, Costs(0.1, 0, 0), "full"), [4.15])
    assert out["lost"] == pytest.approx(2)
    assert out["wall"] == pytest.approx(4.15 + 2 + 0.1)


def test_an_interval_longer_than_the_job_never_saves() -> None:
    out = play_one(Job(10, 40, Costs(0.1, 0, 0), "full"), [9.0])
    assert (out["save"], out["lost"]) == (0, 9)


@pytest.mark.parametrize("kind", ["full", "partial"])
@pytest.mark.parametrize("seed", range(60))
def test_the_arithmetic_of_a_round_is_the_job_told_event_by_event(kind: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs = Costs(*rng.uniform(0, 0.5, 3).tolist())
    job = Job(float(rng.uniform(5, 20)), float(rng.uniform(0.3, 8)), costs, kind, servers=6, lost=2)
    gaps_h = rng.exponential(rng.uniform(0.5, 8), 12).tolist()
    assert play_one(job, gaps_h) == pytest.approx(play_by_events(job, gaps_h))


# --- many jobs


@pytest.mark.parametrize("kind", ["full", "partial"])
def test_wall_time_is_work_and_overheads_for_every_job(kind: Any) -> None:
    job = Job(56, 4.3, Costs(0.2, 0.3, 0.4), kind, servers=8)
    rng = np.random.default_rng(1)
    played = play(job, Exponential(6), rng=rng, jobs=2000)
    overhead_J = played.save_J + played.load_J + played.lost_J + played.reschedule_J
    assert played.finished_J.all()
    np.testing.assert_allclose(played.wall_J, job.job_h + overhead_J)


def test_one_seed_gives_one_result_and_another_gives_another() -> None:
    job = Job(56, 2, SMALL, "full")
    first, again, other = (run(job, Exponential(28), jobs=500, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_the_parts_add_up_to_the_mean_overhead() -> None:
    result = run(Job(56, 2, SMALL, "full"), Exponential(28), jobs=500)
    assert result.parts.total == pytest.approx(result.overhead.mean)
    assert result.overhead.p5 <= result.overhead.p50 <= result.overhead.p95 <= result.overhead.p99


def test_the_standard_error_tells_how_far_the_mean_is_from_the_truth() -> None:
    """Against the exact overhead of memoryless failures: within 4 of its errors."""
    costs = Costs(0.1, 0.2, 0.3)
    for interval_h, mtbf_h in ((2, 28), (8, 8), (14, 7)):
        result = run(Job(56, interval_h, costs, "full"), Exponential(mtbf_h))
        exact = overhead_memoryless(costs, interval_h=interval_h, mtbf_h=mtbf_h)
        assert abs(result.overhead.mean - exact) < 4 * result.overhead.standard_error


# --- the closed forms


@pytest.mark.parametrize(("interval_h", "mtbf_h"), [(0.5, 28), (1.0, 50), (2.0, 100)])
def test_closed_forms_hold_within_5_percent_where_their_assumptions_do(
    interval_h: float, mtbf_h: float
) -> None:
    """Costs small against the job, the interval small against the MTBF."""
    full = run(Job(112, interval_h, SMALL, "full"), Exponential(mtbf_h))
    part = run(Job(112, interval_h, SMALL, "partial", servers=8, lost=2), Exponential(mtbf_h))
    eq1 = overhead_full(SMALL, interval_h=interval_h, mtbf_h=mtbf_h)
    eq2 = overhead_part(SMALL, interval_h=interval_h, mtbf_h=mtbf_h)
    eq4 = expected_pls(interval_h, mtbf_h=mtbf_h, servers=8, lost=2)
    assert full.overhead.mean == pytest.approx(eq1.total, rel=0.05)
    assert full.parts.lost == pytest.approx(eq1.lost, rel=0.05)
    assert part.overhead.mean == pytest.approx(eq2.total, rel=0.05)
    assert part.pls.mean == pytest.approx(eq4, rel=0.05)
    assert part.failures.mean == pytest.approx(112 / mtbf_h, rel=0.05)


@pytest.mark.parametrize("experiment", [KAGGLE, TERABYTE], ids=["kaggle", "terabyte"])
def test_the_papers_emulation_is_confirmed_within_5_percent(experiment: Experiment) -> None:
    costs, mtbf_h = experiment.costs, experiment.mtbf_h
    interval_h = interval_full(costs.save_h, mtbf_h=mtbf_h)
    for kind, equation in (("full", overhead_full), ("partial", overhead_part)):
        job = Job(experiment.job_h, interval_h, costs, kind, experiment.servers)  # type: ignore[arg-type]
        result = run(job, Exponential(mtbf_h), jobs=50_000)
        predicted = equation(costs, interval_h=interval_h, mtbf_h=mtbf_h).total
        assert result.overhead.mean == pytest.approx(predicted, rel=0.05)


def test_equation_1_breaks_when_the_interval_nears_the_mtbf() -> None:
    """It says half an interval is lost a failure, and forgets that lost work fails again."""
    costs = Costs(0.1, 0.1, 0.1)

    def ratio(interval_h: float) -> float:
        result = run(Job(112, interval_h, costs, "full"), Exponential(7))
        return result.overhead.mean / overhead_full(costs, interval_h=interval_h, mtbf_h=7).total

    near, far = ratio(7), ratio(14)
    assert near > 1.3
    assert far > 2


def test_equation_1_breaks_when_reloads_are_long_against_the_mtbf() -> None:
    costs = Costs(save_h=0.01, load_h=4, reschedule_h=4)
    result = run(Job(112, 0.5, costs, "full"), Exponential(8))
    eq1 = overhead_full(costs, interval_h=0.5, mtbf_h=8)
    assert result.parts.load + result.parts.reschedule > 1.5 * (eq1.load + eq1.reschedule)


def test_equation_4_overstates_pls_when_hardly_any_interval_fits_into_the_job() -> None:
    """44.8 of 56 h, the paper's own: the last interval is cut short, so less is lost."""
    result = run(Job(56, 44.8, KAGGLE.costs, "partial", servers=8), Exponential(28))
    assert 0.07 < result.pls.mean < 0.09
    assert expected_pls(44.8, mtbf_h=28, servers=8) == pytest.approx(0.1)
    assert result.pls.p95 > 0.2  # the mean promises little about one job


def test_failures_that_crowd_at_the_start_strike_more_often_than_the_mtbf_says() -> None:
    """By the renewal theorem (spread² - 1) / 2 more; for a gamma of shape 0.5 that is a half."""
    job = Job(56, 1, Costs(0.001, 0, 0), "partial")
    assert run(job, Exponential(7)).failures.mean == pytest.approx(8, rel=0.02)
    assert run(job, Gamma(shape=0.5, scale_h=14)).failures.mean == pytest.approx(8.5, rel=0.02)


def test_pls_scales_with_the_servers_lost_at_once() -> None:
    one, four = (
        run(Job(56, 4, SMALL, "partial", servers=8, lost=lost), Exponential(14), jobs=500)
        for lost in (1, 4)
    )
    assert four.pls.mean == pytest.approx(4 * one.pls.mean)


def test_a_job_that_cannot_end_is_given_up_and_counted() -> None:
    job = Job(56, 50, Costs(0.1, 0.1, 0.1), "full")
    rng = np.random.default_rng(0)
    result = simulate(job, Exponential(1), rng=rng, jobs=50, failures_max=200)
    assert result.unfinished == 1
    assert result.failures.p50 == 200


def test_a_failure_too_late_for_any_job_changes_nothing() -> None:
    result = run(Job(10, 2, SMALL, "full"), Told([]), jobs=3)
    assert result.failures.mean == 0
    assert result.unfinished == 0


# --- nonsense


@pytest.mark.parametrize(
    ("field_name", "value"),
    [
        ("job_h", 0), ("job_h", -1), ("job_h", math.nan), ("interval_h", 0), ("interval_h", -2),
        ("interval_h", math.inf), ("kind", "both"), ("servers", 0), ("lost", 0), ("lost", 9),
    ],
)  # fmt: skip
def test_nonsense_jobs_are_refused_by_name(field_name: str, value: Any) -> None:
    good: dict[str, Any] = {
        "job_h": 56, "interval_h": 2, "costs": SMALL, "kind": "full", "servers": 8, "lost": 1
    }  # fmt: skip
    with pytest.raises(InvalidRequestError, match=field_name) as caught:
        Job(**{**good, field_name: value})
    assert caught.value.todo


@pytest.mark.parametrize("jobs", [0, -1, 2.5])
def test_a_simulation_needs_jobs(jobs: Any) -> None:
    with pytest.raises(InvalidRequestError, match="jobs"):
        run(Job(56, 2, SMALL, "full"), Exponential(28), jobs=jobs)


def test_a_simulation_needs_a_limit_of_failures() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(InvalidRequestError, match="failures_max"):
        simulate(Job(56, 2, SMALL, "full"), Exponential(28), rng=rng, jobs=5, failures_max=0)


@pytest.mark.parametrize("gap_h", [-1.0, math.nan])
def test_times_between_failures_that_are_none_are_refused(gap_h: float) -> None:
    with pytest.raises(InvalidRequestError, match="model of failures"):
        run(Job(56, 2, SMALL, "full"), Told([gap_h]), jobs=5)
