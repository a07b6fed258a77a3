"""A few processes that play the ranks of many small jobs, so that torch is imported once in each.

Every job gets a process group of its own over gloo. A job is a function of jobs.py and keyword
arguments; each rank's answer comes back, an error of any rank is raised with its traceback.
TorchRec is loaded in these processes alone: it warns while it is imported.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import logging
import multiprocessing
import os
import sys
import tempfile
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

RANKS = 4
_JOBS = "tests.torchrec.jobs"
_TIMEOUT = timedelta(seconds=30)


class Pool:
    """The processes; ``run`` gives them one job after the other."""

    def __init__(self, ranks: int = RANKS) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._numbers = itertools.count()
        self._workers = []
        for _ in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def run(self, job: str, *, ranks: int, **given: Any) -> list[Any]:
        """What every rank answers, in their order."""
        meeting = str(Path(self._folder.name) / str(next(self._numbers)))
        workers = self._workers[:ranks]
        for rank, (_, pipe) in enumerate(workers):
            pipe.send((job, meeting, rank, ranks, given))
        answers = [pipe.recv() for _, pipe in workers]
        errors = [
            f"rank {rank} of {ranks}:\n{answer}"
            for rank, (is_error, answer) in enumerate(answers)
            if is_error
        ]
        assert not errors, "\n".join(errors)
        return [answer for _, answer in answers]

    def close(self) -> None:
        """End the processes."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._folder.cleanup()


def _work(pipe: Connection) -> None:
    warnings.filterwarnings("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    while True:
        job, meeting, rank, ranks, given = pipe.recv()
        try:
            store = dist.FileStore(meeting, ranks)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=ranks, timeout=_TIMEOUT
            )
            answer = (False, getattr(importlib.import_module(_JOBS), job)(**given))
        except BaseException:
            answer = (True, traceback.format_exc())
        finally:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
            gc.collect()
            # Something that all ranks agree on once in the life of a process; ours have many.
            if (agreed := sys.modules.get("torchrec.distributed.collective_utils")) is not None:
                agreed._INITIALIZED = False
        pipe.send(answer)
