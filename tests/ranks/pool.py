"""Four processes that know each other, started once: cases run on the first so many of them."""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZE = 4
_AFTER_AN_ERROR_S = 90.0
# Processes are copies of one that has loaded everything: they start in a moment.
CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "holdfast.checkpoint.checkpointer", "tests.ranks.cases"])


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def meet(rank: int, port: int, size: int) -> None:
    """Have these processes know each other."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )


def _serve(rank: int, port: int, pipe: Connection) -> None:
    faulthandler.register(signal.SIGUSR1)
    meet(rank, port, SIZE)
    groups = {size: dist.new_group(list(range(size))) for size in range(2, SIZE + 1)}
    while True:
        message = pipe.recv()
        if message is None:
            break
        name, ranks, kwargs = message
        try:
            case = getattr(importlib.import_module("tests.ranks.cases"), name)
            pipe.send((True, case(rank, ranks, groups.get(ranks, False), **kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Pool:
    """The processes, and how they are told what to do.

    A case that hangs is told by the test's own time limit: every process then writes to stderr
    where it stands, and the next case gets new processes.
    """

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        port = free_port()
        self._pipes = []
        self._processes = []
        for rank in range(SIZE):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(rank, port, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, case: str, ranks: int, **kwargs: Any) -> list[Any]:
        """Run a case of cases.py on the first ``ranks`` processes; what each returned."""
        for pipe in self._pipes[:ranks]:
            pipe.send((case, ranks, kwargs))
        try:
            answers = self._answers(ranks)
        except BaseException:
            self._give_up()
            raise
        errors = [answer for is_ok, answer in answers if not is_ok]
        if errors:
            raise AssertionError("\n".join(errors))
        return [answer for _, answer in answers]

    def _answers(self, ranks: int) -> list[tuple[bool, Any]]:
        """What each rank says. After the first error the others may wait for that rank for ever:
        they get a while, and then the error is told without them."""
        found: dict[int, tuple[bool, Any]] = {}
        while len(found) < ranks:
            left = [self._pipes[rank] for rank in range(ranks) if rank not in found]
            errors = [answer for is_ok, answer in found.values() if not is_ok]
            ready = wait(left, timeout=_AFTER_AN_ERROR_S if errors else None)
            if not ready:
                raise AssertionError("other ranks hang after this error:\n" + "\n".join(errors))
            for rank, pipe in enumerate(self._pipes[:ranks]):
                if pipe in ready:
                    found[rank] = pipe.recv()
        return [found[rank] for rank in range(ranks)]

    def _give_up(self) -> None:
        """Have every process write where it stands, end them all, and start new ones."""
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(2)  # for the writing
        for process in self._processes:
            process.kill()
        self._start()

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()


@contextmanager
def open_pool() -> Iterator[Pool]:
    """A pool for as long as the block lasts."""
    pool = Pool()
    try:
        yield pool
    finally:
        pool.close()
