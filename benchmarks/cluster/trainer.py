"""One training on a cluster of processes, measured from outside: time, CPU, memory, bytes sent.

    Job -> servers, workers -> what workers told, counters of the kernel -> Trained

Invariants:
- Times are from what workers told of their batches, while all of them trained: no start-up, and
  none of the job's first batches, in which memory is touched for the first time.
- Bytes are those of arrays in messages, both ways, as servers count them when they come and go.
  Memory is the processes' largest resident size. Nothing is computed from what should be.
- The same job gives the same tables, networks and batches for every strategy.
- A training during which a process was lost unasked gives no numbers: it is repeated, and told.

Not here: what is compared (overhead.py), kills (kills.py).
"""

from __future__ import annotations

import contextlib
import statistics
import struct
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast import events
from holdfast.cluster.cluster import Cluster
from holdfast.cluster.coordinator import Settings
from holdfast.cluster.dense import NAME as DENSE
from holdfast.cluster.engine import LocalEngine
from holdfast.cluster.leases import Leases
from holdfast.cluster.spec import GRADIENT, ClusterSpec
from holdfast.cluster.worker import Session
from holdfast.errors import DataLossError, InvalidRequestError, UnavailableError
from holdfast.recsys import cluster_train
from holdfast.recsys.cluster_train import BatchTold, Layout, Told, Workload

NONE, ECRM, ECREC = "none", "ecrm", "ecrec"
STRATEGIES = (NONE, ECRM, ECREC)
GRADIENTS, SUMS = "ecrm, gradients", "ecrm, sums"
COMPARED = (GRADIENTS, SUMS)
"""As ECRM with the papers' float sum in the place of XOR; parity is told gradients, for which it
keeps the optimizer state of rows, or differences. Shown beside the others, not for use."""
CODED = (ECRM, ECREC, *COMPARED)
ENTRY = "holdfast.recsys.cluster_train:train"

_PATIENCE_S = 60.0  # for a worker's last words
_TICK_S = 0.02
_ATTEMPTS = 3
_TCP_COUNTS = struct.Struct("=120xQQ")  # tcp_info's bytes acked and received, since Linux 4.2
_TAIL = 0.1  # of the batches: their losses are averaged


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained, by whom, and how it is kept safe."""

    strategy: str
    workload: Workload
    servers: int = 5
    workers: int = 2
    batches: int = 200
    warm_batches: int = 0
    """Trained before them, and in no number but those of bytes."""
    locks: int = 10
    silence_s: float = 1.0
    """A server silent for so long is taken for dead; 0: only deaths are seen."""

    @property
    def spec(self) -> ClusterSpec:
        """The tables and networks as servers hold them: stripes over all servers, one parity."""
        is_coded = self.strategy != NONE
        layout = Layout(
            servers=self.servers,
            data=self.servers - 1 if is_coded else self.servers,
            parity=1 if is_coded else 0,
            code="sum" if self.strategy in COMPARED else None,
            replicate_networks=self.strategy == ECREC,
            locks=self.locks,
        )
        spec = cluster_train.make_cluster_spec(self.workload, layout)
        return pass_gradients(spec) if self.strategy == GRADIENTS else spec

    def settings(self, *, spares: int = 0) -> Settings:
        """How its cluster is run."""
        return Settings(spares=spares, two_phase=self.strategy == ECREC, pulse_s=self.silence_s)


def pass_gradients(spec: ClusterSpec) -> ClusterSpec:
    """The same cluster, but parity of coded tables is told gradients; networks stay as they are."""
    return replace(
        spec,
        tables=tuple(
            table if table.name == DENSE else replace(table, propagation=GRADIENT)
            for table in spec.tables
        ),
    )


@contextlib.contextmanager
def running(
    job: Job, folder: Path, *, spares: int = 0, log: events.EventLog | None = None
) -> Iterator[Cluster]:
    """A cluster with the job's first networks; what its processes say goes into ``folder``."""
    cluster = Cluster(
        job.spec,
        engine=LocalEngine(logs=folder / "logs"),
        settings=job.settings(spares=spares),
        log=log,
    )
    with cluster:
        driver = Session(cluster.connect())
        cluster_train.start_networks(job.workload, driver)
        driver.close()
        yield cluster


# In the driver.


@dataclass(frozen=True, slots=True)
class Window:
    """A span of time and the batches that were done in it."""

    start: float
    end: float
    batches: int

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.start

    @property
    def rate(self) -> float:
        """Batches a second."""
        return self.batches / self.seconds if self.seconds > 0 else 0.0


def count_window(times: Sequence[float], start: float, end: float) -> Window:
    """The batches done after ``start`` up to ``end``.

    >>> count_window([1.0, 2.0, 2.5, 4.0], 1.0, 3.0).rate
    1.0
    """
    return Window(start, end, sum(start < moment <= end for moment in times))


def find_steady(told: Sequence[BatchTold]) -> Window:
    """The time in which every worker trains: after the first batch of the last to begin, until
    the last batch of the first to end.

    Raises:
        InvalidRequestError: they did not train at the same time.
    """
    by_worker: dict[int, list[float]] = {}
    for each in told:
        by_worker.setdefault(each.worker, []).append(each.time)
    start = max((min(times) for times in by_worker.values()), default=0.0)
    end = min((max(times) for times in by_worker.values()), default=0.0)
    window = count_window([each.time for each in told], start, end)
    if window.batches < 1:
        raise InvalidRequestError(
            "too few batches to measure: workers did not train at the same time",
            batches=len(told),
            workers=len(by_worker),
            todo="train more batches",
        )
    return window


