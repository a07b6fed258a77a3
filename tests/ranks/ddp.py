"""A plain DDP training, as torchrun starts it: killed at a random moment of its first lives, it
goes on from its last checkpoint. Run: torchrun ... ddp.py URL OUT SEED LIVES"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf

STEPS, EVERY, ROWS = 24, 3, 3000


class Model(nn.Module):
    """One table with sparse gradients, one with dense ones, dropout, a network."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.EmbeddingBag(ROWS, 128, mode="sum", sparse=True)
        self.items = nn.Embedding(ROWS, 8)
        self.top = nn.Sequential(nn.Linear(136, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Scores of pairs of ids."""
        both = torch.cat([self.users(ids), self.items(ids[:, 0])], 1)
        scores: torch.Tensor = self.top(both).squeeze(1)
        return scores


def train(url: str, group: Any, kill_at: tuple[int, float] | None = None) -> dict[str, np.ndarray]:
    """Train to the end, from wherever the last checkpoint is; every number of the model."""
    rank = dist.get_rank(group)
    torch.manual_seed(3)
    model = DistributedDataParallel(Model(), process_group=group)
    torch.manual_seed(100 + rank)  # each rank drops out by itself
    tables = [model.module.users.weight, model.module.items.weight]
    optimizers = [
        torch.optim.Adagrad(tables, lr=0.1),
        torch.optim.SGD(model.module.top.parameters(), lr=0.05, momentum=0.9),
    ]
    with hf.Checkpointer(
        url, model=model, optimizer=optimizers, every=EVERY, codec="fp32", ranks=group,
        ranks_timeout_s=60,
    ) as ck:  # fmt: skip
        for step in range(ck.resume(), STEPS):
            draw = torch.Generator().manual_seed(1000 * step + rank)
            ids = torch.randint(0, ROWS, (8, 2), generator=draw)
            for optimizer in optimizers:
                optimizer.zero_grad()
            target = (ids.sum(1) % 2).float()
            nn.functional.binary_cross_entropy_with_logits(model(ids), target).backward()
            for optimizer in optimizers:
                optimizer.step()
            ck.step()
            if kill_at is not None and step + 1 == kill_at[0]:
                _die_in(kill_at[1])
    found = {f"model.{k}": v.numpy().copy() for k, v in model.module.state_dict().items()}
    for index, optimizer in enumerate(optimizers):
        for parameter, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                found[f"{index}.{parameter}.{key}"] = np.asarray(value)
    return found


def _die_in(seconds: float) -> None:
    def die() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()


def main() -> None:
    """One life of one rank."""
    url, out, seed, lives = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    rng = np.random.default_rng([seed, life])
    victim = int(rng.integers(dist.get_world_size()))
    moment = (int(rng.integers(2, STEPS)), float(rng.uniform(0, 0.1)))
    dies = life < lives and dist.get_rank() == victim
    found = train(url, None, moment if dies else None)
    np.savez(out / f"rank{dist.get_rank()}.npz", **found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
