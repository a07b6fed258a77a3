"""Segments: what goes in comes out, and every part lies where a kernel can read it in place."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.checkpoint.checksum import checksum
from holdfast.checkpoint.codec import parse_codec
from holdfast.checkpoint.segment import (
    ALIGN,
    EncodedSegment,
    Segment,
    encode_segment,
    header_bytes,
    parse_header,
    parse_ids,
)
from holdfast.errors import CorruptDataError
from holdfast.tables import Column, TableSchema


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
