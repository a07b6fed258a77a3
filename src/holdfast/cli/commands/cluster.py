"""``holdfast train --workers``: train on a cluster of processes, kill servers, tell what it cost.

    options -> ClusterJob -> run_once (cli/cluster_run.py) -> the same without kills -> summary

Not here: the options (cli/options.py), the run itself (cli/cluster_run.py), several strategies
one after the other (compare.py), what is told (report/).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from holdfast.cli.measuring import Measuring, metric_sinks
from holdfast.cli.output import show, stderr
from holdfast.errors import InvalidRequestError

if TYPE_CHECKING:
    from rich.console import Console

    from holdfast.recsys.cluster_train import Layout, Workload
    from holdfast.report.cluster.training import ClusterRun

NONE, ECRM, ECREC = "none", "ecrm", "ecrec"
FULL, CHECK_N_RUN, INCRCP = "full", "check-n-run", "incrcp"
PARTIAL = ("cpr", "cpr-mfu", "cpr-ssu", "cpr-scar")
"""What gives lost servers their last saved rows, and lets the others go on."""
CODED = (ECRM, ECREC)
LAYERS = (FULL, CHECK_N_RUN, INCRCP, *PARTIAL)
"""What saves checkpoints of a cluster: alone, or as the second layer of a coded one."""
STRATEGIES = (NONE, *LAYERS, *CODED)
LOCAL, RAY = "local", "ray"


@dataclass(frozen=True, slots=True)
class Strike:
    """A signal to be sent to a server when a share of the batches is done."""

    server: int
    fraction: float
    signal: str


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """Checkpoints of a cluster: how, how often, where to."""

    strategy: str
    every: int
    url: str | None = None
    """None: a temporary folder."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further ones of ``ClusterCheckpointer``."""


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Where processes run."""

    name: str = LOCAL
    address: str | None = None
    """Of a Ray cluster; None: a Ray of our own."""
    allow_remote: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJob:
    """One training on a cluster."""

    strategy: str
    workload: Workload
    layout: Layout
    workers: int
    batches: int
    strikes: tuple[Strike, ...] = ()
    layer: LayerChoice | None = None
    engine: EngineChoice = EngineChoice()
    is_audited: bool = False
    is_compared: bool = False
    is_patient: bool = False
    """Whether a kill waits until the one before is recovered from."""
    spares: int = 1
    silence_s: float = 1.0
    """A server silent for so long is taken for dead; 0: only deaths are seen."""
    flush_every_s: float | None = None
    """Between differences sent to parity; None: as clusters do."""
    events_file: Path | None = None
    measuring: Measuring = field(default_factory=Measuring)
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


def check_strategy(strategy: str) -> None:
    """Refuse what is no strategy of a cluster.

    Raises:
        InvalidRequestError: lists those there are.
    """
    if strategy not in STRATEGIES:
        raise InvalidRequestError(
            "this strategy is not one of a cluster",
            strategy=strategy,
            todo=f"with --workers use {', '.join(STRATEGIES)}",
        )


def choose_layer(
    strategy: str, second: str | None, *, every: int, url: str | None, **settings: Any
) -> LayerChoice | None:
    """The checkpoints that go with a strategy; None: there are none.

    Raises:
        InvalidRequestError: what was chosen does not go together, or was made by somebody else.
    """
    if strategy in LAYERS and second is not None:
        raise InvalidRequestError(
            "this strategy is a layer of checkpoints itself",
            strategy=strategy,
            second_layer=second,
            todo=f"a second layer goes with {' or '.join(CODED)}",
        )
    if strategy == NONE and second is not None:
        raise InvalidRequestError(
            "checkpoints alone are a strategy", todo=f"use --strategy {second}"
        )
    if second is not None and second not in LAYERS:
        raise InvalidRequestError("unknown second layer", second_layer=second, known=list(LAYERS))
    chosen = strategy if strategy in LAYERS else second
    given = {name: value for name, value in settings.items() if value is not None}
    if chosen is None:
        if url is not None or given:
            raise InvalidRequestError(
                "these options are of checkpoints, and nothing is saved",
                options=[*(["url"] if url is not None else []), *given],
                todo="give --second-layer, or a strategy that saves",
            )
        return None
    if url is not None:
        _check_new(url, settings.get("storage_options"))
    return LayerChoice(chosen, every, url, given)


def _check_new(url: str, storage_options: Mapping[str, Any] | None) -> None:
    from holdfast.checkpoint import run as runs
    from holdfast.errors import NotFoundError

    try:
        steps = runs.open(url, storage_options=storage_options).steps
    except NotFoundError:
        return
    if steps:
        raise InvalidRequestError(
            "there are checkpoints here already",
            url=url,
            last_step=steps[-1],
            todo="give another --url: a cluster's training begins at its first batch",
        )


def choose_engine(name: str | None, address: str | None, *, allow_remote: bool) -> EngineChoice:
    """Where processes run: an address is one of Ray.

    >>> choose_engine(None, "auto", allow_remote=False)
    EngineChoice(name='ray', address='auto', allow_remote=False)

    Raises:
        InvalidRequestError: an address, or other machines, for the local engine.
    """
    chosen = name or (LOCAL if address is None else RAY)
    if chosen == LOCAL and (address is not None or allow_remote):
        raise InvalidRequestError(
            "the local engine runs on this machine alone",
            address=address,
            todo="use --engine ray",
        )
    return EngineChoice(chosen, address, allow_remote)


def check_picture(path: Path | None) -> None:
    """Refuse a picture that could not be drawn, before hours of training.

    Raises:
        InvalidRequestError: matplotlib is missing, or the file's kind is unknown.
    """
    import importlib.util

    if path is None:
        return
    if path.suffix not in (".png", ".svg"):
        raise InvalidRequestError(
            "a picture is a .png or a .svg file", picture=str(path), todo="name it like that"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidRequestError(
            "a picture needs matplotlib", todo="pip install 'holdfast[plots]'"
        )


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
    from holdfast.recsys.cluster_train import Layout

    check_strategy(strategy)
    optimizer = "adam" if optimizer == "sparse-adam" else optimizer
    if strategy not in CODED:
        if parity or code:
            raise InvalidRequestError(
                "nothing is coded by this strategy",
                strategy=strategy,
                parity=parity,
                code=code,
                todo=f"leave --parity and --code out, or use {' or '.join(CODED)}",
            )
        return Layout(
            servers=servers,
            data=data or servers,
            parity=0,
            optimizer=optimizer,
            # partial recovery is of rows; fully, networks go back with them
            hold_networks=strategy in PARTIAL,
        )
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


def choose_hot_rows(
    workload: Workload, layout: Layout, budget: int, *, batches: int, flush_every_s: float | None
) -> Layout:
    """The layout with frequent rows replicated, where that sends less; says what it should save.

    Raises:
        InvalidRequestError: nothing is coded, or not exactly.
    """
    from holdfast.cluster.members import Settings
    from holdfast.recsys.cluster_train import make_cluster_spec
    from holdfast.research import hot_rows as hotrows

    if layout.parity == 0 or layout.code == "sum" or layout.data == 1:
        raise InvalidRequestError(
            "only rows of coded stripes can be replicated instead",
            hot_rows=budget,
            todo=f"leave --hot-rows out, or use {' or '.join(CODED)} with an exact code",
        )
    counted = min(batches, hotrows.BATCHES)
    counts = hotrows.count_uses(workload, batches=counted)
    hot, choice = hotrows.find_hot(
        make_cluster_spec(workload, layout),
        counts,
        pushes=counted,
        budget_rows=budget,
        flush_every_s=Settings().flush_every_s if flush_every_s is None else flush_every_s,
    )
    stderr().print(
        f"hot rows: {len(choice.ids_H):,} replicated, to send {choice.saved:.0%} less to parity by "
        f"the uses of the first {counted} batches ({choice.reason})",
        soft_wrap=True,
    )
    return replace(layout, hot=hot)


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
        return self.run.is_sound and (self.calm is None or self.calm.is_sound)

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
        from holdfast.report.cluster import training as report

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
    from holdfast.cli.cluster_run import run_once
    from holdfast.recsys.cluster_train import best_auc
    from holdfast.report.cluster.picture import draw_cluster

    began = time.perf_counter()
    sinks = [] if job.events_file is None else [events.json_lines(job.events_file)]
    with metric_sinks(job.measuring, console) as metrics:
        ran = run_once(job, console, [*sinks, *metrics])
    if ran.error is not None:
        raise ran.error
    calm = None
    if job.is_compared:
        console.print("for comparison: the same training, nothing killed ...", soft_wrap=True)
        layer = None if job.layer is None else replace(job.layer, url=None)
        again = run_once(replace(job, strikes=(), layer=layer), console, [])
        if again.error is not None:
            raise again.error
        calm = again.run
    picture = job.picture
    if picture is not None and not draw_cluster(ran.run, ran.happened, picture):
        console.print("no picture: matplotlib is missing (pip install 'holdfast[plots]')")
        picture = None
    return ClusterStory(ran.run, calm, best_auc(job.workload), picture, time.perf_counter() - began)


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
