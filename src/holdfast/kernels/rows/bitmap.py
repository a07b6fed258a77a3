"""Sets of rows, one bit a row: what the tracker marks at every step and a selection reads.

Row ``i`` is bit ``i % 64`` of word ``i // 64``; a word is a little-endian uint64.

Invariants:
- Bits past the last row are never set by a kernel that is told the number of rows.
- No id and no range, however wrong, makes a kernel touch memory outside its words. ``mark_sets``
  alone trusts its caller, for the addresses.

Not here: locking. Two threads that mark the same words at once may lose a bit; callers take turns.

Shapes: words_W  W = ceil(rows / 64) words; ids_N  N row ids; bounds_C  the C - 1 parts between.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import intrinsic

from holdfast.kernels.compiling import helper, kernel
from holdfast.kernels.pointers import array_at

Words = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]

_ONE = np.uint64(1)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_LOW6 = np.uint64(63)
_SIX = np.uint64(6)


def _popcount(typingctx: Any, word: Any) -> Any:
    """The number of set bits of a uint64: one instruction."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), codegen


def _trailing_zeros(typingctx: Any, word: Any) -> Any:
    """The index of the lowest set bit of a uint64, 64 if there is none: one instruction."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], context.get_constant(types.boolean, False))

    return types.uint64(types.uint64), codegen


popcount: Any = intrinsic(_popcount)
trailing_zeros: Any = intrinsic(_trailing_zeros)


def new(rows: int) -> Words:
    """An empty set over ``rows`` rows.

    >>> new(65).size
    2
    """
    return np.zeros(-(-rows // 64), np.uint64)


@kernel()
def mark(words_W: Words, ids_N: Ids, rows: int) -> None:
    """Set the bits of ids; an id outside [0, rows) is ignored."""
    end = np.uint64(max(0, min(rows, words_W.size * 64)))
    for i in range(ids_N.size):
        # A negative id becomes a huge unsigned one: one comparison serves both ends.
        row = np.uint64(np.int64(ids_N[i]))
        if row < end:
            words_W[row >> _SIX] |= _ONE << (row & _LOW6)


@kernel()
def mark_sets(words_at_T: Any, rows_T: Any, ids_at_T: Any, counts_T: Any) -> None:
    """``mark`` for T sets in one call, by the addresses of their words and of int64 ids."""
    for t in range(rows_T.size):
        words_W = array_at(words_at_T[t], ((rows_T[t] + 63) // 64,), np.uint64)
        ids_N = array_at(ids_at_T[t], (counts_T[t],), np.int64)
        mark(words_W, ids_N, rows_T[t])


@helper()
def _word_mask(word: int, lo: int, hi: int) -> np.uint64:
    """The bits of one word that belong to rows in [lo, hi)."""
    start = word * 64
    mask = _ALL
    if lo > start:
        if lo - start >= 64:
            return np.uint64(0)
        mask <<= np.uint64(lo - start)
    if hi < start + 64:
        if hi <= start:
            return np.uint64(0)
        mask &= _ALL >> np.uint64(start + 64 - hi)
    return mask


@kernel()
def count(words_W: Words) -> int:
    """How many rows are in the set."""
    total = np.uint64(0)
    for w in range(words_W.size):
        total += popcount(words_W[w])
    return int(np.int64(total))


@kernel()
def count_range(words_W: Words, lo: int, hi: int) -> int:
    """How many rows of [lo, hi) are in the set."""
    lo = max(lo, 0)
    hi = min(hi, words_W.size * 64)
    if lo >= hi:
        return 0
    first = lo >> 6
    last = (hi - 1) >> 6
    if first == last:
        return int(np.int64(popcount(words_W[first] & _word_mask(first, lo, hi))))
    total = popcount(words_W[first] & _word_mask(first, lo, hi))
    for w in range(first + 1, last):
        total += popcount(words_W[w])
    total += popcount(words_W[last] & _word_mask(last, lo, hi))
    return int(np.int64(total))


@kernel()
def ids(words_W: Words, lo: int, hi: int) -> Ids:
    """The rows of [lo, hi) that are in the set, ascending."""
    lo = max(lo, 0)
    hi = min(hi, words_W.size * 64)
    ids_N = np.empty(count_range(words_W, lo, hi), np.int64)
    if ids_N.size == 0:
        return ids_N
    at = 0
    for w in range(lo >> 6, ((hi - 1) >> 6) + 1):
        word = words_W[w]
        if lo > w * 64 or hi < w * 64 + 64:
            word &= _word_mask(w, lo, hi)
        if word == _ALL:
            for bit in range(64):
                ids_N[at + bit] = w * 64 + bit
            at += 64
            continue
        while word != np.uint64(0):
            ids_N[at] = w * 64 + np.int64(trailing_zeros(word))
            at += 1
            word &= word - _ONE
    return ids_N


@kernel()
def split(words_W: Words, rows_max: int) -> Ids:
    """Row bounds that cut the set into parts of ``rows_max`` rows each, the last one smaller.

    Part ``i`` is the rows of the set in [bounds[i], bounds[i + 1]); an empty set has no part and a
    single bound. Nothing the size of the set is allocated.
    """
    if rows_max < 1:
        raise ValueError("a part holds at least one row")
    parts = (count(words_W) + rows_max - 1) // rows_max
    bounds_C = np.zeros(parts + 1, np.int64)
    part = 1
    room = rows_max
    for w in range(words_W.size):
        word = words_W[w]
        left = int(np.int64(popcount(word)))
        while left > room:
            # The part is full inside this word: it ends where the next set bit starts.
            for _ in range(room):
                word &= word - _ONE
            left -= room
            bounds_C[part] = w * 64 + np.int64(trailing_zeros(word))
            part += 1
            room = rows_max
        room -= left
    if parts > 0:
        bounds_C[parts] = words_W.size * 64
    return bounds_C


@kernel()
def union_into(dst_W: Words, src_W: Words) -> None:
    """Add every row of ``src`` to ``dst``."""
    if dst_W.size != src_W.size:
        raise ValueError("the two sets are over different numbers of rows")
    for w in range(dst_W.size):
        dst_W[w] |= src_W[w]


@kernel()
def is_set(words_W: Words, ids_N: Ids) -> npt.NDArray[np.bool_]:
    """Whether each id is in the set; an id past the words is not."""
    out_N = np.empty(ids_N.size, np.bool_)
    end = np.uint64(words_W.size * 64)
    for i in range(ids_N.size):
        row = np.uint64(np.int64(ids_N[i]))
        out_N[i] = row < end and (words_W[row >> _SIX] >> (row & _LOW6)) & _ONE != np.uint64(0)
    return out_N
