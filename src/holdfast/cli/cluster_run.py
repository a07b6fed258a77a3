"""One training on a cluster: processes, kills when their share of batches is done, what came of it.

    ClusterJob -> servers and workers -> kills -> whole again -> audit, AUC -> events -> ClusterRun

Invariants:
- No process outlives the run, however it ends.
- The live view and the summary come from events alone.
- A server is hit by a signal to its process, as by an operator: nothing in it knows beforehand.

Not here: which job (cli/commands/cluster.py), what is trained (recsys/cluster_train.py), what is
told (report/).
"""

from __future__ import annotations

import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live as LiveDisplay

from holdfast import events
from holdfast.checkpoint.planning.codecs import plan_codec
from holdfast.checkpoint.selecting import priority
from holdfast.checkpoint.strategy import as_strategy
from holdfast.cli.commands.cluster import NONE, RAY, ClusterJob, LayerChoice, Strike
from holdfast.cluster import store
from holdfast.cluster.checkpoints import ClusterCheckpointer
from holdfast.cluster.cluster import Cluster
from holdfast.cluster.coordinator import Settings
from holdfast.cluster.engine import Engine, LocalEngine, Process
from holdfast.cluster.leases import Leases
from holdfast.cluster.spec import ClusterSpec
from holdfast.cluster.warm import warm_kernels
from holdfast.cluster.worker import Session
from holdfast.errors import HoldfastError, InvalidRequestError
from holdfast.kernels import compiling
from holdfast.recsys import cluster_train
from holdfast.report.cluster import live as clusterlive
from holdfast.report.cluster.training import ClusterRun, summarize
from holdfast.report.layout import literal

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}

_TELL_S = 0.1
_RATE_S = 0.5  # the live view's rate is over so long
_WHOLE_S = 600.0
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Ran:
    """A run, what happened in it, and what ended it before its end."""

    run: ClusterRun
    happened: list[events.Event]
    error: HoldfastError | None


def run_once(job: ClusterJob, console: Console, sinks: Sequence[events.Sink]) -> Ran:
    """Train once, with the job's kills. What a run cannot survive is told, not raised.

    Raises:
        InvalidRequestError: the job cannot be.
    """
    spec = cluster_train.make_cluster_spec(job.workload, job.layout)
    happened: list[events.Event] = []
    usage = _Usage(is_known=job.engine.name != RAY)
    error: HoldfastError | None = None
    auc = None
    started = _started(job, spec)
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-") as folder,
        _watching(console, job, started.rows_of) as watch,
    ):
        log = events.EventLog([happened.append, usage.notice, *sinks, watch])
        log.emit(started)
        try:
            auc = _train(job, spec, Path(folder), log, usage)
        except InvalidRequestError:
            raise
        except HoldfastError as caught:
            error = caught
        log.emit(
            events.ClusterEnded(
                auc=auc,
                train_cpu_s=usage.train_s,
                cpu_s=usage.total_s(),
                error=None if error is None else str(error),
            )
        )
    return Ran(summarize(happened), happened, error)


def _started(job: ClusterJob, spec: ClusterSpec) -> events.ClusterStarted:
    layout, workload = job.layout, job.workload
    tables = spec.tables
    return events.ClusterStarted(
        strategy=job.strategy,
        second_layer=None if job.layer is None else job.layer.strategy,
        every=None if job.layer is None else job.layer.every,
        engine=job.engine.name,
        servers=layout.servers,
        workers=job.workers,
        data=layout.data,
        parity=layout.parity,
        code=layout.code_for(layout.parity),
        two_phase=job.two_phase,
        rows=workload.rows,
        batches=job.batches,
        batch_size=workload.batch_size,
        seed=workload.seed,
        rows_of=tuple(
            sum(len(table.placement.rows_of(server, table.rows)) for table in tables)
            for server in range(spec.servers)
        ),
        row_bytes=sum(t.rows * t.width for t in tables) * _FLOAT_BYTES,
        parity_bytes=sum(a.stripes * a.placement.parity * a.width for a in spec.arenas)
        * _FLOAT_BYTES,
    )


