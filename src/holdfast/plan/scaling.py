"""What full and partial recovery cost as a cluster grows (CPR, section 6.6 and figure 13).

The model grows with its servers, each holds as much as before: a save and a reload take as long,
something fails more often, and each failure loses a smaller part.

Not here: how the MTBF falls with the nodes (plan/failures/nodes.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.plan.advise import advise
from holdfast.plan.failures.nodes import MtbfOfNodes, independent, linear, node_chance
from holdfast.plan.situation import Situation

NODES = (8, 16, 32, 64, 128, 256, 1_000, 3_000, 10_000, 30_000, 100_000)
MODELS: dict[str, Callable[[Situation], MtbfOfNodes]] = {
    "MTBF falls as 1 / nodes": lambda s: linear(s.mtbf_h, s.servers),
    "nodes fail independently": lambda s: independent(node_chance(s.mtbf_h, s.servers)),
}


@dataclass(frozen=True, slots=True)
class Point:
    """The overheads of strategies at one number of nodes, as shares of training time."""

    nodes: int
    mtbf_h: float
    totals: dict[str, float]


def scale(
    situation: Situation,
    mtbf_of: MtbfOfNodes,
    *,
    nodes: Sequence[int] = NODES,
    strategies: Sequence[str] = ("full", "check-n-run", "cpr", "cpr-ssu", "ecrec"),
) -> list[Point]:
    """A job that grows with its servers."""
    points = []
    for count in nodes:
        mtbf_h = float(mtbf_of(count))
        rows = max(1, situation.rows * count // situation.servers)
        updates = situation.updates_per_s * count / situation.servers
        at = dataclasses.replace(
            situation, servers=count, mtbf_h=mtbf_h, rows=rows, updates_per_s=updates
        )
        totals = {e.strategy: e.total for e in advise(at).estimates if e.strategy in strategies}
        points.append(Point(count, mtbf_h, totals))
    return points
