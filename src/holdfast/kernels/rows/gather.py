"""Rows out of tables: gather for a snapshot, hashes to compare.

Numbers of any type, as words; all memory-bound: rows are scattered over gigabytes, so the next rows
are asked for (prefetched) while the current one is copied.

Invariants:
- Ids are checked before the first row is copied: an id outside the table raises IndexError and
  changes nothing. The copy loops themselves do not look again.
- Copies move bits, never numbers: a NaN keeps its payload, -0.0 its sign.

Not here: which rows (bitmap.py); rows into tables (kernels/segments/scatter.py, and the decoders of
kernels/codecs/quantize.py, kernels/codecs/floats.py, kernels/codecs/logarithm.py,
kernels/codecs/kmeans.py); threads (callers split the ids, the kernels release the GIL).

Shapes: src_ND  a table of N rows, D numbers; ids_K  K row ids; out_KD  K rows of it; acc_N  N
hashes; words_NW  the bits of N rows as W words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic
from numba.np import arrayobj as _arrayobj

from holdfast.kernels.compiling import helper, kernel

Numbers = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

# Numba's own code generation is untyped.
cgutils: Any = _cgutils
arrayobj: Any = _arrayobj

# Far enough to hide a cache miss behind row copies, near enough to stay in the first-level cache.
_AHEAD = 16


def _prefetch(typingctx: Any, table: Any, row: Any) -> Any:
    """Ask for the first bytes of a row of a 2-D array; a hint, valid for any address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = arrayobj.make_array(signature.args[0])(context, builder, args[0])
        stride = cgutils.unpack_tuple(builder, array.strides)[0]
        base = builder.ptrtoint(array.data, cgutils.intp_t)
        address = builder.add(base, builder.mul(args[1], stride))
        pointer = builder.inttoptr(address, cgutils.voidptr_t)
        number = cgutils.int32_t
        signature_ir = cgutils.ir.FunctionType(
            cgutils.ir.VoidType(), [cgutils.voidptr_t, number, number, number]
        )
        hint = cgutils.get_or_insert_function(builder.module, signature_ir, "llvm.prefetch.p0")
        builder.call(hint, [pointer, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(table, types.int64), codegen


prefetch: Any = intrinsic(_prefetch)


@kernel()
def check_ids(ids_K: Ids, rows: int) -> bool:
    """Whether every id is in [0, rows)."""
    bad = False
    for i in range(ids_K.size):
        bad |= (ids_K[i] < 0) | (ids_K[i] >= rows)
    return not bad


@kernel()
def gather(src_ND: Numbers, ids_K: Ids, out_KD: Numbers) -> None:
    """Copy rows ``ids`` of a table into ``out``, in the order of the ids."""
    count = ids_K.size
    width = src_ND.shape[1]
    if out_KD.shape[0] != count or out_KD.shape[1] != width:
        raise ValueError("the output has not the shape of the gathered rows")
    if not check_ids(ids_K, src_ND.shape[0]):
        raise IndexError("a row id is outside the table")
    for i in range(count):
        if i + _AHEAD < count:
            prefetch(src_ND, ids_K[i + _AHEAD])
        row = np.uint64(ids_K[i])
        for d in range(width):
            out_KD[i, d] = src_ND[row, d]


# Odd multipliers with well spread bits: odd makes a multiplication reversible, so that two rows
# that differ in one word never meet, and the first one keeps the few bits that changes of floats
# have in common (signs, exponents) from cancelling in the next word.
_K1 = np.uint64(0x9E3779B97F4A7C15)
_K2 = np.uint64(0xC2B2AE3D27D4EB4F)
_K3 = np.uint64(0x165667B19E3779F9)
_R31, _R33 = np.uint64(31), np.uint64(33)
_R29, _R32 = np.uint64(29), np.uint64(32)


@helper()
def _mix(acc: np.uint64, word: np.uint64) -> np.uint64:
    """One word into a hash; a different word, or a different hash before, always shows."""
    acc ^= word * _K1
    return ((acc << _R31) | (acc >> _R33)) * _K2


@kernel()
def _hash_words(words_NW: npt.NDArray[Any], acc_N: Hashes) -> None:
    rows, width = words_NW.shape
    if acc_N.size != rows:
        raise ValueError("there is not one hash for each row")
    # Narrow rows overlap with their neighbours; in a wide one a single chain would wait for its own
    # multiplications, so it is cut into four.
    fours = width // 4 * 4 if width >= 32 else 0
    for i in range(rows):
        acc = acc_N[i]
        if fours > 0:
            a, b, c, d = acc, _K1, _K2, _K3
            for w in range(0, fours, 4):
                a = _mix(a, np.uint64(words_NW[i, w]))
                b = _mix(b, np.uint64(words_NW[i, w + 1]))
                c = _mix(c, np.uint64(words_NW[i, w + 2]))
                d = _mix(d, np.uint64(words_NW[i, w + 3]))
            acc = _mix(_mix(_mix(a, b), c), d)
        for w in range(fours, width):
            acc = _mix(acc, np.uint64(words_NW[i, w]))
        acc = (acc ^ (acc >> _R32)) * _K3
        acc_N[i] = acc ^ (acc >> _R29)


def hash_rows(src_ND: Numbers, acc_N: Hashes) -> None:
    """Fold the bits of every row into its hash, in place.

    Start from zeros (or a seed) and call once per column of a record: weights, then each state.
    Equal bits and an equal hash before give an equal hash; a single different bit gives a different
    one for certain, the sign of a zero included.
    """
    row_bytes = src_ND.shape[1] * src_ND.dtype.itemsize
    word = np.uint16 if row_bytes % 4 else np.uint32 if row_bytes % 8 else np.uint64
    _hash_words(src_ND.view(word), acc_N)
