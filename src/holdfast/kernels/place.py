"""Rows of many small segments into their tables, in one call.

A grid has thousands of small chunks. To decode each from Python would cost more than its rows do;
here one kernel goes through all segments of a buffer: it unpacks their ids, leaves out rows that
are dead, and copies the others, table by table and column by column. For columns stored as they are
in memory (fp32); other codecs have their own kernels.

Invariants:
- Ids are unpacked and checked before a segment's first row is copied; a segment whose ids are not
  what its header says stops the call and is named.
- Nothing is read outside the buffer and nothing written outside a table, as long as the caller has
  checked the numbers in ``jobs_SJ`` against the buffer and the tables: parts inside the buffer,
  ``last`` below the table's rows, sections of rows * width floats.

Not here: checksums and headers (checkpoint/fetch.py), other codecs (checkpoint/codec.py).

Shapes: buffer_B  bytes of all segments; jobs_SJ  S segments, J numbers named below; columns_SCK  C
columns of each, the 3 numbers named below; kills_K, deaths_K  killed rows of all segments and when.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba import njit, types
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic

from holdfast.kernels.ids import unpack
from holdfast.kernels.rows import prefetch

# Numba's own code generation is untyped.
cgutils: Any = _cgutils
carray: Any = numba.carray  # type: ignore[attr-defined]

# The numbers of a segment, in this order.
(
    ROWS,
    FIRST,
    LAST,
    ID_ENCODING,
    IDS_AT,
    IDS_BYTES,
    DEATH_STEPS_AT,  # where its own deaths begin, or -1
    DEATH_STEPS,  # how many different steps
    DEATHS_AT,
    DEATH_ITEM,  # bytes of a row's step number
    DEATHS_THROUGH,  # deaths after this step do not count
    KILLS_LO,
    KILLS_HI,
    TABLE_ROWS,
) = range(14)
JOB_NUMBERS = 14
# The numbers of a column: where its section begins, its width, the address of its table.
SECTION_AT, WIDTH, ADDRESS = range(3)

_AHEAD = 8


def _as_pointer(typingctx: Any, address: Any) -> Any:
    """A number as a pointer."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


as_pointer: Any = intrinsic(_as_pointer)


@njit(cache=True, nogil=True)
def _number(buffer_B: Any, at: int, size: int) -> Any:
    value = np.uint64(0)
    for b in range(size):
        value |= np.uint64(buffer_B[at + b]) << np.uint64(8 * b)
    return np.int64(value)


@njit(cache=True, nogil=True)
def _mask_own(buffer_B: Any, job_J: Any, step: int, ids_N: Any) -> int:
    """Leave out rows that the segment itself knows to be dead; how many, or -1 for nonsense."""
    masked = 0
    size = job_J[DEATH_ITEM]
    for i in range(ids_N.size):
        index = _number(buffer_B, job_J[DEATHS_AT] + i * size, size)
        if index >= job_J[DEATH_STEPS]:
            return -1
        died = _number(buffer_B, job_J[DEATH_STEPS_AT] + index * 8, 8)
        if died <= step and died <= job_J[DEATHS_THROUGH] and ids_N[i] >= 0:
            ids_N[i] = -1
            masked += 1
    return masked


@njit(cache=True, nogil=True)
def _mask_killed(kills_K: Any, deaths_K: Any, lo: int, hi: int, step: int, ids_N: Any) -> int:
    """Leave out rows that a deletion vector names; both are ascending."""
    masked = 0
    i = 0
    for k in range(lo, hi):
        row = kills_K[k]
        while i < ids_N.size and ids_N[i] < row:
            i += 1
        if i == ids_N.size:
            break
        if ids_N[i] == row and deaths_K[k] <= step:
            ids_N[i] = -1
            masked += 1
            i += 1
    return masked


@njit(cache=True, nogil=True)
def _copy_rows(src_ND: Any, dst_MD: Any, ids_N: Any) -> None:
    count = ids_N.size
    width = src_ND.shape[1]
    for i in range(count):
        if i + _AHEAD < count and ids_N[i + _AHEAD] >= 0:
            prefetch(dst_MD, ids_N[i + _AHEAD])
        row = ids_N[i]
        if row >= 0:
            for d in range(width):
                dst_MD[row, d] = src_ND[i, d]


@njit(cache=True, nogil=True)
def _place(
    buffer_B: Any,
    address: int,
    jobs_SJ: Any,
    columns_SCK: Any,
    kills_K: Any,
    deaths_K: Any,
    step: int,
    ids_X: Any,
) -> int:
    masked = 0
    for s in range(jobs_SJ.shape[0]):
        job_J = jobs_SJ[s]
        ids_N = ids_X[: job_J[ROWS]]
        ids_at = job_J[IDS_AT]
        data_B = buffer_B[ids_at : ids_at + job_J[IDS_BYTES]]
        if not unpack(job_J[ID_ENCODING], data_B, job_J[FIRST], job_J[LAST], ids_N):
            return -1 - s
        # Vectors first: they need ids in order, and masking takes some away.
        if job_J[KILLS_HI] > job_J[KILLS_LO]:
            masked += _mask_killed(kills_K, deaths_K, job_J[KILLS_LO], job_J[KILLS_HI], step, ids_N)
        if job_J[DEATH_STEPS_AT] >= 0:
            own = _mask_own(buffer_B, job_J, step, ids_N)
            if own < 0:
                return -1 - s
            masked += own
        for c in range(columns_SCK.shape[1]):
            width = columns_SCK[s, c, WIDTH]
            if width == 0:
                continue
            src_ND = carray(
                as_pointer(address + columns_SCK[s, c, SECTION_AT]),
                (job_J[ROWS], width),
                np.uint32,
            )
            dst_MD = carray(
                as_pointer(columns_SCK[s, c, ADDRESS]), (job_J[TABLE_ROWS], width), np.uint32
            )
            _copy_rows(src_ND, dst_MD, ids_N)
    return masked


def place(
    buffer_B: npt.NDArray[np.uint8],
    jobs_SJ: npt.NDArray[np.int64],
    columns_SCK: npt.NDArray[np.int64],
    kills_K: npt.NDArray[np.int64],
    deaths_K: npt.NDArray[np.int64],
    step: int,
) -> int:
    """Copy the rows of all segments that are alive at a step to their places in their tables.

    Returns how many rows were left out because they are dead; -1 - s where segment s is damaged
    (those before it are placed by then).
    """
    assert buffer_B.flags.c_contiguous and jobs_SJ.shape[1] == JOB_NUMBERS
    assert len(jobs_SJ) == len(columns_SCK)
    ids_X = np.empty(int(jobs_SJ[:, ROWS].max(initial=0)), np.int64)
    address = buffer_B.ctypes.data
    return int(_place(buffer_B, address, jobs_SJ, columns_SCK, kills_K, deaths_K, step, ids_X))
