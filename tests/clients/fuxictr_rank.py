"""FuxiCTR's BaseModel.fit() with its evaluation and falling rate: python ... URL

Nothing but the call of hf.attach() is added: epochs that are trained already run empty.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from fuxictr.features import FeatureMap
from fuxictr.pytorch.dataloaders import RankDataLoader
from fuxictr.pytorch.layers import FeatureEmbedding, MLP_Block
from fuxictr.pytorch.models import BaseModel
from fuxictr.pytorch.torch_utils import seed_everything

import holdfast as hf

FEATURES = ("user", "item", "city")


class Model(BaseModel):
    """A deep network over embeddings, as FuxiCTR's users write them."""

    def __init__(self, feature_map: FeatureMap, **settings: Any) -> None:
        super().__init__(feature_map, **settings)
        self.embedding_layer = FeatureEmbedding(feature_map, 8)
        self.mlp = MLP_Block(
            input_dim=8 * len(FEATURES), hidden_units=[16], output_dim=1,
            output_activation=self.output_activation, dropout_rates=0.2, batch_norm=True,
        )  # fmt: skip
        self.compile("adam", "binary_crossentropy", lr=1e-2)
        self.reset_parameters()

    def forward(self, inputs: Any) -> Any:
        """What FuxiCTR's train_step() calls."""
        embedded = self.embedding_layer(self.get_inputs(inputs))
        return {"y_pred": self.mlp(embedded.flatten(start_dim=1))}


def make_data(folder: Path) -> FeatureMap:
    """A training and a validation file, and what is in them."""
    rng = np.random.default_rng(4)
    for name, rows in (("train", 512), ("valid", 128)):
        x = {feature: rng.integers(1, 300, rows) for feature in FEATURES}
        np.savez(folder / f"{name}.npz", click=(x["user"] + x["item"]) % 3 == 0, **x)
    found = FeatureMap("made", str(folder))
    found.labels = ["click"]
    for name in FEATURES:
        found.features[name] = {
            "source": "", "type": "categorical", "padding_idx": 0, "vocab_size": 300,
        }  # fmt: skip
    found.num_fields = len(FEATURES)
    found.set_column_index()
    return found


def main(url: str) -> None:
    """Train, or go on where the run at the url was killed."""
    folder = Path(url).parent
    feature_map = make_data(folder)
    seed_everything(4)
    train, valid = RankDataLoader(
        feature_map, stage="train", batch_size=32, num_workers=0,
        train_data=str(folder / "train.npz"), valid_data=str(folder / "valid.npz"),
    )  # fmt: skip
    (folder / "made").mkdir(exist_ok=True)  # for FuxiCTR's best weights
    model = Model(
        feature_map, model_id="client", model_root=str(folder), metrics=["AUC"], verbose=1,
        early_stop_patience=6, embedding_regularizer=1e-4,
    )  # fmt: skip
    ck = hf.attach(
        model.optimizer, url, model=model, loader=train, trainer=model, every=8, codec="fp32"
    )
    model.fit(train, epochs=6, validation_data=valid)
    ck.close()


if __name__ == "__main__":
    main(sys.argv[1])
