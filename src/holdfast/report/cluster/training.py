"""What a training on a cluster came to: its throughput, its failures, what they cost.

    events -> ClusterRun -> JSON or a panel

Invariants:
- A run follows from its events alone: whoever has the file can tell of it what the command told.
- What is not known is None, never a guess.

Not here: losses one by one (failures.py), checkpoints (second_layer.py), servers' load
(load.py), the view while it runs (live.py), the picture (picture.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from holdfast import events
from holdfast.errors import InvalidRequestError
from holdfast.report import words
from holdfast.report.cluster.failures import Failure, Progress, find_failures
from holdfast.report.cluster.load import Load, balance_text, find_load
from holdfast.report.cluster.second_layer import Layer, find_layer, layer_lines
from holdfast.report.layout import add_numbers, make_grid, make_table

_HOW_WIDTH = 12


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """A training on a cluster."""

    setup: events.ClusterStarted
    seconds: float
    """From the first batch to the last."""
    samples: int
    loss: float | None
    auc: float | None
    failures: tuple[Failure, ...]
    workers_lost: int
    pushes_lost: int | None
    """Of a server that was lost, at most so many; None with two-phase commit, which loses none."""
    layer: Layer | None
    load: Load | None
    audit: events.ClusterAudited | None
    worker_cpu_s: float | None
    train_cpu_s: float | None
    """All processes, from the first batch to the last."""
    cpu_s: float | None
    """All processes, the driver's and their starts included."""
    error: str | None
    """Why not all batches were trained."""

    @property
    def samples_per_s(self) -> float | None:
        """Throughput over the whole run."""
        return self.samples / self.seconds if self.seconds else None

    @property
    def is_sound(self) -> bool:
        """Whether no audit found anything wrong."""
        return self.audit is None or self.audit.is_sound

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**dataclasses.asdict(self), "samples_per_s": self.samples_per_s}


def split_runs(happened: Iterable[events.Event]) -> list[list[events.Event]]:
    """The events of each run of a file; what came before the first is left out."""
    runs: list[list[events.Event]] = []
    for event in happened:
        if isinstance(event, events.ClusterStarted):
            runs.append([])
        if runs:
            runs[-1].append(event)
    return runs


