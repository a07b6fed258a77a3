"""Logarithmic codes for row state that is never negative: Adagrad's sum, Adam's exp_avg_sq.

Such state spans many powers of two, and an optimizer divides by its root: relative error is what
counts. The bit pattern of a positive float grows nearly as its logarithm, so patterns are
quantized evenly, with integers alone, between a row's smallest and largest positive value, both
stored as bf16 (the upper half of the pattern), rounded outwards.

Invariants:
- Code 0 is zero and nothing else: zero stays zero, and no positive value becomes zero.
- A pattern errs by half a step at most (and a rounding of 2^-14 steps), hence a value by
  ``step * 2^-24`` of itself where that is below one: patterns 2^23 apart are a factor 2 apart.

Shapes: bits_ND  N rows of D floats as uint32 patterns; dst_MD  a table of M rows, as patterns;
ids_N  row i goes to dst_MD[ids_N[i]], or nowhere if that is negative; lo_N, hi_N  bf16 patterns;
bad_N  1 where a row holds a negative, infinite or NaN value; T  rows of a tile; P, B  padded codes
and packed bytes of a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.kernels.codecs.packing import pack_tile, padded_width, unpack_tile
from holdfast.kernels.codecs.quantize import tile_rows
from holdfast.kernels.compiling import helper, kernel

Array = npt.NDArray[Any]

_NONE = np.uint32(0)
_ONE = np.uint32(1)
_S16 = np.uint32(16)
_LOW_16 = np.uint32(0xFFFF)
_ALL = np.uint32(0xFFFFFFFF)
# Rounded outwards, the largest value must stay below infinity.
_TOO_LARGE = np.uint32(0x7F7F0000)
# Rounds as quantize.py does, and makes room for code 0.
_TO_INTEGER_PLUS_1 = np.float32(2.0**23 + 1)
_F_ZERO = np.float32(0.0)
_F_ONE = np.float32(1.0)


@helper()
def pattern_step(lo: Any, hi: Any, bits: Any) -> Any:
    """Distance of two codes in bit patterns, rounded up so that the last one reaches ``hi``."""
    span = (np.int64(hi) - np.int64(lo)) << 16
    steps = (1 << bits) - 2
    return np.uint32((span + steps - 1) // steps)


@helper()
def _positive_extremes(bits_D: Array) -> Any:
    """The smallest positive pattern minus one, and the largest pattern."""
    least, most = _ALL, _NONE
    for j in range(bits_D.size):
        pattern = bits_D[j]
        most = max(most, pattern)
        # Zero wraps to the largest number: the minimum is that of the positive values.
        least = min(least, np.uint32(pattern - _ONE))
    return least, most


@helper(error_model="numpy")
def _code_row(bits_D: Array, lo: Any, step: Any, top: Any, codes_P: Array) -> Any:
    inverse = _F_ONE / np.float32(step) if step > _NONE else _F_ZERO
    for j in range(bits_D.size):
        pattern = bits_D[j]
        # Below 2^31, so the signed conversion, which has a vector form, is the same.
        above = np.int32(np.uint32(pattern - lo)) if pattern > lo else np.int32(0)
        t = np.float32(above) * inverse
        t = t if t < top else top
        code = np.uint32(np.float32(t + _TO_INTEGER_PLUS_1).view(np.uint32))
        codes_P[j] = np.uint8(code if pattern > _NONE else _NONE)


@kernel(error_model="numpy")
def encode_log(
    bits_ND: Array, bits: Any, lo_N: Array, hi_N: Array, codes_NB: Array, bad_N: Array
) -> Any:
    """Code rows of patterns; a bad row is marked, and its codes mean nothing."""
    count, width = bits_ND.shape
    top = np.float32((1 << bits) - 2)
    tile = tile_rows(width)
    codes_TP = np.zeros((tile, padded_width(width, bits)), np.uint8)
    for start in range(0, count, tile):
        stop = min(start + tile, count)
        for i in range(start, stop):
            bits_D = bits_ND[i]
            least, most = _positive_extremes(bits_D)
            bad = most > _TOO_LARGE
            empty = bad or most == _NONE
            lo16 = _NONE if empty else np.uint32((least + _ONE) >> _S16)
            hi16 = _NONE if empty else np.uint32((most + _LOW_16) >> _S16)
            bad_N[i] = bad
            lo_N[i] = lo16
            hi_N[i] = hi16
            step = pattern_step(lo16, hi16, bits)
            _code_row(bits_D, np.uint32(lo16 << _S16), step, top, codes_TP[i - start])
        pack_tile(codes_TP[: stop - start], bits, codes_NB[start:stop])


@helper()
def _uncode_row(codes_P: Array, lo: Any, step: Any, dst_D: Array) -> Any:
    before = np.uint32(lo - step)
    for j in range(dst_D.size):
        code = np.uint32(codes_P[j])
        pattern = np.uint32(before + np.uint32(code * step))
        pattern = max(pattern, _ONE)
        dst_D[j] = pattern if code > _NONE else _NONE


@kernel()
def decode_log(
    codes_NB: Array, bits: Any, lo_N: Array, hi_N: Array, dst_MD: Array, ids_N: Array
) -> Any:
    """Turn codes back into patterns and scatter them; needs lo <= hi in every row."""
    count = ids_N.size
    width = dst_MD.shape[1]
    tile = tile_rows(width)
    codes_TP = np.empty((tile, padded_width(width, bits)), np.uint8)
    for start in range(0, count, tile):
        stop = min(start + tile, count)
        unpack_tile(codes_NB[start:stop], bits, codes_TP[: stop - start])
        for i in range(start, stop):
            if ids_N[i] < 0:
                continue
            codes_P = codes_TP[i - start]
            dst_D = dst_MD[np.uint64(ids_N[i])]
            step = pattern_step(lo_N[i], hi_N[i], bits)
            lo = np.uint32(np.uint32(lo_N[i]) << _S16)
            _uncode_row(codes_P, lo, step, dst_D)
