"""The examples, killed once and started again, end where they would have ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.checkpoint.format.tree import flatten

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 200


def start(example: str, url: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLES / example), str(url)]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1"}  # models this small lose by more
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=quiet
    )


def finish(example: str, url: Path) -> str:
    with start(example, url) as process:
        out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return out


def kill_after(example: str, url: Path, line: str) -> None:
    with start(example, url) as process:
        assert process.stdout is not None
        for printed in process.stdout:
            if printed.startswith(line):
                os.kill(process.pid, signal.SIGKILL)
                break
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


def everything(url: Path) -> tuple[dict[str, bytes], str]:
    """Every row with its state, every dense tensor, and all that is not a tensor, at the end."""
    assert hf.open(url).steps[-1] == STEPS
    return checkpoint_at(url, STEPS, generators=("torch",))  # the examples seed no other


def checkpoint_at(
    url: Path, step: int, *, generators: tuple[str, ...] = ("torch", "numpy", "python")
) -> tuple[dict[str, bytes], str]:
    """The same, at one step, with these random generators."""
    run = hf.open(url)
    found: dict[str, bytes] = {}
    for schema in run.tables(step):
        rows = run.read(step, schema.name)
        found[schema.name] = rows.weight.tobytes()
        found |= {f"{schema.name}.{key}": value.tobytes() for key, value in rows.state.items()}
    dense = run.dense(step)
    kept = {key: dense[key] for key in ("model", "optimizers", "extras")}
    kept["rng"] = {name: dense["rng"][name] for name in generators}
    structure, tensors = flatten(kept)
    found |= {name: _bytes(tensor) for name, tensor in tensors.items()}
    return found, repr(structure)


def _bytes(tensor: torch.Tensor) -> bytes:
    return np.ascontiguousarray(tensor.numpy()).tobytes()


@pytest.mark.parametrize("example", ["plain_pytorch.py", "lightning_train.py"])
def test_example_killed_and_started_again_ends_the_same(tmp_path: Path, example: str) -> None:
    if example.startswith("lightning"):
        pytest.importorskip("lightning")
    assert len((EXAMPLES / example).read_text().splitlines()) < 80
    finish(example, tmp_path / "calm")
    kill_after(example, tmp_path / "killed", "step 120")
    last = hf.open(tmp_path / "killed").steps[-1]
    assert 0 < last < STEPS
    finish(example, tmp_path / "killed")
    assert everything(tmp_path / "killed") == everything(tmp_path / "calm")