def _train(
    job: ClusterJob, spec: ClusterSpec, folder: Path, log: events.EventLog, usage: _Usage
) -> float | None:
    """All batches, the audit, and the AUC."""
    _warm(job.layer, log)
    engine = _make_engine(job, folder / "logs")
    cluster = Cluster(
        spec,
        engine=engine,
        settings=Settings(
            spares=0 if job.strategy == NONE else job.spares,
            two_phase=job.two_phase,
            pulse_s=job.silence_s,
            **({} if job.flush_every_s is None else {"flush_every_s": job.flush_every_s}),
        ),
        log=log,
    )
    with cluster:
        driver = Session(cluster.connect())
        cluster_train.start_networks(job.workload, driver)
        running = _Running(job, cluster, engine, folder, usage)
        with _second_layer(job, cluster, folder) as layer:
            if layer is not None:
                layer.save(step=0)
            cluster.train(
                cluster_train.ENTRY,
                {"workload": job.workload.to_args(), "told": str(folder)},
                batches=range(job.batches),
                workers=job.workers,
                on_begin=running.begin,
                on_tick=running.tick,
            )
            running.finish()
            if layer is not None:
                layer.wait()
        cluster.wait_whole(_WHOLE_S)
        running.count()
        if job.is_audited:
            found = cluster.audit()
            log.emit(
                events.ClusterAudited(
                    stripes=found.stripes,
                    parities=found.parities,
                    wrong=found.wrong,
                    deviation_max=found.deviation_max,
                )
            )
        auc = cluster_train.evaluate_cluster(job.workload, driver)
        driver.close()
    return auc


def _make_engine(job: ClusterJob, logs: Path) -> Engine:
    choice = job.engine
    if choice.name != RAY:
        return LocalEngine(logs=logs)
    from holdfast.cluster.rayengine import RayEngine

    if choice.allow_remote and job.layer is not None and job.layer.url is None:
        raise InvalidRequestError(
            "servers on other machines cannot save to a temporary folder of this one",
            todo="give --url, one that every machine reaches",
        )
    return RayEngine(choice.address, allow_remote=choice.allow_remote, logs=logs)


def _warm(layer: LayerChoice | None, log: events.EventLog) -> None:
    """Compile what servers need, before they are started or asked to save in a hurry.

    Here, where it is seen how far that is; they load it. If no folder can keep it they compile.
    """
    if compiling.compiled().folder is not None:
        seconds = warm_kernels()
        if layer is not None:
            seconds += _warm_layer(layer)
        log.emit(events.KernelsCompiled(seconds=seconds))


def _warm_layer(choice: LayerChoice) -> float:
    """What servers save with; the seconds it took."""
    chosen, settings = as_strategy(choice.strategy), choice.settings
    plan = plan_codec(
        settings.get("codec", chosen.codec),
        settings.get("state_codec"),
        expected_restores=settings.get("expected_restores"),
        restores=0,
    )
    state = [plan.for_column(1, is_non_negative=is_positive) for is_positive in (False, True)]
    steps: list[Callable[[], object]] = [
        lambda: store.warm({"": [plan.for_column(0, is_non_negative=False), *state]})
    ]
    if chosen.priority is not None:
        steps.append(priority.warm)
    return compiling.run_all(steps)


@contextmanager
def _second_layer(
    job: ClusterJob, cluster: Cluster, folder: Path
) -> Iterator[ClusterCheckpointer | None]:
    choice = job.layer
    if choice is None:
        yield None
        return
    url = str(folder / "checkpoints") if choice.url is None else choice.url
    with ClusterCheckpointer(
        cluster, url, strategy=choice.strategy, every_batches=choice.every, **choice.settings
    ) as layer:
        yield layer


