"""Emulated runs: the plan by hand, real failures in real training, studies, pictures, nonsense."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from holdfast.cli.commands import emulate as command
from holdfast.errors import InvalidRequestError
from holdfast.model.model_state import ModelState
from holdfast.model.placement import Placement
from holdfast.plan.overhead import Costs, overhead_full, overhead_part
from holdfast.plan.paper import KAGGLE
from holdfast.recsys.train import Recipe
from holdfast.research import emulation, studies, update_size
from holdfast.research import report as report
from holdfast.research.emulation import (
    CPR,
    FULL,
    HOT,
    NONE,
    PARTIAL,
    Emulated,
    Job,
    Outcome,
    Runner,
    carry_out,
    plan_run,
)
from tests.unit.recsys.data.criteo_lines import make_samples

RECIPE = Recipe(preset="tiny", rows=400, batch_size=32, optimizer="adagrad")
JOB = Job(steps=28, recipe=RECIPE)


@pytest.fixture(autouse=True)
def small_and_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A few held-out batches tell runs apart; one thread is fastest for a model this small."""
    monkeypatch.setattr("holdfast.research.emulation._HELD_OUT_SAMPLES", 4096)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def emulated(strategy: str = CPR, **more: Any) -> Emulated:
    return Emulated(strategy=strategy, **more)


# The plan.


def test_all_strategies_of_a_seed_meet_the_same_failures() -> None:
    found = {
        tuple(a for a in plan_run(JOB, emulated(strategy, failures=5, seed=3)).actions if a.servers)
        for strategy in (FULL, PARTIAL, CPR, *HOT)
    }
    (failures,) = found
    assert len(failures) == 5
    assert all(0 <= a.hour < 56 and len(a.servers) == 1 for a in failures)
    others = plan_run(JOB, emulated(FULL, failures=5, seed=4)).actions
    assert tuple(a for a in others if a.servers) != failures


@pytest.mark.parametrize(
    ("share", "servers", "lost"), [(0.0625, 16, 1), (0.125, 8, 1), (0.25, 8, 2), (0.5, 8, 4)]
)
def test_a_failure_takes_its_share_of_the_servers(share: float, servers: int, lost: int) -> None:
    plan = plan_run(JOB, emulated(failures=20, share=share))
    assert (plan.servers, plan.lost) == (servers, lost)
    struck = [a.servers for a in plan.actions if a.servers]
    assert all(len(set(s)) == lost and max(s) < servers for s in struck)
    assert {server for s in struck for server in s} > {struck[0][0]}


def test_intervals_are_those_of_the_planner() -> None:
    hours = {s: plan_run(JOB, emulated(s)).interval_h for s in (FULL, PARTIAL, CPR, "cpr-ssu")}
    full = (2 * KAGGLE.costs.save_h * 28) ** 0.5
    assert hours == pytest.approx({FULL: full, PARTIAL: full, CPR: 44.8, "cpr-ssu": 44.8})
    saves = [a.hour for a in plan_run(JOB, emulated("cpr-ssu")).actions if not a.servers]
    assert saves == pytest.approx([5.6 * (index + 1) for index in range(10)])
    assert [a.step for a in plan_run(JOB, emulated(CPR, failures=0)).actions] == []


