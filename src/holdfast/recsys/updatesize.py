"""How often rows are used against how far they move (figure 6 of CPR): why counters may stand in.

Not here: what saving the most used rows first is worth (studies.py).

# N rows of a table
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from holdfast.checkpoint.priority import Priority, large_tables
from holdfast.recsys.batch import Batch
from holdfast.recsys.emulation import Job, start_training, train_job
from holdfast.recsys.studies import pearson
from holdfast.recsys.train import Reader, Training


@dataclass(frozen=True, slots=True)
class TableUse:
    """How often rows of a table were used against how far they moved: over all its rows."""

    table: int
    rows: int
    used: int
    pearson: float | None


@dataclass(frozen=True, slots=True)
class Updates:
    """Figure 6: rows of the large tables, after ``job.steps`` without failures."""

    job: Job
    pearson: float | None  # over all rows
    pearson_used: float | None  # over rows that were used
    pearson_log: float | None  # of the logarithms, over rows that were used
    tables: tuple[TableUse, ...]
    counts_N: np.ndarray = field(repr=False)
    changes_N: np.ndarray = field(repr=False)

    figure: int = 6


class _Counted:
    """A reader that counts how often each row of some tables is used."""

    def __init__(self, reader: Reader, rows: Mapping[int, int]) -> None:
        self._reader = reader
        self.counts = {table: np.zeros(count, np.int64) for table, count in rows.items()}

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._reader:
            ids_BT = batch.ids.numpy()
            for table, counts_N in self.counts.items():
                counts_N += np.bincount(ids_BT[:, table], minlength=len(counts_N))
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return self._reader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._reader.load_state_dict(state)


def correlate_updates(job: Job, *, seed: int = 0) -> Updates:
    """Figure 6: how far a row has moved (L2) against how often it was used."""
    training = start_training(job, seed=seed)
    rows = dict(enumerate(job.recipe.table_rows))
    share = Priority(by="mfu").share
    large = {
        int(t): rows[int(t)] for t in large_tables({str(t): n for t, n in rows.items()}, share)
    }
    counted = _Counted(training.reader, large)
    weights = functools.partial(_weights, training)
    first = {table: weights(table).clone() for table in large}
    train_job(job, dataclasses.replace(training, reader=counted), lambda step: None)
    changes = {
        table: (weights(table) - first[table]).norm(dim=1).double().numpy() for table in large
    }
    tables = [
        TableUse(
            table,
            count,
            int((counted.counts[table] > 0).sum()),
            pearson(counted.counts[table].astype(np.float64), changes[table]),
        )
        for table, count in large.items()
    ]
    counts_N = np.concatenate([counted.counts[table] for table in large]).astype(np.float64)
    changes_N = np.concatenate([changes[table] for table in large])
    used_N = (counts_N > 0) & (changes_N > 0)
    return Updates(
        job,
        pearson(counts_N, changes_N),
        pearson(counts_N[used_N], changes_N[used_N]),
        pearson(np.log(counts_N[used_N]), np.log(changes_N[used_N])),
        tuple(tables),
        counts_N,
        changes_N,
    )


def _weights(training: Training, table: int) -> torch.Tensor:
    module = training.model.get_submodule(f"tables.{table}")
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach()
