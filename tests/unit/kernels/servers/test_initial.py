from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.kernels.servers import initial


def filled(
    ids_N: np.ndarray, *, dim: int = 3, width: int = 5, seed: int = 1, bound: float = 0.5
) -> np.ndarray:
    out_NW = np.full((len(ids_N), width), np.nan, np.float32)
    initial.fill(out_NW, ids_N, dim, seed, bound)
    return out_NW


@settings(deadline=None)
@given(
    rows=st.integers(1, 60),
    seed=st.integers(0, (1 << 62)),
    order=st.integers(0, 1 << 32),
    cuts=st.lists(st.integers(0, 60), max_size=5),
)
def test_a_row_starts_with_the_same_bits_whoever_fills_it(
    rows: int, seed: int, order: int, cuts: list[int]
) -> None:
    whole_NW = filled(np.arange(rows), seed=seed)
    ids_N = np.random.default_rng(order).permutation(rows)
    for part_N in np.split(ids_N, sorted(min(cut, rows) for cut in cuts)):
        found_NW = filled(part_N, seed=seed)
        np.testing.assert_array_equal(found_NW.view(np.uint32), whole_NW[part_N].view(np.uint32))


def test_a_column_does_not_depend_on_how_many_there_are() -> None:
    ids_N = np.arange(20)
    wide_NW = filled(ids_N, dim=8, width=8)
    np.testing.assert_array_equal(filled(ids_N, dim=3, width=3), wide_NW[:, :3])


def test_optimizer_state_starts_at_zero() -> None:
    found_NW = filled(np.arange(50), dim=3, width=7)
    assert (found_NW[:, 3:].view(np.uint32) == 0).all()
    assert (found_NW[:, :3] != 0).all()


@pytest.mark.parametrize("bound", [1e-30, 0.01, 0.5, 1.0, 1e30])
def test_weights_are_uniform_between_the_bounds(bound: float) -> None:
    found = filled(np.arange(20_000), dim=4, width=4, bound=bound)
    high = np.float32(bound)
    assert found.min() >= -high
    assert found.max() < high
    shares = found.astype(np.float64) / float(high)
    assert abs(shares.mean()) < 0.01  # 5 sigma: sqrt(1 / 3 / 80000) * 5
    assert abs(shares.var() - 1 / 3) < 0.01
    counts, _ = np.histogram(shares, bins=16, range=(-1, 1))
    assert np.abs(counts / 5000 - 1).max() < 0.08


def test_columns_rows_and_seeds_are_independent() -> None:
    ids_N = np.arange(4000)
    one_NW, other_NW = filled(ids_N, seed=1), filled(ids_N, seed=2)
    pairs = [
        (one_NW[:, 0], one_NW[:, 1]),
        (one_NW[1:, 0], one_NW[:-1, 0]),
        (one_NW[:, 0], other_NW[:, 0]),
    ]
    for left_N, right_N in pairs:
        assert abs(np.corrcoef(left_N, right_N)[0, 1]) < 0.08  # 5 sigma


def test_without_a_bound_all_weights_are_zero() -> None:
    assert (filled(np.arange(10), bound=0.0)[:, :3] == 0).all()


def test_the_largest_ids_and_no_ids_are_filled() -> None:
    ids_N = np.array([(1 << 40) - 1, (1 << 62)])
    found_NW = filled(ids_N)
    assert np.isfinite(found_NW).all()
    assert not np.array_equal(found_NW[0, :3], found_NW[1, :3])
    assert filled(np.zeros(0, np.int64)).shape == (0, 5)
