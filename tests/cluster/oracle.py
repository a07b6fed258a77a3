"""What a cluster should hold: every push applied once, in order, to plain arrays of all rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from holdfast.cluster.spec import ClusterSpec
from holdfast.kernels.servers import initial, optimizers


class Oracle:
    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.records = {}
        for table in spec.tables:
            records_NW = np.zeros((table.rows, table.width), np.float32)
            ids_N = np.arange(table.rows)
            initial.fill(records_NW, ids_N, table.dim, table.seed, table.bound)
            self.records[table.name] = records_NW

    def push(self, gradients: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
        for name, (ids_N, grads_ND) in gradients.items():
            optimizer = self.spec.tables[self.spec.index[name]].optimizer
            optimizers.apply(self.records[name], ids_N, grads_ND, optimizer.kind, optimizer.hyper_H)

    def weights(self, name: str, ids_N: np.ndarray) -> np.ndarray:
        dim = self.spec.tables[self.spec.index[name]].dim
        return self.records[name][ids_N, :dim]


def random_gradients(
    rng: np.random.Generator, spec: ClusterSpec, *, rows: int = 20, is_exact: bool = False
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Gradients of some rows of every table; exact ones add up to the same in any order."""
    found = {}
    for table in spec.tables:
        count = int(rng.integers(1, min(rows, table.rows) + 1))
        ids_N = np.sort(rng.choice(table.rows, count, replace=False))
        if is_exact:
            grads_ND = rng.integers(-8, 9, (count, table.dim)).astype(np.float32)
        else:
            grads_ND = rng.standard_normal((count, table.dim)).astype(np.float32)
        found[table.name] = (ids_N, grads_ND)
    return found
