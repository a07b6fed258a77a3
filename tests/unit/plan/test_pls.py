"""PLS met live, expected, and as an interval; the choice between full and partial recovery."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from holdfast.errors import CorruptDataError, InvalidRequestError
from holdfast.plan.overhead import Costs
from holdfast.plan.paper import KAGGLE, PRODUCTION, TERABYTE, Experiment
from holdfast.plan.pls import PlsMeter, choose_recovery, expected_pls, interval_part

COSTS = Costs(save_h=0.1, load_h=0.05, reschedule_h=0.05)


def choose(experiment: Experiment, **changes: Any) -> Any:
    inputs: dict[str, Any] = {
        "mtbf_h": experiment.mtbf_h,
        "servers": experiment.servers,
        "pls": experiment.pls,
        "lost": experiment.lost,
        "full_interval_h": experiment.full_interval_h,
    }
    return choose_recovery(experiment.costs, **{**inputs, **changes})


# --- the meter


def test_a_run_without_failures_loses_nothing() -> None:
    meter = PlsMeter(100, servers=4)
    meter.trained(60)
    meter.saved()
    meter.trained(40)
    assert meter.pls == meter.pls_once == 0
    assert meter.samples == 100


def test_a_failure_adds_the_samples_since_the_save_over_all_samples_and_servers() -> None:
    meter = PlsMeter(1000, servers=5)
    meter.trained(300)
    meter.saved()
    meter.trained(100)
    assert meter.failed([2]) == pytest.approx(100 / (1000 * 5))
    meter.trained(100)
    assert meter.failed([4]) == pytest.approx(200 / (1000 * 5))
    assert meter.pls == pytest.approx(300 / 5000)


def test_servers_lost_at_once_add_up_and_each_from_its_own_save() -> None:
    meter = PlsMeter(1000, servers=4)
    meter.trained(100)
    meter.saved([0, 1])
    meter.trained(100)
    meter.saved([1])
    meter.trained(100)
    assert meter.failed([0, 1, 3]) == pytest.approx((200 + 100 + 300) / 4000)


def test_a_save_counts_from_when_its_snapshot_was_taken() -> None:
    meter = PlsMeter(1000, servers=1)
    meter.trained(100)
    snapshot = meter.samples
    meter.trained(50)  # meanwhile it is written
    meter.saved(at=snapshot)
    assert meter.failed([0]) == pytest.approx(0.05)


def test_a_save_that_ends_late_does_not_undo_a_later_one() -> None:
    meter = PlsMeter(1000, servers=1)
    meter.trained(200)
    meter.saved(at=150)
    meter.saved(at=100)
    assert meter.failed([0]) == pytest.approx(0.05)


def test_a_server_failing_twice_between_saves_counts_twice_in_equation_3_and_once_in_truth() -> (
    None
):
    meter = PlsMeter(1000, servers=2)
    meter.trained(100)
    meter.failed([0])
    meter.trained(100)
    meter.failed([0])
    assert meter.pls == pytest.approx((100 + 200) / 2000)
    assert meter.pls_once == pytest.approx((100 + 100) / 2000)


def test_pls_once_never_passes_one_where_equation_3_does() -> None:
    meter = PlsMeter(100, servers=1)
    for _ in range(100):
        meter.trained(1)
        meter.failed([0])
    assert meter.pls > 1
    assert meter.pls_once == 1


def test_losing_every_server_at_the_end_of_an_unsaved_run_loses_everything() -> None:
    meter = PlsMeter(100, servers=3)
    meter.trained(100)
    assert meter.failed(range(3)) == 1


def test_a_meter_goes_on_from_its_state_through_json() -> None:
    meter = PlsMeter(1000, servers=3)
    meter.trained(100)
    meter.saved([1])
    meter.trained(50)
    meter.failed([0, 1])
    again = PlsMeter.from_state(json.loads(json.dumps(meter.state())))
    for each in (meter, again):
        each.trained(30)
        each.failed([1])
    assert again.state() == meter.state()
    assert again.pls == meter.pls > 0


@pytest.mark.parametrize(
    "change",
    [
        {"samples": "many"},
        {"samples": -1},
        {"samples_total": 0},
        {"saved": []},
        {"saved": [0]},
        {"saved": [0, 999]},
        {"recovered": None},
        {"lost": 0.5},
        {"lost_once": 10**6},
    ],
    ids=str,
)
def test_a_damaged_state_is_refused(change: dict[str, Any]) -> None:
    meter = PlsMeter(1000, servers=2)
    meter.trained(100)
    with pytest.raises(CorruptDataError, match="PLS meter"):
        PlsMeter.from_state({**meter.state(), **change})


def test_a_state_with_a_field_missing_is_refused() -> None:
    state = PlsMeter(1000, servers=2).state()
    del state["lost"]
    with pytest.raises(CorruptDataError, match="lost"):
        PlsMeter.from_state(state)


def test_nonsense_told_to_a_meter_is_refused_and_changes_nothing() -> None:
    meter = PlsMeter(1000, servers=2)
    meter.trained(10)
    before = meter.state()
    for servers in ([], [2], [-1], [0, 0], [0.5], [0, 2]):
        with pytest.raises(InvalidRequestError):
            meter.failed(servers)  # type: ignore[arg-type]
    for at in (-1, 11, 0.5):
        with pytest.raises(InvalidRequestError):
            meter.saved(at=at)  # type: ignore[arg-type]
    for samples in (0, -5, 1.5):
        with pytest.raises(InvalidRequestError, match="samples"):
            meter.trained(samples)  # type: ignore[arg-type]
    assert meter.state() == before


@pytest.mark.parametrize(("samples", "servers"), [(0, 4), (-1, 4), (100, 0), (100, -2), (100, 2.5)])
def test_a_meter_needs_samples_and_servers(samples: int, servers: int) -> None:
    with pytest.raises(InvalidRequestError):
        PlsMeter(samples, servers=servers)


# --- expectation and interval


@pytest.mark.parametrize("lost", [1, 2, 4, 8])
def test_interval_and_expected_pls_are_each_others_inverse(lost: int) -> None:
    interval_h = interval_part(0.07, mtbf_h=13, servers=8, lost=lost)
    assert expected_pls(interval_h, mtbf_h=13, servers=8, lost=lost) == pytest.approx(0.07)


def test_losing_twice_as_many_servers_halves_the_interval() -> None:
    one = interval_part(0.1, mtbf_h=28, servers=8)
    assert interval_part(0.1, mtbf_h=28, servers=8, lost=2) == pytest.approx(one / 2)


def test_production_intervals_are_within_an_eighth_of_the_papers_two_to_eight_hours() -> None:
    for pls, printed_h in ((0.025, 2), (0.1, 8)):
        interval_h = interval_part(pls, mtbf_h=10, servers=18, lost=4)
        assert interval_h == pytest.approx(printed_h * 18 / 4 / 4)


@pytest.mark.parametrize("pls", [0, -0.1, 1.01, math.nan, math.inf, "0.1", None, True])
def test_a_target_pls_outside_zero_to_one_is_refused(pls: Any) -> None:
    with pytest.raises(InvalidRequestError, match="PLS") as caught:
        interval_part(pls, mtbf_h=28, servers=8)
    assert caught.value.todo
    with pytest.raises(InvalidRequestError, match="PLS"):
        choose_recovery(COSTS, mtbf_h=28, servers=8, pls=pls)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mtbf_h", -28), ("mtbf_h", 0), ("mtbf_h", math.nan), ("servers", 0), ("servers", -8),
        ("servers", 8.0), ("servers", True), ("lost", 0), ("lost", 9), ("lost", -1),
    ],
)  # fmt: skip
def test_nonsense_clusters_are_refused_by_name(field: str, value: Any) -> None:
    cluster: dict[str, Any] = {"mtbf_h": 28, "servers": 8, "lost": 1, field: value}
    with pytest.raises(InvalidRequestError, match=field) as caught:
        interval_part(0.1, **cluster)
    assert caught.value.todo
    with pytest.raises(InvalidRequestError, match=field):
        expected_pls(2.0, **cluster)
    with pytest.raises(InvalidRequestError, match=field):
        choose_recovery(COSTS, pls=0.1, **cluster)


def test_a_negative_interval_has_no_expected_pls() -> None:
    with pytest.raises(InvalidRequestError, match="interval_h"):
        expected_pls(-1, mtbf_h=28, servers=8)


# --- the choice


@pytest.mark.parametrize("experiment", [KAGGLE, TERABYTE], ids=["kaggle", "terabyte"])
def test_the_papers_emulation_gets_the_papers_choice_and_overheads(experiment: Experiment) -> None:
    choice = choose(experiment)
    assert choice.kind == "partial"
    assert choice.interval_h == pytest.approx(44.8)
    assert round(choice.full.total, 3) == experiment.published.full
    assert round(choice.part.total, 4) == experiment.published.cpr


def test_the_papers_production_gets_partial_recovery_and_about_its_overheads() -> None:
    choice = choose(PRODUCTION)
    assert choice.kind == "partial"
    assert round(choice.full.total, 4) == PRODUCTION.published.full
    # equation 4 allows 9 h, the paper ran 8 h: 8/9 of its overhead
    assert choice.interval_h == pytest.approx(9)
    assert choice.part.total == pytest.approx(PRODUCTION.published.cpr * 8 / 9, rel=0.01)


def test_many_failures_of_many_servers_fall_back_to_full_recovery() -> None:
    choice = choose(KAGGLE, pls=0.02, mtbf_h=56 / 40, lost=4)
    assert choice.kind == "full"
    assert choice.part.total > choice.full.total
    assert choice.interval_h == choice.full_interval_h
    assert choice.expected_pls == 0
    assert "no benefit" in choice.reason


def test_partial_recovery_gains_less_with_more_failures_and_with_more_servers_lost() -> None:
    def relative(failures: int, lost: int) -> float:
        choice = choose(KAGGLE, pls=0.02, mtbf_h=56 / failures, lost=lost)
        return float(choice.part.total / choice.full.total)

    assert relative(2, 1) < relative(20, 1) < relative(40, 1)
    assert relative(2, 1) < relative(2, 2) < relative(2, 4)


def test_a_gain_too_small_to_be_worth_it_falls_back_and_says_so() -> None:
    choice = choose(KAGGLE, gain_min=0.2)
    assert choice.kind == "full"
    assert choice.full.total - choice.part.total > 0
    assert "below the 20.00%" in choice.reason


def test_the_reason_carries_the_numbers_the_choice_was_made_with() -> None:
    reason = choose(KAGGLE).reason
    for said in ("PLS of 0.1", "44.8 h", "0.53%", "2.29 h", "8.50%", "only the lost servers"):
        assert said in reason


def test_free_saves_need_full_recoverys_interval_said() -> None:
    free = Costs(save_h=0, load_h=0.1, reschedule_h=0.1)
    with pytest.raises(InvalidRequestError, match="save_h"):
        choose_recovery(free, mtbf_h=28, servers=8, pls=0.1)
    choice = choose_recovery(free, mtbf_h=28, servers=8, pls=0.1, full_interval_h=0.5)
    assert choice.part.save == 0


@pytest.mark.parametrize("gain_min", [-0.1, math.nan])
def test_a_negative_least_gain_is_refused(gain_min: float) -> None:
    with pytest.raises(InvalidRequestError, match="gain_min"):
        choose_recovery(COSTS, mtbf_h=28, servers=8, pls=0.1, gain_min=gain_min)
