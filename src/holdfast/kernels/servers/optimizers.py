"""Optimizers on row records: a record is a row's weights, then its optimizer state.

    SGD              w
    MOMENTUM         w  b           b: moving sum of gradients
    ADAGRAD          w  s           s: sum of squares, for each weight
    ROWWISE_ADAGRAD  w  s           s: one number, sum of the mean squares of the row's gradients
    ADAM             w  m  v  t     m, v: moving means of gradients and squares; t: the row's steps

The rules are those of torch.optim's SGD, Adagrad and SparseAdam, and of fbgemm's row-wise Adagrad,
for the rows that have a gradient; other rows stay as they are. So momentum, Adam's means and weight
decay (added to the gradient, as ``weight_decay`` of torch) act when a row is touched and only then.
Adam's bias correction counts the steps of the row, not of the table: a rare row is corrected when
it needs it. All state starts as zeros.

Invariants:
- The same records and gradients give the same bits, on every machine: float32 operations in a fixed
  order, none fused or moved. Powers of Adam's betas are float64 products.
- Shapes and slots are checked before the first record changes: a bad one raises (ValueError,
  IndexError) and changes nothing.

Not here: what a server does around an update (shard.py).

Shapes: records_MW  M records, W floats; slots_N  which of them; grads_ND  their gradients, D
weights; hyper_H  lr, momentum or beta1, beta2, eps, weight decay.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba.extending import register_jitable

from holdfast.kernels.compiling import helper, kernel
from holdfast.kernels.rows.gather import check_ids, prefetch

Floats = npt.NDArray[np.float32]
Slots = npt.NDArray[np.int64]

SGD, MOMENTUM, ADAGRAD, ROWWISE_ADAGRAD, ADAM = range(5)
LR, BETA1, BETA2, EPS, DECAY = range(5)
HYPERS = 5

# Far enough to hide a cache miss behind the rows before, near enough to be still in the cache.
_AHEAD = 8
_ZERO, _ONE = np.float32(0), np.float32(1)


@register_jitable
def state_floats(kind: int, dim: int) -> int:
    """How many floats of state a row of ``dim`` weights has.

    >>> [state_floats(kind, 16) for kind in (SGD, MOMENTUM, ADAGRAD, ROWWISE_ADAGRAD, ADAM)]
    [0, 16, 16, 1, 33]
    """
    if kind == SGD:
        return 0
    if kind in (MOMENTUM, ADAGRAD):
        return dim
    if kind == ROWWISE_ADAGRAD:
        return 1
    if kind == ADAM:
        return 2 * dim + 1
    raise ValueError("there is no such kind of optimizer")


@helper()
def check_update(records_MW: Floats, slots_N: Slots, grads_ND: Floats, kind: int,
                 hyper_H: Floats) -> None:  # fmt: skip
    """Refuse arrays that do not belong together, and slots outside the records."""
    dim = grads_ND.shape[1]
    if grads_ND.shape[0] != slots_N.size:
        raise ValueError("there is not one gradient for each slot")
    if records_MW.shape[1] != dim + state_floats(kind, dim):
        raise ValueError("the records have not the width of weights and optimizer state")
    if hyper_H.size != HYPERS:
        raise ValueError("hyperparameters are lr, momentum or beta1, beta2, eps, weight decay")
    if not check_ids(slots_N, records_MW.shape[0]):
        raise IndexError("a slot is outside the records")


@helper(forceinline=True, error_model="numpy")
def _decayed(grad: np.float32, weight: np.float32, decay: np.float32) -> np.float32:
    """The gradient with weight decay; without, the same bits."""
    return grad + decay * weight if decay != _ZERO else grad


@helper()
def _power(base: float, exponent: int) -> float:
    """A power as products alone, so that no library's idea of ``pow`` gets into a row."""
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


