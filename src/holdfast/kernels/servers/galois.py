"""Arithmetic of bytes in GF(2^8), on whole rows: what parity rows are made of.

Addition is XOR, multiplication is that of polynomials modulo x^8 + x^4 + x^3 + x^2 + 1 (0x11d), as
in most Reed-Solomon codes for storage. A row is multiplied byte by byte by one coefficient. That is
done on words of four bytes: bit b of each byte chooses coefficient * 2^b, and the eight choices are
XORed. No byte is looked up alone, so that the loops run on vectors.

Invariants:
- Rows are bits: NaNs keep their payloads. Multiplication is exact and distributes over XOR, so
  parity changes by coefficient * difference, whatever happened before.
- Shapes and slots are checked before anything changes: a bad one raises (ValueError, IndexError)
  and changes nothing.

Not here: which coefficients (cluster/code.py); what a difference is (shard.py).

Shapes: parities_QW  Q parity rows of W words (float32 or uint32); slots_N  which of them; diffs_NW
N differences; coefficients_N, coefficients_K  bytes; out_NW  a combination of K arrays like it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.kernels.compiling import as_slots, helper, kernel, read_only
from holdfast.kernels.pointers import array_at
from holdfast.kernels.rows.gather import check_ids, prefetch

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[Any]
Slots = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]

POLYNOMIAL = 0x11D
_AHEAD = 8
# Words of the result that stay in the first-level cache while every source is added.
_TILE = 2048
_LOW = np.uint32(0x01010101)


def _tables() -> tuple[Bytes, Bytes, Words]:
    """Products and inverses of all bytes; each byte times 2^b, in all bytes of a word."""
    powers = np.zeros(510, np.int64)
    logs = np.zeros(256, np.int64)
    value = 1
    for exponent in range(255):
        powers[exponent] = powers[exponent + 255] = value
        logs[value] = exponent
        value = value << 1 ^ (POLYNOMIAL if value & 0x80 else 0)
    products = powers[logs[:, None] + logs].astype(np.uint8)
    products[0, :] = products[:, 0] = 0
    inverses = powers[255 - logs].astype(np.uint8)
    inverses[0] = 0
    doubled = products[:, 1 << np.arange(8)].astype(np.uint32) * _LOW
    return products, inverses, doubled.astype(np.uint32)


_PRODUCTS, _INVERSES, _DOUBLED = _tables()


def multiply(left: Any, right: Any) -> Bytes:
    """The product of two matrices of bytes.

    >>> multiply([[2, 3]], [[0x80], [1]])
    array([[30]], dtype=uint8)
    """
    left, right = np.asarray(left, np.uint8), np.asarray(right, np.uint8)
    terms = _PRODUCTS[left[:, :, None], right[None, :, :]]
    product: Bytes = np.bitwise_xor.reduce(terms, axis=1)
    return product


def divide(left: Any, right: Any) -> Bytes:
    """Bytes divided by bytes, one by one.

    >>> divide(30, [1, 2, 30])
    array([30, 15,  1], dtype=uint8)
    """
    divisors = np.asarray(right, np.uint8)
    if not divisors.all():
        raise ZeroDivisionError("division by zero in GF(2^8)")
    quotients: Bytes = _PRODUCTS[np.asarray(left, np.uint8), _INVERSES[divisors]]
    return quotients


def invert(matrix: Any) -> Bytes:
    """The inverse of a square matrix of bytes.

    >>> multiply(invert([[1, 1], [1, 2]]), [[1, 1], [1, 2]])
    array([[1, 0],
           [0, 1]], dtype=uint8)
    """
    work = np.array(matrix, np.uint8)
    size = len(work)
    if work.shape != (size, size):
        raise ValueError("only a square matrix has an inverse")
    work = np.concatenate([work, np.eye(size, dtype=np.uint8)], axis=1)
    for column in range(size):
        pivots = np.flatnonzero(work[column:, column]) + column
        if pivots.size == 0:
            raise ValueError("the matrix has no inverse")
        work[[column, pivots[0]]] = work[[pivots[0], column]]
        work[column] = _PRODUCTS[_INVERSES[work[column, column]], work[column]]
        factors = work[:, column].copy()
        factors[column] = 0
        work ^= _PRODUCTS[factors[:, None], work[column][None, :]]
    return work[:, size:]


@helper(forceinline=True)
def _times(word: np.uint32, d0: np.uint32, d1: np.uint32, d2: np.uint32, d3: np.uint32,
           d4: np.uint32, d5: np.uint32, d6: np.uint32, d7: np.uint32) -> np.uint32:  # fmt: skip
    """Four bytes times one coefficient, given as itself times 2^0 to 2^7 in all bytes of a word:
    a bit, spread over its byte, lets one of them through."""
    b0 = word & _LOW
    b1 = (word >> np.uint32(1)) & _LOW
    b2 = (word >> np.uint32(2)) & _LOW
    b3 = (word >> np.uint32(3)) & _LOW
    b4 = (word >> np.uint32(4)) & _LOW
    b5 = (word >> np.uint32(5)) & _LOW
    b6 = (word >> np.uint32(6)) & _LOW
    b7 = (word >> np.uint32(7)) & _LOW
    e = np.uint32(8)
    low = (((b0 << e) - b0) & d0) ^ (((b1 << e) - b1) & d1) ^ (((b2 << e) - b2) & d2)
    middle = (((b3 << e) - b3) & d3) ^ (((b4 << e) - b4) & d4) ^ (((b5 << e) - b5) & d5)
    return low ^ middle ^ (((b6 << e) - b6) & d6) ^ (((b7 << e) - b7) & d7)


@kernel()
def _fold(parities_QW: Words, slots_N: Slots, diffs_NW: Words, coefficients_N: Bytes,
          doubled_CB: Words) -> None:  # fmt: skip
    rows, width = diffs_NW.shape
    if slots_N.size != rows or coefficients_N.size != rows or parities_QW.shape[1] != width:
        raise ValueError("differences, slots, coefficients and parities do not belong together")
    if not check_ids(slots_N, parities_QW.shape[0]):
        raise IndexError("a slot is outside the parity rows")
    for i in range(rows):
        if i + _AHEAD < rows:
            prefetch(parities_QW, slots_N[i + _AHEAD])
        row = np.uint64(slots_N[i])
        c = coefficients_N[i]
        if c == 1:
            for w in range(width):
                parities_QW[row, w] ^= diffs_NW[i, w]
        elif c != 0:
            d0, d1, d2, d3 = doubled_CB[c, 0], doubled_CB[c, 1], doubled_CB[c, 2], doubled_CB[c, 3]
            d4, d5, d6, d7 = doubled_CB[c, 4], doubled_CB[c, 5], doubled_CB[c, 6], doubled_CB[c, 7]
            for w in range(width):
                parities_QW[row, w] ^= _times(diffs_NW[i, w], d0, d1, d2, d3, d4, d5, d6, d7)


def fold(parities_QW: Rows, slots_N: Slots, diffs_NW: Rows, coefficients_N: Bytes) -> None:
    """Add coefficient * difference to parity rows, in place; a slot may come several times.

    >>> parities = np.zeros((2, 1), np.uint32)
    >>> fold(parities, np.array([1, 1]), np.array([[7], [0x80]], np.uint32), np.array([1, 2], "u1"))
    >>> parities.ravel().tolist() == [0, 7 ^ 0x1d]
    True
    """
    _fold(
        parities_QW.view(np.uint32), as_slots(slots_N), read_only(diffs_NW).view(np.uint32),
        read_only(coefficients_N), _DOUBLED,
    )  # fmt: skip


@kernel()
def _add_rows(sums_QW: Floats, slots_N: Slots, rows_NW: Floats) -> None:
    rows, width = rows_NW.shape
    if slots_N.size != rows or sums_QW.shape[1] != width:
        raise ValueError("rows, slots and sums do not belong together")
    if not check_ids(slots_N, sums_QW.shape[0]):
        raise IndexError("a slot is outside the parity rows")
    for i in range(rows):
        if i + _AHEAD < rows:
            prefetch(sums_QW, slots_N[i + _AHEAD])
        row = np.uint64(slots_N[i])
        for w in range(width):
            sums_QW[row, w] += rows_NW[i, w]


def add(sums_QW: Floats, slots_N: Slots, rows_NW: Floats) -> None:
    """Add rows of numbers to others, in place, each sum rounded as float32 are; a slot may come
    several times. No Galois field: this is to the float sum what ``fold`` is to other codes."""
    _add_rows(sums_QW, as_slots(slots_N), read_only(rows_NW).view(np.float32))


@helper()
def _add(out_T: Words, source_T: Words, c: int, doubled_CB: Words) -> None:
    """Add coefficient * source to a piece of the result. Loops from 0: the others stay scalar."""
    if c == 1:
        for t in range(out_T.size):
            out_T[t] ^= source_T[t]
    elif c != 0:
        d0, d1, d2, d3 = doubled_CB[c, 0], doubled_CB[c, 1], doubled_CB[c, 2], doubled_CB[c, 3]
        d4, d5, d6, d7 = doubled_CB[c, 4], doubled_CB[c, 5], doubled_CB[c, 6], doubled_CB[c, 7]
        for t in range(out_T.size):
            out_T[t] ^= _times(source_T[t], d0, d1, d2, d3, d4, d5, d6, d7)


@kernel()
def _combine(addresses_K: Slots, coefficients_K: Bytes, out_T: Words, doubled_CB: Words) -> None:
    for at in range(0, out_T.size, _TILE):
        end = min(at + _TILE, out_T.size)
        out_T[at:end] = 0
        for k in range(addresses_K.size):
            source_T = array_at(addresses_K[k], (out_T.size,), np.uint32)
            _add(out_T[at:end], source_T[at:end], coefficients_K[k], doubled_CB)


def combine(
    sources: Sequence[Rows] | Rows, coefficients_K: Any, out_NW: Rows | None = None
) -> Words:
    """The sum of coefficient * source over K arrays of the same shape (or one array of them), as
    words; in one pass over each.

    >>> combine([np.array([[5]], np.uint32), np.array([[3]], np.uint32)], [1, 1])
    array([[6]], dtype=uint32)
    """
    coefficients_K = np.ascontiguousarray(coefficients_K, np.uint8)
    if len(sources) != coefficients_K.size or len(sources) == 0:
        raise ValueError("there is not one coefficient for each source")
    # Kept until the end: the kernel knows their addresses alone.
    held = [np.ascontiguousarray(source).view(np.uint32) for source in sources]
    if out_NW is None:
        out_NW = np.empty(held[0].shape, np.uint32)
    words_NW: Words = out_NW.view(np.uint32)
    if any(source.shape != words_NW.shape for source in held):
        raise ValueError("sources and result have not the same shape")
    if not words_NW.flags.c_contiguous or not words_NW.flags.writeable:
        raise ValueError("the result is not one piece of writable memory")
    if any(np.may_share_memory(source, words_NW) for source in held):
        raise ValueError("the result shares memory with a source")
    addresses_K = np.array([source.ctypes.data for source in held], np.int64)
    _combine(addresses_K, coefficients_K, words_NW.reshape(-1), _DOUBLED)
    return words_NW
