"""What an encoding may cost: how far a row may come back from what it was.

Beside the flow: a save and a restore never ask. It is what a codec promises, in numbers, for
whoever has to rely on it or hold the codec to it.

Invariants:
- No decoded value of a row is farther from its original than the bound of the row.
- A bound of zero means every bit, but for the sign of a zero in a row of zeros.

Not here: encoding (checkpoint/format/codec.py); how many bits are worth their loss
(checkpoint/planning/bits.py).

Shapes: rows_ND  N rows of D floats; bound_N  the bound of each; top_N, lo_N, hi_N  its largest
magnitude, its least and its largest value (for log: the stored patterns of those); scale_N  its
stored scale; raw_E  E exceptions; good_N  whether a row is none; start_C  where C blocks begin.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.checkpoint.format.codec import Codec, Parts, encode, read_section
from holdfast.model.dtypes import for_users, name_of
from holdfast.model.schema import BFLOAT16, FLOAT16

Array = npt.NDArray[Any]

# Half a step of a float type: by how much of a number, and of the smallest ones.
_HALF_STEPS = {FLOAT16: (2.0**-11, 2.0**-25), BFLOAT16: (2.0**-8, 2.0**-134)}


def error_bound(codec: Codec, rows_ND: Array) -> npt.NDArray[np.float64]:
    """The largest absolute error that decoding may show in each row; zero for exceptions.

    asym, sym: half the stored scale. adaptive: its squared error is at most asym's, so a single
    value errs by at most sqrt(D) times as much. fp16, bf16: half a step of the float format.
    log: half a step of the bit pattern, so a relative error of (hi - lo) / (2^bits - 2) / 2^24 in
    units of the pattern. kmeans: a codebook lies within the values it was learned from.

    Of another type than float32: what its values lose as float32, and what the decoded ones lose as
    the column's type, come on top.
    """
    count, width = rows_ND.shape
    if codec.is_lossless or count == 0:
        return np.zeros(count)
    if rows_ND.dtype != np.float32:
        return _other_bound(codec, rows_ND)
    read_as = dataclasses.replace(codec, kind="asym") if codec.kind == "adaptive" else codec
    parts, raw_E, _ = read_section(read_as, encode(read_as, rows_ND), rows=count, width=width)
    good_N = np.ones(count, bool)
    good_N[raw_E] = False
    rows_ND = np.where(good_N[:, None], rows_ND, np.float32(0)).astype(np.float64)
    top_N = np.abs(rows_ND).max(axis=1)
    if codec.kind in ("fp16", "bf16"):
        relative, least = _HALF_STEPS[FLOAT16 if codec.kind == "fp16" else BFLOAT16]
        bound_N = np.maximum(top_N * relative, least)
    elif codec.kind in ("sym", "asym", "adaptive"):
        scale_N = parts["scale"].view(np.float16).astype(np.float64)
        levels = 2**codec.bits - 1
        # Half a scale, the float32 rounding of the code's position, and that of the result.
        bound_N = scale_N * (0.5 + levels * 2.0**-22) + 2.0**-23 * (top_N + scale_N)
        if codec.kind == "adaptive":
            bound_N *= np.sqrt(width) * (1 + 2.0**-20)
    elif codec.kind == "log":
        bound_N = _log_bound(codec, rows_ND, parts)
    else:
        bound_N = _books_bound(codec, rows_ND, good_N)
    return np.where(good_N, bound_N, 0.0)


def _other_bound(codec: Codec, rows_ND: Array) -> Array:
    dtype = name_of(rows_ND)
    assert dtype is not None
    section = encode(codec, rows_ND)
    _, raw_E, _ = read_section(
        codec, section, rows=len(rows_ND), width=rows_ND.shape[1], dtype=dtype
    )
    good_N = np.ones(len(rows_ND), bool)
    good_N[raw_E] = False
    values_ND = np.where(good_N[:, None], for_users(rows_ND).astype(np.float64), 0.0)
    wide_ND = values_ND.astype(np.float32)
    bound_N = error_bound(codec, wide_ND) + np.abs(values_ND - wide_ND).max(axis=1)
    top_N = np.abs(values_ND).max(axis=1) + bound_N
    if dtype in _HALF_STEPS:
        relative, least = _HALF_STEPS[dtype]
        bound_N = bound_N + np.maximum(top_N * relative, least)
    return np.where(good_N, bound_N, 0.0)


def _log_bound(codec: Codec, rows_ND: Array, parts: Parts) -> Array:
    lo_N, hi_N = parts["lo"].astype(np.int64), parts["hi"].astype(np.int64)
    steps = 2**codec.bits - 2
    step_N = ((hi_N - lo_N << 16) + steps - 1) // steps
    half_N1 = (step_N[:, None] * (0.5 + 2.0**-14)).astype(np.int64) + 1
    pattern_ND = rows_ND.astype(np.float32).view(np.uint32).astype(np.int64)
    above_ND = np.minimum(pattern_ND + half_N1, 0x7F7FFFFF).astype(np.uint32).view(np.float32)
    below_ND = np.maximum(pattern_ND - half_N1, 0).astype(np.uint32).view(np.float32)
    error_ND = np.maximum(above_ND - rows_ND, rows_ND - below_ND)
    bound_N: Array = np.where(rows_ND > 0, error_ND, 0.0).max(axis=1)
    return bound_N


def _books_bound(codec: Codec, rows_ND: Array, good_N: Array) -> Array:
    count = rows_ND.shape[0]
    lo_N = np.where(good_N, rows_ND.min(axis=1), np.inf)
    hi_N = np.where(good_N, rows_ND.max(axis=1), -np.inf)
    if codec.kind != "kmeans":
        # Which rows share a block of similar rows is not known here: the whole section is.
        size = codec.block_rows if codec.kind == "kmeans-block" else count
        start_C = np.arange(0, count, size)
        block_N = np.arange(count) // size
        lo_N = np.minimum.reduceat(lo_N, start_C)[block_N]
        hi_N = np.maximum.reduceat(hi_N, start_C)[block_N]
    top_N = np.maximum(np.abs(lo_N), np.abs(hi_N))
    with np.errstate(invalid="ignore"):
        bound_N: Array = hi_N - lo_N + np.maximum(top_N * 2.0**-11, 2.0**-25)
    return bound_N
