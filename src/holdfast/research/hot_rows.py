"""Which rows of a workload's tables are hot: counted over its first batches, then chosen.

    first batches -> in how many each row is -> choose_hot -> Layout.hot

Not here: the choice itself (cluster/choosehot.py), what becomes of hot rows (cluster/hot.py).

# R rows of a table
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from holdfast.cluster.choosehot import HotChoice, choose_hot
from holdfast.cluster.spec import ClusterSpec
from holdfast.recsys.cluster_train import Workload, ids_by_table, make_stream

BATCHES = 100
PUSHES_PER_S = 20.0  # of two workers, as counted; larger models have fewer


def count_uses(workload: Workload, *, batches: int = BATCHES) -> dict[str, np.ndarray]:
    """For each table in how many of the first batches each row is."""
    counts = {
        f"{group}.{at}.weight": np.zeros(rows, np.int64)
        for group in (("tables", "weights") if workload.model == "deepfm" else ("tables",))
        for at, rows in enumerate(workload.table_rows)
    }
    stream = make_stream(workload)
    for number in range(batches):
        for name, ids in ids_by_table(workload, stream[number]).items():
            counts[name][np.unique(ids.numpy())] += 1
    return counts


def find_hot(
    spec: ClusterSpec,
    counts: Mapping[str, np.ndarray],
    *,
    pushes: int,
    budget_rows: int,
    flush_every_s: float,
) -> tuple[dict[str, tuple[int, ...]], HotChoice]:
    """At most so many hot rows of the widest coded tables, by table, and the choice they are of.

    Tables of one width are weighed together; narrower ones have little to save.
    """
    named = [table for table in spec.tables if table.name in counts]
    dim = max(table.dim for table in named)
    weighed = [table for table in named if table.dim == dim]
    choice = choose_hot(
        np.concatenate([counts[table.name] for table in weighed]),
        pushes=pushes,
        budget_rows=budget_rows,
        width=weighed[0].width,
        dim=dim,
        pushes_per_flush=max(1.0, PUSHES_PER_S * flush_every_s),
    )
    hot = {}
    start = 0
    for table in weighed:
        lo, hi = np.searchsorted(choice.ids_H, (start, start + table.rows))
        if lo < hi:
            hot[table.name] = tuple((choice.ids_H[lo:hi] - start).tolist())
        start += table.rows
    return hot, choice
