"""RecBole's Trainer with negative sampling, evaluation and early stopping: python ... URL"""

import sys
from pathlib import Path

import numpy as np
from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.model.general_recommender import BPR
from recbole.trainer import Trainer
from recbole.utils import init_seed

import holdfast as hf


def main(url: str) -> None:
    """Train, or go on where the run at the url was killed."""
    # RecBole 1.2.1 asks NumPy for names that NumPy 2 no longer has.
    np.float_, np.complex_, np.unicode_ = np.float64, np.complex128, np.str_  # type: ignore
    folder = Path(url).parent
    rng = np.random.default_rng(5)
    pairs = sorted({(int(u), int(i)) for u, i in rng.integers(0, 60, (900, 2))})
    (folder / "made").mkdir(exist_ok=True)
    lines = ["user_id:token\titem_id:token", *(f"u{u}\ti{i}" for u, i in pairs)]
    (folder / "made" / "made.inter").write_text("\n".join(lines) + "\n")
    settings = {
        "data_path": str(folder), "checkpoint_dir": str(folder / "saved"), "epochs": 6,
        "train_batch_size": 64, "eval_batch_size": 256, "embedding_size": 8, "stopping_step": 5,
        "metrics": ["Recall"], "topk": [10], "valid_metric": "Recall@10", "show_progress": False,
        "load_col": {"inter": ["user_id", "item_id"]}, "use_gpu": False, "seed": 5,
    }  # fmt: skip
    config = Config(model="BPR", dataset="made", config_dict=settings)
    init_seed(config["seed"], reproducibility=True)
    train, valid, _ = data_preparation(config, create_dataset(config))
    model = BPR(config, train.dataset)
    trainer = Trainer(config, model)
    with hf.attach(
        trainer.optimizer, url, model=model, loader=train, trainer=trainer, every=5, codec="fp32"
    ) as ck:
        trainer.start_epoch = ck.start_epoch()
        trainer.fit(train, valid, show_progress=False)


if __name__ == "__main__":
    main(sys.argv[1])
