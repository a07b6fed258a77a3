"""A training on a cluster as a picture: throughput over time, kills, and rows that were missing.

Needs matplotlib, which is an extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast import events
from holdfast.report import words
from holdfast.report.cluster.failures import Progress
from holdfast.report.cluster.training import ClusterRun
from holdfast.report.layout import NAME_MAX
from holdfast.visible import visible

_RATE, _KILL, _REPLACED, _WHOLE = "#2b5c8a", "#c03030", "#d08a20", "#2e8b57"
_BINS = 60
_BIN_S_MIN = 0.25


def draw_cluster(run: ClusterRun, happened: Sequence[events.Event], path: Path) -> bool:
    """Write the picture; False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    progress = Progress(happened)
    start = progress.first_step
    if start is None or progress.end is None:
        return False
    figure = Figure(figsize=(10, 5.6), dpi=110, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    moments, rates = throughput(progress)
    top.step(moments, rates, where="post", color=_RATE, linewidth=1.6, label="samples/s")
    _mark(top, run, start, has_labels=True)
    auc = "" if run.auc is None else f", held-out AUC {run.auc:.4f}"
    lost = words.counted(len(run.failures), "server")
    how = "went back" if run.layer is not None and run.layer.restores else "went on"
    top.set_title(
        f"{run.setup.strategy}: {lost} lost, training {how}{auc}", loc="left", weight="bold"
    )
    top.set_ylabel("samples a second")
    top.set_ylim(0, 1.3 * max(rates, default=1.0) or 1.0)  # room for the legend
    top.legend(loc="upper right", frameon=False, ncols=4)
    _draw_missing(bottom, run, happened, start)
    _mark(bottom, run, start, has_labels=False)
    bottom.set_xlabel("seconds since the first step")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return True


def throughput(progress: Progress) -> tuple[list[float], list[float]]:
    """Samples a second in equal spans of time, by the span's start since the first step."""
    start, end = progress.first_step, progress.end
    if start is None or end is None or end <= start:
        return [], []
    span = max(_BIN_S_MIN, (end - start) / _BINS)
    count = max(1, int((end - start) / span))
    moments = [at * span for at in range(count)]
    rates = [progress.rate(start + at, start + at + span) or 0.0 for at in moments]
    return [*moments, count * span], [*rates, rates[-1]]


def _mark(axes: Any, run: ClusterRun, start: float, *, has_labels: bool) -> None:
    for number, failure in enumerate(run.failures):
        at = failure.time - start
        is_first = has_labels and number == 0
        marks = (
            (0.0, _KILL, f"server lost ({_literal(failure.how)})"),
            (failure.replaced_s, _REPLACED, "replaced"),
            (failure.whole_s, _WHOLE, "recovered"),
        )
        for seconds, colour, label in marks:
            if seconds is not None:
                axes.axvline(
                    at + seconds, color=colour, linewidth=1.2, label=label if is_first else None
                )
        if failure.over_s is not None:
            axes.axvspan(at, at + failure.over_s, color=_KILL, alpha=0.06, linewidth=0)
        if has_labels:
            axes.annotate(
                f" server {failure.server}",
                xy=(at, 0.02),
                xycoords=axes.get_xaxis_transform(),
                va="bottom",
                color=_KILL,
            )


def _literal(text: str) -> str:
    r"""A process's last words, without a formula in them.

    >>> _literal("cost $1$")
    'cost \\$1\\$'
    """
    return visible(text, most=NAME_MAX).replace("$", r"\$")


def _draw_missing(
    axes: Any, run: ClusterRun, happened: Sequence[events.Event], start: float
) -> None:
    """Rows that replacements lacked, over time."""
    for failure in run.failures:
        ranges = [
            e
            for e in happened
            if isinstance(e, events.RangeRecovered)
            and e.server == failure.server
            and failure.time <= e.time <= failure.time + (failure.whole_s or float("inf"))
        ]
        moments = [failure.time - start, *(e.time - start for e in ranges)]
        left = [failure.rows, *(e.left for e in ranges)]
        if failure.is_loaded and failure.rows_s is not None:  # all at once
            moments.append(failure.time + failure.rows_s - start)
            left.append(0)
        axes.step(moments, left, where="post", linewidth=1.6, label=f"server {failure.server}")
    axes.set_ylabel("rows missing")
    axes.set_ylim(bottom=0)
    if run.failures:
        axes.legend(loc="upper right", frameon=False)
