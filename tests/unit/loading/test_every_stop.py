"""Whatever the loop and the loader: stopped at any step and resumed, it is the same run."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.loading.loops import LOOPS, Training
from tests.unit.loading.readerjob import Stopped

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*")

LOADERS = [
    "plain", "plain-own", "ordered", "lazy", "stream", "ragged", "drop-last", "weighted",
    "replacement", "growing", "buckets", "naming", "collating", "distributed", "unbatched",
    "uneven", "pairs", "iterable", "list", "granted", "stateful", "stateful-own",
    "stateful-stream", "stateful-ragged",
]  # fmt: skip
NOT_TORCH = {"uneven", "pairs", "iterable", "list", "granted"}  # cannot be followed
CASES = sorted(
    {
        *((loader, loop) for loader in LOADERS for loop in ("plain", "ahead-2", "followed")),
        *((loader, loop) for loader in ("plain", "stateful", "uneven", "list") for loop in LOOPS),
        ("distributed", "followed-setting-epochs"),
        ("ragged", "followed-accumulating"),
        ("ragged", "accumulate"),
    }
)
# One step is too few to see that a double buffer of batches that are never freed reads ahead; a
# checkpoint taken then comes with a warning.
GUESSED = {("list", "double-buffer"): {1}}


def run(
    loader: str, loop: str, *, stop: int | None = None, saved: Any = None, seed: int = 1
) -> tuple[list[Any], Any, Any]:
    """What was seen, what was saved at the stop, and what the generators would draw next."""
    act, way = LOOPS[loop]
    training = Training(loader, stop=stop, saved=saved, seed=seed, way=way)
    with contextlib.suppress(Stopped):
        act(training)
    training.reader.release()
    drawn = (torch.rand(()).item(), random.random(), float(np.random.rand()))
    return training.seen, training.saved, drawn


@pytest.mark.parametrize(
    ("loader", "loop"),
    [case for case in CASES if case[0] not in NOT_TORCH or LOOPS[case[1]][1] == "epochs"],
)
def test_a_loop_that_is_stopped_anywhere_goes_on_as_the_same_run(loader: str, loop: str) -> None:
    whole, _, drawn = run(loader, loop)
    stop = 0
    while True:
        stop += 1
        first, saved, _ = run(loader, loop, stop=stop)
        if saved is None:
            break
        assert first == whole[: len(first)]
        if stop not in GUESSED.get((loader, loop), ()):
            rest, _, drawn_at_end = run(loader, loop, saved=saved, seed=stop + 50)
            assert first + rest == whole, stop
            assert drawn_at_end == drawn, stop
    assert stop > 5
