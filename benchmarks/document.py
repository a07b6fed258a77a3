"""The document and its pictures: results as markdown, plots as PNG files beside it.

Machine facts and how to repeat the run come first, then one line for every target, met or not,
then the sections. A run of all sections writes the whole page; a run of some puts these into the
page that is there and leaves everything else, notes by hand included, as it was.

Not here: any measuring; which numbers are shown (the sections decide).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import Machine
from benchmarks.results import AT_MOST, TIMES_LESS, Plot, Ratio, Section, Sheet

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
        f"To repeat: `{REPRODUCE}` on an idle machine; it rewrites this page and its pictures. One "
        "section: `holdfast bench --only NAME --out docs/benchmarks.md`.",
        "",
    ]
    if is_quick:
        lines += ["**Quick run: tiny sizes; the numbers show only that everything works.**", ""]
    lines += ["## Targets", "", *_summary(sections), ""]
    for section in sections:
        lines += _section(section)
    return "\n".join(lines).rstrip() + "\n"


def _summary(sections: Iterable[Section]) -> Iterator[str]:
    lines = [line for section in sections for line in _judged(section)]
    yield _count_met(lines)
    yield ""
    yield "| section | what | beside | ratio | target | met |"
    yield "|---|---|---|---|---|---|"
    yield from lines


def _judged(section: Section) -> Iterator[str]:
    """A line of the summary for each target of a section."""
    for ratio in section.ratios:
        if ratio.target is not None:
            verdict = "yes" if ratio.is_met else "**no**"
            yield (
                f"| [{section.name}](#{anchor(section.title)}) | {ratio.name} | {ratio.against} "
                f"| {shown_ratio(ratio)} | {shown_target(ratio)} | {verdict} |"
            )


def _count_met(lines: Sequence[str]) -> str:
    met = sum(line.endswith("| yes |") for line in lines)
    return f"{met} of {len(lines)} targets are met."


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


_SUMMARY_LINE = re.compile(r"^\| \[(?P<name>\w+)\]\(#(?P<anchor>[^)]*)\) \|")
_COUNT_LINE = re.compile(r"^\d+ of \d+ targets are met\.$")


def put_sections(
    page: str, machine: Machine, sections: Sequence[Section], *, order: Sequence[str]
) -> str:
    """A page with some sections measured again, in the place of what they had found before.

    ``order``: the names of all sections, for those that the page does not have yet.
    """
    for section in sections:
        page = _put_section(page, machine, section, order)
    return page


def _put_section(page: str, machine: Machine, section: Section, order: Sequence[str]) -> str:
    head, *blocks = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    titles = [block.splitlines()[0].removeprefix("## ") for block in blocks]
    summary = titles.index("Targets")
    before = set(order[: order.index(section.name)])
    told = _SummaryLines.read(blocks[summary], before, section.name)
    lines = _section(section)
    lines[2:2] = [f"Measured on its own, with {dict(machine.lines())['versions']}.", ""]
    block = "\n".join(lines) + "\n"
    if section.title in titles:
        blocks[titles.index(section.title)] = block
    else:
        earlier = [at for at, title in enumerate(titles) if anchor(title) in told.earlier]
        blocks.insert(max(earlier, default=summary) + 1, block)
    blocks[summary] = told.with_lines(list(_judged(section)))
    return (head + "".join(blocks)).rstrip() + "\n"


@dataclass(frozen=True, slots=True)
class _SummaryLines:
    """The block of targets without one section's lines, and where these belong."""

    lines: list[str]
    place: int
    earlier: frozenset[str]
    """The anchors of the sections that come before."""

    @classmethod
    def read(cls, block: str, before: Collection[str], name: str) -> _SummaryLines:
        lines: list[str] = []
        place, own = 0, None
        earlier: set[str] = set()
        for line in block.splitlines():
            found = _SUMMARY_LINE.match(line)
            if found is not None and found["name"] == name:
                own = len(lines) if own is None else own
                continue
            lines.append(line)
            if found is not None and found["name"] in before:
                earlier.add(found["anchor"])
            if line.startswith("|---") or (found is not None and found["name"] in before):
                place = len(lines)
        return cls(lines, place if own is None else own, frozenset(earlier))

    def with_lines(self, own: Sequence[str]) -> str:
        lines = [*self.lines[: self.place], *own, *self.lines[self.place :]]
        count = _count_met([line for line in lines if _SUMMARY_LINE.match(line)])
        lines = [count if _COUNT_LINE.match(line) else line for line in lines]
        return "\n".join(lines) + "\n"


def write(
    out: Path,
    machine: Machine,
    sections: Sequence[Section],
    *,
    is_quick: bool = False,
    order: Sequence[str] = (),
) -> None:
    """Write the document, and its pictures into a folder beside it.

    ``order``: put the sections into the document that is there; it names all sections.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    images = out.parent / IMAGES
    images.mkdir(exist_ok=True)
    for section in sections:
        for plot in section.plots:
            draw(plot, images / f"{plot.name}.png")
    if order and out.exists():
        page = put_sections(out.read_text(encoding="utf-8"), machine, sections, order=order)
    else:
        page = render(machine, sections, is_quick=is_quick)
    out.write_text(page, encoding="utf-8")


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
