"""Tracking at a save: the check for unseen changes beside the stall, and every way of tracking.

The check: after each save a sixteenth of the rows is hashed in the background, and the next save,
while training stands still, looks again at those that differed. Training goes on while a save runs,
as it does for users, so that many of them differ because training changed them.

The ways of tracking: the same table and batches under each; what is kept in memory, what a step
costs, how long a save takes to find its rows, what it saves, and what is done in the background.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.results import AT_MOST, Ratio, Sheet
from benchmarks.timing import seconds_of, step_hooks, timed_hooks, timed_method
from benchmarks.workload import make_workload, touched_ids
from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.settings import TrackingName
from holdfast.checkpoint.strategy import Strategy
from holdfast.checkpoint.tracking import Tracker
from holdfast.checkpoint.tracking.hashes import RowHashes
from holdfast.checkpoint.tracking.watch import TableWatch
from holdfast.errors import HoldfastWarning

CHECK_MAX = 0.05
WIDTH = 16
_WARM_SAVES = 2  # the base, and a delta that meets everything for the first time

CONSECUTIVE = Strategy("consecutive", base="consecutive", codec="fp32")


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    model_bytes: int  # of the check
    rows: int  # of the table that is tracked in every way
    batch: int
    steps: int  # between two saves
    saves: int


FULL = Size(model_bytes=1 << 28, rows=1_000_000, batch=4096, steps=8, saves=5)
QUICK = Size(model_bytes=1 << 20, rows=4000, batch=64, steps=2, saves=2)


@dataclass(frozen=True, slots=True)
class CheckCost:
    """Medians over saves: seconds of the check in the stall, of the stall; processor seconds of
    the background part, beside those of hashing what was saved and of encoding it."""

    recheck_s: float
    stall_s: float
    scan_s: float
    learn_s: float
    encode_s: float


def measure_check(size: Size, folder: Path) -> CheckCost:
    """Deltas of a model that trains on while each is saved."""
    work = make_workload(size.model_bytes, has_row_state=True)
    saves = size.saves + _WARM_SAVES
    intervals = touched_ids([table.rows for table in work.tables], intervals=saves)
    found: list[CheckCost] = []
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix=".bench-"))
        rechecks = stack.enter_context(timed_method(TableWatch, "_find_escaped"))
        scans = stack.enter_context(timed_method(Tracker, "scan", time.thread_time))
        learns = stack.enter_context(timed_method(RowHashes, "learn", time.thread_time))
        ck = stack.enter_context(
            Checkpointer(
                scratch, model=work.model, optimizer=work.optimizer, strategy=CONSECUTIVE, keep=1
            )
        )
        save = ck.save()
        for index, ids in enumerate(intervals):
            for spent in (rechecks, scans, learns):
                spent.clear()
            work.train(ids, seed=index)  # while the last save, and its scan, are under way
            ck.step()
            ck.wait()
            encode_s = save.stats.encode_s
            background = sum(scans), sum(learns)
            save = ck.save()
            found.append(CheckCost(sum(rechecks), save.stats.stall_s, *background, encode_s))
    return _medians(found[_WARM_SAVES:])


def _medians(found: Sequence[CheckCost]) -> CheckCost:
    columns = zip(*(dataclasses.astuple(cost) for cost in found), strict=True)
    return CheckCost(*(statistics.median(column) for column in columns))


def ratios(check: CheckCost) -> tuple[Ratio, ...]:
    """The check beside the stall, and its background part beside encoding."""
    return (
        Ratio(
            name="rows that may have changed unseen: looked at again in the stall",
            ours=1e3 * check.recheck_s,
            peer=1e3 * check.stall_s,
            against="the stall of a delta",
            unit="ms",
            target=CHECK_MAX,
            sense=AT_MOST,
        ),
        Ratio(
            name="a sixteenth of all rows hashed in the background after a save",
            ours=1e3 * check.scan_s,
            peer=1e3 * check.encode_s,
            against="encoding the delta",
            unit="ms",
            sense=AT_MOST,
            note="processor time of one background thread; the other side is wall-clock time",
        ),
        Ratio(
            name="hashing the rows of a delta in the background",
            ours=1e3 * check.learn_s,
            peer=1e3 * check.encode_s,
            against="encoding the delta",
            unit="ms",
            sense=AT_MOST,
        ),
    )


@dataclass(frozen=True, slots=True)
class Mode:
    """One way of tracking, and training that leads to it."""

    tracking: TrackingName
    found_by: str
    optimizer: str = "Adagrad"
    is_sparse: bool = True
    is_edited: bool = False
    """Every step also writes a few rows in place."""


MODES = (
    Mode("auto", "sparse gradients"),
    Mode("auto", "dense gradients", is_sparse=False),
    Mode("auto", "rows ever trained", optimizer="Adam", is_sparse=False),
    Mode("auto", "comparing: rows are edited in place", is_edited=True),
    Mode("auto", "nothing: saved whole", optimizer="AdamW", is_sparse=False),
    Mode("lookup", "sparse gradients, unchecked"),
    Mode("hash", "comparing"),
)


@dataclass(frozen=True, slots=True)
class ModeCost:
    """What one way of tracking costs: bytes a row, medians of seconds, part of the rows saved."""

    mode: Mode
    bytes_a_row: float
    step_s: float
    hooks_s: float
    find_s: float
    stall_s: float
    share: float
    background_s: float


class Loop:
    """Training of one table, with batches that are the same for every mode."""

    def __init__(self, mode: Mode, size: Size) -> None:
        torch.manual_seed(5)
        self._mode = mode
        self._size = size
        self.model = nn.Embedding(size.rows, WIDTH, sparse=mode.is_sparse)
        self.optimizer: torch.optim.Optimizer = getattr(torch.optim, mode.optimizer)(
            self.model.parameters(), lr=0.01
        )
        self._draw = torch.Generator().manual_seed(9)

    def step(self) -> None:
        """One batch of ids, skewed: low ids come often."""
        where = torch.rand(self._size.batch, generator=self._draw)
        ids = (where**3 * self._size.rows).long()
        self.optimizer.zero_grad()
        self.model(ids).square().sum().backward()
        self.optimizer.step()
        if self._mode.is_edited:
            with torch.no_grad():
                self.model.weight[ids[:8]] *= 0.5


def measure_modes(size: Size, folder: Path, modes: Sequence[Mode] = MODES) -> list[ModeCost]:
    """Every way, one after the other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HoldfastWarning)  # of what these modes cost: it is shown
        return [_measure(mode, size, folder) for mode in modes]


