"""Headers and deaths as kernels read them: what checkpoint/format/segment.py says of the same
bytes."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.checksum import checksum
from holdfast.checkpoint.format.codec import fit_codec, parse_codec
from holdfast.checkpoint.format.segment import (
    DTYPE_NUMBERS,
    Segment,
    encode_segment,
    header_bytes,
    parse_header,
)
from holdfast.errors import CorruptDataError
from holdfast.kernels.segments import headers
from holdfast.model.dtypes import from_float32
from holdfast.model.schema import FLOAT32
from tests.unit.kernels.codecs.encoded import bytes_of

COLUMNS_MAX = 3


def a_segment(
    *,
    columns: int = 2,
    has_filter: bool = True,
    deaths: list[int] | None = None,
    dtype: str = FLOAT32,
) -> bytes:
    rng = np.random.default_rng(5)
    ids_N = np.array([3, 4, 9, 20, 77], np.int64)
    rows = [rng.random((5, width), dtype=np.float32) for width in (4, 1)[:columns]]
    codecs = [parse_codec("fp32")] * columns
    rows[-1], codecs[-1] = from_float32(rows[-1], dtype), fit_codec(codecs[-1], dtype)
    data = bytes_of(encode_segment(ids_N, rows, codecs, has_filter=has_filter))
    if deaths is None:
        return data
    segment = Segment(memoryview(data), where="here")
    taken = segment.take(np.arange(5), has_filter=has_filter, deaths_K=np.array(deaths))
    return bytes_of(taken)


SEGMENTS = [
    a_segment(),
    a_segment(columns=1, has_filter=False),
    a_segment(deaths=[5, 9, 5, 7, 9]),
    a_segment(has_filter=False, deaths=[6, 6, 6, 6, 6]),
    a_segment(has_filter=False, dtype="float16"),
    a_segment(deaths=[5, 9, 5, 7, 9], dtype="bfloat16"),
    a_segment(columns=1, dtype="float64"),
]


def read(data: bytes, *, before: int = 0) -> tuple[bool, np.ndarray, np.ndarray]:
    buffer_B = np.frombuffer(bytes(before) + data + b"\xff" * 7, np.uint8)
    head_H = np.zeros(headers.HEAD_NUMBERS, np.int64)
    columns_CK = np.zeros((COLUMNS_MAX, headers.COLUMN_NUMBERS), np.int64)
    is_sound = headers.read_head(buffer_B, before, len(data), head_H, columns_CK)
    return is_sound, head_H, columns_CK


@pytest.mark.parametrize("data", SEGMENTS)
@pytest.mark.parametrize("before", [0, 8, 40])
def test_kernel_and_parser_read_the_same_header(data: bytes, before: int) -> None:
    is_sound, head_H, columns_CK = read(data, before=before)
    header = parse_header(memoryview(data), total_bytes=len(data), where="here")
    assert is_sound
    assert head_H.tolist() == [
        header.rows, header.first, header.last, len(header.columns), header.ids_encoding,
        before + header.ids.offset, header.ids.bytes,
        before + header.deaths.offset, header.deaths.bytes,
    ]  # fmt: skip
    for column, numbers in zip(header.columns, columns_CK.tolist(), strict=False):
        wire = int.from_bytes(column.wire, "little")
        type_ = DTYPE_NUMBERS[column.dtype]
        assert numbers == [wire, column.width, before + column.offset, column.bytes, type_]


@given(
    data=st.sampled_from(SEGMENTS),
    lies=st.lists(
        st.tuples(
            st.integers(0, 15),
            st.sampled_from([0, 1, 2, 3, 31, 255, 1 << 31, 3 << 32, (1 << 64) - 1]),
        ),
        min_size=1,
        max_size=3,
    ),
    cut=st.integers(0, 30),
)
def test_header_that_the_parser_refuses_is_refused_by_the_kernel(
    data: bytes, lies: list[tuple[int, int]], cut: int
) -> None:
    lying = bytearray(data)
    for at, number in lies:  # whole words, so that lengths and counts are hit
        struct.pack_into("<Q", lying, 8 * at, number)
    lying = lying[: len(lying) - cut]
    count, format_ = lying[7], int.from_bytes(lying[4:6], "little")
    end = header_bytes(count, format_=format_)
    if end <= len(lying):  # the header's own checksum is not the kernel's business
        struct.pack_into("<Q", lying, end - 8, checksum(lying[: end - 8]))
    is_sound, _, _ = read(bytes(lying))
    try:
        parse_header(memoryview(bytes(lying)), total_bytes=len(lying), where="here")
    except CorruptDataError:
        assert not is_sound
    else:
        assert is_sound == (count <= COLUMNS_MAX)


@pytest.mark.parametrize("step", [4, 5, 6, 7, 9, 99])
@pytest.mark.parametrize("through", [0, 6, 99])
def test_rows_are_masked_from_their_death_on(step: int, through: int) -> None:
    deaths = [5, 9, 5, 7, 9]
    data = a_segment(deaths=deaths)
    _, head_H, _ = read(data)
    ids_N = np.array([3, 4, 9, 20, 77], np.int64)
    masked = headers.mask_dead(np.frombuffer(data, np.uint8), head_H, step, through, ids_N)
    dead = [died <= min(step, through) for died in deaths]
    assert masked == sum(dead)
    assert (ids_N < 0).tolist() == dead


@given(st.data())
def test_lying_deaths_are_refused_or_those_the_segment_reads(data: st.DataObject) -> None:
    good = a_segment(deaths=[5, 9, 5, 7, 9])
    _, head_H, _ = read(good)
    at, size = int(head_H[headers.DEATHS_AT]), int(head_H[headers.DEATHS_BYTES])
    lying = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        lying[at + data.draw(st.integers(0, size - 1))] = data.draw(st.integers(0, 255))
    ids_N = np.arange(5)
    masked = headers.mask_dead(np.frombuffer(bytes(lying), np.uint8), head_H, 8, 99, ids_N)
    segment = Segment(memoryview(bytes(lying)), where="here")
    try:
        deaths_N = segment.deaths()
    except CorruptDataError:
        assert masked < 0
    else:
        assert deaths_N is not None
        assert masked == (deaths_N <= 8).sum()
