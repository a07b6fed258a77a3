"""torch-rechub's CTRTrainer with validation, early stopping and a scheduler: python ... URL"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch_rechub.basic.features import SparseFeature
from torch_rechub.models.ranking import DeepFM
from torch_rechub.trainers import CTRTrainer
from torch_rechub.utils.data import DataGenerator

import holdfast as hf

EPOCHS = 6


def main(url: str) -> None:
    """Train, or go on where the run at the url was killed."""
    torch.manual_seed(1)
    rng = np.random.default_rng(1)
    x = {name: rng.integers(0, 500, 640) for name in ("user", "item", "city")}
    y = ((x["user"] + x["item"]) % 3 == 0).astype(np.float32)
    train, valid, _ = DataGenerator(x, y).generate_dataloader(split_ratio=[0.8, 0.1], batch_size=32)
    features = [SparseFeature(name, vocab_size=500, embed_dim=8) for name in x]
    model = DeepFM(features, features, {"dims": [16], "dropout": 0.2})
    trainer = CTRTrainer(
        model,
        optimizer_params={"lr": 1e-2, "weight_decay": 1e-5},
        scheduler_fn=torch.optim.lr_scheduler.StepLR,
        scheduler_params={"step_size": 1, "gamma": 0.8},
        n_epoch=EPOCHS,
        earlystop_patience=3,
        model_path=str(Path(url).parent),
    )
    with hf.attach(
        trainer.optimizer, url, model=model, loader=train, trainer=trainer, every=8, codec="fp32"
    ) as ck:
        trainer.n_epoch = EPOCHS - ck.start_epoch()
        trainer.fit(train, valid)


if __name__ == "__main__":
    main(sys.argv[1])