def worker_cpu(told: Sequence[BatchTold]) -> float:
    """CPU seconds of a batch in its worker: from each worker's first word to its last."""
    by_worker: dict[int, list[float]] = {}
    for each in told:
        by_worker.setdefault(each.worker, []).append(each.cpu_s)
    batches = sum(len(used) - 1 for used in by_worker.values())
    return sum(max(used) - min(used) for used in by_worker.values()) / max(1, batches)


@dataclass(frozen=True, slots=True)
class Trained:
    """What one training cost; seconds and bytes are of one batch."""

    job: Job
    batch_s: float
    worker_cpu_s: float
    server_cpu_s: float
    worker_bytes: float
    """Between workers and servers, both ways."""
    server_bytes: float
    """Among servers."""
    memory_bytes: int | None
    """Of the servers' processes together, at most."""
    loss: float

    @property
    def cpu_s(self) -> float:
        """CPU seconds of a batch in all processes."""
        return self.worker_cpu_s + self.server_cpu_s

    @property
    def samples_per_s(self) -> float:
        """Of all workers together."""
        return self.job.workload.batch_size / self.batch_s

    @property
    def message_bytes(self) -> float:
        """All of them."""
        return self.worker_bytes + self.server_bytes


Runs = Mapping[Job, Sequence[Trained]]
"""Trainings of each job, in the order of turns."""


def same_turns(runs: Sequence[Trained], of: Sequence[Trained]) -> Sequence[Trained]:
    """Those of the runs that were made in the turns of others."""
    return runs[: len(of)]


def train_job(job: Job, folder: Path) -> Trained:
    """Train once, on a cluster of its own.

    Raises:
        UnavailableError: a process was lost, though nobody killed any.
        DataLossError: so too, and its rows with it.
    """
    happened: list[events.Event] = []
    with (
        tempfile.TemporaryDirectory(prefix="bench-cluster-", dir=folder) as scratch,
        running(job, Path(scratch), log=events.EventLog([happened.append])) as cluster,
    ):
        total = job.warm_batches + job.batches
        meter = _Meter(cluster, job.warm_batches)
        cluster.train(
            ENTRY,
            {"workload": job.workload.to_args(), "told": scratch},
            batches=range(total),
            workers=job.workers,
            on_tick=meter.tick,
        )
        server_cpu_s = meter.read(total)
        sent = [each["bytes"] for each in cluster.stats()]
        pids = [cluster.coordinator.process(server).pid for server in range(job.servers)]
        memory = [resident_max(pid) for pid in pids]
        told = Told(Path(scratch)).read()[job.warm_batches :]
        strays = find_strays(happened)
    if strays:
        raise UnavailableError("processes were lost that nobody killed", how=list(strays))
    last = told[-max(1, round(_TAIL * len(told))) :]
    window = find_steady(told)
    return Trained(
        job=job,
        batch_s=window.seconds / window.batches,
        worker_cpu_s=worker_cpu(told),
        server_cpu_s=server_cpu_s,
        worker_bytes=sum(each["workers"] for each in sent) / total,
        server_bytes=sum(each["servers"] for each in sent) / total,
        memory_bytes=_added(memory),
        loss=statistics.fmean(each.loss for each in last),
    )


def find_strays(happened: Sequence[events.Event], killed: Collection[int] = ()) -> tuple[str, ...]:
    """How processes were lost that are not among those ``killed``, which are pids."""
    return tuple(
        event.how.partition("\n")[0]
        for event in happened
        if isinstance(event, events.ServerLost | events.WorkerLost) and event.pid not in killed
    )


def train_calm(
    attempt: Callable[[], Trained], *, times: int = _ATTEMPTS
) -> tuple[Trained, tuple[str, ...]]:
    """Train until no process was lost meanwhile; and what spoilt the attempts before.

    Raises:
        UnavailableError: every attempt was spoilt.
    """
    reasons: tuple[str, ...] = ()
    for _ in range(times):
        try:
            return attempt(), reasons
        except (UnavailableError, DataLossError) as error:
            reasons += (str(error),)
    raise UnavailableError(
        "every attempt to train was spoilt",
        attempts=times,
        reasons=list(reasons),
        todo="measure on an idle machine",
    )


def _added(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


class _Meter:
    """Servers' CPU seconds of a batch, once the first batches are done."""

    def __init__(self, cluster: Cluster, warm_batches: int) -> None:
        self._cluster, self._warm_batches = cluster, warm_batches
        self._start = (0, self._cpu_s())

    def tick(self, leases: Leases) -> None:
        """Begin to count when it is time."""
        if self._start[0] < self._warm_batches <= leases.finished:
            self._start = (leases.finished, self._cpu_s())

    def read(self, batches: int) -> float:
        """When so many are done."""
        done, cpu_s = self._start
        return (self._cpu_s() - cpu_s) / (batches - done)

    def _cpu_s(self) -> float:
        return sum(float(each["cpu_s"]) for each in self._cluster.stats())


def resident_max(pid: int) -> int | None:
    """The most memory that a process had; None where the system does not say."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return 1024 * int(found[0]) if found else None
