"""A small model whose tables are of any number type, and all its numbers as bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

ROWS, WIDTH, BATCH = 3000, 5, 7
EPS = 1e-3  # what torch takes by default is 0 in float16
OTHER = (torch.float16, torch.bfloat16, torch.float64)


class Net(nn.Module):
    """Two tables, of a type or of two, the second one wider, and a network."""

    def __init__(
        self, dtype: torch.dtype, other: torch.dtype | None = None, *, sparse: bool = False
    ) -> None:
        super().__init__()
        self.users = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", dtype=dtype, sparse=sparse)
        self.items = nn.Embedding(ROWS // 2, 8, dtype=other or dtype, sparse=sparse)
        self.top = nn.Linear(WIDTH + 8, 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.users(users).float(), self.items(items).float()], 1)
        scores: torch.Tensor = self.top(joined)
        return scores


class MixedAdagrad(torch.optim.Optimizer):
    """Sums of squares in float32 beside weights of any type, and a float64 count of each row."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["sum"] = torch.zeros_like(p, dtype=torch.float32)
                    state["uses"] = torch.zeros(len(p), dtype=torch.float64)
                grad = p.grad.float()
                state["sum"] += grad**2
                state["uses"] += (grad.reshape(len(p), -1) != 0).any(1)
                p -= (group["lr"] * grad / (state["sum"].sqrt() + 1e-6)).to(p.dtype)


Make = Callable[[nn.Module], torch.optim.Optimizer]
DENSE: dict[str, Make] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1, eps=EPS),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.05, eps=EPS),
    "mixed": lambda model: MixedAdagrad(model.parameters()),
}


def sparse_optimizers(model: Net) -> list[torch.optim.Optimizer]:
    tables = [model.users.weight, model.items.weight]
    return [
        torch.optim.SparseAdam(tables, lr=0.05, eps=EPS),
        torch.optim.SGD(model.top.parameters(), lr=0.1),
    ]


def copy_of(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Every number of a model and its optimizers."""
    found = [value.clone() for value in model.state_dict().values()]
    for optimizer in optimizers:
        for entries in optimizer.state.values():
            found += [
                value.clone() for _, value in sorted(entries.items()) if torch.is_tensor(value)
            ]
    return found


def bits(tensors: list[torch.Tensor]) -> list[tuple[torch.dtype, bytes]]:
    return [(t.dtype, t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            for t in tensors]  # fmt: skip


def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(5)
    for _ in range(steps):
        users = torch.randint(0, ROWS, (BATCH, 3), generator=draw)
        yield users, torch.randint(0, ROWS // 2, (BATCH,), generator=draw)


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], batch: Any) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(*batch).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
