"""Ranks that are sent SIGTERM, some or all of them, at random moments."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks.cases import _checkpointer
from tests.ranks.held import Training
from tests.ranks.pool import CONTEXT, free_port, meet


@dataclass(frozen=True, slots=True)
class Trial:
    """Which ranks are sent the signal, how long after the first step, and how they train."""

    seed: int
    ranks: int
    sent: tuple[tuple[int, float], ...]
    """Ranks, and seconds after the one before."""
    is_coupled: bool
    """Whether every step has a collective, as in data-parallel training."""
    step_s_max: float

    @classmethod
    def choose(cls, seed: int, ranks: int) -> Trial:
        """A random one."""
        chance = random.Random(f"{seed}/{ranks}")
        sent = chance.sample(range(ranks), chance.choice([1, 1, ranks, chance.randint(1, ranks)]))
        return cls(
            seed,
            ranks,
            tuple((rank, chance.choice([0.0, chance.random() * 0.3])) for rank in sent),
            is_coupled=chance.random() < 0.6,
            step_s_max=chance.choice([0.0, 0.0, 0.005, 0.05]),
        )


def _train(rank: int, port: int, trial: Trial, url: str, pipe: Connection) -> None:
    meet(rank, port, trial.ranks)
    chance = random.Random(f"{trial.seed}/{rank}")
    training = Training("row", rank, trial.ranks)
    settings: dict[str, Any] = {"every": 50, "ranks_timeout_s": 60.0, "preempt_deadline_s": 120.0}
    ck = _checkpointer(url, training, dist.group.WORLD, **settings)
    try:
        with ck:
            ck.resume()
            while True:
                training.train([ck.current_step + 1])
                time.sleep(chance.random() * trial.step_s_max)
                if trial.is_coupled:
                    dist.all_reduce(torch.ones(1))
                ck.step()
                if ck.current_step == 1:
                    pipe.send("training")
    except BaseException as error:
        pipe.send((repr(error), ck.current_step, ck.is_preempted))
        raise


def send_signals(url: str, trial: Trial) -> list[tuple[str, int, bool, int]]:
    """What the ranks ended with, at which step, whether they say so; and their exit codes."""
    port = free_port()
    chance = random.Random(trial.seed)
    pipes, processes = [], []
    for rank in range(trial.ranks):
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_train, args=(rank, port, trial, url, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        assert pipe.recv() == "training"
    time.sleep(chance.random() * 0.3)
    for rank, pause_s in trial.sent:
        time.sleep(pause_s)
        os.kill(processes[rank].pid, signal.SIGTERM)
    found = []
    for pipe, process in zip(pipes, processes, strict=True):
        told = pipe.recv()
        process.join()
        found.append((*told, process.exitcode))
    return found
