"""What a training on a cluster came to: its throughput, its failures, what they cost.

    events, kills, what workers said -> ClusterRun -> JSON or a panel

Invariants:
- Times and batches are the events' own; a rate is batches between two moments, nothing smoothed.
- A failure lasts from the kill (or, unasked, from when it was seen) until the replacement has its
  rows and its parities.
- What is not known is None, never a guess.

Not here: the view while it runs (clusterlive.py), the picture (clusterpicture.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from holdfast import events
from holdfast.report import words
from holdfast.report.layout import add_numbers, make_table

_HOW_WIDTH = 12


@dataclass(frozen=True, slots=True)
class Kill:
    """A signal that was sent to a server, and when."""

    server: int
    signal: str
    time: float
    batches: int


@dataclass(frozen=True, slots=True)
class Told:
    """A batch that a worker trained, as it said itself."""

    worker: int
    time: float
    loss: float
    cpu_s: float
    pushes_lost: int = 0


@dataclass(frozen=True, slots=True)
class Checked:
    """What an audit found."""

    stripes: int
    parities: int
    wrong: int
    deviation_max: float = 0.0

    @property
    def is_sound(self) -> bool:
        """Whether every parity is what its rows say."""
        return self.wrong == 0


@dataclass(frozen=True, slots=True)
class Setup:
    """What was run."""

    strategy: str
    servers: int
    workers: int
    data: int
    parity: int
    code: str
    two_phase: bool
    rows: int
    batches: int
    batch_size: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A server that was lost, and how the cluster came over it. Seconds count from the kill."""

    server: int
    how: str
    time: float
    seen_s: float
    replaced_s: float | None
    rows_s: float | None
    whole_s: float | None
    steps_s: float | None
    """Until every worker had finished a step that it had not finished before."""
    rows: int
    """Rows that the server held."""
    rows_swept: int
    """Of them, recovered range by range; the others were asked for before their turn."""
    before: float | None
    during: float | None
    after: float | None
    """Samples a second."""


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """A training on a cluster."""

    setup: Setup
    seconds: float
    samples: int
    loss: float | None
    auc: float | None
    failures: tuple[Failure, ...]
    workers_lost: int
    pushes_lost: int | None
    """Of a server that was lost, at most so many; None with two-phase commit, which loses none."""
    audit: Checked | None
    server_cpu_s: float | None
    worker_cpu_s: float | None
    cpu_s: float | None
    """All processes, the driver's and their starts included."""

    @property
    def samples_per_s(self) -> float | None:
        """Throughput over the whole run."""
        return self.samples / self.seconds if self.seconds else None

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**dataclasses.asdict(self), "samples_per_s": self.samples_per_s}


class Progress:
    """How many batches were done at any moment, from the progress that was told."""

    def __init__(self, happened: Sequence[events.Event]) -> None:
        told = [e for e in happened if isinstance(e, events.ClusterProgress)]
        self._points = [(e.time, e.samples) for e in told]

    def samples_at(self, moment: float) -> float:
        """Samples trained until then, between two reports in proportion."""
        points = self._points
        if not points or moment <= points[0][0]:
            return float(points[0][1]) if points else 0.0
        for (start, before), (end, after) in pairwise(points):
            if moment <= end:
                share = (moment - start) / (end - start) if end > start else 1.0
                return before + share * (after - before)
        return float(points[-1][1])

    def rate(self, start: float | None, end: float | None) -> float | None:
        """Samples a second between two moments; None if there is no such span."""
        if not self._points or start is None or end is None:
            return None
        start, end = max(start, self._points[0][0]), min(end, self._points[-1][0])
        if end - start < 1e-6:
            return None
        return (self.samples_at(end) - self.samples_at(start)) / (end - start)

    @property
    def first_step(self) -> float | None:
        """When the first batch was done: what came before is the start of processes."""
        return next((time for time, samples in self._points if samples > 0), None)

    @property
    def end(self) -> float | None:
        """The last report."""
        return self._points[-1][0] if self._points else None


def find_failures(
    happened: Sequence[events.Event],
    kills: Sequence[Kill] = (),
    told: Sequence[Told] = (),
    *,
    rows_of: Mapping[int, int],
) -> tuple[Failure, ...]:
    """Every loss of a server, in the order of time."""
    progress = Progress(happened)
    lost = [e for e in happened if isinstance(e, events.ServerLost) and e.server >= 0]
    causes = [_cause(event, lost, kills) for event in lost]
    starts = [e.time if kill is None else kill.time for e, kill in zip(lost, causes, strict=True)]
    found: list[Failure] = []
    for at, (event, cause, start) in enumerate(zip(lost, causes, starts, strict=True)):
        end = next((s for e, s in zip(lost, starts, strict=True)
                    if e.server == event.server and s > start), float("inf"))  # fmt: skip
        mine = [e for e in happened if event.time <= e.time < end]
        replaced = _time_of(mine, events.ServerReplaced, event.server)
        rows = _time_of(mine, events.ServerRecovered, event.server, what="rows")
        parities = _time_of(mine, events.ServerRecovered, event.server, what="parities")
        whole = max(rows, parities) if rows is not None and parities is not None else None
        calm = _whole_before(found, start, progress.first_step)
        following = starts[at + 1] if at + 1 < len(starts) else progress.end
        found.append(
            Failure(
                server=event.server,
                how=event.how.splitlines()[0] if cause is None else cause.signal,
                time=start,
                seen_s=event.time - start,
                replaced_s=_since(start, replaced),
                rows_s=_since(start, rows),
                whole_s=_since(start, whole),
                steps_s=_first_steps(told, start),
                rows=rows_of.get(event.server, 0),
                rows_swept=sum(
                    e.rows
                    for e in mine
                    if isinstance(e, events.RangeRecovered) and e.server == event.server
                ),
                before=progress.rate(calm, start),
                during=progress.rate(start, whole),
                after=progress.rate(whole, following),
            )
        )
    return tuple(found)


