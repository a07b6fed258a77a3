"""Behind TrainPipelineSparseDist, with falling rates, killed twice: the same run to the bit."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import holdfast as hf
from tests.torchrec.pool import Pool
from tests.torchrec.test_kills import assert_same_checkpoint, rank_pid

PROGRAM = Path(__file__).parent / "pipelined.py"
RANKS, STEPS = 2, 36  # three epochs
# Three steps behind the checkpoint at which the rates fall, in mid-epoch; at the second epoch's
# last step. The run goes on at 10 and at 20.
PAUSES = (13, 24)


def test_a_killed_pipeline_trains_the_same_batches_at_the_same_rates(
    pool: Pool, tmp_path: Path
) -> None:
    expected = pool.run("pipelined", ranks=RANKS, url=str(tmp_path / "whole"), steps=STEPS)
    assert [answer["ahead"] for answer in expected] == [[2], [2]]  # or this would be no test
    found = train_with_kills(tmp_path / "killed")
    assert found == expected
    ours, theirs = hf.open(tmp_path / "killed"), hf.open(tmp_path / "whole")
    assert ours.steps == theirs.steps == (*range(5, STEPS, 5), STEPS)
    for step in ours.steps:
        assert_same_checkpoint(ours, theirs, step)
        assert_same(ours.dense(step)["optimizers"], theirs.dense(step)["optimizers"])


def train_with_kills(url: Path) -> list[dict[str, Any]]:
    """Run the program under torchrun, and kill a rank at each pause; what the ranks answer."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}",
        f"--max-restarts={len(PAUSES)}", "--monitor-interval=0.1", str(PROGRAM), "--url", str(url),
        "--steps", str(STEPS), "--pause", *map(str, PAUSES),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # docs/torchrec.md
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    answers: dict[int, dict[str, Any]] = {}
    log: list[str] = []
    kills = 0
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            log.append(line)
            if line.startswith("paused"):
                os.kill(rank_pid(run.pid, kills % RANKS), signal.SIGKILL)
                kills += 1
            elif line.startswith("result"):
                _, rank, answer = line.split(maxsplit=2)
                answers[int(rank)] = ast.literal_eval(answer)
        assert run.wait() == 0, "".join(log[-60:])
    assert kills == len(PAUSES), "".join(log[-60:])
    return [answers[rank] for rank in range(RANKS)]


def assert_same(one: Any, other: Any) -> None:
    """Two nested states hold the same numbers."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, its in zip(one, other, strict=True):
            assert_same(mine, its)
    else:
        assert np.array_equal(one, other)
