"""A segment: some rows of one table, every column, as bytes that describe themselves.

    header | filter | ids | deaths | column 0 (weights) | column 1 (row state) | ...

A chunk of a grid may carry a Bloom filter of its ids, and one that was extracted the step at which
each of its versions died, where that is not the same for all (format 2); other segments have
neither (format 1). Where some column is not float32 the header names the type of each (formats 3
and 4, otherwise like 1 and 2).

Every part starts on a multiple of 8 bytes, so that kernels read the buffer in place. The header has
its own checksum and carries those of filter, ids and deaths, so that each of them can be read alone
and trusted; the checksum of the whole segment is kept where the segment is named (footer and
catalog). ``docs/format.md`` is normative.

Invariants:
- Ids are strictly ascending; columns have exactly one encoded row for each.
- ``parse`` never trusts a number before it is checked against the bytes that are really there.
- ``take`` moves codes: what it returns decodes to the very bits that the whole segment does.

Not here: how a column is encoded (codec.py), how ids are (ids.py), where segments lie
(object.py), which rows are taken (checkpoint/grid/decide.py).

# N rows, D floats of one column
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.checkpoint.format import codec as codecs
from holdfast.checkpoint.format.checksum import as_hex, checksum, checksum_all
from holdfast.checkpoint.format.codec import Codec
from holdfast.checkpoint.format.ids import decode_ids, encode_ids
from holdfast.errors import CorruptDataError
from holdfast.kernels.rows import bloom
from holdfast.model.dtypes import name_of
from holdfast.model.schema import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, TableSchema

MAGIC = b"HFSG"
PLAIN, CHUNK = 1, 2  # formats: without and with filter and deaths
_TYPED = 2  # more: the same, with a type for each column
_FORMATS = (PLAIN, CHUNK, PLAIN + _TYPED, CHUNK + _TYPED)
_DTYPES = (FLOAT32, FLOAT16, BFLOAT16, FLOAT64)  # by the number that stands for each
DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}
ALIGN = 8
HEADER_BYTES_MAX = 8192  # enough for 255 columns

_HEAD = struct.Struct(
    "<4sHBBIIQQQQ"
)  # magic format ids columns rows 0 first last ids_bytes ids_sum
_COLUMN = struct.Struct("<8sIIQ")  # wire width dtype bytes
_CHUNK = struct.Struct("<QQQQ")  # filter_bytes filter_sum deaths_bytes deaths_sum
_DEATHS = struct.Struct("<II")  # steps 0
_SUM = struct.Struct("<Q")
_BLOCK_BYTES = 32  # of a filter
_ZEROS = bytes(ALIGN)


@dataclass(frozen=True, slots=True)
class ColumnPart:
    """Where one column lies in a segment, and how it is encoded."""

    wire: bytes
    width: int
    offset: int
    bytes: int
    dtype: str = FLOAT32


@dataclass(frozen=True, slots=True)
class _Section:
    """One encoded column."""

    wire: bytes
    width: int
    dtype: str
    data: np.ndarray


@dataclass(frozen=True, slots=True)
class CheckedPart:
    """A part of a segment that can be read alone: it has a checksum of its own."""

    offset: int
    bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What a segment says of itself, checked against its length; no bytes: no such part."""

    rows: int
    first: int
    last: int
    ids_encoding: int
    filter: CheckedPart
    ids: CheckedPart
    deaths: CheckedPart
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


def header_bytes(columns: int, *, format_: int = PLAIN) -> int:
    """Length of the header of a segment with so many columns."""
    extra = _CHUNK.size if _is_chunk(format_) else 0
    return _HEAD.size + columns * _COLUMN.size + extra + _SUM.size


def _is_chunk(format_: int) -> bool:
    return format_ in (CHUNK, CHUNK + _TYPED)


def _padding(length: int) -> bytes:
    return _ZEROS[: -length % ALIGN]


