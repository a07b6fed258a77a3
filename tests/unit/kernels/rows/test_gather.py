"""Gather and hash rows, checked against NumPy indexing and bit by bit."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from holdfast.kernels.rows import gather

WIDTHS = (1, 2, 3, 7, 8, 15, 16, 17, 64, 65, 128)


def table(count: int, width: int, *, seed: int = 1) -> np.ndarray:
    """Rows of arbitrary bits: NaN payloads and denormals included."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2**32, (count, width), np.uint32).view(np.float32)


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint32)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [0, 1, 5, 16, 17, 300])
def test_gather_copies_the_bits_of_each_row(width: int, count: int) -> None:
    src = table(200, width)
    ids = np.random.default_rng(2).integers(0, 200, count)
    out = np.zeros((count, width), np.float32)
    gather.gather(src, ids, out)
    assert np.array_equal(bits(out), bits(src)[ids])


def test_a_column_of_a_wider_array_is_gathered_in_place() -> None:
    wide = table(50, 24)
    ids = np.array([4, 49, 0])
    out = np.zeros((3, 8), np.float32)
    gather.gather(wide[:, 8:16], ids, out)
    assert np.array_equal(bits(out), bits(wide)[ids, 8:16])
    assert np.array_equal(bits(wide), bits(table(50, 24)))


@pytest.mark.parametrize("bad", [-1, 10, 2**40, -(2**63)])
def test_an_id_outside_the_table_is_refused_before_anything_is_copied(bad: int) -> None:
    src, out = table(10, 4), np.zeros((3, 4), np.float32)
    ids = np.array([1, bad, 2])
    assert not gather.check_ids(ids, 10)
    with pytest.raises(IndexError, match="outside"):
        gather.gather(src, ids, out)
    assert not out.any()
    assert np.array_equal(bits(src), bits(table(10, 4)))
    assert gather.check_ids(np.array([0, 9]), 10)


@pytest.mark.parametrize("shape", [(2, 4), (4, 4), (3, 3), (3, 5)])
def test_a_buffer_of_the_wrong_shape_is_refused(shape: tuple[int, int]) -> None:
    src, ids = table(10, 4), np.array([1, 2, 3])
    with pytest.raises(ValueError, match="shape"):
        gather.gather(src, ids, np.zeros(shape, np.float32))


def hashes(*columns: np.ndarray, seed: int = 0) -> np.ndarray:
    acc = np.full(columns[0].shape[0], seed, np.uint64)
    for column in columns:
        gather.hash_rows(column, acc)
    return acc


@pytest.mark.parametrize("width", WIDTHS)
def test_every_flipped_bit_gives_a_hash_of_its_own(width: int) -> None:
    for seed in (1, 2, 3):
        row = bits(table(1, width, seed=seed))
        flipped = np.repeat(row, width * 32 + 1, axis=0)
        for bit in range(width * 32):
            flipped[bit, bit // 32] ^= np.uint32(1 << bit % 32)
        assert np.unique(hashes(flipped.view(np.float32))).size == width * 32 + 1


@pytest.mark.parametrize("width", [1, 2, 16, 64])
def test_equal_rows_have_equal_hashes_and_zeros_have_signs(width: int) -> None:
    src = np.repeat(table(1, width), 50, axis=0)
    assert np.unique(hashes(src)).size == 1
    zeros = np.zeros((2, width), np.float32)
    zeros[1, -1] = -0.0
    assert np.unique(hashes(zeros)).size == 2


@pytest.mark.parametrize("width", [8, 16, 64])
def test_few_changed_signs_never_cancel(width: int) -> None:
    places = [c for n in (0, 1, 2, 3, 4) for c in combinations(range(min(width, 16)), n)]
    for value in (0.0, 1.0, -0.3):
        src = np.full((len(places), width), value, np.float32)
        for row, columns in enumerate(places):
            src[row, list(columns)] *= -1
        assert np.unique(hashes(src)).size == len(places)


def test_small_integers_and_sparse_rows_do_not_collide() -> None:
    grid = np.stack(np.meshgrid(*[np.arange(6, dtype=np.float32)] * 6), -1).reshape(-1, 6)
    for padded in (grid, np.pad(grid, ((0, 0), (0, 58))), np.pad(grid, ((0, 0), (5, 0)))):
        assert np.unique(hashes(np.ascontiguousarray(padded))).size == len(grid)


def test_a_fold_depends_on_every_column_their_order_and_the_seed() -> None:
    weights, state = table(100, 16, seed=4), table(100, 16, seed=5)
    folded = hashes(weights, state)
    others = (hashes(weights), hashes(state, weights), hashes(weights, state, seed=1))
    assert all((folded != other).all() for other in others)
    changed = state.copy()
    changed.view(np.uint32)[7, 3] ^= np.uint32(1)
    assert np.flatnonzero(hashes(weights, changed) != folded).tolist() == [7]


def test_each_bit_of_a_hash_is_balanced_for_similar_rows() -> None:
    src = np.zeros((4096, 2), np.float32)
    src[:, 1] = np.arange(4096)
    ones = np.unpackbits(hashes(src).view(np.uint8).reshape(-1, 8), axis=1).sum(axis=0)
    # Six standard deviations of 4096 fair coins.
    assert np.all(np.abs(ones.astype(int) - 2048) < 6 * 32)


def test_there_must_be_one_hash_for_each_row() -> None:
    with pytest.raises(ValueError, match="one hash"):
        gather.hash_rows(table(4, 2), np.zeros(3, np.uint64))
