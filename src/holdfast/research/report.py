"""A study of emulated runs on the terminal, as JSON, and as a picture (CPR, figures 6 to 12).

Invariant: beside every loss of AUC stands its error over the seeds, and once the seed noise.

Not here: the runs (research/emulation.py), what they say together (research/studies.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.errors import InvalidRequestError
from holdfast.report import words
from holdfast.report.layout import add_numbers, make_table
from holdfast.research.emulation import Job, Outcome, R
from holdfast.research.studies import Line, Study
from holdfast.research.update_size import Updates

_PARTS = ("save", "load", "lost", "reschedule")
_DOTS_MAX = 20_000  # of a picture


def run_line(outcome: Outcome, done: int, total: int) -> str:
    """One run that ended, for a log."""
    e = outcome.plan.emulated
    what = (
        "no failure"
        if not e.failures
        else f"{words.counted(e.failures, 'failure')} of {e.share:.4g}"
    )
    return (
        f"run {done} of {total}: {e.strategy}, {what}, seed {e.seed}: AUC {outcome.auc:.4f}, "
        f"PLS {outcome.pls:.3f}"
    )


# For machines.


def to_dict(found: Study | Updates) -> dict[str, Any]:
    """Everything but the dots of figure 6."""
    if isinstance(found, Updates):
        return {
            "figure": found.figure,
            "job": _job(found.job),
            "moments": [dataclasses.asdict(moment) for moment in found.moments],
        }
    return {
        "figure": found.figure,
        "title": found.title,
        "job": _job(found.job),
        "seeds": found.seeds,
        "auc_without_failures": found.auc,
        "seed_noise": found.noise,
        "lines": [dataclasses.asdict(line) for line in found.lines],
        "points": [dataclasses.asdict(point) for point in found.points],
        "fits": {name: dataclasses.asdict(fit) for name, fit in found.fits.items()},
    }


def _job(job: Job) -> dict[str, Any]:
    return {**dataclasses.asdict(job), "files": list(job.files)}


# For people.


def render(found: Study | Updates) -> RenderableType:
    """What was found, in a table and a few lines."""
    if isinstance(found, Updates):
        return _render_updates(found)
    parts: list[RenderableType] = [_head(found)]
    if found.figure == 10:
        parts.append(_failures_table(found))
    elif found.lines:
        parts.append(_lines_table(found))
    if found.fits:
        parts.append(_fits_table(found))
    parts.append(_tail(found))
    return Group(*parts)


def _head(found: Study) -> Text:
    job = found.job
    trained = (
        f"; {words.counted(job.steps, 'step')} of {job.recipe.batch_size} samples stand for it, "
        f"{words.counted(job.recipe.rows, 'row')}, {job.recipe.optimizer}, {job.recipe.data}"
    )
    seeds = words.counted(found.seeds, "seed")
    text = Text(found.title, style="bold")
    clock = f"\nA job of {job.hours:g} h{'' if found.auc is None else trained}; {seeds}.\n"
    return text.append(clock, style="not bold")


def _tail(found: Study) -> Text:
    if found.auc is None:
        return Text("\nNothing was trained: overheads are charged on a virtual clock.")
    noise = (
        "unknown with one seed"
        if found.noise is None
        else f"{found.noise:.5f} (standard deviation over {found.seeds} seeds)"
    )
    text = Text(f"\nAUC without failures {found.auc:.4f}; seed noise {noise}. ")
    text.append("Losses are paired: against the run of the same seed without failures")
    has_error = found.lines and found.seeds > 1
    text.append("; ± is the standard error of their mean." if has_error else ".")
    if any(line.strategy == "full" for line in found.lines):
        text.append(
            " Full recovery ends with the bits of the run without failures; only its time is "
            "charged."
        )
    for line in found.lines:
        if line.has_benefit is False:
            text.append(f"\n{line.strategy}, PLS {line.pls_target:g}: {line.reason}.")
    return text


def _lines_table(found: Study) -> Table:
    table = make_table("")
    table.add_column("strategy", no_wrap=True)
    add_numbers(table, "target", "every", "overhead", "lost work", "PLS", "AUC", "AUC lost", "±")
    for line in found.lines:
        table.add_row(
            line.strategy,
            f"{line.pls_target:g}" if line.has_benefit is not None else "",
            "" if line.interval_h is None else f"{line.interval_h:.3g} h",
            f"{line.overhead_total.mean:.2%}",
            f"{line.overhead.lost:.2%}",
            "" if line.pls is None else f"{line.pls.mean:.3f}",
            "" if line.auc is None else f"{line.auc.mean:.4f}",
            "" if line.loss is None else f"{line.loss.mean:.5f}",
            "" if line.loss is None or found.seeds == 1 else f"{line.loss.error:.5f}",
            style="dim" if line.has_benefit is False else None,
        )
    return table


def _failures_table(found: Study) -> Table:
    table = make_table("")
    table.add_column("strategy", no_wrap=True)
    add_numbers(table, "failures", "lost", "every", "overhead", "of full's")
    table.add_column("the benefit analysis says")
    for line in found.lines:
        table.add_row(
            line.strategy,
            str(line.failures),
            f"{line.share:.4g}",
            "" if line.interval_h is None else f"{line.interval_h:.3g} h",
            f"{line.overhead_total.mean:.2%}",
            "" if line.of_full is None else f"{line.of_full:.2f}",
            {True: "partial recovery", False: "full recovery", None: ""}[line.has_benefit],
            style="dim" if line.has_benefit is False else None,
        )
    return table


def _fits_table(found: Study) -> Table:
    table = make_table("")
    table.add_column("strategy", no_wrap=True)
    add_numbers(table, "runs", "PLS from", "to", "correlation", "AUC lost a PLS of 1",
                "at PLS 0.1")  # fmt: skip
    for name, fit in found.fits.items():
        losses = [p.pls for p in found.points if p.strategy == name]
        error = "" if fit.slope_error is None else f" ± {fit.slope_error:.5f}"
        table.add_row(
            name,
            str(fit.runs),
            f"{min(losses):.3f}",
            f"{max(losses):.3f}",
            "–" if fit.pearson is None else f"{fit.pearson:.3f}",
            f"{fit.slope:.5f}{error}",
            f"{fit.intercept + 0.1 * fit.slope:.5f}",
        )
    return table


def _render_updates(found: Updates) -> RenderableType:
    job = found.job
    moments = make_table("How often rows were used, and how much they changed: correlations")
    add_numbers(moments, "after steps", "moved", "in each table", "walked", "pushed", "caught")
    for moment in found.moments:
        moments.add_row(
            words.count(moment.step),
            *map(_correlation, (moment.moved, moment.within, moment.walked, moment.pushed)),
            f"{moment.caught:.0%}",
        )
    tables = make_table(f"Single tables, after {words.counted(found.last.step, 'step')}")
    add_numbers(tables, "table", "rows", "used", "moved", "walked", "pushed")
    for item in found.last.tables:
        tables.add_row(
            str(item.table),
            words.count(item.rows),
            words.share(item.used, item.rows),
            *map(_correlation, (item.moved, item.walked, item.pushed)),
        )
    return Group(
        moments,
        Text(
            f"\nPearson's correlations with how often rows were used, in steps of "
            f"{job.recipe.batch_size} samples ({job.recipe.optimizer}, {job.recipe.data}), over "
            "all rows of the tables that hold 99 % of them, used or not. moved: distance from "
            "the first values, the paper's figure 6 and what SCAR ranks by. walked: the changes "
            "of all steps, added up. pushed: the gradients of all single uses, added up; grows "
            f"with use by itself. caught: how much the most used {R:g} of the rows moved, of "
            "what the best choice of so many did.\n"
        ),
        tables,
    )


def _correlation(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


# Pictures.


def check_picture(path: Path) -> None:
    """Refuse a picture that could not be drawn, before hours of training.

    Raises:
        InvalidRequestError: neither PNG nor SVG, no such folder, or matplotlib is missing.
    """
    if path.suffix.lower() not in (".png", ".svg"):
        raise InvalidRequestError(
            "a picture is a .png or a .svg file", path=str(path), todo="name it so"
        )
    if not path.parent.is_dir():
        raise InvalidRequestError("no such folder", folder=str(path.parent))
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise InvalidRequestError(
            "pictures need matplotlib", todo="run: pip install holdfast[plots]"
        ) from error


def draw(found: Study | Updates, path: Path) -> None:
    """The equivalent of the paper's figure, as PNG or SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 4.2), dpi=110, layout="constrained")
    if isinstance(found, Updates):
        _draw_updates(figure, found)
    elif found.figure == 10:
        _draw_failures(figure, found)
    elif found.fits:
        _draw_fits(figure, found)
    else:
        _draw_lines(figure, found)
    figure.savefig(path, format=path.suffix[1:].lower())


