"""Training loops as libraries write them, for the tests of hf.attach: none knows of checkpoints."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

ROWS, BATCH, EPOCHS = 40, 5, 4
PER_EPOCH = ROWS // BATCH


class Model(torch.nn.Module):
    """A table, batch statistics and dropout: what a resume must get right."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(60, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout(0.3)
        self.top = torch.nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.top(self.drop(self.norm(self.table(ids)))).squeeze(1)
        return out


def make_data() -> TensorDataset:
    """The same in every process."""
    draw = torch.Generator().manual_seed(11)
    return TensorDataset(torch.randint(0, 60, (ROWS,), generator=draw),
                         torch.rand(ROWS, generator=draw))  # fmt: skip


class Trainer:
    """A trainer with its own fit(); its fields are what real ones have."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        """``on_step``: called after each optimizer step, where a process may die."""
        self.model = Model()
        self.optimizer: Any = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.loader: Any = DataLoader(make_data(), batch_size=BATCH, shuffle=True)
        self.on_step = on_step
        self.epochs = EPOCHS

    extras: dict[str, Any] = {}  # noqa: RUF012  what goes along

    def loss(self, batch: Any) -> torch.Tensor:
        ids, labels = batch
        return ((self.model(ids) - labels) ** 2).mean()

    def train_batch(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        self.optimizer.step()
        self.on_step()

    def evaluate(self) -> float:
        self.model.eval()
        with torch.no_grad():
            losses = [self.loss(batch).item() for batch in self.loader]
        return sum(losses)

    def begin_fit(self) -> None:
        """What some trainers do first."""

    def train_epoch(self) -> None:
        for batch in self.loader:
            self.train_batch(batch)

    def end_epoch(self) -> None:
        """What some trainers do last."""

    def fit(self, first: int = 0) -> None:
        self.begin_fit()
        for _ in range(first, self.epochs):
            self.model.train()
            self.train_epoch()
            self.end_epoch()


class Enumerated(Trainer):
    """A progress bar and enumerate between the loader and the loop."""

    def train_epoch(self) -> None:
        for _, batch in enumerate(self.bar(self.loader)):
            self.train_batch(batch)

    def bar(self, loader: Any) -> Iterator[Any]:
        yield from loader


class Accumulating(Trainer):
    """One step for three batches; two are left over at an epoch's end."""

    def train_epoch(self) -> None:
        for index, batch in enumerate(self.loader):
            (self.loss(batch) / 3).backward()
            if index % 3 == 2:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.on_step()
        self.optimizer.zero_grad()


class TwoOptimizers(Trainer):
    """One for the table, one for the rest."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        super().__init__(on_step)
        rest = [p for n, p in self.model.named_parameters() if not n.startswith("table")]
        self.optimizer = [
            torch.optim.Adagrad(self.model.table.parameters(), lr=0.1),
            torch.optim.Adam(rest, lr=0.01),
        ]

    def train_batch(self, batch: Any) -> None:
        for optimizer in self.optimizer:
            optimizer.zero_grad()
        self.loss(batch).backward()
        for optimizer in self.optimizer:
            optimizer.step()
        self.on_step()


class Twice(Trainer):
    """Two steps on every batch."""

    def train_batch(self, batch: Any) -> None:
        for _ in range(2):
            self.optimizer.zero_grad()
            self.loss(batch).backward()
            self.optimizer.step()
        self.on_step()


class Closure(Trainer):
    """An optimizer that calls the loss itself."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        super().__init__(on_step)
        self.optimizer = torch.optim.LBFGS(self.model.parameters(), lr=0.1, max_iter=3)

    def train_batch(self, batch: Any) -> None:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            return loss

        self.optimizer.step(closure)
        self.on_step()


class StepScheduler(Trainer):
    """The rate falls after every step."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        super().__init__(on_step)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.95)
        self.extras = {"scheduler": self.scheduler}

    def train_batch(self, batch: Any) -> None:
        super().train_batch(batch)
        self.scheduler.step()


class EpochScheduler(Trainer):
    """The rate falls when an evaluation at an epoch's end says so."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        super().__init__(on_step)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0)
        self.extras = {"scheduler": self.scheduler, "plateau": self.plateau}

    def end_epoch(self) -> None:
        self.scheduler.step()
        self.plateau.step(self.evaluate())


