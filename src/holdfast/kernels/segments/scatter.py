"""Rows of many small segments into their tables, in one call.

A grid has thousands of small chunks. To take each from Python would cost more than its rows do;
here one kernel goes through all segments of a buffer: it reads and checks their headers, unpacks
their ids, leaves out rows that are dead, and copies the others, table by table and column by
column. For columns stored as they are in memory; a segment of another codec, or one that is
damaged, is left to the caller.

Invariants:
- A segment is checked against its bytes, what the catalog says of it, and its table, before its
  first row is copied; of one that is left to the caller nothing was copied.
- Nothing is read outside the buffer and nothing written outside a table, as long as the segments
  lie in the buffer and the tables are as ``Tables`` says.

Not here: checksums (checkpoint/restoring/fetch.py), the bytes of a segment (headers.py), other
codecs (checkpoint/format/codec.py).

Shapes: buffer_B  bytes of all segments; facts_SF  S segments, F numbers named below; rows_T,
widths_TC, types_TC, wires_TC, address_TC  T tables, C columns; deleted_K, deaths_K  deleted rows of
all segments and when.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.kernels.compiling import helper, kernel, read_only
from holdfast.kernels.pointers import array_at
from holdfast.kernels.rows.gather import prefetch
from holdfast.kernels.rows.ids import first_from, unpack
from holdfast.kernels.segments import headers
from holdfast.kernels.segments.headers import mask_dead, read_head

# What the catalog says of a segment, in this order.
(
    AT,  # where in the buffer it begins
    BYTES,
    ROWS,
    FIRST,
    LAST,
    TABLE,
    DEATHS_THROUGH,  # deaths after this step do not count; below 0: there must be none
    VECTOR_LO,  # its deletion vector
    VECTOR_HI,
    BIRTH,  # the place of its birth among all births of what is read together, from 1 on
) = range(10)

_AHEAD = 8


@dataclass(frozen=True, slots=True)
class Tables:
    """Where rows go: the rows of each table, which of them are held (how many, from which on), the
    width of each of its columns (0: none), the number of its type and the wire bytes (as a number)
    of a column that is stored as it is in memory, and the address of its memory (0: the column is
    not wanted)."""

    rows_T: npt.NDArray[np.int64]
    held_T: npt.NDArray[np.int64]
    first_T: npt.NDArray[np.int64]
    widths_TC: npt.NDArray[np.int64]
    types_TC: npt.NDArray[np.int64]
    wires_TC: npt.NDArray[np.int64]
    address_TC: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Placed:
    """What became of segments: how many rows were left out because they are dead, and which
    segments are left to the caller. Of the others, where births are noted: how many rows of each
    were placed, how many were left out, and all those that were left out, one segment's behind the
    other's, as they are counted where they are held."""

    masked: int
    is_odd_S: npt.NDArray[np.bool_]
    placed_S: npt.NDArray[np.int64]
    dead_S: npt.NDArray[np.int64]
    dead_K: npt.NDArray[np.int64]


@helper()
def _item_bytes(type_: int) -> int:
    """Bytes of a number; the types are float32, float16, bfloat16 and float64."""
    return 4 if type_ == 0 else 8 if type_ == 3 else 2


@helper()
def _is_expected(fact_F: Any, head_H: Any, columns_CK: Any, rows_T: Any, widths_TC: Any,
                 types_TC: Any, wires_TC: Any) -> bool:  # fmt: skip
    """Whether a segment is what the catalog and its table say, all columns stored plain."""
    rows = head_H[headers.ROWS]
    if rows != fact_F[ROWS] or head_H[headers.FIRST] != fact_F[FIRST]:
        return False
    if head_H[headers.LAST] != fact_F[LAST] or fact_F[LAST] >= rows_T[fact_F[TABLE]]:
        return False
    if head_H[headers.DEATHS_BYTES] > 0 and fact_F[DEATHS_THROUGH] < 0:
        return False
    table = fact_F[TABLE]
    for c in range(widths_TC.shape[1]):
        width = widths_TC[table, c]
        if c >= head_H[headers.COLUMNS]:
            if width != 0:
                return False
            continue
        type_ = types_TC[table, c]
        if columns_CK[c, headers.WIDTH] != width or columns_CK[c, headers.TYPE] != type_:
            return False
        if columns_CK[c, headers.WIRE] != wires_TC[table, c]:
            return False
        if columns_CK[c, headers.SECTION_BYTES] != _item_bytes(type_) * rows * width:
            return False
    return True


