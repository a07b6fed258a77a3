"""A plain PyTorch training loop that survives being killed.

    python examples/plain_pytorch.py runs/plain     # kill it whenever you like (kill -9, even)
    python examples/plain_pytorch.py runs/plain     # goes on where it was

It learns which of 10,000 users click which of 2,000 items. Three lines are Holdfast's.
"""

import sys

import torch
from torch import nn

import holdfast as hf

STEPS, BATCH = 200, 128


class Clicks(nn.Module):
    """A recommendation model: embedding tables for users and items, and a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(10_000, 16, sparse=True)
        self.items = nn.Embedding(2_000, 16, sparse=True)
        self.network = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """How likely each (user, item) is a click, as a logit."""
        rows = torch.cat([self.users(ids[:, 0]), self.items(ids[:, 1])], dim=1)
        return self.network(rows).squeeze(1)


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Users, items and clicks of one step; the same step always gives the same batch."""
    draw = torch.Generator().manual_seed(step)
    users = torch.randint(0, 10_000, (BATCH,), generator=draw)
    items = torch.randint(0, 2_000, (BATCH,), generator=draw)
    return torch.stack([users, items], dim=1), ((users + items) % 2).float()


def main(url: str) -> None:
    """Train to the end, from wherever the last run got to."""
    torch.manual_seed(0)
    model = Clicks()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    loss_of = nn.BCEWithLogitsLoss()

    # Every bit is stored: training goes on exactly as if it had never stopped. For smaller
    # checkpoints that are not exact, pass expected_restores= or codec=.
    # The end of the block saves the last step; SIGTERM saves the one that is running.
    with hf.Checkpointer(url, model=model, optimizer=optimizer, every=20) as ck:
        start = ck.resume()  # 0 in a new run
        print(f"starting at step {start}", flush=True)
        for step in range(start, STEPS):
            ids, clicked = make_batch(step)
            optimizer.zero_grad()
            loss = loss_of(model(ids), clicked)
            loss.backward()
            optimizer.step()
            ck.step()  # counts; every 20 steps it copies what changed and stores it meanwhile
            if (step + 1) % 20 == 0:
                print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/plain")
