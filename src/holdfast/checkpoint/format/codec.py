"""Codecs: how the rows of one column (weights, or one kind of row state) become bytes.

Between snapshot and segment: ``encode`` turns N rows into one section of bytes, ``decode_into``
turns a section back and scatters it into a table in the same pass, ``take`` makes the section of
some of its rows without decoding any. What a section needs to be read is its codec's eight ``wire``
bytes, N, D and the column's type; the segment keeps those.

A section is the arrays of ``_parts``, little-endian, one after the other; then, for every codec
but fp32 and raw, zeros up to a multiple of four and the exceptions: a uint32 count, their uint32
row numbers, their rows as they are in memory. A row is an exception where the codec could not keep
its promise: NaN or infinities, values beyond what its fp16 parameters reach, rows so small
(largest value below 2^-16) that fp16 would blur them, and negative values for ``log``.

Columns of other types than float32 (model/dtypes.py) are stored as they are in memory (``raw``)
where nothing may be lost; codecs that approximate see their values as float32, and what they decode
is rounded to the column's type. ``fit_codec`` says which of the two becomes of a codec.

Invariants:
- fp32 and raw sections and exceptions return every bit, NaN payloads and -0.0 included.
- Every other row stays within its error bound (tests/unit/checkpoint/format/error_bound.py).
- The same rows give the same bytes; so do the same rows taken from the same section, in one
  go or in several.
- A section is checked whole (lengths, row numbers, block numbers, finite parameters) before the
  first row is written; what fails raises and leaves the table as it was.

Not here: how far a decoded row may be off (tests/unit/checkpoint/format/error_bound.py); which
codec is used when (checkpoint/planning/bits.py); the bytes around a section (segment.py).

Shapes: rows_ND  N rows of D floats; dst_MD  a table of M rows; ids_N  where the rows go; scale_N,
offset_N, lo_N, hi_N  parameters of a row; codes_NB  B bytes of packed codes a row; books_CK  C
codebooks of K entries; block_N  a row's codebook; bad_N  1 for an exception; raw_E  E exceptions;
positions_T  T of the N rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.errors import CorruptDataError, InvalidRequestError, unknown_name
from holdfast.kernels.codecs import floats, kmeans, logarithm, quantize
from holdfast.kernels.codecs.packing import packed_width
from holdfast.kernels.rows.ids import is_ascending
from holdfast.model.dtypes import array_dtype, from_float32, name_of, to_float32
from holdfast.model.schema import DTYPE_BYTES, FLOAT32, FLOAT64

Array = npt.NDArray[Any]
Parts = dict[str, Array]
Content = tuple[Parts, Array, Array]  # arrays by name, row numbers and bytes of the exceptions

_WIRE = struct.Struct("<BBHI")
_KIND_CODES = {
    "fp32": 1,
    "fp16": 2,
    "bf16": 3,
    "sym": 4,
    "asym": 5,
    "adaptive": 6,
    "log": 7,
    "kmeans": 8,
    "kmeans-block": 9,
    "kmeans-cluster": 10,
    "raw": 11,
}
_KINDS = {code: kind for kind, code in _KIND_CODES.items()}
_BITS = {"fp32": (32,), "fp16": (16,), "bf16": (16,), "raw": (64, 16)}
_SMALL_BITS = (8, 4, 3, 2)

# bins and ratio of the adaptive search, by bits. Check-N-Run gives 25 bins for 2 and 3 bits, 45 for
# 4, and ratios 0.5 and 0.2 for 2 and 3. The ratio for 4 bits is measured (make bench): on
# Gaussian, heavy-tailed and trained-like rows 0.2 has all of the gain (7.7 to 8.1 % less l2 loss),
# and 0.1 all but 0.01 %. For 8 bits a step of 1/45 of the range cuts off six of 255 levels and won
# nothing: no search, adaptive8 equals asym8, as the paper has it.
_SEARCH = {2: (25, 0.5), 3: (25, 0.2), 4: (45, 0.2), 8: (45, 0.0)}
_ITERATIONS = 15
_CLUSTER_ITERATIONS = 6
_BLOCK_ROWS = 256


@dataclass(frozen=True, slots=True)
class Codec:
    """How the rows of one column become bytes; ``parse_codec`` fills in the usual settings."""

    kind: str
    bits: int
    bins: int = 0
    ratio: float = 0.0
    block_rows: int = 0
    iterations: int = 0

    def __post_init__(self) -> None:
        has_blocks = self.kind in ("kmeans-block", "kmeans-cluster")
        counts = (self.bits, self.bins, self.block_rows, self.iterations)
        if (
            any(type(count) is not int for count in counts)  # -0.0 is equal to 0
            or self.kind not in _KIND_CODES
            or self.bits not in _BITS.get(self.kind, _SMALL_BITS)
            or not 0 <= self.block_rows < 1 << 32
            or has_blocks != (self.block_rows > 0)
            or not 0 <= self.bins < 1 << 16
            or not 0.0 <= self.ratio <= 1.0
            or not 0 <= self.iterations < 1 << 16
        ):
            raise InvalidRequestError("no such codec", **dataclasses.asdict(self))

    @property
    def name(self) -> str:
        """The word that ``parse_codec`` understands.

        >>> Codec("kmeans-block", 4, block_rows=64).name
        'kmeans4-block'
        """
        if self.kind in ("fp32", "fp16", "bf16"):
            return self.kind
        stem, _, blocks = self.kind.partition("-")
        return f"{stem}{self.bits}" + (f"-{blocks}" if blocks else "")

    @property
    def is_lossless(self) -> bool:
        """Whether every row returns bit for bit."""
        return self.kind in ("fp32", "raw")

    def wire(self) -> bytes:
        """The eight bytes that reading needs; the settings of a search are not among them."""
        return _WIRE.pack(_KIND_CODES[self.kind], self.bits, 0, self.block_rows)

    @classmethod
    def from_wire(cls, wire: bytes) -> Codec:
        """The codec of eight stored bytes, with the usual settings for what they leave out.

        Raises:
            CorruptDataError: no codec has these bytes.
        """
        try:
            code, bits, zero, block_rows = _WIRE.unpack(wire)
            if zero:
                raise ValueError("reserved bytes are set")
            return _with_defaults(_KINDS[code], bits, block_rows=block_rows)
        except (struct.error, KeyError, ValueError) as error:
            raise CorruptDataError("unknown codec", wire=bytes(wire[:16]).hex()) from error


def _with_defaults(kind: str, bits: int, *, block_rows: int) -> Codec:
    bins, ratio = _SEARCH.get(bits, (0, 0.0)) if kind == "adaptive" else (0, 0.0)
    iterations = _ITERATIONS if kind.startswith("kmeans") else 0
    return Codec(kind, bits, bins, ratio, block_rows, iterations)


def _known() -> dict[str, Codec]:
    codecs = (
        _with_defaults(kind, bits, block_rows=_BLOCK_ROWS if "-" in kind else 0)
        for kind in _KIND_CODES
        if kind != "raw"  # chosen by the type of a column, never by name
        for bits in _BITS.get(kind, _SMALL_BITS)
    )
    return {codec.name: codec for codec in codecs}


_CODECS = _known()
CODEC_NAMES: tuple[str, ...] = tuple(_CODECS)


def parse_codec(text: str | Codec) -> Codec:
    """The codec of a name, with the paper's settings; a codec passes through.

    >>> parse_codec("adaptive4").bins
    45

    Raises:
        InvalidRequestError: no codec has this name.
    """
    if isinstance(text, Codec):
        return text
    if text not in _CODECS:
        raise unknown_name("codec", text, CODEC_NAMES)
    return _CODECS[text]


def fit_codec(codec: Codec, dtype: str) -> Codec:
    """The codec that stores a column of a type where the user asked for ``codec``.

    Lossless is lossless for every type: ``fp32`` means "as the model holds it". Where a codec takes
    as many bits as the column itself (fp16 and bf16 for a column of 16 bits) it saves nothing, so
    the column is stored as it is, too.

    >>> [fit_codec(parse_codec(name), "bfloat16").name for name in ("fp32", "fp16", "asym8")]
    ['raw16', 'raw16', 'asym8']
    """
    bits = 8 * DTYPE_BYTES[dtype]
    if dtype == FLOAT32 or not (codec.is_lossless or codec.bits >= bits):
        return codec
    return Codec("raw", bits)


def _fits(codec: Codec, dtype: str) -> bool:
    """Whether a section of this codec can be of a column of this type."""
    if codec.is_lossless:
        return codec.bits == 8 * DTYPE_BYTES[dtype] and (codec.kind == "raw") == (dtype != FLOAT32)
    return codec.bits < 8 * DTYPE_BYTES[dtype]


def encode(codec: Codec, rows_ND: Array) -> npt.NDArray[np.uint8]:
    """Rows as one section of bytes, self-contained given the codec's wire bytes, N, D and type.

    Raises:
        InvalidRequestError: not a two-dimensional array of a column's type with at least one
            column, or of a type that the codec does not store (``fit_codec`` finds one that does).
    """
    dtype = name_of(rows_ND)
    if rows_ND.ndim != 2 or rows_ND.shape[1] == 0 or dtype is None or not _fits(codec, dtype):
        raise InvalidRequestError(
            "a codec needs rows of a type that it stores",
            codec=codec.name,
            shape=rows_ND.shape,
            dtype=str(rows_ND.dtype),
        )
    rows_ND = np.ascontiguousarray(rows_ND)
    if codec.is_lossless:
        return rows_ND.reshape(-1).view(np.uint8).copy()
    stored_ND, rows_ND = rows_ND, to_float32(rows_ND)
    count, width = rows_ND.shape
    layout = _parts(codec, count, width)
    body = _body_bytes(layout)
    section = np.empty(_aligned(body) + 4, np.uint8)
    section[body:] = 0
    parts = _split(section, layout)
    bad_N = np.zeros(count, np.uint8)
    if count:
        _encode_parts(codec, rows_ND, parts, bad_N)
    if dtype == FLOAT64:  # a number that float32 takes for zero shall not become one
        bad_N |= ((rows_ND == 0) & (stored_ND != 0)).any(axis=1)
    if not bad_N.any():
        return section
    raw_E = np.flatnonzero(bad_N)
    parts["codes"][raw_E] = 0
    return np.concatenate([section[:body], _tail(body, raw_E, stored_ND[raw_E].view(np.uint8))])


def decode_into(
    wire: bytes,
    section: Any,
    dst_MD: Array,
    ids_N: Array,
    *,
    rows: int,
    width: int,
    dtype: str = FLOAT32,
) -> None:
    """Decode a section and scatter it in one pass: dst_MD[ids_N[i]] becomes row i.

    An id of -1 skips its row. The caller has checked that the other ids lie in the table.
    ``dtype`` is the column's; ``dst_MD`` has the array type that belongs to it.

    Raises:
        CorruptDataError: the section cannot be what ``encode`` wrote for this many rows.
    """
    assert dst_MD.ndim == 2 and dst_MD.dtype == array_dtype(dtype) and dst_MD.flags.c_contiguous
    assert dst_MD.shape[1] == width and ids_N.shape == (rows,)
    codec = Codec.from_wire(wire)
    content = read_section(codec, section, rows=rows, width=width, dtype=dtype)
    _scatter(codec, content, dst_MD, np.ascontiguousarray(ids_N, dtype=np.int64), dtype)


def decode(wire: bytes, section: Any, *, rows: int, width: int, dtype: str = FLOAT32) -> Array:
    """The rows of a section, in an array of the column's type.

    Raises:
        CorruptDataError: the section cannot be what ``encode`` wrote for this many rows.
    """
    codec = Codec.from_wire(wire)
    # Read before the rows are allocated: a lying row count must not cost memory.
    content = read_section(codec, section, rows=rows, width=width, dtype=dtype)
    rows_ND = np.empty((rows, width), array_dtype(dtype))
    _scatter(codec, content, rows_ND, np.arange(rows, dtype=np.int64), dtype)
    return rows_ND


def take(
    wire: bytes, section: Any, positions_T: Array, *, rows: int, width: int, dtype: str = FLOAT32
) -> tuple[bytes, npt.NDArray[np.uint8]]:
    """The section of some rows of a section, and its wire bytes, which may be others.

    Nothing is decoded: codes, parameters and exceptions move as bytes, so the rows decode to the
    same bits as before. Positions are ascending, without repetition, at least one.

    Rows of ``kmeans-block`` lose their neighbours: they, like those of ``kmeans-cluster``, become
    rows of ``kmeans-cluster`` with the books that are still in use.

    Raises:
        CorruptDataError: the section cannot be what ``encode`` wrote for this many rows.
    """
    codec = Codec.from_wire(wire)
    parts, raw_E, raw_rows_EB = read_section(codec, section, rows=rows, width=width, dtype=dtype)
    positions_T = np.ascontiguousarray(positions_T, dtype=np.int64)
    assert positions_T.ndim == 1 and positions_T.size and is_ascending(positions_T)
    assert positions_T[-1] < rows
    whole: Parts = {}
    if codec.block_rows:
        codec, whole = _take_books(codec, parts, positions_T)
    at_E = np.searchsorted(positions_T, raw_E)
    is_taken_E = np.take(positions_T, at_E, mode="clip") == raw_E
    layout = _parts(codec, positions_T.size, width)
    body = _body_bytes(layout)
    tail = np.empty(0, np.uint8)
    if not codec.is_lossless:
        tail = _tail(body, at_E[is_taken_E], raw_rows_EB[is_taken_E])
    taken = np.empty(body + tail.size, np.uint8)
    taken[body:] = tail
    for name, part in _split(taken, layout).items():
        if name in whole:
            part[:] = whole[name]
        else:
            # Measured against kernels of our own (words, prefetch, memcpy a row): as fast at
            # every width and density, without the GIL; any other mode first copies the output.
            np.take(parts[name], positions_T, axis=0, out=part, mode="clip")
    return codec.wire(), taken


def _take_books(codec: Codec, parts: Parts, positions_T: Array) -> tuple[Codec, Parts]:
    """The codec, books and book numbers of some rows that share books."""
    block_T = parts["block"][positions_T] if "block" in parts else positions_T // codec.block_rows
    books_CK = parts["books"]
    is_used_C = np.zeros(books_CK.shape[0], bool)
    is_used_C[block_T] = True
    number_C = np.cumsum(is_used_C) - 1
    used, count = int(number_C[-1]) + 1, positions_T.size
    # The format derives the number of books: the largest block that leaves room for those in use.
    block_rows = count if used == 1 else (count - 1) // (used - 1)
    codec = _with_defaults("kmeans-cluster", codec.bits, block_rows=block_rows)
    room_CK = np.zeros((_block_count(codec, count), books_CK.shape[1]), np.uint16)
    room_CK[:used] = books_CK[is_used_C]
    return codec, {"books": room_CK, "block": number_C[block_T]}


def read_section(
    codec: Codec, section: Any, *, rows: int, width: int, dtype: str = FLOAT32
) -> Content:
    """The checked arrays of a section, the exceptions' row numbers, and their rows as bytes.

    Raises:
        CorruptDataError: the section cannot be what ``encode`` wrote for this many rows.
    """
    if rows < 0 or width < 1:
        raise CorruptDataError("a section of no such shape", rows=rows, width=width)
    if not _fits(codec, dtype):
        raise CorruptDataError("a codec that no column of this type has", codec=codec.name,
                               dtype=dtype)  # fmt: skip
    data = np.frombuffer(section, np.uint8)
    data.flags.writeable = False
    layout = _parts(codec, rows, width)
    body = _body_bytes(layout)
    end = body if codec.is_lossless else _aligned(body)
    facts: dict[str, Any] = {"codec": codec.name, "rows": rows, "width": width, "bytes": data.size}
    if data.size < end + (0 if codec.is_lossless else 4):
        raise CorruptDataError("section too short", **facts)
    raw_E = np.empty(0, np.int64)
    row_bytes = DTYPE_BYTES[dtype] * width
    raw_rows_EB = np.empty((0, row_bytes), np.uint8)
    if not codec.is_lossless:
        count = int.from_bytes(data[end : end + 4].tobytes(), "little")
        ids_end = end + 4 + 4 * count
        end = ids_end + row_bytes * count
        if count > rows or data.size < end:
            raise CorruptDataError("section lists too many exceptions", exceptions=count, **facts)
        raw_E = np.frombuffer(data[ids_end - 4 * count : ids_end].tobytes(), "<u4").astype(np.int64)
        if count and (raw_E[-1] >= rows or (np.diff(raw_E) <= 0).any()):
            raise CorruptDataError("exceptions out of order or range", **facts)
        raw_rows_EB = data[ids_end:end].reshape(count, row_bytes)
    if data.size != end:
        raise CorruptDataError("section too long", expected=end, **facts)
    if data.ctypes.data % 4 and not codec.is_lossless:
        # Kernels load words; a section inside a larger buffer may start anywhere.
        data = data[:body].copy()
    # Numba compiles a kernel again for read-only arrays: what is read always is.
    data.flags.writeable = False
    parts = _split(data, layout)
    if not _is_sound(codec, parts):
        raise CorruptDataError("section holds impossible parameters", **facts)
    return parts, raw_E, raw_rows_EB


def _parts(codec: Codec, rows: int, width: int) -> list[tuple[str, Any, tuple[int, ...]]]:
    """Name, type and shape of the arrays of a section, in order."""
    if codec.is_lossless:
        return [("codes", np.uint8, (rows, codec.bits // 8 * width))]
    if codec.kind in ("fp16", "bf16"):
        return [("codes", np.uint16, (rows, width))]
    codes = ("codes", np.uint8, (rows, packed_width(width, codec.bits)))
    if codec.kind == "sym":
        return [("scale", np.uint16, (rows,)), codes]
    if codec.kind == "log":
        return [("lo", np.uint16, (rows,)), ("hi", np.uint16, (rows,)), codes]
    if not codec.kind.startswith("kmeans"):
        return [("scale", np.uint16, (rows,)), ("offset", np.uint16, (rows,)), codes]
    blocks = _block_count(codec, rows)
    books = ("books", np.uint16, (blocks, 1 << codec.bits))
    if codec.kind != "kmeans-cluster":
        return [books, codes]
    return [books, ("block", np.uint16 if blocks <= 1 << 16 else np.uint32, (rows,)), codes]


def _block_count(codec: Codec, rows: int) -> int:
    return rows if codec.kind == "kmeans" else -(-rows // codec.block_rows)


def _part_bytes(dtype: Any, shape: tuple[int, ...]) -> int:
    size = int(np.dtype(dtype).itemsize)
    for length in shape:
        size *= length
    return size


def _body_bytes(layout: list[tuple[str, Any, tuple[int, ...]]]) -> int:
    return sum(_part_bytes(dtype, shape) for _, dtype, shape in layout)


def _aligned(size: int) -> int:
    return -(-size // 4) * 4


def _split(data: Array, layout: list[tuple[str, Any, tuple[int, ...]]]) -> Parts:
    """The arrays of a section, as views; each starts at a multiple of its own item."""
    sizes = [_part_bytes(dtype, shape) for _, dtype, shape in layout]
    starts = itertools.accumulate(sizes, initial=0)
    return {
        name: data[start : start + size].view(dtype).reshape(shape)
        for (name, dtype, shape), size, start in zip(layout, sizes, starts, strict=False)
    }


def _tail(body: int, raw_E: Array, raw_rows_EB: Array) -> Array:
    """What follows the arrays of a lossy section: padding, then the exceptions."""
    return np.concatenate(
        [
            np.zeros(_aligned(body) - body, np.uint8),
            np.array([raw_E.size], np.uint32).view(np.uint8),
            raw_E.astype(np.uint32).view(np.uint8),
            raw_rows_EB.reshape(-1),
        ]
    )


def _is_sound(codec: Codec, parts: Parts) -> bool:
    """Whether the parameters are such that a kernel stays in bounds and returns numbers."""
    halves = (parts[name] for name in ("scale", "offset", "books") if name in parts)
    if not all(floats.halves_are_finite(half.reshape(-1)) for half in halves):
        return False
    if "lo" in parts and parts["lo"].size:
        return bool(parts["hi"].max() < 0x7F80 and (parts["lo"] <= parts["hi"]).all())
    if "block" in parts and parts["block"].size:
        return bool(parts["block"].max() < parts["books"].shape[0])
    return True


def _encode_parts(codec: Codec, rows_ND: Array, parts: Parts, bad_N: Array) -> None:
    codes = parts["codes"]
    if codec.kind == "fp16":
        floats.encode_fp16(rows_ND.view(np.uint32), codes, bad_N)
    elif codec.kind == "bf16":
        floats.encode_bf16(rows_ND.view(np.uint32), codes, bad_N)
    elif codec.kind == "log":
        patterns_ND = rows_ND.view(np.uint32)
        logarithm.encode_log(patterns_ND, codec.bits, parts["lo"], parts["hi"], codes, bad_N)
    elif codec.kind.startswith("kmeans"):
        _encode_books(codec, rows_ND, parts, bad_N)
    else:
        search = (np.float32(max(codec.bins, 1)), int(codec.bins * codec.ratio + 1e-9))
        offset_N = parts.get("offset", np.empty(0, np.uint16))
        quantize.encode_uniform(
            rows_ND, codec.bits, codec.kind == "sym", search, parts["scale"], offset_N, codes, bad_N
        )


def _encode_books(codec: Codec, rows_ND: Array, parts: Parts, bad_N: Array) -> None:
    kmeans.mark_bad(rows_ND, bad_N)
    books_CK = parts["books"]
    blocks = books_CK.shape[0]
    if codec.kind == "kmeans-cluster":
        block_N = kmeans.cluster_rows(
            rows_ND, bad_N, clusters=blocks, iterations=_CLUSTER_ITERATIONS
        )
        parts["block"][:] = block_N
    else:
        block_N = _contiguous_blocks(codec, rows_ND.shape[0])
    order_N = np.argsort(block_N, kind="stable")
    start_C = np.searchsorted(block_N[order_N], np.arange(blocks + 1))
    kmeans.learn_books(rows_ND, bad_N, order_N, start_C, codec.iterations, books_CK)
    kmeans.encode_books(rows_ND, codec.bits, books_CK, block_N, parts["codes"])


def _contiguous_blocks(codec: Codec, rows: int) -> Array:
    size = 1 if codec.kind == "kmeans" else codec.block_rows
    return np.arange(rows, dtype=np.int64) // size


def _scatter(codec: Codec, content: Content, dst_MD: Array, ids_N: Array, dtype: str) -> None:
    parts, raw_E, raw_rows_EB = content
    if ids_N.size and (codec.is_lossless or dtype == FLOAT32):
        _decode_parts(codec, parts, dst_MD, ids_N)
    elif ids_N.size:
        values_ND = np.empty((ids_N.size, dst_MD.shape[1]), np.float32)
        _decode_parts(codec, parts, values_ND, np.arange(ids_N.size))
        wanted_N = ids_N >= 0
        dst_MD[ids_N[wanted_N]] = from_float32(values_ND[wanted_N], dtype)
    if raw_E.size:
        floats.scatter_bytes(raw_rows_EB, dst_MD.view(np.uint8), ids_N[raw_E])


def _decode_parts(codec: Codec, parts: Parts, dst_MD: Array, ids_N: Array) -> None:
    codes = parts["codes"]
    if codec.is_lossless:
        floats.scatter_bytes(codes, dst_MD.view(np.uint8), ids_N)
    elif codec.kind == "fp16":
        floats.decode_fp16(codes, dst_MD, ids_N)
    elif codec.kind == "bf16":
        floats.decode_bf16(codes, dst_MD.view(np.uint32), ids_N)
    elif codec.kind == "log":
        patterns_MD = dst_MD.view(np.uint32)
        logarithm.decode_log(codes, codec.bits, parts["lo"], parts["hi"], patterns_MD, ids_N)
    elif codec.kind.startswith("kmeans"):
        if "block" in parts:
            block_N = parts["block"].astype(np.int64)
        else:
            block_N = _contiguous_blocks(codec, ids_N.size)
        kmeans.decode_books(codes, codec.bits, parts["books"], block_N, dst_MD, ids_N)
    else:
        offset_N = parts.get("offset", np.empty(0, np.uint16))
        quantize.decode_uniform(codes, codec.bits, parts["scale"], offset_N, dst_MD, ids_N)