class _Running:
    """What the driver does while workers train: tells how far they are, and kills servers."""

    def __init__(
        self, job: ClusterJob, cluster: Cluster, engine: Engine, folder: Path, usage: _Usage
    ) -> None:
        self._job, self._cluster, self._engine, self._usage = job, cluster, engine, usage
        self._strikes = sorted(job.strikes, key=lambda strike: strike.fraction)
        self._reader = cluster_train.Told(folder)
        self._points: list[tuple[float, int]] = []
        self._losses: list[float] = []
        self._started = self._told_at = 0.0
        self._struck = 0

    def begin(self, leases: Leases) -> None:
        """Hold batches back for the first strike.

        The first worker may train them all while the last one is still starting.
        """
        leases.hold_after(self._batches_until_strike())

    def tick(self, leases: Leases) -> None:
        """Look at how far training is; called many times a second."""
        if self._is_due(leases.finished):
            self.count()  # what the processes to be lost did
        while self._is_due(leases.finished):
            self._strike(self._strikes.pop(0), leases.finished)
        leases.hold_after(self._batches_until_strike())
        now = time.monotonic()
        if now - self._told_at >= _TELL_S:
            self._tell(now, leases.finished)

    def _is_due(self, batches: int) -> bool:
        if not self._strikes or batches < self._strikes[0].fraction * self._job.batches:
            return False
        return not self._job.is_patient or self._is_whole(self._struck)

    def _batches_until_strike(self) -> int | None:
        """How many batches may begin before the next strike; None: all.

        Without a bound a driver that the machine keeps waiting would strike too late, or never.
        """
        if not self._strikes or self._job.is_patient:
            return None
        due = math.ceil(self._strikes[0].fraction * self._job.batches)
        in_flight = 2 * self._job.workers  # the strike meets workers that train
        return max(due, min(due + in_flight, self._job.batches - 1))

    def _is_whole(self, kills: int) -> bool:
        """Whether all kills so far were noticed, and the cluster lacks nothing any more."""
        view = self._cluster.coordinator.view
        return view.epoch > kills and not view.lacking

    def finish(self) -> None:
        """All batches are done."""
        self._usage.end_training()
        self._tell(time.monotonic(), self._job.batches)
        if self._strikes and not self._job.is_patient:  # ended between two looks
            raise InvalidRequestError(
                "training was over before a server could be killed",
                batches=self._job.batches,
                todo="train more batches: --steps",
            )

    def count(self) -> None:
        """Tell what every server did so far; not while one is lost."""
        coordinator = self._cluster.coordinator
        if not coordinator.is_complete:
            return
        try:
            counted = self._cluster.stats()
        except HoldfastError:
            return  # one was lost this moment: its last count holds
        for each in counted:
            self._cluster.log.emit(_counted(each, coordinator.process(int(each["server"]))))

    def _strike(self, strike: Strike, batches: int) -> None:
        process = self._cluster.coordinator.process(strike.server)
        host = getattr(self._engine, "host", None)
        if host is not None and process.address.rpartition(":")[0] != host:
            raise InvalidRequestError(
                "a server on another machine cannot be killed from here",
                server=strike.server,
                address=process.address,
                todo="leave --kill and --stop out, or run it on one machine",
            )
        self._struck += 1
        self._cluster.log.emit(
            events.ServerStruck(
                server=strike.server, pid=process.pid, signal=strike.signal, batches=batches
            )
        )
        try:
            os.kill(process.pid, SIGNALS[strike.signal])
        except ProcessLookupError:
            raise InvalidRequestError(
                "the server to be killed is being replaced already",
                server=strike.server,
                todo="leave more batches between two kills of one server",
            ) from None

    def _tell(self, now: float, batches: int) -> None:
        log = self._cluster.log
        for each in self._reader.read():
            self._losses = [*self._losses[-9:], each.loss]
            log.emit(
                events.BatchTrained(
                    worker=each.worker,
                    batch=each.batch,
                    loss=each.loss,
                    at=each.time,
                    cpu_s=each.cpu_s,
                    pushes_lost=each.pushes_lost,
                    bytes_sent=each.bytes_sent,
                )
            )
        if batches:
            self._usage.begin_training()
        self._started = self._started or now
        self._told_at = now
        self._points = [p for p in self._points if now - p[0] <= _RATE_S] + [(now, batches)]
        (since, before), size = self._points[0], self._job.workload.batch_size
        rate = (batches - before) * size / (now - since) if now > since else 0.0
        log.emit(
            events.ClusterProgress(
                batches=batches,
                batches_total=self._job.batches,
                samples=batches * size,
                seconds=now - self._started,
                samples_per_s=max(0.0, rate),  # going back to a checkpoint is no training
                loss=sum(self._losses) / len(self._losses) if self._losses else None,
            )
        )


