"""Tracking sees exactly the rows that a step changes, however their table is sharded."""

from __future__ import annotations

import pytest

from tests.torchrec.cases import OPTIMIZERS, TABLES
from tests.torchrec.pool import Pool

STEPS = 4


@pytest.mark.parametrize("is_away", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["rowwise-adagrad", "adagrad", "sgd"])
def test_marked_rows_are_the_changed_ones(
    pool: Pool, optimizer: str, ranks: int, is_away: bool
) -> None:
    """Bags with weights, empty ones and repeated ids; every sharding type in each collection;
    tables in host memory, and such as pretend to be on a device."""
    layout = ranks + OPTIMIZERS.index(optimizer)
    answers = pool.run(
        "track", ranks=ranks, optimizer=optimizer, layout=layout, steps=STEPS, is_away=is_away
    )
    seen = 0
    for rank, found in enumerate(answers):
        for table, steps in found.items():
            for step, (marked, changed) in enumerate(steps):
                assert marked == changed, (rank, table, step)
                seen += len(changed)
    assert seen > 100 * STEPS
    assert {table.partition("[")[0] for found in answers for table in found} == set(TABLES)
