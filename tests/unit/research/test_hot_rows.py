"""Hot rows are found by counting a workload's own batches."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.recsys.cluster_train import Layout, Workload, make_cluster_spec, make_stream
from holdfast.research.hot_rows import count_uses, find_hot

WORKLOAD = Workload(preset="tiny", rows=400, batch_size=32, seed=5)
LAYOUT = Layout(servers=3, data=2, parity=1, optimizer="adam")


def test_uses_are_the_batches_that_a_row_is_in() -> None:
    counts = count_uses(WORKLOAD, batches=7)
    stream = make_stream(WORKLOAD)
    assert [len(counts_R) for counts_R in counts.values()] == list(WORKLOAD.table_rows)
    row = int(counts["tables.2.weight"].argmax())
    expected = sum(row in stream[number].ids[:, 2].tolist() for number in range(7))
    assert counts["tables.2.weight"][row] == expected > 0


@pytest.mark.parametrize("model", ["dlrm", "deepfm"])
def test_hot_rows_are_of_their_tables_and_within_the_budget(model: str) -> None:
    workload = Workload(model=model, preset="tiny", rows=400, batch_size=32)  # type: ignore[arg-type]
    spec = make_cluster_spec(workload, LAYOUT)
    counts = count_uses(workload, batches=20)
    hot, choice = find_hot(spec, counts, pushes=20, budget_rows=30, flush_every_s=0.0)
    assert 0 < sum(map(len, hot.values())) == len(choice.ids_H) <= 30
    assert choice.saved > 0
    for name, ids in hot.items():
        assert (counts[name][list(ids)] > 0).all()
    chosen = np.concatenate([counts[name][list(ids)] for name, ids in hot.items()])
    assert chosen.min() >= np.median(np.concatenate(list(counts.values())))
    # The same rows, and a spec that a cluster can be started with.
    layout = Layout(servers=3, data=2, parity=1, optimizer="adam", hot=hot)
    assert dict(make_cluster_spec(workload, layout).hot) == hot
