"""Rows whose places repeat are copied as parity knows them, and combined as they are told to be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.kernels.servers import galois, slab


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 1 << 20), st.booleans())
def test_copied_rows_are_those_at_their_ranks(
    every: int, first: int, seed: int, is_waiting: bool
) -> None:
    rng = np.random.default_rng(seed)
    at_U = np.flatnonzero(rng.random(every) < 0.7)
    if len(at_U) == 0:
        at_U = np.array([every - 1])
    records_MW = rng.standard_normal((100, 5)).astype(np.float32)
    slots_N = np.array([slot for slot in range(100) if slot % every in at_U])[first:]
    expected_NW = records_MW[slots_N]
    out_NW = np.empty_like(expected_NW)
    if is_waiting:
        waiting_at_M = np.full(100, -1, np.int32)
        before_CW = rng.standard_normal((30, 5)).astype(np.float32)
        waiting_at_M[rng.choice(100, 30, replace=False)] = np.arange(30)
        is_waiting_N = waiting_at_M[slots_N] >= 0
        expected_NW[is_waiting_N] = before_CW[waiting_at_M[slots_N[is_waiting_N]]]
        slab.copy_known(records_MW, waiting_at_M, before_CW, first, every, at_U, out_NW)
    else:
        slab.copy(records_MW, first, every, at_U, out_NW)
    np.testing.assert_array_equal(out_NW, expected_NW)


@pytest.mark.parametrize(
    ("first", "every", "at", "rows"),
    [(0, 3, [0, 2], 8), (-1, 3, [0, 2], 1), (0, 3, [2, 0], 2), (0, 3, [0, 3], 2), (0, 3, [], 1),
     (8, 1, [0], 3), (-1, 1, [0], 2)],
)  # fmt: skip
def test_rows_that_are_not_there_are_refused(
    first: int, every: int, at: list[int], rows: int
) -> None:
    out_NW = np.zeros((rows, 2), np.float32)
    with pytest.raises((ValueError, IndexError)):
        slab.copy(np.ones((10, 2), np.float32), first, every, np.array(at, np.int64), out_NW)
    assert not out_NW.any()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 30), st.integers(0, 1 << 20))
def test_combined_rows_are_sums_of_products(
    period: int, members: int, first: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    parts, rows, width = 4, 12, 7
    sizes_S = rng.integers(1, 4, parts)
    parts_TK = rng.integers(0, parts, (period, members))
    at_TK = rng.integers(0, sizes_S[parts_TK])
    factors_TK = rng.choice(np.array([1, 1, 2, 77, 255], np.uint8), (period, members))
    starts_S = rng.integers(0, 20, parts)
    given = [rng.integers(0, 1 << 32, (9, width), dtype=np.uint32) for _ in range(parts)]
    expected_NW = np.zeros((rows, width), np.uint32)
    for i in range(rows):
        periods, t = divmod(first + i, period)
        for k in range(members):
            part = parts_TK[t, k]
            rank = periods * sizes_S[part] + at_TK[t, k] - starts_S[part]
            if 0 <= rank < 9:
                factor = factors_TK[t : t + 1, k]
                galois.fold(expected_NW, np.array([i]), given[part][rank : rank + 1], factor)
    out_NW = np.full((rows, width), 0x7FC00000, np.uint32)
    ranks = list(zip(starts_S.tolist(), sizes_S.tolist(), strict=True))
    slab.combine(out_NW, first, parts_TK, at_TK, factors_TK, given, ranks)
    np.testing.assert_array_equal(out_NW, expected_NW)


def test_parts_that_were_not_given_are_refused() -> None:
    out_NW = np.zeros((1, 2), np.float32)
    one_TK, zero_TK = np.ones((1, 1), np.int64), np.zeros((1, 1), np.int64)
    factors_TK = np.ones((1, 1), np.uint8)
    part_NW = np.ones((3, 2), np.float32)
    with pytest.raises(IndexError, match="not given"):
        slab.combine(out_NW, 0, one_TK, zero_TK, factors_TK, [part_NW], [(0, 1)])
    with pytest.raises(ValueError, match="shape"):
        slab.combine(out_NW, 0, zero_TK, zero_TK, factors_TK, [part_NW[:, :1]], [(0, 1)])
    with pytest.raises(ValueError, match="shape"):
        slab.combine(out_NW, 0, zero_TK, zero_TK, factors_TK, [part_NW], [])
    assert not out_NW.any()
