"""The advice: what strategies cost against each other, in situations where the answer is known."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidRequestError
from holdfast.plan.advise import CODED, FULL, PARTIAL, Advice, Estimate, advise
from holdfast.plan.situation import MEANINGS, Situation, make_situation

BIG = Situation(rows=4_000_000_000, row_bytes=256, mtbf_h=28, servers=16, updates_per_s=2e6)


def of(advice: Advice, strategy: str) -> Estimate:
    (found,) = [e for e in advice.estimates if e.strategy == strategy]
    return found


def test_every_strategy_is_there_once() -> None:
    names = "full check-n-run incrcp cpr cpr-mfu cpr-ssu cpr-scar ecrm ecrec"
    assert [e.strategy for e in advise(BIG).estimates] == names.split()


@given(
    rows=st.integers(1000, 10**11),
    mtbf_h=st.floats(0.5, 500),
    servers=st.integers(2, 1000),
    updates=st.floats(0, 1e8),
    growth=st.floats(0.05, 1.0),
)
def test_estimates_are_numbers_and_the_advice_is_possible(
    rows: int, mtbf_h: float, servers: int, updates: float, growth: float
) -> None:
    situation = Situation(rows=rows, row_bytes=128, mtbf_h=mtbf_h, servers=servers,
                          updates_per_s=updates, changed_growth=growth)  # fmt: skip
    advice = advise(situation)
    for e in advice.estimates:
        values = [e.interval_h, e.total, e.written_bytes_h, e.capacity_bytes, e.recovery_s, e.pls]
        assert all(0 <= value < float("inf") for value in values), e
        assert e.recovery in (FULL, PARTIAL, CODED)
    assert advice.best.strategy is not None
    chosen = of(advice, advice.best.strategy)
    assert not chosen.problem
    assert all(chosen.total <= e.total + 1e-4 for e in advice.estimates if not e.problem)
    assert advice.best.strategy in advice.best.reason
    assert advice.best.strategy in (advice.own_loop.strategy, advice.on_servers.strategy)


def test_partial_recovery_loses_no_work_and_pays_in_pls() -> None:
    advice = advise(BIG)
    assert of(advice, "full").lost_work_h > 0 == of(advice, "full").pls
    cpr = of(advice, "cpr")
    assert cpr.lost_work_h == 0
    assert cpr.pls == pytest.approx(BIG.pls)
    assert cpr.overhead.total < of(advice, "full").overhead.total


def test_one_lost_server_reloads_its_own_part() -> None:
    advice = advise(BIG)
    assert of(advice, "cpr").recovery_s == pytest.approx(
        of(advice, "full").recovery_s
    )  # in parallel
    few = dataclasses.replace(BIG, lost=4)
    assert of(advise(few), "cpr").interval_h == pytest.approx(of(advice, "cpr").interval_h / 4)


def test_increments_and_few_bits_write_less() -> None:
    advice = advise(dataclasses.replace(BIG, bits=4))
    per_save = {e.strategy: e.written_bytes_h * e.interval_h for e in advice.estimates}
    assert per_save["check-n-run"] < per_save["incrcp"] < per_save["full"]
    assert per_save["cpr-ssu"] == pytest.approx(per_save["cpr"] / 8)


def test_codes_are_refused_where_they_cannot_help() -> None:
    reasons = {
        "2 servers": dataclasses.replace(BIG, lost=2),
        "need more than 4 servers": dataclasses.replace(BIG, servers=4),
        "memory": dataclasses.replace(BIG, memory_headroom=0.1),
        "network": dataclasses.replace(BIG, updates_per_s=1e12),
    }
    for words, situation in reasons.items():
        assert words in of(advise(situation), "ecrec").problem
    assert not of(advise(BIG), "ecrec").problem


def test_much_parity_traffic_speaks_for_checkpoints() -> None:
    busy = dataclasses.replace(BIG, updates_per_s=5e7)
    quiet = dataclasses.replace(BIG, updates_per_s=1e4, mtbf_h=1, pls=0.001)
    assert of(advise(busy), "ecrec").training > of(advise(quiet), "ecrec").training
    assert advise(busy).best.strategy not in ("ecrm", "ecrec")
    assert advise(quiet).best.strategy in ("ecrm", "ecrec")


def test_frequent_failures_and_a_small_pls_send_everyone_back_to_full() -> None:
    hard = dataclasses.replace(BIG, mtbf_h=0.5, pls=1e-5)
    assert "gains nothing over full" in of(advise(hard), "cpr").problem


@pytest.mark.parametrize(
    "wrong", [
        {"rows": 0}, {"rows": -1}, {"rows": 1.5}, {"row_bytes": 0}, {"mtbf_h": 0}, {"mtbf_h": -1},
        {"mtbf_h": float("nan")}, {"servers": 0}, {"lost": 0}, {"lost": 17}, {"write_bytes_s": 0},
        {"r": 0}, {"r": 2}, {"pls": 0}, {"changed_per_hour": 1.5}, {"changed_growth": 0},
        {"updates_per_s": -1}, {"bits": 0}, {"coded": 0}, {"parity": 0}, {"memory_headroom": -0.1},
        {"rows": 10**400}, {"bits": 10**31}, {"mtbf_h": 1e308}, {"updates_per_s": 10**400},
        {"r": "0.1"}, {"rows": True}, {"job_h": float("inf")},
    ],
)  # fmt: skip
def test_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        dataclasses.replace(BIG, **wrong)


def test_what_is_missing_or_unknown_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="mtbf_h"):
        make_situation({"rows": 10, "row_bytes": 64})
    with pytest.raises(InvalidRequestError, match="colour"):
        make_situation({"rows": 10, "row_bytes": 64, "mtbf_h": 3, "colour": "red"})
    assert make_situation({"rows": 10, "row_bytes": 64, "mtbf_h": 3}).servers == 8


def test_between_equals_the_one_that_risks_nothing_is_taken() -> None:
    advice = advise(dataclasses.replace(BIG, updates_per_s=0.0, dense_bytes=1 << 30))
    ecrm, ecrec = of(advice, "ecrm"), of(advice, "ecrec")
    assert round(ecrm.total, 4) == round(ecrec.total, 4)
    assert ecrm.memory_bytes < ecrec.memory_bytes  # and yet:
    assert advice.on_servers.strategy == advice.best.strategy == "ecrec"
    assert "ecrm 0.0" in advice.on_servers.reason and ecrm.risk in advice.on_servers.reason


def test_there_is_an_answer_for_each_way_to_hold_tables() -> None:
    advice = advise(dataclasses.replace(BIG, servers=2))
    assert advice.on_servers.strategy is None  # no room for stripes on two servers
    assert "ecrec is out" in advice.on_servers.reason
    own = of(advice, advice.own_loop.strategy or "")
    assert own.recovery in (FULL, PARTIAL)


def test_checkpoints_are_exact_unless_few_bits_are_asked_for() -> None:
    assert of(advise(BIG), "check-n-run").risk == "none"
    few = of(advise(dataclasses.replace(BIG, bits=4)), "check-n-run")
    assert few.risk == "rows at 4 bits after each restore"
    assert few.capacity_bytes < of(advise(BIG), "check-n-run").capacity_bytes / 4


def test_every_number_of_a_situation_is_explained() -> None:
    assert list(MEANINGS) == [field.name for field in dataclasses.fields(Situation)]
