"""What a training program of the matrix is made of: a model, its optimizers, and one step.

Every program is small, whole and real. ``LOOPS`` holds them by name; the page
docs/training-loops.md has a row for each (test_page.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

WIDTH = 4
BATCH = 48
USERS = 300


class Items(nn.Module):
    """Two tables, one of them large, and a small network."""

    def __init__(self, rows: int, *, sparse: bool = False, max_norm: float | None = None) -> None:
        super().__init__()
        self.item = nn.Embedding(rows, WIDTH, sparse=sparse, max_norm=max_norm)
        self.user = nn.Embedding(USERS, WIDTH, sparse=sparse)
        self.top = nn.Linear(WIDTH, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Scores of items for users."""
        return self.score(self.item(ids), ids)

    def score(self, items: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Scores of items that were looked up already."""
        scores: torch.Tensor = self.top(items * self.user(ids % USERS)).squeeze(-1)
        return scores

    def tables(self) -> list[nn.Parameter]:
        """The weights of the tables."""
        return [self.item.weight, self.user.weight]


def draw(rows: int, count: int = BATCH) -> torch.Tensor:
    """A batch of ids; half of the table is never drawn."""
    return torch.randint(0, max(1, rows // 2), (count,))


def loss_of(scores: torch.Tensor) -> torch.Tensor:
    """A loss with a target for every score."""
    return (scores - torch.linspace(-1, 1, len(scores))).square().mean()


@dataclass(frozen=True, slots=True)
class Program:
    """A training program: what a Checkpointer is given, and what one step does."""

    model: nn.Module
    optimizers: list[Any]
    step: Callable[[int], object]
    end: Callable[[], object] = lambda: None
    """Takes back what it did to the process."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A program by name. ``title`` is what its row in the docs says."""

    name: str
    title: str
    make: Callable[[int], Program] = field(repr=False)
    escapes: bool = False
    """It writes where torch does not count: found within FULL_TURN_SAVES saves."""


LOOPS: dict[str, Loop] = {}
ODD: dict[str, Loop] = {}
"""Programs that few people write, and that once got past the tracker or might: test_odd.py."""


def loop(make: Callable[[int], Program]) -> Callable[[int], Program]:
    """Add a program to the matrix; the first line of its docstring is its title."""
    title = (make.__doc__ or "").splitlines()[0]
    LOOPS[make.__name__] = Loop(make.__name__, title, make)
    return make


def escaping(make: Callable[[int], Program]) -> Callable[[int], Program]:
    """Add a program whose writes torch does not count."""
    title = (make.__doc__ or "").splitlines()[0]
    LOOPS[make.__name__] = Loop(make.__name__, title, make, escapes=True)
    return make


def odd(make: Callable[[int], Program]) -> Callable[[int], Program]:
    """Add an odd program."""
    title = (make.__doc__ or "").splitlines()[0]
    ODD[make.__name__] = Loop(make.__name__, title, make)
    return make


def train(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | list[torch.optim.Optimizer],
    loss: Callable[[], torch.Tensor],
) -> None:
    """One ordinary step."""
    found = optimizers if isinstance(optimizers, list) else [optimizers]
    for optimizer in found:
        optimizer.zero_grad()
    loss().backward()
    for optimizer in found:
        optimizer.step()


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of programs that are about something else."""
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def plain(
    rows: int,
    make: Callable[[Items], Any],
    *,
    sparse: bool = False,
) -> Program:
    """Module calls with some optimizer (or several)."""
    model = Items(rows, sparse=sparse)
    made = make(model)
    optimizers = made if isinstance(made, list) else [made]

    def step(t: int) -> None:
        train(model, optimizers, lambda: loss_of(model(draw(rows))))

    return Program(model, optimizers, step)
