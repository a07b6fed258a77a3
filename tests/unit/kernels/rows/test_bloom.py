"""Bloom filters: no id is ever missed, few are found by mistake, any words are read in bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from holdfast.kernels.rows import bloom

SEED = 20240611
ID_END = 1 << 56
ids_lists = st.lists(
    st.one_of(st.integers(0, 300), st.integers(0, ID_END - 1)), min_size=0, max_size=400
)


def hits_of(words: np.ndarray, ids: np.ndarray) -> int:
    return int(bloom.has(words, ids).sum())


def built(ids: np.ndarray, words: int | None = None) -> np.ndarray:
    found = np.zeros(words or bloom.words_for(len(ids)), np.uint32)
    bloom.build(ids, found)
    return found


def bits_by_the_book(x: int, blocks: int) -> set[int]:
    """The bits of an id, in plain integers, from the docstring alone."""
    wrap = (1 << 64) - 1
    h = (x + 0x9E3779B97F4A7C15) & wrap
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & wrap
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & wrap
    h ^= h >> 31
    block = ((h >> 32) * blocks) >> 32
    salts = (0x47B6137B, 0x44974D91, 0x8824AD5B, 0xA2B7289D)
    salts += (0x705495C7, 0x2DF1424B, 0x9EFC4947, 0x5C6BFB31)
    key = h & 0xFFFFFFFF
    return {
        (block * 8 + j) * 32 + ((key * salt & 0xFFFFFFFF) >> 27) for j, salt in enumerate(salts)
    }


def set_bits(words: np.ndarray) -> set[int]:
    bits = np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


@given(ids_lists, st.integers(1, 40))
@settings(deadline=None, derandomize=True)
def test_an_id_that_was_built_in_is_never_missed(ids: list[int], blocks: int) -> None:
    ids_N = np.array(ids, np.int64)
    for words in (built(ids_N), built(ids_N, 8 * blocks)):
        assert bloom.has(words, ids_N).all()
        assert hits_of(words, ids_N) == len(ids)


@given(ids_lists, st.integers(1, 40))
@settings(deadline=None, derandomize=True)
def test_the_bits_are_those_of_the_documented_hash(ids: list[int], blocks: int) -> None:
    words = built(np.array(ids, np.int64), 8 * blocks)
    assert set_bits(words) == set().union(*(bits_by_the_book(x, blocks) for x in ids))


def test_the_words_of_known_ids_never_change() -> None:
    words = built(np.array([0, 1, 2, 41, 10**6, ID_END - 1]), 16)
    assert words.astype("<u4").tobytes().hex() == (
        "1800000000020040000010084004000000040800800400002000400000100400"
        "10880004001211000400004a00000c2408008021300400800810200020003000"
    )


@pytest.mark.parametrize("count", [24, 48, 1000, 24_000, 300_000])
@pytest.mark.parametrize("is_dense", [True, False])
def test_false_positives_stay_near_one_in_a_hundred(count: int, is_dense: bool) -> None:
    rng = np.random.default_rng(SEED)
    ids = np.arange(count) if is_dense else rng.integers(0, ID_END // 2, count)
    words = built(ids)
    assert words.nbytes * 8 <= 11 * count
    others = np.arange(count, count + 200_000) if is_dense else None
    if others is None:
        others = rng.integers(ID_END // 2, ID_END, 200_000)
    hits = hits_of(words, others)
    assert hits <= 0.015 * others.size, SEED
    assert bloom.has(words, others).sum() == hits


def test_an_empty_filter_holds_nothing_and_a_full_one_everything() -> None:
    ids = np.arange(1000)
    empty = np.zeros(bloom.words_for(0), np.uint32)
    assert not bloom.has(empty, ids).any()
    assert hits_of(np.full(24, 0xFFFFFFFF, np.uint32), ids) == 1000
    assert bloom.has(empty, ids[:0]).shape == (0,)
    assert hits_of(empty, ids[:0]) == 0


@given(
    hnp.arrays(np.uint32, st.integers(1, 9).map(lambda blocks: 8 * blocks)),
    hnp.arrays(np.int64, st.integers(0, 200)),
)
@settings(deadline=None, derandomize=True)
def test_any_words_answer_from_their_own_bits_for_any_id(
    words: np.ndarray, ids: np.ndarray
) -> None:
    """Words around the filter are all ones, then all zeros: an answer must not notice."""
    blocks = words.size // 8
    held = set_bits(words)
    expected = [bits_by_the_book(x % (1 << 64), blocks) <= held for x in ids.tolist()]
    for around in (0xFFFFFFFF, 0):
        memory = np.full(words.size + 64, around, np.uint32)
        memory[32:-32] = words
        assert bloom.has(memory[32:-32], ids).tolist() == expected
        assert hits_of(memory[32:-32], ids) == sum(expected)


@given(hnp.arrays(np.int64, st.integers(0, 300)), st.integers(1, 9))
@settings(deadline=None, derandomize=True)
def test_building_any_ids_stays_inside_the_words(ids: np.ndarray, blocks: int) -> None:
    memory = np.zeros(8 * blocks + 64, np.uint32)
    bloom.build(ids, memory[32:-32])
    assert not memory[:32].any() and not memory[-32:].any()
    assert bloom.has(memory[32:-32], ids).all()


def test_stored_words_are_read_from_any_address() -> None:
    ids = np.arange(0, 3000, 7)
    data = built(ids).tobytes()
    for shift in (0, 1, 2):
        words = np.frombuffer(memoryview(b"x" * shift + data)[shift:], "<u4")
        assert bloom.has(words, ids).all()
        assert hits_of(words, ids.astype(np.int32)) == ids.size


def test_building_in_parts_is_building_at_once() -> None:
    ids = np.random.default_rng(SEED).integers(0, ID_END, 500)
    words = np.zeros(bloom.words_for(500), np.uint32)
    for part in np.array_split(ids, 7):
        bloom.build(part, words)
    np.testing.assert_array_equal(words, built(ids))


@pytest.mark.parametrize(
    "words", [np.zeros(0, np.uint32), np.zeros(12, np.uint32), np.zeros(8, np.uint64)]
)
def test_words_that_are_no_filter_are_the_callers_bug(words: np.ndarray) -> None:
    for call in (
        lambda: bloom.has(words, np.arange(3)),
        lambda: bloom.build(np.arange(3), words),
    ):
        with pytest.raises(AssertionError):
            call()
