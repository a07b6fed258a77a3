"""Beside torch.save and torch.distributed.checkpoint: the same model, folder and disk, in turns.

Four questions: how long does training stand still, when is the checkpoint safe, how many bytes is
it, how long does loading it into the live model take. ``torch.save`` leaves its file in the page
cache, so it is timed as it is and with the fsync that makes it safe. Restores read from the page
cache, for everyone. Nobody trains meanwhile: what is measured is each one's own best.

Also asked: does the checkpoint hold the values of its own step when training goes on at once?

Not here: the stall beside its physical limit (overhead.py).
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from benchmarks.results import TIMES_LESS, Line, Plot, Ratio, Section, Sheet
from benchmarks.timing import seconds_of
from benchmarks.workload import Ids, Workload, make_workload, share, touched_ids
from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.settings import StrategyName
from holdfast.checkpoint.strategy import Strategy

FP32, BASE_4, DELTA_4 = (
    "holdfast full fp32",
    "check-n-run base, 4 bits",
    "check-n-run delta, 4 bits",
)
TORCH, TORCH_SYNCED = "torch.save", "torch.save + fsync"
DCP, DCP_ASYNC = "DCP save", "DCP async_save"


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    model_bytes: int
    rounds: int


FULL = Size(model_bytes=1 << 30, rounds=3)
QUICK = Size(model_bytes=1 << 20, rounds=1)


@dataclass(frozen=True, slots=True)
class Spent:
    """One save: training stopped, checkpoint safe (None: never made safe), bytes, load."""

    stopped_s: float
    durable_s: float | None
    bytes: int
    restore_s: float = 0.0


class Peer(Protocol):
    """Something that saves the model again and again and can load the last."""

    def save(self, after_stop: Callable[[], None]) -> dict[str, Spent]:
        """Save; ``after_stop`` is called, untimed, where training would go on."""
        ...

    def restore(self) -> None:
        """Load what was saved last into the live model."""
        ...

    def close(self) -> None:
        """Let go of the model."""
        ...


def folder_bytes(folder: Path) -> int:
    """What lies in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _settle_disk() -> None:
    """Nobody pays for what another left in the page cache.

    Everybody writes an untimed checkpoint first: a disk that is fast for a while and then slow, as
    rented ones are, must be equally tired for all.
    """
    os.sync()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class TorchSave:
    """``torch.save`` of both state dicts into one file."""

    def __init__(self, work: Workload, folder: Path) -> None:
        self._work = work
        folder.mkdir()
        self._path = folder / "model.pt"

    def save(self, after_stop: Callable[[], None]) -> dict[str, Spent]:
        """Once, timed as it is and with the fsync after it."""
        work = self._work
        state = {"model": work.model.state_dict(), "optimizer": work.optimizer.state_dict()}
        torch.save(state, self._path)
        _settle_disk()
        self._path.unlink()
        start = time.perf_counter()
        state = {"model": work.model.state_dict(), "optimizer": work.optimizer.state_dict()}
        torch.save(state, self._path)
        stopped = time.perf_counter() - start
        _sync(self._path)
        _sync(self._path.parent)
        durable = time.perf_counter() - start
        after_stop()
        size = self._path.stat().st_size
        return {TORCH: Spent(stopped, None, size), TORCH_SYNCED: Spent(durable, durable, size)}

    def restore(self) -> None:
        """``torch.load`` and two ``load_state_dict``."""
        state = torch.load(self._path, weights_only=True)
        self._work.model.load_state_dict(state["model"])
        self._work.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        """Nothing is held."""


