"""Ascending row ids as bytes: a range, a bitmap, or gaps, bit-packed.

A range needs no bytes, a bitmap has a bit for every row from the first to the last. As gaps, N
ascending ids are a first id and N - 1 gaps. The gaps, less one, are packed in blocks of 128: one
byte with the block's bit width, then the gaps at that width, lowest bit first, the block filled up
with zero bits to a whole byte.

Invariants:
- A decoder is given hostile bytes: it never reads past them, writes past its output, or wraps
  around; it answers False instead.

Not here: which encoding to use, and the errors (checkpoint/format/ids.py).

Shapes: ids_N  N row ids; data_B  B bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from holdfast.kernels.compiling import helper, kernel
from holdfast.kernels.rows.bitmap import popcount, trailing_zeros

RANGE, BITMAP, DELTA = 0, 1, 2  # the encodings, as stored
BLOCK = 128
# A partly used byte and one more gap must fit into the 64 bits of the packing register.
WIDTH_MAX = 56
ID_END = 1 << WIDTH_MAX

Ids = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_EIGHT = np.uint64(8)
_BYTE = np.uint64(0xFF)


@kernel()
def is_ascending(ids_N: Ids) -> bool:
    """Whether ids are strictly ascending and inside [0, 2**56)."""
    if ids_N.size == 0:
        return True
    if ids_N[0] < 0 or ids_N[-1] >= ID_END:
        return False
    bad = 0
    for i in range(1, ids_N.size):
        bad |= ids_N[i] <= ids_N[i - 1]
    return bad == 0


@helper()
def _width(ids_N: Ids, lo: int, hi: int) -> int:
    """Bits for the largest gap, less one, that leads to the ids at [lo, hi)."""
    seen = _ZERO
    for i in range(lo, hi):
        seen |= np.uint64(ids_N[i] - ids_N[i - 1] - 1)
    width = 0
    while seen != _ZERO:
        seen >>= _ONE
        width += 1
    return width


@kernel()
def delta_bytes(ids_N: Ids) -> int:
    """How many bytes ``delta_encode`` writes for ascending ids."""
    total = 0
    for lo in range(1, ids_N.size, BLOCK):
        hi = min(lo + BLOCK, ids_N.size)
        total += 1 + ((hi - lo) * _width(ids_N, lo, hi) + 7) // 8
    return total


@kernel()
def delta_encode(ids_N: Ids, data_B: Bytes) -> None:
    """Pack the gaps of ascending ids into ``delta_bytes(ids)`` bytes."""
    at = 0
    for lo in range(1, ids_N.size, BLOCK):
        hi = min(lo + BLOCK, ids_N.size)
        width = _width(ids_N, lo, hi)
        if at + 1 + ((hi - lo) * width + 7) // 8 > data_B.size:
            raise ValueError("the output is too small for the packed ids")
        data_B[at] = width
        at += 1
        register = _ZERO
        bits = 0
        for i in range(lo, hi):
            register |= np.uint64(ids_N[i] - ids_N[i - 1] - 1) << np.uint64(bits)
            bits += width
            while bits >= 8:
                data_B[at] = np.uint8(register & _BYTE)
                at += 1
                register >>= _EIGHT
                bits -= 8
        if bits > 0:
            data_B[at] = np.uint8(register & _BYTE)
            at += 1


@helper()
def first_from(ids_N: Ids, lo: int, hi: int, row: int) -> int:
    """The first place in [lo, hi) of ascending ids that has this row or a later one, or ``hi``."""
    while lo < hi:
        middle = (lo + hi) >> 1
        if ids_N[middle] < row:
            lo = middle + 1
        else:
            hi = middle
    return lo


@kernel()
def delta_fits(data_B: Bytes, count: int) -> bool:
    """Whether the block widths account for every byte of ``count`` packed ids, and for no other.

    Walks only the width bytes, so that a lying count is caught before its ids are allocated.
    """
    at = 0
    for lo in range(1, count, BLOCK):
        if at >= data_B.size or data_B[at] > WIDTH_MAX:
            return False
        gaps = min(BLOCK, count - lo)
        at += 1 + (gaps * int(data_B[at]) + 7) // 8
    return at == data_B.size


@helper()
def delta_decode(data_B: Bytes, first: int, last: int, ids_N: Ids) -> bool:
    """Unpack ids into ``ids_N``; False when the bytes are not N ids from ``first`` to ``last``."""
    if ids_N.size == 0 or not delta_fits(data_B, ids_N.size):
        return False
    if first < 0 or last >= ID_END:
        return False
    ids_N[0] = first
    row = first
    at = 0
    for lo in range(1, ids_N.size, BLOCK):
        hi = min(lo + BLOCK, ids_N.size)
        width = int(data_B[at])
        at += 1
        mask = (_ONE << np.uint64(width)) - _ONE
        register = _ZERO
        bits = 0
        for i in range(lo, hi):
            while bits < width:
                register |= np.uint64(data_B[at]) << np.uint64(bits)
                at += 1
                bits += 8
            row += int(np.int64(register & mask)) + 1
            # Stopping at the end of the range also keeps the sum far from wrapping around.
            if row > last:
                return False
            ids_N[i] = row
            register >>= np.uint64(width)
            bits -= width
        if register != _ZERO:
            return False
    return row == last


@helper()
def _unpack_bitmap(data_B: Bytes, first: int, last: int, ids_N: Ids) -> bool:
    if data_B.size != (last - first + 8) // 8:
        return False
    at = 0
    for b in range(data_B.size):
        bits = np.uint64(data_B[b])
        if at + np.int64(popcount(bits)) > ids_N.size:
            return False
        while bits != _ZERO:
            row = first + b * 8 + np.int64(trailing_zeros(bits))
            if row > last:
                return False
            ids_N[at] = row
            at += 1
            bits &= bits - _ONE
    return bool(at == ids_N.size and ids_N[0] == first and ids_N[at - 1] == last)


@kernel()
def unpack(encoding: int, data_B: Bytes, first: int, last: int, ids_N: Ids) -> bool:
    """Ids of any encoding into ``ids_N``; False when the bytes are not N ids from first to last."""
    if ids_N.size == 0 or first < 0 or last >= ID_END or ids_N.size > last - first + 1:
        return False
    if encoding == RANGE:
        if data_B.size != 0 or ids_N.size != last - first + 1:
            return False
        for i in range(ids_N.size):
            ids_N[i] = first + i
        return True
    if encoding == BITMAP:
        return bool(_unpack_bitmap(data_B, first, last, ids_N))
    if encoding == DELTA:
        return bool(delta_decode(data_B, first, last, ids_N))
    return False
