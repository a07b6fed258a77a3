"""Uniform quantization of rows: symmetric, asymmetric, and the adaptive search (Check-N-Run 4.2).

A row becomes an fp16 scale, an fp16 offset and D small codes: ``x ~ offset + code * scale``. Rows
are handled in tiles that stay in the first-level cache: fit, search, round, code and pack.

Invariants:
- Codes are computed against the pair that is stored: the offset rounded down to fp16, the scale
  rounded up, so that every value lies on the grid's span and errs by half a scale at most.
- ``offset + code * scale`` is exact but for one float32 rounding: a scale has 11 bits, a code 8.
- The adaptive search starts from the asymmetric pair and leaves it only for one whose squared
  error, measured on what will be decoded, is smaller by more than the sum's own rounding.
- No fast-math. Minimum and maximum compare integer keys that order as the floats do, which both
  vectorises and finds infinities and NaN; sums run over lanes of rows, so no sum is reordered.

Not here: widths, lengths and the list of exceptions (checkpoint/format/codec.py); k-means
(kmeans.py).

Shapes: rows_ND  N rows of D floats; dst_MD  a table of M rows; ids_N  where row i goes in it,
negative for nowhere; keys_ND  rows as int32 patterns; scale_N, offset_N  fp16 patterns; bad_N  1
where fp16 cannot describe a row; T  rows of a tile; P, B  padded codes and packed bytes of a row;
x_DL  the rows of L lanes side by side; state  what the search knows of each lane.
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
    half_up,
)
from holdfast.kernels.codecs.packing import pack_tile, padded_width, unpack_tile
from holdfast.kernels.compiling import helper, kernel

Array = npt.NDArray[Any]

_TILE_VALUES = 4096
_TILE_ROWS_MAX = 256
# Adding 2^23 leaves the nearest integer in the low bits of the float: a rounding without a
# conversion, for numbers from 0 to 2^22.
_TO_INTEGER = np.float32(2.0**23)
_ZERO = np.float32(0.0)
_HALF = np.float32(0.5)
_NAN = np.float32(np.nan)
_ONE = np.float32(1.0)
_FLIP = np.int32(0x7FFFFFFF)
_S31 = np.int32(31)
_KEY_INF = np.int32(0x7F800000)
_KEY_MINUS_INF = np.int32(-0x7F800001)
_KEY_MIN = np.int32(-0x80000000)
_SUM_ROUNDING = np.float32(2.0**-23)

LANES = 32
# Fields of the search's state, each LANES wide, in one array: with constant distances LLVM sees
# that they do not overlap.
_LO, _HI, _STEP = 0 * LANES, 1 * LANES, 2 * LANES
_OFFSET_A, _SCALE_A, _INVERSE_A, _ERROR_A = 3 * LANES, 4 * LANES, 5 * LANES, 6 * LANES
_OFFSET_B, _SCALE_B, _INVERSE_B, _ERROR_B = 7 * LANES, 8 * LANES, 9 * LANES, 10 * LANES
_OFFSET, _SCALE, _ERROR = 11 * LANES, 12 * LANES, 13 * LANES
_LO_UP, _HI_DOWN = 14 * LANES, 15 * LANES
_FIELDS = 16


@helper()
def tile_rows(width: int) -> int:
    """Rows of this width that a tile holds."""
    return max(1, min(_TILE_ROWS_MAX, _TILE_VALUES // width))


@helper(error_model="numpy")
def _fit_tile(keys_TD: Array, lo_T: Array, hi_T: Array) -> Any:
    for i in range(keys_TD.shape[0]):
        keys_D = keys_TD[i]
        lo, hi = _FLIP, _KEY_MIN
        for j in range(keys_D.size):
            bits = keys_D[j]
            key = np.int32(bits ^ ((bits >> _S31) & _FLIP))
            lo = min(lo, key)
            hi = max(hi, key)
        lo_T[i] = lo
        hi_T[i] = hi


@helper()
def _from_key(key: Any) -> Any:
    return np.int32(key ^ ((key >> _S31) & _FLIP)).view(np.float32)


@helper(error_model="numpy")
def _pair_tile(
    lo_T: Array, hi_T: Array, levels: Any, is_symmetric: Any, offset_T: Array, scale_T: Array
) -> Any:
    """Turn extremes (keys) into the stored pair; a row that has none gets a NaN scale."""
    for i in range(lo_T.size):
        lo = _from_key(lo_T[i])
        hi = _from_key(hi_T[i])
        top = max(abs(lo), abs(hi))
        bad = (hi_T[i] >= _KEY_INF) | (lo_T[i] <= _KEY_MINUS_INF)
        bad |= (top > _ZERO) & (top < HALF_SMALL)
        span_lo = -top if is_symmetric else lo
        span_hi = top if is_symmetric else hi
        base = span_lo if is_symmetric else half_down(span_lo)
        scale = half_up(np.float32((span_hi - base) / levels))
        offset = np.float32(-_HALF * levels) * scale if is_symmetric else base
        bad |= ~(scale <= HALF_MAX)
        bad |= (not is_symmetric) & (abs(base) > HALF_MAX)
        offset_T[i] = _ZERO if bad else offset
        scale_T[i] = _NAN if bad else scale


@helper(error_model="numpy")
def _invert_tile(scale_T: Array, inverse_T: Array) -> Any:
    for i in range(scale_T.size):
        inverse_T[i] = _ONE / scale_T[i] if scale_T[i] > _ZERO else _ZERO


@helper(error_model="numpy")
def _code_tile(rows_TD: Array, offset_T: Array, inverse_T: Array, codes_TP: Array) -> Any:
    """Code rows whose grid spans them: no value rounds to a code outside."""
    for i in range(rows_TD.shape[0]):
        row_D = rows_TD[i]
        codes_P = codes_TP[i]
        offset = offset_T[i]
        inverse = inverse_T[i]
        for j in range(row_D.size):
            t = (row_D[j] - offset) * inverse
            codes_P[j] = np.uint8(np.float32(t + _TO_INTEGER).view(np.uint32))


@helper(error_model="numpy")
def _code_tile_clipped(
    rows_TD: Array, offset_T: Array, inverse_T: Array, levels: Any, codes_TP: Array
) -> Any:
    """Code rows whose grid may be narrower than they are."""
    for i in range(rows_TD.shape[0]):
        row_D = rows_TD[i]
        codes_P = codes_TP[i]
        offset = offset_T[i]
        inverse = inverse_T[i]
        for j in range(row_D.size):
            t = (row_D[j] - offset) * inverse
            t = t if t > _ZERO else _ZERO
            t = t if t < levels else levels
            codes_P[j] = np.uint8(np.float32(t + _TO_INTEGER).view(np.uint32))


@helper(error_model="numpy")
def _pair_lanes(state: Array, lo_at: Any, hi_at: Any, to: Any, levels: Any) -> Any:
    """Round the ranges of two fields to a stored pair and its inverse; clear its error."""
    lo_L = state[lo_at : lo_at + LANES]
    hi_L = state[hi_at : hi_at + LANES]
    out = state[to : to + 4 * LANES]
    for k in range(LANES):
        offset = half_down(lo_L[k])
        scale = half_up(max(np.float32((hi_L[k] - offset) / levels), _ZERO))
        out[k] = offset
        out[LANES + k] = scale
        out[2 * LANES + k] = _ONE / scale if scale > _ZERO else _ZERO
        out[3 * LANES + k] = _ZERO


@helper(error_model="numpy")
def _measure_lanes(x_DL: Array, state: Array, at: Any, levels: Any) -> Any:
    """Add up the squared error of the pair at one place of the state, in all lanes."""
    s = state[at : at + 4 * LANES]
    for j in range(x_DL.shape[0]):
        x_L = x_DL[j]
        for k in range(LANES):
            x = x_L[k]
            offset = s[k]
            t = (x - offset) * s[2 * LANES + k]
            t = t if t > _ZERO else _ZERO
            t = t if t < levels else levels
            code = np.float32(t + _TO_INTEGER) - _TO_INTEGER
            error = x - (offset + code * s[LANES + k])
            s[3 * LANES + k] += error * error


@helper(error_model="numpy")
def _search_lanes(x_DL: Array, state: Array, levels: Any, bins: Any, steps: Any) -> Any:
    """Check-N-Run's greedy search on 32 rows at once, from the extremes in the state."""
    better = _ONE - np.float32(x_DL.shape[0] + 8) * _SUM_ROUNDING
    _pair_lanes(state, _LO, _HI, _OFFSET_A, levels)
    _measure_lanes(x_DL, state, _OFFSET_A, levels)
    for k in range(LANES):
        state[_STEP + k] = (state[_HI + k] - state[_LO + k]) / bins
        state[_OFFSET + k] = state[_OFFSET_A + k]
        state[_SCALE + k] = state[_SCALE_A + k]
        state[_ERROR + k] = state[_ERROR_A + k]
    for _ in range(steps):
        for k in range(LANES):
            state[_LO_UP + k] = state[_LO + k] + state[_STEP + k]
            state[_HI_DOWN + k] = state[_HI + k] - state[_STEP + k]
        _pair_lanes(state, _LO_UP, _HI, _OFFSET_A, levels)
        _pair_lanes(state, _LO, _HI_DOWN, _OFFSET_B, levels)
        _measure_lanes(x_DL, state, _OFFSET_A, levels)
        _measure_lanes(x_DL, state, _OFFSET_B, levels)
        for k in range(LANES):
            is_a = state[_ERROR_A + k] <= state[_ERROR_B + k]
            state[_LO + k] = state[_LO_UP + k] if is_a else state[_LO + k]
            state[_HI + k] = state[_HI + k] if is_a else state[_HI_DOWN + k]
            error = state[_ERROR_A + k] if is_a else state[_ERROR_B + k]
            offset = state[_OFFSET_A + k] if is_a else state[_OFFSET_B + k]
            scale = state[_SCALE_A + k] if is_a else state[_SCALE_B + k]
            is_best = error < state[_ERROR + k] * better
            state[_ERROR + k] = error if is_best else state[_ERROR + k]
            state[_OFFSET + k] = offset if is_best else state[_OFFSET + k]
            state[_SCALE + k] = scale if is_best else state[_SCALE + k]


