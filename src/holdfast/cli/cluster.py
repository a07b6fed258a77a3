"""``holdfast train --workers``: train on a cluster of processes, kill servers, tell what it cost.

    options -> ClusterJob -> servers and workers -> kills when their share of batches is done
    -> whole again -> audit, AUC -> the same without kills, to compare -> summary

Invariants:
- No process outlives the command, however it ends.
- The live view and the summary come from events, and from what workers said of their batches.
- A server is hit by a signal to its process, as by an operator: nothing in it knows beforehand.

Not here: the options (train.py), what is trained (recsys/clustertrain.py), what is told (report/).
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from holdfast.cli.output import show, stderr
from holdfast.errors import InvalidRequestError

if TYPE_CHECKING:
    from rich.console import Console

    from holdfast import events
    from holdfast.cluster.cluster import Cluster
    from holdfast.cluster.leases import Leases
    from holdfast.recsys.clustertrain import Layout, Workload
    from holdfast.report.cluster import ClusterRun

NONE, ECRM, ECREC = "none", "ecrm", "ecrec"
STRATEGIES = (NONE, ECRM, ECREC)
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}

_TELL_S = 0.1
_RATE_S = 0.5  # the live view's rate is over so long
_WHOLE_S = 600.0


@dataclass(frozen=True, slots=True)
class Strike:
    """A signal to be sent to a server when a share of the batches is done."""

    server: int
    fraction: float
    signal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJob:
    """One training on a cluster."""

    strategy: str
    workload: Workload
    layout: Layout
    workers: int
    batches: int
    strikes: tuple[Strike, ...] = ()
    is_audited: bool = False
    is_compared: bool = False
    is_patient: bool = False
    """Whether a kill waits until the one before is recovered from."""
    spares: int = 1
    silence_s: float = 1.0
    """A server silent for so long is taken for dead; 0: only deaths are seen."""
    events_file: Path | None = None
    picture: Path | None = None

    @property
    def two_phase(self) -> bool:
        """Whether pushes are committed in two phases."""
        return self.strategy == ECREC


def parse_strikes(given: Sequence[str], servers: int, by: str) -> tuple[Strike, ...]:
    """Which servers are hit, and when.

    >>> parse_strikes(["1@0.33"], 5, "SIGKILL")
    (Strike(server=1, fraction=0.33, signal='SIGKILL'),)

    Raises:
        InvalidRequestError: not a server and a share, or no such server.
    """
    found = []
    for item in given:
        server, _, share = item.partition("@")
        try:
            strike = Strike(int(server), float(share), by)
        except ValueError:
            raise InvalidRequestError(
                "not a server and a share of the batches",
                kill=item,
                todo="write it like --kill 1@0.33",
            ) from None
        if not 0 < strike.fraction < 1:
            raise InvalidRequestError(
                "a kill comes between the first batch and the last",
                kill=item,
                todo="give a share between 0 and 1, like 1@0.33",
            )
        if not 0 <= strike.server < servers:
            raise InvalidRequestError("no such server", kill=item, servers=servers,
                                      todo=f"servers are 0 to {servers - 1}")  # fmt: skip
        found.append(strike)
    return tuple(found)


def choose_layout(
    strategy: str,
    *,
    servers: int,
    data: int | None,
    parity: int | None,
    code: str | None,
    optimizer: str,
) -> Layout:
    """How rows lie on servers, for a strategy: what was not chosen is chosen here.

    Raises:
        InvalidRequestError: the choices do not go together.
    """
    from holdfast.recsys.clustertrain import Layout

    if strategy not in STRATEGIES:
        raise InvalidRequestError(
            "this strategy is not one of a cluster",
            strategy=strategy,
            todo=f"with --workers use {', '.join(STRATEGIES)}",
        )
    optimizer = "adam" if optimizer == "sparse-adam" else optimizer
    if strategy == NONE:
        if parity or code:
            raise InvalidRequestError(
                "nothing is coded by strategy 'none'", parity=parity, code=code
            )
        return Layout(servers=servers, data=data or servers, parity=0, optimizer=optimizer)
    if servers < 2:
        raise InvalidRequestError(
            "one server has no other that could hold its parities",
            servers=servers,
            todo="have at least two, or use --strategy none",
        )
    parity = 1 if parity is None else parity
    if parity < 1:
        raise InvalidRequestError(
            "a coded stripe needs a parity row",
            parity=parity,
            todo="give --parity 1 or more, or use --strategy none",
        )
    data = max(1, min(4, servers - parity)) if data is None else data
    return Layout(
        servers=servers,
        data=data,
        parity=parity,
        code=code,
        optimizer=optimizer,
        replicate_networks=strategy == ECREC,
    )


def run_cluster_job(job: ClusterJob, *, is_json: bool) -> None:
    """Train, tell, and leave with 1 if the audit found something wrong."""
    console = stderr()
    with terminable():
        story = train_on_cluster(job, console)
    show(story.to_dict(), lambda width: story.render(), is_json=is_json)
    if not story.is_sound:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class ClusterStory:
    """A run, the same without failures if that was asked for, and what goes with them."""

    run: ClusterRun
    calm: ClusterRun | None
    best_auc: float | None
    picture: Path | None
    seconds: float

    @property
    def is_sound(self) -> bool:
        """Whether no audit found anything wrong."""
        audits = [run.audit for run in (self.run, self.calm) if run is not None]
        return all(audit is None or audit.is_sound for audit in audits)

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            **self.run.to_dict(),
            "without_failures": None if self.calm is None else self.calm.to_dict(),
            "best_auc": self.best_auc,
            "picture": None if self.picture is None else str(self.picture),
            "sound": self.is_sound,
            "seconds_in_all": self.seconds,
        }

    def render(self, title: str = "Training on a cluster") -> Any:
        """For people."""
        from holdfast.report import cluster as report

        return report.render(
            self.run,
            calm=self.calm,
            best_auc=self.best_auc,
            picture=self.picture,
            title=f"{title}, {self.seconds:.0f} s",
        )


def train_on_cluster(job: ClusterJob, console: Console) -> ClusterStory:
    """The whole job: with its kills, and without them if that is asked for."""
    from holdfast import events
    from holdfast.recsys.clustertrain import best_auc
    from holdfast.report.clusterpicture import draw_cluster

    began = time.perf_counter()
    sinks = [] if job.events_file is None else [events.json_lines(job.events_file)]
    run, happened = _run_once(job, console, sinks)
    calm = None
    if job.is_compared:
        console.print("for comparison: the same training, nothing killed ...", soft_wrap=True)
        calm, _ = _run_once(replace(job, strikes=()), console, [])
    picture = job.picture
    if picture is not None and not draw_cluster(run, happened, picture):
        console.print("no picture: matplotlib is missing (pip install 'holdfast[plots]')")
        picture = None
    return ClusterStory(run, calm, best_auc(job.workload), picture, time.perf_counter() - began)


def _run_once(
    job: ClusterJob, console: Console, sinks: Sequence[events.Sink]
) -> tuple[ClusterRun, list[events.Event]]:
    from holdfast import events
    from holdfast.cluster.cluster import Cluster
    from holdfast.cluster.coordinator import Settings
    from holdfast.cluster.engine import LocalEngine
    from holdfast.cluster.worker import Session
    from holdfast.recsys import clustertrain
    from holdfast.report import cluster as report

    spec = clustertrain.make_cluster_spec(job.workload, job.layout)
    rows_of = {
        server: sum(len(table.placement.rows_of(server, table.rows)) for table in spec.tables)
        for server in range(spec.servers)
    }
    happened: list[events.Event] = []
    cpu_before = clustertrain.cpu_seconds()
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-") as folder,
        _watching(console, job, rows_of) as watch,
    ):
        cluster = Cluster(
            spec,
            engine=LocalEngine(logs=Path(folder) / "logs"),
            settings=Settings(
                spares=job.spares if job.layout.parity else 0,
                two_phase=job.two_phase,
                pulse_s=job.silence_s,
            ),
            log=events.EventLog([happened.append, *sinks, watch]),
        )
        with cluster:
            driver = Session(cluster.connect())
            clustertrain.start_networks(job.workload, driver)
            running = _Running(job, cluster, Path(folder))
            cluster.train(
                clustertrain.ENTRY,
                {"workload": job.workload.to_args(), "told": folder},
                batches=range(job.batches),
                workers=job.workers,
                on_tick=running.tick,
            )
            running.finish()
            cluster.wait_whole(_WHOLE_S)
            audit = cluster.audit() if job.is_audited else None
            auc = clustertrain.evaluate_cluster(job.workload, driver)
            server_cpu_s = sum(float(each["cpu_s"]) for each in cluster.stats())
            driver.close()
    layout, workload = job.layout, job.workload
    setup = report.Setup(
        strategy=job.strategy,
        servers=layout.servers,
        workers=job.workers,
        data=layout.data,
        parity=layout.parity,
        code=layout.code_for(layout.parity),
        two_phase=job.two_phase,
        rows=workload.rows,
        batches=job.batches,
        batch_size=workload.batch_size,
    )
    run = report.summarize(
        setup,
        happened,
        kills=running.kills,
        told=running.told,
        rows_of=rows_of,
        auc=auc,
        audit=None if audit is None else report.Checked(
            audit.stripes, audit.parities, audit.wrong, audit.deviation_max
        ),
        server_cpu_s=server_cpu_s,
        cpu_s=clustertrain.cpu_seconds() - cpu_before,
    )  # fmt: skip
    return run, happened


class _Running:
    """What the driver does while workers train: tells how far they are, and kills servers."""

    def __init__(self, job: ClusterJob, cluster: Cluster, folder: Path) -> None:
        from holdfast.recsys.clustertrain import Told
        from holdfast.report.cluster import Kill
        from holdfast.report.cluster import Told as BatchTold

        self._job, self._cluster = job, cluster
        self._strikes = sorted(job.strikes, key=lambda strike: strike.fraction)
        self._reader = Told(folder)
        self._points: list[tuple[float, int]] = []
        self._started = self._told_at = 0.0
        self._loss: float | None = None
        self.kills: list[Kill] = []
        self.told: list[BatchTold] = []

    def tick(self, leases: Leases) -> None:
        """Look at how far training is; called many times a second."""
        while self._is_due(leases.finished):
            self._strike(self._strikes.pop(0), leases.finished)
        now = time.monotonic()
        if now - self._told_at >= _TELL_S:
            self._tell(now, leases.finished)

    def _is_due(self, batches: int) -> bool:
        if not self._strikes or batches < self._strikes[0].fraction * self._job.batches:
            return False
        return not self._job.is_patient or self._is_whole(len(self.kills))

    def _is_whole(self, kills: int) -> bool:
        """Whether all kills so far were noticed, and the cluster lacks nothing any more."""
        view = self._cluster.coordinator.view
        return view.epoch > kills and not view.lacking

    def finish(self) -> None:
        """All batches are done."""
        self._tell(time.monotonic(), self._job.batches)
        if self._strikes and not self._job.is_patient:  # ended between two looks
            raise InvalidRequestError(
                "training was over before a server could be killed",
                batches=self._job.batches,
                todo="train more batches: --steps",
            )

    def _strike(self, strike: Strike, batches: int) -> None:
        from holdfast.report.cluster import Kill

        pid = self._cluster.coordinator.process(strike.server).pid
        self.kills.append(Kill(strike.server, strike.signal, time.time(), batches))
        try:
            os.kill(pid, SIGNALS[strike.signal])
        except ProcessLookupError:
            raise InvalidRequestError(
                "the server to be killed is being replaced already",
                server=strike.server,
                todo="leave more batches between two kills of one server",
            ) from None

    def _tell(self, now: float, batches: int) -> None:
        from holdfast import events
        from holdfast.report.cluster import Told as BatchTold

        for each in self._reader.read():
            self.told.append(
                BatchTold(each.worker, each.time, each.loss, each.cpu_s, each.pushes_lost)
            )
        self._started = self._started or now
        self._told_at = now
        self._points = [p for p in self._points if now - p[0] <= _RATE_S] + [(now, batches)]
        (since, before), size = self._points[0], self._job.workload.batch_size
        recent = [each.loss for each in self.told[-10:]]
        self._cluster.log.emit(
            events.ClusterProgress(
                batches=batches,
                batches_total=self._job.batches,
                samples=batches * size,
                seconds=now - self._started,
                samples_per_s=(batches - before) * size / (now - since) if now > since else 0.0,
                loss=sum(recent) / len(recent) if recent else None,
            )
        )


@contextmanager
def _watching(
    console: Console, job: ClusterJob, rows_of: dict[int, int]
) -> Iterator[Callable[[events.Event], None]]:
    """A sink that shows a cluster while the block runs: live on a terminal, else in lines."""
    from rich.live import Live as LiveDisplay
    from rich.text import Text

    from holdfast.report import clusterlive

    def say(event: events.Event) -> None:
        text = clusterlive.line(event)
        if text is not None:
            console.print(Text(text, style="dim"), soft_wrap=True)

    console.print(
        f"starting {job.layout.servers} servers and {job.workers} workers ({job.strategy}) ...",
        soft_wrap=True,
    )
    if not console.is_terminal:
        yield say
        return
    live = clusterlive.Live(batches=job.batches, rows_of=rows_of)

    def watch(event: events.Event) -> None:
        live(event)
        say(event)

    with LiveDisplay(
        console=console, get_renderable=live.render, refresh_per_second=8, transient=True
    ):
        yield watch


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that all processes are ended."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
