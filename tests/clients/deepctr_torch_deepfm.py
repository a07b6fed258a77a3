"""DeepCTR-Torch's model.fit(), which makes its DataLoader itself: python ... URL"""

import sys

import numpy as np
from deepctr_torch.callbacks import EarlyStopping
from deepctr_torch.inputs import DenseFeat, SparseFeat
from deepctr_torch.models import DeepFM

import holdfast as hf

EPOCHS = 6


def main(url: str) -> None:
    """Train, or go on where the run at the url was killed."""
    rng = np.random.default_rng(3)
    x = {name: rng.integers(0, 400, 800).astype(np.float32) for name in ("user", "item")}
    x["age"] = rng.random(800, dtype=np.float32)
    y = ((x["user"] + x["item"]) % 4 == 0).astype(np.float32)
    columns = [SparseFeat(name, 400, embedding_dim=8) for name in ("user", "item")]
    columns.append(DenseFeat("age", 1))
    model = DeepFM(columns, columns, dnn_hidden_units=(16,), dnn_dropout=0.2, dnn_use_bn=True)
    model.compile("adagrad", "binary_crossentropy", metrics=["auc"])
    stopping = EarlyStopping(monitor="val_auc", mode="max", patience=4)
    with hf.attach(
        model.optim, url, model=model, trainer=model, extras={"stopping": stopping}, every=5,
        codec="fp32",
    ) as ck:  # fmt: skip
        model.fit(
            x, y, batch_size=32, epochs=EPOCHS, initial_epoch=ck.start_epoch(),
            validation_split=0.2, callbacks=[stopping],
        )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
