"""Versions are compared some rows at a time: with the same result, in little memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from holdfast.checkpoint.format.catalog import SegmentEntry
from holdfast.checkpoint.format.object import Extent
from holdfast.checkpoint.restoring import lifetimes
from holdfast.checkpoint.restoring.lifetimes import (
    _count_broken,
    _count_gone_back,
    _count_twice,
    _parts_of,
    _Versions,
)

NOWHERE = Extent("o", 0, 0, 0)


def versions(ids_N: np.ndarray, born: int, died: int, death: int) -> _Versions:
    entry = SegmentEntry("t", born, died, len(ids_N), int(ids_N[0]), int(ids_N[-1]), NOWHERE)
    return _Versions(entry, ids_N, np.full(len(ids_N), death))


@pytest.mark.parametrize("at_once", [1, 7, 60])
def test_parts_hold_every_version_and_find_what_the_whole_does(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(at_once)
    steps_K = np.arange(0, 12, 2)
    for _ in range(50):
        held = []
        for _ in range(rng.integers(1, 20)):
            ids_N = np.unique(rng.integers(0, rng.integers(1, 200), 80))
            born, died, death = (int(n) for n in rng.integers([0, 5, 5], [9, 15, 15]))
            held.append(versions(ids_N, born, died, death))

        def counted(held: list[_Versions] = held) -> tuple[int, ...]:
            parts = list(_parts_of(held))
            return (
                _count_broken(held, {}, steps_K), _count_gone_back(held, steps_K),
                sum(map(_count_twice, parts)), sum(len(v.ids_N) for part in parts for v in part),
            )  # fmt: skip

        whole = counted()
        with monkeypatch.context() as patched:
            patched.setattr(lifetimes, "_VERSIONS_AT_ONCE", at_once)
            assert counted() == whole
            largest = max(sum(len(v.ids_N) for v in part) for part in _parts_of(held))
            assert largest <= 2 * max(at_once, len(held)) + len(held)


def test_comparing_takes_little_memory_however_many_versions_there_are() -> None:
    held = [versions(np.arange(200_000), born, born + 1, born + 1) for born in range(20)]
    tracemalloc.start()
    try:
        assert _count_broken(held, {}, np.arange(20)) == 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 * sum(len(v.ids_N) for v in held)
