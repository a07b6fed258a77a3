"""Which versions died when: deletion vectors against the rows of a chunk.

Invariant: ids are ascending wherever they are looked through; ``are_vectors`` tells it of bytes
that may be lies.

Not here: how vectors are stored (checkpoint/format/deletion_vectors.py), when a chunk is extracted
(checkpoint/grid/round_plan.py).

Shapes: ids_N, deaths_N  rows of a chunk and when each died (-1: alive); deleted_K, deaths_K  killed
rows and when; counts_V, births_V  how many of those belong to each vector, and its birth.
"""

from __future__ import annotations

from typing import Any

from holdfast.kernels.compiling import kernel
from holdfast.kernels.rows.ids import first_from


@kernel()
def mark_deaths(ids_N: Any, deleted_K: Any, deaths_K: Any, deaths_N: Any) -> int:
    """Note the death of every deleted row, the earlier one of two; how many were alive."""
    if ids_N.size == 0:
        return 0
    k = first_from(deleted_K, 0, deleted_K.size, ids_N[0])
    new = 0
    i = 0
    while k < deleted_K.size:
        row = deleted_K[k]
        while i < ids_N.size and ids_N[i] < row:
            i += 1
        if i == ids_N.size:
            break
        if ids_N[i] == row:
            if deaths_N[i] < 0:
                new += 1
                deaths_N[i] = deaths_K[k]
            else:
                deaths_N[i] = min(deaths_N[i], deaths_K[k])
        k += 1
    return new


@kernel()
def are_vectors(deleted_K: Any, deaths_K: Any, counts_V: Any, births_V: Any) -> bool:
    """Whether every vector's ids ascend from 0, and each row died after it was born."""
    k = 0
    for v in range(counts_V.size):
        earlier = -1
        for _ in range(counts_V[v]):
            if deleted_K[k] <= earlier or deaths_K[k] <= births_V[v]:
                return False
            earlier = deleted_K[k]
            k += 1
    return bool(k == deleted_K.size)