def test_the_clock_charges_each_save_and_each_failure() -> None:
    job = Job(hours=10, steps=10, costs=Costs(0.2, 0.3, 0.5, load_part_h=0.1))
    plan = plan_run(job, emulated(FULL, failures=3, interval_h=4.0))
    failures = [a.hour for a in plan.actions if a.servers]
    lost = sum(hour - 4.0 * (hour // 4.0) for hour in failures)
    assert plan.overhead.save == pytest.approx(2 * 0.2 / 10)
    assert plan.overhead.load == pytest.approx(3 * 0.3 / 10)
    assert plan.overhead.reschedule == pytest.approx(3 * 0.5 / 10)
    assert plan.overhead.lost == pytest.approx(lost / 10)
    part = plan_run(job, emulated(CPR, failures=3, interval_h=4.0)).overhead
    assert part.lost == 0
    assert part.load == pytest.approx(3 * 0.1 / 10)
    hot = plan_run(job, emulated("cpr-mfu", failures=3, interval_h=4.0)).overhead
    assert hot.save == pytest.approx(20 * 0.125 * 0.2 / 10)
    assert plan_run(job, emulated(NONE)).overhead.total == 0


def test_over_many_seeds_the_clock_agrees_with_the_equations() -> None:
    def mean(strategy: str) -> float:
        plans = [plan_run(JOB, emulated(strategy, seed=seed)) for seed in range(500)]
        return float(np.mean([plan.overhead.total for plan in plans]))

    interval_h = plan_run(JOB, emulated(FULL)).interval_h
    assert interval_h is not None
    full = overhead_full(JOB.costs, interval_h=interval_h, mtbf_h=28).total
    part = overhead_part(JOB.costs, interval_h=interval_h, mtbf_h=28).total
    assert mean(FULL) == pytest.approx(full, rel=0.05)
    assert mean(PARTIAL) == pytest.approx(part, rel=0.05)
    assert mean("cpr-ssu") == pytest.approx(KAGGLE.published.cpr, rel=0.02)


def test_the_benefit_analysis_goes_with_the_run() -> None:
    assert plan_run(JOB, emulated(CPR)).has_benefit is True
    hopeless = plan_run(JOB, emulated(CPR, failures=40, share=0.5, pls=0.02))
    assert hopeless.has_benefit is False
    assert hopeless.choice is not None
    assert "no benefit" in hopeless.choice.reason
    assert plan_run(JOB, emulated(FULL)).has_benefit is None


# Carrying it out.


def pls_by_hand(job: Job, plan: emulation.RunPlan) -> float:
    """Equation 3, from the hours of failures and of whole saves."""
    a_step = job.hours / job.steps
    assert plan.interval_h is not None
    lost = 0
    for action in plan.actions:
        if action.servers:
            trained = int(action.hour / a_step)
            last_save = plan.interval_h * int(action.hour / plan.interval_h + 1e-9)
            lost += len(action.servers) * (trained - int(last_save / a_step + 1e-9))
    return lost / (job.steps * plan.servers)


@pytest.mark.parametrize("strategy", [PARTIAL, CPR, *HOT])
def test_pls_is_equation_3_by_hand(strategy: str) -> None:
    wanted = emulated(strategy, failures=4, share=0.25, interval_h=22.4, seed=2)
    plan = plan_run(JOB, wanted)
    outcome = carry_out(JOB, plan)
    assert outcome.pls == pytest.approx(pls_by_hand(JOB, plan), abs=1e-12)
    assert outcome.pls > 0


@pytest.mark.parametrize("strategy", [CPR, "cpr-mfu", "cpr-ssu"])
def test_one_seed_gives_one_result(strategy: str) -> None:
    wanted = emulated(strategy, failures=3, interval_h=22.4, seed=1)
    first, second = (carry_out(JOB, plan_run(JOB, wanted)) for _ in range(2))
    assert first == second
    other = carry_out(JOB, plan_run(JOB, dataclasses.replace(wanted, seed=2)))
    assert other.digest != first.digest


@pytest.mark.parametrize("strategy", [CPR, "cpr-scar", "cpr-ssu"])
def test_saving_without_failures_changes_not_one_bit(strategy: str) -> None:
    plain = carry_out(JOB, plan_run(JOB, emulated(NONE, seed=5)))
    saved = carry_out(JOB, plan_run(JOB, emulated(strategy, failures=0, interval_h=28.0, seed=5)))
    assert (saved.digest, saved.auc, saved.pls) == (plain.digest, plain.auc, 0.0)
    failed = carry_out(JOB, plan_run(JOB, emulated(strategy, failures=3, interval_h=28.0, seed=5)))
    assert failed.digest != plain.digest


@pytest.mark.parametrize("strategy", [CPR, "cpr-mfu"])
def test_a_failure_changes_rows_of_lost_servers_alone(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    strike, struck = emulation.strike, []

    def watched(ck: Any, state: ModelState, placement: Placement, servers: Any) -> None:
        before = [array.copy() for table in state.tables for array in table.arrays()]
        strike(ck, state, placement, servers)
        after = [array for table in state.tables for array in table.arrays()]
        changed = 0
        for old, new in zip(before, after, strict=True):
            assert not np.isnan(new).any()
            rows = np.flatnonzero((old != new).any(axis=1))
            assert set(placement.servers_of(rows).tolist()) <= set(servers)
            changed += len(rows)
        struck.append((servers, changed))

    monkeypatch.setattr(emulation, "strike", watched)
    plan = plan_run(JOB, emulated(strategy, failures=3, share=0.25, interval_h=30.0, seed=1))
    carry_out(JOB, plan)
    assert [servers for servers, _ in struck] == [a.servers for a in plan.actions if a.servers]
    assert all(changed > 0 for _, changed in struck)


def test_a_failure_before_any_save_gives_the_first_values(monkeypatch: pytest.MonkeyPatch) -> None:
    strike, found = emulation.strike, []

    def watched(ck: Any, state: ModelState, placement: Placement, servers: Any) -> None:
        strike(ck, state, placement, servers)
        found.append(state.tables[2].arrays()[0][placement.rows_of(servers[0], 20)].copy())

    monkeypatch.setattr(emulation, "strike", watched)
    carry_out(JOB, plan_run(JOB, emulated(CPR, failures=1, interval_h=56.0, seed=1)))
    first = emulation.start_training(JOB, seed=1)
    state = ModelState(first.model, first.optimizers)
    plan = plan_run(JOB, emulated(CPR, failures=1, interval_h=56.0, seed=1))
    (failure,) = (a for a in plan.actions if a.servers)
    rows = Placement(8).rows_of(failure.servers[0], 20)
    assert np.array_equal(found[0], state.tables[2].arrays()[0][rows])


def test_full_recovery_is_charged_and_ends_as_if_nothing_had_failed() -> None:
    told: list[str] = []
    runner = Runner(job=JOB, tell=lambda o, done, total: told.append(o.plan.emulated.strategy))
    found = runner.run([emulated(NONE), emulated(FULL)])
    full, none = found[emulated(FULL)], found[emulated(NONE)]
    assert (full.auc, full.digest) == (none.auc, none.digest)
    assert full.plan.overhead.total > none.plan.overhead.total == 0
    assert told == ["none"]


def test_a_seed_draws_first_values_and_leaves_the_data() -> None:
    one, two = (emulation.start_training(JOB, seed=seed) for seed in (0, 1))
    weights = [next(t.model.parameters()).detach() for t in (one, two)]
    assert not torch.equal(*weights)
    batches = [next(iter(t.reader)) for t in (one, two)]
    assert torch.equal(batches[0].ids, batches[1].ids)
    assert torch.equal(batches[0].labels, batches[1].labels)


def test_processes_give_what_one_process_gives() -> None:
    wanted = [emulated(NONE), emulated("cpr-ssu", failures=2, interval_h=20.0)]
    held = Job(steps=24, recipe=RECIPE)
    alone = Runner(job=held).run(wanted)
    # other processes hold out all samples: their models are compared, not their AUC
    apart = Runner(job=held, workers=2).run(wanted)
    assert [o.digest for o in apart.values()] == [o.digest for o in alone.values()]
    assert [o.pls for o in apart.values()] == [o.pls for o in alone.values()]


def test_criteo_files_are_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "day_0"
    path.write_text("\n".join(s.line for s in make_samples(700)) + "\n")
    job = Job(steps=20, recipe=dataclasses.replace(RECIPE, data="criteo"), files=(str(path),))
    found = Runner(job=job).run([emulated(NONE), emulated(CPR, failures=2, interval_h=20.0)])
    assert len({o.digest for o in found.values()}) == 2


# Studies.


def test_strategies_are_compared_over_the_same_seeds() -> None:
    study = studies.study_strategies(Runner(job=JOB), seeds=2, strategies=[NONE, FULL, CPR])
    none, full, cpr = study.lines
    assert study.noise is not None
    assert none.loss == full.loss == studies.Mean(0.0, 0.0)
    assert none.auc is not None
    assert study.auc == none.auc.mean
    assert cpr.loss is not None
    assert cpr.pls is not None
    assert cpr.auc is not None
    assert cpr.loss.mean == pytest.approx(none.auc.mean - cpr.auc.mean)
    assert cpr.pls.mean > 0
    assert full.overhead_total.mean > cpr.overhead_total.mean > none.overhead_total.mean == 0
    assert_shown(study, "seed noise", "cpr")


def test_a_larger_target_saves_time() -> None:
    study = studies.study_targets(Runner(job=JOB), seeds=1, strategies=[CPR], targets=[0.02, 0.2])
    small, large = study.lines
    assert small.overhead_total.mean > large.overhead_total.mean
    assert small.pls is not None
    assert large.pls is not None
    assert small.pls.mean < large.pls.mean
    assert study.noise is None
    assert_shown(study, "unknown with one seed")
    assert "0.00000" not in shown(study)  # one seed has no error, which is not an error of zero
    assert "standard error" not in shown(study)


def test_where_no_benefit_is_expected_there_is_none() -> None:
    """As in the paper: every setting that the analysis rejects costs more than full recovery."""
    study = studies.study_failures(JOB, seeds=50)
    assert [(line.failures, line.share) for line in study.lines] == [
        (failures, share) for failures in (2, 20, 40) for share in (0.125, 0.25, 0.5)
    ]
    rejected = [line for line in study.lines if line.has_benefit is False]
    taken = [line for line in study.lines if line.has_benefit]
    assert rejected
    assert taken
    assert all(line.of_full is not None and line.of_full > 1 for line in rejected)
    assert all(line.of_full is not None and line.of_full < 1 for line in taken)
    assert_shown(study, "full recovery")


def test_loss_is_fitted_against_pls_through_the_same_scenarios() -> None:
    strategies = [CPR, "cpr-ssu"]
    study = studies.study_pls(Runner(job=JOB), runs=3, seeds=1, strategies=strategies, figure=12)
    scenarios = [
        [(p.failures, p.share, p.interval_h, p.seed) for p in study.points if p.strategy == s]
        for s in strategies
    ]
    assert scenarios[0] == scenarios[1]
    assert set(study.fits) == set(strategies)
    assert all(fit.runs == 3 for fit in study.fits.values())
    assert_shown(study, "correlation")


def test_scenarios_spread_over_the_expected_pls() -> None:
    job = Job(steps=4000)
    scenarios = studies.draw_scenarios(job, 200, seeds=4, strategies=["cpr-ssu"])
    assert {s.seed for s in scenarios} == {0, 1, 2, 3}
    assert {s.share for s in scenarios} == set(studies.SHARES)
    assert {s.failures for s in scenarios} <= set(range(1, 33))
    expected = [
        0.5 * s.interval_h / job.hours * s.failures * s.share
        for s in scenarios
        if s.interval_h is not None
    ]
    assert 0 < min(expected) < 0.05
    assert 0.8 < max(expected) <= 1 + 1e-9
    for scenario in scenarios:
        hot = dataclasses.replace(scenario, strategy="cpr-ssu")
        emulation.check_steps(job, plan_run(job, hot))
    assert scenarios == studies.draw_scenarios(job, 200, seeds=4, strategies=["cpr-ssu"])


def test_fit_is_that_of_numpy() -> None:
    rng = np.random.default_rng(1)
    x = rng.uniform(size=40)
    y = 0.3 * x + rng.normal(size=40) * 0.05 + 1
    fit = studies.fit_line(x.tolist(), y.tolist())
    (slope, intercept), covariance = np.polyfit(x, y, 1, cov=True)
    assert (fit.slope, fit.intercept) == pytest.approx((slope, intercept))
    assert fit.slope_error == pytest.approx(covariance[0, 0] ** 0.5)
    assert fit.pearson == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert studies.fit_line([1.0, 1.0], [2.0, 3.0]).pearson is None
    assert studies.fit_line([1.0, 2.0], [3.0, 3.0]).pearson is None


def test_rows_that_are_used_move_and_others_do_not() -> None:
    found = update_size.correlate_updates(JOB)
    assert np.array_equal(found.counts_N > 0, found.changes_N > 0)
    assert found.counts_N.sum() == len(found.last.tables) * JOB.steps * RECIPE.batch_size
    assert sum(table.rows for table in found.last.tables) >= 0.99 * RECIPE.rows
    assert found.last.moved == pytest.approx(np.corrcoef(found.counts_N, found.changes_N)[0, 1])
    assert_shown(found, "Pearson", "moved", "pushed")


def test_watching_rows_leaves_the_training_as_it_is() -> None:
    found = update_size.correlate_updates(JOB, seed=3)
    plain = emulation.start_training(JOB, seed=3)
    tables = [plain.model.get_submodule(f"tables.{use.table}") for use in found.last.tables]
    first = [table.weight.detach().clone() for table in tables]
    emulation.train_job(JOB, plain, lambda step: None)
    moved = [(t.weight.detach() - f).norm(dim=1) for t, f in zip(tables, first, strict=True)]
    assert np.array_equal(found.changes_N, torch.cat(moved).double().numpy())


def test_one_step_walks_as_far_as_it_moves_and_many_walk_further() -> None:
    found = update_size.correlate_updates(dataclasses.replace(JOB, steps=64))
    first, last = found.moments[0], found.last
    assert [moment.step for moment in found.moments] == [1, 4, 16, 64]
    assert first.moved == pytest.approx(first.walked)
    assert last.moved != pytest.approx(last.walked)


def test_with_one_sample_a_step_a_use_is_a_step() -> None:
    """Plain SGD: a step is the gradient of its only sample, so that both sums go together."""
    recipe = dataclasses.replace(RECIPE, batch_size=1, optimizer="sgd")
    last = update_size.correlate_updates(Job(steps=40, recipe=recipe)).last
    assert last.walked == pytest.approx(last.pushed, abs=1e-4)
    batches = dataclasses.replace(RECIPE, batch_size=64, optimizer="sgd")
    many = update_size.correlate_updates(Job(steps=10, recipe=batches)).last
    assert many.walked != pytest.approx(many.pushed, abs=1e-3)


def test_counters_that_name_the_rows_that_moved_catch_everything() -> None:
    changes = [np.array([3.0, 1.0, 0.0, 2.0]), np.array([1.0, 5.0])]
    assert update_size.caught(changes, changes, r=0.5) == 1.0
    assert update_size.caught([-c for c in changes], changes, r=0.5) == pytest.approx(2 / 10)
    assert update_size.caught(changes, [0 * c for c in changes], r=0.5) == 1.0


def shown(found: Any) -> str:
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        console.print(report.render(found))
    return captured.get()


def assert_shown(found: Any, *expected: str) -> None:
    text = shown(found)
    assert "…" not in text
    assert all(part in text for part in expected)
    json.dumps(report.to_dict(found), allow_nan=False)


def test_every_figure_can_be_drawn(tmp_path: Path) -> None:
    job = Job(steps=20, recipe=RECIPE)
    runner = Runner(job=job)
    for name, found in {
        "7": studies.study_strategies(runner, seeds=2, strategies=[FULL, CPR]),
        "9": studies.study_targets(runner, seeds=1, strategies=[CPR], targets=[0.1]),
        "10": studies.study_failures(job, seeds=2),
        "11": studies.study_pls(runner, runs=3, seeds=1),
        "6": update_size.correlate_updates(job),
    }.items():
        for kind, begins in (("png", b"\x89PNG"), ("svg", b"<?xml")):
            path = tmp_path / f"{name}.{kind}"
            report.check_picture(path)
            report.draw(found, path)
            assert path.read_bytes().startswith(begins)


# Nonsense.


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"strategy": "luck"}, "unknown strategy"),
        ({"failures": -1}, "failures must be"),
        ({"failures": 1.5}, "failures must be"),
        ({"share": 0.3}, "whole number of 8 or 16"),
        ({"share": 0}, "whole number of 8 or 16"),
        ({"share": 2.0}, "whole number of 8 or 16"),
        ({"share": float("nan")}, "whole number of 8 or 16"),
        ({"pls": 0}, "target PLS"),
        ({"pls": 1.5}, "target PLS"),
        ({"seed": -1}, "seed must be"),
        ({"interval_h": 0}, "interval_h"),
    ],
)
def test_a_run_that_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        Emulated(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"steps": 0},
        {"hours": 0},
        {"hours": float("nan")},
        {"recipe": Recipe(optimizer="sparse-adam")},
        {"recipe": Recipe(model="pnn")},
    ],
)
def test_a_job_that_cannot_be_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        Job(**given)


