"""Arithmetic in GF(2^8), against multiplication of polynomials bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.kernels.servers import galois


def slow_product(a: int, b: int) -> int:
    """Shift and add, then the remainder modulo 0x11d."""
    product = 0
    for bit in range(8):
        if b >> bit & 1:
            product ^= a << bit
    for bit in range(15, 7, -1):
        if product >> bit & 1:
            product ^= 0x11D << (bit - 8)
    return product


SLOW = np.array([[slow_product(a, b) for b in range(256)] for a in range(256)], np.uint8)


def noise(*shape: int, seed: int = 1) -> np.ndarray:
    """Rows of arbitrary bits: NaN payloads and denormals included."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2**32, shape, np.uint32).view(np.float32)


def slow_times(rows: np.ndarray, coefficient: int) -> np.ndarray:
    """Byte by byte, through the table of products."""
    products = SLOW[coefficient][np.ascontiguousarray(rows).view(np.uint8)]
    return products.view(np.uint32)


def test_every_product_and_every_quotient_of_two_bytes() -> None:
    everything = np.arange(256)
    assert np.array_equal(galois.multiply(everything[:, None], everything[None, :]), SLOW)
    nonzero = everything[1:]
    quotients = galois.divide(SLOW[:, 1:], nonzero)
    assert np.array_equal(quotients, np.repeat(everything[:, None], 255, axis=1))
    with pytest.raises(ZeroDivisionError):
        galois.divide(3, [1, 0])


@pytest.mark.parametrize("width", [1, 3, 8, 17, 64])
def test_fold_adds_every_coefficient_times_a_difference(width: int) -> None:
    parities, diffs = noise(300, width), noise(256, width, seed=2)
    slots = np.random.default_rng(3).permutation(300)[:256]
    expected = parities.view(np.uint32).copy()
    for c, slot in enumerate(slots):
        expected[slot] ^= slow_times(diffs[c : c + 1], c)[0]
    galois.fold(parities, slots, diffs, np.arange(256).astype(np.uint8))
    assert np.array_equal(parities.view(np.uint32), expected)


def test_differences_of_one_parity_row_all_arrive() -> None:
    parities, diffs = noise(4, 6), noise(50, 6, seed=2)
    rng = np.random.default_rng(3)
    slots, coefficients = rng.integers(0, 4, 50), rng.integers(0, 256, 50).astype(np.uint8)
    expected = parities.view(np.uint32).copy()
    for i in range(50):
        expected[slots[i]] ^= slow_times(diffs[i : i + 1], coefficients[i])[0]
    # As they come in a message: narrow slots, words instead of floats, memory that is not ours.
    sent = np.frombuffer(diffs.tobytes(), np.uint32).reshape(50, 6)
    galois.fold(parities, slots.astype(np.int32), sent, coefficients)
    assert np.array_equal(parities.view(np.uint32), expected)


@pytest.mark.parametrize("rows", [0, 1, 700])
@pytest.mark.parametrize("kept", ["list", "one array", "words"])
def test_combine_is_the_sum_of_coefficients_times_sources(rows: int, kept: str) -> None:
    """700 rows of 7 words are several tiles and a bit."""
    stacked = noise(5, rows, 7)
    coefficients = [1, 0, 255, 1, 2]
    expected = np.zeros((rows, 7), np.uint32)
    for source, c in zip(stacked, coefficients, strict=True):
        expected ^= slow_times(source, c)
    sources = {"list": list(stacked), "one array": stacked, "words": stacked.view(np.uint32)}[kept]
    assert np.array_equal(galois.combine(sources, coefficients), expected)
    out = noise(rows, 7, seed=9)
    galois.combine(sources, coefficients, out)
    assert np.array_equal(out.view(np.uint32), expected)


def test_combine_takes_sources_that_lie_apart_in_memory() -> None:
    wide = noise(10, 24)
    parts = [wide[:, :8], wide[::-1, 8:16], np.asfortranarray(wide[:, 16:])]
    expected = np.zeros((10, 8), np.uint32)
    for part in parts:
        expected ^= np.ascontiguousarray(part).view(np.uint32)
    assert np.array_equal(galois.combine(parts, [1, 1, 1]), expected)


def test_sums_of_numbers_add_up_in_order() -> None:
    sums = np.zeros((2, 3), np.float32)
    rows = np.array([[1e8] * 3, [1.0] * 3, [-1e8] * 3, [5.0] * 3], np.float32)
    galois.add(sums, np.array([1, 1, 1, 0]), rows)
    assert sums.tolist() == [[5.0] * 3, [0.0] * 3]  # 1e8 + 1 is 1e8 in float32


@pytest.mark.parametrize("size", [1, 2, 5, 20])
def test_a_matrix_times_its_inverse_is_one(size: int) -> None:
    rng = np.random.default_rng(size)
    found = 0
    while found < 20:
        matrix = rng.integers(0, 256, (size, size)).astype(np.uint8)
        try:
            inverse = galois.invert(matrix)
        except ValueError:
            continue
        found += 1
        assert np.array_equal(galois.multiply(inverse, matrix), np.eye(size))
        assert np.array_equal(galois.multiply(matrix, inverse), np.eye(size))


def test_pivots_are_looked_for_below() -> None:
    swap = np.array([[0, 0, 1], [1, 0, 0], [0, 1, 0]], np.uint8)
    assert np.array_equal(galois.invert(swap), swap.T)


@pytest.mark.parametrize("matrix", [[[0]], [[1, 2], [1, 2]], [[1, 2], [2, 4]], [[1, 2, 3]]])
def test_a_matrix_without_inverse_is_refused(matrix: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="inverse"):
        galois.invert(matrix)


@pytest.mark.parametrize("bad", [-1, 10, 2**40])
def test_a_slot_outside_the_parity_rows_is_refused_before_anything_changes(bad: int) -> None:
    parities, slots = noise(10, 4), np.array([1, bad])
    with pytest.raises(IndexError, match="outside"):
        galois.fold(parities, slots, noise(2, 4), np.ones(2, np.uint8))
    with pytest.raises(IndexError, match="outside"):
        galois.add(parities, slots, noise(2, 4))
    assert np.array_equal(parities.view(np.uint32), noise(10, 4).view(np.uint32))


def test_arrays_that_do_not_belong_together_are_refused() -> None:
    parities, slots, ones = noise(10, 4), np.array([1, 2]), np.ones(2, np.uint8)
    for diffs, coefficients in (
        (noise(3, 4), ones),
        (noise(2, 5), ones),
        (noise(2, 4), np.ones(3, np.uint8)),
    ):
        with pytest.raises(ValueError, match="belong together"):
            galois.fold(parities, slots, diffs, coefficients)
    with pytest.raises(ValueError, match="belong together"):
        galois.add(parities, slots, noise(2, 5))
    rows = noise(3, 4)
    for sources, coefficients_K, out, match in (
        ([], [], None, "one coefficient"),
        ([rows], [1, 1], None, "one coefficient"),
        ([rows, rows[:2]], [1, 1], None, "same shape"),
        ([rows], [1], noise(2, 4), "same shape"),
        ([rows], [1], noise(3, 8)[:, :4], "one piece"),
        ([rows], [1], rows, "shares memory"),
    ):
        with pytest.raises(ValueError, match=match):
            galois.combine(sources, coefficients_K, out)
    assert np.array_equal(parities.view(np.uint32), noise(10, 4).view(np.uint32))
