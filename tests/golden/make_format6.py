"""Write the golden store of format 6: checkpoints with metrics and metadata.

    python -m tests.golden.make_format6

A base with both, a delta with neither and a delta with metrics alone, of one table. Written once,
by hand: the committed bytes are what later versions must still read.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import holdfast as hf

ROWS, WIDTH = 20, 3
METRICS = {0: {"auc": 0.8125, "loss": 1e-300}, 2: {"auc": -0.0625, "größe": 12345678.0}}
METADATA = {"commit": "9f2a", "data": {"days": [1, 2, None], "ok": True, "ß": "\u2028", "x": 0.1}}


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A table whose rows are numbers that anybody can count."""
    model = nn.ModuleDict({"users": nn.Embedding(ROWS, WIDTH, sparse=True)})
    with torch.no_grad():
        model["users"].weight.copy_(torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) / 8)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def write_store(url: Path) -> None:
    """A base at step 0; deltas at steps 1 and 2 that lower row 3 by 1 each."""
    model, optimizer = make_model()
    with hf.Checkpointer(
        url, model=model, optimizer=optimizer, codec="fp32", clock=lambda: 1_700_000_000.0
    ) as ck:
        ck.save(metrics=METRICS[0], metadata=METADATA).result(timeout=60)
        for step in (1, 2):
            optimizer.zero_grad()
            model["users"](torch.tensor([3])).sum().backward()
            optimizer.step()
            ck.step()
            ck.save(metrics=METRICS.get(step)).result(timeout=60)


if __name__ == "__main__":
    write_store(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "format6"))
