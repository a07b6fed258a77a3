"""Count what one operation walks through: files, and pairs of files that call each other.

    python dev/walk.py

Every Python function of holdfast that is called counts its file; a file that calls another, which
calls back into it, is a back-and-forth. All threads are followed, kernels are not.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import holdfast as hf

ROOT = str(Path(hf.__file__).parent)


class Walk:
    """Who calls whom while it is on."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.calls: set[tuple[str, str]] = set()

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """A function is called."""
        if event != "call":
            return
        here = frame.f_code.co_filename
        if not here.startswith(ROOT):
            return
        self.files.add(here)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(ROOT):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != here:
            self.calls.add((caller.f_code.co_filename, here))

    def of(self, act: Callable[[], object]) -> dict[str, Any]:
        """Follow one operation."""
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        try:
            act()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        both = {tuple(sorted(pair)) for pair in self.calls if pair[::-1] in self.calls}
        short = sorted("~".join(p[len(ROOT) + 1 :] for p in pair) for pair in both)
        return {"files": len(self.files), "back_and_forth": len(both), "pairs": short}


def main() -> None:
    """A small run: a delta's step, a restore, a read of some rows, a round of the grid."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"users": nn.Embedding(5000, 16, sparse=True), "top": nn.Linear(16, 1)})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

    def train() -> None:
        optimizer.zero_grad()
        model["top"](model["users"](torch.randint(5000, (64,)))).sum().backward()
        optimizer.step()

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        with hf.Checkpointer(
            folder, model=model, optimizer=optimizer, strategy="check-n-run", every=1
        ) as ck:
            for _ in range(3):
                train()
                ck.step()
                ck.wait()
            train()
            found["step() with a delta"] = Walk().of(lambda: (ck.step(), ck.wait()))
            found["restore"] = Walk().of(lambda: ck.restore(2, discard_later=True))
        run = hf.open(folder)
        found["run.read of some rows"] = Walk().of(
            lambda: run.read(run.steps[-1], "users.weight", rows=[5, 4000])
        )
    with (
        tempfile.TemporaryDirectory() as folder,
        hf.Checkpointer(
            folder, model=model, optimizer=optimizer, strategy="incrcp", every=1, extract=0.0
        ) as ck,
    ):  # fmt: skip
        extractor: Any = ck._extractor
        with contextlib.ExitStack() as stopped:
            stopped.enter_context(extractor.stopped())
            for _ in range(6):
                train()
                ck.step()
                ck._saves.finish()
            # Leaving it wakes the thread that works off what the saves have left.
            found["a round of the grid"] = Walk().of(lambda: (stopped.close(), extractor.wait()))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
