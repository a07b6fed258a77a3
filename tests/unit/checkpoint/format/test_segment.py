"""Segments: what goes in comes out, and every part lies where a kernel can read it in place."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.checkpoint.format.checksum import checksum
from holdfast.checkpoint.format.codec import parse_codec
from holdfast.checkpoint.format.segment import (
    ALIGN,
    CHUNK,
    PLAIN,
    EncodedSegment,
    Segment,
    encode_segment,
    header_bytes,
    parse_deaths,
    parse_filter,
    parse_header,
    parse_ids,
)
from holdfast.errors import CorruptDataError
from holdfast.kernels.rows import bloom
from holdfast.model.schema import Column, TableSchema


def rows(count: int, width: int, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


def joined(encoded: EncodedSegment) -> memoryview:
    return memoryview(b"".join(memoryview(b).cast("B") for b in encoded.buffers))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "ids", [np.arange(4, 30), np.array([3]), np.array([0, 9, 2**40]), np.arange(0, 90, 2)]
)
def test_rows_and_ids_return_and_parts_are_aligned(ids: np.ndarray) -> None:
    columns = [rows(len(ids), 5), rows(len(ids), 1, 6)]
    encoded = encode_segment(ids, columns, [parse_codec("fp32"), parse_codec("fp32")])
    data = joined(encoded)
    assert encoded.bytes == len(data)
    assert encoded.checksum == checksum(data)
    assert (encoded.rows, encoded.first, encoded.last) == (len(ids), ids[0], ids[-1])
    segment = Segment(data, where="here")
    assert np.array_equal(segment.ids(), ids)
    for index, column in enumerate(columns):
        assert segment.decode(index).tobytes() == column.tobytes()
    header = segment.header
    assert all(part.offset % ALIGN == 0 for part in header.columns)
    assert header.ids.offset == header_bytes(2)


def test_ids_are_read_alone_and_checked_by_their_own_checksum() -> None:
    ids = np.array([1, 5, 6, 40, 90])
    data = joined(encode_segment(ids, [rows(5, 2)], [parse_codec("fp32")]))
    head = data[: header_bytes(1)]
    header = parse_header(head, total_bytes=len(data), where="here")
    id_bytes = bytearray(data[header.ids.offset : header.ids.offset + header.ids.bytes])
    assert np.array_equal(parse_ids(header, memoryview(id_bytes), where="here"), ids)
    id_bytes[-1] ^= 1
    with pytest.raises(CorruptDataError, match=r"checksum mismatch in segment ids.*here"):
        parse_ids(header, memoryview(id_bytes), where="here")


def test_equal_rows_give_equal_bytes() -> None:
    codecs = [parse_codec("adaptive4"), parse_codec("kmeans2-block")]
    made = [encode_segment(np.arange(50), [rows(50, 7), rows(50, 3)], codecs) for _ in range(2)]
    assert bytes(joined(made[0])) == bytes(joined(made[1]))


@pytest.mark.parametrize(
    ("schema_rows", "widths"), [(9, (5, 1)), (10, (5, 2)), (10, (5,)), (10, (4, 1))]
)
def test_segment_of_another_table_is_refused(schema_rows: int, widths: tuple[int, ...]) -> None:
    fp32 = parse_codec("fp32")
    data = joined(encode_segment(np.array([2, 9]), [rows(2, 5), rows(2, 1)], [fp32, fp32]))
    segment = Segment(data, where="here")
    segment.check_schema(TableSchema("t", 10, (Column("weight", 5), Column("sum", 1))))
    columns = tuple(Column(str(i), width) for i, width in enumerate(widths))
    with pytest.raises(CorruptDataError, match=r"does not fit its table.*here"):
        segment.check_schema(TableSchema("t", schema_rows, columns))


def test_damaged_header_names_where_it_lies() -> None:
    data = joined(encode_segment(np.arange(3), [rows(3, 2)], [parse_codec("fp32")]))
    for at in range(header_bytes(1)):
        bad = bytearray(data)
        bad[at] ^= 4
        with pytest.raises(CorruptDataError, match="here"):
            Segment(memoryview(bad), where="here")
    for total in (0, 10, len(data) - 8, len(data) + 8):
        with pytest.raises(CorruptDataError, match="here"):
            parse_header(data[:total], total_bytes=total, where="here")


# Format 2: chunks of a grid


CHUNK_IDS = np.array([2, 3, 7, 40, 41, 90, 200])
DEATHS = np.array([30, 20, 30, 50, 20, 50, 50])


def chunk(*, has_filter: bool = True, has_deaths: bool = True) -> memoryview:
    """A segment as extraction writes it."""
    fp32 = parse_codec("fp32")
    columns = [rows(9, 5), rows(9, 1, 6)]
    ids = np.concatenate([CHUNK_IDS, [500, 501]])
    whole = Segment(joined(encode_segment(ids, columns, [fp32, fp32])), where="here")
    taken = whole.take(np.arange(7), has_filter=has_filter, deaths_K=DEATHS if has_deaths else None)
    return joined(taken)


def format_of(data: memoryview) -> int:
    return int.from_bytes(data[4:6], "little")


@pytest.mark.parametrize("has_filter", [False, True])
@pytest.mark.parametrize("has_deaths", [False, True])
def test_filter_and_deaths_return_and_every_part_is_aligned(
    has_filter: bool, has_deaths: bool
) -> None:
    data = chunk(has_filter=has_filter, has_deaths=has_deaths)
    segment = Segment(data, where="here")
    header = segment.header
    assert format_of(data) == (CHUNK if has_filter or has_deaths else PLAIN)
    assert header.filter.offset == header_bytes(2, format_=format_of(data))
    parts = [header.filter, header.ids, header.deaths, *header.columns]
    assert all(part.offset % ALIGN == 0 for part in parts)
    assert np.array_equal(segment.ids(), CHUNK_IDS)
    deaths = segment.deaths()
    assert (deaths is not None) == has_deaths
    assert deaths is None or np.array_equal(deaths, DEATHS)
    assert (header.filter.bytes > 0) == has_filter
    if has_filter:
        part = header.filter
        words = parse_filter(header, data[part.offset : part.offset + part.bytes], where="here")
        assert bloom.has(words, CHUNK_IDS).all()
        assert bloom.has(words, np.arange(1000, 3000)).mean() < 0.2
    assert segment.decode(0).tobytes() == rows(9, 5)[:7].tobytes()
    assert segment.decode(1).tobytes() == rows(9, 1, 6)[:7].tobytes()


def test_contiguous_ids_need_no_filter() -> None:
    data = joined(
        encode_segment(np.arange(5, 9), [rows(4, 2)], [parse_codec("fp32")], has_filter=True)
    )
    assert format_of(data) == PLAIN
    assert Segment(data, where="here").header.filter.bytes == 0


@pytest.mark.parametrize("steps", [1, 2, 256, 257, 65_536, 65_537])
def test_deaths_return_however_many_steps_there_are(steps: int) -> None:
    count = max(steps, 3)
    ids = np.arange(count) * 2
    deaths = np.arange(count) % steps + 9
    whole = Segment(
        joined(encode_segment(ids, [rows(count, 1)], [parse_codec("fp32")])), where="here"
    )
    taken = Segment(joined(whole.take(np.arange(count), deaths_K=deaths)), where="here")
    found = taken.deaths()
    assert found is not None and np.array_equal(found, deaths)


def test_taking_again_keeps_rows_and_forgets_deaths_and_filter() -> None:
    segment = Segment(chunk(), where="here")
    again = Segment(joined(segment.take(np.array([1, 4, 6]), deaths_K=None)), where="here")
    assert again.ids().tolist() == [3, 41, 200]
    assert again.deaths() is None
    assert again.header.filter.bytes == 0
    for column in (0, 1):
        assert again.decode(column).tobytes() == segment.decode(column)[[1, 4, 6]].tobytes()
        some = segment.decode_some(column, np.array([1, 4, 6]))
        assert some.tobytes() == again.decode(column).tobytes()


def test_taken_rows_give_equal_bytes_each_time() -> None:
    assert bytes(chunk()) == bytes(chunk())


def test_every_part_is_read_alone_and_checked_by_its_own_checksum() -> None:
    data = chunk()
    header = parse_header(data[: header_bytes(2, format_=CHUNK)], total_bytes=len(data), where="x")
    for part, parse, name in (
        (header.filter, parse_filter, "filter"),
        (header.ids, parse_ids, "ids"),
        (header.deaths, parse_deaths, "deaths"),
    ):
        good = data[part.offset : part.offset + part.bytes]
        parse(header, good, where="here")
        for at in range(part.bytes):
            bad = bytearray(good)
            bad[at] ^= 1 << (at % 8)
            with pytest.raises(CorruptDataError, match=f"checksum mismatch in segment {name}"):
                parse(header, memoryview(bad), where="here")


def test_every_flipped_byte_of_a_chunks_header_is_found() -> None:
    data = chunk()
    for at in range(header_bytes(2, format_=CHUNK)):
        for bit in range(8):
            bad = bytearray(data)
            bad[at] ^= 1 << bit
            with pytest.raises(CorruptDataError, match="here"):
                Segment(memoryview(bad), where="here")
    for total in (0, 47, 100, len(data) - 8, len(data) + 8):
        with pytest.raises(CorruptDataError, match="here"):
            parse_header(data[:total], total_bytes=total, where="here")