@helper(forceinline=True, error_model="numpy")
def _mean_square(records_MW: Floats, row: np.uint64, grads_ND: Floats, i: int,
                 decay: np.float32) -> np.float32:  # fmt: skip
    """Mean of a gradient's squares: four sums, of every fourth each, so that none waits for itself;
    what four do not divide goes to the first."""
    dim = grads_ND.shape[1]
    fours = dim // 4 * 4
    a, b, c, e = _ZERO, _ZERO, _ZERO, _ZERO
    for d in range(0, fours, 4):
        g0 = _decayed(grads_ND[i, d], records_MW[row, d], decay)
        g1 = _decayed(grads_ND[i, d + 1], records_MW[row, d + 1], decay)
        g2 = _decayed(grads_ND[i, d + 2], records_MW[row, d + 2], decay)
        g3 = _decayed(grads_ND[i, d + 3], records_MW[row, d + 3], decay)
        a, b, c, e = a + g0 * g0, b + g1 * g1, c + g2 * g2, e + g3 * g3
    for d in range(fours, dim):
        g = _decayed(grads_ND[i, d], records_MW[row, d], decay)
        a += g * g
    return ((a + b) + (c + e)) / np.float32(dim)


@helper(forceinline=True, error_model="numpy")
def _adam_row(records_MW: Floats, row: np.uint64, grads_ND: Floats, i: int,
              hyper_H: Floats) -> None:  # fmt: skip
    dim = grads_ND.shape[1]
    eps, decay = hyper_H[EPS], hyper_H[DECAY]
    beta1, beta2 = hyper_H[BETA1], hyper_H[BETA2]
    rate1, rate2 = _ONE - beta1, _ONE - beta2
    # Steps stop at 2^24, where a float32 has no next whole number; both powers are 0 by then.
    steps = records_MW[row, 3 * dim] + _ONE
    records_MW[row, 3 * dim] = steps
    correction1 = 1.0 - _power(np.float64(beta1), int(steps))
    correction2 = 1.0 - _power(np.float64(beta2), int(steps))
    size = np.float32(np.float64(hyper_H[LR]) * np.sqrt(correction2) / correction1)
    for d in range(dim):
        w = records_MW[row, d]
        m = records_MW[row, dim + d]
        v = records_MW[row, 2 * dim + d]
        g = _decayed(grads_ND[i, d], w, decay)
        m += (g - m) * rate1
        v += (g * g - v) * rate2
        records_MW[row, d] = w - size * (m / (np.sqrt(v) + eps))
        records_MW[row, dim + d] = m
        records_MW[row, 2 * dim + d] = v


@helper(forceinline=True, error_model="numpy")
def step_row(records_MW: Floats, row: np.uint64, grads_ND: Floats, i: int, kind: int,
             hyper_H: Floats) -> None:  # fmt: skip
    """Apply gradient ``i`` to one record, in place. Looks at no bounds: see ``check_update``."""
    dim = grads_ND.shape[1]
    lr, decay, eps = hyper_H[LR], hyper_H[DECAY], hyper_H[EPS]
    if kind == SGD:
        for d in range(dim):
            w = records_MW[row, d]
            records_MW[row, d] = w - lr * _decayed(grads_ND[i, d], w, decay)
    elif kind == MOMENTUM:
        momentum = hyper_H[BETA1]
        for d in range(dim):
            w = records_MW[row, d]
            g = _decayed(grads_ND[i, d], w, decay)
            b = momentum * records_MW[row, dim + d] + g
            records_MW[row, dim + d] = b
            records_MW[row, d] = w - lr * b
    elif kind == ADAGRAD:
        for d in range(dim):
            w = records_MW[row, d]
            g = _decayed(grads_ND[i, d], w, decay)
            s = records_MW[row, dim + d] + g * g
            records_MW[row, dim + d] = s
            records_MW[row, d] = w - lr * (g / (np.sqrt(s) + eps))
    elif kind == ROWWISE_ADAGRAD:
        s = records_MW[row, dim] + _mean_square(records_MW, row, grads_ND, i, decay)
        records_MW[row, dim] = s
        size = lr / (np.sqrt(s) + eps)
        for d in range(dim):
            w = records_MW[row, d]
            records_MW[row, d] = w - size * _decayed(grads_ND[i, d], w, decay)
    else:
        _adam_row(records_MW, row, grads_ND, i, hyper_H)


@kernel(error_model="numpy")
def apply(records_MW: Floats, slots_N: Slots, grads_ND: Floats, kind: int,
          hyper_H: Floats) -> None:  # fmt: skip
    """Apply gradients to records in place, one after another: a slot that comes twice has two
    steps."""
    check_update(records_MW, slots_N, grads_ND, kind, hyper_H)
    count = slots_N.size
    for i in range(count):
        if i + _AHEAD < count:
            prefetch(records_MW, slots_N[i + _AHEAD])
        step_row(records_MW, np.uint64(slots_N[i]), grads_ND, i, kind, hyper_H)
