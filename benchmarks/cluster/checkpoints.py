"""What a failure costs where a cluster is saved from time to time: ECRec's figure 12, scaled.

    nothing is coded; a full checkpoint -> SIGKILL to a server -> everybody loads it again
    time lost = restore + what was trained since the checkpoint, which must be trained again

Saving and loading are measured with nobody training and with warm spares: as fast as they get. A
model of ours is saved in seconds, so intervals of 30 and 60 minutes are scaled: they are as many
times longer than a save as they are in the paper, whose saves follow from its overheads (section
5.2: checkpoints pause training, so their share of the time is the overhead).

Not here: what a failure costs with parities (kills.py).
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.cluster.shard import wait_until
from benchmarks.cluster.trainer import Job, find_strays, running
from benchmarks.timing import seconds_of
from holdfast import events
from holdfast.cluster.checkpoints import ClusterCheckpointer

# The paper's overheads of checkpoints every 30 and 60 minutes: on its largest model as told, on
# its smallest 7.2 and 7 times less. A save takes that share of an interval.
OVERHEADS = {
    "Criteo-Original, 220 GB": {30: 0.65 / 7.2, 60: 0.31 / 7.0},
    "Criteo-8S, 1,760 GB": {30: 0.65, 60: 0.31},
}


@dataclass(frozen=True, slots=True)
class Saved:
    """Medians of full checkpoints and of going back to them."""

    bytes: int
    save_s: float
    restore_s: float
    """From when the loss is seen until every server has its rows; processes were there."""
    killed_s: float
    """The same from the kill."""
    times: int
    strays: tuple[str, ...] = ()
    """How processes were lost besides."""


def save_and_restore(job: Job, folder: Path, *, times: int) -> Saved:
    """Save all rows, kill a server, wait until everybody has loaded them; some times."""
    happened: list[events.Event] = []
    saves, kills = [], []
    pids: list[int] = []
    with (
        tempfile.TemporaryDirectory(prefix="bench-saved-", dir=folder) as scratch,
        running(
            job, Path(scratch), spares=job.servers, log=events.EventLog([happened.append])
        ) as cluster,
        ClusterCheckpointer(
            cluster, Path(scratch) / "run", strategy="full", codec="fp32", keep=1
        ) as layer,
    ):
        for step in range(times):
            wait_until(partial(_have_spares, happened, (step + 1) * job.servers))
            layer.save(step=2 * step)  # these processes have not saved before
            saves.append(seconds_of(partial(layer.save, step=2 * step + 1)))
            kills.append(time.time())
            pids.append(cluster.coordinator.process(step % job.servers).pid)
            os.kill(pids[-1], signal.SIGKILL)
            wait_until(partial(_have_restored, happened, step + 1))
            cluster.wait_whole()
        strays = find_strays(happened, pids)
    restored = _restored(happened)
    return Saved(
        bytes=max(event.bytes for event in happened if isinstance(event, events.SaveDurable)),
        save_s=statistics.median(saves),
        restore_s=statistics.median(event.seconds for event in restored),
        killed_s=statistics.median(
            event.time - kill for event, kill in zip(restored, kills, strict=True)
        ),
        times=times,
        strays=strays,
    )


def _have_spares(happened: list[events.Event], count: int) -> bool:
    started = sum(isinstance(e, events.ServerStarted) and e.server == -1 for e in happened)
    return started >= count


def _have_restored(happened: list[events.Event], times: int) -> bool:
    return len(_restored(happened)) >= times


def _restored(happened: list[events.Event]) -> list[events.Restored]:
    return [event for event in happened if isinstance(event, events.Restored)]


@dataclass(frozen=True, slots=True)
class Interval:
    """Time between checkpoints, scaled, and what a failure then costs in seconds."""

    model: str
    minutes: int
    seconds: float
    best_s: float
    average_s: float
    worst_s: float


def plan_intervals(saved: Saved) -> tuple[Interval, ...]:
    """The paper's intervals at our size: right after a checkpoint, in the middle, right before.

    >>> one = plan_intervals(Saved(0, save_s=2.0, restore_s=1.0, killed_s=1.0, times=1))[2]
    >>> one.model, one.minutes, round(one.seconds, 2), round(one.average_s, 2)
    ('Criteo-8S, 1,760 GB', 30, 3.08, 2.54)
    """
    found = []
    for model, overheads in OVERHEADS.items():
        for minutes, overhead in overheads.items():
            seconds = saved.save_s / overhead
            costs = (saved.restore_s + part * seconds for part in (0.0, 0.5, 1.0))
            found.append(Interval(model, minutes, seconds, *costs))
    return tuple(found)
