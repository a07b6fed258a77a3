"""What a server does to the records of its shard: read, update, and tell parity what changed.

A record that changed since parity last heard of it *waits*: it is in the waiting list, with its
bits as parity knows them (``before``). The first change of a record puts it there; further changes
find it there and add nothing, so that differences of one record coalesce. A flush takes records out
again, each with its difference, before XOR now.

    update, overwrite            records change, the new ones among them wait
    note                         the same before something else changes them
    take_differences             some or all leave the list, with their differences
    release                      the same, where parity is told otherwise what changed
    as_parity_knows              what a stripe is decoded from while records wait

The list is three arrays and a count, the caller's: ``waiting_slots`` and ``before`` hold the
waiting records at positions 0 to count - 1, ``waiting_at`` says the position of each slot, or -1.
Taking K records costs K steps, however many wait: those at the end move to the places that became
free, so the list has no order to rely on.

Invariants:
- ``waiting_slots[waiting_at[slot]] == slot`` for every record that waits; ``waiting_at`` is -1 for
  all others.
- What parity knows XOR the differences it is told is what the record is: bits, never numbers.
- Shapes, slots, positions and room are checked before anything changes: a bad one raises
  (ValueError, IndexError) and changes nothing.

All kernels release the GIL; the caller keeps two of them from changing one shard at a time. Slots
and rows that come in may be read-only (memory of a message), slots of any whole type: one compiled
kernel serves all.

Not here: optimizers (optimizers.py), parity (galois.py), which records to take and when (cluster/).

Shapes: records_MW  M records, W floats; slots_N  which of them; grads_ND  N gradients, D weights;
hyper_H  as in optimizers.py; waiting_at_M, waiting_slots_C, before_CW  the list, room for C;
picked_K  positions in it; diffs_KW  differences as words.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from holdfast.kernels.compiling import as_slots, helper, kernel, read_only
from holdfast.kernels.rows.gather import check_ids, prefetch
from holdfast.kernels.servers.optimizers import check_update, step_row

Floats = npt.NDArray[np.float32]
Slots = npt.NDArray[np.int64]
Places = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint32]

# Far enough to hide a cache miss behind the rows before, near enough to be still in the cache.
_AHEAD = 8


def new_waiting(records: int, width: int, room: int) -> tuple[Places, Slots, Floats]:
    """An empty waiting list: ``waiting_at``, ``waiting_slots`` and ``before``, for ``room``
    records."""
    waiting_at_M = np.full(records, -1, np.int32)
    return waiting_at_M, np.zeros(room, np.int64), np.zeros((room, width), np.float32)


@kernel()
def _gather(records_MW: Floats, slots_N: Slots, out_ND: Floats) -> None:
    count, width = out_ND.shape
    if slots_N.size != count or width > records_MW.shape[1]:
        raise ValueError("the output has not the shape of the gathered rows")
    if not check_ids(slots_N, records_MW.shape[0]):
        raise IndexError("a slot is outside the records")
    for i in range(count):
        if i + _AHEAD < count:
            prefetch(records_MW, slots_N[i + _AHEAD])
        row = np.uint64(slots_N[i])
        for d in range(width):
            out_ND[i, d] = records_MW[row, d]


def gather(records_MW: Floats, slots_N: Slots, dim: int) -> Floats:
    """The first ``dim`` floats of records: their weights, or all of a record where that is its
    width.

    >>> gather(np.arange(6, dtype=np.float32).reshape(2, 3), np.array([1, 0, 1]), 2)
    array([[3., 4.],
           [0., 1.],
           [3., 4.]], dtype=float32)
    """
    out_ND = np.empty((slots_N.size, dim), np.float32)
    _gather(records_MW, as_slots(slots_N), out_ND)
    return out_ND


def gather_into(records_MW: Floats, slots_N: Slots, out_ND: Floats) -> None:
    """As ``gather``, into memory of the caller's: as many floats of each record as it is wide."""
    _gather(records_MW, as_slots(slots_N), out_ND)