@helper(error_model="numpy")
def _search_tile(
    rows_TD: Array,
    lo_T: Array,
    hi_T: Array,
    levels: Any,
    search: Any,
    offset_T: Array,
    scale_T: Array,
    lanes: Any,
) -> Any:
    """Replace the pairs of a tile by the best that the search finds; bad rows stay bad."""
    x_DL, state = lanes
    for start in range(0, rows_TD.shape[0], LANES):
        count = min(LANES, rows_TD.shape[0] - start)
        for k in range(LANES):
            # Lanes past the last row repeat it; their result is not read.
            i = start + min(k, count - 1)
            row_D = rows_TD[i]
            for j in range(row_D.size):
                x_DL[j, k] = row_D[j]
            state[_LO + k] = _from_key(lo_T[i])
            state[_HI + k] = _from_key(hi_T[i])
        _search_lanes(x_DL, state, levels, search[0], search[1])
        for k in range(count):
            if scale_T[start + k] >= _ZERO:
                offset_T[start + k] = state[_OFFSET + k]
                scale_T[start + k] = state[_SCALE + k]


@helper()
def _store_tile(value_T: Array, half_T: Array, bad_T: Array) -> Any:
    for i in range(value_T.size):
        is_number = value_T[i] == value_T[i]
        half_T[i] = half_bits(value_T[i] if is_number else _ZERO)
        bad_T[i] = not is_number


