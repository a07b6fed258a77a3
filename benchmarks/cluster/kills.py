"""Servers killed under training workers: how soon all train again, how fast they do meanwhile.

    calm -> SIGKILL -> replaced -> every worker steps -> whole -> the next spare is ready -> calm

Invariants:
- A step counts as new only if it was begun after the kill: one that was under way may have been
  done with the lost server already.
- Throughput is whole batches in a window, nothing smoothed; calm windows begin when nothing is
  missing and the next spare has started.

Not here: recovery without training (shard.py), what is compared (recovery.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster.trainer import ENTRY, Job, Window, count_window, find_strays, running
from holdfast import events
from holdfast.cluster.cluster import Cluster
from holdfast.cluster.leases import Leases
from holdfast.errors import UnavailableError
from holdfast.recsys.cluster_train import BatchTold, Told

_LOOK_S = 0.1
_PATIENCE_S = 600.0
_BATCHES = 1 << 30  # more than there will be: the last kill ends the run


@dataclass(frozen=True, slots=True)
class Struck:
    """One kill; seconds count from it."""

    server: int
    replaced_s: float
    stepped_s: float
    """Until every worker had finished any step."""
    begun_s: float
    """Until every worker had finished a step that it began after the kill."""
    rows_s: float
    whole_s: float
    before: Window
    during: Window

    @property
    def kept(self) -> float:
        """Throughput from the kill until whole, of that before."""
        return self.during.rate / self.before.rate

    @property
    def lost_s(self) -> float:
        """Training time lost: what the batches done meanwhile would not have taken before."""
        return max(self.replaced_s, self.during.seconds - self.during.batches / self.before.rate)


@dataclass(frozen=True, slots=True)
class Kills:
    """All kills of a run, and how processes were lost besides."""

    struck: tuple[Struck, ...]
    strays: tuple[str, ...]


def kill_servers(job: Job, folder: Path, *, kills: int, calm_s: float) -> Kills:
    """Train, and kill one server after the other, each from a calm of at least so long."""
    happened: list[events.Event] = []
    with (
        tempfile.TemporaryDirectory(prefix="bench-kills-", dir=folder) as scratch,
        running(job, Path(scratch), spares=1, log=events.EventLog([happened.append])) as cluster,
    ):
        striker = _Striker(job, cluster, happened, Path(scratch), kills=kills, calm_s=calm_s)
        with contextlib.suppress(_EnoughError):
            cluster.train(
                ENTRY,
                {"workload": job.workload.to_args(), "told": scratch},
                batches=range(_BATCHES),
                workers=job.workers,
                on_tick=striker.tick,
            )
        strays = find_strays(happened, striker.pids)  # before all are ended
    struck = tuple(
        describe_kill(
            happened, striker.told, server=server, time=moment, calm=calm, workers=job.workers
        )
        for server, moment, calm in striker.kills
    )
    return Kills(struck, strays)


class _EnoughError(Exception):
    """All kills are over: there is nothing more to train for."""


class _Striker:
    """Kills when all is calm, and ends the training when the last kill is over."""

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        happened: Sequence[events.Event],
        folder: Path,
        *,
        kills: int,
        calm_s: float,
    ) -> None:
        self.told: list[BatchTold] = []
        self.kills: list[tuple[int, float, float]] = []  # server, moment, calm since
        self.pids: list[int] = []
        self._job, self._cluster, self._happened = job, cluster, happened
        self._reader = Told(folder)
        self._wanted, self._calm_s = kills, calm_s
        self._calm_since: float | None = None
        self._looked_at = 0.0
        self._ends_at = time.monotonic() + _PATIENCE_S

    def tick(self, _: Leases) -> None:
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        self.told += self._reader.read()
        if now > self._ends_at:
            raise UnavailableError("a kill was not over in time", kills=len(self.kills))
        if not self._is_calm():
            self._calm_since = None
            return
        if self._calm_since is None:
            self._calm_since = time.time()
        if len(self.kills) == self._wanted:
            raise _EnoughError
        if time.time() - self._calm_since >= self._calm_s:
            self._strike(self._calm_since)

    def _strike(self, calm: float) -> None:
        # Every other one: neighbours hold rows of the same stripes, and so does everybody.
        server = (1 + 2 * len(self.kills)) % self._job.servers
        pid = self._cluster.coordinator.process(server).pid
        self.pids.append(pid)
        self.kills.append((server, time.time(), calm))
        self._calm_since = None
        self._ends_at = time.monotonic() + _PATIENCE_S
        os.kill(pid, signal.SIGKILL)

    def _is_calm(self) -> bool:
        """All workers have trained (anew), nothing is missing, the next spare has started."""
        since = self.kills[-1][1] if self.kills else 0.0
        steps = find_steps(self.told, since, workers=self._job.workers)
        is_next = len(self.kills) < self._wanted
        if steps is None or (is_next and count_spares(self._happened) < 1):
            return False
        return not self.kills or find_whole(self._happened, self.kills[-1][0], since) is not None


# Pure.


def count_spares(happened: Sequence[events.Event]) -> int:
    """Spares that have started and were not used."""
    started = sum(isinstance(e, events.ServerStarted) and e.server == -1 for e in happened)
    gone = sum(isinstance(e, events.ServerLost) and e.server == -1 for e in happened)
    return started - gone - sum(isinstance(e, events.ServerReplaced) for e in happened)


def find_whole(
    happened: Sequence[events.Event], server: int, since: float
) -> tuple[float, float] | None:
    """When a server lost then had its rows, and its parities too; None: not yet."""
    found: dict[str, float] = {}
    for event in happened:
        if not isinstance(event, events.ServerRecovered):
            continue
        if event.server == server and event.time > since:
            found.setdefault(event.what, event.time)
    if len(found) < 2:
        return None
    return found["rows"], max(found.values())


def find_steps(
    told: Sequence[BatchTold], since: float, *, workers: int
) -> tuple[float, float] | None:
    """When the last of the workers had finished a step after ``since``, and one that it began
    after ``since``; None: not yet."""
    firsts: dict[int, float] = {}
    seconds: dict[int, float] = {}
    for each in sorted(told, key=lambda each: each.time):
        if each.time <= since:
            continue
        if each.worker not in firsts:
            firsts[each.worker] = each.time
        else:
            seconds.setdefault(each.worker, each.time)
    if len(seconds) < workers:
        return None
    return max(firsts.values()), max(seconds.values())


def describe_kill(
    happened: Sequence[events.Event],
    told: Sequence[BatchTold],
    *,
    server: int,
    time: float,
    calm: float,
    workers: int,
) -> Struck:
    """What came of a kill that is over; it was calm since ``calm``."""
    whole = find_whole(happened, server, time)
    steps = find_steps(told, time, workers=workers)
    replaced = next(
        e.time
        for e in happened
        if isinstance(e, events.ServerReplaced) and e.server == server and e.time > time
    )
    assert whole is not None and steps is not None
    times = [each.time for each in told]
    return Struck(
        server=server,
        replaced_s=replaced - time,
        stepped_s=steps[0] - time,
        begun_s=steps[1] - time,
        rows_s=whole[0] - time,
        whole_s=whole[1] - time,
        before=count_window(times, calm, time),
        # A recovery that is over before anybody has trained again would have no throughput.
        during=count_window(times, time, max(whole[1], steps[0])),
    )