def _draw_lines(figure: Any, found: Study) -> None:
    time, accuracy = figure.subplots(1, 2)
    names = [
        line.strategy if found.figure == 7 else f"{line.strategy}\nPLS {line.pls_target:g}"
        for line in found.lines
    ]
    places = np.arange(len(names))
    _stack(time, places, [_percents(line) for line in found.lines])
    time.set_ylabel("overhead, % of the job")
    accuracy.axhline(0, color="#888888", linewidth=0.8)
    accuracy.errorbar(
        places,
        [line.loss.mean if line.loss else 0.0 for line in found.lines],
        [line.loss.error if line.loss else 0.0 for line in found.lines],
        fmt="o",
        capsize=4,
    )
    if found.noise is not None:
        accuracy.axhspan(-found.noise, found.noise, alpha=0.15, label="seed noise (± std)")
        accuracy.legend(fontsize="small")
    accuracy.set_ylabel("AUC lost")
    accuracy.set_xlim(-0.6, len(names) - 0.4)
    for axes in (time, accuracy):
        axes.set_xticks(places, names, rotation=30, ha="right", fontsize="small")
    time.set_title(found.title, loc="left", fontsize=10, weight="bold")


def _percents(line: Line) -> dict[str, float]:
    return {part: 100 * getattr(line.overhead, part) for part in _PARTS}


