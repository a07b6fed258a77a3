"""Ranks are told to end, some or all, at random moments: one step is saved by all, then all end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from tests.ranks.held import assemble, expected
from tests.ranks.pool import Pool
from tests.ranks.preempted import Trial, send_signals

TRIALS = int(os.environ.get("HOLDFAST_KILLS", "200")) // 25  # for 2 ranks and for 4


def check_held(done: list[Any], step: int) -> None:
    """All ranks together hold what training leads to."""
    found = assemble(one["held"] for one in done)
    for table, columns in expected(step).items():
        for name, values in columns.items():
            assert np.array_equal(found[table][name], values), (table, name)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seed", range(TRIALS))
def test_signals_at_random_moments_save_one_step_of_all_ranks(
    pool: Pool, tmp_path: Path, ranks: int, seed: int
) -> None:
    trial, url = Trial.choose(seed, ranks), str(tmp_path)
    ended = send_signals(url, trial)
    steps = {step for _, step, _, _ in ended}
    assert len(steps) == 1, (trial, ended)
    step = steps.pop()
    for error, _, is_preempted, code in ended:
        assert error == "SystemExit(143)" and is_preempted and code == 143, (trial, ended)
    assert hf.open(url).steps[-1] == step, (trial, ended)
    assert hf.verify(url).is_sound
    done = pool.run("train", 2, url=url, layout="row", saves=[step + 2])
    assert [one["start"] for one in done] == [step] * 2
    check_held(done, step + 2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_notice_to_one_rank_saves_one_step_of_all_and_training_goes_on(
    pool: Pool, tmp_path: Path, ranks: int
) -> None:
    notices = [(ranks - 1, 3), (0, 1), (1, 30)]
    done = pool.run("preempt_by_notice", ranks, url=str(tmp_path), notices=notices)
    stopped = done[0]["stopped"]
    assert all(one["stopped"] == stopped for one in done)
    for before, at, (_, steps) in zip([0, *stopped], stopped, notices, strict=False):
        assert at > before + steps
    assert done[0]["steps"] == tuple(stopped)
    check_held(done, stopped[-1])


@pytest.mark.parametrize("every", ["20s", hf.Every(steps=15, seconds=20)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_save_by_the_clock_of_rank_0(
    pool: Pool, tmp_path: Path, ranks: int, every: Any
) -> None:
    done = pool.run("train_by_time", ranks, url=str(tmp_path), steps=65, every=every)
    wanted = (20, 40, 60) if isinstance(every, str) else (15, 30, 45, 60)
    assert done == [wanted] * ranks
    assert hf.verify(str(tmp_path)).is_sound


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_orderly_end_of_all_ranks_leaves_the_last_step_saved(
    pool: Pool, tmp_path: Path, ranks: int
) -> None:
    url = str(tmp_path)
    for first, steps, saved in ((0, 3, (3,)), (3, 0, (3,)), (3, 4, (3, 7))):
        done = pool.run("train_to_the_end", ranks, url=url, steps=steps)
        assert [one["first"] for one in done] == [first] * ranks
        assert hf.open(url).steps == saved
        check_held(done, first + steps)
    pool.run("train_to_the_end", ranks, url=url, steps=2, save_last=False)
    assert hf.open(url).steps == (3, 7)


def test_torchrun_that_is_ended_leaves_the_last_step_saved(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
               "--master-port", "0", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-backend", "c10d",
               "-m", "tests.ranks.under_torchrun", str(tmp_path)]  # fmt: skip
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, env=environment
    ) as job:
        assert job.stdout is not None
        heard = {job.stdout.readline().split()[0] for _ in range(2)}
        assert heard == {"training"}
        job.send_signal(signal.SIGTERM)  # torchrun passes it on to all ranks
        told = sorted(job.stdout.read().split())
    assert len(told) == 2 and told[0] == told[1]
    assert hf.open(str(tmp_path)).steps[-1] == int(told[0])
    assert hf.verify(str(tmp_path)).is_sound
