"""k-means codes: values snap to a codebook learned from a row, or from a block of rows.

The non-uniform codecs of Check-N-Run 4.2.2: a codebook per vector, per block of contiguous rows,
or per block of similar rows (two tiers: rows are clustered first). One dimension has an order, so
the inner k-means sorts the values once and then only moves the borders between centroids.

Invariants:
- No randomness: the same rows give the same bytes.
- Centroids stay within the values they were learned from; a codebook is sorted.
- Codes are the nearest entries of the fp16 codebook that is stored.

Not here: which rows are left out as exceptions (the caller marks them in ``bad_N`` through
``mark_bad``, and the codebooks are learned without them).

Shapes: rows_ND  N rows of D floats; dst_MD  a table of M rows; ids_N  row i goes to
dst_MD[ids_N[i]], or nowhere if that is negative; books_CK  C codebooks of K = 2**bits fp16
patterns; block_N  the codebook of each row; centers_CD  C mean rows; bad_N  1 where a row is left
out; value_V  V sorted values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.kernels.codecs.floats import (
    HALF_MAX,
    HALF_SMALL,
    half_bits,
    half_down,
    half_from_bits,
)
from holdfast.kernels.codecs.packing import pack_tile, padded_width, unpack_tile
from holdfast.kernels.codecs.quantize import tile_rows
from holdfast.kernels.compiling import helper, kernel

Array = npt.NDArray[Any]

_ZERO = np.float32(0.0)
_INF = np.float32(np.inf)


@kernel()
def mark_bad(rows_ND: Array, bad_N: Array) -> Any:
    """Mark the rows that fp16 entries cannot describe: not finite, too large, or too small."""
    for i in range(rows_ND.shape[0]):
        row_D = rows_ND[i]
        top = _ZERO
        is_number = True
        for j in range(row_D.size):
            size = abs(row_D[j])
            is_number &= size <= HALF_MAX
            top = max(top, size)
        bad_N[i] = not is_number or _ZERO < top < HALF_SMALL


@helper()
def _nearest_half(x: Any) -> Any:
    below = half_down(x)
    above = -half_down(-x)
    return below if x - below <= above - x else above


@helper()
def _sweep(value_V: Array, center_K: Array) -> Any:
    """One Lloyd iteration over sorted values: every centroid moves to the mean of its values."""
    entries = center_K.size
    at = 0
    for k in range(entries):
        border = (center_K[k] + center_K[k + 1]) * 0.5 if k + 1 < entries else np.inf
        total, count = 0.0, 0
        while at < value_V.size and value_V[at] <= border:
            total += value_V[at]
            count += 1
            at += 1
        if count > 0:
            center_K[k] = total / count


@kernel()
def learn_book(value_V: Array, iterations: Any, center_K: Array, book_K: Array) -> Any:
    """Learn a codebook from values, which it sorts; as few values as entries are kept as they are.

    Lloyd iterations start halfway between even steps and quantiles: even steps alone leave most
    entries in the tails, quantiles alone leave the tails without any. On rows like those of a
    trained table this start ends 3 % (2 bits) to 17 % (4 bits) below the better of the two.
    """
    entries, size = center_K.size, value_V.size
    value_V.sort()
    if size == 0:
        book_K[:] = 0
        return
    lo, hi = np.float64(value_V[0]), np.float64(value_V[size - 1])
    for k in range(entries):
        if size <= entries:
            center_K[k] = value_V[min(k, size - 1)]
        else:
            even = lo + (hi - lo) * k / (entries - 1)
            center_K[k] = (even + value_V[(2 * k + 1) * size // (2 * entries)]) * 0.5
    for _ in range(iterations if size > entries else 0):
        _sweep(value_V, center_K)
    for k in range(entries):
        book_K[k] = half_bits(_nearest_half(np.float32(center_K[k])))


@kernel()
def learn_books(
    rows_ND: Array,
    bad_N: Array,
    order_N: Array,
    start_C: Array,
    iterations: Any,
    books_CK: Array,
) -> Any:
    """Learn a codebook per block: block c holds the rows order_N[start_C[c] : start_C[c + 1]]."""
    width = rows_ND.shape[1]
    blocks = books_CK.shape[0]
    largest = 0
    for c in range(blocks):
        largest = max(largest, start_C[c + 1] - start_C[c])
    value_V = np.empty(largest * width, np.float32)
    center_K = np.empty(books_CK.shape[1], np.float64)
    for c in range(blocks):
        size = 0
        for o in range(start_C[c], start_C[c + 1]):
            i = order_N[o]
            if not bad_N[i]:
                value_V[size : size + width] = rows_ND[i]
                size += width
        learn_book(value_V[:size], iterations, center_K, books_CK[c])


@kernel()
def encode_books(
    rows_ND: Array, bits: Any, books_CK: Array, block_N: Array, codes_NB: Array
) -> Any:
    """Code every value as the nearest entry of its row's codebook."""
    count, width = rows_ND.shape
    tile = tile_rows(width)
    codes_TP = np.zeros((tile, padded_width(width, bits)), np.uint8)
    border_K = np.empty(books_CK.shape[1], np.float32)
    known = -1
    for start in range(0, count, tile):
        stop = min(start + tile, count)
        for i in range(start, stop):
            if block_N[i] != known:
                known = block_N[i]
                book_K = books_CK[known]
                for k in range(book_K.size - 1):
                    left, right = half_from_bits(book_K[k]), half_from_bits(book_K[k + 1])
                    border_K[k] = (left + right) * np.float32(0.5)
            row_D = rows_ND[i]
            codes_P = codes_TP[i - start]
            for j in range(width):
                code = 0
                half = books_CK.shape[1] >> 1
                while half > 0:
                    code += half if row_D[j] > border_K[code + half - 1] else 0
                    half >>= 1
                codes_P[j] = code
        pack_tile(codes_TP[: stop - start], bits, codes_NB[start:stop])