def _cause(
    event: events.ServerLost, lost: Sequence[events.ServerLost], kills: Sequence[Kill]
) -> Kill | None:
    """The signal that a loss is the first answer to; None: nobody asked for it."""
    before = max((e.time for e in lost if e.server == event.server and e.time < event.time),
                 default=float("-inf"))  # fmt: skip
    sent = [k for k in kills if k.server == event.server and before < k.time <= event.time]
    return sent[0] if sent else None


def _time_of(
    happened: Sequence[events.Event], kind: type[events.Event], server: int, **fields: str
) -> float | None:
    for event in happened:
        if not isinstance(event, kind) or getattr(event, "server", None) != server:
            continue
        if all(getattr(event, name) == value for name, value in fields.items()):
            return event.time
    return None


def _since(start: float, moment: float | None) -> float | None:
    return None if moment is None else moment - start


def _whole_before(
    failures: Sequence[Failure], start: float, first_step: float | None
) -> float | None:
    """Since when nothing was missing: the last failure's end, or the first step."""
    if not failures:
        return first_step
    last = failures[-1]
    if last.whole_s is None or last.time + last.whole_s > start:
        return None
    return last.time + last.whole_s


def _first_steps(told: Sequence[Told], start: float) -> float | None:
    """Seconds until the last of the workers that trained before trained again."""
    before = {each.worker for each in told if each.time <= start}
    firsts: dict[int, float] = {}
    for each in told:
        if each.time > start and each.worker in before:
            firsts.setdefault(each.worker, each.time)
    return max(firsts.values()) - start if before and len(firsts) == len(before) else None


def summarize(
    setup: Setup,
    happened: Sequence[events.Event],
    *,
    kills: Sequence[Kill] = (),
    told: Sequence[Told] = (),
    rows_of: Mapping[int, int],
    auc: float | None = None,
    audit: Checked | None = None,
    server_cpu_s: float | None = None,
    cpu_s: float | None = None,
) -> ClusterRun:
    """What all this adds up to."""
    progress = Progress(happened)
    start, end = progress.first_step, progress.end
    last_of = {each.worker: each for each in told}
    lost = sum(each.pushes_lost for each in last_of.values()) if told else None
    tail = [each.loss for each in told[-max(1, len(told) // 20) :]]
    return ClusterRun(
        setup=setup,
        seconds=0.0 if start is None or end is None else end - start,
        samples=round(progress.samples_at(end or 0.0) - progress.samples_at(start or 0.0)),
        loss=sum(tail) / len(tail) if tail else None,
        auc=auc,
        failures=find_failures(happened, kills, told, rows_of=rows_of),
        workers_lost=sum(isinstance(e, events.WorkerLost) for e in happened),
        pushes_lost=None if setup.two_phase else lost,
        audit=audit,
        server_cpu_s=server_cpu_s,
        worker_cpu_s=sum(each.cpu_s for each in last_of.values()) if told else None,
        cpu_s=cpu_s,
    )


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
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in lines(run, calm=calm, best_auc=best_auc):
        grid.add_row(name, text)
    if picture is not None:
        grid.add_row("picture", str(picture))
    parts: list[RenderableType] = [headline(run), Text()]
    if run.failures:
        parts += [failures_table(run.failures), Text()]
    is_sound = run.audit is None or run.audit.is_sound
    return Panel(
        Group(*parts, grid),
        title=title,
        border_style="green" if is_sound else "red",
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
    if run.pushes_lost is not None and run.failures:
        found.append(
            ("updates lost", f"at most {words.counted(run.pushes_lost, 'push', 'pushes')}")
        )
    if run.workers_lost:
        found.append(("workers lost", words.count(run.workers_lost)))
    if run.audit is not None:
        found.append(("audit", audit_line(run.audit)))
    if run.cpu_s is not None:
        found.append(("CPU", _cpu(run)))
    return found


def audit_line(audit: Checked) -> str:
    """What was checked, and what came out."""
    checked = f"{words.counted(audit.stripes, 'stripe')} recomputed from their rows after the run"
    if audit.deviation_max:
        return f"{checked}; parities deviate by at most {audit.deviation_max:.2g} (a float code)"
    if audit.stripes == 0:
        return "nothing is coded, so nothing can be checked"
    if audit.is_sound:
        return f"{checked}: every parity agrees, recovered rows and all, bit for bit"
    return f"{checked}: {words.counted(audit.wrong, 'parity', 'parities')} WRONG"


def _cpu(run: ClusterRun) -> str:
    parts = []
    if run.worker_cpu_s is not None:
        parts.append(f"workers {run.worker_cpu_s:.1f} s")
    if run.server_cpu_s is not None:
        parts.append(f"servers alive at the end {run.server_cpu_s:.1f} s")
    inside = f" ({', '.join(parts)})" if parts else ""
    return f"{run.cpu_s or 0.0:.1f} s of all processes, their starts included{inside}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _rate(value: float | None) -> str:
    return "–" if value is None else words.count(round(value))
