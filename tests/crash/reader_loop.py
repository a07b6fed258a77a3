"""README's own loop, as a program that the tests kill: prints what it has trained.

python reader_loop.py URL KIND LOOP PRINTED_AT
"""

from __future__ import annotations

import random
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import holdfast as hf

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.unit.loading.readerjob import EPOCHS, Model, make_loader


def main(url: str, kind: str, loop: str, stop: int) -> None:
    """Train to the end; at step ``stop`` wait for the kill."""
    seed = 1 if not Path(url).exists() else 77
    for draw in (torch.manual_seed, random.seed, np.random.seed):
        draw(seed)
    loader, model = make_loader(kind), Model()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    reader = loader if loop == "reader" else None
    with hf.Checkpointer(
        url, model=model, optimizer=optimizer, reader=reader, every=1, codec="fp32"
    ) as ck:
        ck.resume()
        for batch in batches_of(ck, loader, loop):
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
            print(ck.current_step + 1, ck.epoch, batch[:, 0].tolist(), flush=True)
            ck.step()
            if ck.current_step == stop:
                ck.wait()
                print("ready", flush=True)
                time.sleep(600)


def batches_of(ck: hf.Checkpointer, loader: Any, loop: str) -> Iterator[Any]:
    """By ``ck.epochs``, or by the loader itself."""
    if loop == "epochs":
        yield from ck.epochs(loader, EPOCHS)
    else:
        for _ in range(ck.epoch, EPOCHS):
            yield from loader


if __name__ == "__main__":
    warnings.filterwarnings("ignore", ".*set_vital.*")
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