def _counted(stats: Mapping[str, Any], process: Process) -> events.ServerCounted:
    """What a server says of itself; of bytes what it knows."""
    counts, sizes = stats["counts"], stats.get("bytes", {})
    return events.ServerCounted(
        server=int(stats["server"]),
        address=process.address,
        rows_updated=int(counts.get("rows_updated", 0)),
        rows_folded=int(counts.get("rows_folded", 0)),
        differences=int(counts.get("differences", 0)),
        cpu_s=float(stats["cpu_s"]),
        resident_bytes=resident_bytes(process.pid),
        queue_bytes=sizes.get("queues"),
        worker_bytes=sizes.get("workers"),
        server_bytes=sizes.get("servers"),
        difference_bytes=int(counts.get("difference_bytes", 0)),
        gradient_bytes=int(counts.get("gradient_bytes", 0)),
    )


def resident_bytes(pid: int) -> int | None:
    """The most memory a process of this machine ever held; None where that cannot be read."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        (found,) = (line for line in lines if line.startswith("VmHWM:"))
        return int(found.split()[1]) * 1024
    except (OSError, ValueError):
        return None


class _Usage:
    """CPU seconds of this process and its children, the living and those it has waited for."""

    def __init__(self, *, is_known: bool) -> None:
        """Not known where processes are other people's children."""
        self._is_known = is_known and Path("/proc/self/stat").exists()
        self._pids: set[int] = set()
        self._began = cluster_train.cpu_seconds()
        self._first: float | None = None
        self.train_s: float | None = None

    def notice(self, event: events.Event) -> None:
        """A sink: learns of processes."""
        if isinstance(event, events.ServerStarted | events.WorkerStarted):
            self._pids.add(event.pid)

    def begin_training(self) -> None:
        """The first batch is done."""
        if self._first is None and self._is_known:
            self._first = self._now()

    def end_training(self) -> None:
        """The last one is; if it was before the first was noticed, nothing is known."""
        if self._first is not None:
            self.train_s = self._now() - self._first

    def total_s(self) -> float | None:
        """All since the start, once no child is left."""
        return cluster_train.cpu_seconds() - self._began if self._is_known else None

    def _now(self) -> float:
        return cluster_train.cpu_seconds() + sum(map(_cpu_of, tuple(self._pids)))


def _cpu_of(pid: int) -> float:
    """What a living process used; 0 once it was waited for, and counts elsewhere."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    is_ours = int(fields[1]) == os.getpid()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if is_ours else 0.0


@contextmanager
def _watching(
    console: Console, job: ClusterJob, rows_of: Sequence[int]
) -> Iterator[Callable[[events.Event], None]]:
    """A sink that shows a cluster while the block runs: live on a terminal, else in lines."""

    def say(event: events.Event) -> None:
        if isinstance(event, events.ServerRecovered) and job.layout.parity == 0:
            return  # there was nothing to be encoded
        text = clusterlive.line(event)
        if text is not None:
            console.print(literal(text, style="dim"), soft_wrap=True)

    console.print(
        f"starting {job.layout.servers} servers and {job.workers} workers ({job.strategy}) ...",
        soft_wrap=True,
    )
    live = clusterlive.Live(
        batches=job.batches, rows_of=dict(enumerate(rows_of)), is_coded=job.layout.parity > 0
    )

    def watch(event: events.Event) -> None:
        live(event)
        say(event)

    display = LiveDisplay(
        console=console, get_renderable=live.render, refresh_per_second=8, transient=True
    )
    with display if console.is_terminal else nullcontext():
        yield watch