@helper()
def _check_list(records_MW: Floats, waiting_at_M: Places, waiting_slots_C: Slots,
                before_CW: Floats, count: int, more: int) -> None:  # fmt: skip
    if waiting_at_M.size != records_MW.shape[0] or before_CW.shape[1] != records_MW.shape[1]:
        raise ValueError("the waiting list has not the shape of the records")
    if before_CW.shape[0] != waiting_slots_C.size:
        raise ValueError("the waiting list has not one place for each slot")
    if count < 0 or count + more > waiting_slots_C.size:
        raise ValueError("there is no room in the waiting list")


@helper(forceinline=True)
def _note(records_MW: Floats, row: np.uint64, waiting_at_M: Places, waiting_slots_C: Slots,
          before_CW: Floats, count: int) -> int:  # fmt: skip
    """Let a record wait, if it does not yet; how many wait now."""
    if waiting_at_M[row] >= 0:
        return count
    waiting_at_M[row] = count
    waiting_slots_C[count] = row
    for w in range(records_MW.shape[1]):
        before_CW[count, w] = records_MW[row, w]
    return count + 1


@kernel(error_model="numpy")
def _update(records_MW: Floats, slots_N: Slots, grads_ND: Floats, kind: int, hyper_H: Floats,
            waiting_at_M: Places, waiting_slots_C: Slots, before_CW: Floats,
            count: int) -> int:  # fmt: skip
    rows = slots_N.size
    check_update(records_MW, slots_N, grads_ND, kind, hyper_H)
    _check_list(records_MW, waiting_at_M, waiting_slots_C, before_CW, count, rows)
    places_M1 = waiting_at_M.reshape((waiting_at_M.size, 1))
    for i in range(rows):
        if i + _AHEAD < rows:
            prefetch(records_MW, slots_N[i + _AHEAD])
            prefetch(places_M1, slots_N[i + _AHEAD])
        row = np.uint64(slots_N[i])
        count = _note(records_MW, row, waiting_at_M, waiting_slots_C, before_CW, count)
        step_row(records_MW, row, grads_ND, i, kind, hyper_H)
    return count


def update(records_MW: Floats, slots_N: Slots, grads_ND: Floats, kind: int, hyper_H: Floats,
           waiting_at_M: Places, waiting_slots_C: Slots, before_CW: Floats,
           count: int) -> int:  # fmt: skip
    """Apply gradients to records in place and let those wait that do not yet; how many wait now.

    There must be room for all of them, whether they wait already or not.
    """
    waiting: int = _update(
        records_MW, as_slots(slots_N), read_only(grads_ND), kind, read_only(hyper_H),
        waiting_at_M, waiting_slots_C, before_CW, count,
    )  # fmt: skip
    return waiting


@kernel()
def _overwrite(records_MW: Floats, slots_N: Slots, values_NW: Floats, waiting_at_M: Places,
               waiting_slots_C: Slots, before_CW: Floats, count: int) -> int:  # fmt: skip
    rows, width = values_NW.shape
    if slots_N.size != rows or width != records_MW.shape[1]:
        raise ValueError("the values have not the shape of the records")
    if not check_ids(slots_N, records_MW.shape[0]):
        raise IndexError("a slot is outside the records")
    _check_list(records_MW, waiting_at_M, waiting_slots_C, before_CW, count, rows)
    for i in range(rows):
        if i + _AHEAD < rows:
            prefetch(records_MW, slots_N[i + _AHEAD])
        row = np.uint64(slots_N[i])
        count = _note(records_MW, row, waiting_at_M, waiting_slots_C, before_CW, count)
        for w in range(width):
            records_MW[row, w] = values_NW[i, w]
    return count


def overwrite(records_MW: Floats, slots_N: Slots, values_NW: Floats, waiting_at_M: Places,
              waiting_slots_C: Slots, before_CW: Floats, count: int) -> int:  # fmt: skip
    """Set records, all of their bits, and let those wait that do not yet; how many wait now."""
    waiting: int = _overwrite(
        records_MW, as_slots(slots_N), read_only(values_NW),
        waiting_at_M, waiting_slots_C, before_CW, count,
    )  # fmt: skip
    return waiting