@helper()
def _mask_dead(deleted_K: Any, deaths_K: Any, lo: int, hi: int, step: int, ids_N: Any) -> int:
    """Leave out rows that a deletion vector names; both are ascending."""
    last = ids_N[ids_N.size - 1]
    k = first_from(deleted_K, lo, hi, ids_N[0])
    masked = 0
    i = 0
    while k < hi and deleted_K[k] <= last:
        if deaths_K[k] <= step:
            row = deleted_K[k]
            while ids_N[i] < row:  # ends: the last id is not below it
                i += 1
            if ids_N[i] == row:
                ids_N[i] = -1
                masked += 1
                i += 1
                if i == ids_N.size:
                    break
        k += 1
    return masked


@helper()
def _to_local(ids_N: Any, first: int, held: int) -> None:
    """Rows as they are counted where they are held; those that are not are left out."""
    for i in range(ids_N.size):
        local = ids_N[i] - first
        ids_N[i] = local if ids_N[i] >= 0 and 0 <= local < held else -1


@helper()
def _list_dead(all_N: Any, ids_N: Any, first: int, held: int, out_K: Any) -> int:
    """List the rows held here that masking took away; how many."""
    dead = 0
    for i in range(ids_N.size):
        local = all_N[i] - first
        if ids_N[i] < 0 and 0 <= local < held:
            out_K[dead] = local
            dead += 1
    return dead


@helper()
def _note_placed(ids_N: Any, birth: int, births_M: Any) -> int:
    """Note of rows that are put in their places when they were born; how many they are."""
    placed = 0
    for i in range(ids_N.size):
        if ids_N[i] >= 0:
            births_M[ids_N[i]] = birth
            placed += 1
    return placed


@helper()
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


@kernel()
def _place(
    buffer_B: Any,
    address: int,
    facts_SF: Any,
    rows_T: Any,
    held_T: Any,
    first_T: Any,
    widths_TC: Any,
    types_TC: Any,
    wires_TC: Any,
    address_TC: Any,
    deleted_K: Any,
    deaths_K: Any,
    step: int,
    is_masked: bool,
    births_T: Any,
    ids_X: Any,
    all_X: Any,
    is_odd_S: Any,
    placed_S: Any,
    dead_S: Any,
    dead_K: Any,
) -> int:
    head_H = np.zeros(headers.HEAD_NUMBERS, np.int64)
    columns_CK = np.zeros((widths_TC.shape[1], headers.COLUMN_NUMBERS), np.int64)
    masked = 0
    listed = 0
    for s in range(facts_SF.shape[0]):
        fact_F = facts_SF[s]
        is_odd_S[s] = True
        if not read_head(buffer_B, fact_F[AT], fact_F[BYTES], head_H, columns_CK):
            continue
        if not _is_expected(fact_F, head_H, columns_CK, rows_T, widths_TC, types_TC, wires_TC):
            continue
        rows = head_H[headers.ROWS]
        ids_N = ids_X[:rows]
        ids_at = head_H[headers.IDS_AT]
        data_B = buffer_B[ids_at : ids_at + head_H[headers.IDS_BYTES]]
        encoding = head_H[headers.IDS_ENCODING]
        if not unpack(encoding, data_B, fact_F[FIRST], fact_F[LAST], ids_N):
            continue
        held = held_T[fact_F[TABLE]]
        is_noted = births_T[fact_F[TABLE]] != 0
        if is_masked:
            if is_noted:
                for i in range(rows):
                    all_X[i] = ids_N[i]
            # Vectors first: they need ids in order, and masking takes some away.
            found = 0
            if fact_F[VECTOR_HI] > fact_F[VECTOR_LO]:
                found = _mask_dead(
                    deleted_K, deaths_K, fact_F[VECTOR_LO], fact_F[VECTOR_HI], step, ids_N
                )
            if head_H[headers.DEATHS_BYTES] > 0:
                own = mask_dead(buffer_B, head_H, step, fact_F[DEATHS_THROUGH], ids_N)
                if own < 0:
                    continue
                found += own
            masked += found
            if is_noted and found > 0:
                first = first_T[fact_F[TABLE]]
                dead_S[s] = _list_dead(all_X[:rows], ids_N, first, held, dead_K[listed:])
                listed += dead_S[s]
        is_odd_S[s] = False
        if held != rows_T[fact_F[TABLE]]:
            _to_local(ids_N, first_T[fact_F[TABLE]], held)
        if is_noted:
            births_M = array_at(births_T[fact_F[TABLE]], (held,), np.int32)
            placed_S[s] = _note_placed(ids_N, fact_F[BIRTH], births_M)
        for c in range(head_H[headers.COLUMNS]):
            target = address_TC[fact_F[TABLE], c]
            if target == 0:
                continue
            row_bytes = _item_bytes(types_TC[fact_F[TABLE], c]) * widths_TC[fact_F[TABLE], c]
            section_at = address + columns_CK[c, headers.SECTION_AT]
            if row_bytes % 4 == 0 and target % 4 == 0:
                words = row_bytes // 4
                src_ND = array_at(section_at, (rows, words), np.uint32)
                dst_MD = array_at(target, (held, words), np.uint32)
                _copy_rows(src_ND, dst_MD, ids_N)
            else:  # an odd number of 2 bytes
                halves = row_bytes // 2
                src_NH = array_at(section_at, (rows, halves), np.uint16)
                dst_MH = array_at(target, (held, halves), np.uint16)
                _copy_rows(src_NH, dst_MH, ids_N)
    return masked


