"""Write the golden store of a compiled model as versions up to 0.4.0 named it: with ``_orig_mod.``.

    python -m tests.golden.make_compiled   # with the sources of 0.4.0

An incrcp run with a grid and deletion vectors; the model compiled as a whole, and its network once
more by itself. Written once, by hand: the committed bytes are what later versions must still read,
into compiled and into plain models. ``compiled.npz`` holds the numbers that training had.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

import holdfast as hf

ROWS, STEPS = 48, 10


class Model(nn.Module):
    """A table that two modules share, a table of its own, a buffer, a network."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=True)
        self.items = nn.Embedding(ROWS, 3, sparse=True)
        self.again = nn.Embedding(ROWS, 3, sparse=True)
        self.again.weight = self.items.weight
        self.norm = nn.BatchNorm1d(7)
        self.net = nn.Sequential(nn.Linear(7, 4), nn.ReLU(), nn.Linear(4, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Scores of pairs of ids."""
        items = self.items(ids[:, 0]) + self.again(ids[:, 1])
        scores: torch.Tensor = self.net(self.norm(torch.cat([self.users(ids), items], 1)))
        return scores.squeeze(1)


def make_optimizers(model: Model) -> list[torch.optim.Optimizer]:
    """Row state for the tables, momentum for the network."""
    dense = [*model.norm.parameters(), *model.net.parameters()]
    return [
        torch.optim.Adagrad([model.users.weight, model.items.weight], lr=0.1),
        torch.optim.SGD(dense, lr=0.05, momentum=0.9),
    ]


def train(
    call: nn.Module, optimizers: list[torch.optim.Optimizer], step: int, *, rows: int = 6
) -> None:
    """One step, on a batch that depends on the step alone."""
    ids = torch.randint(0, ROWS, (rows, 2), generator=torch.Generator().manual_seed(step))
    for optimizer in optimizers:
        optimizer.zero_grad()
    nn.functional.binary_cross_entropy_with_logits(call(ids), ids[:, 0] % 2.0).backward()
    for optimizer in optimizers:
        optimizer.step()


def numbers(model: Model, optimizers: list[torch.optim.Optimizer]) -> dict[str, np.ndarray]:
    """Every number of a plain model and its optimizers, copied."""
    found = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    for index, optimizer in enumerate(optimizers):
        for place, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                found[f"optimizer{index}.{place}.{key}"] = torch.as_tensor(value).numpy().copy()
    return found


def main(folder: Path) -> None:
    """Train, save at every step, keep what training had."""
    torch.manual_seed(7)
    model = Model()
    optimizers = make_optimizers(model)
    plain_net, model.net = model.net, torch.compile(model.net, backend="eager")
    compiled_net = model.net
    call = torch.compile(model, backend="eager")
    assert "_orig_mod.net._orig_mod.0.weight" in call.state_dict()
    expected: dict[str, np.ndarray] = {}
    with hf.Checkpointer(
        folder / "compiled", model=call, optimizer=optimizers, strategy="incrcp", codec="fp32",
        extract=0.5, clock=lambda: 1_700_000_000.0,
    ) as ck:  # fmt: skip
        for step in range(1, STEPS + 1):
            train(call, optimizers, step)
            ck.step()
            ck.save().result(timeout=60)
            ck.wait()  # for extraction too
            model.net = plain_net
            for name, value in numbers(model, optimizers).items():
                expected[f"{step}/{name}"] = value
            model.net = compiled_net
    np.savez_compressed(folder / "compiled.npz", **expected)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
