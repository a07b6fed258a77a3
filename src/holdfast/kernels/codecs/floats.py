"""Sixteen-bit floats: rows as fp16 or bf16, and the rounding of a codec's own fp16 numbers.

Numba has no half type on the CPU, so halves are uint16 patterns and the conversions are integer
and float32 arithmetic without branches, which LLVM turns into vector code.

Invariants:
- ``half_down(x) <= x <= half_up(x)``, both exactly representable in fp16 (65536 stands for "too
  large"; the caller tests with ``HALF_MAX``).
- ``half_from_bits(half_bits(v)) == v`` for every v that fp16 holds.
- No fast-math: ``(x + c) - c`` below is a rounding step and must not be simplified away.

Not here: which rows are stored raw (``checkpoint/format/codec.py`` writes the list of exceptions).

Shapes: bits_ND  N rows of D floats as uint32 patterns; out_ND, in_ND  uint16 patterns; dst_MD  a
table of M rows; ids_N  row i goes to dst_MD[ids_N[i]], or nowhere if that is negative; bad_N  1
where the format cannot hold a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.kernels.compiling import helper, kernel

Array = npt.NDArray[Any]

HALF_MAX = np.float32(65504.0)
# Below this, fp16's fixed subnormal step (2^-24) is coarser than 2^-9 of the row's largest value.
HALF_SMALL = np.float32(2.0**-16)

_HALF_NORMAL = np.float32(2.0**-14)
_HALF_STEP = np.float32(2.0**-24)
_HALF_PER_STEP = np.float32(2.0**24)
# float32 numbers in [0.5, 1) are 2^-24 apart: adding and taking away 0.5 rounds to that grid.
_HALF_GRID = np.float32(0.5)
_ULP = np.float32(2.0**-10)
_ZERO = np.float32(0.0)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_EXPONENT = np.uint32(0x7F800000)
_KEEP_11_BITS = np.uint32(0xFFFFE000)
_REBIAS = np.uint32(112 << 23)
_S13 = np.uint32(13)
_S16 = np.uint32(16)
_ONE = np.uint32(1)
_HALF_SIGN = np.uint32(0x8000)
_HALF_REST = np.uint32(0x7FFF)
_HALF_INF = np.uint32(0x7C00)
_SUBNORMAL_BASE = np.uint32(113 << 23)
_SUBNORMAL_ONE = np.float32(2.0**-14)
_ROUND_HALF = np.uint32(0x0FFF)
_ROUND_BF16 = np.uint32(0x7FFF)
# The first magnitudes that round to infinity: 65520 for fp16; max bf16 plus half a step for bf16.
_FP16_OVERFLOW = np.uint32(0x477FF000)
_BF16_OVERFLOW = np.uint32(0x7F7F8000)
_SMALL_BITS = np.uint32(0x37800000)
_NONE = np.uint32(0)


@helper()
def _half_truncate(mag: Any) -> Any:
    near = np.float32(mag + _HALF_GRID) - _HALF_GRID
    small = near - _HALF_STEP if near > mag else near
    large = np.uint32(np.float32(mag).view(np.uint32) & _KEEP_11_BITS)
    return small if mag < _HALF_NORMAL else large.view(np.float32)


@helper()
def _half_ulp(mag: Any) -> Any:
    binade = np.uint32(np.float32(mag).view(np.uint32) & _EXPONENT)
    return _HALF_STEP if mag < _HALF_NORMAL else binade.view(np.float32) * _ULP


@kernel()
def half_down(x: Any) -> Any:
    """The largest fp16 number not above a finite float32 x, as float32."""
    mag = -x if x < _ZERO else x
    cut = _half_truncate(mag)
    away = cut + _half_ulp(mag) if cut < mag else cut
    return -away if x < _ZERO else cut


@kernel()
def half_up(mag: Any) -> Any:
    """The smallest fp16 number not below a finite float32 mag >= 0, as float32."""
    cut = _half_truncate(mag)
    return cut + _half_ulp(mag) if cut < mag else cut


@kernel()
def half_bits(v: Any) -> Any:
    """The pattern of a float32 that fp16 holds exactly."""
    bits = np.float32(v).view(np.uint32)
    mag = np.uint32(bits & _MAGNITUDE)
    small = np.uint32(np.int32(mag.view(np.float32) * _HALF_PER_STEP))
    large = np.uint32((mag - _REBIAS) >> _S13)
    rest = small if mag.view(np.float32) < _HALF_NORMAL else large
    return np.uint16(((bits >> _S16) & _HALF_SIGN) | rest)


@kernel()
def half_from_bits(half: Any) -> Any:
    """The float32 value of an fp16 pattern; infinities and NaN come out as such."""
    wide = np.uint32(half)
    rest = np.uint32(wide & _HALF_REST)
    shifted = np.uint32(rest << _S13)
    normal = np.uint32(shifted + _REBIAS)
    small = np.uint32(shifted + _SUBNORMAL_BASE).view(np.float32) - _SUBNORMAL_ONE
    special = np.uint32(shifted | _EXPONENT)
    mag = np.float32(small).view(np.uint32) if rest < np.uint32(0x0400) else normal
    mag = special if rest >= _HALF_INF else mag
    return np.uint32(mag | ((wide & _HALF_SIGN) << _S16)).view(np.float32)


@kernel()
def halves_are_finite(half_K: Array) -> Any:
    """Whether an array of fp16 patterns holds neither infinity nor NaN."""
    top = np.uint16(0)
    for k in range(half_K.size):
        top = max(top, np.uint16(half_K[k] & np.uint16(0x7FFF)))
    return top < np.uint16(0x7C00)


@kernel()
def encode_fp16(bits_ND: Array, out_ND: Array, bad_N: Array) -> Any:
    """Round rows to nearest-even fp16; mark those that overflow, are not finite, or too small."""
    for i in range(bits_ND.shape[0]):
        bits_D = bits_ND[i]
        out_D = out_ND[i]
        top = _NONE
        for j in range(bits_D.size):
            bits = bits_D[j]
            mag = np.uint32(bits & _MAGNITUDE)
            top = max(top, mag)
            grid = np.float32(mag.view(np.float32) + _HALF_GRID)
            small = np.uint32(grid.view(np.uint32) - np.uint32(0x3F000000))
            odd = np.uint32((mag >> _S13) & _ONE)
            large = np.uint32((mag - _REBIAS + _ROUND_HALF + odd) >> _S13)
            rest = small if mag < np.uint32(0x38800000) else large
            out_D[j] = np.uint16(((bits >> _S16) & _HALF_SIGN) | rest)
        bad_N[i] = top >= _FP16_OVERFLOW or (_NONE < top < _SMALL_BITS)


@kernel()
def decode_fp16(in_ND: Array, dst_MD: Array, ids_N: Array) -> Any:
    """Widen fp16 rows and scatter them."""
    for i in range(in_ND.shape[0]):
        if ids_N[i] < 0:
            continue
        in_D = in_ND[i]
        dst_D = dst_MD[np.uint64(ids_N[i])]
        for j in range(in_D.size):
            dst_D[j] = half_from_bits(in_D[j])


@kernel()
def encode_bf16(bits_ND: Array, out_ND: Array, bad_N: Array) -> Any:
    """Round rows to nearest-even bf16; mark those that overflow or are not finite."""
    for i in range(bits_ND.shape[0]):
        bits_D = bits_ND[i]
        out_D = out_ND[i]
        top = _NONE
        for j in range(bits_D.size):
            bits = bits_D[j]
            top = max(top, np.uint32(bits & _MAGNITUDE))
            odd = np.uint32((bits >> _S16) & _ONE)
            out_D[j] = np.uint16((bits + _ROUND_BF16 + odd) >> _S16)
        bad_N[i] = top >= _BF16_OVERFLOW


@kernel()
def decode_bf16(in_ND: Array, dst_bits_MD: Array, ids_N: Array) -> Any:
    """Widen bf16 rows and scatter them."""
    for i in range(in_ND.shape[0]):
        if ids_N[i] < 0:
            continue
        in_D = in_ND[i]
        dst_D = dst_bits_MD[np.uint64(ids_N[i])]
        for j in range(in_D.size):
            dst_D[j] = np.uint32(in_D[j]) << _S16


@kernel()
def scatter_bytes(in_NB: Array, dst_MB: Array, ids_N: Array) -> Any:
    """Copy rows of bytes to their places; bytes, because a section may lie at any address."""
    for i in range(in_NB.shape[0]):
        if ids_N[i] < 0:
            continue
        in_B = in_NB[i]
        dst_B = dst_MB[np.uint64(ids_N[i])]
        for j in range(in_B.size):
            dst_B[j] = in_B[j]
