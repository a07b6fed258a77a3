"""Lying id bytes: decoding raises CorruptDataError or returns ids that match the header."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.format.ids import IdEncoding, decode_ids, encode_ids
from holdfast.errors import CorruptDataError


def assert_refused_or_valid(encoding: int, data: bytes, count: int, first: int, last: int) -> bool:
    """Whether the ids were accepted; accepted ids must be what the header says."""
    try:
        ids = decode_ids(encoding, data, count=count, first=first, last=last)
    except CorruptDataError:
        return False
    assert ids.size == count
    assert np.all(np.diff(ids) > 0)
    if count:
        assert (ids[0], ids[-1]) == (first, last)
    return True


@given(
    st.integers(-1, 4),
    st.binary(max_size=300),
    st.integers(-2, 600),
    st.one_of(st.integers(-3, 3000), st.integers(-(2**63), 2**63)),
    st.integers(-3, 3000),
)
@settings(max_examples=500, deadline=None, derandomize=True)
def test_random_bytes_are_refused_or_give_valid_ids(
    encoding: int, data: bytes, count: int, first: int, span: int
) -> None:
    assert_refused_or_valid(encoding, data, count, first, first + span)


@given(st.integers(0, 2**20), st.integers(1, 60), st.integers(1, 2**32 - 1))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_random_block_widths_are_refused_or_give_valid_ids(
    first: int, width: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    data = bytes([width]) + rng.bytes(-(-128 * width // 8))
    assert_refused_or_valid(IdEncoding.DELTA, data, 129, first, 2**55)
    assert_refused_or_valid(IdEncoding.DELTA, data, 129, first, 2**56 - 1)


def corpus() -> list[np.ndarray]:
    rng = np.random.default_rng(9)
    return [np.flatnonzero(rng.random(3000) < density) + 5 for density in (0.01, 0.1, 0.5)] + [
        np.arange(50, 90)
    ]


@pytest.mark.parametrize("ids", corpus(), ids=lambda ids: f"{ids.size}ids")
def test_every_truncation_and_extension_is_refused(ids: np.ndarray) -> None:
    encoding, data = encode_ids(ids)
    header = (ids.size, int(ids[0]), int(ids[-1]))
    whole = data.tobytes()
    assert assert_refused_or_valid(encoding, whole, *header)
    for end in range(len(whole)):
        assert not assert_refused_or_valid(encoding, whole[:end], *header)
    for extra in (b"\0", b"\xff", b"\0" * 9):
        assert not assert_refused_or_valid(encoding, whole + extra, *header)


@pytest.mark.parametrize("ids", corpus(), ids=lambda ids: f"{ids.size}ids")
def test_every_flipped_bit_is_refused_or_gives_valid_ids(ids: np.ndarray) -> None:
    encoding, data = encode_ids(ids)
    for bit in range(data.size * 8):
        damaged = data.copy()
        damaged[bit // 8] ^= np.uint8(1 << bit % 8)
        assert_refused_or_valid(encoding, damaged.tobytes(), ids.size, int(ids[0]), int(ids[-1]))


@pytest.mark.parametrize("ids", corpus(), ids=lambda ids: f"{ids.size}ids")
def test_a_header_that_disagrees_is_refused(ids: np.ndarray) -> None:
    encoding, data = encode_ids(ids)
    count, first, last = ids.size, int(ids[0]), int(ids[-1])
    for lie in (
        (count + 1, first, last),
        (count - 1, first, last),
        (count, first + 1, last),
        (count, first - 1, last),
        (count, first, last + 1),
        (count, first, last - 1),
        (0, first, last),
        (-1, first, last),
        (count, last, first),
    ):
        assert not assert_refused_or_valid(encoding, data.tobytes(), *lie)


def test_stray_bits_past_the_last_id_are_refused() -> None:
    assert assert_refused_or_valid(IdEncoding.BITMAP, b"\x0b", 3, 0, 3)
    assert not assert_refused_or_valid(IdEncoding.BITMAP, b"\x1b", 4, 0, 3)
    assert assert_refused_or_valid(IdEncoding.DELTA, bytes([3, 0b101]), 2, 0, 6)
    assert not assert_refused_or_valid(IdEncoding.DELTA, bytes([3, 0b1101]), 2, 0, 6)


def packed(gaps: list[int], width: int) -> bytes:
    """Blocks of gaps at one width, packed without the kernels."""
    out = b""
    for start in range(0, len(gaps), 128):
        block = gaps[start : start + 128]
        number = sum((gap - 1) << (width * at) for at, gap in enumerate(block))
        out += bytes([width]) + number.to_bytes(-(-width * len(block) // 8), "little")
    return out


@pytest.mark.parametrize("width", [*range(57, 65), 128, 255])
def test_a_block_wider_than_any_gap_is_refused(width: int) -> None:
    assert assert_refused_or_valid(IdEncoding.DELTA, packed([6, 9], 56), 3, 1, 16)
    assert not assert_refused_or_valid(IdEncoding.DELTA, packed([6, 9], width), 3, 1, 16)


def test_gaps_that_wrap_around_to_the_last_id_are_refused() -> None:
    gaps = [2**56] * 256 + [300]
    assert sum(gaps) % 2**64 == 300
    assert not assert_refused_or_valid(IdEncoding.DELTA, packed(gaps, 56), 258, 0, 300)


def test_a_huge_count_over_few_bytes_is_refused_before_memory_is_taken() -> None:
    # 256 MB of headroom: the 16 GB that the count promises could not be allocated.
    program = """
import resource, numpy as np
from holdfast.checkpoint.format.ids import IdEncoding, decode_ids, encode_ids
from holdfast.errors import CorruptDataError
for density in (0.01, 0.5):
    ids = np.flatnonzero(np.random.default_rng(1).random(4000) < density)
    code, data = encode_ids(ids)
    decode_ids(code, data.tobytes(), count=ids.size, first=int(ids[0]), last=int(ids[-1]))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
for encoding in (IdEncoding.BITMAP, IdEncoding.DELTA):
    for data in (b"", b"\\x01", bytes(1000), b"\\xff" * 1000):
        for last in (2**31 - 1, 2**55):
            try:
                decode_ids(encoding, data, count=2**31, first=0, last=last)
            except CorruptDataError:
                continue
            raise SystemExit("accepted")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
