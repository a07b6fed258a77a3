"""torch-rechub's MatchTrainer with a plain call of fit(): python ... URL

Nothing but the call of hf.attach() is added: epochs that are trained already run empty.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch_rechub.basic.features import SparseFeature
from torch_rechub.models.matching import DSSM
from torch_rechub.trainers import MatchTrainer
from torch_rechub.utils.data import MatchDataGenerator

import holdfast as hf


def main(url: str) -> None:
    """Train, or go on where the run at the url was killed."""
    torch.manual_seed(2)
    rng = np.random.default_rng(2)
    x = {name: rng.integers(0, 300, 480) for name in ("user", "item")}
    y = (x["user"] % 5 == x["item"] % 5).astype(np.float32)
    train, _, _ = MatchDataGenerator(x, y).generate_dataloader(
        x, {"item": x["item"]}, batch_size=32, num_workers=0
    )
    tower = {"dims": [16, 8], "activation": "prelu", "dropout": 0.1}
    model = DSSM(
        [SparseFeature("user", vocab_size=300, embed_dim=8)],
        [SparseFeature("item", vocab_size=300, embed_dim=8)],
        user_params=tower,
        item_params=tower,
    )
    trainer = MatchTrainer(
        model,
        mode=0,
        optimizer_fn=torch.optim.Adagrad,
        optimizer_params={"lr": 0.05},
        scheduler_fn=torch.optim.lr_scheduler.StepLR,
        scheduler_params={"step_size": 2, "gamma": 0.5},
        n_epoch=5,
        model_path=str(Path(url).parent),
    )
    ck = hf.attach(
        trainer.optimizer, url, model=model, loader=train, trainer=trainer, every=5, codec="fp32"
    )
    trainer.fit(train)
    ck.close()


if __name__ == "__main__":
    main(sys.argv[1])
