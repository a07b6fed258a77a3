"""Strategies side by side: the same training, the same kills, one report.

    runs of one job under several strategies, and one of ``none`` without kills -> Comparison
    -> JSON or tables

Invariants:
- Everything is against ``none`` without kills, the cheapest run there is.
- A run that could not survive its kills is told as lost; its costs are not compared.

Not here: the picture (compare_picture.py), one run by itself (training.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.report import words
from holdfast.report.cluster.failures import Failure
from holdfast.report.cluster.load import Balance
from holdfast.report.cluster.training import ClusterRun, audit_line
from holdfast.report.layout import add_numbers, literal, make_table

_UNKNOWN = "–"


@dataclass(frozen=True, slots=True)
class Against:
    """A run against the base: shares of its time and CPU seconds that came on top."""

    time_overhead: float | None
    cpu_overhead: float | None
    """Between the first batch and the last, of all processes."""
    auc_difference: float | None
    during_share: float | None
    """Throughput during recovery as a share of that before, the mean of all failures."""
    replaced_s: float | None
    steps_s: float | None
    whole_s: float | None
    lost_s: float | None
    """The mean of all failures; lost_s all together."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several strategies on the same job."""

    base: ClusterRun
    """None of them, and no kills."""
    runs: tuple[ClusterRun, ...]
    best_auc: float | None
    picture: Path | None
    seconds: float

    @property
    def is_sound(self) -> bool:
        """Whether no audit found anything wrong."""
        return all(run.is_sound for run in (self.base, *self.runs))

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "base": self.base.to_dict(),
            "runs": [
                {
                    **run.to_dict(),
                    "is_lost": run.error is not None,
                    "against_base": dataclasses.asdict(compare(run, self.base)),
                }
                for run in self.runs
            ],
            "best_auc": self.best_auc,
            "picture": None if self.picture is None else str(self.picture),
            "sound": self.is_sound,
            "seconds_in_all": self.seconds,
        }


def compare(run: ClusterRun, base: ClusterRun) -> Against:
    """A run against the base; a lost run is not compared."""
    is_lost = run.error is not None
    has_auc = run.auc is not None and base.auc is not None
    failures = () if is_lost else run.failures
    return Against(
        time_overhead=None if is_lost else _overhead(run.seconds, base.seconds),
        cpu_overhead=None if is_lost else _overhead(run.train_cpu_s, base.train_cpu_s),
        auc_difference=run.auc - base.auc if has_auc else None,  # type: ignore[operator]
        during_share=_mean(
            [f.during / f.before for f in failures if f.before and f.during is not None]
        ),
        replaced_s=_mean([f.replaced_s for f in failures if f.replaced_s is not None]),
        steps_s=_mean([f.steps_s for f in failures if f.steps_s is not None]),
        whole_s=_mean([f.whole_s for f in failures if f.whole_s is not None]),
        lost_s=_sum([f.lost_s for f in failures]),
    )


def _overhead(ours: float | None, base: float | None) -> float | None:
    """What came on top, as a share.

    >>> round(_overhead(11.0, 10.0), 3), _overhead(None, 3.0)
    (0.1, None)
    """
    return None if ours is None or not base else ours / base - 1.0


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


# For people.


def render(found: Comparison) -> RenderableType:
    """All of it: what it costs, what kills did, what it takes, how evenly."""
    parts: list[RenderableType] = [_headline(found), Text(), costs_table(found), Text()]
    if any(run.failures and run.error is None for run in found.runs):
        parts += [failures_table(found.runs), Text()]
    if any(run.layer is not None for run in found.runs):
        parts += [layers_table(found.runs), Text()]
    parts += [means_table(found), Text(), load_table(found), Text()]
    for run in found.runs:
        if run.error is not None:
            parts.append(literal(f"{name_of(run)} is lost: {run.error}", style="red"))
        if run.audit is not None and run.audit.stripes:
            style = "green" if run.is_sound else "bold red"
            parts.append(Text(f"{name_of(run)}: {audit_line(run.audit)}", style=style))
    if found.picture is not None:
        parts.append(literal(f"picture: {found.picture}"))
    return Group(*parts)


def name_of(run: ClusterRun) -> str:
    """A strategy, and the second layer it has beside."""
    setup = run.setup
    if setup.second_layer is None or setup.second_layer == setup.strategy:
        return setup.strategy
    return f"{setup.strategy} + {setup.second_layer}"


def _headline(found: Comparison) -> Text:
    setup = found.base.setup
    return Text(
        f"{words.counted(setup.servers, 'server')}, {words.counted(setup.workers, 'worker')}, "
        f"{words.count(setup.rows)} rows, {words.counted(setup.batches, 'batch', 'batches')} of "
        f"{words.count(setup.batch_size)}, seed {setup.seed}; each strategy once, in "
        f"{words.duration(found.seconds)}",
        style="bold",
    )


