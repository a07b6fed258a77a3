"""A segment: some rows of one table, every column, as bytes that describe themselves.

    header | ids | column 0 (weights) | column 1 (row state) | ...

Every part starts on a multiple of 8 bytes, so that kernels read the buffer in place. The header
has its own checksum and carries the ids' checksum, so that the ids alone can be read and trusted;
the checksum of the whole segment is kept where the segment is named (footer and catalog).
``docs/format.md`` is normative.

Invariants:
- Ids are strictly ascending; columns have exactly one encoded row for each.
- ``parse`` never trusts a number before it is checked against the bytes that are really there.

Not here: how a column is encoded (codec.py), how ids are (idcode.py), where segments lie
(object.py).

# N rows, D floats of one column
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.checkpoint import codec as codecs
from holdfast.checkpoint.checksum import as_hex, checksum, checksum_all
from holdfast.checkpoint.codec import Codec
from holdfast.checkpoint.idcode import decode_ids, encode_ids
from holdfast.errors import CorruptDataError
from holdfast.tables import TableSchema

MAGIC = b"HFSG"
FORMAT = 1
ALIGN = 8

_HEAD = struct.Struct(
    "<4sHBBIIQQQQ"
)  # magic format ids columns rows 0 first last ids_bytes ids_sum
_COLUMN = struct.Struct("<8sIIQ")  # wire width 0 bytes
_SUM = struct.Struct("<Q")
_ZEROS = bytes(ALIGN)


@dataclass(frozen=True, slots=True)
class ColumnPart:
    """Where one column lies in a segment, and how it is encoded."""

    wire: bytes
    width: int
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What a segment says of itself, checked against its length."""

    rows: int
    first: int
    last: int
    ids_encoding: int
    ids_offset: int
    ids_bytes: int
    ids_checksum: int
    columns: tuple[ColumnPart, ...]


@dataclass(frozen=True, slots=True)
class EncodedSegment:
    """A segment ready to be written: its buffers in order, and what the catalog keeps of it."""

    buffers: tuple[Any, ...]
    bytes: int
    checksum: int
    rows: int
    first: int
    last: int


def header_bytes(columns: int) -> int:
    """Length of the header of a segment with so many columns."""
    return _HEAD.size + columns * _COLUMN.size + _SUM.size


def _padding(length: int) -> bytes:
    return _ZEROS[: -length % ALIGN]


def encode_segment(
    ids_N: np.ndarray, columns: Sequence[np.ndarray], column_codecs: Sequence[Codec]
) -> EncodedSegment:
    """The bytes of some rows: at least one row, ids strictly ascending."""
    encoding, id_data = encode_ids(ids_N)
    sections = [
        codecs.encode(codec, rows_ND) for codec, rows_ND in zip(column_codecs, columns, strict=True)
    ]
    head = bytearray(
        _HEAD.pack(
            MAGIC,
            FORMAT,
            encoding,
            len(sections),
            len(ids_N),
            0,
            int(ids_N[0]),
            int(ids_N[-1]),
            id_data.nbytes,
            checksum(id_data),
        )
    )
    for codec, section, rows_ND in zip(column_codecs, sections, columns, strict=True):
        head += _COLUMN.pack(codec.wire(), rows_ND.shape[1], 0, section.nbytes)
    head += _SUM.pack(checksum(head))
    buffers: list[Any] = [bytes(head)]
    for part in (id_data, *sections):
        buffers += [part, _padding(part.nbytes)]
    total = len(head) + sum(part.nbytes + (-part.nbytes % ALIGN) for part in (id_data, *sections))
    return EncodedSegment(
        buffers=tuple(buffers),
        bytes=total,
        checksum=checksum_all(buffers),
        rows=len(ids_N),
        first=int(ids_N[0]),
        last=int(ids_N[-1]),
    )


