"""What it costs to know which rows changed: each training step, each save, and in memory.

Three comparisons. With sparse gradients, the tracker beside the training step it rides on: blocks
of steps with and without it in turns, and the time inside its hooks. With dense gradients, the
tracker beside the optimizer's own step (tracking_dense.py). At a save, looking for rows that
changed unseen beside the stall of a delta, and every way of tracking in one table
(tracking_modes.py).
"""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from benchmarks.checkpoint import tracking_dense, tracking_modes
from benchmarks.results import AT_MOST, Ratio, Section
from benchmarks.timing import Hooks, seconds_of, step_hooks, timed_hooks
from holdfast.checkpoint.tracking import Tracker
from holdfast.model.tables import find_tables
from holdfast.recsys import (
    CRITEO_KAGGLE_ROWS,
    Batch,
    ClickStream,
    make_model,
    scaled_rows,
    split_parameters,
)

TRACKING_MAX = 0.01


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured with sparse gradients."""

    batch: int
    table_rows: int
    blocks: int
    steps: int
    """In a block, as between two saves: the first of them costs more than the others."""


FULL = Size(batch=2048, table_rows=1_000_000, blocks=12, steps=40)
QUICK = Size(batch=64, table_rows=2000, blocks=4, steps=2)


def measure(*, quick: bool, folder: Path = Path()) -> Section:
    """Tracking by the step and by the save, and every way of tracking beside the others."""
    size = QUICK if quick else FULL
    dense = tracking_dense.measure_dense(tracking_dense.QUICK if quick else tracking_dense.FULL)
    modes_size = tracking_modes.QUICK if quick else tracking_modes.FULL
    check = tracking_modes.measure_check(modes_size, folder)
    modes = tracking_modes.measure_modes(modes_size, folder)
    return Section(
        name="tracking",
        title="What it costs to know which rows changed",
        text=(
            "Each optimizer step marks the rows of its gradient, one bit a row: a sparse gradient "
            "names them, a dense one is read once. Each save looks again at rows that may have "
            "changed unseen, and a sixteenth of all rows is hashed in the background after each. "
            "Every call of the tracker is timed from within, beside the same training without it, "
            "in turns; dense gradients on one thread."
        ),
        ratios=(
            *_sparse_ratios(measure_sparse(size), size),
            *tracking_dense.ratios(dense),
            *tracking_modes.ratios(check),
        ),
        sheets=(tracking_dense.sheet(dense), tracking_modes.sheet(modes, modes_size)),
    )


@dataclass(frozen=True, slots=True)
class TrackingCost:
    """Seconds a step: without the tracker, inside its hooks, and the difference it makes."""

    plain_s: float
    hooks_s: float
    first_s: float
    """Inside its hooks in the first step after a save."""
    difference_s: float
    error_s: float


class Loop:
    """A training loop over a few batches held in memory, so that reading them costs nothing."""

    def __init__(self, size: Size) -> None:
        rows = scaled_rows(CRITEO_KAGGLE_ROWS, total_rows=size.table_rows)
        stream = ClickStream(rows, batch_size=size.batch, seed=3)
        self.batches = [stream[index] for index in range(size.steps)]
        torch.manual_seed(3)
        self.model = make_model("kaggle", rows)
        tables, dense = split_parameters(self.model)
        self._optimizers = [torch.optim.SGD(tables, lr=0.1), torch.optim.SGD(dense, lr=0.01)]
        self.tables = find_tables(self.model, self._optimizers)

    def run(self) -> None:
        """One block: a step on every batch."""
        for batch in self.batches:
            self.step(batch)

    def hooks(self) -> list[Hooks]:
        """Where a tracker can watch: forward passes of the tables and steps of all optimizers."""
        modules = [module for table in self.tables for module in table.modules]
        return [
            *(module._forward_pre_hooks for module in modules),
            *(module._forward_hooks for module in modules),
            *step_hooks(),
        ]

    def step(self, batch: Batch) -> None:
        """Train on one batch."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(self.model(batch), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in self._optimizers:
            optimizer.step()


def measure_sparse(size: Size) -> TrackingCost:
    """Blocks of steps without, with, and with timed hooks, in turns."""
    loop = Loop(size)
    loop.run()
    plain: list[float] = []
    tracked: list[float] = []
    inside: list[list[float]] = []
    for block in range(size.blocks):
        # Who goes first alternates: a machine that slows down or speeds up favours neither.
        for is_tracked in (False, True) if block % 2 else (True, False):
            if is_tracked:
                tracked.append(_tracked_seconds(loop))
            else:
                plain.append(seconds_of(loop.run))
        inside.append(_seconds_in_hooks(loop))
    differences = [one - other for one, other in zip(tracked, plain, strict=True)]
    error = 1.25 * statistics.stdev(differences) / len(differences) ** 0.5  # of a median
    return TrackingCost(
        plain_s=statistics.median(plain) / size.steps,
        hooks_s=statistics.median(map(statistics.mean, inside)),
        first_s=statistics.median(steps[0] for steps in inside),
        difference_s=statistics.median(differences) / size.steps,
        error_s=error / size.steps,
    )


def _tracked_seconds(loop: Loop) -> float:
    tracker = Tracker(loop.tables)
    try:
        return seconds_of(loop.run)
    finally:
        tracker.close()


def _seconds_in_hooks(loop: Loop) -> list[float]:
    """Seconds inside the tracker's hooks, for each step of one block."""
    found = []
    tracker = Tracker(loop.tables)
    try:
        with timed_hooks(loop.hooks()) as spent:
            for batch in loop.batches:
                spent.clear()
                loop.step(batch)
                found.append(sum(spent))
    finally:
        tracker.close()
    return found


def _sparse_ratios(cost: TrackingCost, size: Size) -> tuple[Ratio, ...]:
    hooks = Ratio(
        name="sparse gradients: time inside the hooks",
        ours=1e3 * cost.hooks_s,
        peer=1e3 * cost.plain_s,
        against=f"a training step (DLRM kaggle, batch {size.batch}, SGD)",
        unit="ms",
        target=TRACKING_MAX,
        sense=AT_MOST,
        note=f"every call of a hook is timed from within, {size.steps} steps between two saves",
    )
    first = dataclasses.replace(
        hooks,
        name="sparse gradients: time inside the hooks, the first step after a save",
        ours=1e3 * cost.first_s,
        target=None,
        note="each table is looked at alone, then all together",
    )
    difference = dataclasses.replace(
        hooks,
        name="sparse gradients: steps with tracking less steps without",
        ours=1e3 * cost.difference_s,
        target=None,
        note=f"median of {size.blocks} pairs of blocks in turns; its standard error is "
        f"{1e3 * cost.error_s:.2f} ms, so the target is judged by the direct measure",
    )
    return hooks, first, difference
