"""What the processes of the pool do: each function runs on every rank of a case."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import holdfast as hf
from holdfast.checkpoint.saving import store_rows
from tests.ranks import attached, ddp
from tests.ranks.held import Training


def _checkpointer(url: str, training: Training, group: Any, **settings: Any) -> hf.Checkpointer:
    settings = {"codec": "fp32", "ranks_timeout_s": 20.0, **settings}
    return hf.Checkpointer(
        url,
        model=training.model,
        optimizer=training.optimizer,
        shards=training.shards,
        ranks=group,
        **settings,
    )


def train(
    rank: int,
    ranks: int,
    group: Any,
    *,
    url: str,
    layout: str,
    saves: Sequence[int],
    optimizer: str = "adagrad",
    **settings: Any,
) -> dict[str, Any]:
    """Go on from the last checkpoint and save at these steps; what is held in the end."""
    training = Training(layout, rank, ranks, optimizer=optimizer)
    kinds = []
    with _checkpointer(url, training, group, **settings) as ck:
        start = ck.resume()
        for step in range(start + 1, max(saves, default=start) + 1):
            training.train([step])
            ck.step()
            if step in saves:
                kinds.append(ck.save().result(30).kind)
        ck.wait()
        steps = ck.all_steps()
    return {
        "start": start,
        "kinds": kinds,
        "steps": steps,
        "held": training.held(),
        "network": training.network(),
    }


def load(
    rank: int,
    ranks: int,
    group: Any,
    *,
    url: str,
    layout: str,
    steps: Sequence[int],
    optimizer: str = "adagrad",
    **settings: Any,
) -> list[dict[str, Any]]:
    """Restore steps one after the other; what is held at each."""
    training = Training(layout, rank, ranks, optimizer=optimizer)
    found = []
    with _checkpointer(url, training, group, **settings) as ck:
        for step in steps:
            ck.restore(step)
            for parameter in training.model.parameters():
                assert not parameter.isnan().any()
            found.append({"held": training.held(), "network": training.network()})
    return found


class CountingReader:
    """A reader that knows how far this rank has read."""

    def __init__(self, start: int) -> None:
        self.at = start

    def state_dict(self) -> dict[str, int]:
        """How far."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self.at = state["at"]


class SharingReader(CountingReader):
    """One that can go on from what other numbers of ranks have read."""

    def load_rank_states(self, states: Sequence[dict[str, int]]) -> None:
        """Go on where all of them together are."""
        self.at = sum(state["at"] for state in states)


def save_own(rank: int, ranks: int, group: Any, *, url: str) -> tuple[int, float]:
    """Save with a reader and random state that are this rank's; what they go on with."""
    training = Training("replicated", rank, ranks)
    reader = CountingReader(100 * rank)
    np.random.seed(rank)
    with _checkpointer(url, training, group, reader=reader) as ck:
        ck.resume()
        training.train([1])
        ck.step()
        ck.save()
        drawn = float(np.random.random())
    return reader.at, drawn


def load_own(
    rank: int, ranks: int, group: Any, *, url: str, has_reader: bool, can_share: bool = False
) -> tuple[int, float, str]:
    """Resume; what reader and random state go on with, or what was refused."""
    training = Training("replicated", rank, ranks)
    reader: Any = (SharingReader if can_share else CountingReader)(-1) if has_reader else None
    np.random.seed(99)
    with _checkpointer(url, training, group, reader=reader) as ck:
        try:
            ck.resume()
        except hf.InvalidRequestError as error:
            return -1, 0.0, str(error)
    return getattr(reader, "at", -1), float(np.random.random()), ""


def save_apart(rank: int, ranks: int, group: Any, *, url: str) -> str:
    """Ranks that are at different steps: what each is told."""
    training = Training("row", rank, ranks)
    with _checkpointer(url, training, group, save_last=False) as ck:
        for _ in range(1 + rank):
            ck.step()
        try:
            ck.save()
        except hf.HoldfastError as error:
            return str(error)
    return ""


def save_untrained(rank: int, ranks: int, group: Any, *, url: str) -> list[str]:
    """Row state that appears late, and only where rows were trained: what each save is."""
    torch.manual_seed(5)
    shard = hf.Shard(10, 4, range(5 * rank, 5 * rank + 5))
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4, sparse=True))
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    kinds = []
    with hf.Checkpointer(
        url, model=model, optimizer=optimizer, shards={"0.weight": shard}, ranks=group,
        codec="fp32", ranks_timeout_s=20,
    ) as ck:  # fmt: skip
        for trained in ([], [0], [0, 1]):
            if rank in trained:
                model(torch.tensor([1, 2])).sum().backward()
                optimizer.step()
            optimizer.zero_grad()
            ck.step()
            kinds.append(ck.save().result(30).kind)
    return kinds