class Scaled(Trainer):
    """A gradient scaler that leaves out its first step, and one later."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        super().__init__(on_step)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=3)
        self.extras = {"scaler": self.scaler}

    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        overflows = 7 in batch[0].tolist() or self.scaler.get_scale() > 2.0**6
        return loss * float("inf") if overflows and self.model.training else loss

    def train_batch(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(batch)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.on_step()


class Buffered(Trainer):
    """One batch is read ahead."""

    def train_epoch(self) -> None:
        batches = iter(self.loader)
        ready = next(batches, None)
        while ready is not None:
            following = next(batches, None)
            self.train_batch(ready)
            ready = following


class Resetting(Trainer):
    """fit() initialises the model, and forgets what the trainer knew."""

    def begin_fit(self) -> None:
        for part in self.model.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
        self.optimizer.param_groups[0]["lr"] = 0.07


class Deciding(Trainer):
    """Early stopping and a rate that falls, kept in plain fields that fit() sets up."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        super().__init__(on_step)
        self.epochs = 12
        self.stopper = Stopper()
        self.seen: list[float] = []

    def begin_fit(self) -> None:
        self.batches = 0
        self.best_state = None

    def train_batch(self, batch: Any) -> None:
        super().train_batch(batch)
        self.batches += 1
        if self.batches % 3 == 0:
            self.optimizer.param_groups[0]["lr"] *= 0.9

    def end_epoch(self) -> None:
        self.seen.append(self.evaluate())

    def fit(self, first: int = 0) -> None:
        self.begin_fit()
        for _ in range(first, self.epochs):
            self.model.train()
            self.train_epoch()
            self.end_epoch()
            if self.stopper.is_over(self.seen[-1], self.model):
                break
        self.model.load_state_dict(self.stopper.state)


class Stopper:
    """Stops when the metric did not improve twice."""

    def __init__(self) -> None:
        self.best, self.waited, self.patience = float("inf"), 0, 2
        self.state: Any = None

    def is_over(self, metric: float, model: torch.nn.Module) -> bool:
        if metric < self.best:
            self.best, self.waited = metric, 0
            self.state = {name: part.clone() for name, part in model.state_dict().items()}
        else:
            self.waited += 1
        return self.waited >= self.patience


class MakesLoader(Trainer):
    """The loader is made inside of fit()."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        super().__init__(on_step)
        self.loader = None

    def begin_fit(self) -> None:
        self.loader = DataLoader(make_data(), batch_size=BATCH, shuffle=True)

    def end_epoch(self) -> None:
        self.model.eval()
        with torch.no_grad():
            for batch in DataLoader(make_data(), batch_size=10, shuffle=True):
                self.loss(batch)


class MakesLoaders(MakesLoader):
    """A loader for every epoch, after a look at another."""

    def begin_fit(self) -> None:
        next(iter(DataLoader(make_data(), batch_size=7)))

    def train_epoch(self) -> None:
        super().begin_fit()
        super().train_epoch()


class Threaded(Trainer):
    """A thread reads ahead."""

    def train_epoch(self) -> None:
        ready: queue.Queue[Any] = queue.Queue(2)

        def read() -> None:
            for batch in self.loader:
                ready.put(batch)
            ready.put(None)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            while (batch := ready.get()) is not None:
                self.train_batch(batch)
        finally:
            while reader.is_alive():
                with_nothing_left(ready)
            reader.join()


def with_nothing_left(ready: queue.Queue[Any]) -> None:
    """Take what a thread still puts, so that it ends."""
    try:
        ready.get(timeout=0.01)
    except queue.Empty:
        return


LOOPS: list[type[Trainer]] = [
    Trainer, Enumerated, Accumulating, TwoOptimizers, Twice, Closure, StepScheduler, EpochScheduler,
    Scaled, Buffered, Resetting, Deciding, MakesLoader, MakesLoaders,
]  # fmt: skip
