"""Golden stores of loops: where their loaders stood, generators, a schedule, an optimizer's state.

    python -m tests.golden.make_loop FOLDER

Two runs of one loop, by ``ck.epochs``: one trains each batch as it is read, one reads two batches
ahead. Each store has a checkpoint in the middle of an epoch and one at its end; a JSON file beside
it holds what every step of a run without a stop saw. Written once, by hand: later versions must go
on from the committed bytes.
"""

from __future__ import annotations

import json
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import holdfast as hf

LOOPS = {"plain": 0, "ahead": 2}  # how many batches are read ahead
STEPS = (6, 10)
ROWS, BATCH, EPOCHS = 40, 4, 2


class CountingSGD(torch.optim.SGD):
    """SGD that counts its steps under a name of its own, as MADGRAD does."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.state["taken"] = self.state.get("taken", 0) + 1
        return super().step(closure)


class Program:
    """A model, its optimizer and schedule, and a shuffled loader: all from one seed."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.model = nn.ModuleDict({"users": nn.Embedding(ROWS, 2, sparse=True)})
        self.optimizer = CountingSGD(self.model.parameters(), lr=1.0)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=5, gamma=0.5)
        self.loader = DataLoader(torch.arange(ROWS), batch_size=BATCH, shuffle=True)

    def checkpointer(self, url: Path) -> hf.Checkpointer:
        """A Checkpointer for all of it."""
        return hf.Checkpointer(
            url, model=self.model, optimizer=self.optimizer, extras={"schedule": self.schedule},
            clock=lambda: 1_700_000_000.0, save_last=False,
        )  # fmt: skip

    def train(self, ck: hf.Checkpointer, *, ahead: int) -> Iterator[dict[str, Any]]:
        """Train to the end; what every step saw."""
        for ids in read_ahead(ck.epochs(self.loader, EPOCHS), ahead):
            self.optimizer.zero_grad()
            self.model["users"](ids).sum().backward()
            self.optimizer.step()
            self.schedule.step()
            ck.step()
            yield {
                "step": ck.current_step,
                "epoch": ck.epoch,
                "ids": ids.tolist(),
                "rate": self.optimizer.param_groups[0]["lr"],
                "taken": self.optimizer.state["taken"],
                "torch": torch.randint(2**31, ()).item(),
                "numpy": int(np.random.randint(2**31)),
                "python": random.getrandbits(31),
            }


def read_ahead(batches: Iterable[Any], count: int) -> Iterator[Any]:
    """The batches, each handed out when ``count`` more have been read."""
    waiting: deque[Any] = deque()
    for batch in batches:
        waiting.append(batch)
        if len(waiting) > count:
            yield waiting.popleft()
    yield from waiting


def write_stores(folder: Path) -> None:
    """Both runs, and what each of their steps saw."""
    for name, ahead in LOOPS.items():
        program, trace = Program(seed=5), []
        with program.checkpointer(folder / name) as ck:
            for seen in program.train(ck, ahead=ahead):
                trace.append(seen)
                if ck.current_step in STEPS:
                    ck.save().result(timeout=60)
        lines = ",\n".join(map(json.dumps, trace))
        (folder / f"{name}.json").write_text(f"[{lines}]\n")


if __name__ == "__main__":
    write_stores(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "loop"))
