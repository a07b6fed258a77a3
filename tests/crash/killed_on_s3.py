"""A training process that saves to S3 and is killed again and again; run by test_s3_kill.py.

    python -m tests.crash.killed_on_s3 URL OPTIONS_JSON KILLS SEED

The parent imports everything once, talks to no server, and forks a child for every life. A child
compares all that is stored with what the training must have been, resumes, reports, and trains on,
saving at every step in many small parts, until the parent kills it.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
import traceback
import warnings
from typing import Any

import torch

import holdfast as hf
from holdfast.storage import open_storage
from tests.conftest import fingerprint
from tests.crash.story import (
    Plot,
    assert_every_kept_step_is_exact,
    assert_nothing_unreferenced,
    oracle,
    train,
)

# Longer than all lives together, which train four steps or so each.
STEPS = 100 + 8 * int(os.environ.get("HOLDFAST_S3_KILLS", "6"))
PLOT = Plot("adagrad", "intermittent", base_later="intermittent", keep=2, last_step=STEPS)
PATIENCE_S = 120.0


def live(url: str, options: dict[str, Any], tell: int, *, is_last: bool) -> None:
    """One life: check what is there, say so, train until killed."""
    storage = open_storage(url, **options)
    try:
        steps = assert_every_kept_step_is_exact(storage, PLOT)
    except hf.NotFoundError:
        steps = ()
    model = PLOT.build(seed=1234 if steps else 3)
    torch.manual_seed(99)
    ck = PLOT.checkpointer(storage, model, every=1)
    start = ck.resume()
    assert start == (steps[-1] if steps else 0)
    assert fingerprint(*model) == oracle(PLOT)[start]
    if steps:
        assert_nothing_unreferenced(storage)
    os.write(tell, f"{start}\n".encode())
    if is_last:
        assert hf.verify(storage).is_sound
        ck.close()
        return

    def after() -> None:
        ck.step()  # waits for the save of the step before
        os.write(tell, b".\n")

    train(model, range(start, 2 * PLOT.last_step), after)


def warm_up() -> None:
    """Load every kernel before the first fork, so that lives start quickly; leaves no thread."""
    model = PLOT.build()
    storage = open_storage("memory://warm")
    with PLOT.checkpointer(storage, model) as ck:
        for step in range(2):
            train(model, range(step, step + 1), ck.step)
            ck.save().result()
        ck.resume()
    hf.verify(storage)
    oracle(PLOT)


def start_life(url: str, options: dict[str, Any], *, is_last: bool) -> tuple[int, int]:
    """Fork a child; its process id and the pipe on which it reports."""
    ear, tell = os.pipe()
    child = os.fork()
    if child:
        os.close(tell)
        return child, ear
    try:
        os.close(ear)
        live(url, options, tell, is_last=is_last)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def hear(ear: int) -> str:
    """The next line of a child: the step it resumed at, or a dot for each step trained."""
    line = ""
    while not line.endswith("\n"):
        ready, _, _ = select.select([ear], [], [], PATIENCE_S)
        data = os.read(ear, 1) if ready else b""
        if not data:
            raise SystemExit("a life ended before its check was over")
        line += data.decode()
    return line


def main(url: str, options: dict[str, Any], kills: int, seed: int) -> None:
    """Kill so many lives and print what was seen as JSON."""
    chance = random.Random(seed)
    warm_up()
    resumed = []
    for _ in range(kills):
        child, ear = start_life(url, options, is_last=False)
        # One life in five is killed whenever, be it while it restores or takes over.
        if chance.random() < 0.8:
            resumed.append(int(hear(ear)))
            for _ in range(chance.randint(1, 4)):
                hear(ear)
        time.sleep(chance.random() * 0.1)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(ear)
        if not os.WIFSIGNALED(status):
            raise SystemExit("a life ended by itself")
    child, ear = start_life(url, options, is_last=True)
    resumed.append(int(hear(ear)))
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit("the last life failed")
    print(json.dumps({"kills": kills, "resumed": resumed}))


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # torch's own, about sparse tensors
    torch.set_num_threads(1)
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