@kernel()
def _note_all(records_MW: Floats, slots_N: Slots, waiting_at_M: Places, waiting_slots_C: Slots,
              before_CW: Floats, count: int) -> int:  # fmt: skip
    if not check_ids(slots_N, records_MW.shape[0]):
        raise IndexError("a slot is outside the records")
    _check_list(records_MW, waiting_at_M, waiting_slots_C, before_CW, count, slots_N.size)
    for i in range(slots_N.size):
        row = np.uint64(slots_N[i])
        count = _note(records_MW, row, waiting_at_M, waiting_slots_C, before_CW, count)
    return count


def note(records_MW: Floats, slots_N: Slots, waiting_at_M: Places, waiting_slots_C: Slots,
         before_CW: Floats, count: int) -> int:  # fmt: skip
    """Let records wait that are about to change, if they do not yet; how many wait now."""
    waiting: int = _note_all(
        records_MW, as_slots(slots_N), waiting_at_M, waiting_slots_C, before_CW, count
    )
    return waiting


@helper()
def _check_picked(records_MW: Floats, waiting_at_M: Places, waiting_slots_C: Slots,
                  before_CW: Floats, count: int, picked_K: Slots) -> None:  # fmt: skip
    _check_list(records_MW, waiting_at_M, waiting_slots_C, before_CW, count, 0)
    earlier = -1
    for i in range(picked_K.size):
        if picked_K[i] <= earlier:
            raise ValueError("picked positions do not ascend")
        earlier = picked_K[i]
    if earlier >= count:
        raise IndexError("a picked position is outside the waiting list")


@helper()
def _release(waiting_at_M: Places, waiting_slots_C: Slots, before_CW: Floats, count: int,
             picked_K: Slots) -> int:  # fmt: skip
    """Picked records leave the list; those at its end that stay move to where places are free."""
    for i in range(picked_K.size):
        waiting_at_M[waiting_slots_C[picked_K[i]]] = -1
    left = count - picked_K.size
    free = 0
    for last in range(left, count):
        slot = waiting_slots_C[last]
        if waiting_at_M[slot] < 0:
            continue
        # As many stay beyond ``left`` as were picked before it, and those come first.
        place = picked_K[free]
        free += 1
        waiting_at_M[slot] = place
        waiting_slots_C[place] = slot
        for w in range(before_CW.shape[1]):
            before_CW[place, w] = before_CW[last, w]
    return left


@kernel()
def _take_differences(words_MW: Words, records_MW: Floats, waiting_at_M: Places,
                      waiting_slots_C: Slots, before_CW: Floats, words_before_CW: Words,
                      count: int, picked_K: Slots, slots_K: Slots,
                      diffs_KW: Words) -> int:  # fmt: skip
    _check_picked(records_MW, waiting_at_M, waiting_slots_C, before_CW, count, picked_K)
    rows, width = diffs_KW.shape
    for i in range(rows):
        if i + _AHEAD < rows:
            prefetch(words_MW, waiting_slots_C[picked_K[i + _AHEAD]])
        place = np.uint64(picked_K[i])
        slots_K[i] = waiting_slots_C[place]
        row = np.uint64(slots_K[i])
        for w in range(width):
            diffs_KW[i, w] = words_before_CW[place, w] ^ words_MW[row, w]
    return _release(waiting_at_M, waiting_slots_C, before_CW, count, picked_K)


def take_differences(records_MW: Floats, waiting_at_M: Places, waiting_slots_C: Slots,
                     before_CW: Floats, count: int,
                     picked_K: Slots | None = None) -> tuple[Slots, Words, int]:  # fmt: skip
    """Take records out of the waiting list, at ascending positions (None: all of them): the slots,
    the differences before XOR now, and how many wait still."""
    picked_K = np.arange(count) if picked_K is None else picked_K
    slots_K = np.empty(picked_K.size, np.int64)
    diffs_KW = np.empty((picked_K.size, records_MW.shape[1]), np.uint32)
    left: int = _take_differences(
        records_MW.view(np.uint32), records_MW, waiting_at_M, waiting_slots_C, before_CW,
        before_CW.view(np.uint32), count, as_slots(picked_K), slots_K, diffs_KW,
    )  # fmt: skip
    return slots_K, diffs_KW, left


