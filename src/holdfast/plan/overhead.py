"""What saving and failing cost, as shares of training time: CPR's equations 1 and 2.

The bottom of the planner. Costs are those of one cluster and model; the share is of the time the
job would train if nothing failed and nothing were saved. 0.085 is 8.5 %, and a share may pass 1.

Invariants:
- The equations are first order: each cost is small against the job, the interval is small against
  the MTBF, failures strike at any moment alike. ``overhead_memoryless`` drops the first two
  assumptions, simulate.py all three.
- Every number is checked where it enters; nonsense raises and is never planned with.

Not here: the interval a tolerated loss allows, and the choice (pls.py); the paper's own numbers
(paper.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.errors import InvalidRequestError
from holdfast.plan.checks import check_not_negative, check_positive, is_number


@dataclass(frozen=True, slots=True)
class Costs:
    """What one save and one failure cost a cluster, in hours of the whole cluster waiting.

    ``load_part_h`` is the load of the lost servers alone; the paper, and None, take ``load_h``.
    ``lost_of_interval`` is the mean share of the interval that a failure under full recovery
    throws away: a half where failures strike at any moment alike.
    """

    save_h: float  # O_save
    load_h: float  # O_load
    reschedule_h: float  # O_res
    load_part_h: float | None = None
    lost_of_interval: float = 0.5

    def __post_init__(self) -> None:
        check_not_negative("save_h", self.save_h)
        check_not_negative("load_h", self.load_h)
        check_not_negative("reschedule_h", self.reschedule_h)
        if self.load_part_h is not None:
            check_not_negative("load_part_h", self.load_part_h)
        if not is_number(self.lost_of_interval) or not 0 <= self.lost_of_interval <= 1:
            raise InvalidRequestError(
                "a failure loses between nothing and one interval",
                lost_of_interval=self.lost_of_interval,
                todo="use a share from 0 to 1; 0.5 where failures strike at any moment alike",
            )

    @property
    def partial_load_h(self) -> float:
        """What loading costs when only the lost servers load."""
        return self.load_h if self.load_part_h is None else self.load_part_h


@dataclass(frozen=True, slots=True)
class Overhead:
    """Where the time goes that does not train, each part as a share of the training time."""

    save: float
    load: float
    lost: float  # work trained again
    reschedule: float

    @property
    def total(self) -> float:
        """All parts together."""
        return self.save + self.load + self.lost + self.reschedule


def overhead_full(costs: Costs, *, interval_h: float, mtbf_h: float) -> Overhead:
    """The overhead when everyone reloads after a failure (CPR eq. 1).

    >>> costs = Costs(save_h=0.1, load_h=0.1, reschedule_h=0.2)
    >>> round(overhead_full(costs, interval_h=2, mtbf_h=20).total, 6)
    0.115
    """
    check_positive("interval_h", interval_h)
    check_positive("mtbf_h", mtbf_h)
    return Overhead(
        save=costs.save_h / interval_h,
        load=costs.load_h / mtbf_h,
        lost=costs.lost_of_interval * interval_h / mtbf_h,
        reschedule=costs.reschedule_h / mtbf_h,
    )


def overhead_part(costs: Costs, *, interval_h: float, mtbf_h: float) -> Overhead:
    """The overhead when only the lost servers reload and no work is trained again (CPR eq. 2).

    >>> costs = Costs(save_h=0.1, load_h=0.1, reschedule_h=0.2)
    >>> round(overhead_part(costs, interval_h=2, mtbf_h=20).total, 6)
    0.065
    """
    check_positive("interval_h", interval_h)
    check_positive("mtbf_h", mtbf_h)
    return Overhead(
        save=costs.save_h / interval_h,
        load=costs.partial_load_h / mtbf_h,
        lost=0.0,
        reschedule=costs.reschedule_h / mtbf_h,
    )


def overhead_memoryless(costs: Costs, *, interval_h: float, mtbf_h: float) -> float:
    """The total overhead of full recovery at any interval, for failures without memory (Daly).

    Exact for exponential times between failures that also strike saves and reloads, and a job of
    whole intervals; infinite where it passes what a float holds. Eq. 1 is its first order.

    >>> costs = Costs(save_h=0.1, load_h=0.1, reschedule_h=0.2)
    >>> round(overhead_memoryless(costs, interval_h=20, mtbf_h=20), 2)  # eq. 1 says 0.52
    0.76
    """
    check_positive("interval_h", interval_h)
    check_positive("mtbf_h", mtbf_h)
    try:
        attempts = math.expm1((interval_h + costs.save_h) / mtbf_h)
        reloads = math.exp((costs.load_h + costs.reschedule_h) / mtbf_h)
    except OverflowError:
        return math.inf
    return mtbf_h * reloads * attempts / interval_h - 1


def interval_full(save_h: float, *, mtbf_h: float) -> float:
    """The interval that costs least under full recovery, sqrt(2 O_save T_fail).

    >>> interval_full(0.25, mtbf_h=32)
    4.0
    """
    check_positive("save_h", save_h)
    check_positive("mtbf_h", mtbf_h)
    return math.sqrt(2 * save_h * mtbf_h)
