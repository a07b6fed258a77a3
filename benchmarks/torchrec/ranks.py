"""One rank of the TorchRec benchmark: saves and loads the same model in turns with its peers.

    python -m benchmarks.torchrec.ranks ORDER.json

Every time is that of the slowest rank, from a barrier on. Rank 0 writes what was found.

Not here: what the numbers mean (section.py), the model (model.py).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed._state_dict_utils import _create_cpu_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from benchmarks.checkpoint.peers import Spent, folder_bytes
from benchmarks.torchrec.model import Sharded
from benchmarks.torchrec.section import DCP, DCP_ASYNC, DCP_CACHED, DELTA, DELTA_4, FP32, PHASES
from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.run import open as open_run
from holdfast.checkpoint.settings import StrategyName
from holdfast.checkpoint.strategy import Strategy

_PIECE_BYTES = 16 << 20
CHANGED = 0.26  # of the rows between two checkpoints (Check-N-Run, figure 3)


class Peer(Protocol):
    """Someone who saves the model, and loads what it saved last."""

    name: str

    def save(self, after_stop: Callable[[], None]) -> Spent:
        """Save; ``after_stop`` is called, untimed, where training would go on."""
        ...

    def restore(self) -> None:
        """Load it into the live model."""
        ...

    def close(self) -> None:
        """Let go of the model."""
        ...


def slowest(seconds: float) -> float:
    """Of all ranks."""
    most = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def _settle(folder: Path, *, room: int = 0) -> None:
    """Everybody starts together, with nothing of another's left in the page cache to write, and
    with ``room`` bytes of memory for that cache. A host takes back what its guests free: a page
    that nobody has used for some seconds costs more than what is written to it, and who had deleted
    a checkpoint right before would be spared that."""
    if dist.get_rank() == 0:
        if room:
            _touch_page_cache(folder / "room", room)
        os.sync()
    dist.barrier()


def _touch_page_cache(path: Path, room: int) -> None:
    shard = bytes(min(room, _PIECE_BYTES))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for _ in range(-(-room // len(shard))):
            file.write(shard)
    path.unlink()


def _clear(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()


class DistributedCheckpoint:
    """``torch.distributed.checkpoint`` of the sharded state dicts."""

    def __init__(self, name: str, sharded: Sharded, folder: Path) -> None:
        self.name = name
        self._sharded = sharded
        self._folder = folder
        self._stager = BlockingAsyncStager(cache_staged_state_dict=True)
        if name == DCP_CACHED:
            # By itself it pins the memory it keeps, which needs a GPU.
            self._stager.state_dict_cache = _create_cpu_state_dict(sharded.state())

    def save(self, after_stop: Callable[[], None]) -> Spent:
        """The second checkpoint of two; the first is not counted."""
        self._save(lambda: None)
        return self._save(after_stop)

    def _save(self, after_stop: Callable[[], None]) -> Spent:
        _clear(self._folder)
        self._sharded.train(share=CHANGED, seed=2)
        _settle(self._folder.parent, room=self._sharded.bytes)
        start = time.perf_counter()
        writer = FileSystemWriter(self._folder)
        if self.name == DCP:
            dcp_save(self._sharded.state(), storage_writer=writer)
            stopped = durable = time.perf_counter() - start
            after_stop()
        else:
            stager = self._stager if self.name == DCP_CACHED else None
            future = dcp_async_save(
                self._sharded.state(), storage_writer=writer, async_stager=stager
            )
            stopped = time.perf_counter() - start
            after_stop()
            future.result()  # type: ignore[union-attr]
            durable = time.perf_counter() - start
        dist.barrier()
        return Spent(slowest(stopped), slowest(durable), folder_bytes(self._folder))

    def restore(self) -> None:
        """In place, into the live shards: its own best."""
        dcp_load(self._sharded.state(), checkpoint_id=self._folder)

    def close(self) -> None:
        """The stager keeps its copies: that is what is measured."""


class Holdfast:
    """Ours: a checkpointer of its own for every round, whose first base is not counted."""

    def __init__(self, name: str, sharded: Sharded, folder: Path) -> None:
        self.name = name
        self._sharded = sharded
        self._folder = folder
        self._ck: Checkpointer | None = None
        self.phases: dict[str, float] = {}
        """Of the last save: how long each phase took the slowest rank."""

    def open(self) -> Checkpointer:
        """A checkpointer of the run in the folder."""
        return Checkpointer(
            self._folder,
            model=self._sharded.model,
            optimizer=self._sharded.optimizer,
            strategy=strategy_of(self.name),
        )

    def save(self, after_stop: Callable[[], None]) -> Spent:
        """The second checkpoint of a run: of the changed rows, or of all."""
        _clear(self._folder)
        self._ck = ck = self.open()
        ck.step()
        ck.save().result()
        self._sharded.train(share=CHANGED, seed=2)
        ck.step()
        _settle(self._folder.parent, room=self._sharded.bytes)
        start = time.perf_counter()
        save = ck.save()
        stopped = time.perf_counter() - start
        after_stop()
        stats = save.result()
        durable = time.perf_counter() - start
        dist.barrier()
        self.phases = {name: slowest(getattr(stats, name)) for name in PHASES}
        written = open_run(self._folder).info(ck.current_step).bytes
        return Spent(slowest(stopped), slowest(durable), written)

    def restore(self) -> None:
        """The last step, a delta with its base."""
        if self._ck is None:
            self._ck = self.open()
        self._ck.restore(self._ck.all_steps()[-1])

    def close(self) -> None:
        """Take the hooks off the model and give the staging memory back."""
        if self._ck is not None:
            self._ck.close()
            self._ck = None


def strategy_of(name: str) -> Strategy | StrategyName:
    """What is saved, and in how many bits."""
    if name == FP32:
        return "full"
    return Strategy("deltas", base="one-shot", codec="fp32" if name == DELTA else "adaptive4")


def make_peers(sharded: Sharded, folder: Path) -> list[Peer]:
    """Everybody, each with a folder of its own."""
    theirs, ours = (DCP, DCP_ASYNC, DCP_CACHED), (FP32, DELTA, DELTA_4)
    return [
        *(DistributedCheckpoint(name, sharded, folder / name) for name in theirs),
        *(Holdfast(name, sharded, folder / name) for name in ours),
    ]


def measure(rows: list[int], rounds: int, folder: Path) -> dict[str, Any]:
    """Save and load in turns; the last round's checkpoints stay in the folder."""
    sharded = Sharded(rows)
    peers = make_peers(sharded, folder)
    spent: dict[str, list[dict[str, Any]]] = {peer.name: [] for peer in peers}
    kept: dict[str, bool] = {peer.name: True for peer in peers}
    phases: dict[str, list[dict[str, float]]] = {}
    for round_ in range(rounds + 1):
        for peer in peers:
            one, is_kept = _one(peer, sharded)
            kept[peer.name] &= is_kept
            if round_:
                spent[peer.name].append(dataclasses.asdict(one))
                if isinstance(peer, Holdfast):
                    phases.setdefault(peer.name, []).append(peer.phases)
    return {"spent": spent, "holds_its_step": kept, "bytes": sharded.bytes, "phases": phases}


