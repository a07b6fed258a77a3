"""Integer hashing: the same value on every machine, in every process, in every version.

The synthetic clicks draw their hidden truth from it and the readers fold categories into tables
with it, so a changed constant here silently changes every id. Python's own ``hash`` is salted per
process and is never used.

Not here: checksums of stored bytes.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

# N values

UInt64s = npt.NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)


def mix(values: UInt64s) -> UInt64s:
    """A bijection of 64-bit integers that scatters neighbours (the finalizer of SplitMix64).

    >>> [hex(v) for v in mix(np.array([0, 1], dtype=np.uint64)).tolist()]
    ['0xe220a8397b1dcdaf', '0x910a2dec89025cc1']
    """
    mixed = values + _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def key(*words: int) -> int:
    """One 64-bit key from several integers; their order counts.

    >>> key(1, 2) == key(1, 2), key(1, 2) == key(2, 1)
    (True, False)
    """
    state = np.zeros(1, dtype=np.uint64)
    for word in words:
        state = mix(state ^ mix(np.array([word & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)))
    return int(state[0])


def keys(count: int, *words: int) -> UInt64s:
    """``count`` keys that share a prefix: ``keys(n, *words)[i] == key(*words, i)``."""
    prefix = np.uint64(key(*words))
    return mix(prefix ^ mix(np.arange(count, dtype=np.uint64)))


def gaussian(bits_N: UInt64s) -> npt.NDArray[np.float64]:
    """About normal values (mean 0, variance 1, within ±3.5) from 64 random bits each.

    The sum of four 16-bit pieces: integers until the last multiplication, so every platform gets
    the same bits. No logarithm, no table.

    >>> gaussian(np.array([0, 2**64 - 1], dtype=np.uint64)).round(3).tolist()
    [-3.464, 3.464]
    """
    piece = np.uint64(0xFFFF)
    total = bits_N & piece
    for shift in (16, 32, 48):
        total = total + ((bits_N >> np.uint64(shift)) & piece)
    # four uniforms on 0..65535: mean 4*32767.5, variance 4*(2**32 - 1)/12
    return (total.astype(np.float64) - 131070.0) * (1.0 / math.sqrt((2.0**32 - 1) / 3.0))
