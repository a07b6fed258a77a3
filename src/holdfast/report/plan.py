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

from holdfast.plan.advise import Advice, Estimate
from holdfast.plan.scaling import Point
from holdfast.plan.simulate import Simulation
from holdfast.plan.situation import Situation
from holdfast.report import words


@dataclass(frozen=True, slots=True)
class Plan:
    """Advice, what a simulation says of it, and how it scales."""

    situation: Situation
    advice: Advice
    simulated: Mapping[str, Simulation]
    scaling: Mapping[str, Sequence[Point]]

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            "situation": dataclasses.asdict(self.situation),
            "strategies": [_facts(estimate) for estimate in self.advice.estimates],
            "recommended": self.advice.strategy,
            "reason": self.advice.reason,
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
    """For people, on a terminal so wide."""
    s = plan.situation
    head = Text(
        f"{words.count(s.rows)} rows, {words.size(s.model_bytes)} on {s.servers} servers; "
        f"every {s.mtbf_h:g} h a failure takes {s.lost}; a job of {s.job_h:g} h; "
        f"PLS up to {s.pls:g}\n"
    )
    tail = Text()
    tail.append("\nTake ", style="bold")
    tail.append(plan.advice.strategy, style="bold green")
    tail.append(f": {plan.advice.reason}.\n")
    for name, found in plan.simulated.items():
        tail.append(
            f"Simulated, {name}: {found.overhead.mean:.2%} ± {found.overhead.standard_error:.2%} "
            f"of the training time (95 of 100 jobs stay below {found.overhead.p95:.2%}), "
            f"PLS {found.pls.mean:.3f}, over {words.counted(found.jobs, 'job')}.\n"
        )
        if found.unfinished:
            tail.append(f"{found.unfinished:.1%} of these jobs never ended.\n")
    return Group(head, _table(plan.advice, width), _notes(plan.advice), tail)


_PARTS_WIDTH = 118  # from which on the parts of the overhead have room


def _table(advice: Advice, width: int) -> Table:
    has_parts = width >= _PARTS_WIDTH
    parts = ("save", "again", "reload", "steps") if has_parts else ()
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    table.add_column("strategy", no_wrap=True)
    for title in ("overhead", *parts, "every", "PLS", "written/h", "stored", "memory", "recovery"):
        table.add_column(title, justify="right", no_wrap=True)
    for e in advice.estimates:
        o = e.overhead
        shares = (o.save, o.lost, o.load + o.reschedule, e.training) if has_parts else ()
        style = "green" if e.strategy == advice.strategy else "dim" if e.problem else ""
        table.add_row(
            e.strategy, f"{e.total:.2%}", *(f"{share:.2%}" for share in shares),
            words.duration(3600 * e.interval_h), f"{e.pls:.2g}", words.size(e.written_bytes_h),
            words.size(e.capacity_bytes), words.size(e.memory_bytes),
            words.duration(e.recovery_s), style=style,
        )  # fmt: skip
    return table


def _notes(advice: Advice) -> Text:
    notes = Text("\n")
    for e in advice.estimates:
        if e.problem:
            notes.append(f"{e.strategy}: not here, {e.problem}\n", style="dim")
        elif e.risk != "none":
            notes.append(f"{e.strategy}: accuracy: {e.risk}\n", style="dim")
    return notes


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
