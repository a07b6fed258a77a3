"""Row ids to bytes and back: what was encoded comes back, at the smallest size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.format.ids import IdEncoding, decode_ids, encode_ids
from holdfast.errors import InvalidRequestError
from holdfast.kernels.rows import ids as kernels


def bounds(ids: np.ndarray) -> dict[str, int]:
    if ids.size == 0:
        return {"count": 0, "first": 0, "last": -1}
    return {"count": ids.size, "first": int(ids[0]), "last": int(ids[-1])}


def assert_round_trip(ids: np.ndarray) -> IdEncoding:
    encoding, data = encode_ids(ids)
    assert np.array_equal(decode_ids(encoding, data, **bounds(ids)), ids)
    assert np.array_equal(decode_ids(int(encoding), data.tobytes(), **bounds(ids)), ids)
    return encoding


@given(st.sets(st.integers(0, 2**20), max_size=300), st.integers(0, 2**56 - 2**21))
@settings(deadline=None, derandomize=True)
def test_any_ids_round_trip(ids: set[int], offset: int) -> None:
    assert_round_trip(np.array(sorted(ids), np.int64) + offset)


@given(st.sets(st.integers(0, 2**56 - 1), max_size=300))
@settings(deadline=None, derandomize=True)
def test_ids_with_the_widest_gaps_round_trip(ids: set[int]) -> None:
    assert_round_trip(np.array(sorted(ids), np.int64))


@pytest.mark.parametrize(
    ("density", "expected"),
    [(0.0001, "DELTA"), (0.01, "DELTA"), (0.1, "DELTA"), (0.5, "BITMAP"), (1.0, "RANGE")],
)
def test_every_density_round_trips_in_its_encoding(density: float, expected: str) -> None:
    rng = np.random.default_rng(11)
    ids = np.flatnonzero(rng.random(200_000) < density) + 17
    assert assert_round_trip(ids).name == expected


@pytest.mark.parametrize("count", [2, 3, 128, 129, 130, 257])
def test_block_edges_round_trip(count: int) -> None:
    assert assert_round_trip(np.arange(count) * 1000) == IdEncoding.DELTA


def test_chosen_encoding_is_never_larger_than_the_others() -> None:
    rng = np.random.default_rng(3)
    for density in (0.001, 0.05, 0.15, 0.2, 0.25, 0.3, 0.6, 0.95):
        ids = np.flatnonzero(rng.random(30_000) < density)
        size = encode_ids(ids)[1].size
        assert size <= -(-(int(ids[-1]) - int(ids[0]) + 1) // 8)
        assert size <= kernels.delta_bytes(ids)


def test_packed_gaps_have_the_documented_layout() -> None:
    # Gaps less one: 999 (10 bits), then 4: 999 | 4 << 10, low byte first, after the width byte.
    encoding, data = encode_ids(np.array([7, 1007, 1012]))
    assert encoding == IdEncoding.DELTA
    assert data.tolist() == [10, *(999 | 4 << 10).to_bytes(3, "little")]


def test_contiguous_and_empty_ids_need_no_bytes() -> None:
    for ids in (np.arange(0), np.arange(1), np.arange(1000, 5000)):
        encoding, data = encode_ids(ids)
        assert (encoding, data.size) == (IdEncoding.RANGE, 0)
        assert_round_trip(ids)


@pytest.mark.parametrize("ids", [[3, 2], [2, 2], [-1, 2], [0, 2**56], [[1, 2]]])
def test_ids_that_are_not_ascending_row_ids_are_refused(ids: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match="ascending"):
        encode_ids(np.array(ids))


def test_encoding_into_too_few_bytes_is_refused() -> None:
    ids = np.arange(500) * 77
    short = np.zeros(kernels.delta_bytes(ids) - 1, np.uint8)
    with pytest.raises(ValueError, match="too small"):
        kernels.delta_encode(ids, short)