class DistributedCheckpoint:
    """``torch.distributed.checkpoint`` in one process; it syncs its files by itself."""

    def __init__(self, work: Workload, folder: Path, *, is_async: bool) -> None:
        self._work = work
        self._folder = folder
        self._is_async = is_async

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._work.model, self._work.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, after_stop: Callable[[], None]) -> dict[str, Spent]:
        """``save``, or ``async_save`` and the wait for its future."""
        shutil.rmtree(self._folder, ignore_errors=True)
        dcp_save(self._state(), storage_writer=FileSystemWriter(self._folder), no_dist=True)
        _settle_disk()
        shutil.rmtree(self._folder)
        writer = FileSystemWriter(self._folder)
        start = time.perf_counter()
        if not self._is_async:
            dcp_save(self._state(), storage_writer=writer, no_dist=True)
            stopped = durable = time.perf_counter() - start
            after_stop()
            return {DCP: Spent(stopped, durable, folder_bytes(self._folder))}
        future = dcp_async_save(self._state(), storage_writer=writer, no_dist=True)
        stopped = time.perf_counter() - start
        after_stop()
        future.result()  # type: ignore[union-attr]
        durable = time.perf_counter() - start
        return {DCP_ASYNC: Spent(stopped, durable, folder_bytes(self._folder))}

    def restore(self) -> None:
        """``load`` into the live tensors, then the recipe's ``set_state_dict``."""
        state = self._state()
        dcp_load(state, checkpoint_id=self._folder, no_dist=True)
        set_state_dict(
            self._work.model,
            self._work.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def close(self) -> None:
        """Nothing is held."""


class Holdfast:
    """Ours: a checkpointer of its own for every round, whose first base is not counted."""

    def __init__(
        self,
        name: str,
        work: Workload,
        folder: Path,
        *,
        strategy: StrategyName | Strategy,
        changed: Ids = (),
    ) -> None:
        self._name = name
        self._work = work
        self._folder = folder
        self._strategy = strategy
        self._changed = changed
        self._ck: Checkpointer | None = None

    def save(self, after_stop: Callable[[], None]) -> dict[str, Spent]:
        """The second checkpoint of a run: of the changed rows, or of all."""
        work = self._work
        shutil.rmtree(self._folder, ignore_errors=True)
        self._ck = ck = Checkpointer(
            self._folder,
            model=work.model,
            optimizer=work.optimizer,
            strategy=self._strategy,
        )
        ck.step()
        ck.save().result()
        if self._changed:  # without, every checkpoint is a base
            work.train(self._changed, seed=0)
        ck.step()
        _settle_disk()
        start = time.perf_counter()
        save = ck.save()
        stopped = time.perf_counter() - start
        after_stop()
        stats = save.result()
        durable = time.perf_counter() - start
        return {self._name: Spent(stopped, durable, stats.bytes)}

    def restore(self) -> None:
        """The last step, a delta with its base."""
        assert self._ck is not None
        self._ck.restore(self._ck.all_steps()[-1])

    def close(self) -> None:
        """Take the hooks off the model and give the staging memory back."""
        if self._ck is not None:
            self._ck.close()
            self._ck = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Medians of one way to save, and whether it held the step it was taken at."""

    name: str
    spent: Spent
    is_of_its_step: bool


def measure(*, quick: bool, folder: Path = Path()) -> Section:
    """Everybody in turns, several rounds after one that is not counted."""
    size = QUICK if quick else FULL
    work = make_workload(size.model_bytes, has_row_state=True)
    changed = touched_ids([table.rows for table in work.tables], intervals=1)[0]
    with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-") as scratch:
        found = _rounds(work, changed, Path(scratch), rounds=size.rounds)
    by_name = {outcome.name: outcome for outcome in found}
    return Section(
        name="peers",
        title="Beside torch.save and torch.distributed.checkpoint",
        text=(
            f"A model of {work.row_bytes / 1e9:.2f} GB (rows of 64 floats and their Adagrad state) "
            f"saved into one folder of one disk, in turns; medians of {size.rounds} rounds after a "
            f"first that is not counted. The delta has {share(changed, work.rows):.0%} of the "
            "rows. DCP is torch.distributed.checkpoint in one process, which syncs its files; "
            "torch.save does not, so it is shown both ways. Restores read from the page cache."
        ),
        ratios=tuple(_ratios(by_name)),
        sheets=(_sheet(found),),
        plots=(_plot(found),),
        findings=tuple(
            f"{outcome.name}: the checkpoint holds values of a later step. Training that goes on "
            "when the call returns changes what is written."
            for outcome in found
            if not outcome.is_of_its_step
        ),
    )


def _rounds(work: Workload, changed: Ids, scratch: Path, *, rounds: int) -> list[Outcome]:
    bases = Strategy("bases", base="full", codec="adaptive4")
    deltas = Strategy("deltas", base="one-shot", codec="adaptive4")
    peers: list[Peer] = [
        TorchSave(work, scratch / "torch"),
        DistributedCheckpoint(work, scratch / "dcp", is_async=False),
        DistributedCheckpoint(work, scratch / "dcp-async", is_async=True),
        Holdfast(FP32, work, scratch / "full", strategy="full"),
        Holdfast(BASE_4, work, scratch / "bases", strategy=bases),
        Holdfast(DELTA_4, work, scratch / "deltas", strategy=deltas, changed=changed),
    ]
    spent: dict[str, list[Spent]] = {}
    is_of_its_step: dict[str, bool] = {}
    pristine = [[column.clone() for column in table.tensors()] for table in work.tables]
    for round_ in range(rounds + 1):
        for peer in peers:
            saved, is_kept = _one(peer, work)
            for table, columns in zip(work.tables, pristine, strict=True):
                for column, before in zip(table.tensors(), columns, strict=True):
                    column.copy_(before)
            for name, value in saved.items():
                is_of_its_step[name] = is_of_its_step.get(name, True) and is_kept
                if round_:
                    spent.setdefault(name, []).append(value)
    return [Outcome(name, _median(many), is_of_its_step[name]) for name, many in spent.items()]


def _one(peer: Peer, work: Workload) -> tuple[dict[str, Spent], bool]:
    """Save, change the model as training would, restore; was it the step's own value?"""
    weight = work.tables[2].parameter.detach()
    probe = weight[:: max(1, len(weight) // 64)]
    before = probe.clone()

    def train_on() -> None:
        probe.add_(1.0)

    try:
        saved = peer.save(train_on)
        restore_s = seconds_of(peer.restore)
    finally:
        peer.close()
    # A codec of 4 bits errs by far less than the step of 1 that was added.
    is_kept = bool((probe - before).abs().max() < 0.5)
    values = {
        name: Spent(value.stopped_s, value.durable_s, value.bytes, restore_s)
        for name, value in saved.items()
    }
    return values, is_kept


def _median(many: Sequence[Spent]) -> Spent:
    durable = [one.durable_s for one in many if one.durable_s is not None]
    return Spent(
        stopped_s=statistics.median(one.stopped_s for one in many),
        durable_s=statistics.median(durable) if durable else None,
        bytes=int(statistics.median(one.bytes for one in many)),
        restore_s=statistics.median(one.restore_s for one in many),
    )


def _ratios(found: dict[str, Outcome]) -> list[Ratio]:
    rows: list[tuple[str, str, str, str]] = []
    for ours in (FP32, BASE_4, DELTA_4):
        rows += [(ours, peer, "stopped_s", "training stopped") for peer in (TORCH, DCP_ASYNC)]
        rows += [(ours, peer, "durable_s", "time to durable") for peer in (TORCH_SYNCED, DCP)]
        rows += [(ours, peer, "restore_s", "restore") for peer in (TORCH, DCP)]
        rows += [(ours, TORCH, "bytes", "bytes")]
    ratios = []
    for ours, peer, field, what in rows:
        is_bytes = field == "bytes"
        mine = float(getattr(found[ours].spent, field))
        other = float(getattr(found[peer].spent, field))
        # fp32 stores what torch.save stores: the same bytes are right, fewer are not expected.
        target = 0.99 if is_bytes and ours == FP32 else 1.0
        ratios.append(
            Ratio(
                name=f"{what}: {ours}",
                ours=mine / 1e6 if is_bytes else mine,
                peer=other / 1e6 if is_bytes else other,
                against=peer,
                unit="MB" if is_bytes else "s",
                target=target,
                sense=TIMES_LESS,
            )
        )
    return ratios


def _sheet(found: list[Outcome]) -> Sheet:
    rows = []
    for outcome in found:
        spent = outcome.spent
        rows.append((
            outcome.name,
            f"{spent.stopped_s:.3f}",
            "never" if spent.durable_s is None else f"{spent.durable_s:.2f}",
            f"{spent.bytes / 1e6:.1f}",
            f"{spent.restore_s:.2f}",
            "yes" if outcome.is_of_its_step else "**no**",
        ))  # fmt: skip
    return Sheet(
        "Saving and loading the same model",
        ("way", "stopped s", "durable s", "MB", "restore s", "holds its step"),
        tuple(rows),
        note="Holds its step: the values restored are those of the moment of the call although "
        "training changed rows as soon as the call returned.",
    )


def _plot(found: list[Outcome]) -> Plot:
    names = tuple(outcome.name for outcome in found)
    stopped = tuple(outcome.spent.stopped_s for outcome in found)
    durable = tuple(outcome.spent.durable_s or 0.0 for outcome in found)
    restore = tuple(outcome.spent.restore_s for outcome in found)
    return Plot(
        name="peers-seconds",
        title="One checkpoint of the same model",
        x_label="",
        y_label="seconds",
        lines=(
            Line("training stopped", names, stopped),
            Line("durable", names, durable),
            Line("restore", names, restore),
        ),
        is_bars=True,
    )