def summarize(happened: Sequence[events.Event]) -> ClusterRun:
    """What the events of one run add up to.

    Raises:
        InvalidRequestError: they do not begin with what is run.
    """
    if not happened or not isinstance(happened[0], events.ClusterStarted):
        raise InvalidRequestError("these are not the events of a training on a cluster")
    setup = happened[0]
    progress = Progress(happened)
    start, end = progress.first_step, progress.end
    told = sorted((e for e in happened if isinstance(e, events.BatchTrained)), key=lambda e: e.at)
    last_of = {each.worker: each for each in told}
    tail = [each.loss for each in told[-max(1, len(told) // 20) :]]
    audits = [e for e in happened if isinstance(e, events.ClusterAudited)]
    ends = [e for e in happened if isinstance(e, events.ClusterEnded)]
    ended = ends[-1] if ends else None
    first = next((done for done in progress.done if done > 0), 0)
    return ClusterRun(
        setup=setup,
        seconds=0.0 if start is None or end is None else end - start,
        samples=progress.done[-1] - first if progress.done else 0,
        loss=sum(tail) / len(tail) if tail else None,
        auc=None if ended is None else ended.auc,
        failures=find_failures(
            happened, rows_of=setup.rows_of, workers=setup.workers, parity=setup.parity
        ),
        workers_lost=sum(isinstance(e, events.WorkerLost) for e in happened),
        pushes_lost=None if setup.two_phase or not told
        else sum(each.pushes_lost for each in last_of.values()),
        layer=find_layer(setup.second_layer, happened),
        load=find_load(happened, setup.servers),
        audit=audits[-1] if audits else None,
        worker_cpu_s=sum(each.cpu_s for each in last_of.values()) if told else None,
        train_cpu_s=None if ended is None else ended.train_cpu_s,
        cpu_s=None if ended is None else ended.cpu_s,
        error=None if ended is None else ended.error,
    )  # fmt: skip


# For people.


def render(
    run: ClusterRun,
    *,
    calm: ClusterRun | None = None,
    best_auc: float | None = None,
    picture: Path | None = None,
    title: str = "Training on a cluster",
) -> RenderableType:
    """The run for somebody who watched it; ``calm`` is the same run without failures."""
    grid = make_grid()
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in lines(run, calm=calm, best_auc=best_auc):
        grid.add_row(name, text)
    if picture is not None:
        grid.add_row("picture", str(picture))
    parts: list[RenderableType] = [headline(run), Text()]
    if run.failures:
        parts += [failures_table(run.failures), Text()]
    return Panel(
        Group(*parts, grid),
        title=title,
        border_style="green" if run.is_sound else "red",
        padding=(1, 2),
    )


def headline(run: ClusterRun) -> Text:
    """What happened in one sentence."""
    setup = run.setup
    text = Text(
        f"{words.counted(setup.servers, 'server')}, {words.counted(setup.workers, 'worker')}, "
        f"{setup.strategy}: "
    )
    if not run.failures:
        return text.append("nothing failed.")
    text.append(words.counted(len(run.failures), "server"), style="bold red")
    if run.layer is not None and run.layer.restores:
        text.append(" lost; training ")
        text.append("went back", style="bold yellow")
        return text.append(
            " to its last checkpoint, and finished all "
            f"{words.counted(setup.batches, 'batch', 'batches')}."
        )
    text.append(" lost; training ")
    text.append("went on", style="bold green")
    return text.append(f" and finished all {words.counted(setup.batches, 'batch', 'batches')}.")


def failures_table(failures: Sequence[Failure]) -> Table:
    """One line for each server that was lost."""
    table = make_table("Failures: seconds since the kill, rows recovered, samples a second")
    table.add_column("lost", style="cyan", no_wrap=True)
    add_numbers(table, "replaced", "stepping", "whole", "rows", "before", "during", "after")
    for failure in failures:
        table.add_row(
            f"{failure.server} {failure.how}"[:_HOW_WIDTH],
            *(_seconds(each) for each in (failure.replaced_s, failure.steps_s, failure.whole_s)),
            words.count(failure.rows) if failure.rows_s is not None else "–",
            *(_rate(each) for each in (failure.before, failure.during, failure.after)),
        )
    return table


def lines(
    run: ClusterRun, *, calm: ClusterRun | None = None, best_auc: float | None = None
) -> list[tuple[str, str]]:
    """What to know of a run, as (name, text)."""
    setup = run.setup
    coded = "nothing is coded"
    if setup.parity:
        coded = f"stripes of {setup.data} + {setup.parity} by {setup.code}"
    found = [("rows", f"{words.count(setup.rows)} of embeddings; {coded}")]
    speed = f"{_rate(run.samples_per_s)} samples/s over {words.duration(run.seconds)}"
    if calm is not None:
        speed += f" ({_rate(calm.samples_per_s)} without failures)"
    found.append(("throughput", speed))
    if run.auc is not None:
        others = [] if calm is None or calm.auc is None else [f"{calm.auc:.4f} without failures"]
        if best_auc is not None:
            others.append(f"{best_auc:.4f} at best")
        beside = f" ({'; '.join(others)})" if others else ""
        found.append(("held-out AUC", f"{run.auc:.4f}{beside}"))
    if run.layer is not None:
        found += layer_lines(run.layer)
    has_gone_back = run.layer is not None and run.layer.restores > 0
    if run.pushes_lost is not None and run.failures and not has_gone_back:
        found.append(
            ("updates lost", f"at most {words.counted(run.pushes_lost, 'push', 'pushes')}")
        )
    if run.failures:
        found.append(("time lost", time_lost(run.failures)))
    if run.workers_lost:
        found.append(("workers lost", words.count(run.workers_lost)))
    if run.audit is not None:
        found.append(("audit", audit_line(run.audit)))
    found += load_lines(run)
    if run.cpu_s is not None:
        found.append(("CPU", _cpu(run)))
    return found


def time_lost(failures: Sequence[Failure]) -> str:
    """What failures cost, where that is known."""
    known = [f.lost_s for f in failures if f.lost_s is not None]
    if not known:
        return "not known: training was not calm before, or ended before it was again"
    text = f"{words.duration(max(0.0, sum(known)))} of training at the rate before"
    missing = len(failures) - len(known)
    return text if not missing else f"{text}; not known of {missing}"


def load_lines(run: ClusterRun) -> list[tuple[str, str]]:
    """What servers did and hold, as (name, text)."""
    load, setup = run.load, run.setup
    if load is None:
        return []
    updated = f"{words.count(sum(load.updated_S))} rows ({balance_text(load.rows)})"
    if setup.parity:
        updated += f"; with {words.count(sum(load.folded_S))} parities ({balance_text(load.both)})"
    found = [("updates", updated)]
    memory = f"rows {words.size(setup.row_bytes)}"
    if setup.parity:
        memory += f", parities {words.size(setup.parity_bytes)}"
    if load.queue_bytes is not None:
        memory += f", queues {words.size(load.queue_bytes)}"
    if load.resident_bytes is not None:
        memory += f"; {words.size(load.resident_bytes)} resident at most"
    found.append(("memory", memory))
    if load.worker_bytes is not None and load.server_bytes is not None:
        found.append(
            (
                "network",
                f"workers and servers {words.size(load.worker_bytes)}, "
                f"servers among themselves {words.size(load.server_bytes)}",
            )
        )
    if setup.parity:
        told = f"differences {words.size(load.difference_bytes)}"
        if load.gradient_bytes:
            told += f", gradients {words.size(load.gradient_bytes)}"
        found.append(("told to parity", told))
    return found


def audit_line(audit: events.ClusterAudited) -> str:
    """What was checked, and what came out."""
    if audit.stripes == 0:
        return "nothing is coded, so nothing can be checked"
    checked = (
        f"{words.counted(audit.parities, 'parity', 'parities')} of "
        f"{words.counted(audit.stripes, 'stripe')} recomputed after the run from the rows that "
        "servers hold, recovered ones among them"
    )
    if audit.deviation_max:
        return f"{checked}; those held deviate by at most {audit.deviation_max:.2g} (a float code)"
    if audit.is_sound:
        return f"{checked}: each equals the one that is held, bit for bit"
    return f"{checked}: {words.count(audit.wrong)} of those held are WRONG"


def _cpu(run: ClusterRun) -> str:
    parts = []
    if run.train_cpu_s is not None:
        parts.append(f"from the first batch to the last {run.train_cpu_s:.1f} s")
    if run.worker_cpu_s is not None:
        parts.append(f"workers {run.worker_cpu_s:.1f} s")
    if run.load is not None:
        parts.append(f"servers {run.load.cpu_s:.1f} s")
    inside = f" ({', '.join(parts)})" if parts else ""
    return f"{run.cpu_s or 0.0:.1f} s of all processes, their starts included{inside}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _rate(value: float | None) -> str:
    return "–" if value is None else words.count(round(value))
