"""A segment of rows taken apart, as docs/format.md has it, and written with every checksum right.

What is written need not be true: the fields of ``SegmentBytes`` are what the header is to say.

# N rows
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np

from tests.hostile.mutators.stored_run import sum_of

RANGE, BITMAP, GAPS = 0, 1, 2
HEAD = struct.Struct("<4sHBBIIQQQQ")
COLUMN = struct.Struct("<8sIIQ")
CHUNK = struct.Struct("<QQQQ")
DTYPES = ("float32", "float16", "bfloat16", "float64")
_BLOCK = 128  # gaps


@dataclass(slots=True)
class ColumnBytes:
    """One column: its codec's wire bytes, width, number of its type, section."""

    wire: bytes
    width: int
    type: int
    section: bytes


@dataclass(slots=True)
class SegmentBytes:
    """A segment's parts; lengths are those of the bytes unless ``lengths`` has another."""

    format: int
    encoding: int
    rows: int
    first: int
    last: int
    ids: bytes
    columns: list[ColumnBytes]
    filter: bytes = b""
    deaths: bytes = b""
    zero: int = 0
    lengths: dict[str, int] = field(default_factory=dict)

    def set_ids(self, ids_N: np.ndarray, encoding: int | None = None) -> None:
        """Hold these ids, which need not be ascending; the columns stay as they are."""
        self.rows = len(ids_N)
        self.first, self.last = int(ids_N[0]), int(ids_N[-1])
        span = self.last - self.first + 1
        is_run = span == len(ids_N) and bool((np.diff(ids_N) == 1).all())
        is_dense = 0 < span < 1 << 16 and bool((np.diff(ids_N) > 0).all())
        if encoding is None:
            encoding = RANGE if is_run else BITMAP if is_dense else GAPS
        if encoding == BITMAP and not is_dense:
            encoding = GAPS
        self.encoding = encoding
        self.ids = encode_ids(ids_N, encoding)

    def set_deaths(self, deaths_N: np.ndarray | None) -> None:
        """Have rows die at these steps; None: say nothing of deaths."""
        self.deaths = b"" if deaths_N is None else encode_deaths(deaths_N)
        self._fit_format()

    def set_filter(self, data: bytes) -> None:
        """Carry another Bloom filter."""
        self.filter = data
        self._fit_format()

    def _fit_format(self) -> None:
        is_typed = any(column.type for column in self.columns)
        has_chunk = bool(self.filter or self.deaths)
        self.format = 1 + has_chunk + 2 * is_typed

    def take(self, at_K: np.ndarray, ids_N: np.ndarray) -> bool:
        """Keep some rows of a segment whose sections are rows one after the other; whether it
        could be done (codecs that share parameters between rows cannot be cut by bytes)."""
        sections = [np.frombuffer(c.section, np.uint8) for c in self.columns]
        if any(c.wire[0] not in (1, 11) or len(c.section) % self.rows for c in self.columns):
            return False
        rows = self.rows
        for column, data in zip(self.columns, sections, strict=True):
            column.section = data.reshape(rows, -1)[at_K].tobytes()
        if self.deaths:
            self.deaths = encode_deaths(decode_deaths(self.deaths, rows)[at_K])
        self.set_ids(ids_N[at_K])
        return True

    def write(self) -> bytes:
        """The bytes, with the checksums of ids, filter, deaths and header."""
        ids_bytes = self.lengths.get("ids", len(self.ids))
        head = HEAD.pack(
            b"HFSG",
            self.format & 0xFFFF,
            self.encoding & 0xFF,
            self.lengths.get("columns", len(self.columns)) & 0xFF,
            self.rows & 0xFFFFFFFF,
            self.zero & 0xFFFFFFFF,
            *(value & (1 << 64) - 1 for value in (self.first, self.last, ids_bytes)),
            sum_of(self.ids),
        )
        for index, column in enumerate(self.columns):
            size = self.lengths.get(f"column {index}", len(column.section))
            head += COLUMN.pack(
                column.wire[:8].ljust(8, b"\0"), column.width & 0xFFFFFFFF,
                column.type & 0xFFFFFFFF, size & (1 << 64) - 1,
            )  # fmt: skip
        if self.format in (2, 4):
            sizes = (self.lengths.get("filter", len(self.filter)),
                     self.lengths.get("deaths", len(self.deaths)))  # fmt: skip
            head += CHUNK.pack(sizes[0] & (1 << 64) - 1, sum_of(self.filter),
                               sizes[1] & (1 << 64) - 1, sum_of(self.deaths))  # fmt: skip
        head += struct.pack("<Q", sum_of(head))
        parts = [self.filter, self.ids, self.deaths] if self.format in (2, 4) else [self.ids]
        parts += [column.section for column in self.columns]
        return head + b"".join(part + bytes(-len(part) % 8) for part in parts)


