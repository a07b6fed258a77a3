"""Gradients folded into float sums: a parity server that repeats the optimizer's steps.

A sum of rows changes by what its rows change by. With their gradients alone a parity server finds
that out as the data server did: by the same step, from the same optimizer state. So it keeps the
state of every data row of its stripes (``states_RS``), and weights it need not know: they are zero
in a scratch record, and what is there after the step is the change.

Invariants:
- States are the data server's, to the bit, as long as the same gradients come in the same order:
  no state depends on weights where there is no weight decay.
- Shapes, slots and positions are checked before anything changes: a bad one raises (ValueError,
  IndexError) and changes nothing.

Not here: steps (optimizers.py), codes on bits (galois.py).

Shapes: sums_QW  Q parity rows, W floats; states_RS  R = Q x data rows a stripe, S floats of state;
slots_K, positions_K  which of them; grads_KD  their gradients, D weights; changes_KS.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.kernels.compiling import as_slots, helper, kernel, read_only
from holdfast.kernels.rows.gather import check_ids
from holdfast.kernels.servers.optimizers import check_update, step_row

Floats = npt.NDArray[np.float32]
Slots = npt.NDArray[np.int64]


@helper()
def _check_states(sums_QW: Floats, states_RS: Floats, slots_K: Slots, positions_K: Slots,
                  dim: int) -> int:  # fmt: skip
    """Refuse what does not belong together; how many data rows a stripe has."""
    rows, width = sums_QW.shape
    if states_RS.shape[1] != width - dim or slots_K.size != positions_K.size:
        raise ValueError("sums, states and positions do not belong together")
    if rows == 0 or states_RS.shape[0] % rows != 0:
        raise ValueError("there is not a state for each data row of a sum")
    data: int = states_RS.shape[0] // rows
    if not check_ids(slots_K, rows):
        raise IndexError("a slot is outside the parity rows")
    if not check_ids(positions_K, data):
        raise IndexError("a position is outside its stripe")
    return data


@kernel(error_model="numpy")
def _fold_gradients(sums_QW: Floats, states_RS: Floats, slots_K: Slots, positions_K: Slots,
                    grads_KD: Floats, kind: int, hyper_H: Floats) -> None:  # fmt: skip
    check_update(sums_QW, slots_K, grads_KD, kind, hyper_H)
    dim, width = grads_KD.shape[1], sums_QW.shape[1]
    data = _check_states(sums_QW, states_RS, slots_K, positions_K, dim)
    scratch_1W = np.zeros((1, width), np.float32)
    for i in range(slots_K.size):
        row = slots_K[i]
        state = row * data + positions_K[i]
        for w in range(dim):
            scratch_1W[0, w] = np.float32(0)
        for w in range(dim, width):
            scratch_1W[0, w] = states_RS[state, w - dim]
        step_row(scratch_1W, np.uint64(0), grads_KD, i, kind, hyper_H)
        for w in range(dim):
            sums_QW[row, w] += scratch_1W[0, w]
        for w in range(dim, width):
            sums_QW[row, w] += scratch_1W[0, w] - states_RS[state, w - dim]
            states_RS[state, w - dim] = scratch_1W[0, w]


def fold_gradients(sums_QW: Floats, states_RS: Floats, slots_K: npt.NDArray[Any],
                   positions_K: npt.NDArray[Any], grads_KD: Floats, kind: int,
                   hyper_H: Floats) -> None:  # fmt: skip
    """Add to sums what gradients change in their rows, one after another; the states follow.

    >>> sums, states = np.zeros((1, 2), np.float32), np.zeros((1, 1), np.float32)
    >>> hyper = np.array([0.5, 0.5, 0, 0, 0], np.float32)
    >>> fold_gradients(sums, states, np.zeros(2, int), np.zeros(2, int), np.ones((2, 1), "f4"), 1,
    ...                hyper)
    >>> sums.tolist(), states.tolist()
    ([[-1.25, 1.5]], [[1.5]])
    """
    _fold_gradients(
        sums_QW, states_RS, as_slots(slots_K), as_slots(positions_K), read_only(grads_KD), kind,
        read_only(hyper_H),
    )  # fmt: skip


@kernel()
def _add_states(sums_QW: Floats, states_RS: Floats, slots_K: Slots, positions_K: Slots,
                changes_KS: Floats) -> None:  # fmt: skip
    width = changes_KS.shape[1]
    data = _check_states(sums_QW, states_RS, slots_K, positions_K, sums_QW.shape[1] - width)
    if changes_KS.shape[0] != slots_K.size:
        raise ValueError("there is not one change for each slot")
    for i in range(slots_K.size):
        state = slots_K[i] * data + positions_K[i]
        for s in range(width):
            states_RS[state, s] += changes_KS[i, s]


def add_states(sums_QW: Floats, states_RS: Floats, slots_K: npt.NDArray[Any],
               positions_K: npt.NDArray[Any], changes_KS: Floats) -> None:  # fmt: skip
    """Add changes to states alone, where the sums are told otherwise; ``sums_QW`` for its shape."""
    changes_KS = np.ascontiguousarray(changes_KS)
    _add_states(sums_QW, states_RS, as_slots(slots_K), as_slots(positions_K), read_only(changes_KS))
