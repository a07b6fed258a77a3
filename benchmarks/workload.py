"""A model of a gigabyte and the rows that training touches between two checkpoints.

The tables have the proportions of the 26 Criteo Kaggle columns and rows of 64 floats; the rows of
an interval come from the synthetic click stream, skewed so that one interval touches 26 % of all
rows and ten touch about 52 % (Check-N-Run, figures 3 and 4). Training a gigabyte for real would
take hours, so an interval is one lookup and one optimizer step for each of its rows: real forward
passes, real gradients and the real optimizer, on the rows that a real interval would have touched.

Invariant: the ids of an interval are ascending and unique in each table.

# M rows of a table, N ids of a table
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from holdfast.model.tables import Table, find_tables
from holdfast.recsys import (
    CRITEO_KAGGLE_ROWS,
    DLRM,
    ClickStream,
    Skew,
    scaled_rows,
    skew_for_touched,
)

WIDTH = 64
TOUCHED = 0.26
_BATCH = 4096
_SMALL_BYTES = 64 << 20  # below this the networks are small too, or they would be all there is
_SMALL_ROWS = 100_000
_LOOKUP_ROWS = 1 << 16  # rows of one forward pass: bounds the gradients' memory

Ids = tuple[np.ndarray, ...]  # of every table


def table_rows(model_bytes: int, *, has_row_state: bool) -> tuple[int, ...]:
    """Sizes of 26 tables whose rows, with their state, take about so many bytes.

    >>> sum(table_rows(1 << 20, has_row_state=False))
    4096
    """
    row_bytes = 4 * WIDTH * (2 if has_row_state else 1)
    return scaled_rows(CRITEO_KAGGLE_ROWS, total_rows=model_bytes // row_bytes)


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, its optimizer and its tables."""

    model: DLRM
    optimizer: torch.optim.Optimizer
    tables: tuple[Table, ...]

    @property
    def rows(self) -> int:
        """Rows of all tables together."""
        return sum(table.rows for table in self.tables)

    @property
    def row_bytes(self) -> int:
        """Bytes of all rows with their state, in fp32."""
        return sum(table.rows * table.schema().row_bytes for table in self.tables)

    def train(self, ids: Ids, *, seed: int) -> None:
        """Look up every row once and step the optimizer: every value of these rows changes."""
        noise = torch.randn(_LOOKUP_ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
        self.model.train()
        for bag, ids_N in zip(self.model.tables, ids, strict=True):
            for part_N in torch.split(torch.from_numpy(ids_N), _LOOKUP_ROWS):
                bag(part_N.unsqueeze(1)).backward(noise[: len(part_N)] * 1e-3)
                self.optimizer.step()
                self.optimizer.zero_grad()


def make_workload(model_bytes: int, *, has_row_state: bool, seed: int = 1) -> Workload:
    """A model of about so many bytes: SGD without row state, or Adagrad with as much as weights."""
    torch.manual_seed(seed)
    is_small = model_bytes < _SMALL_BYTES
    model = DLRM(
        table_rows(model_bytes, has_row_state=has_row_state),
        width=WIDTH,
        bottom=(13, WIDTH) if is_small else (13, 512, 256, WIDTH),
        top=(8, 1) if is_small else (512, 512, 256, 1),
        interaction="cat",
    )
    optimizer: torch.optim.Optimizer = (
        torch.optim.Adagrad(model.parameters(), lr=0.01)
        if has_row_state
        else torch.optim.SGD(model.parameters(), lr=0.01)
    )
    return Workload(model, optimizer, tuple(find_tables(model, [optimizer])))


def touched_ids(rows: Sequence[int], *, intervals: int, seed: int = 1) -> list[Ids]:
    """The rows that each of some intervals touches, about 26 % of all."""
    batches = max(1, round(0.3 * sum(rows) / _BATCH))
    batch_size = min(_BATCH, max(16, round(0.3 * sum(rows))))
    skew = _skew(rows, batch_size=batch_size, batches=batches)
    stream = ClickStream(rows, batch_size=batch_size, seed=seed, skew=skew)
    found = []
    with ThreadPoolExecutor(2) as pool:
        for interval in range(intervals):
            is_touched = [np.zeros(size, bool) for size in rows]
            indexes = range(interval * batches, (interval + 1) * batches)
            for batch in pool.map(stream.__getitem__, indexes):
                for mask_M, ids_B in zip(is_touched, batch.ids.numpy().T, strict=True):
                    mask_M[ids_B] = True
            found.append(tuple(np.flatnonzero(mask_M) for mask_M in is_touched))
    return found


def _skew(rows: Sequence[int], *, batch_size: int, batches: int) -> Skew:
    # A small model cannot follow the growth over ten intervals: Zipf's law alone, found faster.
    after_ten = 0.52 if sum(rows) >= _SMALL_ROWS else None
    return skew_for_touched(
        rows, batch_size=batch_size, batches=batches, touched=TOUCHED, touched_after_ten=after_ten
    )


def share(ids: Ids, rows: int) -> float:
    """Which part of all rows the ids are.

    >>> share((np.array([1, 2]), np.array([0])), 12)
    0.25
    """
    return sum(len(ids_N) for ids_N in ids) / rows
