"""What being saved costs training: marking looked-up rows, and the stall of a checkpoint.

Two comparisons. Tracking beside the training step it rides on: blocks of steps with and without
the tracker in turns, and the time inside its hooks. The stall of a delta beside a bare gather of
the same rows: what any checkpointer must copy at least, done by ``torch.index_select``.

Not here: the background half of a save (peers.py).
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.bench.results import AT_MOST, Ratio, Section, Sheet
from holdfast.bench.timing import seconds_of
from holdfast.bench.workload import Ids, Workload, make_workload, share, touched_ids
from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.strategy import Strategy
from holdfast.checkpoint.tracker import LookupTracker
from holdfast.recsys import (
    CRITEO_KAGGLE_ROWS,
    Batch,
    ClickStream,
    make_model,
    scaled_rows,
    split_parameters,
)
from holdfast.tables import find_tables

TRACKING_MAX = 0.01
STALL_MAX = 1.5

ONE_SHOT_4 = Strategy("one-shot, 4 bits", base="one-shot", codec="adaptive4")


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    batch: int
    table_rows: int
    blocks: int
    steps: int
    model_bytes: int
    saves: int


FULL = Size(batch=2048, table_rows=1_000_000, blocks=24, steps=10, model_bytes=1 << 30, saves=9)
QUICK = Size(batch=64, table_rows=2000, blocks=4, steps=2, model_bytes=1 << 20, saves=3)


def measure(*, quick: bool, folder: Path = Path()) -> Section:
    """Tracking per step, stall per checkpoint."""
    size = QUICK if quick else FULL
    tracking = measure_tracking(size)
    stall = measure_stall(size, folder)
    hooks = Ratio(
        name="tracking: time inside the hooks",
        ours=1e3 * tracking.hooks_s,
        peer=1e3 * tracking.plain_s,
        against=f"a training step (DLRM kaggle, batch {size.batch}, SGD)",
        unit="ms",
        target=TRACKING_MAX,
        sense=AT_MOST,
        note="every call of a hook is timed from within",
    )
    ratios = (
        hooks,
        dataclasses.replace(
            hooks,
            name="tracking: steps with it less steps without",
            ours=1e3 * tracking.difference_s,
            target=None,
            note=f"median of {size.blocks} pairs of blocks in turns; its standard error is "
            f"{1e3 * tracking.error_s:.2f} ms, so the target is judged by the direct measure",
        ),
        Ratio(
            name="stall of a delta",
            ours=1e3 * stall.stall_s,
            peer=1e3 * stall.fresh_s,
            against="torch.index_select into new memory",
            unit="ms",
            target=STALL_MAX,
            sense=AT_MOST,
            note="what `tensor[ids]` costs: the outputs are allocated",
        ),
        Ratio(
            name="stall of a delta",
            ours=1e3 * stall.stall_s,
            peer=1e3 * stall.reused_s,
            against="torch.index_select into memory used before",
            unit="ms",
            target=STALL_MAX,
            sense=AT_MOST,
            note="the physical limit: ids known, outputs allocated and touched",
        ),
    )
    return Section(
        name="overhead",
        title="What being saved costs training",
        text=(
            "A step marks the rows it looks up, one bit each; a checkpoint stops training while "
            "the changed rows, weights and optimizer state, are copied. Everything else happens in "
            f"the background. The stall is of a model of {stall.model_bytes / 1e9:.2f} GB "
            f"(rows of 64 floats, Adagrad) with {stall.share:.0%} of its rows changed, "
            f"{stall.bytes / 1e6:.0f} MB; medians of {size.saves} checkpoints after the first, "
            "each measured next to the two gathers. The stall includes finding the rows from the "
            "bitmaps, the canary's check, the plan, and copying the dense state."
        ),
        ratios=ratios,
        sheets=(_stall_sheet(stall),),
    )


def _stall_sheet(stall: StallCost) -> Sheet:
    rows = tuple(
        (name, f"{1e3 * seconds:.1f}", f"{stall.bytes / 1e9 / seconds:.2f}")
        for name, seconds in (
            ("first checkpoint: a base, every row, new memory", stall.first_s),
            ("delta, checkpoint's stall", stall.stall_s),
            ("index_select into new memory", stall.fresh_s),
            ("index_select into memory used before", stall.reused_s),
        )
    )
    first = (rows[0][0], rows[0][1], f"{stall.model_bytes / 1e9 / stall.first_s:.2f}")
    return Sheet("Stall", ("copy", "ms", "GB/s"), (first, *rows[1:]))


@dataclass(frozen=True, slots=True)
class TrackingCost:
    """Seconds a step: without the tracker, inside its hooks, and the difference it makes."""

    plain_s: float
    hooks_s: float
    difference_s: float
    error_s: float


class Loop:
    """A training loop over a few batches held in memory, so that reading them costs nothing."""

    def __init__(self, size: Size) -> None:
        rows = scaled_rows(CRITEO_KAGGLE_ROWS, total_rows=size.table_rows)
        stream = ClickStream(rows, batch_size=size.batch, seed=3)
        self._batches = [stream[index] for index in range(size.steps)]
        torch.manual_seed(3)
        self.model = make_model("kaggle", rows)
        tables, dense = split_parameters(self.model)
        self._optimizers = [torch.optim.SGD(tables, lr=0.1), torch.optim.SGD(dense, lr=0.01)]
        self.tables = find_tables(self.model, self._optimizers)

    def run(self) -> None:
        """One block: a step on every batch."""
        for batch in self._batches:
            self._step(batch)

    def hooks(self) -> list[dict[int, Callable[..., Any]]]:
        """Where a tracker can watch: forward passes of the tables and steps of the optimizers."""
        modules = [module for table in self.tables for module in table.modules]
        return [
            *(module._forward_pre_hooks for module in modules),
            *(module._forward_hooks for module in modules),
            *(optimizer._optimizer_step_pre_hooks for optimizer in self._optimizers),
            *(optimizer._optimizer_step_post_hooks for optimizer in self._optimizers),
        ]

    def _step(self, batch: Batch) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(self.model(batch), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in self._optimizers:
            optimizer.step()


def measure_tracking(size: Size) -> TrackingCost:
    """Blocks of steps without, with, and with timed hooks, in turns."""
    loop = Loop(size)
    loop.run()
    plain: list[float] = []
    tracked: list[float] = []
    inside: list[float] = []
    for block in range(size.blocks):
        # Who goes first alternates: a machine that slows down or speeds up favours neither.
        for is_tracked in (False, True) if block % 2 else (True, False):
            if is_tracked:
                tracked.append(_tracked_seconds(loop))
            else:
                plain.append(seconds_of(loop.run))
        inside.append(_timed_hooks(loop))
    differences = [one - other for one, other in zip(tracked, plain, strict=True)]
    error = 1.25 * statistics.stdev(differences) / len(differences) ** 0.5  # of a median
    return TrackingCost(
        plain_s=statistics.median(plain) / size.steps,
        hooks_s=statistics.median(inside) / size.steps,
        difference_s=statistics.median(differences) / size.steps,
        error_s=error / size.steps,
    )


def _tracked_seconds(loop: Loop) -> float:
    tracker = LookupTracker(loop.tables)
    try:
        return seconds_of(loop.run)
    finally:
        tracker.close()


def _timed_hooks(loop: Loop) -> float:
    """Seconds inside the tracker's hooks during one block."""
    tracker = LookupTracker(loop.tables)
    try:
        with _hook_timer(loop.hooks()) as spent:
            loop.run()
    finally:
        tracker.close()
    return sum(spent)


