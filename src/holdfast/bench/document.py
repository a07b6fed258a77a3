"""The document and its pictures: results as markdown, plots as PNG files beside it.

Machine facts and how to repeat the run come first, then one line for every target, met or not,
then the sections.

Not here: any measuring; which numbers are shown (the sections decide).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from holdfast.bench.machine import Machine
from holdfast.bench.results import AT_MOST, TIMES_LESS, Plot, Ratio, Section, Sheet

# Told apart also by those who see few colours.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
MARKERS = "osD^vPX"
REPRODUCE = "make bench"
IMAGES = "img"


def render(machine: Machine, sections: Sequence[Section], *, is_quick: bool = False) -> str:
    """The whole document."""
    lines = [
        "# Benchmarks",
        "",
        "Every speed is a ratio: ours beside a named peer or a physical limit, measured in turns "
        "in one run on one machine. Medians. A target that is missed is shown as missed.",
        "",
        "| machine | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in machine.lines()),
        "",
        f"To repeat: `{REPRODUCE}` on an idle machine; it rewrites this page and its pictures.",
        "",
    ]
    if is_quick:
        lines += ["**Quick run: tiny sizes; the numbers show only that everything works.**", ""]
    lines += ["## Targets", "", *_summary(sections), ""]
    for section in sections:
        lines += _section(section)
    return "\n".join(lines).rstrip() + "\n"


def _summary(sections: Iterable[Section]) -> Iterator[str]:
    judged = [(s, r) for s in sections for r in s.ratios if r.target is not None]
    met = sum(bool(ratio.is_met) for _, ratio in judged)
    yield f"{met} of {len(judged)} targets are met."
    yield ""
    yield "| section | what | beside | ratio | target | met |"
    yield "|---|---|---|---|---|---|"
    for section, ratio in judged:
        verdict = "yes" if ratio.is_met else "**no**"
        yield (
            f"| [{section.name}](#{anchor(section.title)}) | {ratio.name} | {ratio.against} "
            f"| {shown_ratio(ratio)} | {shown_target(ratio)} | {verdict} |"
        )


def anchor(title: str) -> str:
    """How a heading is linked to on the pages that render markdown.

    >>> anchor("What it costs, really")
    'what-it-costs-really'
    """
    kept = (c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")
    return "".join(kept)


def shown_ratio(ratio: Ratio) -> str:
    """A quotient for people: shares as per cent, the rest as times.

    >>> shown_ratio(Ratio(name="", ours=1, peer=200, against="", unit="", sense="at most"))
    '0.50 %'
    """
    value = ratio.ratio
    if ratio.sense == AT_MOST and value < 0.2 and (ratio.target is None or ratio.target < 0.2):
        return f"{100 * value:.2f} %" if value >= 1e-3 else f"{100 * value:.3f} %"
    if ratio.sense == TIMES_LESS:
        if value < 0.995:
            return f"{1 / value:.2f}× more"
        return f"{value:.2f}× less" if value < 10 else f"{value:.1f}× less"
    return f"{value:.2f}×" if value < 10 else f"{value:.1f}×"


def shown_target(ratio: Ratio) -> str:
    """A target for people.

    >>> shown_target(Ratio(name="", ours=1, peer=2, against="", unit="", target=0.5))
    'at least 0.5×'
    """
    if ratio.target is None:
        return ""
    if ratio.sense == AT_MOST and ratio.target < 0.2:
        return f"at most {100 * ratio.target:g} %"
    if ratio.sense == TIMES_LESS:
        return f"at least {ratio.target:g}× less"
    return f"{'at most' if ratio.sense == AT_MOST else 'at least'} {ratio.target:g}×"


def _section(section: Section) -> list[str]:
    lines = [f"## {section.title}", "", section.text, ""]
    if section.ratios:
        columns = ("what", "ours", "beside", "its", "ratio", "target", "met")
        rows = tuple(_ratio_cells(ratio) for ratio in section.ratios)
        lines += [*_table(Sheet("", columns, rows)), ""]
        notes = dict.fromkeys(f"{r.name}: {r.note}." for r in section.ratios if r.note)
        lines += [*(f"- {note}" for note in notes), ""] if notes else []
    lines += [line for finding in section.findings for line in (f"**{finding}**", "")]
    for plot in section.plots:
        lines += [f"![{plot.title}]({IMAGES}/{plot.name}.png)", ""]
    for sheet in section.sheets:
        lines += [f"### {sheet.title}", "", *_table(sheet), ""]
        lines += [sheet.note, ""] if sheet.note else []
    return lines


def _ratio_cells(ratio: Ratio) -> tuple[str, ...]:
    verdict = {True: "yes", False: "**no**", None: ""}[ratio.is_met]
    return (
        ratio.name,
        f"{_number(ratio.ours)} {ratio.unit}",
        ratio.against,
        f"{_number(ratio.peer)} {ratio.unit}",
        shown_ratio(ratio),
        shown_target(ratio),
        verdict,
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _table(sheet: Sheet) -> list[str]:
    return [
        f"| {' | '.join(sheet.columns)} |",
        f"|{'---|' * len(sheet.columns)}",
        *(f"| {' | '.join(row)} |" for row in sheet.rows),
    ]


def write(
    out: Path, machine: Machine, sections: Sequence[Section], *, is_quick: bool = False
) -> None:
    """Write the document, and its pictures into a folder beside it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    images = out.parent / IMAGES
    images.mkdir(exist_ok=True)
    for section in sections:
        for plot in section.plots:
            draw(plot, images / f"{plot.name}.png")
    out.write_text(render(machine, sections, is_quick=is_quick), encoding="utf-8")


def draw(plot: Plot, path: Path) -> None:
    """Draw one plot into a PNG file."""
    # The object interface: no global state, no display, safe beside other users of matplotlib.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if plot.is_bars:
        _draw_bars(axes, plot)
    else:
        _draw_lines(axes, plot)
    axes.set_title(plot.title, fontsize=11, loc="left")
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    if plot.has_log_y:
        axes.set_yscale("log")
    else:
        axes.axhline(0, color="#999999", linewidth=0.8)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path)


def _draw_lines(axes: object, plot: Plot) -> None:
    from matplotlib.ticker import MaxNLocator

    if all(isinstance(x, int) for line in plot.lines for x in line.x):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # type: ignore[attr-defined]
    for index, line in enumerate(plot.lines):
        axes.plot(  # type: ignore[attr-defined]
            line.x,
            line.y,
            label=line.label,
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=4,
            linewidth=1.6,
        )


def _draw_bars(axes: object, plot: Plot) -> None:
    names = list(dict.fromkeys(str(x) for line in plot.lines for x in line.x))
    width = 0.8 / len(plot.lines)
    for index, line in enumerate(plot.lines):
        places = [names.index(str(x)) - 0.4 + width * (index + 0.5) for x in line.x]
        axes.bar(  # type: ignore[attr-defined]
            places,
            line.y,
            width,
            yerr=line.spread or None,
            label=line.label,
            color=COLOURS[index % len(COLOURS)],
            error_kw={"elinewidth": 0.8, "capsize": 2},
        )
    is_long = sum(len(name) for name in names) > 60
    axes.set_xticks(  # type: ignore[attr-defined]
        range(len(names)), names, rotation=20 if is_long else 0, ha="right" if is_long else "center"
    )
