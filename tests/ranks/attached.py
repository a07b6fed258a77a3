"""A trainer with its own ``fit()`` on several ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast as hf
from tests.ranks.ddp import ROWS, Model

SAMPLES, BATCH, EPOCHS, EVERY = 96, 8, 3, 2


class Stopped(Exception):
    """The process would end here."""


class Trainer:
    """What a library would have: model, optimizer, schedule and loop."""

    def __init__(self, group: Any, rank: int, ranks: int) -> None:
        torch.manual_seed(3)
        self.model = Model()
        self.group, self.rank = group, rank
        tables = [self.model.users.weight, self.model.items.weight]
        self.optimizers = [
            torch.optim.Adagrad(tables, lr=0.1),
            torch.optim.SGD(self.model.top.parameters(), lr=0.05, momentum=0.9),
        ]
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizers[0], step_size=1, gamma=0.5)
        ids = torch.randint(0, ROWS, (SAMPLES, 2), generator=torch.Generator().manual_seed(7))
        data = TensorDataset(ids, (ids.sum(1) % 2).float())
        sampler: DistributedSampler[Any] = DistributedSampler(data, ranks, rank, seed=5)
        self.loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
        self.start_epoch = 0
        self.wrapped: DistributedDataParallel | None = None

    def wrap(self) -> DistributedDataParallel:
        """The model as ranks train it together."""
        if self.wrapped is None:
            self.wrapped = DistributedDataParallel(self.model, process_group=self.group)
        return self.wrapped

    def fit(self, taken: list[int], *, stop_after: int | None, edits: bool) -> None:
        """Train all epochs, and note each step; with ``edits`` this rank writes to its model
        first."""
        torch.manual_seed(100 + self.rank)  # each rank drops out by itself
        if edits:
            with torch.no_grad():
                self.model.top[0].weight.mul_(1.0)
        model = self.wrap()
        for epoch in range(self.start_epoch, EPOCHS):
            assert isinstance(self.loader.sampler, DistributedSampler)
            self.loader.sampler.set_epoch(epoch)
            for ids, target in self.loader:
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
                nn.functional.binary_cross_entropy_with_logits(model(ids), target).backward()
                for optimizer in self.optimizers:
                    optimizer.step()
                taken.append(epoch)
                if len(taken) == stop_after:
                    raise Stopped
            self.schedule.step()


def fit(
    group: Any,
    rank: int,
    ranks: int,
    *,
    url: str,
    stop_after: int | None = None,
    edits: int | None = None,
    starts_later: bool = True,
    wraps_before: bool = False,
) -> tuple[int, dict[str, np.ndarray]]:
    """Train until the end or the stop; steps that were taken, and every number of the model."""
    trainer = Trainer(group, rank, ranks)
    if wraps_before:
        trainer.wrap()
    taken: list[int] = []  # not the trainer's own, which would go along
    try:
        with hf.attach(
            trainer.optimizers, url, model=trainer.model, loader=trainer.loader, trainer=trainer,
            every=EVERY, ranks=group, ranks_timeout_s=20,
        ) as ck:  # fmt: skip
            if starts_later:
                trainer.start_epoch = ck.start_epoch()
            trainer.fit(taken, stop_after=stop_after, edits=rank == edits)
    except Stopped:
        pass
    found = {name: value.numpy().copy() for name, value in trainer.model.state_dict().items()}
    for index, optimizer in enumerate(trainer.optimizers):
        found[f"{index}.rate"] = np.array(optimizer.param_groups[0]["lr"])
        for parameter, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                found[f"{index}.{parameter}.{key}"] = np.asarray(value)
    return len(taken), found
