"""How unevenly rows are looked up, and which unevenness touches a wished share of the rows.

Rows are ranked by popularity. Zipf's law alone (chance ∝ rank^-s) cannot follow what production
shows: Check-N-Run (section 4.1) saw 26 % of a model change in one interval and 52 % in ten, while
a Zipf law that touches 26 % in one touches 70–80 % in ten. So the law here has two parts joined at
a knee: Zipf with exponent ``head`` among the hot rows, a steeper power law ``tail`` past them.

Invariants:
- Drawing needs no memory that grows with a table: a few thousand quantiles describe any table.
- Draws are integer arithmetic on rounded quantiles, so every platform draws the same ranks.

Not here: where a rank lies in its table, and everything else about a sample (clicks.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.errors import InvalidRequestError
from holdfast.recsys.data.hashing import UInt64s

# B samples, T tables, Q quantiles of one table, E edges between groups of ranks

_QUANTILE_BITS = 12
_FRACTION_BITS = 20
_POINT_BITS = 8  # quantiles are stored in 1/256 of a rank
ROWS_MAX = 2**31  # keeps every product below 2**63


@dataclass(frozen=True, slots=True)
class Skew:
    """Chance of rank r ∝ r^-head up to ``knee`` of the rows, then ∝ r^-tail, joined at the knee.

    ``Skew(1.05)`` is Zipf's law with exponent 1.05; ``Skew(0)`` is uniform.
    """

    head: float = 1.05
    tail: float = 0.0
    knee: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.head <= 8 and 0 <= self.tail <= 16 and 0 < self.knee <= 1):
            raise InvalidRequestError(
                "a skew is out of range",
                head=self.head,
                tail=self.tail,
                knee=self.knee,
                todo="use 0 <= head <= 8, 0 <= tail <= 16, 0 < knee <= 1",
            )


class _Law:
    """The cumulative weight of a continuous rank in [1, rows + 1), and its inverse."""

    def __init__(self, rows: int, skew: Skew) -> None:
        self.rows = rows
        # a power integral has no pole if the exponent is never exactly 1
        self._head = skew.head if abs(skew.head - 1) > 1e-6 else 1 + 1e-6
        self._tail = skew.tail if abs(skew.tail - 1) > 1e-6 else 1 + 1e-6
        self._knee = 1 + skew.knee * rows
        self._knee_weight = float(_power_integral(1.0, self._knee, self._head))
        self._joint = self._knee ** (self._tail - self._head)
        self.weight = float(self.below(np.array([rows + 1.0]))[0])

    def below(self, rank: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        in_head = _power_integral(1.0, np.minimum(rank, self._knee), self._head)
        in_tail = _power_integral(self._knee, np.maximum(rank, self._knee), self._tail)
        return np.asarray(in_head + self._joint * in_tail)

    def rank(self, weight: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        head, tail = 1 - self._head, 1 - self._tail
        in_head = np.maximum(1 + head * np.minimum(weight, self._knee_weight), 0) ** (1 / head)
        past = np.maximum(weight - self._knee_weight, 0) / self._joint
        # relative to the knee, or a steep tail's powers would underflow
        in_tail = self._knee * np.maximum(1 + tail * past * self._knee**-tail, 0) ** (1 / tail)
        rank = np.where(weight <= self._knee_weight, in_head, in_tail)
        return np.asarray(np.clip(rank, 1.0, self.rows + 1.0))


def _power_integral(
    start: float, stop: npt.NDArray[np.float64] | float, exponent: float
) -> npt.NDArray[np.float64]:
    """The integral of x^-exponent from start to stop; the exponent is not 1."""
    power = 1 - exponent
    return np.asarray((np.asarray(stop) ** power - start**power) / power, dtype=np.float64)


def quantiles(rows: int, skew: Skew) -> npt.NDArray[np.int64]:
    """The 4097 quantiles of a table's ranks, in 1/256 of a rank; what ``draw_ranks`` reads."""
    law = _Law(rows, skew)
    share_Q = np.arange(2**_QUANTILE_BITS + 1) / 2**_QUANTILE_BITS
    rank_Q = law.rank(share_Q * law.weight)
    rank_Q[-1] = rows + 1.0
    return np.asarray(np.rint(rank_Q * 2**_POINT_BITS), dtype=np.int64)


