"""Rows whose places repeat: copied by those who give them, combined by the one who lost its own.

Of every ``every`` slots those at some offsets are wanted, over and over. The wanted rows are
numbered through by their rank: rank r is slot ``r // U * every + at_U[r % U]``.

    at_U = [0, 2], every = 3:  slots 0 2 | 3 5 | 6 8 ...  are ranks 0 1 | 2 3 | 4 5 ...

What is made of them repeats too: slot t of a period is made of K rows, each of one of S parts that
were given, the one at rank ``at_TK`` of the same period there, times a factor in GF(2^8).

Invariants:
- A record that waits is copied as parity knows it, from the waiting list (see shard.py).
- Rows that are not in a part, behind an end, are zeros.
- Shapes, slots and ranks are checked before anything is written: a bad one raises (ValueError,
  IndexError).

Not here: which rows are wanted and why (cluster/slab.py).

Shapes: records_MW  M records, W floats; at_U  U offsets; waiting_at_M, before_CW  the waiting list;
out_NW  N rows; parts_TK, at_TK, factors_TK  what each of T slots is made of; addresses_S  where
parts begin; ranks_S3  of each the first rank, how many, and U.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.kernels.compiling import as_slots, helper, kernel
from holdfast.kernels.pointers import array_at
from holdfast.kernels.servers.galois import _DOUBLED, _times

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Places = npt.NDArray[np.int32]
Slots = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]

_NONE = np.empty((0, 0), np.float32)
_NOWHERE = np.empty(0, np.int32)


@kernel()
def _copy(records_MW: Floats, waiting_at_M: Places, before_CW: Floats, first: int, every: int,
          at_U: Slots, out_NW: Floats) -> None:  # fmt: skip
    rows, width = out_NW.shape
    if rows == 0:
        return
    if at_U.size == 0 or first < 0 or records_MW.shape[1] != width:
        raise ValueError("the output has not the shape of the wanted rows")
    has_waiting = waiting_at_M.size > 0
    if has_waiting and (waiting_at_M.size != records_MW.shape[0] or before_CW.shape[1] != width):
        raise ValueError("the waiting list has not the shape of the records")
    earlier = -1
    for u in range(at_U.size):
        if at_U[u] <= earlier or at_U[u] >= every:
            raise ValueError("offsets do not ascend within what repeats")
        earlier = at_U[u]
    last = first + rows - 1
    if last // at_U.size * every + at_U[last % at_U.size] >= records_MW.shape[0]:
        raise IndexError("a wanted row is outside the records")
    u = first % at_U.size
    start = first // at_U.size * every
    for i in range(rows):
        row = np.uint64(start + at_U[u])
        u += 1
        if u == at_U.size:
            u = 0
            start += every
        place = -1
        if has_waiting:
            place = waiting_at_M[row]
        if place < 0:
            for w in range(width):
                out_NW[i, w] = records_MW[row, w]
        else:
            for w in range(width):
                out_NW[i, w] = before_CW[place, w]


def copy(records_MW: Floats, first: int, every: int, at_U: Slots, out_NW: Floats) -> None:
    """Copy wanted rows, from a rank on, until the output is full.

    >>> out = np.empty((3, 1), np.float32)
    >>> copy(np.arange(9, dtype=np.float32)[:, None], 1, 3, np.array([0, 2]), out)
    >>> out.ravel().tolist()
    [2.0, 3.0, 5.0]
    """
    if _is_one_piece(records_MW, first, every, at_U, out_NW):
        np.copyto(out_NW, records_MW[first : first + len(out_NW)])
    else:
        _copy(records_MW, _NOWHERE, _NONE, first, every, as_slots(at_U), out_NW)


def copy_known(records_MW: Floats, waiting_at_M: Places, before_CW: Floats, first: int, every: int,
               at_U: Slots, out_NW: Floats) -> None:  # fmt: skip
    """The same, of records as parity knows them: as before where they wait."""
    if _is_one_piece(records_MW, first, every, at_U, out_NW):
        these = slice(first, first + len(out_NW))
        np.copyto(out_NW, records_MW[these])
        waiting_N = np.flatnonzero(waiting_at_M[these] >= 0)
        out_NW[waiting_N] = before_CW[waiting_at_M[first + waiting_N]]
    else:
        _copy(records_MW, waiting_at_M, before_CW, first, every, as_slots(at_U), out_NW)


def _is_one_piece(records_MW: Floats, first: int, every: int, at_U: Slots, out_NW: Floats) -> bool:
    """Whether every row is wanted: then memory is copied at once, nearly twice as fast."""
    return at_U.size == every and first >= 0 and first + len(out_NW) <= len(records_MW)


@helper(forceinline=True)
def _row(place: int, width: int) -> Any:
    return array_at(place, (width,), np.uint32)


@helper()
def _xor_four(out_W: Words, places_K: Slots) -> None:
    """Four rows at once, the usual stripe: the result is written once, and not read."""
    width = out_W.size
    a_W, b_W = _row(places_K[0], width), _row(places_K[1], width)
    c_W, d_W = _row(places_K[2], width), _row(places_K[3], width)
    for w in range(width):
        out_W[w] = a_W[w] ^ b_W[w] ^ c_W[w] ^ d_W[w]


@helper()
def _sum(out_W: Words, places_K: Slots, factors_K: Bytes, doubled_CB: Words) -> None:
    """Rows at some places, times their factors."""
    width = out_W.size
    for w in range(width):
        out_W[w] = 0
    for k in range(places_K.size):
        row_W = _row(places_K[k], width)
        c = factors_K[k]
        if c == 1:
            for w in range(width):
                out_W[w] ^= row_W[w]
        else:
            e0, e1, e2, e3 = doubled_CB[c, 0], doubled_CB[c, 1], doubled_CB[c, 2], doubled_CB[c, 3]
            e4, e5, e6, e7 = doubled_CB[c, 4], doubled_CB[c, 5], doubled_CB[c, 6], doubled_CB[c, 7]
            for w in range(width):
                out_W[w] ^= _times(row_W[w], e0, e1, e2, e3, e4, e5, e6, e7)


@kernel()
def _combine(out_NW: Words, first: int, parts_TK: Slots, at_TK: Slots, factors_TK: Bytes,
             addresses_S: Slots, ranks_S3: Slots, doubled_CB: Words) -> None:  # fmt: skip
    rows, width = out_NW.shape
    period, members = parts_TK.shape
    if period == 0:
        if rows:
            raise ValueError("nothing says what the rows are made of")
        return
    places_K = np.empty(members, np.int64)
    factors_K = np.empty(members, np.uint8)
    t = first % period
    periods = first // period
    for i in range(rows):
        found = 0
        is_plain = True
        for k in range(members):
            s = parts_TK[t, k]
            rank = periods * ranks_S3[s, 2] + at_TK[t, k] - ranks_S3[s, 0]
            if rank >= 0 and rank < ranks_S3[s, 1]:
                places_K[found] = addresses_S[s] + rank * width * 4
                factors_K[found] = factors_TK[t, k]
                is_plain &= factors_TK[t, k] == 1
                found += 1
        if is_plain and found == 4:
            _xor_four(out_NW[i], places_K)
        else:
            _sum(out_NW[i], places_K[:found], factors_K, doubled_CB)
        t += 1
        if t == period:
            t = 0
            periods += 1


def combine(out_NW: Floats, first: int, parts_TK: Slots, at_TK: Slots, factors_TK: Bytes,
            given: Sequence[Floats], ranks: Sequence[tuple[int, int]]) -> None:  # fmt: skip
    """Make rows, from a slot on, of the rows that were given: S parts, each with its first rank and
    how many of its rows are wanted in a period.

    >>> out = np.empty((2, 1), np.uint32)
    >>> given = [np.array([[1], [2]], np.uint32), np.array([[4], [8]], np.uint32)]
    >>> made_of = np.array([[0, 1]]), np.array([[0, 0]]), np.ones((1, 2), np.uint8)
    >>> combine(out, 5, *made_of, given, [(5, 1), (5, 1)])
    >>> out.ravel().tolist()
    [5, 10]
    """
    # Kept until the end: the kernel knows their addresses alone.
    held = [np.ascontiguousarray(part_NW).view(np.uint32) for part_NW in given]
    words_NW: Words = out_NW.view(np.uint32)
    if any(part_NW.shape[1:] != words_NW.shape[1:] for part_NW in held) or len(ranks) != len(held):
        raise ValueError("the rows that are given have not the shape of those to make")
    if parts_TK.shape != at_TK.shape or parts_TK.shape != factors_TK.shape or first < 0:
        raise ValueError("what rows are made of is not told for each")
    if parts_TK.size and not (parts_TK.min() >= 0 and parts_TK.max() < len(held)):
        raise IndexError("rows are made of a part that was not given")
    addresses_S = np.array([part_NW.ctypes.data for part_NW in held], np.int64)
    ranks_S3 = np.array(
        [(start, len(part_NW), size) for part_NW, (start, size) in zip(held, ranks, strict=True)],
        np.int64,
    ).reshape(-1, 3)
    _combine(words_NW, first, parts_TK, at_TK, factors_TK, addresses_S, ranks_S3, _DOUBLED)
