"""Ranks under torchrun are killed at random moments: training ends as if they never had been.

HOLDFAST_TORCHREC_KILLS and HOLDFAST_TORCHREC_SEED ask for more, or for other moments.
"""

from __future__ import annotations

import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from tests.torchrec.cases import EXAMPLE
from tests.torchrec.pool import Pool

KILLS = int(os.environ.get("HOLDFAST_TORCHREC_KILLS", "0"))
SEED = int(os.environ.get("HOLDFAST_TORCHREC_SEED", "1"))
STEPS = 120


@pytest.mark.parametrize(("ranks", "kills"), [(2, KILLS or 2), (4, KILLS or 1)])
def test_killed_training_ends_with_the_same_bits(
    pool: Pool, ranks: int, kills: int, tmp_path: Path
) -> None:
    """Tables, row state and network, at every step that both runs kept."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    steps = STEPS + 60 * (kills - 1)
    pool.run("example", ranks=ranks, url=str(whole), steps=steps)
    train_with_kills(killed, ranks=ranks, steps=steps, draw=random.Random(SEED), kills=kills)
    ours, theirs = hf.open(killed), hf.open(whole)
    assert ours.steps[-1] == theirs.steps[-1] == steps
    for step in sorted(set(ours.steps) & set(theirs.steps))[-3:]:
        assert_same_checkpoint(ours, theirs, step)


def train_with_kills(url: Path, *, ranks: int, steps: int, draw: random.Random, kills: int) -> None:
    """Run the example under torchrun, and kill a rank after each start; rank 0 first. Not before
    there is a checkpoint: a run that begins anew would be no test of one that goes on."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
        f"--max-restarts={kills}", "--monitor-interval=0.1", str(EXAMPLE), "--url", str(url),
        "--steps", str(steps),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # docs/torchrec.md
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    run = subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    said: queue.Queue[str | None] = queue.Queue()
    log: list[str] = []
    listener = threading.Thread(target=_listen, args=(run, said, log), daemon=True)
    listener.start()
    try:
        for kill in range(kills):
            line = said.get(timeout=240)  # it has trained since it was started
            while line is not None and not _has_checkpoint(url):
                line = said.get(timeout=240)
            assert line is not None, "".join(log[-60:])
            time.sleep(draw.uniform(0, 0.5))
            victim = 0 if kill == 0 else draw.randrange(ranks)
            os.kill(rank_pid(run.pid, victim), signal.SIGKILL)
            while not said.empty():
                said.get()
        assert run.wait(timeout=240) == 0, "".join(log[-60:])
    finally:
        run.kill()
        run.wait()
        listener.join(30)
        assert run.stdout is not None
        run.stdout.close()


def _has_checkpoint(url: Path) -> bool:
    try:
        return bool(hf.open(url).steps)
    except hf.NotFoundError:
        return False


def _listen(run: subprocess.Popen[str], said: queue.Queue[str | None], log: list[str]) -> None:
    assert run.stdout is not None
    for line in run.stdout:
        log.append(line)
        if line.startswith("step "):
            said.put(line)
    said.put(None)


def rank_pid(torchrun: int, rank: int) -> int:
    """Which of torchrun's children plays a rank."""
    children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
    for child in children:
        if f"\0RANK={rank}\0".encode() in Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    raise AssertionError(f"no rank {rank} among {children}")


def assert_same_checkpoint(ours: hf.Run, theirs: hf.Run, step: int) -> None:
    """Every number of a step is the same in two runs."""
    assert ours.tables(step) == theirs.tables(step)
    for table in ours.tables(step):
        one, other = ours.read(step, table.name), theirs.read(step, table.name)
        assert np.array_equal(one.weight, other.weight), (step, table.name)
        assert set(one.state) == set(other.state)
        for name in one.state:
            assert np.array_equal(one.state[name], other.state[name]), (step, table.name, name)
    mine, its = ours.dense(step)["model"], theirs.dense(step)["model"]
    assert set(mine) == set(its)
    for name in mine:
        assert np.array_equal(mine[name].numpy(), its[name].numpy()), (step, name)
