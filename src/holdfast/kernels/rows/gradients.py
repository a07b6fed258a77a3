"""Rows of a dense array that are not zero: which rows a dense gradient will change.

One pass at the speed of memory: a row's words are OR-ed together, 64 rows make one word of a
bitmap (bitmap.py). A gradient of -0.0 counts as one, because it can change the sign of a zero.

Invariants:
- Every word of the output is written; bits past the last row stay clear.
- A row is left out only if all its bits are zero.

Shapes: bits_NW  the bits of N rows as W integers; words_B  a bitmap of the rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.kernels.compiling import kernel

Words = npt.NDArray[np.uint64]

_ONE = np.uint64(1)


@kernel()
def mark_nonzero(bits_NW: npt.NDArray[Any], words_B: Words) -> None:
    """Write the set of rows that have a bit set; ``words_B`` needs no clearing before."""
    rows, width = bits_NW.shape
    if words_B.size != (rows + 63) // 64:
        raise ValueError("the bitmap is over another number of rows")
    for b in range(words_B.size):
        first = b * 64
        found = np.uint64(0)
        for i in range(min(64, rows - first)):
            any_bit = bits_NW[first + i, 0]
            for w in range(1, width):
                any_bit |= bits_NW[first + i, w]
            if any_bit != 0:
                found |= _ONE << np.uint64(i)
        words_B[b] = found