def _one(peer: Peer, sharded: Sharded) -> tuple[Spent, bool]:
    """Save, change rows as training would, load; do they have the values of the save?"""
    views = sharded.probe()
    before: list[torch.Tensor] = []

    def train_on() -> None:
        before.extend(view.clone() for view in views)
        for view in views:
            view.add_(1.0)

    try:
        spent = peer.save(train_on)
        restore_s = _timed(peer.restore)
    finally:
        peer.close()
    # Four bits err by far less than the step of 1 that was added; fp32 not at all.
    bound = 0.5 if peer.name == DELTA_4 else 0.0
    worst = max(
        float((view - old).abs().max())
        for view, old in zip(views, before[-len(views) :], strict=True)
    )
    return dataclasses.replace(spent, restore_s=restore_s), slowest(worst) <= bound


def _timed(job: Callable[[], None]) -> float:
    _settle(Path())
    start = time.perf_counter()
    job()
    return slowest(time.perf_counter() - start)


def reshard(rows: list[int], rounds: int, folder: Path) -> dict[str, Any]:
    """Load what two ranks saved into this number of ranks; and with other cuts of columns."""
    sharded = Sharded(rows)
    seconds: dict[str, list[float]] = {}
    for round_ in range(rounds + 1):
        for peer in make_peers(sharded, folder):
            if peer.name in (DCP_ASYNC, DCP_CACHED):
                continue  # they write what DCP save writes
            spent = _timed(peer.restore)
            peer.close()
            if round_:
                seconds.setdefault(peer.name, []).append(spent)
    other = Sharded(rows, cuts=1)
    refused: dict[str, str | None] = {}
    for peer in make_peers(other, folder):
        if peer.name in (DCP, FP32):
            refused[peer.name] = _refusal(peer)
    return {"seconds": seconds, "refused": refused}


def _refusal(peer: Peer) -> str | None:
    try:
        peer.restore()
    except (Exception, CheckpointException) as error:  # DCP's is not an Exception
        last = str(error).strip().split("\n")[-1]
        return f"{type(error).__name__}: {last}"[:200]
    finally:
        peer.close()
    return None


def main(order: dict[str, Any]) -> None:
    """Do this rank's part; rank 0 writes the answer."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{order['meeting']}",
        rank=order["rank"],
        world_size=order["ranks"],
        timeout=timedelta(minutes=5),
    )
    task = {"measure": measure, "reshard": reshard}[order["task"]]
    found = task(order["rows"], order["rounds"], Path(order["folder"]))
    if dist.get_rank() == 0:
        Path(order["answer"]).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
