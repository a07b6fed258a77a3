"""Sets of rows, checked against plain Python sets."""

from __future__ import annotations

from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.kernels.rows import bitmap

ROWS = (0, 1, 63, 64, 65, 127, 128, 1000)


def marked(rows: int, ids: list[int]) -> np.ndarray:
    words = bitmap.new(rows)
    bitmap.mark(words, np.array(ids, np.int64), rows)
    return words


def members(words: np.ndarray) -> list[int]:
    """The set bits, read without the kernels."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


row_sets = st.integers(1, 700).flatmap(
    lambda rows: st.tuples(st.just(rows), st.lists(st.integers(0, rows - 1), max_size=200))
)


@given(row_sets)
@settings(deadline=None, derandomize=True)
def test_marked_rows_are_exactly_the_rows_of_the_set(case: tuple[int, list[int]]) -> None:
    rows, ids = case
    words = marked(rows, ids)
    assert members(words) == sorted(set(ids))
    assert bitmap.ids(words, 0, rows).tolist() == sorted(set(ids))
    assert bitmap.count(words) == len(set(ids))
    assert bitmap.is_set(words, np.arange(rows)).tolist() == [i in set(ids) for i in range(rows)]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ids_outside_the_rows_are_ignored(dtype: type) -> None:
    ends = np.iinfo(dtype)
    words = bitmap.new(130)
    guard = words.copy()
    bitmap.mark(words, np.array([-1, 100, 101, 129, ends.min, ends.max, -100], dtype), 100)
    assert np.array_equal(words, guard)
    bitmap.mark(words, np.array([-64, 99, 5], dtype), 100)
    assert members(words) == [5, 99]


def test_more_rows_than_words_marks_nothing_past_the_words() -> None:
    backing = np.zeros(8, np.uint64)
    bitmap.mark(backing[2:4], np.arange(-300, 600), 10**9)
    assert members(backing) == list(range(128, 256))


@pytest.mark.parametrize("rows", ROWS)
def test_a_full_set_has_every_row_and_no_stray_bit(rows: int) -> None:
    words = marked(rows, list(range(rows)))
    assert members(words) == list(range(rows))
    assert bitmap.count(words) == rows
    assert bitmap.ids(words, 0, rows).tolist() == list(range(rows))


@given(st.integers(-10, 310), st.integers(-10, 310), row_sets)
@settings(deadline=None, derandomize=True)
def test_a_range_reads_only_its_rows(lo: int, hi: int, case: tuple[int, list[int]]) -> None:
    rows, ids = case
    words = marked(rows, ids)
    inside = [i for i in sorted(set(ids)) if lo <= i < hi]
    assert bitmap.ids(words, lo, hi).tolist() == inside
    assert bitmap.count_range(words, lo, hi) == len(inside)


@given(row_sets, st.integers(1, 90))
@settings(deadline=None, derandomize=True)
def test_split_covers_the_set_in_parts_of_the_asked_size(
    case: tuple[int, list[int]], rows_max: int
) -> None:
    rows, ids = case
    words = marked(rows, ids)
    bounds = bitmap.split(words, rows_max).tolist()
    parts = [bitmap.ids(words, lo, hi).tolist() for lo, hi in pairwise(bounds)]
    assert list(chain(*parts)) == sorted(set(ids))
    assert all(len(part) == rows_max for part in parts[:-1])
    assert all(0 < len(part) <= rows_max for part in parts)
    assert bounds[0] == 0 and (not parts or bounds[-1] >= rows)


def test_split_of_a_full_set_cuts_inside_words() -> None:
    words = marked(200, list(range(200)))
    assert bitmap.split(words, 7).tolist()[:4] == [0, 7, 14, 21]
    assert bitmap.split(bitmap.new(200), 7).tolist() == [0]
    with pytest.raises(ValueError, match="at least one"):
        bitmap.split(words, 0)


def test_a_union_has_the_rows_of_both_sets() -> None:
    rng = np.random.default_rng(5)
    left, right = rng.integers(0, 500, 200), rng.integers(0, 500, 200)
    a, b = marked(500, left.tolist()), marked(500, right.tolist())
    bitmap.union_into(a, b)
    assert members(a) == sorted(set(left.tolist()) | set(right.tolist()))
    assert members(b) == sorted(set(right.tolist()))
    with pytest.raises(ValueError, match="different numbers"):
        bitmap.union_into(a, bitmap.new(10))


def test_is_set_of_an_id_past_the_words_is_false() -> None:
    words = marked(64, list(range(64)))
    asked = np.array([-1, 0, 63, 64, 2**62, -(2**63)])
    assert bitmap.is_set(words, asked).tolist() == [False, True, True, False, False, False]


def test_many_sets_are_marked_as_each_alone() -> None:
    rng = np.random.default_rng(3)
    rows = [1, 64, 65, 1000, 3]
    marked = [np.array([0, -1, 5, 2**40]), *(rng.integers(-5, n + 5, 50) for n in rows[1:4])]
    marked.append(np.empty(0, np.int64))
    alone, together = ([bitmap.new(n) for n in rows] for _ in range(2))
    for words_W, ids_N, n in zip(alone, marked, rows, strict=True):
        bitmap.mark(words_W, ids_N, n)
    bitmap.mark_sets(
        np.array([words_W.ctypes.data for words_W in together]),
        np.array(rows),
        np.array([ids_N.ctypes.data for ids_N in marked]),
        np.array([ids_N.size for ids_N in marked]),
    )
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)
