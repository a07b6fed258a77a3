"""First values of rows: a pure function of seed, row id and column.

A row starts with the same bits whichever server holds it, whatever the number of servers, and a
parity server can compute the rows its parities are made of without asking anybody.

Not here: which rows (model/placement.py), optimizer state, which starts at zero.

# N rows, D floats
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from holdfast.kernels.compiling import helper, kernel

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_STEP = np.float32(2.0**-23)


@helper(forceinline=True)
def _mix(x: np.uint64) -> np.uint64:
    """Splitmix64's finisher: every bit of the input changes half of the output."""
    x ^= x >> np.uint64(30)
    x *= _MIX_A
    x ^= x >> np.uint64(27)
    x *= _MIX_B
    return x ^ (x >> np.uint64(31))


@kernel()
def fill(out_NW: Floats, ids_N: Ids, dim: int, seed: int, bound: float) -> None:
    """Uniform values in [-bound, bound) for the first ``dim`` columns, zeros behind them."""
    high = np.float32(bound)
    start = _mix(np.uint64(seed) + _GOLDEN)
    for n in range(len(ids_N)):
        row = _mix(start ^ (np.uint64(ids_N[n]) * _GOLDEN))
        for d in range(dim):
            bits = _mix(row + np.uint64(d + 1) * _GOLDEN) >> np.uint64(40)  # 24 bits
            out_NW[n, d] = high * (np.float32(bits) * _STEP - np.float32(1.0))
        for d in range(dim, out_NW.shape[1]):
            out_NW[n, d] = np.float32(0.0)
