"""A Lightning training that survives being killed.

    pip install 'holdfast[lightning]' torchdata
    python examples/lightning_train.py runs/lightning     # kill it whenever you like
    python examples/lightning_train.py runs/lightning     # goes on where it was

One line is Holdfast's: the callback. Lightning's own checkpoints work beside it.
"""

import sys

import lightning
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.lightning import HoldfastCallback

STEPS, BATCH = 200, 128


class Clicks(torch.utils.data.Dataset):
    """Which of 10,000 users click which of 2,000 items."""

    def __len__(self) -> int:
        return 50_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        user, item = index * 7919 % 10_000, index * 104_729 % 2_000
        return torch.tensor([user, item]), torch.tensor(float((user + item) % 2))


class Module(lightning.LightningModule):
    """Embedding tables for users and items, and a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(10_000, 16, sparse=True)
        self.items = nn.Embedding(2_000, 16, sparse=True)
        self.network = nn.Sequential(
            nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1)
        )

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        """The loss of one batch."""
        ids, clicked = batch
        rows = torch.cat([self.users(ids[:, 0]), self.items(ids[:, 1])], dim=1)
        loss = nn.functional.binary_cross_entropy_with_logits(self.network(rows)[:, 0], clicked)
        if (self.global_step + 1) % 20 == 0:
            print(f"step {self.global_step + 1}: loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adagrad changes only rows that were looked up: that is what makes checkpoints small."""
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


def main(url: str) -> None:
    """Train to the end, from wherever the last run got to."""
    lightning.seed_everything(0, verbose=False)
    # A loader with state_dict() goes on at its sample; others begin their epoch again.
    loader = StatefulDataLoader(Clicks(), batch_size=BATCH, shuffle=True)
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[HoldfastCallback(url, every=20)],
    )  # fmt: skip
    trainer.fit(Module(), loader)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/lightning")
