"""The MTBF of a job against its number of nodes (CPR, section 6.6).

Not here: models of one job's failures (models.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from holdfast.errors import InvalidRequestError
from holdfast.plan.checks import check_number, check_positive

Floats = npt.NDArray[np.float64]
MtbfOfNodes = Callable[[npt.ArrayLike], Floats]


def linear(mtbf_h: float, nodes: float) -> MtbfOfNodes:
    """MTBF when failures grow linearly with nodes, from the MTBF known at one number of nodes.

    >>> linear(28.0, 20)([10, 20, 40]).tolist()
    [56.0, 28.0, 14.0]
    """
    check_positive("mtbf_h", mtbf_h)
    known = float(_check_nodes(nodes))
    return lambda nodes: np.asarray(mtbf_h * known / _check_nodes(nodes))


def line(first: tuple[float, float], second: tuple[float, float]) -> MtbfOfNodes:
    """MTBF on a straight line through two observed pairs (nodes, MTBF in hours).

    This is "linearly decreasing" to the letter (CPR, section 3.1). It reaches zero at some number
    of nodes, and asking there or beyond is an error: a line says nothing outside its data.

    >>> line((10, 30.0), (40, 15.0))([10, 20]).tolist()
    [30.0, 25.0]
    """
    (nodes_a, mtbf_a), (nodes_b, mtbf_b) = sorted((first, second))
    for nodes, mtbf in (first, second):
        _check_nodes(nodes)
        check_positive("mtbf_h", mtbf)
    if nodes_a == nodes_b or mtbf_b > mtbf_a:
        raise InvalidRequestError(
            "a line of MTBF needs two numbers of nodes, and no longer MTBF at the larger one",
            first=first, second=second, todo="give two pairs (nodes, mtbf_h)",
        )  # fmt: skip
    fall = (mtbf_a - mtbf_b) / (nodes_b - nodes_a)

    def mtbf_of(nodes: npt.ArrayLike) -> Floats:
        asked = _check_nodes(nodes)
        mtbf_h = np.asarray(mtbf_a - fall * (asked - nodes_a))
        if np.any(mtbf_h <= 0):
            raise InvalidRequestError(
                "the line of MTBF reaches zero before so many nodes",
                nodes=float(asked.max()), zero_at_nodes=nodes_a + mtbf_a / fall,
                todo="use linear() or independent() to go so far",
            )  # fmt: skip
        return mtbf_h

    return mtbf_of


def independent(p_per_hour: float) -> MtbfOfNodes:
    """MTBF when each node fails with this chance in an hour: 1 / (1 - (1 - p)^n), CPR section 6.6.

    It counts hours, not moments, so it never goes below one hour; ``linear`` does.

    >>> independent(0.5)([1, 2]).round(4).tolist()
    [2.0, 1.3333]
    """
    check_number("p_per_hour", p_per_hour, 0, 1, open_ends=True)
    rate = math.log1p(-p_per_hour)
    return lambda nodes: np.asarray(-1 / np.expm1(_check_nodes(nodes) * rate))


def node_chance(mtbf_h: float, nodes: float) -> float:
    """The chance per node and hour under which ``independent`` gives this MTBF at these nodes.

    >>> float(independent(node_chance(28.0, 20))(20).round(9))
    28.0
    """
    check_number("mtbf_h", mtbf_h, 1, math.inf, open_ends=True)
    return -math.expm1(math.log1p(-1 / mtbf_h) / float(_check_nodes(nodes)))


def _check_nodes(nodes: npt.ArrayLike) -> Floats:
    try:
        asked = np.asarray(nodes, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            "nodes are not numbers", nodes=nodes, todo="give one node or more"
        ) from error
    if asked.size == 0 or not np.all((asked >= 1) & np.isfinite(asked)):
        raise InvalidRequestError(
            "a cluster has one node or more", nodes=nodes, todo="give one node or more"
        )
    return asked