def draw_ranks(bits_BT: UInt64s, quantiles_TQ: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Ranks (0 is the hottest) from 64 random bits each, one table per column."""
    tables = np.arange(quantiles_TQ.shape[0])
    cell_BT = (bits_BT >> np.uint64(64 - _QUANTILE_BITS)).astype(np.int64)
    cell_BT += tables * quantiles_TQ.shape[1]
    fraction_BT = (bits_BT & np.uint64(2**_FRACTION_BITS - 1)).astype(np.int64)
    flat = quantiles_TQ.reshape(-1)
    low_BT = flat[cell_BT]
    point_BT = (low_BT << _FRACTION_BITS) + (flat[cell_BT + 1] - low_BT) * fraction_BT
    rank_BT = (point_BT >> (_FRACTION_BITS + _POINT_BITS)) - 1
    rows_T = (quantiles_TQ[:, -1] >> _POINT_BITS) - 1
    return np.asarray(np.minimum(rank_BT, rows_T - 1))


def expected_touched(table_rows: Sequence[int], skew: Skew, *, draws: int) -> float:
    """The expected share of all rows that ``draws`` samples look up at least once.

    >>> round(expected_touched([1000], Skew(0), draws=1000), 3)  # uniform: 1 - 1/e
    0.632
    """
    touched = sum(_expected_distinct(rows, skew, draws) for rows in table_rows)
    return touched / sum(table_rows)


def _expected_distinct(rows: int, skew: Skew, draws: int) -> float:
    law = _Law(rows, skew)
    # exact for the first ranks, groups of nearly equal ranks (2 % wide) past them
    exact = np.arange(1, min(rows, 64) + 1)
    wide = np.geomspace(1, rows + 1, 2 + int(50 * np.log(rows + 1))).astype(np.int64)
    edge_E = np.unique(np.concatenate([exact, wide[wide > exact[-1]], [rows + 1]]))
    weight_E = law.below(edge_E.astype(np.float64))
    ranks = np.diff(edge_E)
    chance = np.minimum(np.diff(weight_E) / law.weight / ranks, 1 - 1e-15)
    return float((ranks * -np.expm1(draws * np.log1p(-chance))).sum())


def skew_for_touched(
    table_rows: Sequence[int],
    *,
    batch_size: int,
    batches: int,
    touched: float = 0.26,
    touched_after_ten: float | None = 0.52,
) -> Skew:
    """The skew at which an interval of ``batches`` touches the share ``touched`` of all rows.

    With ``touched_after_ten`` ten intervals together touch about that share (within 0.03); with
    None the law is Zipf's alone. The defaults are Check-N-Run's production numbers. By bisection
    over the expected number of distinct rows of all tables together.

    Raises:
        InvalidRequestError: even the closest law cannot touch so many, or so few.
    """
    if not 0 < touched < (touched_after_ten or 1.0) <= 1:
        raise InvalidRequestError(
            "shares of touched rows are out of order",
            touched=touched,
            touched_after_ten=touched_after_ten,
            todo="use 0 < touched < touched_after_ten <= 1",
        )
    draws = batch_size * batches
    reachable = expected_touched(table_rows, Skew(0), draws=draws)
    if reachable < touched:
        raise InvalidRequestError(
            "the interval is too short to touch so many rows",
            touched=touched,
            reachable=round(reachable, 3),
            todo="use more batches, larger batches or fewer rows",
        )
    if touched_after_ten is None:
        return _choose_head(table_rows, Skew(), draws, touched)
    best = _choose_tail(table_rows, draws, touched, touched_after_ten)
    reached = expected_touched(table_rows, best, draws=10 * draws)
    if abs(reached - touched_after_ten) > 0.03:
        raise InvalidRequestError(
            "no skew touches that share in ten intervals",
            touched_after_ten=touched_after_ten,
            closest=round(reached, 3),
            todo="change touched_after_ten, use a longer interval, or pass None for Zipf's law",
        )
    return best


def _choose_head(table_rows: Sequence[int], shape: Skew, draws: int, touched: float) -> Skew:
    """``shape`` with the head exponent at which ``draws`` touch the share, or the nearest."""
    low, high = 0.0, 4.0
    for _ in range(24):
        middle = (low + high) / 2
        candidate = Skew(middle, shape.tail, shape.knee)
        if expected_touched(table_rows, candidate, draws=draws) > touched:
            low = middle
        else:
            high = middle
    return Skew((low + high) / 2, shape.tail, shape.knee)


def _choose_tail(
    table_rows: Sequence[int], draws: int, touched: float, touched_after_ten: float
) -> Skew:
    """The tail exponent, with its head, whose growth over ten intervals is nearest."""
    # the hot rows alone must stay below the share of one interval, or growth cannot be steered
    knee = 0.75 * touched
    low, high = 0.0, 12.0
    best = _choose_head(table_rows, Skew(tail=low, knee=knee), draws, touched)
    for _ in range(12):
        middle = (low + high) / 2
        candidate = _choose_head(table_rows, Skew(tail=middle, knee=knee), draws, touched)
        is_reached = expected_touched(table_rows, candidate, draws=draws) > touched - 0.002
        if is_reached and (
            expected_touched(table_rows, candidate, draws=10 * draws) > touched_after_ten
        ):
            low, best = middle, candidate
        else:
            high = middle
    return best