@kernel()
def _mark(
    buffer_B: Any, facts_SF: Any, words_T: Any, held_T: Any, first_T: Any, columns: int, ids_X: Any
) -> None:
    head_H = np.zeros(headers.HEAD_NUMBERS, np.int64)
    columns_CK = np.zeros((columns, headers.COLUMN_NUMBERS), np.int64)
    for s in range(facts_SF.shape[0]):
        fact_F = facts_SF[s]
        if not read_head(buffer_B, fact_F[AT], fact_F[BYTES], head_H, columns_CK):
            continue
        ids_N = ids_X[: head_H[headers.ROWS]]
        ids_at = head_H[headers.IDS_AT]
        data_B = buffer_B[ids_at : ids_at + head_H[headers.IDS_BYTES]]
        encoding = head_H[headers.IDS_ENCODING]
        if not unpack(encoding, data_B, fact_F[FIRST], fact_F[LAST], ids_N):
            continue
        if words_T[fact_F[TABLE]] == 0:
            continue
        held = held_T[fact_F[TABLE]]
        _to_local(ids_N, first_T[fact_F[TABLE]], held)
        words_W = array_at(words_T[fact_F[TABLE]], ((held + 63) // 64,), np.uint64)
        for i in range(ids_N.size):
            if ids_N[i] >= 0:
                words_W[ids_N[i] >> 6] |= np.uint64(1) << np.uint64(ids_N[i] & 63)


def mark(
    buffer_B: npt.NDArray[np.uint8],
    facts_SF: npt.NDArray[np.int64],
    words_T: npt.NDArray[np.int64],
    tables: Tables,
) -> None:
    """Mark the rows of segments that ``place`` took, dead ones too, in bitmaps of their tables.

    ``words_T`` are the addresses of the bitmaps of the rows held (0: none is wanted).
    """
    rows_max = int(facts_SF[:, ROWS].max(initial=0))
    _mark(
        read_only(buffer_B),
        facts_SF,
        words_T,
        tables.held_T,
        tables.first_T,
        tables.widths_TC.shape[1],
        np.empty(rows_max, np.int64),
    )


def place(
    buffer_B: npt.NDArray[np.uint8],
    facts_SF: npt.NDArray[np.int64],
    tables: Tables,
    deleted_K: npt.NDArray[np.int64],
    deaths_K: npt.NDArray[np.int64],
    step: int,
    *,
    is_masked: bool,
    births_T: npt.NDArray[np.int64] | None = None,
) -> Placed:
    """Copy the rows of all segments that are alive at a step to their places in their tables.

    ``births_T``: by table the address of an array (int32, one for each row held) where it is noted
    of every row that is placed when it was born; 0: it is not.
    """
    assert buffer_B.flags.c_contiguous
    # No more rows than bytes, whatever the catalog says; a header that lies is found out.
    rows_max = int(np.minimum(facts_SF[:, ROWS], facts_SF[:, BYTES]).max(initial=0))
    is_noted = is_masked and births_T is not None and births_T.any()
    if births_T is None:
        births_T = np.zeros(len(tables.rows_T), np.int64)
    is_odd_S = np.zeros(len(facts_SF), np.bool_)
    placed_S, dead_S = np.zeros((2, len(facts_SF)), np.int64)
    # At most every row is dead; no more rows than bytes.
    rows_all = int(np.minimum(facts_SF[:, ROWS], facts_SF[:, BYTES]).sum()) if is_noted else 0
    dead_K = np.empty(rows_all, np.int64)
    masked = _place(
        read_only(buffer_B),
        buffer_B.ctypes.data,
        facts_SF,
        tables.rows_T,
        tables.held_T,
        tables.first_T,
        tables.widths_TC,
        tables.types_TC,
        tables.wires_TC,
        tables.address_TC,
        read_only(deleted_K),
        read_only(deaths_K),
        step,
        is_masked,
        births_T,
        np.empty(rows_max, np.int64),
        np.empty(rows_max if is_noted else 0, np.int64),
        is_odd_S,
        placed_S,
        dead_S,
        dead_K,
    )
    return Placed(int(masked), is_odd_S, placed_S, dead_S, dead_K[: int(dead_S.sum())])
