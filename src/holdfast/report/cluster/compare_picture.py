"""Strategies side by side as a picture: progress over time, overheads, throughput in recovery.

The papers' figures 5 to 11 in one. Needs matplotlib, which is an extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast import events
from holdfast.report.cluster.compare import Comparison, compare, name_of
from holdfast.report.cluster.failures import Progress
from holdfast.report.cluster.training import ClusterRun

_COLOURS = ("#2b5c8a", "#d08a20", "#2e8b57", "#8a4fa3", "#b0413e", "#3b9aa8", "#7a6a4f", "#d16d9e")
_BASE, _CPU, _KILL = "#888888", "#b9c7d6", "#c03030"
_WHOLE = 100.0


def draw_comparison(
    found: Comparison,
    base_happened: Sequence[events.Event],
    happened: Sequence[Sequence[events.Event]],
    path: Path,
) -> bool:
    """Write the picture, of the runs' events in their order; False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(10.5, 8), dpi=110, layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 2))
    _draw_progress(figure.add_subplot(grid[0, :]), found, base_happened, happened)
    _draw_overheads(figure.add_subplot(grid[1, 0]), found)
    _draw_recovery(figure.add_subplot(grid[1, 1]), found)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return True


def progress_points(happened: Sequence[events.Event]) -> tuple[list[float], list[int]]:
    """Samples done over the seconds since the first step, as often as it was told."""
    progress = Progress(happened)
    start = progress.first_step
    if start is None:
        return [], []
    told = [(t - start, d) for t, d in zip(progress.times, progress.done, strict=True)]
    told = [(t, d) for t, d in told if t >= 0]
    return [t for t, _ in told], [d for _, d in told]


def _draw_progress(
    axes: Any,
    found: Comparison,
    base_happened: Sequence[events.Event],
    happened: Sequence[Sequence[events.Event]],
) -> None:
    axes.plot(*progress_points(base_happened), color=_BASE, linestyle="--", label="none, no kills")
    for number, (run, each) in enumerate(zip(found.runs, happened, strict=True)):
        colour = _COLOURS[number % len(_COLOURS)]
        moments, samples = progress_points(each)
        is_lost = run.error is not None
        name = f"{name_of(run)} (lost)" if is_lost else name_of(run)
        axes.plot(moments, samples, color=colour, linewidth=1.8, label=name)
        _mark_kills(axes, each, colour)
        if is_lost and moments:
            axes.plot(moments[-1], samples[-1], "x", color=_KILL, markersize=10, mew=2.5)
    kills = sum(isinstance(e, events.ServerStruck) for e in (happened[0] if happened else ()))
    title = "samples done over time" + ("; triangles: servers are killed" if kills else "")
    axes.set_title(title, loc="left", weight="bold")
    axes.set_xlabel("seconds since the first step")
    axes.set_ylabel("samples")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.legend(loc="lower right", frameon=False)


def _mark_kills(axes: Any, happened: Sequence[events.Event], colour: str) -> None:
    start = Progress(happened).first_step
    size = next((e.batch_size for e in happened if isinstance(e, events.ClusterStarted)), 0)
    for event in happened:
        if isinstance(event, events.ServerStruck) and start is not None:
            axes.plot(
                event.time - start,
                event.batches * size,
                "v",
                color=colour,
                markeredgecolor=_KILL,
                markersize=9,
                zorder=3,
            )


def _draw_overheads(axes: Any, found: Comparison) -> None:
    runs = _survivors(found)
    against = [compare(run, found.base) for run in runs]
    places = range(len(runs))
    times = [_WHOLE * (each.time_overhead or 0.0) for each in against]
    cpus = [_WHOLE * (each.cpu_overhead or 0.0) for each in against]
    bars = axes.bar([p - 0.2 for p in places], times, 0.4, color=_colours(found), label="time")
    axes.bar_label(bars, fmt="%+.0f", padding=2, fontsize=8)
    bars = axes.bar([p + 0.2 for p in places], cpus, 0.4, color=_CPU, label="CPU seconds")
    axes.bar_label(bars, fmt="%+.0f", padding=2, fontsize=8)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.margins(y=0.15)
    axes.set_title("on top of none, %: time | CPU (pale)", loc="left", weight="bold")
    _label_runs(axes, runs)


def _draw_recovery(axes: Any, found: Comparison) -> None:
    """Throughput during recovery; where nothing was lost, over the whole run."""
    runs = _survivors(found)
    has_failures = any(run.failures for run in runs)
    if has_failures:
        shares = [compare(run, found.base).during_share for run in runs]
        axes.set_title("throughput during recovery, % of before", loc="left", weight="bold")
    else:
        base = found.base.samples_per_s
        shares = [run.samples_per_s / base if run.samples_per_s and base else None for run in runs]
        axes.set_title("throughput, % of none", loc="left", weight="bold")
    values = [0.0 if share is None else _WHOLE * share for share in shares]
    bars = axes.bar(range(len(runs)), values, 0.6, color=_colours(found))
    labels = ["?" if share is None else f"{_WHOLE * share:.0f}" for share in shares]
    axes.bar_label(bars, labels, padding=2, fontsize=8)
    axes.axhline(_WHOLE, color=_BASE, linestyle="--", linewidth=1)
    axes.set_ylim(0, max([115.0, *(1.15 * value for value in values)]))
    _label_runs(axes, runs)


def _survivors(found: Comparison) -> list[ClusterRun]:
    return [run for run in found.runs if run.error is None]


def _colours(found: Comparison) -> list[str]:
    return [
        _COLOURS[number % len(_COLOURS)]
        for number, run in enumerate(found.runs)
        if run.error is None
    ]


def _label_runs(axes: Any, runs: Sequence[ClusterRun]) -> None:
    axes.set_xticks(range(len(runs)), [name_of(run).replace(" + ", "\n+ ") for run in runs])
    axes.tick_params(axis="x", labelsize=8)