def _measure(mode: Mode, size: Size, folder: Path) -> ModeCost:
    loop = Loop(mode, size)
    for _ in range(2):
        loop.step()
    costs: list[tuple[float, ...]] = []
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix=".bench-"))
        finds = stack.enter_context(timed_method(Tracker, "catch_up"))
        scans = stack.enter_context(timed_method(Tracker, "scan", time.thread_time))
        learns = stack.enter_context(timed_method(RowHashes, "learn", time.thread_time))
        ck = stack.enter_context(
            Checkpointer(
                scratch, model=loop.model, optimizer=loop.optimizer, strategy=CONSECUTIVE,
                tracking=mode.tracking, keep=1,
            )
        )  # fmt: skip
        ck.save().result()
        for _ in range(size.saves + _WARM_SAVES):
            plain = [seconds_of(loop.step) for _ in range(size.steps)]
            with timed_hooks(step_hooks()) as spent:
                loop.step()
            ck.step()
            for each in (finds, scans, learns):
                each.clear()
            stats = ck.save().result()
            ck.wait()
            inside = sum(spent)
            costs.append(
                (statistics.median(plain) - inside, inside, sum(finds), stats.stall_s,
                 stats.rows / size.rows, sum(scans) + sum(learns))
            )  # fmt: skip
        kept = tracker_of(ck).bytes
    steady = zip(*costs[_WARM_SAVES:], strict=True)
    return ModeCost(mode, kept / size.rows, *(statistics.median(values) for values in steady))


def tracker_of(ck: Checkpointer) -> Tracker:
    """The tracker inside a checkpointer: benches look at what users need not see."""
    tracker: Any = ck._changed._tracker
    assert isinstance(tracker, Tracker)
    return tracker


def sheet(found: Sequence[ModeCost], size: Size) -> Sheet:
    """Every way with its costs."""
    return Sheet(
        f"Ways of tracking: {size.rows:,} rows of {WIDTH} floats, {size.steps + 1} batches of "
        f"{size.batch} ids between saves",
        ("tracking", "rows are found by", "optimizer", "bytes a row", "a step, ms",
         "tracking in it, ms", "finding rows at a save, ms", "whole stall, ms", "rows saved",
         "background, ms"),
        tuple(
            (
                cost.mode.tracking,
                cost.mode.found_by,
                f"{cost.mode.optimizer}, {'sparse' if cost.mode.is_sparse else 'dense'}",
                f"{cost.bytes_a_row:.2f}",
                f"{1e3 * cost.step_s:.2f}",
                f"{1e3 * cost.hooks_s:.3f}",
                f"{1e3 * cost.find_s:.2f}",
                f"{1e3 * cost.stall_s:.1f}",
                f"{cost.share:.1%}",
                f"{1e3 * cost.background_s:.1f}",
            )
            for cost in found
        ),
        note="Bytes a row: what the tracker keeps in memory. Background: processor time of hashing "
        "what was saved and of the check, by save.",
    )  # fmt: skip
