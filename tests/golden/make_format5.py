"""Write the golden store of format 5: rows of servers in two groups, stored apart.

    python -m tests.golden.make_format5

A base and a delta of one table with row state, by a Checkpointer with servers= in groups. Written
once, by hand: the committed bytes are what later versions must still read.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import holdfast as hf
from holdfast.model.placement import Placement

PLACEMENT = Placement(6, data=2, parity=1, groups=2)
ROWS, WIDTH = 50, 3
CHANGED = (0, 1, 2, 3, 4, 17, 29, 30, 49)


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A table whose rows are numbers that anybody can count."""
    model = nn.ModuleDict({"users": nn.Embedding(ROWS, WIDTH, sparse=True)})
    with torch.no_grad():
        model["users"].weight.copy_(torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) / 8)
    return model, torch.optim.Adagrad(model.parameters(), lr=1.0)


def write_store(url: Path) -> None:
    """A base at step 0, a delta at step 1 that lowers the changed rows by 1."""
    model, optimizer = make_model()
    with hf.Checkpointer(
        url, model=model, optimizer=optimizer, codec="fp32", servers=PLACEMENT,
        clock=lambda: 1_700_000_000.0,
    ) as ck:  # fmt: skip
        ck.save().result(timeout=60)
        model["users"](torch.tensor(CHANGED)).sum().backward()
        optimizer.step()
        ck.step()
        ck.save().result(timeout=60)


if __name__ == "__main__":
    write_store(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "format5"))
