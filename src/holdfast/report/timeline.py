"""The demo as a picture: loss over steps, checkpoints by size, the kill and the resume.

Needs matplotlib, which is an extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from holdfast import events
from holdfast.report import words
from holdfast.report.story import Kill

_LOST, _LOSS, _KILL, _RESUME = "#b8b8b8", "#2b5c8a", "#c03030", "#2e8b57"
_BASE, _DELTA = "#2b5c8a", "#8fb8de"


def draw_timeline(happened: Sequence[events.Event], kill: Kill, path: Path) -> bool:
    """Write the picture; False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(10, 5.6), dpi=110, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_loss(top, happened, kill)
    _draw_checkpoints(bottom, happened, kill)
    figure.savefig(path)
    return True


def _draw_loss(axes: Any, happened: Sequence[events.Event], kill: Kill) -> None:
    reports = [e for e in happened if isinstance(e, events.TrainProgress) and e.auc is None]
    before = [e for e in reports if e.time <= kill.time]
    after = [e for e in reports if e.time > kill.time]
    kept = [e for e in before if e.step <= kill.resumed_from]
    lost = [e for e in before if e.step >= kill.resumed_from]
    axes.plot(*_loss(lost), color=_LOST, linewidth=6, label="lost by the kill")
    axes.plot(*_loss(kept), color=_LOSS, linewidth=1.4, label="loss")
    axes.plot(*_loss(after), color=_RESUME, linewidth=1.4, label="loss after the resume")
    height = before[-1].loss if before else 0.0
    axes.plot([kill.step], [height], "X", color=_KILL, markersize=12, label="SIGKILL", zorder=5)
    axes.axvline(kill.step, color=_KILL, linewidth=0.8, alpha=0.5)
    axes.axvline(kill.resumed_from, color=_RESUME, linewidth=0.8, alpha=0.7)
    axes.annotate(
        f"killed at {kill.step}, resumed from {kill.resumed_from}\n"
        f"{words.counted(kill.lost_steps, 'step')} taken again",
        xy=(kill.resumed_from, 0.96),
        xycoords=axes.get_xaxis_transform(),
        xytext=(-8, 0),
        textcoords="offset points",
        ha="right",
        va="top",
    )
    final = [e for e in happened if isinstance(e, events.TrainProgress) and e.auc is not None]
    auc = f", held-out AUC {final[-1].auc:.4f}" if final else ""
    axes.set_title(f"A training that was killed and went on{auc}", loc="left", weight="bold")
    axes.set_ylabel("training loss")
    settled = [e.loss for e in reports if e.step > 0.02 * reports[-1].step]
    if settled:  # the first few steps would flatten all that follow
        room = 0.35 * (max(settled) - min(settled))
        axes.set_ylim(min(settled) - room / 3, max(settled) + room)
    axes.legend(loc="upper right", frameon=False)
    _tidy(axes)


def _loss(reports: Sequence[events.TrainProgress]) -> tuple[list[int], list[float]]:
    return [e.step for e in reports], [e.loss for e in reports]


def _draw_checkpoints(axes: Any, happened: Sequence[events.Event], kill: Kill) -> None:
    saves = [e for e in happened if isinstance(e, events.SaveDurable)]
    steps = sorted({e.step for e in saves})
    gap = min((b - a for a, b in pairwise(steps)), default=10)
    for kind, colour in (("base", _BASE), ("delta", _DELTA)):
        chosen = [e for e in saves if e.checkpoint == kind]
        axes.bar(
            [e.step for e in chosen],
            [e.bytes / 1e6 for e in chosen],
            width=0.5 * gap,
            color=colour,
            label=kind,
        )
    for event in saves:
        axes.annotate(
            words.share(event.bytes, event.full_bytes),
            xy=(event.step, event.bytes / 1e6),
            ha="center",
            va="bottom",
            fontsize=8,
        )
    axes.axvline(kill.step, color=_KILL, linewidth=0.8, alpha=0.5)
    axes.axvline(kill.resumed_from, color=_RESUME, linewidth=0.8, alpha=0.7)
    if saves:
        axes.set_title(
            f"Checkpoints; a full one in fp32 would be {words.size(saves[-1].full_bytes)}",
            loc="left",
        )
    axes.margins(y=0.2)
    axes.set_xlabel("step")
    axes.set_ylabel("MB")
    axes.legend(loc="upper right", frameon=False, ncols=2)
    _tidy(axes)


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
