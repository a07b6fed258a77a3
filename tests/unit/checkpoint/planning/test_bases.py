"""IncrCP's rule for a new base: T_base < T_incre, from what was measured."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.format.catalog import (
    BASE,
    DELTA,
    Catalog,
    CheckpointEntry,
    RestoreTiming,
    SegmentEntry,
)
from holdfast.checkpoint.format.object import Extent
from holdfast.checkpoint.planning.bases import (
    BASE_WINS_BY,
    ROLLUP_PAYS_AT,
    ROLLUP_REPLACES_MIN,
    SINCE_BASE,
    SINCE_LAST,
    Gathered,
    Measured,
    estimate_restore,
    measure,
    plan_checkpoint,
)

pure = settings(max_examples=300, deadline=None, derandomize=True)
SECONDS = st.floats(0, 1e6, allow_subnormal=False)
BYTES = st.integers(0, 10**12)
MEASURED = st.builds(
    Measured,
    base_bytes=BYTES,
    delta_bytes=BYTES,
    build_base_s=SECONDS,
    build_delta_s=SECONDS,
    restore_base_s=st.none() | SECONDS,
    restores=st.lists(st.tuples(BYTES, SECONDS), max_size=3),
)


def kind(measured: Measured | None) -> str:
    return plan_checkpoint("recovery-time", [0.1], measured=measured).kind


def test_first_checkpoint_is_a_base_and_deltas_are_since_the_last() -> None:
    assert plan_checkpoint("recovery-time", None).kind == BASE
    assert plan_checkpoint("recovery-time", [], must_be_base="because").reason == "because"
    plan = plan_checkpoint("recovery-time", [], measured=Measured(100, 0, 1.0, 0.1))
    assert (plan.kind, plan.since) == (DELTA, SINCE_LAST)


@pytest.mark.parametrize("measured", [None, Measured(100, 10**9, 0.0, 5.0)])
def test_without_a_timed_base_nothing_is_reset(measured: Measured | None) -> None:
    plan = plan_checkpoint("recovery-time", [9.0], measured=measured)
    assert (plan.kind, plan.reason) == (DELTA, "an increment: no base was timed yet")


def test_base_is_taken_when_reading_increments_costs_more_than_building_it() -> None:
    # T_base = 10 + 2, T_incre = 1 + 2 + R_i, R_i = one second for 100 bytes
    known = Measured(1000, 0, 10.0, 1.0, restore_base_s=2.0, restores=[(100, 1.0)])
    assert kind(dataclasses.replace(known, delta_bytes=900)) == DELTA
    assert kind(dataclasses.replace(known, delta_bytes=1000)) == DELTA  # not by a tenth
    plan = plan_checkpoint(
        "recovery-time", [0.1], measured=dataclasses.replace(known, delta_bytes=1100)
    )
    assert plan.kind == BASE
    assert plan.reason == "T_base 12 s < T_incre 14 s (R_i from the last restore)"


def test_with_nothing_restored_yet_bytes_and_the_speed_of_writing_decide() -> None:
    known = Measured(1000, 0, 10.0, 1.0)
    assert estimate_restore(dataclasses.replace(known, delta_bytes=500)) == (
        5.0,
        "bytes, at the speed the base was written",
    )
    assert kind(dataclasses.replace(known, delta_bytes=1000)) == DELTA
    assert kind(dataclasses.replace(known, delta_bytes=1200)) == BASE


def test_estimate_lies_on_the_line_through_the_last_two_restores() -> None:
    known = Measured(1, 40, 1.0, 1.0, restores=[(7, 99.0), (10, 1.0), (20, 1.5)])
    assert estimate_restore(known) == (2.5, "the last two restores")
    # restores of a base alone tell nothing of increments
    assert estimate_restore(dataclasses.replace(known, restores=[(0, 3.0), (20, 1.5)])) == (
        3.0,
        "the last restore",
    )
    # noise made the larger one look faster
    backwards = dataclasses.replace(known, restores=[(10, 2.0), (20, 1.5)])
    assert estimate_restore(backwards) == (3.0, "the last restore")
    same = dataclasses.replace(known, restores=[(20, 1.0), (20, 1.5)])
    assert estimate_restore(same) == (3.0, "the last restore")


@given(MEASURED)
@pure
def test_decision_follows_the_rule_and_never_fails(measured: Measured) -> None:
    seconds, _ = estimate_restore(measured)
    assert seconds >= 0
    found = kind(measured)
    if measured.build_base_s == 0:
        assert found == DELTA
        return
    base_s = measured.restore_base_s
    base_s = measured.build_base_s if base_s is None else base_s
    with_base = measured.build_base_s + base_s
    without = min(measured.build_delta_s, measured.build_base_s) + base_s + seconds
    assert (found == BASE) == (with_base * BASE_WINS_BY < without)


@given(MEASURED)
@pure
def test_nothing_to_read_since_the_base_is_never_a_reason_for_a_new_one(measured: Measured) -> None:
    if any(size > 0 for size, _ in measured.restores):
        # a line through two restores may start above zero: in proportion it does not
        measured = dataclasses.replace(measured, restores=measured.restores[-1:])
    assert kind(dataclasses.replace(measured, delta_bytes=0)) == DELTA


@given(MEASURED, BYTES)
@pure
def test_more_to_read_never_speaks_against_a_base(measured: Measured, more: int) -> None:
    if kind(measured) == BASE:
        grown = dataclasses.replace(measured, delta_bytes=measured.delta_bytes + more)
        assert kind(grown) == BASE


# What a catalog knows


def entry(step: int, kind: str, build_s: float) -> CheckpointEntry:
    return CheckpointEntry(
        step=step, ordinal=0, kind=kind, base=10, schema=0, time=0.0, codec="fp32",
        state_codec="none", rows=1, row_bytes=100, bytes=100, full_bytes=100, stall_s=0.0,
        reason="", dense=Extent("o", 0, 1, 0), build_s=build_s,
    )  # fmt: skip


def segment(born: int, died: int | None, size: int) -> SegmentEntry:
    return SegmentEntry("t", born, died, 1, 0, 0, Extent("o", 0, size, 0))


def test_measured_are_the_bytes_a_restore_reads_and_the_fastest_increment() -> None:
    catalog = Catalog(run="r", number=0, writer="w")
    assert measure(catalog) is None
    for made, part in (
        (entry(10, BASE, 5.0), segment(10, None, 1000)),
        (entry(20, DELTA, 0.7), segment(20, None, 40)),
        (entry(30, DELTA, 0.4), segment(30, None, 30)),
        (entry(40, DELTA, 0.9), segment(40, None, 20)),
    ):
        catalog = catalog.with_checkpoint(made, (part,), (), replaces_since=None)
    extracted = tuple(
        dataclasses.replace(s, died=30) if s.born == 20 else s for s in catalog.segments
    )
    catalog = dataclasses.replace(
        catalog,
        segments=extracted,
        restore_timings=(RestoreTiming(1000, 2.0, 40, 0.1), RestoreTiming(1000, 3.0, 50, 0.2)),
    )
    assert measure(catalog) == Measured(
        base_bytes=1000,
        delta_bytes=50,  # what was extracted is not read
        build_base_s=5.0,
        build_delta_s=0.4,
        restore_base_s=3.0,
        restores=[(40, 0.1), (50, 0.2)],
    )


# Rollups


def rollup_of(increments: list[int], rollup_bytes: float) -> bool:
    gathered = Gathered(increments, rollup_bytes)
    plan = plan_checkpoint("consecutive", [0.1], gathered=gathered)
    assert (plan.kind, plan.since) == (DELTA, SINCE_BASE if plan.is_rollup else SINCE_LAST)
    assert plan.reason.startswith("rollup") == plan.is_rollup
    return plan.is_rollup


def test_a_rollup_is_taken_once_increments_took_as_many_bytes_as_it_would() -> None:
    assert not rollup_of([10, 10, 10], 30 / ROLLUP_PAYS_AT + 1)
    assert rollup_of([10, 10, 10], 30 / ROLLUP_PAYS_AT)


@pytest.mark.parametrize("increments", [[], [10**9]])
def test_a_rollup_gathers_several_increments(increments: list[int]) -> None:
    assert len(increments) < ROLLUP_REPLACES_MIN
    assert not rollup_of(increments, 1.0)


@pytest.mark.parametrize(("increments", "rollup_bytes"), [([0, 0, 0], 0.0), ([5, 5], 0.0)])
def test_where_nothing_changed_there_is_no_rollup(
    increments: list[int], rollup_bytes: float
) -> None:
    assert not rollup_of(increments, rollup_bytes)


def test_without_rollups_or_with_another_policy_there_is_none() -> None:
    gathered = Gathered([10, 10, 10], 1.0)
    assert not plan_checkpoint("consecutive", [0.1]).is_rollup
    for policy in ("full", "one-shot", "intermittent"):
        assert not plan_checkpoint(policy, [0.1], gathered=gathered).is_rollup
    assert not plan_checkpoint("consecutive", None, gathered=gathered).is_rollup
    forced = plan_checkpoint("consecutive", [0.1], must_be_base="because", gathered=gathered)
    assert (forced.kind, forced.is_rollup) == (BASE, False)


def test_a_base_that_pays_comes_before_a_rollup() -> None:
    slow = Measured(100, 100, 1.0, 0.1, restore_base_s=1.0, restores=[(100, 9.0)])
    plan = plan_checkpoint(
        "recovery-time", [0.1], measured=slow, gathered=Gathered([10, 10, 10], 1.0)
    )
    assert (plan.kind, plan.is_rollup) == (BASE, False)


@pure
@given(st.lists(st.sets(st.integers(0, 60), min_size=1, max_size=20), min_size=1, max_size=80))
def test_rollups_at_most_double_the_increments(changes: list[set[int]]) -> None:
    """Sizes in rows: each save holds what changed in its interval, a rollup all since the base."""
    since_base: set[int] = set()
    increments: list[int] = []
    stored = plain = 0
    for changed in changes:
        is_rollup = rollup_of(increments, float(len(since_base)))
        since_base |= changed
        plain += len(changed)
        stored += len(since_base) if is_rollup else len(changed)
        increments = [] if is_rollup else [*increments, len(changed)]
    assert stored <= (1 + 1 / ROLLUP_PAYS_AT) * plain