def encode_segment(
    ids_N: np.ndarray,
    columns: Sequence[np.ndarray],
    column_codecs: Sequence[Codec],
    *,
    has_filter: bool = False,
) -> EncodedSegment:
    """The bytes of some rows: at least one row, ids strictly ascending."""
    sections = [
        _Section(
            codec.wire(),
            rows_ND.shape[1],
            name_of(rows_ND) or FLOAT32,  # what has no name the codec refuses
            codecs.encode(codec, rows_ND),
        )
        for codec, rows_ND in zip(column_codecs, columns, strict=True)
    ]
    return _assemble(ids_N, sections, has_filter=has_filter, deaths_N=None)


def _assemble(
    ids_N: np.ndarray,
    sections: Sequence[_Section],
    *,
    has_filter: bool,
    deaths_N: np.ndarray | None,
) -> EncodedSegment:
    """A segment of encoded columns."""
    encoding, id_data = encode_ids(ids_N)
    # Contiguous ids need no filter: first and last say it all.
    filter_data = _encode_filter(ids_N) if has_filter and id_data.nbytes else _NOTHING
    death_data = _NOTHING if deaths_N is None else _encode_deaths(deaths_N)
    format_ = CHUNK if filter_data.nbytes or death_data.nbytes else PLAIN
    if any(section.dtype != FLOAT32 for section in sections):
        format_ += _TYPED
    head = bytearray(
        _HEAD.pack(
            MAGIC,
            format_,
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
    for section in sections:
        type_ = DTYPE_NUMBERS[section.dtype]
        head += _COLUMN.pack(section.wire, section.width, type_, section.data.nbytes)
    if _is_chunk(format_):
        head += _CHUNK.pack(
            filter_data.nbytes, checksum(filter_data), death_data.nbytes, checksum(death_data)
        )
    head += _SUM.pack(checksum(head))
    buffers: list[Any] = [bytes(head)]
    total = len(head)
    for part in (filter_data, id_data, death_data, *(section.data for section in sections)):
        buffers += [part, _padding(part.nbytes)]
        total += part.nbytes + (-part.nbytes % ALIGN)
    return EncodedSegment(
        buffers=tuple(buffers),
        bytes=total,
        checksum=checksum_all(buffers),
        rows=len(ids_N),
        first=int(ids_N[0]),
        last=int(ids_N[-1]),
    )


_NOTHING = np.empty(0, np.uint8)


def _encode_filter(ids_N: np.ndarray) -> np.ndarray:
    words_W = np.zeros(bloom.words_for(len(ids_N)), np.uint32)
    bloom.build(ids_N, words_W)
    return words_W.astype("<u4", copy=False).view(np.uint8)


def _encode_deaths(deaths_N: np.ndarray) -> np.ndarray:
    """Steps at which rows died: the different ones once, then a short number for each row."""
    steps_S, index_N = np.unique(deaths_N, return_inverse=True)
    data = _DEATHS.pack(len(steps_S), 0) + steps_S.astype("<u8").tobytes()
    return np.frombuffer(data + index_N.astype(_index_type(len(steps_S))).tobytes(), np.uint8)


def _index_type(count: int) -> str:
    return "<u1" if count <= 1 << 8 else "<u2" if count <= 1 << 16 else "<u4"


def _decode_deaths(data: memoryview, rows: int) -> np.ndarray:
    """One step for each row; raises ValueError where the bytes say something else."""
    if len(data) < _DEATHS.size:
        raise ValueError("too short")
    count, zero = _DEATHS.unpack_from(data)
    type_ = np.dtype(_index_type(count))
    end = _DEATHS.size + 8 * count
    if zero or not 0 < count <= rows or len(data) != end + rows * type_.itemsize:
        raise ValueError("wrong length")
    steps_S = np.frombuffer(data, "<u8", count=count, offset=_DEATHS.size).astype(np.int64)
    index_N = np.frombuffer(data, type_, count=rows, offset=end)
    if (steps_S < 0).any() or (np.diff(steps_S) <= 0).any() or int(index_N.max()) >= count:
        raise ValueError("impossible steps")
    deaths_N: np.ndarray = steps_S[index_N]
    return deaths_N


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
    if fmt not in _FORMATS:
        raise damaged("unknown format", format=fmt, known=_FORMATS)
    end = header_bytes(count, format_=fmt)
    if len(data) < end:
        raise damaged("too short", bytes=len(data))
    (stored,) = _SUM.unpack_from(data, end - _SUM.size)
    found = checksum(data[: end - _SUM.size])
    if stored != found:
        raise damaged("checksum mismatch", expected=as_hex(stored), found=as_hex(found))
    if rows == 0 or count == 0 or last < first or rows > last - first + 1 or last >= 1 << 62:
        raise damaged("impossible ids", rows=rows, first=first, last=last)
    filter_bytes = filter_sum = deaths_bytes = deaths_sum = 0
    if _is_chunk(fmt):
        filter_bytes, filter_sum, deaths_bytes, deaths_sum = _CHUNK.unpack_from(
            data, _HEAD.size + count * _COLUMN.size
        )
        if filter_bytes % _BLOCK_BYTES or filter_bytes + deaths_bytes == 0:
            raise damaged("impossible filter", bytes=filter_bytes)
    parts = []
    offset = end
    for size, sum_ in ((filter_bytes, filter_sum), (ids_bytes, ids_sum),
                       (deaths_bytes, deaths_sum)):  # fmt: skip
        parts.append(CheckedPart(offset, size, sum_))
        offset += size + (-size % ALIGN)
    columns = []
    for index in range(count):
        wire, width, type_, size = _COLUMN.unpack_from(data, _HEAD.size + index * _COLUMN.size)
        # A row takes at least a byte in every codec: the row count is bounded by real bytes.
        if type_ >= len(_DTYPES) or width == 0 or size < rows:
            raise damaged(
                "impossible column", column=index, width=width, type=type_, bytes=size, rows=rows
            )
        columns.append(ColumnPart(bytes(wire), width, offset, size, _DTYPES[type_]))
        offset += size + (-size % ALIGN)
    is_typed = any(column.dtype != FLOAT32 for column in columns)
    if is_typed != (fmt > CHUNK):
        raise damaged("types of columns in a format without them, or the reverse", format=fmt)
    if offset != total_bytes:
        raise damaged("wrong length", expected=offset, found=total_bytes)
    filter_, ids, deaths = parts
    return SegmentHeader(rows, first, last, encoding, filter_, ids, deaths, tuple(columns))


class Segment:
    """A segment whose bytes are known to be whole: its ids, its rows into the caller's tables."""

    def __init__(self, data: memoryview, *, where: str) -> None:
        self.header = parse_header(data, total_bytes=len(data), where=where)
        self._data = data
        self._where = where

    def check_schema(self, schema: TableSchema) -> None:
        """Refuse a segment that is not of this table.

        Raises:
            CorruptDataError: widths or types differ, or ids lie outside the table.
        """
        found = tuple((column.width, column.dtype) for column in self.header.columns)
        wanted = tuple((column.width, column.dtype) for column in schema.columns)
        if found != wanted or self.header.last >= schema.rows:
            raise CorruptDataError(
                "segment does not fit its table",
                where=self._where,
                table=schema.name,
                columns=found,
                expected=wanted,
                last=self.header.last,
                rows=schema.rows,
            )

    def has_zero_padding(self) -> bool:
        """Whether nothing hides between the parts."""
        header = self.header
        checked = (header.filter, header.ids, header.deaths)
        ends = [part.offset + part.bytes for part in checked]
        ends += [part.offset + part.bytes for part in header.columns]
        return not any(self._part(end, -end % ALIGN).any() for end in ends)

    def ids(self) -> np.ndarray:
        """The row ids, strictly ascending."""
        part = self.header.ids
        return _ids(self.header, self._part(part.offset, part.bytes), self._where)

    def filter(self) -> np.ndarray | None:
        """The words of the Bloom filter; None where there is none."""
        part = self.header.filter
        if part.bytes == 0:
            return None
        data = self._data[part.offset : part.offset + part.bytes]
        return parse_filter(self.header, data, where=self._where)

    def deaths(self) -> np.ndarray | None:
        """The step at which each version died; None where the catalog alone knows."""
        part = self.header.deaths
        if part.bytes == 0:
            return None
        return _deaths(self.header, self._data[part.offset : part.offset + part.bytes], self._where)

    def take(
        self, positions_K: np.ndarray, *, has_filter: bool = False, deaths_K: np.ndarray | None
    ) -> EncodedSegment:
        """A segment of some of these rows (positions ascending), moved as codes."""
        sections = []
        for part in self.header.columns:
            wire, section = codecs.take(
                part.wire,
                self._part(part.offset, part.bytes),
                positions_K,
                rows=self.header.rows,
                width=part.width,
                dtype=part.dtype,
            )
            sections.append(_Section(wire, part.width, part.dtype, section))
        return _assemble(
            self.ids()[positions_K], sections, has_filter=has_filter, deaths_N=deaths_K
        )

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
            dtype=part.dtype,
        )

    def decode(self, column: int) -> np.ndarray:
        """One column's rows, in the order of the ids."""
        part = self.header.columns[column]
        return codecs.decode(
            part.wire,
            self._part(part.offset, part.bytes),
            rows=self.header.rows,
            width=part.width,
            dtype=part.dtype,
        )

    def decode_some(self, column: int, positions_K: np.ndarray) -> np.ndarray:
        """One column's rows at some positions (ascending)."""
        part = self.header.columns[column]
        section = self._part(part.offset, part.bytes)
        shape: dict[str, Any] = {"width": part.width, "dtype": part.dtype}
        wire, taken = codecs.take(part.wire, section, positions_K, rows=self.header.rows, **shape)
        return codecs.decode(wire, taken, rows=len(positions_K), **shape)

    def _part(self, offset: int, length: int) -> np.ndarray:
        return np.frombuffer(self._data, np.uint8, count=length, offset=offset)


def _ids(header: SegmentHeader, data: np.ndarray, where: str) -> np.ndarray:
    try:
        return decode_ids(
            header.ids_encoding, data, count=header.rows, first=header.first, last=header.last
        )
    except CorruptDataError as error:
        raise CorruptDataError("segment ids are damaged", where=where) from error


def _deaths(header: SegmentHeader, data: memoryview, where: str) -> np.ndarray:
    try:
        return _decode_deaths(data, header.rows)
    except ValueError as error:
        raise CorruptDataError("segment deaths are damaged", where=where) from error


def parse_ids(header: SegmentHeader, data: memoryview, *, where: str) -> np.ndarray:
    """The ids of a segment of which only the header and the id bytes were read.

    Raises:
        CorruptDataError: the ids' own checksum does not match.
    """
    _check_part(header.ids, data, "ids", where)
    return _ids(header, np.frombuffer(data, np.uint8), where)


def parse_deaths(header: SegmentHeader, data: memoryview, *, where: str) -> np.ndarray:
    """The deaths of a segment of which only the header and their bytes were read.

    Raises:
        CorruptDataError: their own checksum does not match.
    """
    _check_part(header.deaths, data, "deaths", where)
    return _deaths(header, data, where)


def parse_filter(header: SegmentHeader, data: memoryview, *, where: str) -> np.ndarray:
    """The words of a segment's Bloom filter (kernels/rows/bloom.py).

    Raises:
        CorruptDataError: the filter's own checksum does not match.
    """
    _check_part(header.filter, data, "filter", where)
    return np.frombuffer(data, "<u4")


def _check_part(part: CheckedPart, data: memoryview, name: str, where: str) -> None:
    found = checksum(data)
    if found != part.checksum:
        raise CorruptDataError(
            f"checksum mismatch in segment {name}",
            where=where,
            expected=as_hex(part.checksum),
            found=as_hex(found),
        )