@helper()
def _load_tile(half_T: Array, value_T: Array) -> Any:
    for i in range(half_T.size):
        value_T[i] = half_from_bits(half_T[i])


@kernel(error_model="numpy")
def encode_uniform(
    rows_ND: Array,
    bits: Any,
    is_symmetric: Any,
    search: Any,
    scale_N: Array,
    offset_N: Array,
    codes_NB: Array,
    bad_N: Array,
) -> Any:
    """Code rows; ``search`` is (bins, steps) of the adaptive search, no steps for none.

    With ``is_symmetric`` the offset is implied and ``offset_N`` stays untouched. A bad row is
    marked, its pair is zero and its codes mean nothing.
    """
    count, width = rows_ND.shape
    keys_ND = rows_ND.view(np.int32)
    levels = np.float32((1 << bits) - 1)
    tile = tile_rows(width)
    codes_TP = np.zeros((tile, padded_width(width, bits)), np.uint8)
    lo_T, hi_T = np.empty(tile, np.int32), np.empty(tile, np.int32)
    offset_T, scale_T = np.empty(tile, np.float32), np.empty(tile, np.float32)
    inverse_T, bad_T = np.empty(tile, np.float32), np.empty(tile, np.uint8)
    columns = width if search[1] > 0 else 0
    lanes = (np.empty((columns, LANES), np.float32), np.zeros(_FIELDS * LANES, np.float32))
    for start in range(0, count, tile):
        stop = min(start + tile, count)
        n = stop - start
        rows_TD = rows_ND[start:stop]
        _fit_tile(keys_ND[start:stop], lo_T[:n], hi_T[:n])
        _pair_tile(lo_T[:n], hi_T[:n], levels, is_symmetric, offset_T[:n], scale_T[:n])
        if search[1] > 0:
            _search_tile(rows_TD, lo_T, hi_T, levels, search, offset_T[:n], scale_T[:n], lanes)
        _store_tile(scale_T[:n], scale_N[start:stop], bad_N[start:stop])
        if not is_symmetric:
            _store_tile(offset_T[:n], offset_N[start:stop], bad_T[:n])
        _invert_tile(scale_T[:n], inverse_T)
        out_TP = codes_NB[start:stop] if bits == 8 else codes_TP[:n]
        if search[1] > 0:
            _code_tile_clipped(rows_TD, offset_T, inverse_T, levels, out_TP)
        else:
            _code_tile(rows_TD, offset_T, inverse_T, out_TP)
        if bits != 8:
            pack_tile(out_TP, bits, codes_NB[start:stop])


