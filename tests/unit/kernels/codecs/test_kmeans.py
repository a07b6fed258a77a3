"""Codebooks: learned in order, without chance, and never outside the values."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.kernels.codecs import kmeans
from holdfast.kernels.codecs.packing import packed_width

SEED = 20240608


def learn(values: np.ndarray, entries: int, iterations: int = 15) -> np.ndarray:
    book = np.empty(entries, np.uint16)
    kmeans.learn_book(values.astype(np.float32), iterations, np.empty(entries), book)
    return book.view(np.float16).astype(np.float64)


def loss(values: np.ndarray, book: np.ndarray) -> float:
    return float(np.square(np.abs(values[:, None] - book).min(axis=1)).sum())


def test_a_codebook_is_sorted_and_within_its_values() -> None:
    rng = np.random.default_rng(SEED)
    for entries in (4, 8, 16, 256):
        values = rng.standard_t(3, 300)
        book = learn(values, entries)
        assert (np.diff(book) >= 0).all()
        assert book[0] >= values.min() - 2.0**-9 * abs(values.min())
        assert book[-1] <= values.max() + 2.0**-9 * abs(values.max())


def test_as_few_values_as_entries_are_kept() -> None:
    values = np.array([0.5, -2.0, 7.25, 0.0])
    np.testing.assert_array_equal(learn(values, 4), np.sort(values))
    np.testing.assert_array_equal(np.unique(learn(values, 16)), np.sort(values))


def test_separate_groups_are_found() -> None:
    rng = np.random.default_rng(SEED)
    centers = np.array([-3.0, -1.0, 0.25, 4.0])
    values = (centers[:, None] + rng.uniform(-0.05, 0.05, (4, 40))).reshape(-1)
    np.testing.assert_allclose(learn(values, 4), centers, atol=0.03)


@pytest.mark.parametrize("entries", [4, 8, 16])
def test_iterations_lower_the_loss_below_even_steps(entries: int) -> None:
    rng = np.random.default_rng(SEED)
    for _ in range(30):
        values = rng.standard_normal(64).astype(np.float32).astype(np.float64)
        even = np.linspace(values.min(), values.max(), entries)
        assert loss(values, learn(values, entries)) < loss(values, even), SEED


def test_codes_are_the_nearest_entries_of_the_stored_codebook() -> None:
    rng = np.random.default_rng(SEED)
    rows = rng.standard_normal((40, 21)).astype(np.float32)
    blocks = np.arange(40) // 10
    books = np.sort(rng.standard_normal((4, 8)).astype(np.float16), axis=1).view(np.uint16)
    codes = np.empty((40, packed_width(21, 3)), np.uint8)
    kmeans.encode_books(rows, 3, books, blocks, codes)
    found = np.empty_like(rows)
    kmeans.decode_books(codes, 3, books, blocks, found, np.arange(40))
    entries = books.view(np.float16).astype(np.float64)[blocks]
    nearest = np.abs(rows[:, :, None] - entries[:, None, :]).min(axis=2)
    np.testing.assert_allclose(np.abs(rows - found.astype(np.float64)), nearest, atol=1e-6)


def test_rows_that_belong_together_share_a_block() -> None:
    rng = np.random.default_rng(SEED)
    kinds = rng.integers(0, 3, 90)
    centers = rng.standard_normal((3, 12)) * np.array([[1], [5], [25]])
    rows = (centers[kinds] + rng.standard_normal((90, 12)) * 0.05).astype(np.float32)
    block = kmeans.cluster_rows(rows, np.zeros(90, np.uint8), clusters=3, iterations=6)
    assert {len(set(block[kinds == kind])) for kind in range(3)} == {1}
    assert len(set(block)) == 3


def test_bad_rows_do_not_move_the_clusters() -> None:
    rng = np.random.default_rng(SEED)
    rows = rng.standard_normal((64, 5)).astype(np.float32)
    bad = np.zeros(64, np.uint8)
    bad[[3, 40]] = 1
    spoiled = rows.copy()
    spoiled[[3, 40]] = np.nan
    before = kmeans.cluster_rows(rows, bad, clusters=4, iterations=6)
    after = kmeans.cluster_rows(spoiled, bad, clusters=4, iterations=6)
    np.testing.assert_array_equal(before, after)
    all_bad = kmeans.cluster_rows(spoiled, np.ones(64, np.uint8), clusters=4, iterations=6)
    assert not all_bad.any()


def test_bad_rows_are_those_that_fp16_cannot_describe() -> None:
    rows = np.array([[1, 2], [np.nan, 1], [np.inf, 0], [70000, 1], [1e-6, 0], [0, 0]], np.float32)
    bad = np.empty(6, np.uint8)
    kmeans.mark_bad(rows, bad)
    assert bad.tolist() == [0, 1, 1, 1, 1, 0]


def test_a_negative_id_skips_its_row_and_the_codebook_of_the_next_is_still_found() -> None:
    rng = np.random.default_rng(SEED)
    books = np.sort(rng.standard_normal((300, 4)).astype(np.float16), axis=1).view(np.uint16)
    blocks = rng.integers(0, 300, 1000)
    codes = rng.integers(0, 256, (1000, packed_width(12, 2)), dtype=np.uint8)
    whole = np.empty((1000, 12), np.float32)
    kmeans.decode_books(codes, 2, books, blocks, whole, np.arange(1000))
    ids = np.where(rng.random(1000) < 0.4, -1, np.arange(1000))
    found = np.full((1000, 12), 42, np.float32)
    kmeans.decode_books(codes, 2, books, blocks, found, ids)
    np.testing.assert_array_equal(found[ids >= 0], whole[ids >= 0])
    assert (found[ids < 0] == 42).all()