def measure(rank: int, ranks: int, group: Any, *, url: str, rows: int) -> dict[str, int]:
    """How much memory saving and restoring a large table takes beyond the table itself."""
    shard = hf.Shard(rows, 64, range(rows * rank // ranks, rows * (rank + 1) // ranks))
    model = torch.nn.Sequential(torch.nn.Embedding(shard.local_rows, 64, sparse=True))
    optimizer = torch.optim.Adagrad(model.parameters())
    found = {"shard": 2 * 4 * 64 * shard.local_rows}

    def peak_during(act: Any) -> int:
        before = _memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        act()
        return max(0, _memory("VmHWM") - before)

    with hf.Checkpointer(
        url, model=model, optimizer=optimizer, shards={"0.weight": shard}, ranks=group,
        codec="fp32", ranks_timeout_s=60, staging_bytes_max=16 << 20, threads=1,
    ) as ck:  # fmt: skip
        ck.step()
        found["save"] = peak_during(lambda: ck.save().result(60))
        before = model[0].weight.detach().clone()
        with torch.no_grad():
            model[0].weight.zero_()
        found["restore"] = peak_during(ck.resume)
        assert torch.equal(before, model[0].weight)
    return found


def _memory(kind: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return 1024 * int(line.split()[1])
    raise AssertionError(kind)


def exchange(rank: int, ranks: int, group: Any, *, url: str, times: int) -> list[float]:
    """How long ranks wait for each other at a save, in seconds."""
    training = Training("row", rank, ranks)
    found = []
    with _checkpointer(url, training, group) as ck:
        ck.step()
        ck.save().result(60)
        for _ in range(times):
            ck.step()
            started = time.perf_counter()
            ck._agree()
            found.append(time.perf_counter() - started)
    return found


def save_hole(rank: int, ranks: int, group: Any, *, url: str) -> None:
    """A row that nobody holds."""
    model = torch.nn.Sequential(torch.nn.Embedding(4, 4, sparse=True))
    optimizer = torch.optim.Adagrad(model.parameters())
    shard = hf.Shard(9, 4, range(5 * rank, 5 * rank + 4))
    with hf.Checkpointer(
        url, model=model, optimizer=optimizer, shards={"0.weight": shard}, ranks=group,
        ranks_timeout_s=20,
    ) as ck:  # fmt: skip
        ck.step()
        ck.save()


def train_ddp(rank: int, ranks: int, group: Any, *, url: str) -> dict[str, np.ndarray]:
    """The DDP training, undisturbed."""
    return ddp.train(url, group)


def save_failing(
    rank: int, ranks: int, group: Any, *, url: str, fails: int
) -> tuple[list[str], dict[str, Any]]:
    """The storage of one rank fails once, in the background: what each rank hears, and what is held
    once the next save is durable."""
    training = Training("row", rank, ranks)
    told = []
    with _checkpointer(url, training, group, strategy="incrcp") as ck:
        for step in (1, 2, 3):
            training.train([step])
            ck.step()
            store = store_rows.store_segment
            if step == 2 and rank == fails:
                store_rows.store_segment = _no_room  # type: ignore[assignment]
            try:
                ck.save().result(60)
                told.append("")
            except hf.HoldfastError as error:
                told.append(str(error))
            finally:
                store_rows.store_segment = store
    return told, training.held()


def _no_room(*args: Any, **kwargs: Any) -> Any:
    raise hf.UnavailableError("no room")


def save_cancelled(
    rank: int, ranks: int, group: Any, *, url: str, slow: int
) -> tuple[list[str], dict[str, Any]]:
    """One rank is slow and the next save does not wait: what became of the first, and what is held
    once the second is durable."""
    training = Training("row", rank, ranks)
    go_on = threading.Event()
    with _checkpointer(url, training, group, strategy="incrcp", on_busy="cancel") as ck:
        training.train([1])
        ck.step()
        ck.save().result(60)
        store = store_rows.store_segment

        def slowly(*args: Any, **kwargs: Any) -> Any:
            go_on.wait(60)
            return store(*args, **kwargs)

        if rank == slow:
            store_rows.store_segment = slowly  # type: ignore[assignment]
        training.train([2])
        ck.step()
        first = ck.save()
        training.train([3])
        ck.step()
        threading.Timer(0.3, go_on.set).start()
        ck.save().result(60)
        store_rows.store_segment = store
        try:
            first.result()
            told = ""
        except hf.HoldfastError as error:
            told = type(error).__name__
    return [told], training.held()


def save_alone(rank: int, ranks: int, group: Any, *, url: str) -> tuple[int, ...]:
    """Ranks that know each other and still save each for itself."""
    training = Training("replicated", 0, 1)
    with _checkpointer(f"{url}/{rank}", training, False) as ck:
        training.train([1])
        ck.step()
        if rank == 0:  # the other has nothing to save, and is not waited for
            ck.save().result(60)
        return ck.all_steps()


def preempt_by_notice(
    rank: int, ranks: int, group: Any, *, url: str, notices: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """Notices to a rank some steps after the one before: where each rank stopped for them."""
    training = Training("row", rank, ranks)
    stopped = []
    with _checkpointer(url, training, group, save_last=False) as ck:
        for who, steps in notices:
            ck._preemption.is_preempted = False
            asks_at = ck.current_step + steps
            while not ck.is_preempted:
                training.train([ck.current_step + 1])
                ck.step()
                if rank == who and ck.current_step == asks_at:
                    ck.preempt(deadline_s=60)
            stopped.append(ck.current_step)
        steps = ck.all_steps()
    return {"stopped": stopped, "steps": steps, "held": training.held()}


def train_by_time(
    rank: int, ranks: int, group: Any, *, url: str, steps: int, every: Any
) -> tuple[int, ...]:
    """Save by time; every rank has another clock, and steps take another time by it."""
    training = Training("row", rank, ranks)
    draw = np.random.default_rng(rank)
    now = [float(draw.uniform(0, 1e9))]
    settings: dict[str, Any] = {"every": every, "clock": lambda: now[0], "save_last": False}
    with _checkpointer(url, training, group, **settings) as ck:
        for step in range(1, steps + 1):
            training.train([step])
            now[0] += 1.0 if rank == 0 else float(draw.uniform(-3, 9))
            ck.step()
        ck.wait()
        return ck.all_steps()


def train_to_the_end(
    rank: int, ranks: int, group: Any, *, url: str, steps: int, **settings: Any
) -> dict[str, Any]:
    """Train a number of steps more in a with block, and leave it."""
    training = Training("row", rank, ranks)
    with _checkpointer(url, training, group, **settings) as ck:
        first = ck.resume()
        training.train(range(first + 1, first + steps + 1))
        for _ in range(steps):
            ck.step()
    return {"first": first, "held": training.held()}


def fit_attached(
    rank: int, ranks: int, group: Any, **arguments: Any
) -> tuple[int, dict[str, np.ndarray]]:
    """A trainer with its own loop, followed by ``hf.attach``."""
    return attached.fit(group, rank, ranks, **arguments)


def save_annotated(rank: int, ranks: int, group: Any, *, url: str, said_by: list[int]) -> str:
    """Say something of a step that is saved, and of it again, on some ranks; what was refused."""
    training = Training("row", rank, ranks)
    said = {"metrics": {"auc": 0.5 + rank}} if rank in said_by else {}
    bad = {"metrics": {"auc": "high"}} if rank == ranks - 1 else {}
    with _checkpointer(url, training, group, save_last=False) as ck:
        ck.resume()
        training.train([1])
        ck.step()
        told = ""
        for given in (said, {}, bad):
            try:
                ck.save(**given).result(30)
            except hf.HoldfastError as error:
                told += f"{error} "
        if 0 in said_by:
            assert ck.best_step("auc") == 1
    return told


def delete(rank: int, ranks: int, group: Any, *, url: str, callers: list[int]) -> tuple[int, ...]:
    """Save three times and delete the second, called on some ranks; the steps that are left."""
    training = Training("row", rank, ranks)
    with _checkpointer(url, training, group) as ck:
        for step in (1, 2, 3):
            training.train([step])
            ck.step()
            ck.save().result(30)
        if rank in callers:
            ck.delete(2)
        training.train([4])
        ck.step()
        ck.save().result(30)
        steps = ck.all_steps()
    return steps


def load_part(
    rank: int, ranks: int, group: Any, *, url: str, layout: str, by: list[int]
) -> tuple[str, dict[str, Any], dict[str, Any], str]:
    """Restore one table, asked for on some ranks; what was refused, what is held before and
    after, and what the next save is."""
    training = Training(layout, rank, ranks)
    before = training.held()
    told = kind = ""
    with _checkpointer(url, training, group, save_last=False) as ck:
        try:
            ck.restore(2, only=["users.*"] if rank in by else None)
            ck.step()
            kind = ck.save().result(30).kind
        except hf.InvalidRequestError as error:
            told = str(error)
    return told, before, training.held(), kind