@helper()
def _dequantize_tile(
    codes_TP: Array, scale_T: Array, offset_T: Array, dst_MD: Array, ids_T: Array
) -> Any:
    for i in range(ids_T.size):
        if ids_T[i] < 0:
            continue
        dst_D = dst_MD[np.uint64(ids_T[i])]
        codes_P = codes_TP[i]
        scale = scale_T[i]
        offset = offset_T[i]
        for j in range(dst_D.size):
            dst_D[j] = offset + np.float32(codes_P[j]) * scale


@kernel()
def decode_uniform(
    codes_NB: Array,
    bits: Any,
    scale_N: Array,
    offset_N: Array,
    dst_MD: Array,
    ids_N: Array,
) -> Any:
    """Decode rows and scatter them; an empty ``offset_N`` says that the codes are symmetric."""
    count = ids_N.size
    middle = np.float32(-_HALF * np.float32((1 << bits) - 1))
    tile = tile_rows(dst_MD.shape[1])
    codes_TP = np.empty((tile, padded_width(dst_MD.shape[1], bits)), np.uint8)
    scale_T, offset_T = np.empty(tile, np.float32), np.empty(tile, np.float32)
    for start in range(0, count, tile):
        stop = min(start + tile, count)
        n = stop - start
        _load_tile(scale_N[start:stop], scale_T)
        if offset_N.size:
            _load_tile(offset_N[start:stop], offset_T)
        else:
            for i in range(n):
                offset_T[i] = middle * scale_T[i]
        if bits == 8:
            _dequantize_tile(codes_NB[start:stop], scale_T, offset_T, dst_MD, ids_N[start:stop])
        else:
            unpack_tile(codes_NB[start:stop], bits, codes_TP[:n])
            _dequantize_tile(codes_TP[:n], scale_T, offset_T, dst_MD, ids_N[start:stop])
