"""Counters, changes, the k largest and the sub-sampled set, against NumPy and plain Python."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from holdfast.kernels.rows import bitmap, priority

SEED = 20240917
FULL = 2**32 - 1

id_lists = st.integers(1, 300).flatmap(
    lambda rows: st.tuples(st.just(rows), st.lists(st.integers(0, rows - 1), max_size=200))
)
# Few different values: ties everywhere. Any bits: every kind of float, huge counters.
counter_values = st.one_of(st.integers(0, 3), st.integers(0, 5000), st.integers(0, FULL))
float_values = st.one_of(
    st.sampled_from([0.0, -0.0, 0.5, 1.0, 1e-45, np.inf, -np.inf, np.nan]),
    st.floats(width=32, allow_nan=True),
)


def top_by_sorting(values: np.ndarray, k: int) -> list[int]:
    """The k largest above 0 in the order of value, then id: a full sort. NaN is infinity."""
    plain = np.where(np.isnan(values), np.inf, values.astype(np.float64))
    order = sorted(range(len(plain)), key=lambda i: (-plain[i], i))
    return sorted(i for i in order[:k] if plain[i] > 0)


# The k largest.


@given(
    st.one_of(
        hnp.arrays(np.uint32, st.integers(0, 200), elements=counter_values),
        hnp.arrays(np.float32, st.integers(0, 200), elements=float_values),
    ),
    st.integers(0, 220),
)
@settings(deadline=None, derandomize=True, max_examples=300)
def test_top_is_what_a_full_sort_finds(values: np.ndarray, k: int) -> None:
    before = values.copy()
    expected = top_by_sorting(values, k)
    found = priority.top(values, k)
    assert found.dtype == np.int64
    assert found.tolist() == expected
    assert bitmap.ids(priority.top_set(values, k), 0, 2**40).tolist() == expected
    assert np.array_equal(values.view(np.uint32), before.view(np.uint32))


def tables_of_values() -> dict[str, np.ndarray]:
    """Tables too large to be looked at whole for a guess, and shapes that a guess gets wrong."""
    rng = np.random.default_rng(SEED)
    size = 40_001
    unseen = np.zeros(size, np.uint32)
    unseen[1::2] = rng.integers(1, 2**31, size // 2)
    rhythm = np.zeros(size, np.uint32)
    rhythm[:: (size // 8192) | 1] = np.arange(1, len(rhythm[:: (size // 8192) | 1]) + 1)
    return {
        "any": rng.integers(0, 2**32, size, np.uint32),
        "skewed": (rng.pareto(0.3, size) * 2).clip(0, FULL).astype(np.uint32),
        "few values": rng.integers(0, 4, size).astype(np.uint32),
        "one value": np.full(size, 7, np.uint32),
        "all full": np.full(size, FULL, np.uint32),
        "zeros": np.zeros(size, np.uint32),
        "one row": np.where(np.arange(size) == 12_345, 3, 0).astype(np.uint32),
        "hidden from the guess": unseen,
        "only what the guess sees": rhythm,
        "ascending": np.arange(size, dtype=np.uint32),
        "floats": rng.exponential(size=size).astype(np.float32),
        "signed floats": rng.standard_normal(size).astype(np.float32),
        "any float bits": rng.integers(0, 2**32, size, np.uint32).view(np.float32),
    }


@pytest.mark.parametrize("name", tables_of_values())
def test_top_is_exact_on_tables_that_are_guessed_from_a_part(name: str) -> None:
    values = tables_of_values()[name]
    with np.errstate(invalid="ignore"):
        plain = np.where(np.isnan(values), np.inf, values).astype(np.float64)
    order = np.lexsort((np.arange(plain.size), -plain))
    for k in (1, 2, 63, 5000, 8192, 20_000, 40_000, 40_001, 50_000):
        expected = order[:k][plain[order[:k]] > 0]
        expected.sort()
        assert np.array_equal(priority.top(values, k), expected), k


def test_top_of_a_column_reads_in_place() -> None:
    wide = np.random.default_rng(SEED).random((500, 3), np.float32)
    assert np.array_equal(priority.top(wide[:, 1], 50), priority.top(wide[:, 1].copy(), 50))


def test_a_question_top_cannot_answer_is_refused() -> None:
    values = np.ones(4, np.uint32)
    with pytest.raises(ValueError, match="negative"):
        priority.top(values, -1)
    wrong: list[Any] = [values.astype(np.int64), values.astype(np.float64), values.reshape(2, 2)]
    for other in wrong:
        with pytest.raises(TypeError, match="uint32 or float32"):
            priority.top(other, 1)


# MFU.


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@given(case=id_lists)
@settings(deadline=None, derandomize=True)
def test_counters_count_every_access_and_clear_only_the_saved(
    dtype: type, case: tuple[int, list[int]]
) -> None:
    rows, ids = case
    counters = np.zeros(rows, np.uint32)
    priority.count(counters, np.array(ids, dtype))
    seen = Counter(ids)
    assert counters.tolist() == [seen[i] for i in range(rows)]
    saved = ids[::3]
    priority.clear(counters, np.array(saved, dtype))
    assert counters.tolist() == [0 if i in saved else seen[i] for i in range(rows)]


def test_a_full_counter_stays_full() -> None:
    counters = np.array([FULL - 2, FULL, 0], np.uint32)
    priority.count(counters, np.array([0, 1, 0, 0, 1, 0]))
    assert counters.tolist() == [FULL, FULL, 0]


@pytest.mark.parametrize("bad", [-1, 10, 2**40, -(2**63), 2**63 - 1])
def test_an_id_outside_the_table_changes_nothing(bad: int) -> None:
    counters = np.arange(10, dtype=np.uint32)
    words, state = bitmap.new(10), priority.new_state(SEED)
    before = state.copy()
    ids = np.array([1, 2, bad])
    for refused in (
        lambda: priority.count(counters, ids),
        lambda: priority.clear(counters, ids),
        lambda: priority.sample(words, state, ids, 10, 5, 2),
    ):
        with pytest.raises(IndexError, match="outside"):
            refused()
    assert counters.tolist() == list(range(10))
    assert not words.any()
    assert np.array_equal(state, before)


# SCAR.


@given(
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=20).flatmap(
        lambda shape: st.tuples(
            hnp.arrays(np.float32, shape, elements=st.floats(-(2.0**100), 2.0**100, width=32)),
            hnp.arrays(np.float32, shape, elements=st.floats(-(2.0**100), 2.0**100, width=32)),
        )
    )
)
@settings(deadline=None, derandomize=True)
def test_changes_are_the_norms_of_the_differences(tables: tuple[np.ndarray, np.ndarray]) -> None:
    now, saved = tables
    out = np.full(len(now), -1, np.float32)
    priority.changes(now, saved, out)
    expected = np.linalg.norm((now - saved).astype(np.float64), axis=1)
    # 1e-45: a norm near the smallest float32 is a whole number of these.
    assert np.allclose(out, expected, rtol=1e-6, atol=1e-45)
    assert ((out > 0) == (now != saved).any(axis=1)).all()


@pytest.mark.parametrize("width", [1, 3, 8, 16, 33])
def test_rows_that_became_nan_or_infinite_come_first(width: int) -> None:
    saved = np.ones((8, width), np.float32)
    now = saved.copy()
    now[0] += np.float32(1e20)  # its square does not fit in a float32
    now[1, -1] = np.nan
    now[2, 0] = np.inf
    now[3, -1] = -np.inf
    saved[4, -1] = np.nan  # was not a number, now is one
    now[5, 0] = saved[5, 0] = np.nan  # saved as it is
    now[6, 0] = saved[6, 0] = np.inf
    now[7, -1] += np.float32(1e-7)  # the square of its norm is small, but there is one
    out = np.empty(8, np.float32)
    priority.changes(now, saved, out)
    assert np.isinf(out[1:5]).all() and not np.isnan(out).any()
    assert out[5] == out[6] == 0
    assert priority.top(out, 4).tolist() == [1, 2, 3, 4]
    assert priority.top(out, 5).tolist() == [0, 1, 2, 3, 4]
    assert priority.top(out, 8).tolist() == [0, 1, 2, 3, 4, 7]


def test_the_smallest_change_of_a_float_is_a_change() -> None:
    saved = np.zeros((2, 4), np.float32)
    now = saved.copy()
    now[1, 2] = np.float32(1e-45)
    out = np.empty(2, np.float32)
    priority.changes(now, saved, out)
    assert priority.top(out, 2).tolist() == [1]


def test_tables_of_different_shapes_are_refused() -> None:
    table, out = np.zeros((4, 3), np.float32), np.zeros(4, np.float32)
    for other, norms in ((table[:3], out), (table[:, :2], out), (table, out[:3])):
        with pytest.raises(ValueError, match="same rows"):
            priority.changes(table, other, norms)


# SSU.


@given(
    rows=st.integers(1, 400),
    data=st.data(),
    capacity=st.integers(0, 60),
    period=st.integers(1, 4),
    seed=st.integers(-(2**63), 2**64),
    dtype=st.sampled_from([np.int32, np.int64]),
)
@settings(deadline=None, derandomize=True, max_examples=200)
def test_a_set_keeps_within_capacity_and_to_used_rows(
    rows: int, data: st.DataObject, capacity: int, period: int, seed: int, dtype: type
) -> None:
    words, state = bitmap.new(rows), priority.new_state(seed)
    again, state_again = bitmap.new(rows), priority.new_state(seed)
    used: set[int] = set()
    calls = st.lists(st.lists(st.integers(0, rows - 1), max_size=120), max_size=6)
    for ids in data.draw(calls):
        used |= set(ids)
        priority.sample(words, state, np.array(ids, dtype), rows, capacity, period)
        found = priority.listed(words, rows).tolist()
        assert len(found) <= capacity
        assert found == sorted(set(found))
        assert set(found) <= used
        assert state[1] == len(found)
        # The same seed and the same calls give the same set.
        priority.sample(again, state_again, np.array(ids, dtype), rows, capacity, period)
        assert np.array_equal(words, again) and np.array_equal(state, state_again)
        if data.draw(st.booleans()):
            for one, its_state in ((words, state), (again, state_again)):
                priority.reset(one, its_state)
            used = set()
            assert priority.listed(words, rows).size == 0


@given(id_lists, st.integers(0, 100))
@settings(deadline=None, derandomize=True)
def test_while_there_is_room_every_sampled_row_is_listed(
    case: tuple[int, list[int]], spare: int
) -> None:
    rows, ids = case
    words, state = bitmap.new(rows), priority.new_state(SEED)
    priority.sample(words, state, np.array(ids, np.int64), rows, len(set(ids)) + spare, 1)
    assert priority.listed(words, rows).tolist() == sorted(set(ids))


@pytest.mark.parametrize("period", [1, 2, 3, 8])
@pytest.mark.parametrize("batch", [1, 5, 64, 1000])
def test_one_id_of_every_period_is_sampled_across_calls(period: int, batch: int) -> None:
    rows = 6000
    words, state = bitmap.new(rows), priority.new_state(SEED)
    for start in range(0, rows, batch):
        priority.sample(
            words, state, np.arange(start, min(start + batch, rows)), rows, rows, period
        )
    # The first id is taken, then one of each period.
    found = priority.listed(words, rows)
    assert found[0] == 0
    groups = (found[1:] - 1) // period
    whole = (rows - 1) // period
    assert groups[:whole].tolist() == list(range(whole))
    if period > 1:
        places = np.bincount((found[1:] - 1) % period, minlength=period) / whole
        assert np.all(np.abs(places - 1 / period) < 0.25 / period)


def test_no_rhythm_hides_a_row() -> None:
    words, state = bitmap.new(64), priority.new_state(SEED)
    for _ in range(40):
        priority.sample(words, state, np.array([3, 40]), 64, 8, 2)
    assert priority.listed(words, 64).tolist() == [3, 40]


def test_how_a_stream_is_cut_into_calls_does_not_change_what_is_sampled() -> None:
    ids = np.random.default_rng(SEED).integers(0, 5000, 4000)
    sets = []
    for batch in (1, 7, 4000):
        words, state = bitmap.new(5000), priority.new_state(SEED)
        for start in range(0, len(ids), batch):
            priority.sample(words, state, ids[start : start + batch], 5000, 5000, 2)
        sets.append(words)
    assert np.array_equal(sets[0], sets[1]) and np.array_equal(sets[0], sets[2])


@pytest.mark.parametrize(
    ("rows", "used", "capacity"),
    [
        (256, 256, 64),  # a dense set: places are guessed
        (8192, 100, 25),  # a thin one: a pass over it is less work
    ],
)
def test_discards_are_equally_likely_for_every_member(rows: int, used: int, capacity: int) -> None:
    # Clustered rows, and one far away: a gap before a row must not matter.
    ids = np.arange(used)
    ids[-1] = rows - 1
    stayed = np.zeros(rows)
    trials = 4000
    for seed in range(trials):
        words, state = bitmap.new(rows), priority.new_state(seed)
        priority.sample(words, state, ids, rows, used, 1)
        # Room for fewer: one discard of all that is too many.
        priority.sample(words, state, ids[:0], rows, capacity, 1)
        found = priority.listed(words, rows)
        assert found.size == capacity
        stayed[found] += 1
    share = capacity / used
    sigma = np.sqrt(share * (1 - share) / trials)
    assert np.abs(stayed[ids] / trials - share).max() < 5 * sigma


@pytest.mark.parametrize("batch", [100, 40_000])
def test_rows_used_often_stay_on_a_skewed_stream(batch: int) -> None:
    rows, capacity = 16_384, 2048
    rng = np.random.default_rng(SEED)
    stream = rng.permutation(rows)[(rows ** rng.random(160_000)).astype(np.int64) - 1]
    counters = np.zeros(rows, np.uint32)
    words, state = bitmap.new(rows), priority.new_state(SEED)
    for start in range(0, len(stream), batch):
        priority.count(counters, stream[start : start + batch])
        priority.sample(words, state, stream[start : start + batch], rows, capacity, 2)
    found = priority.listed(words, rows)
    assert found.size == capacity
    best = priority.top(counters, capacity)
    hottest = priority.top(counters, 256)
    # Equal chances for all used rows would keep 13 % of the hottest and of the accesses.
    assert np.isin(hottest, found).mean() > 0.6
    assert counters[found].sum() > 0.6 * counters[best].sum()


def test_a_smaller_capacity_holds_from_the_next_call_on() -> None:
    words, state = bitmap.new(1000), priority.new_state(SEED)
    priority.sample(words, state, np.arange(500), 1000, 400, 1)
    before = set(priority.listed(words, 1000).tolist())
    priority.sample(words, state, np.empty(0, np.int64), 1000, 30, 1)
    after = priority.listed(words, 1000).tolist()
    assert len(after) == 30 and set(after) < before


def test_a_state_that_promises_rows_that_are_gone_ends_and_recovers() -> None:
    words, state = bitmap.new(1000), priority.new_state(SEED)
    state[1] = 900
    priority.sample(words, state, np.arange(5), 1000, 10, 1)
    assert state[1] == priority.listed(words, 1000).size <= 5


def test_a_set_state_or_setting_that_does_not_fit_is_refused() -> None:
    words, state, ids = bitmap.new(100), priority.new_state(SEED), np.arange(3)
    for rows, capacity, period in (
        (200, 5, 2), (-1, 5, 2), (2**33, 5, 2), (100, -1, 2), (100, 5, 0), (100, 5, 2**40)
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"set|capacity"):
            priority.sample(words, state, ids, rows, capacity, period)
    with pytest.raises(ValueError, match="four words"):
        priority.sample(words, state[:3], ids, 100, 5, 2)
    for place in (1, 2, 3):
        lying = state.copy()
        lying[place] = 2**64 - 5
        with pytest.raises(ValueError, match="new_state"):
            priority.sample(words, lying, ids, 100, 5, 2)
    assert not words.any()


def test_no_seed_stops_the_random_numbers() -> None:
    # The seed that the first mixing step would turn into 0.
    states = [priority.new_state(seed) for seed in (0, 1, -1, -0x9E3779B97F4A7C15, 2**64 + 1)]
    assert all(state[0] != 0 for state in states)
    assert len({int(state[0]) for state in states}) == 4  # 2**64 + 1 is 1


def test_kept_memory_is_within_the_papers_table() -> None:
    rows = 10_000_000
    for row_bytes in (64, 512):
        table = rows * row_bytes
        assert priority.mfu_bytes(rows) <= 0.0625 * table * 64 / row_bytes
        assert priority.ssu_bytes(rows) <= 0.0078 * table * 64 / row_bytes
        assert priority.scar_bytes(rows, row_bytes) == table
    words, state = bitmap.new(rows), priority.new_state(SEED)
    assert words.nbytes + state.nbytes == priority.ssu_bytes(rows)
    assert np.zeros(rows, np.uint32).nbytes == priority.mfu_bytes(rows)