def test_saves_closer_than_a_step_are_refused_before_training() -> None:
    told: list[Outcome] = []
    runner = Runner(job=JOB, tell=lambda outcome, done, total: told.append(outcome))
    with pytest.raises(InvalidRequestError, match="at least 80 steps"):
        runner.run([emulated(NONE), emulated("cpr-ssu", interval_h=5.6)])
    assert not told
    with pytest.raises(InvalidRequestError, match="three runs"):
        studies.study_pls(runner, runs=2, seeds=1)


def test_pictures_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"\.png or a \.svg"):
        report.check_picture(tmp_path / "a.pdf")
    with pytest.raises(InvalidRequestError, match="no such folder"):
        report.check_picture(tmp_path / "missing" / "a.png")


@pytest.mark.parametrize(
    ("figure", "chosen"),
    [
        ("10", {"failures": 2}),
        ("9", {"pls": 0.1}),
        ("6", {"seeds": 2}),
        ("7", {"runs": 30}),
        ("7", {"seeds": 0}),
        ("11", {"strategies": ["full"]}),
    ],
)
def test_options_that_a_figure_does_not_take_are_refused(
    figure: str, chosen: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequestError):
        command.check_options(command.Figure(figure), chosen)


def test_the_command_prints_json_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "seven.png"
    command.emulate(
        strategy=[command.EmulatedStrategy.FULL, command.EmulatedStrategy.CPR],
        seeds=1,
        steps=30,
        preset=command.Preset.TINY,
        rows=400,
        batch_size=32,
        workers=1,
        picture=picture,
        as_json=True,
    )
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert [line["strategy"] for line in found["lines"]] == ["full", "cpr"]
    assert found["lines"][1]["has_benefit"] is True
    assert "run 2 of 2: cpr" in err
    assert picture.stat().st_size > 0
