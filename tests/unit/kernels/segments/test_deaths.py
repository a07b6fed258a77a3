"""Deletion vectors against rows: the same answers as a plain dictionary."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.kernels.segments.deaths import are_vectors, mark_deaths

DELETIONS = st.dictionaries(st.integers(0, 40), st.integers(1, 9))


def arrays(deletions: dict[int, int]) -> tuple[np.ndarray, np.ndarray]:
    rows = sorted(deletions)
    return np.array(rows, np.int64), np.array([deletions[row] for row in rows], np.int64)


@given(ids=st.sets(st.integers(0, 40)), before=DELETIONS, deletions=DELETIONS)
def test_of_two_deaths_the_earlier_one_counts(
    ids: set[int], before: dict[int, int], deletions: dict[int, int]
) -> None:
    ids_N = np.array(sorted(ids), np.int64)
    deaths_N = np.array([before.get(row, -1) for row in sorted(ids)], np.int64)
    new = mark_deaths(ids_N, *arrays(deletions), deaths_N)
    assert new == sum(row in deletions and row not in before for row in ids)
    for row, died in zip(ids_N.tolist(), deaths_N.tolist(), strict=True):
        known = [deaths[row] for deaths in (before, deletions) if row in deaths]
        assert died == min(known, default=-1)


@given(st.lists(st.tuples(st.integers(0, 5), DELETIONS.filter(bool)), max_size=4))
def test_vectors_are_told_from_others(vectors: list[tuple[int, dict[int, int]]]) -> None:
    parts = [arrays(deletions) for _, deletions in vectors]
    ids_K = np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in parts)])
    deaths_K = np.concatenate([np.empty(0, np.int64), *(deaths for _, deaths in parts)])
    counts_V = np.array([len(ids) for ids, _ in parts], np.int64)
    births_V = np.array([born for born, _ in vectors], np.int64)
    are_sound = all(min(deletions.values()) > born for born, deletions in vectors)
    assert are_vectors(ids_K, deaths_K, counts_V, births_V) == are_sound
    if are_sound and len(ids_K):
        ids_K[-1] = -1
        assert not are_vectors(ids_K, deaths_K, counts_V, births_V)


def test_ids_out_of_order_are_no_vector() -> None:
    deaths_K, counts_V, births_V = np.full(2, 9), np.array([2]), np.array([0])
    for ids in ([5, 5], [6, 5]):
        assert not are_vectors(np.array(ids), deaths_K, counts_V, births_V)
    assert are_vectors(np.array([5, 6]), deaths_K, counts_V, births_V)
