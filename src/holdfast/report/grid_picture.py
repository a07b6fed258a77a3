"""A chunk grid as a picture: cells by size on a log scale, the dead share, the step's rectangle.

Needs matplotlib, which is an extra.

Invariant: the same layout as in the terminal (grid.py), only finer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.report import words
from holdfast.report.grid import (
    BYTES,
    ROWS,
    GridCell,
    GridView,
    Layout,
    measured,
    note_lines,
    plan_layout,
    span,
)
from holdfast.report.layout import NAME_MAX
from holdfast.visible import visible

_CELLS_MAX = 200  # a side; more would be less than a pixel or two each
_TICKS = 12
_EDGE = "#d62728"


def draw_grid(seen: GridView, path: Path, *, by: str = BYTES, kind: str = "png") -> bool:
    """Write the picture, as ``png`` or ``svg``; False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    plan = plan_layout(seen, columns_max=_CELLS_MAX, lines_max=_CELLS_MAX)
    has_dead = seen.total.dead_rows > 0
    figure = Figure(figsize=(13 if has_dead else 8.5, 6.4), dpi=110, layout="constrained")
    axes = figure.subplots(1, 2 if has_dead else 1, squeeze=False, sharey=True)[0]
    _draw_size(figure, axes[0], plan, by)
    if has_dead:
        _draw_dead(figure, axes[1], plan)
    for panel in axes:
        _draw_axes(panel, plan)
        _draw_rectangle(panel, plan)
    axes[0].set_ylabel("checkpoint at which the rows died (newest on top)")
    # Names of the run are in these: a dollar sign begins no formula, a backslash no command.
    plain = {"parse_math": False, "usetex": False, "x": 0.01, "ha": "left"}
    figure.suptitle(_title(seen, plan), fontsize=11, **plain)
    figure.supxlabel(_caption(seen), fontsize=8, **plain)
    figure.savefig(path, format=kind)
    return True


def _title(seen: GridView, plan: Layout) -> str:
    total = seen.total
    where = f"{len(seen.tables)} tables"
    if len(seen.tables) == 1:
        where = f"table {visible(seen.tables[0], most=NAME_MAX)}"
    below = f"rollup {seen.rollup} over base" if seen.has_rollup else "base"
    below += f" {seen.base}"
    text = (
        f"Chunk grid of {below}: {where}, "
        f"{words.counted(len(seen.checkpoints), 'checkpoint')}\n"
        f"{words.counted(total.chunks, 'chunk')}, {words.counted(total.rows, 'row')}, "
        f"{words.size(total.bytes)}, {words.share(total.dead_rows, total.rows)} of the rows dead "
        "in place"
    )
    per_column, per_line = plan.joined
    if per_column > 1 or per_line > 1:
        text += f"\n(up to {per_column} × {per_line} cells drawn as one)"
    return text


def _caption(seen: GridView) -> str:
    return "\n".join(visible(f"{name}: {text}", most=500) for name, text in note_lines(seen))


def _draw_cells(axes: Any, plan: Layout, value: Callable[[GridCell], float], **colours: Any) -> Any:
    values_LC = np.full((len(plan.lines), max(1, len(plan.columns))), np.nan)
    for line, column, cell in plan.cells:
        values_LC[line, column] = value(cell)
    return axes.pcolormesh(
        np.arange(values_LC.shape[1] + 1), _edges(plan), values_LC, rasterized=True, **colours
    )


def _edges(plan: Layout) -> np.ndarray:
    """Where lines begin and end: row 0 is a band that can be seen, however many lines follow."""
    band = max(1.0, len(plan.lines) / 25)
    return np.concatenate([[0.0], band + np.arange(len(plan.lines))])


def _draw_size(figure: Any, axes: Any, plan: Layout, by: str) -> None:
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FuncFormatter, LogLocator

    sizes = [max(1, cell.measure(by)) for _, _, cell in plan.cells] or [1]
    low, high = min(sizes), max(sizes)
    if low == high:
        low, high = max(1, low // 2), 2 * high
    image = _draw_cells(
        axes, plan, lambda cell: max(1, cell.measure(by)), norm=LogNorm(low, high), cmap="viridis"
    )
    bar = figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02)
    bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value, by)))
    bar.ax.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    axes.set_title(f"{'rows' if by == ROWS else 'bytes'} of a cell", loc="left", fontsize=10)


def _tick(value: float, by: str) -> str:
    return f"{value:,.0f}" if by == ROWS else measured(round(value), by)


def _draw_dead(figure: Any, axes: Any, plan: Layout) -> None:
    from matplotlib.ticker import PercentFormatter

    image = _draw_cells(
        axes, plan, lambda cell: cell.dead_rows / cell.rows, vmin=0.0, cmap="magma_r"
    )
    bar = figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02)
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.set_title("dead rows still in place, of a cell's rows", loc="left", fontsize=10)


def _draw_axes(axes: Any, plan: Layout) -> None:
    at = _ticks(len(plan.columns))
    axes.set_xticks([index + 0.5 for index in at], [str(plan.columns[index][0]) for index in at])
    axes.set_xlabel("checkpoint at which the rows were born")
    edges = _edges(plan)
    # the first lines would be written over row 0
    lines = [at for at in _ticks(len(plan.lines) - 1, start=1) if edges[at] >= edges[-1] / 25]
    axes.set_yticks(
        [edges[1] / 2, *((edges[at] + edges[at + 1]) / 2 for at in lines)],
        ["alive", *(span(plan.lines[at]) for at in lines)],
    )
    axes.axhline(edges[1], color="#888888", linewidth=0.8)
    axes.set_xlim(0, max(1, len(plan.columns)))
    axes.set_ylim(edges[-1], 0)
    axes.set_facecolor("#f2f2f2")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _ticks(count: int, start: int = 0) -> Sequence[int]:
    """At most so many places of a list, evenly."""
    return range(start, start + count, max(1, -(-count // _TICKS)))


def _draw_rectangle(axes: Any, plan: Layout) -> None:
    if not plan.read_lines:
        return
    from matplotlib.patches import Rectangle

    axes.add_patch(
        Rectangle(
            (0, 0),
            plan.read_columns,
            _edges(plan)[plan.read_lines],
            fill=False,
            edgecolor=_EDGE,
            linewidth=2.5,
            clip_on=False,
            zorder=5,
        )
    )
