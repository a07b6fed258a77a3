"""A plan on the terminal, as JSON, and as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.plan.advise import NO_RISK, Advice, Estimate
from holdfast.plan.scaling import Point
from holdfast.plan.simulate import Simulation
from holdfast.plan.situation import MEANINGS, Situation
from holdfast.report import words


@dataclass(frozen=True, slots=True)
class Plan:
    """Advice, what a simulation says of it, and how it scales; ``given``: the numbers of the
    situation that were given or measured, not assumed."""

    situation: Situation
    given: frozenset[str]
    advice: Advice
    simulated: Mapping[str, Simulation]
    scaling: Mapping[str, Sequence[Point]]

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            "situation": dataclasses.asdict(self.situation),
            "strategies": [_facts(estimate) for estimate in self.advice.estimates],
            "given": sorted(self.given),
            "recommended": self.advice.best.strategy,
            "reason": self.advice.best.reason,
            "own_loop": dataclasses.asdict(self.advice.own_loop),
            "on_servers": dataclasses.asdict(self.advice.on_servers),
            "simulated": {
                name: {
                    "jobs": found.jobs,
                    "overhead": dataclasses.asdict(found.overhead),
                    "pls": dataclasses.asdict(found.pls),
                    "failures": dataclasses.asdict(found.failures),
                    "unfinished": found.unfinished,
                }
                for name, found in self.simulated.items()
            },
            "scaling": {
                name: [dataclasses.asdict(point) for point in points]
                for name, points in self.scaling.items()
            },
        }


def _facts(e: Estimate) -> dict[str, Any]:
    return {**dataclasses.asdict(e), "overhead": dataclasses.asdict(e.overhead), "total": e.total}


def render(plan: Plan, width: int) -> RenderableType:
    """For people, on a terminal so wide: the answers first, then the numbers, then what was
    assumed."""
    s, advice = plan.situation, plan.advice
    head = Text(
        f"{words.count(s.rows)} rows, {words.size(s.model_bytes)} on {s.servers} servers; "
        f"every {s.mtbf_h:g} h a failure takes {s.lost}\n"
    )
    answers = Text("\n")
    for title, choice in (
        ("Keeping your training loop", advice.own_loop),
        ("With embedding servers", advice.on_servers),
    ):
        answers.append(f"{title}: ", style="bold")
        answers.append(choice.strategy or "none", style="bold green" if choice.strategy else "dim")
        answers.append(f". {choice.reason}.\n")
    if s.updates_per_s == 0:
        answers.append(
            "Parity traffic is counted as nothing: give --updates-per-s to compare ecrm and "
            "ecrec fairly.\n",
            style="yellow",
        )
    return Group(
        head,
        _strategies(advice),
        _notes(advice),
        answers,
        _overheads(advice),
        _simulated(plan.simulated),
        _numbers(plan),
    )


def _styled(advice: Advice, estimate: Estimate) -> str:
    chosen = (advice.own_loop.strategy, advice.on_servers.strategy)
    return "green" if estimate.strategy in chosen else "dim" if estimate.problem else ""


def _columns(*titles: str) -> Table:
    """A table whose first column is a name, the others numbers; narrow enough for 80 columns."""
    table = Table(
        box=None, header_style="bold", pad_edge=False, padding=(0, 1), collapse_padding=True
    )
    table.add_column(titles[0], no_wrap=True)
    for title in titles[1:]:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _strategies(advice: Advice) -> Table:
    table = _columns(
        "strategy", "overhead", "every", "PLS", "written/h", "stored", "memory", "recovery"
    )
    for e in advice.estimates:
        table.add_row(
            e.strategy, f"{e.total:.2%}", words.duration(3600 * e.interval_h), f"{e.pls:.2g}",
            words.size(e.written_bytes_h), words.size(e.capacity_bytes),
            words.size(e.memory_bytes), words.duration(e.recovery_s), style=_styled(advice, e),
        )  # fmt: skip
    return table


def _notes(advice: Advice) -> Text:
    notes = Text("\n")
    for e in advice.estimates:
        if e.problem:
            notes.append(f"{e.strategy}: not here, {e.problem}\n", style="dim")
        elif e.risk != NO_RISK:
            notes.append(f"{e.strategy}: accuracy: {e.risk}\n", style="dim")
    notes.append(
        "overhead: of the training time, its parts below; every: between two checkpoints; "
        "PLS: the portion of samples that is expected to be lost; stored: in storage at a time; "
        "memory: beyond the model's; recovery: until the lost rows are back\n",
        style="dim",
    )
    return notes


def _overheads(advice: Advice) -> Table:
    table = _columns("overhead by its parts", "saving", "training again", "reloading", "each step")
    for e in advice.estimates:
        o = e.overhead
        parts = (o.save, o.lost, o.load + o.reschedule, e.training)
        table.add_row(e.strategy, *(f"{part:.2%}" for part in parts), style=_styled(advice, e))
    return table


def _simulated(simulated: Mapping[str, Simulation]) -> Text:
    text = Text("\n")
    for name, found in simulated.items():
        text.append(
            f"Simulated, {name}: {found.overhead.mean:.2%} ± {found.overhead.standard_error:.2%} "
            f"of the training time (95 of 100 jobs stay below {found.overhead.p95:.2%}), "
            f"PLS {found.pls.mean:.3f}, over {words.counted(found.jobs, 'job')}.\n"
        )
        if found.unfinished:
            text.append(f"{found.unfinished:.1%} of these jobs never ended.\n")
    return text


def _numbers(plan: Plan) -> RenderableType:
    """Every number that the plan rests on, with the flag that changes it."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    table.add_column("number", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("")
    table.add_column("meaning", style="dim")
    for name, value in dataclasses.asdict(plan.situation).items():
        is_given = name in plan.given
        shown = words.size(value) if "bytes" in name else f"{value:,.12g}"
        shown += "/s" if name.endswith("bytes_s") else ""
        table.add_row(
            name, shown, "given" if is_given else "assumed", MEANINGS[name],
            style="" if is_given else "yellow",
        )  # fmt: skip
    return table


def draw(plan: Plan, path: Path) -> None:
    """The overheads side by side, and how they scale, as PNG or SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), dpi=110, layout="constrained")
    bars, *curves = figure.subplots(1, 1 + len(plan.scaling))
    names = [e.strategy for e in plan.advice.estimates]
    left = [0.0] * len(names)
    for part in ("save", "lost", "load", "reschedule", "training"):
        values = [
            100 * (e.training if part == "training" else getattr(e.overhead, part))
            for e in plan.advice.estimates
        ]
        bars.barh(names, values, left=left, label=part)
        left = [a + b for a, b in zip(left, values, strict=True)]
    bars.invert_yaxis()
    bars.set_xlabel("% of training time")
    bars.set_title("Overhead", loc="left", weight="bold")
    bars.legend(fontsize="small")
    for axes, (title, points) in zip(curves, plan.scaling.items(), strict=True):
        for name in points[0].totals:
            axes.plot(
                [p.nodes for p in points], [100 * p.totals[name] for p in points], ".-", label=name
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("servers")
        axes.set_title(title, loc="left", weight="bold")
        axes.legend(fontsize="small")
    figure.savefig(path)
