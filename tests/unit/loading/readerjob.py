"""A small training whose every bit depends on its batches, their order and all random numbers.

Dropout and random augmentation draw from the global generators, samplers from their own. A run
tells the batches it has trained and ends with a digest of the model.
"""

from __future__ import annotations

import hashlib
import itertools
import queue
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast as hf

SAMPLES, BATCH, ROWS = 40, 4, 64
BATCHES = SAMPLES // BATCH  # of an epoch
EPOCHS = 3


class Samples(Dataset[torch.Tensor]):
    """Ids, each changed at random by all three global generators where it is read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        return torch.tensor([float(index), *noise])


class Stream(IterableDataset[torch.Tensor]):
    """The same as a stream; workers share it."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        samples = Samples()
        for index in range(first, SAMPLES, step):
            yield samples[index]


class Shuffled:
    """An iterable of batches with a generator of its own and no length."""

    def __init__(self) -> None:
        self.draw = np.random.default_rng(7)

    def __iter__(self) -> Iterator[torch.Tensor]:
        samples = Samples()
        order = self.draw.permutation(SAMPLES).reshape(-1, BATCH)
        return (torch.stack([samples[index] for index in row]) for row in order.tolist())


class Lazy(torch.utils.data.Sampler[int]):
    """Draws every index from the global generator when it is asked for."""

    def __iter__(self) -> Iterator[int]:
        return (random.randrange(SAMPLES) for _ in range(SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


def make_loader(kind: str) -> Any:
    """A loader by name."""
    shuffling: dict[str, Any] = {"batch_size": BATCH, "shuffle": True}
    own = torch.Generator().manual_seed(3)
    made: dict[str, Callable[[], Any]] = {
        "plain": lambda: DataLoader(Samples(), **shuffling),
        "plain-own": lambda: DataLoader(Samples(), **shuffling, generator=own),
        "plain-workers": lambda: DataLoader(Samples(), **shuffling, num_workers=2),
        "persistent": lambda: DataLoader(
            Plain(), **shuffling, num_workers=2, persistent_workers=True
        ),
        "quiet": lambda: DataLoader(Plain(), **shuffling, generator=own),
        "ordered": lambda: DataLoader(Samples(), batch_size=BATCH),
        "lazy": lambda: DataLoader(Samples(), batch_size=BATCH, sampler=Lazy()),
        "stream": lambda: DataLoader(Stream(), batch_size=BATCH),
        "stream-workers": lambda: DataLoader(Stream(), batch_size=BATCH, num_workers=2),
        "stateful": lambda: StatefulDataLoader(Samples(), **shuffling),
        "stateful-own": lambda: StatefulDataLoader(Samples(), **shuffling, generator=own),
        "stateful-workers": lambda: StatefulDataLoader(Samples(), **shuffling, num_workers=2),
        "stateful-stream": lambda: StatefulDataLoader(Stream(), batch_size=BATCH),
        "stateful-stream-workers": lambda: StatefulDataLoader(
            Stream(), batch_size=BATCH, num_workers=2
        ),
        "stateful-persistent": lambda: StatefulDataLoader(
            Samples(), **shuffling, num_workers=2, persistent_workers=True
        ),
        "granted": lambda: hf.GrantedLoader(Samples(), **shuffling, seed=3),
        "iterable": Shuffled,
        "list": lambda: [torch.full((BATCH, 4), float(index)) for index in range(BATCHES)],
    }
    return made[kind]()


class Plain(Samples):
    """Without augmentation: persistent workers cannot be set back to a later epoch's numbers."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


class Model(nn.Module):
    """A table, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 4, sparse=True)
        self.top = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """A number to make small."""
        rows = self.table(batch[:, 0].long() % ROWS)
        loss: torch.Tensor = self.top(torch.cat([rows, batch], 1)).square().mean()
        return loss


class Stopped(Exception):
    """Stands for a kill."""


class Run:
    """One process's part of a run, in this process: everything is made anew."""

    def __init__(self, url: Path, *, seed: int, **settings: Any) -> None:
        for draw in (torch.manual_seed, random.seed, np.random.seed):
            draw(seed)
        self.model = Model()
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.05)
        self.seen: list[tuple[int, list[float]]] = []
        settings = {"codec": "fp32", "model": self.model, "optimizer": self.optimizer, **settings}
        self.ck = hf.Checkpointer(url, **settings)

    def train(self, batches: Iterable[Any], *, stop: int | None, accumulate: int = 1) -> None:
        """Train on batches; a step takes ``accumulate`` of them. Stop after so many steps."""
        waiting = 0
        for batch in batches:
            self.model(batch).backward()
            self.seen.append((self.ck.epoch, [round(float(x), 6) for x in batch.flatten()]))
            waiting += 1
            if waiting == accumulate:
                self.step(stop)
                waiting = 0

    def step(self, stop: int | None) -> None:
        """Step and count it."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ck.step()
        if self.ck.current_step == stop:
            self.ck.wait()
            raise Stopped

    def digest(self) -> str:
        """Every bit of the model, its optimizer and the generators."""
        found = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            found.update(tensor.numpy().tobytes())
        for state in self.optimizer.state_dict()["state"].values():
            found.update(state["sum"].numpy().tobytes())
        found.update(torch.get_rng_state().numpy().tobytes())
        found.update(repr((random.getstate(), np.random.get_state()[1].tolist())).encode())
        return found.hexdigest()


def read_ahead(depth: int) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """A generator between loader and loop that is ``depth`` batches ahead."""

    def between(batches: Iterable[Any]) -> Iterator[Any]:
        source = iter(batches)
        buffer = list(itertools.islice(source, depth))
        for batch in source:
            buffer.append(batch)
            yield buffer.pop(0)
        yield from buffer

    return between


def in_thread(batches: Iterable[Any]) -> Iterator[Any]:
    """A thread that reads up to three batches ahead."""
    ready: queue.Queue[Any] = queue.Queue(2)
    is_wanted = threading.Event()
    is_wanted.set()

    def read() -> None:
        for batch in batches:
            while is_wanted.is_set():
                try:
                    ready.put(batch, timeout=0.05)
                    break
                except queue.Full:
                    continue
            if not is_wanted.is_set():
                return
        ready.put(None)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        while (batch := ready.get()) is not None:
            yield batch
    finally:
        is_wanted.clear()
        reader.join()
