"""README's loop, killed in mid-epoch, at an epoch's last batch and at its first: the same run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast as hf
from tests.crash.test_examples import checkpoint_at
from tests.unit.loading.readerjob import BATCHES, EPOCHS

PROGRAM = Path(__file__).parent / "reader_loop.py"
TOTAL = EPOCHS * BATCHES
KILLS = (BATCHES // 2, BATCHES, BATCHES + 1)


def run(url: Path, kind: str, loop: str, stop: int) -> list[str]:
    """What one process prints until it ends or, at step ``stop``, is killed."""
    command = [sys.executable, str(PROGRAM), str(url), kind, loop, str(stop)]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
    printed: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=quiet
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if line.startswith("ready"):
                os.kill(process.pid, signal.SIGKILL)
                break
            printed.append(line)
        _, errors = process.communicate(timeout=200)
    assert process.returncode == (-signal.SIGKILL if stop else 0), errors
    return printed


@pytest.mark.parametrize(
    ("kind", "loop"),
    [
        ("plain", "epochs"),
        ("plain", "reader"),
        ("plain-workers", "epochs"),
        ("plain-workers", "reader"),
        ("stateful", "reader"),
        ("stateful-workers", "epochs"),
        ("stateful-workers", "reader"),
        ("stream-workers", "epochs"),
        ("iterable", "epochs"),
    ],
)
def test_a_killed_loop_trains_the_same_batches_to_the_same_bits(
    kind: str, loop: str, tmp_path: Path
) -> None:
    calm = run(tmp_path / "calm", kind, loop, 0)
    assert len(calm) == TOTAL
    printed: list[str] = []
    for stop in (*KILLS, 0):
        printed += run(tmp_path / "killed", kind, loop, stop)
    assert printed == calm
    assert hf.open(tmp_path / "killed").steps[-1] == TOTAL
    for step in (TOTAL, 2 * BATCHES):
        assert checkpoint_at(tmp_path / "killed", step) == checkpoint_at(tmp_path / "calm", step)
