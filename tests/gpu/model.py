"""A small model on any device, its training, and what is on it as the host sees it."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import holdfast as hf

USERS, ITEMS = 4000, 700
Columns = dict[str, np.ndarray]


class Model(nn.Module):
    """Two tables, sparse or dense, and a network with a buffer."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.users = nn.EmbeddingBag(USERS, 8, mode="sum", sparse=sparse)
        self.items = nn.Embedding(ITEMS, 5, sparse=sparse)
        self.norm = nn.BatchNorm1d(13)
        self.top = nn.Linear(13, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Scores of pairs of users and items."""
        both = torch.cat([self.users(ids % USERS), self.items(ids[:, 0] % ITEMS)], 1)
        scores: torch.Tensor = self.top(self.norm(both)).squeeze(1)
        return scores


class Training:
    """A model, its optimizers, and batches that depend on the step alone."""

    def __init__(self, place: str, *, sparse: bool = True, kind: str = "adagrad") -> None:
        torch.manual_seed(11)
        self.place = place
        self.model = Model(sparse=sparse).to(place)
        tables = [self.model.users.weight, self.model.items.weight]
        rest = [*self.model.norm.parameters(), *self.model.top.parameters()]
        made = {"adagrad": torch.optim.Adagrad, "sparse-adam": torch.optim.SparseAdam,
                "adam": torch.optim.Adam, "sgd": torch.optim.SGD}  # fmt: skip
        self.tables = made[kind](tables, lr=0.05)
        self.optimizers = [self.tables, torch.optim.SGD(rest, lr=0.05, momentum=0.9)]

    def backward(self, step: int) -> None:
        """Gradients of a batch."""
        draw = torch.Generator().manual_seed(step)
        ids = torch.randint(0, USERS, (32, 3), generator=draw).to(self.place)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.model(ids).square().mean().backward()

    def step(self, step: int) -> None:
        """One step."""
        self.backward(step)
        for optimizer in self.optimizers:
            optimizer.step()

    def spoil(self) -> None:
        """Write to every number, as a step that comes too early would."""
        with torch.no_grad():
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                tensor.add_(1)
            for state in self.tables.state.values():
                for value in filter(torch.is_tensor, state.values()):
                    value.add_(1)

    def rows(self) -> dict[str, Columns]:
        """The tables with their row state, copied to the host."""
        found: dict[str, Columns] = {}
        for name in ("users", "items"):
            weight = getattr(self.model, name).weight
            state = {
                key: value.detach().cpu().clone().numpy()
                for key, value in self.tables.state[weight].items()
                if torch.is_tensor(value) and value.ndim
            }
            found[f"{name}.weight"] = {"weight": weight.detach().cpu().clone().numpy(), **state}
        return found

    def network(self) -> dict[str, np.ndarray]:
        """Everything else that is the model's, copied to the host."""
        return {
            name: value.detach().cpu().clone().numpy()
            for name, value in self.model.state_dict().items()
            if name not in ("users.weight", "items.weight")
        }


def check_rows(run: hf.Run, step: int, live: dict[str, Columns]) -> None:
    """Every row of a stored step is as it was, to the bit."""
    for name, columns in live.items():
        stored = run.read(step, name)
        found = {"weight": stored.weight, **stored.state}
        assert sorted(found) == sorted(columns)
        for key, column in columns.items():
            assert found[key].tobytes() == column.tobytes(), (step, name, key)


def check_network(run: hf.Run, step: int, live: dict[str, np.ndarray]) -> None:
    """Every number of the network is as it was, to the bit."""
    stored = run.dense(step)["model"]
    assert sorted(stored) == sorted(live)
    for name, value in live.items():
        assert stored[name].numpy().tobytes() == value.tobytes(), (step, name)
