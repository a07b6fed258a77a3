"""The bytes of a segment as kernels read them: header and deaths of thousands, without Python.

The same bytes and the same checks as ``parse_header`` of checkpoint/format/segment.py makes, but
for the header's own checksum: the caller has confirmed that of the whole segment.
``docs/format.md`` is normative for both.

Invariants:
- Bytes may be lies: nothing is read outside the segment, and no number is trusted before it is
  checked against the segment's length. The answer to nonsense is False.
- A header that ``parse_header`` refuses is refused here.

Not here: what is said of a damaged segment (checkpoint/format/segment.py), ids
(kernels/rows/ids.py).

Shapes: buffer_B  bytes with segments in them; head_H  a header's numbers; columns_CK  C columns
of a segment, K numbers each; ids_N  its rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.kernels.compiling import helper, kernel

# The numbers of a header, in this order; places count from the beginning of the buffer.
(
    ROWS,
    FIRST,
    LAST,
    COLUMNS,
    IDS_ENCODING,
    IDS_AT,
    IDS_BYTES,
    DEATHS_AT,
    DEATHS_BYTES,
) = range(9)
HEAD_NUMBERS = 9
# The numbers of a column.
WIRE, WIDTH, SECTION_AT, SECTION_BYTES, TYPE = range(5)
COLUMN_NUMBERS = 5

_MAGIC = int.from_bytes(b"HFSG", "little")
_PLAIN, _CHUNK, _TYPED_PLAIN, _TYPED_CHUNK = 1, 2, 3, 4
_TYPES = 4
_ALIGN = 8
_HEAD_BYTES, _COLUMN_BYTES, _CHUNK_BYTES, _SUM_BYTES = 48, 24, 32, 8
_FILTER_BLOCK_BYTES = 32
_DEATHS_HEAD_BYTES = 8
_SIZE_MAX = 1 << 40  # keeps sums of lengths far from wrapping around
_ID_MAX = 1 << 62


# Sizes of numbers. Not literals: Numba compiles a function again for each literal.
_1: Any = np.int64(1)
_2: Any = np.int64(2)
_4: Any = np.int64(4)
_8: Any = np.int64(8)


@kernel()
def number(buffer_B: Any, at: int, size: int) -> Any:
    """An unsigned number of up to 8 bytes; one that does not fit in 63 bits comes out negative."""
    value = np.uint64(0)
    for b in range(size):
        value |= np.uint64(buffer_B[at + b]) << np.uint64(8 * b)
    return np.int64(value)


@helper()
def _end(at: int, size: int) -> int:
    return at + size + -size % _ALIGN


@kernel()
def read_head(buffer_B: Any, at: int, size: int, head_H: Any, columns_CK: Any) -> bool:
    """Read the header of the segment at [at, at + size), which lies in the buffer.

    False where it is damaged, or has more columns than ``columns_CK`` has room for.
    """
    if size < _HEAD_BYTES or number(buffer_B, at, _4) != _MAGIC:
        return False
    format_ = number(buffer_B, at + 4, _2)
    count = number(buffer_B, at + 7, _1)
    rows = number(buffer_B, at + 8, _4)
    first, last = number(buffer_B, at + 16, _8), number(buffer_B, at + 24, _8)
    ids_bytes = number(buffer_B, at + 32, _8)
    if format_ < _PLAIN or format_ > _TYPED_CHUNK:
        return False
    is_chunk = format_ in (_CHUNK, _TYPED_CHUNK)
    is_typed = False
    if number(buffer_B, at + 12, _4) != 0 or rows == 0 or count == 0 or count > len(columns_CK):
        return False
    if first < 0 or last < first or last >= _ID_MAX or rows > last - first + 1:
        return False
    chunk_at = at + _HEAD_BYTES + count * _COLUMN_BYTES
    offset = chunk_at + _SUM_BYTES + (_CHUNK_BYTES if is_chunk else 0)
    if offset > at + size:
        return False
    filter_bytes = deaths_bytes = 0
    if is_chunk:
        filter_bytes = number(buffer_B, chunk_at, _8)
        deaths_bytes = number(buffer_B, chunk_at + 16, _8)
        if filter_bytes % _FILTER_BLOCK_BYTES != 0 or filter_bytes + deaths_bytes == 0:
            return False
    for part in (filter_bytes, ids_bytes, deaths_bytes):
        if part < 0 or part > _SIZE_MAX:
            return False
    head_H[ROWS], head_H[FIRST], head_H[LAST], head_H[COLUMNS] = rows, first, last, count
    head_H[IDS_ENCODING] = number(buffer_B, at + 6, _1)
    offset = _end(offset, filter_bytes)
    head_H[IDS_AT], head_H[IDS_BYTES] = offset, ids_bytes
    offset = _end(offset, ids_bytes)
    head_H[DEATHS_AT], head_H[DEATHS_BYTES] = offset, deaths_bytes
    offset = _end(offset, deaths_bytes)
    for c in range(count):
        column_at = at + _HEAD_BYTES + c * _COLUMN_BYTES
        width = number(buffer_B, column_at + 8, _4)
        section_bytes = number(buffer_B, column_at + 16, _8)
        type_ = number(buffer_B, column_at + 12, _4)
        if type_ >= _TYPES or width == 0:
            return False
        is_typed |= type_ != 0
        if section_bytes < rows or section_bytes > _SIZE_MAX:
            return False
        columns_CK[c, WIRE] = number(buffer_B, column_at, _8)
        columns_CK[c, WIDTH] = width
        columns_CK[c, SECTION_AT] = offset
        columns_CK[c, SECTION_BYTES] = section_bytes
        columns_CK[c, TYPE] = type_
        offset = _end(offset, section_bytes)
    return offset == at + size and is_typed == (format_ >= _TYPED_PLAIN)


@kernel()
def mask_dead(buffer_B: Any, head_H: Any, step: int, through: int, ids_N: Any) -> int:
    """Set the ids of rows that a segment with deaths calls dead at a step to -1; how many those
    are, or -1 for nonsense. Deaths after ``through`` do not count."""
    at, size = head_H[DEATHS_AT], head_H[DEATHS_BYTES]
    rows = ids_N.size
    if size < _DEATHS_HEAD_BYTES:
        return -1
    count = number(buffer_B, at, _4)
    if number(buffer_B, at + 4, _4) != 0 or count == 0 or count > rows:
        return -1
    item = 1 if count <= 1 << 8 else 2 if count <= 1 << 16 else 4
    at += _DEATHS_HEAD_BYTES
    if size != _DEATHS_HEAD_BYTES + 8 * count + item * rows:
        return -1
    # Steps ascend: those that are dead come first.
    dead = 0
    earlier = -1
    for d in range(count):
        died = number(buffer_B, at + 8 * d, _8)
        if died <= earlier:
            return -1
        earlier = died
        if died <= step and died <= through:
            dead += 1
    at += 8 * count
    masked = 0
    for i in range(rows):
        index = number(buffer_B, at + i * item, item) if item > 1 else np.int64(buffer_B[at + i])
        if index >= count:
            return -1
        if index < dead and ids_N[i] >= 0:
            ids_N[i] = -1
            masked += 1
    return masked