@kernel()
def _let_go(records_MW: Floats, waiting_at_M: Places, waiting_slots_C: Slots, before_CW: Floats,
            count: int, picked_K: Slots) -> int:  # fmt: skip
    _check_picked(records_MW, waiting_at_M, waiting_slots_C, before_CW, count, picked_K)
    return _release(waiting_at_M, waiting_slots_C, before_CW, count, picked_K)


def release(records_MW: Floats, waiting_at_M: Places, waiting_slots_C: Slots, before_CW: Floats,
            count: int, picked_K: Slots | None = None) -> int:  # fmt: skip
    """Take records out of the waiting list, at ascending positions (None: all of them), without
    their differences; how many wait still."""
    picked_K = np.arange(count) if picked_K is None else picked_K
    left: int = _let_go(
        records_MW, waiting_at_M, waiting_slots_C, before_CW, count, as_slots(picked_K)
    )
    return left


@kernel()
def _take_changes(records_MW: Floats, waiting_at_M: Places, waiting_slots_C: Slots,
                  before_CW: Floats, count: int, picked_K: Slots, slots_K: Slots,
                  changes_KW: Floats) -> int:  # fmt: skip
    _check_picked(records_MW, waiting_at_M, waiting_slots_C, before_CW, count, picked_K)
    for i in range(picked_K.size):
        place = np.uint64(picked_K[i])
        slots_K[i] = waiting_slots_C[place]
        row = np.uint64(slots_K[i])
        for w in range(records_MW.shape[1]):
            changes_KW[i, w] = records_MW[row, w] - before_CW[place, w]
    return _release(waiting_at_M, waiting_slots_C, before_CW, count, picked_K)


def take_changes(records_MW: Floats, waiting_at_M: Places, waiting_slots_C: Slots,
                 before_CW: Floats, count: int,
                 picked_K: Slots | None = None) -> tuple[Slots, Floats, int]:  # fmt: skip
    """As ``take_differences``, but differences of numbers, now - before: for the float sum code."""
    picked_K = np.arange(count) if picked_K is None else picked_K
    slots_K = np.empty(picked_K.size, np.int64)
    changes_KW = np.empty((picked_K.size, records_MW.shape[1]), np.float32)
    left: int = _take_changes(
        records_MW, waiting_at_M, waiting_slots_C, before_CW, count, as_slots(picked_K), slots_K,
        changes_KW,
    )  # fmt: skip
    return slots_K, changes_KW, left


@kernel()
def _as_parity_knows(records_MW: Floats, slots_N: Slots, waiting_at_M: Places, before_CW: Floats,
                     out_NW: Floats) -> None:  # fmt: skip
    if waiting_at_M.size != records_MW.shape[0] or before_CW.shape[1] != records_MW.shape[1]:
        raise ValueError("the waiting list has not the shape of the records")
    if not check_ids(slots_N, records_MW.shape[0]):
        raise IndexError("a slot is outside the records")
    rows, width = out_NW.shape
    for i in range(rows):
        if i + _AHEAD < rows:
            prefetch(records_MW, slots_N[i + _AHEAD])
        row = np.uint64(slots_N[i])
        place = waiting_at_M[row]
        if place < 0:
            for w in range(width):
                out_NW[i, w] = records_MW[row, w]
        else:
            for w in range(width):
                out_NW[i, w] = before_CW[place, w]


def as_parity_knows(records_MW: Floats, slots_N: Slots, waiting_at_M: Places,
                    before_CW: Floats) -> Floats:  # fmt: skip
    """Records as parity knows them: as before where they wait, else as they are."""
    out_NW = np.empty((slots_N.size, records_MW.shape[1]), np.float32)
    _as_parity_knows(records_MW, as_slots(slots_N), waiting_at_M, before_CW, out_NW)
    return out_NW
