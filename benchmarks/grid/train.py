"""One training run watched by several checkpointers at once, each with a store of its own.

So every strategy sees the same rows change at the same steps. Between two checkpoints lie a few
steps of a real model on batches of the synthetic click stream. Checkpointers take turns: each saves
while the others are idle, and who goes first changes from checkpoint to checkpoint, because the
first of them finds the rows outside the processor's caches.

Invariants:
- No snapshot is taken while any save or any round of extraction runs.
- A round of extraction runs alone, except (``is_beside``) that of the checkpointer that saved last:
  it has the next interval's training beside it, as in a real run.

Not here: restoring (restore.py), what is compared (every_step.py, study.py).

# N ids of a table in one interval
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from benchmarks.timing import seconds_of
from holdfast import events
from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.format.checksum import checksum_all
from holdfast.checkpoint.grid.decide import Extract
from holdfast.checkpoint.saving.pending import SaveStats
from holdfast.checkpoint.strategy import Strategy
from holdfast.model.tables import find_tables
from holdfast.recsys import (
    CRITEO_KAGGLE_ROWS,
    Batch,
    ClickStream,
    make_model,
    scaled_rows,
    split_parameters,
)
from holdfast.recsys.models.presets import PRESETS, ModelKind
from holdfast.storage import open_storage

FULL, DIFFERENTIAL, NAIVE, GRID = "full", "differential", "naive increments", "grid"
# Naive increments and the grid over the same base and rollups: nothing but the grid differs.
STRATEGIES: Mapping[str, Strategy] = {
    DIFFERENTIAL: Strategy(DIFFERENTIAL, base="intermittent", codec="fp32"),
    NAIVE: Strategy(NAIVE, base="consecutive", codec="fp32", rollups=True),
    GRID: Strategy(GRID, base="consecutive", codec="fp32", extract=Extract(), rollups=True),
}
# A base goes through in parts; the deltas compared fit whole, so their stalls are copies alone.
STAGING_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is trained, and how often it is saved.

    ``is_whole`` False leaves the network out of training: the rows of an interval's batches are
    looked up once each and stepped with gradients of noise. The same rows change.
    """

    table_bytes: int
    checkpoints: int
    steps: int = 10
    batch: int = 1024
    preset: str = "kaggle"
    kind: ModelKind = "dlrm"
    is_whole: bool = True
    tables: int = len(CRITEO_KAGGLE_ROWS)


