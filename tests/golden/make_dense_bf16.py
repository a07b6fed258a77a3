"""The golden store of a run whose bf16 and fp64 tables were dense state.

    python -m tests.golden.make_dense_bf16 FOLDER

Up to version 0.4 only fp32 embeddings were tables: all others travelled whole, as dense state, in
catalogs of format 2. The committed bytes were written by that version. Run with a later one this
writes a store whose embeddings are tables, so it cannot make those bytes again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import holdfast as hf

STEPS = (2, 4)
ROWS, WIDTH = 12, 4


class Net(torch.nn.Module):
    """One embedding of each type, the bf16 one under two names, and a network."""

    def __init__(self) -> None:
        super().__init__()
        make = torch.nn.EmbeddingBag
        self.exact = make(ROWS, WIDTH, mode="sum")
        self.brief = make(ROWS, WIDTH, mode="sum", dtype=torch.bfloat16)
        self.twin = make(ROWS, WIDTH, mode="sum", _weight=self.brief.weight)
        self.twin.weight = self.brief.weight
        self.wide = make(ROWS, WIDTH, mode="sum", dtype=torch.float64)
        self.top = torch.nn.Linear(WIDTH, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        sums = self.brief(ids).float() + self.twin(ids + 1).float() + self.wide(ids).float()
        return self.top(self.exact(ids) + sums)


def make_model(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    """The model and its optimizer, as they begin."""
    torch.manual_seed(seed)
    model = Net()
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def train_step(model: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One step of training, the same for a step wherever it is taken."""
    ids = torch.arange(step, step + 6).reshape(3, 2) % (ROWS - 1)
    optimizer.zero_grad()
    model(ids).sum().backward()
    optimizer.step()


def write_store(folder: Path) -> None:
    """Train and save."""
    model, optimizer = make_model(0)
    with hf.Checkpointer(
        str(folder / "run"),
        model=model,
        optimizer=optimizer,
        strategy="full",
        codec="fp32",
        every=2,
    ) as ck:
        for step in range(STEPS[-1]):
            train_step(model, optimizer, step)
            ck.step()
            if step + 1 in STEPS:
                ck.wait()
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, folder / f"{step + 1}.pt")


if __name__ == "__main__":
    write_store(Path(sys.argv[1]))
