"""Bloom filters over row ids: whether a chunk may hold a row, without reading the chunk.

A split-block filter: an id picks one block of 32 bytes and sets one bit in each of its eight words,
so that a question costs one cache line, whatever the size of the filter. The filter is an array
of little-endian uint32 words, eight to a block.

The bits are part of the stored format. For an id x (an unsigned number of 64 bits; all
arithmetic on 64 bits wraps around):

    h = x + 0x9E3779B97F4A7C15                    SplitMix64, from the state x
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9
    h = (h ^ (h >> 27)) * 0x94D049BB133111EB
    h = h ^ (h >> 31)
    block = ((h >> 32) * blocks) >> 32            a range reduction without division
    key = h & 0xFFFFFFFF
    bit of word j = ((key * SALTS[j]) & 0xFFFFFFFF) >> 27, for j = 0 .. 7

with the SALTS of Parquet's split-block filter. Word j of a block is words[8 * block + j]; bit 0 is
its lowest.

Invariants:
- Never False for an id that was built in.
- No memory outside the words is touched, for any content and any positive multiple of 8 words.

Not here: where a filter is stored, and the check of its size (the caller's).

Shapes: ids_N  N row ids, 0 <= id < 2**56; words_W  W = 8 * blocks words; has_N  one bool an id;
ids_G, hash_G  a group of at most 64 ids and their hashes; blocks_CW  the words by block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.kernels.compiling import helper, kernel
from holdfast.kernels.rows.gather import prefetch

Array = npt.NDArray[Any]
Words = npt.NDArray[np.uint32]

BLOCK_WORDS = 8
SALTS = np.array(
    [
        0x47B6137B,
        0x44974D91,
        0x8824AD5B,
        0xA2B7289D,
        0x705495C7,
        0x2DF1424B,
        0x9EFC4947,
        0x5C6BFB31,
    ],
    np.uint32,
)
# A block of 256 bits for 24 ids, 10.7 bits an id: 0.9 % false positives, whatever the count.
_BLOCK_IDS = 24
# Ids that are looked up together: their answers fill one word.
_GROUP = 64

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)
_WORD_S27 = np.uint32(27)
_ONE = np.uint32(1)
_NONE = np.uint32(0)
_EIGHT = np.uint64(BLOCK_WORDS)


def words_for(count: int) -> int:
    """Words of a filter for that many ids, with about 1 % false positives.

    >>> words_for(0), words_for(24), words_for(25), words_for(1_000_000)
    (8, 8, 16, 333336)
    """
    return BLOCK_WORDS * max(1, -(-count // _BLOCK_IDS))


def build(ids_N: Array, words_W: Words) -> None:
    """Set the bits of the ids; the words start at zero, or hold ids already."""
    assert words_W.dtype == np.uint32 and words_W.size and words_W.size % BLOCK_WORDS == 0
    assert words_W.flags.c_contiguous
    _build(_read_only(ids_N, np.int64), words_W)


def has(words_W: Words, ids_N: Array) -> npt.NDArray[np.bool_]:
    """Whether each id may be among those built in: False is certain, True is not."""
    has_N = np.empty(ids_N.size, np.bool_)
    _has(_checked(words_W), _read_only(ids_N, np.int64), has_N)
    return has_N


def _checked(words_W: Words) -> Words:
    assert words_W.dtype == np.uint32 and words_W.size and words_W.size % BLOCK_WORDS == 0
    return _read_only(words_W, np.uint32)


def _read_only(array: Array, dtype: Any) -> Array:
    # Numba compiles a kernel again for read-only arrays: what is read always is.
    view = np.require(array, dtype, ["C", "A"]).view()
    view.flags.writeable = False
    return view


@helper()
def _hash(row: Any) -> Any:
    h = np.uint64(row) + _GAMMA
    h = (h ^ (h >> _S30)) * _MIX_1
    h = (h ^ (h >> _S27)) * _MIX_2
    return h ^ (h >> _S31)


@helper()
def _block_start(h: Any, blocks: Any) -> Any:
    # Below blocks for any hash. Past 2^32 blocks the product wraps around, and is below 2^32.
    return (((h >> _S32) * blocks) >> _S32) * _EIGHT


@helper()
def _is_hit(words_W: Array, h: Any, blocks: Any) -> Any:
    start = _block_start(h, blocks)
    key = np.uint32(h)
    # All eight words, without a branch: LLVM then asks for several ids at once.
    missing = _NONE
    for j in range(BLOCK_WORDS):
        bit = np.uint32(_ONE << np.uint32(np.uint32(key * SALTS[j]) >> _WORD_S27))
        missing |= np.uint32(bit & ~words_W[start + np.uint64(j)])
    return missing == _NONE


@kernel()
def _build(ids_N: Array, words_W: Array) -> Any:
    blocks = np.uint64(words_W.size // BLOCK_WORDS)
    for i in range(ids_N.size):
        h = _hash(ids_N[i])
        start = _block_start(h, blocks)
        key = np.uint32(h)
        for j in range(BLOCK_WORDS):
            bit = np.uint32(_ONE << np.uint32(np.uint32(key * SALTS[j]) >> _WORD_S27))
            words_W[start + np.uint64(j)] |= bit


@helper()
def _probe(words_W: Array, ids_G: Array, hash_G: Array) -> Any:
    """The answers for at most 64 ids, one bit each.

    The blocks are asked for before the first is read: a filter larger than the caches answers 1.2
    (memory busy) to 4 times (idle) as fast. The answers go into one word, not into an array: a
    store between the loads would keep LLVM from vectorising them.
    """
    blocks = np.uint64(words_W.size // BLOCK_WORDS)
    blocks_CW = words_W.reshape(words_W.size // BLOCK_WORDS, BLOCK_WORDS)
    for k in range(ids_G.size):
        hash_G[k] = _hash(ids_G[k])
    for k in range(ids_G.size):
        prefetch(blocks_CW, np.int64(_block_start(hash_G[k], blocks) // _EIGHT))
    hits = np.uint64(0)
    for k in range(ids_G.size):
        hits |= np.uint64(_is_hit(words_W, hash_G[k], blocks)) << np.uint64(k)
    return hits


@kernel()
def _has(words_W: Array, ids_N: Array, has_N: Array) -> Any:
    hash_G = np.empty(_GROUP, np.uint64)
    for start in range(0, ids_N.size, _GROUP):
        stop = min(start + _GROUP, ids_N.size)
        hits = _probe(words_W, ids_N[start:stop], hash_G)
        for i in range(start, stop):
            has_N[i] = (hits >> np.uint64(i - start)) & np.uint64(1)