def read_segment(data: bytes) -> SegmentBytes:
    """A segment apart; raises ValueError where it is not one by the format."""
    magic, format_, encoding, count, rows, zero, first, last, ids_bytes, ids_sum = HEAD.unpack_from(
        data
    )
    if magic != b"HFSG" or zero or not 1 <= format_ <= 4 or not count or not rows:
        raise ValueError("head")
    end = HEAD.size + COLUMN.size * count
    sizes = (0, sum_of(b""), 0, sum_of(b""))
    if format_ in (2, 4):
        sizes = CHUNK.unpack_from(data, end)
        end += CHUNK.size
        if sizes[0] + sizes[2] == 0 or sizes[0] % 32:
            raise ValueError("chunk")
    if sum_of(data[:end]) != struct.unpack_from("<Q", data, end)[0]:
        raise ValueError("header checksum")
    at = end + 8
    found = []
    described = [COLUMN.unpack_from(data, HEAD.size + COLUMN.size * i) for i in range(count)]
    for size in (sizes[0], ids_bytes, sizes[2], *(size for *_, size in described)):
        if at + size > len(data) or any(data[at + size : at + size + -size % 8]):
            raise ValueError("a part lies outside, or its padding is not zero")
        found.append(data[at : at + size])
        at += size + -size % 8
    if at != len(data):
        raise ValueError("length")
    filter_, ids, deaths, *sections = found
    if (sum_of(ids), sum_of(filter_), sum_of(deaths)) != (ids_sum, sizes[1], sizes[3]):
        raise ValueError("checksum of a part")
    columns = [
        ColumnBytes(wire, width, type_, section)
        for (wire, width, type_, _), section in zip(described, sections, strict=True)
    ]
    if any(c.type >= len(DTYPES) or not c.width for c in columns):
        raise ValueError("column")
    if any(c.type for c in columns) != (format_ > 2):
        raise ValueError("types")
    return SegmentBytes(format_, encoding, rows, first, last, ids, columns, filter_, deaths)


def ids_of(segment: SegmentBytes) -> np.ndarray:
    """The ids of a segment; raises ValueError where its bytes say something else."""
    rows, first, last = segment.rows, segment.first, segment.last
    if last < first or last >= 1 << 56 or rows > last - first + 1:
        raise ValueError("ids")
    if segment.encoding == RANGE:
        ids_N = np.arange(first, last + 1) if last - first < 1 << 24 else np.empty(0, np.int64)
        if segment.ids:
            raise ValueError("a range has no bytes")
    elif segment.encoding == BITMAP:
        span = last - first + 1
        bits = np.unpackbits(np.frombuffer(segment.ids, np.uint8), bitorder="little")
        if len(segment.ids) != -(-span // 8) or bits[span:].any():
            raise ValueError("bitmap")
        ids_N = first + np.flatnonzero(bits)
    elif segment.encoding == GAPS:
        ids_N = first + np.concatenate([[0], np.cumsum(_read_gaps(segment.ids, rows - 1) + 1)])
    else:
        raise ValueError("encoding")
    if len(ids_N) != rows or ids_N[0] != first or ids_N[-1] != last:
        raise ValueError("ids are not what the header says")
    return ids_N.astype(np.int64)


def _read_gaps(data: bytes, count: int) -> np.ndarray:
    found: list[int] = []
    at = 0
    while len(found) < count:
        width, block = data[at], min(_BLOCK, count - len(found))
        if width > 56:
            raise ValueError("width of gaps")
        size = -(-width * block // 8)
        packed = int.from_bytes(data[at + 1 : at + 1 + size], "little")
        if at + 1 + size > len(data) or packed >> width * block:
            raise ValueError("gaps")
        found += [packed >> width * i & (1 << width) - 1 for i in range(block)]
        at += 1 + size
    if at != len(data):
        raise ValueError("gaps")
    return np.array(found, np.int64)


def encode_ids(ids_N: np.ndarray, encoding: int) -> bytes:
    """Ids as bytes; what an encoding cannot say comes out wrong, as a liar's would."""
    if encoding == BITMAP:
        bits = np.zeros(int(ids_N[-1] - ids_N[0]) + 1, np.uint8)
        bits[ids_N - ids_N[0]] = 1
        return np.packbits(bits, bitorder="little").tobytes()
    if encoding != GAPS:
        return b""
    gaps = [int(gap) - 1 & (1 << 56) - 1 for gap in np.diff(ids_N)]
    out = b""
    for at in range(0, len(gaps), _BLOCK):
        block = gaps[at : at + _BLOCK]
        width = max(gap.bit_length() for gap in block)
        packed = sum(gap << width * i for i, gap in enumerate(block))
        out += bytes([width]) + packed.to_bytes(-(-width * len(block) // 8), "little")
    return out


def encode_deaths(deaths_N: np.ndarray) -> bytes:
    """Steps of deaths as bytes."""
    steps_S, index_N = np.unique(deaths_N.astype(np.uint64), return_inverse=True)
    type_ = "<u1" if len(steps_S) <= 256 else "<u2"
    head = struct.pack("<II", len(steps_S), 0) + steps_S.astype("<u8").tobytes()
    return head + index_N.astype(type_).tobytes()


def decode_deaths(data: bytes, rows: int) -> np.ndarray:
    """The step of each row's death; raises ValueError where the bytes say something else."""
    count, zero = struct.unpack_from("<II", data)
    size = 1 if count <= 256 else 2 if count <= 65536 else 4
    if zero or not count or len(data) != 8 + 8 * count + size * rows:
        raise ValueError("deaths")
    steps_S = np.frombuffer(data, "<u8", count=count, offset=8)
    index_N = np.frombuffer(data, f"<u{size}", offset=8 + 8 * count)
    if (np.diff(steps_S.astype(np.int64)) <= 0).any() or index_N.max() >= count:
        raise ValueError("deaths")
    return steps_S[index_N].astype(np.int64)