def _stack(axes: Any, places: np.ndarray, bars: Sequence[dict[str, float]]) -> None:
    below = np.zeros(len(places))
    for part in _PARTS:
        values = np.array([bar[part] for bar in bars])
        axes.bar(places, values, bottom=below, label=part)
        below += values
    axes.margins(y=0.15)  # room for the legend
    axes.legend(fontsize="small", ncols=len(_PARTS), loc="upper right")


def _draw_failures(figure: Any, found: Study) -> None:
    axes = figure.subplots()
    shares = sorted({line.share for line in found.lines})
    groups = list(dict.fromkeys((line.strategy, line.failures) for line in found.lines))
    width = 0.8 / len(shares)
    for line in found.lines:
        at = shares.index(line.share)
        is_bad = line.has_benefit is False
        axes.bar(
            groups.index((line.strategy, line.failures)) + (at + 0.5) * width - 0.4,
            line.of_full or 0.0,
            0.9 * width,
            color=f"C{at}",
            hatch="//" if is_bad else None,
            edgecolor="#d62728" if is_bad else "none",
        )
    axes.axhline(1, color="#444444", linewidth=1, linestyle="--")
    names = [f"{strategy}\n{words.counted(count, 'failure')}" for strategy, count in groups]
    axes.set_xticks(range(len(groups)), names)
    axes.set_ylabel("overhead, full recovery = 1")
    from matplotlib.patches import Patch

    axes.legend(
        handles=[
            *(Patch(color=f"C{at}", label=f"{share:.4g} lost") for at, share in enumerate(shares)),
            Patch(facecolor="none", edgecolor="#d62728", hatch="//", label="no benefit expected"),
        ],
        fontsize="small",
    )
    axes.set_title(found.title, loc="left", fontsize=10, weight="bold")


def _draw_fits(figure: Any, found: Study) -> None:
    axes = figure.subplots()
    axes.axhline(0, color="#888888", linewidth=0.8)
    if found.noise is not None:
        axes.axhspan(-found.noise, found.noise, alpha=0.12, label="seed noise (± std)")
    for index, (name, fit) in enumerate(found.fits.items()):
        points = [p for p in found.points if p.strategy == name]
        axes.scatter(
            [p.pls for p in points],
            [p.loss for p in points],
            [15 + 160 * p.share for p in points],
            color=f"C{index}",
            alpha=0.6,
        )
        ends = np.array([0.0, max(p.pls for p in points)])
        said = "–" if fit.pearson is None else f"{fit.pearson:.3f}"
        axes.plot(
            ends,
            fit.intercept + fit.slope * ends,
            color=f"C{index}",
            label=f"{name}: {fit.slope:.4f} a PLS of 1, correlation {said}",
        )
    axes.set_xlabel("portion of lost samples (larger dots: more servers at once)")
    axes.set_ylabel("AUC lost")
    axes.legend(fontsize="small")
    axes.set_title(found.title, loc="left", fontsize=10, weight="bold")


def _draw_updates(figure: Any, found: Updates) -> None:
    plain, logarithmic = figure.subplots(1, 2)
    chosen = np.random.default_rng(0).permutation(len(found.counts_N))[:_DOTS_MAX]
    for axes in (plain, logarithmic):
        axes.scatter(found.counts_N[chosen], found.changes_N[chosen], 4, alpha=0.4)
        axes.set_xlabel("times a row was used")
        axes.set_ylabel("how far it moved (L2)")
        axes.grid(alpha=0.3)
    logarithmic.set_xscale("log")
    logarithmic.set_yscale("log")
    plain.set_title(
        f"Pearson's correlation {_correlation(found.last.moved)}",
        loc="left",
        fontsize=10,
        weight="bold",
    )