def parse_header(data: memoryview, *, total_bytes: int, where: str) -> SegmentHeader:
    """Read and check a header; ``data`` may hold more than the header, ``total_bytes`` says how
    long the whole segment is.

    Raises:
        CorruptDataError: names the object in ``where``.
    """

    def damaged(why: str, **facts: object) -> CorruptDataError:
        return CorruptDataError(
            f"segment header is damaged: {why}", where=where, **facts, todo="run 'holdfast verify'"
        )

    if len(data) < _HEAD.size:
        raise damaged("too short", bytes=len(data))
    magic, fmt, encoding, count, rows, zero, first, last, ids_bytes, ids_sum = _HEAD.unpack_from(
        data
    )
    if magic != MAGIC or zero != 0:
        raise damaged("not a segment")
    if fmt != FORMAT:
        raise damaged("unknown format", format=fmt, known=FORMAT)
    end = header_bytes(count)
    if len(data) < end:
        raise damaged("too short", bytes=len(data))
    (stored,) = _SUM.unpack_from(data, end - _SUM.size)
    found = checksum(data[: end - _SUM.size])
    if stored != found:
        raise damaged("checksum mismatch", expected=as_hex(stored), found=as_hex(found))
    if rows == 0 or count == 0 or last < first or rows > last - first + 1 or last >= 1 << 62:
        raise damaged("impossible ids", rows=rows, first=first, last=last)
    offset = end
    ids_offset, offset = offset, offset + ids_bytes + (-ids_bytes % ALIGN)
    columns = []
    for index in range(count):
        wire, width, zero, size = _COLUMN.unpack_from(data, _HEAD.size + index * _COLUMN.size)
        # A row takes at least a byte in every codec: the row count is bounded by real bytes.
        if zero != 0 or width == 0 or size < rows:
            raise damaged("impossible column", column=index, width=width, bytes=size, rows=rows)
        columns.append(ColumnPart(bytes(wire), width, offset, size))
        offset += size + (-size % ALIGN)
    if offset != total_bytes:
        raise damaged("wrong length", expected=offset, found=total_bytes)
    return SegmentHeader(
        rows, first, last, encoding, ids_offset, ids_bytes, ids_sum, tuple(columns)
    )


class Segment:
    """A segment whose bytes are known to be whole: its ids, its rows into the caller's tables."""

    def __init__(self, data: memoryview, *, where: str) -> None:
        self.header = parse_header(data, total_bytes=len(data), where=where)
        self._data = data
        self._where = where

    def check_schema(self, schema: TableSchema) -> None:
        """Refuse a segment that is not of this table.

        Raises:
            CorruptDataError: widths differ or ids lie outside the table.
        """
        widths = tuple(column.width for column in self.header.columns)
        wanted = tuple(column.width for column in schema.columns)
        if widths != wanted or self.header.last >= schema.rows:
            raise CorruptDataError(
                "segment does not fit its table",
                where=self._where,
                table=schema.name,
                widths=widths,
                expected=wanted,
                last=self.header.last,
                rows=schema.rows,
            )

    def ids(self) -> np.ndarray:
        """The row ids, strictly ascending."""
        return _ids(self.header, self._part(self.header.ids_offset, self.header.ids_bytes),
                    self._where)  # fmt: skip

    def decode_into(self, column: int, dst_ND: np.ndarray, ids_N: np.ndarray) -> None:
        """Decode one column and scatter it: row ``i`` lands at ``dst_ND[ids_N[i]]``."""
        part = self.header.columns[column]
        codecs.decode_into(
            part.wire,
            self._part(part.offset, part.bytes),
            dst_ND,
            ids_N,
            rows=self.header.rows,
            width=part.width,
        )

    def decode(self, column: int) -> np.ndarray:
        """One column's rows, in the order of the ids."""
        part = self.header.columns[column]
        return codecs.decode(
            part.wire,
            self._part(part.offset, part.bytes),
            rows=self.header.rows,
            width=part.width,
        )

    def _part(self, offset: int, length: int) -> np.ndarray:
        return np.frombuffer(self._data, np.uint8, count=length, offset=offset)


def _ids(header: SegmentHeader, data: np.ndarray, where: str) -> np.ndarray:
    try:
        return decode_ids(
            header.ids_encoding, data, count=header.rows, first=header.first, last=header.last
        )
    except CorruptDataError as error:
        raise CorruptDataError("segment ids are damaged", where=where) from error


def parse_ids(header: SegmentHeader, data: memoryview, *, where: str) -> np.ndarray:
    """The ids of a segment of which only the header and the id bytes were read.

    Raises:
        CorruptDataError: the ids' own checksum does not match.
    """
    found = checksum(data)
    if found != header.ids_checksum:
        raise CorruptDataError(
            "checksum mismatch in segment ids",
            where=where,
            expected=as_hex(header.ids_checksum),
            found=as_hex(found),
        )
    return _ids(header, np.frombuffer(data, np.uint8), where)
