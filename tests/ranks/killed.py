"""Ranks of which one is killed while they save."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

import holdfast as hf
from holdfast.checkpoint.ranks.rank_commit import Coordinator, Follower
from holdfast.checkpoint.saving import store_rows
from holdfast.checkpoint.store.writer import RunWriter
from tests.ranks.cases import _checkpointer
from tests.ranks.held import Training
from tests.ranks.pool import CONTEXT, free_port, meet

POINTS = ("storing", "stored", "committing", "committed")


def _die(*args: object, **kwargs: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _arrange(point: str, rank: int) -> None:
    """Have this process die at a point of the next save."""
    match point:
        case "storing":
            store_rows.store_segment = _die  # type: ignore[assignment]
        case "stored":
            kind: Any = Coordinator if rank == 0 else Follower
            kind.commit = _die
        case "committing":
            RunWriter.update = _die  # type: ignore[assignment,method-assign]
        case "committed":
            Coordinator._tell_commit = _die  # type: ignore[assignment,method-assign]


def _train(rank: int, port: int, ranks: int, url: str, dies: int, point: str,
           pipe: Connection) -> None:  # fmt: skip
    meet(rank, port, ranks)
    training = Training("row", rank, ranks)
    ck = _checkpointer(url, training, dist.group.WORLD, ranks_timeout_s=3.0)
    training.train([1, 2])
    ck.step()
    ck.step()
    ck.save().result(60)
    training.train([3])
    ck.step()
    if rank == dies:
        _arrange(point, rank)
    try:
        ck.save().result(60)
        pipe.send("committed")
    except hf.HoldfastError as error:
        pipe.send(str(error))
    os._exit(0)


def kill_one(url: str, *, ranks: int, dies: int, point: str) -> list[str | None]:
    """What the ranks say of the save in which one of them died; None: nothing any more."""
    port = free_port()
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(
            target=_train, args=(rank, port, ranks, url, dies, point, theirs), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    told: list[str | None] = []
    for pipe in pipes:
        try:
            told.append(pipe.recv())
        except EOFError:
            told.append(None)
    for process in processes:
        process.join(60)
        assert process.exitcode is not None
    return told
