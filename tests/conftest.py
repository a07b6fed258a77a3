"""Small real models and training loops that the tests share."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import nn

from holdfast.tables import ModelState

settings.register_profile("holdfast", deadline=None)  # no test is about how long it takes
settings.load_profile("holdfast")

# A runner in the background ignores Ctrl-C, and so would every process that tests start; one
# started from a terminal does not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


TESTS = Path(__file__).parent
ALONE = ("cluster", "unit/bench", "unit/cli/test_cluster.py", "unit/cli/test_demo.py",
         "unit/recsys/test_clustertrain.py")  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which tests stay together where several processes share the work: those of a file, and all
    that start servers or measure, which would disturb each other. These take longest, and begin."""
    places = {item: is_alone(item.path) for item in items}
    for item, alone in places.items():
        item.add_marker(pytest.mark.xdist_group("alone" if alone else str(item.path)))
    items.sort(key=lambda item: not places[item])


def is_alone(path: Path) -> bool:
    """Whether tests of this file wait for others of their kind."""
    return any(path.is_relative_to(TESTS / place) for place in ALONE)


class TinyModel(nn.Module):
    """Two tables of different width and a small network: every kind of state, a few kilobytes."""

    def __init__(self, *, rows: int = 200, sparse: bool = True) -> None:
        super().__init__()
        self.users = nn.EmbeddingBag(rows, 8, mode="sum", sparse=sparse)
        self.items = nn.Embedding(rows // 2 + 1, 5, sparse=sparse)
        self.norm = nn.BatchNorm1d(13)
        self.top = nn.Sequential(nn.Linear(13, 7), nn.Dropout(0.3), nn.ReLU(), nn.Linear(7, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Scores for a batch of id pairs."""
        users = self.users(ids)
        items = self.items(ids[:, 0] % self.items.num_embeddings)
        scores: torch.Tensor = self.top(self.norm(torch.cat([users, items], 1))).squeeze(1)
        return scores


def make_optimizers(model: TinyModel, kind: str) -> list[torch.optim.Optimizer]:
    """An optimizer of the given kind for the tables, SGD with momentum for the rest."""
    tables = [model.users.weight, model.items.weight]
    made: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(tables, lr=0.1),
        "momentum": lambda: torch.optim.SGD(tables, lr=0.1, momentum=0.9),
        "adagrad": lambda: torch.optim.Adagrad(tables, lr=0.1),
        "sparse-adam": lambda: torch.optim.SparseAdam(tables, lr=0.01),
        "adam": lambda: torch.optim.Adam(tables, lr=0.01),
        "sgd-decay": lambda: torch.optim.SGD(tables, lr=0.1, weight_decay=0.01),
    }
    dense = [*model.norm.parameters(), *model.top.parameters()]
    return [made[kind](), torch.optim.SGD(dense, lr=0.05, momentum=0.9)]


def train_steps(
    model: TinyModel,
    optimizers: list[torch.optim.Optimizer],
    steps: range,
    *,
    rows: int = 200,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Train on batches that depend on the step alone (dropout draws from the global generator)."""
    model.train()
    for step in steps:
        draw = torch.Generator().manual_seed(1000 + step)
        ids = torch.randint(0, rows, (6, 2), generator=draw)
        target = (ids.sum(1) % 2).float()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids), target)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        after()


def fingerprint(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, bytes]:
    """Every number of a model and its optimizers, as bytes by name."""
    state = ModelState(model, optimizers)
    found: dict[str, bytes] = {}
    for name, value in model.state_dict().items():
        found[f"model.{name}"] = value.detach().cpu().numpy().tobytes()
    for key, optimizer in state.optimizers.items():
        for index, entries in optimizer.state_dict()["state"].items():
            for name, value in entries.items():
                if isinstance(value, torch.Tensor):
                    dense = value.to_dense() if value.is_sparse else value
                    found[f"{key}.{index}.{name}"] = dense.detach().numpy().tobytes()
                else:
                    found[f"{key}.{index}.{name}"] = repr(value).encode()
    return found


@pytest.fixture
def seeded() -> None:
    """The same random numbers in every run."""
    torch.manual_seed(7)
    np.random.seed(7)