class Training:
    """A model over tables in the proportions of Criteo Kaggle's, and its click stream."""

    def __init__(self, size: Size, *, seed: int = 3) -> None:
        self.size = size
        width = PRESETS[size.preset].width
        shape = CRITEO_KAGGLE_ROWS[: size.tables]
        rows = scaled_rows(shape, total_rows=size.table_bytes // (4 * width))
        self._stream = ClickStream(rows, batch_size=size.batch, seed=seed)
        torch.manual_seed(seed)
        self.model = make_model(size.preset, rows, kind=size.kind)
        tables, dense = split_parameters(self.model)
        self.optimizers = [torch.optim.SGD(tables, lr=0.1), torch.optim.SGD(dense, lr=0.01)]
        self.tables = find_tables(self.model, self.optimizers)
        self._noise = torch.Generator().manual_seed(seed)

    @property
    def row_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(table.rows * table.schema().row_bytes for table in self.tables)

    @property
    def rows(self) -> int:
        """Rows of all tables together."""
        return sum(table.rows for table in self.tables)

    def targets(self) -> dict[str, list[np.ndarray]]:
        """The live tables as arrays: what a restore writes into."""
        return {t.name: [column.detach().numpy() for column in t.tensors()] for t in self.tables}

    def checksum(self) -> int:
        """One number for the values of every row."""
        return checksum_all([column for columns in self.targets().values() for column in columns])

    def interval(self, index: int) -> None:
        """Train from one checkpoint to the next."""
        size = self.size
        first = index * size.steps
        batches = [self._stream[number] for number in range(first, first + size.steps)]
        if size.is_whole:
            for batch in batches:
                self._step(batch)
        else:
            self._touch(batches)

    def _step(self, batch: Batch) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(self.model(batch), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in self.optimizers:
            optimizer.step()

    def _touch(self, batches: Sequence[Batch]) -> None:
        ids_BT = np.concatenate([batch.ids.numpy() for batch in batches])
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for group in (self.model.tables, getattr(self.model, "weights", ())):
            for module, ids_B in zip(group, ids_BT.T, strict=False):
                out = module(torch.from_numpy(np.unique(ids_B)).unsqueeze(1))
                out.backward(1e-3 * torch.randn(out.shape, generator=self._noise))
        self.optimizers[0].step()


@dataclass(slots=True)
class Tally:
    """What one checkpointer did, checkpoint by checkpoint; memory in bytes, None: not known."""

    saves: list[SaveStats] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    alone: list[events.Extracted] = field(default_factory=list)
    beside: list[events.Extracted] = field(default_factory=list)
    backlogs: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def deltas(self) -> list[SaveStats]:
        """The saves that were not bases."""
        return [stats for stats in self.saves if stats.kind == "delta"]

    @property
    def rollups(self) -> list[SaveStats]:
        """The deltas that were rollups."""
        return [stats for stats in self.deltas if stats.is_rollup]

    @property
    def increments(self) -> list[SaveStats]:
        """The deltas that were not rollups."""
        return [stats for stats in self.deltas if not stats.is_rollup]

    @property
    def rounds(self) -> list[events.Extracted]:
        """Every round of extraction, in order."""
        return sorted((*self.alone, *self.beside), key=lambda one: one.step)

    @property
    def waiting(self) -> int:
        """Increments that were saved and not worked off."""
        through = max((one.step for one in (*self.alone, *self.beside)), default=-1)
        return sum(stats.step > through for stats in self.increments)


class Watcher:
    """A checkpointer, its folder and its tally."""

    def __init__(self, training: Training, folder: Path, **settings: Any) -> None:
        self.storage = open_storage(str(folder))
        self.tally = Tally()
        self._is_beside = False
        self._before: int | None = None
        self.ck = Checkpointer(
            self.storage,
            model=training.model,
            optimizer=training.optimizers,
            events=self._hear,
            staging_bytes_max=STAGING_BYTES,
            save_last=False,
            **settings,
        )

    def _hear(self, event: events.Event) -> None:
        # Told of a commit before the extractor is: the peak counted from here is the round's.
        if isinstance(event, events.SaveDurable):
            self._before = None if self._is_beside else reset_peak()
        elif isinstance(event, events.Extracted):
            (self.tally.beside if self._is_beside else self.tally.alone).append(event)
            peak = peak_bytes()
            if self._before is not None and peak is not None:
                self.tally.memory.append(max(0, peak - self._before))
        elif isinstance(event, events.ExtractionFailed):
            self.tally.failures.append(event.error)

    def save(self, *, is_beside: bool) -> None:
        """Save and wait until the checkpoint is safe; for extraction too unless ``is_beside``."""
        self._is_beside = is_beside
        self.tally.saves.append(self.ck.save().result())
        if not is_beside:
            self.ck.wait()

    def arrive(self) -> None:
        """The next checkpoint is due: note what extraction has left over, then wait for it."""
        if self._is_beside:
            self.tally.backlogs.append(self.tally.waiting)
        self.ck.wait()
        assert not self.tally.failures, self.tally.failures

    def count_kept(self) -> None:
        """Note what the store holds now, catalogs included."""
        self.tally.kept.append(sum(item.bytes for item in self.storage.list("")))


@dataclass(frozen=True, slots=True)
class Watched:
    """The outcome: tallies by name, seconds of training between checkpoints, values by step."""

    tallies: Mapping[str, Tally]
    interval_s: tuple[float, ...]
    checksums: Mapping[int, int]


def watch(
    training: Training,
    settings: Mapping[str, Mapping[str, Any]],
    folder: Path,
    *,
    is_beside: bool = False,
    check_every: int = 10,
) -> Watched:
    """Train and save as often as the size says; stores are left in ``folder`` by their names."""
    size = training.size
    seconds: list[float] = []
    checksums: dict[int, int] = {}
    with contextlib.ExitStack() as stack:
        watchers = []
        for name, given in settings.items():
            watcher = Watcher(training, store_of(folder, name), **given)
            stack.enter_context(watcher.ck)
            watchers.append(watcher)
        for index in range(size.checkpoints):
            seconds.append(seconds_of(lambda at=index: training.interval(at)))  # type: ignore[misc]
            for watcher in watchers:
                watcher.arrive()
                if index:
                    watcher.count_kept()
                for _ in range(size.steps):
                    watcher.ck.step()
            if (index + 1) % check_every == 0:
                checksums[watchers[0].ck.current_step] = training.checksum()
            in_turn = turn(watchers, index)
            for watcher in in_turn:
                watcher.save(is_beside=is_beside and watcher is in_turn[-1])
        for watcher in watchers:
            watcher.arrive()
            watcher.count_kept()
    tallies = {name: watcher.tally for name, watcher in zip(settings, watchers, strict=True)}
    return Watched(tallies, tuple(seconds), checksums)


def store_of(folder: Path, name: str) -> Path:
    """Where the store of a setting lies."""
    return folder / name.replace(" ", "-").replace("/", "-")


T = TypeVar("T")


def turn(items: Sequence[T], index: int) -> list[T]:
    """The items in another order every time; in the end everybody was first as often as last.

    >>> [turn("abc", index) for index in (0, 1, 3)]
    [['a', 'b', 'c'], ['b', 'c', 'a'], ['c', 'b', 'a']]
    """
    at = index % len(items)
    turned = [*items[at:], *items[:at]]
    return turned[::-1] if index // len(items) % 2 else turned


@dataclass(frozen=True, slots=True)
class FullCost:
    """Full checkpoints, every one alike: bytes of one, median seconds."""

    bytes: int
    stall_s: float
    durable_s: float


def save_fully(training: Training, folder: Path, *, saves: int) -> FullCost:
    """A few full checkpoints, of which the last is kept."""
    spent: list[SaveStats] = []
    with Checkpointer(
        store_of(folder, FULL),
        model=training.model,
        optimizer=training.optimizers,
        strategy="full",
        keep=1,
    ) as ck:
        for _ in range(saves):
            ck.step()
            spent.append(ck.save().result())
    spent = spent[1:] or spent  # the first one also fetches its memory
    return FullCost(
        bytes=spent[-1].bytes,
        stall_s=statistics.median(stats.stall_s for stats in spent),
        durable_s=statistics.median(stats.durable_s for stats in spent),
    )


_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak() -> int | None:
    """Forget the process's largest memory; what it holds now, None where nobody can tell."""
    try:
        _CLEAR.write_text("5", encoding="ascii")
    except OSError:
        return None
    return _memory("VmRSS")


def peak_bytes() -> int | None:
    """The most memory the process held since ``reset_peak``."""
    return _memory("VmHWM")


def _memory(name: str) -> int | None:
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return None