def costs_table(found: Comparison) -> Table:
    """Time, CPU seconds and accuracy."""
    table = make_table("Training, from the first batch to the last, against none without kills")
    table.add_column("strategy", style="cyan", no_wrap=True)
    add_numbers(table, "seconds", "more", "CPU s", "more", "samples/s", "AUC", "differs")
    base = found.base
    table.add_row("none, no kills", f"{base.seconds:.1f}", "", _number(base.train_cpu_s, ".1f"),
                  "", _rate(base.samples_per_s), _number(base.auc, ".4f"), "")  # fmt: skip
    for run in found.runs:
        against = compare(run, base)
        table.add_row(
            name_of(run),
            f"{run.seconds:.1f}",
            "lost" if run.error is not None else _percent(against.time_overhead),
            _number(run.train_cpu_s, ".1f"),
            _percent(against.cpu_overhead),
            _rate(run.samples_per_s),
            _number(run.auc, ".4f"),
            _number(against.auc_difference, "+.4f"),
        )
    return table


def failures_table(runs: Sequence[ClusterRun]) -> Table:
    """One line for each server that was lost, by strategy."""
    table = make_table("Lost servers: seconds since the kill; samples a second; seconds it cost")
    table.add_column("strategy", style="cyan", no_wrap=True)
    table.add_column("lost", no_wrap=True)
    add_numbers(table, "replaced", "stepping", "whole", "before", "during", "after", "cost")
    for run in runs:
        if run.error is not None:
            continue
        for failure in run.failures:
            table.add_row(name_of(run), str(failure.server), *_failure_cells(failure))
    return table


def _failure_cells(failure: Failure) -> list[str]:
    seconds = (failure.replaced_s, failure.steps_s, failure.whole_s)
    rates = (failure.before, failure.during, failure.after)
    return [
        *(_number(each, ".2f") for each in seconds),
        *(_rate(each) for each in rates),
        _number(failure.lost_s, ".1f"),
    ]


def layers_table(runs: Sequence[ClusterRun]) -> Table:
    """Checkpoints, where there are any."""
    table = make_table("Checkpoints, and going back to them")
    table.add_column("strategy", style="cyan", no_wrap=True)
    add_numbers(table, "saved", "bytes", "stall s", "given up", "restores", "again", "PLS")
    for run in runs:
        layer = run.layer
        if layer is not None:
            table.add_row(
                name_of(run),
                words.count(layer.checkpoints),
                words.size(layer.bytes),
                f"{layer.stall_s:.2f}",
                words.count(layer.given_up),
                words.count(layer.restores + layer.recoveries),
                words.count(layer.batches_again),
                f"{layer.pls:.2g}",
            )
    return table


def means_table(found: Comparison) -> Table:
    """Memory and network."""
    table = make_table("Servers' memory, and bytes on the network")
    table.add_column("strategy", style="cyan", no_wrap=True)
    add_numbers(table, "rows", "parities", "queues", "resident", "workers", "servers")
    for name, run in _named(found):
        load = run.load
        sizes = (None,) * 4 if load is None else (
            load.queue_bytes, load.resident_bytes, load.worker_bytes, load.server_bytes
        )  # fmt: skip
        table.add_row(
            name, words.size(run.setup.row_bytes), words.size(run.setup.parity_bytes),
            *(_UNKNOWN if size is None else words.size(size) for size in sizes),
        )  # fmt: skip
    return table


def load_table(found: Comparison) -> Table:
    """Updates, and how evenly servers share them."""
    table = make_table(
        "Updates on servers; the most loaded one against the mean | against the least loaded"
    )
    table.add_column("strategy", style="cyan", no_wrap=True)
    add_numbers(table, "of rows", "of parities", "rows", "parities", "both")
    for name, run in _named(found):
        if run.load is not None:
            table.add_row(
                name,
                words.count(sum(run.load.updated_S)),
                words.count(sum(run.load.folded_S)),
                *(_balance(each) for each in (run.load.rows, run.load.parities, run.load.both)),
            )
    return table


def _named(found: Comparison) -> list[tuple[str, ClusterRun]]:
    return [("none, no kills", found.base), *((name_of(run), run) for run in found.runs)]


def _balance(found: Balance) -> str:
    if found.most_over_mean is None:
        return _UNKNOWN
    return f"{found.most_over_mean:.2f} | {_number(found.most_over_least, '.2f')}"


def _number(value: float | None, spec: str) -> str:
    return _UNKNOWN if value is None else format(value, spec)


def _percent(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{100 * value:+.1f} %"


def _rate(value: float | None) -> str:
    return _UNKNOWN if value is None else words.count(round(value))