@kernel()
def decode_books(
    codes_NB: Array,
    bits: Any,
    books_CK: Array,
    block_N: Array,
    dst_MD: Array,
    ids_N: Array,
) -> Any:
    """Look every code up in its row's codebook and scatter the rows; needs block_N below C."""
    count = ids_N.size
    width = dst_MD.shape[1]
    tile = tile_rows(width)
    codes_TP = np.empty((tile, padded_width(width, bits)), np.uint8)
    entry_K = np.empty(books_CK.shape[1], np.float32)
    known = -1
    for start in range(0, count, tile):
        stop = min(start + tile, count)
        unpack_tile(codes_NB[start:stop], bits, codes_TP[: stop - start])
        for i in range(start, stop):
            if ids_N[i] < 0:
                continue
            if block_N[i] != known:
                known = block_N[i]
                for k in range(entry_K.size):
                    entry_K[k] = half_from_bits(books_CK[known, k])
            codes_P = codes_TP[i - start]
            dst_D = dst_MD[np.uint64(ids_N[i])]
            for j in range(width):
                dst_D[j] = entry_K[codes_P[j]]


@kernel()
def _assign_rows(rows_ND: Array, bad_N: Array, centers_CD: Array, block_N: Array) -> Any:
    """Give every good row its nearest center; a tie goes to the first."""
    clusters, width = centers_CD.shape
    centers_DC = np.ascontiguousarray(centers_CD.T)
    base_C = np.zeros(clusters, np.float32)
    for j in range(width):
        center_C = centers_DC[j]
        for c in range(clusters):
            base_C[c] += center_C[c] * center_C[c] * np.float32(0.5)
    score_C = np.empty(clusters, np.float32)
    for i in range(rows_ND.shape[0]):
        if bad_N[i]:
            continue
        score_C[:] = base_C
        for j in range(width):
            x = rows_ND[i, j]
            center_C = centers_DC[j]
            for c in range(clusters):
                score_C[c] -= x * center_C[c]
        best, best_score = 0, _INF
        for c in range(clusters):
            if score_C[c] < best_score:
                best, best_score = c, score_C[c]
        block_N[i] = best


@kernel()
def _move_centers(rows_ND: Array, bad_N: Array, block_N: Array, centers_CD: Array) -> Any:
    clusters, width = centers_CD.shape
    total_CD = np.zeros((clusters, width), np.float64)
    count_C = np.zeros(clusters, np.int64)
    for i in range(rows_ND.shape[0]):
        if not bad_N[i]:
            c = block_N[i]
            count_C[c] += 1
            for j in range(width):
                total_CD[c, j] += rows_ND[i, j]
    for c in range(clusters):
        if count_C[c] > 0:
            for j in range(width):
                centers_CD[c, j] = total_CD[c, j] / count_C[c]


def cluster_rows(rows_ND: Array, bad_N: Array, *, clusters: int, iterations: int) -> Array:
    """The block of each row when similar rows share one; bad rows land in block 0.

    k-means on whole rows, started from rows evenly spaced in the order of their length.
    """
    block_N = np.zeros(rows_ND.shape[0], np.int64)
    good_G = np.flatnonzero(bad_N == 0)
    if good_G.size == 0 or clusters == 1:
        return block_N
    length_G = np.square(rows_ND[good_G], dtype=np.float64).sum(axis=1)
    by_length_G = good_G[np.argsort(length_G, kind="stable")]
    spaced_C = (np.arange(clusters) * 2 + 1) * good_G.size // (2 * clusters)
    centers_CD = rows_ND[by_length_G[spaced_C]]
    for _ in range(iterations):
        _assign_rows(rows_ND, bad_N, centers_CD, block_N)
        _move_centers(rows_ND, bad_N, block_N, centers_CD)
    _assign_rows(rows_ND, bad_N, centers_CD, block_N)
    return block_N
