"""Which rows to copy instead of coding them: a decision from how often pushes touched each.

For each parity of its stripe, a coded row costs a whole record in every flush in which it changed;
a hot row costs a gradient in every push that touches it. Differences add up while they wait,
gradients do not: so copies pay where few pushes that touch a row fall into one flush, and the more,
the wider the optimizer state is. A row that every push touches is no candidate where flushes are
rare.

Of the rows that pay, those are chosen that save most. What they cost in memory is not weighed
here: ``budget_rows`` bounds it.

Not here: counting (a worker's or a reader's), what becomes of the rows (hot.py).

# R rows of a table, H chosen ones
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.errors import InvalidRequestError

_PLACE_BYTES = 5  # a slot and a position go with each row


@dataclass(frozen=True, slots=True, eq=False)
class HotChoice:
    """Rows to copy, and why. Bytes are a push's, for one parity, of all rows of the table."""

    ids_H: np.ndarray
    coded_bytes: float
    """If none is copied."""
    hot_bytes: float
    """If these are."""
    reason: str

    @property
    def saved(self) -> float:
        """The share of traffic to parity that is saved."""
        return 1 - self.hot_bytes / self.coded_bytes if self.coded_bytes else 0.0


def choose_hot(
    counts_R: np.ndarray,
    *,
    pushes: int,
    budget_rows: int,
    width: int,
    dim: int,
    pushes_per_flush: float,
) -> HotChoice:
    """Which rows are worth copying, given in how many of ``pushes`` each was touched.

    Pushes are taken to touch a row independently of each other.

    >>> counts = np.array([100, 40, 2, 0])
    >>> table = dict(pushes=100, budget_rows=2, width=193, dim=64)  # Adam
    >>> choice = choose_hot(counts, pushes_per_flush=1, **table)
    >>> choice.ids_H.tolist(), round(choice.saved, 2)
    ([0, 1], 0.65)

    Eight pushes in a flush: the first row's differences add up to one, that is less than eight
    gradients. Copying it would not pay any more.

    >>> choice = choose_hot(counts, pushes_per_flush=8, **table)
    >>> choice.ids_H.tolist(), round(choice.saved, 2)
    ([2], 0.04)
    >>> choice.reason
    '1 of 3 touched rows pays: a record is 777 bytes a flush, a gradient 261 a push'

    Raises:
        InvalidRequestError: the numbers cannot be.
    """
    counts_R = np.asarray(counts_R)
    is_known = counts_R.ndim == 1 and counts_R.dtype.kind in "iu"
    if not is_known or pushes < 1 or (len(counts_R) and not counts_R.min() >= 0):
        raise InvalidRequestError("rows are counted from 0 on, and pushes from 1", pushes=pushes)
    if len(counts_R) and counts_R.max() > pushes:
        raise InvalidRequestError(
            "a push touches a row once", pushes=pushes, most=int(counts_R.max())
        )
    is_possible = budget_rows >= 0 and 1 <= dim <= width and 1 <= pushes_per_flush < np.inf
    if not is_possible:
        raise InvalidRequestError(
            "no such rows or flushes", budget_rows=budget_rows, width=width, dim=dim,
            pushes_per_flush=pushes_per_flush, todo="a flush has at least one push",
        )  # fmt: skip
    record, gradient = 4 * width + _PLACE_BYTES, 4 * dim + _PLACE_BYTES
    share_R = counts_R / pushes
    changed_R = (1 - (1 - share_R) ** pushes_per_flush) / pushes_per_flush  # flushes, of a push
    coded_R, hot_R = record * changed_R, gradient * share_R
    saved_R = coded_R - hot_R
    paying_H = np.flatnonzero(saved_R > 0)
    order_H = np.argsort(-saved_R[paying_H], kind="stable")[:budget_rows]
    ids_H = np.sort(paying_H[order_H])
    coded = float(coded_R.sum())
    touched = int((counts_R > 0).sum())
    pays = "1 of" if len(paying_H) == 1 else f"{len(paying_H)} of"
    return HotChoice(
        ids_H,
        coded,
        coded - float(saved_R[ids_H].sum()),
        f"{pays} {touched} touched rows {'pays' if len(paying_H) == 1 else 'pay'}: a record is "
        f"{record} bytes a flush, a gradient {gradient} a push",
    )