@contextmanager
def _hook_timer(hooks: list[dict[int, Callable[..., Any]]]) -> Iterator[list[float]]:
    """Time every hook that is registered now, while the context lasts."""
    spent: list[float] = []

    def timed(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                spent.append(time.perf_counter() - start)

        return call

    before = [dict(each) for each in hooks]
    try:
        for each in hooks:
            for key, hook in each.items():
                each[key] = timed(hook)
        yield spent
    finally:
        for each, known in zip(hooks, before, strict=True):
            each.update(known)


@dataclass(frozen=True, slots=True)
class StallCost:
    """Seconds training stands still, and what copying the same rows takes at least."""

    stall_s: float
    first_s: float
    reused_s: float
    fresh_s: float
    bytes: int
    model_bytes: int
    share: float


class BareGather:
    """The same rows of every column, gathered by torch and nothing else."""

    def __init__(self, work: Workload, ids: Ids) -> None:
        self._jobs = [
            (column, torch.from_numpy(ids_N))
            for table, ids_N in zip(work.tables, ids, strict=True)
            for column in table.tensors()
        ]
        self._outputs = [column.index_select(0, ids_N) for column, ids_N in self._jobs]

    @property
    def bytes(self) -> int:
        """What is copied."""
        return sum(output.nbytes for output in self._outputs)

    def reused(self) -> None:
        """Into outputs that exist already."""
        for (column, ids_N), output in zip(self._jobs, self._outputs, strict=True):
            torch.index_select(column, 0, ids_N, out=output)

    def fresh(self) -> None:
        """Into new outputs, all alive until the end, as a snapshot's are."""
        held = [torch.index_select(column, 0, ids_N) for column, ids_N in self._jobs]
        del held


def measure_stall(size: Size, folder: Path) -> StallCost:
    """Deltas of the same rows again and again, each next to bare gathers of these rows."""
    work = make_workload(size.model_bytes, has_row_state=True)
    ids = touched_ids([table.rows for table in work.tables], intervals=1)[0]
    gather = BareGather(work, ids)
    stalls: list[float] = []
    reused: list[float] = []
    fresh: list[float] = []
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=".bench-") as scratch,
        Checkpointer(
            scratch, model=work.model, optimizer=work.optimizer, strategy=ONE_SHOT_4, keep=1
        ) as ck,
    ):
        ck.step()
        first = ck.save().durable()
        for _ in range(size.saves + 1):
            for table, ids_N in zip(work.tables, ids, strict=True):
                ck.mark(table.name, ids_N)
            ck.step()
            stats = ck.save().durable()
            assert stats.staged_bytes == gather.bytes, (stats.staged_bytes, gather.bytes)
            stalls.append(stats.stall_s)
            reused.append(seconds_of(gather.reused))
            fresh.append(seconds_of(gather.fresh))
    return StallCost(
        stall_s=statistics.median(stalls[1:]),
        first_s=first.stall_s,
        reused_s=statistics.median(reused[1:]),
        fresh_s=statistics.median(fresh[1:]),
        bytes=gather.bytes,
        model_bytes=work.row_bytes,
        share=share(ids, work.rows),
    )
