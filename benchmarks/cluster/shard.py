"""A lost server's shard brought back with nobody training, beside the same bytes XORed bare.

    SIGKILL -> replaced -> all rows decoded, all parities built        (the cluster)
    k arrays of the shard's size -> XOR -> one array that is there     (bare, in this process)

Bare is as fast as it gets: one pass of the same kernel over memory that is touched already; no
stripes, no sockets, no other process. It moves what recovery must: every byte of a shard, row or
parity, is made of k others.

Not here: recovery while training (kills.py).

# K arrays, N words of each
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.cluster.kills import count_spares, find_whole
from benchmarks.cluster.trainer import Job, find_strays, running
from benchmarks.timing import seconds_of
from holdfast import events
from holdfast.cluster.spec import ClusterSpec
from holdfast.errors import UnavailableError
from holdfast.kernels.servers import galois

_PATIENCE_S = 600.0
_TICK_S = 0.02


@dataclass(frozen=True, slots=True)
class Regained:
    """One recovery of a whole shard, and bare beside it."""

    locks: int
    shard_bytes: int
    rows_s: float
    whole_s: float
    """Both from when another process took the place."""
    killed_s: float
    """The same from the kill."""
    bare_s: float
    fresh_s: float
    """Bare into memory that is not there yet, as a replacement's is not."""
    strays: tuple[str, ...] = ()
    """How processes were lost besides, until then."""


def count_shard(spec: ClusterSpec, server: int) -> int:
    """Bytes of rows and parities that a server holds."""
    total = 0
    for table in spec.tables:
        placement = table.placement
        rows = len(placement.rows_of(server, table.rows))
        if placement.parity:
            stripes_S = np.arange(table.stripes)
            rows += int((placement.parity_servers_of(stripes_S) == server).sum())
        total += 4 * table.width * rows
    return total


def rows_for(job: Job, shard_bytes: int) -> int:
    """Rows of all tables together, for which a server's shard is about so large.

    >>> from holdfast.recsys.cluster_train import Workload
    >>> rows_for(Job(strategy="ecrec", workload=Workload(preset="terabyte")), 1_000_000_000)
    7812500
    """
    width = job.spec.tables[0].width
    data = job.servers - 1
    return shard_bytes * job.servers * data // (4 * width * (data + 1))


class Bare:
    """k arrays of a shard's size and room for their sum."""

    def __init__(self, shard_bytes: int, *, data: int) -> None:
        words = shard_bytes // 4
        self._sources = [np.full((1, words), at + 1, np.uint32) for at in range(data)]
        self._sum_N = np.full((1, words), 0xFF, np.uint32)  # touched: zeros are not there yet
        self._ones = [1] * data

    @property
    def sum_N(self) -> np.ndarray:
        """What came out."""
        return self._sum_N.reshape(-1)

    def warm_s(self) -> float:
        """Seconds into memory that is there."""
        return seconds_of(lambda: galois.combine(self._sources, self._ones, self._sum_N))

    def fresh_s(self) -> float:
        """Seconds into memory that the system gives out meanwhile."""
        return seconds_of(lambda: galois.combine(self._sources, self._ones))


def regain_shards(
    job: Job, folder: Path, *, locks: Sequence[int], turns: int, kills: int
) -> list[Regained]:
    """In turns, with each number of locks: start a cluster, kill servers one after the other."""
    spec = job.spec
    size = count_shard(spec, 0)
    bare = Bare(size, data=job.servers - 1)
    bare.warm_s()  # compiles
    found = []
    for _ in range(turns):
        for count in locks:
            found += _regain(replace(job, locks=count), folder, bare, kills)
    return found


def _regain(job: Job, folder: Path, bare: Bare, kills: int) -> list[Regained]:
    happened: list[events.Event] = []
    found = []
    pids: list[int] = []
    spec = job.spec
    with (
        tempfile.TemporaryDirectory(prefix="bench-shard-", dir=folder) as scratch,
        running(job, Path(scratch), spares=1, log=events.EventLog([happened.append])) as cluster,
    ):
        for kill in range(kills):
            server = (1 + 2 * kill) % job.servers
            wait_until(lambda: count_spares(happened) > 0)
            warm_s, fresh_s = bare.warm_s(), bare.fresh_s()
            moment = time.time()
            pids.append(cluster.coordinator.process(server).pid)
            os.kill(pids[-1], signal.SIGKILL)
            wait_until(partial(_is_whole, happened, server, moment))
            whole = find_whole(happened, server, moment)
            assert whole is not None
            replaced = next(
                e.time
                for e in happened
                if isinstance(e, events.ServerReplaced) and e.server == server and e.time > moment
            )
            cluster.wait_whole(_PATIENCE_S)
            found.append(
                Regained(
                    locks=job.locks,
                    shard_bytes=count_shard(spec, server),
                    rows_s=whole[0] - replaced,
                    whole_s=whole[1] - replaced,
                    killed_s=whole[1] - moment,
                    bare_s=warm_s,
                    fresh_s=fresh_s,
                    strays=find_strays(happened, pids),
                )
            )
    return found


def _is_whole(happened: Sequence[events.Event], server: int, since: float) -> bool:
    return find_whole(happened, server, since) is not None


def wait_until(is_true: Callable[[], bool], *, patience_s: float = _PATIENCE_S) -> None:
    """Wait for something that will happen.

    Raises:
        UnavailableError: it did not.
    """
    ends_at = time.monotonic() + patience_s
    while not is_true():
        if time.monotonic() > ends_at:
            raise UnavailableError("a cluster did not come back in time", waited_s=patience_s)
        time.sleep(_TICK_S)
