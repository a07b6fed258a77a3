"""Characters on a terminal: lines and columns of cells with their labels, and an edge around some.

     died  born →
    alive   1.0k░  2.0k▓│  4.0k█
       30       ·  2.0k▓│
          ──────────────┘
       20   1.0k░
              10     20      30

The last step of a drawing: grid.py says what each cell holds and which ones the edge surrounds;
here it becomes text, line by line.

Invariants:
- A column starts at the same character in every line: what is beside the edge leaves room for it.
- A cell shows its shade at any width, and its number only where every number fits.
- The edge is drawn with lines: it shows without colour.

Not here: what the numbers count, which checkpoints share a cell, the words around it (grid.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.text import Text

SHADES = "░▒▓█"
_NUMBER_WIDTH = 6  # of a cell, from which on a number fits into it


@dataclass(frozen=True, slots=True)
class Scale:
    """Shades for numbers from least to most, each the same factor wide."""

    least: int
    most: int

    def shade(self, number: int) -> str:
        """The shade of a number.

        >>> "".join(Scale(1, 10_000).shade(n) for n in (1, 9, 11, 999, 10_000))
        '░░▒▓█'
        """
        if self.most <= self.least:
            return SHADES[-1]
        place = math.log(max(number, 1) / self.least) / math.log(self.most / self.least)
        return SHADES[min(len(SHADES) - 1, max(0, int(place * len(SHADES))))]

    def bounds(self) -> list[int]:
        """The least number of each shade.

        >>> Scale(1, 10_000).bounds()
        [1, 10, 100, 1000]
        """
        factor = (self.most / self.least) ** (1 / len(SHADES))
        return [round(self.least * factor**at) for at in range(len(SHADES))]


def make_scale(numbers: Iterable[int]) -> Scale:
    """A scale over some numbers."""
    found = [max(1, number) for number in numbers] or [1]
    return Scale(min(found), max(found))


def short(number: int) -> str:
    """A number in at most four characters.

    >>> [short(n) for n in (0, 999, 1000, 9_960, 12_345, 999_600, 1_250_000)]
    ['0', '999', '1.0k', '10k', '12k', '1.0M', '1.2M']
    """
    value, unit = float(number), 0
    while value >= 999.5 and unit < 5:
        value, unit = value / 1000, unit + 1
    if unit == 0:
        return f"{value:.0f}"
    return f"{value:.1f}{'kMGTP'[unit - 1]}" if value < 9.95 else f"{value:.0f}{'kMGTP'[unit - 1]}"


@dataclass(frozen=True, slots=True)
class Mark:
    """What a cell shows; ``is_bright`` sets it apart by colour."""

    number: int
    shade: str
    is_bright: bool


@dataclass(frozen=True, slots=True)
class Canvas:
    """One drawing, line by line; the edge surrounds the upper left corner, or nothing.

    ``marks`` are by (line, column). A None there is a dot: a cell that could be and is not; a place
    without any entry stays blank.
    """

    columns: tuple[str, ...]
    lines: tuple[str, ...]
    marks: Mapping[tuple[int, int], Mark | None]
    edge_lines: int
    edge_columns: int
    cell_width: int
    label_width: int

    def head(self, lines: str, columns: str) -> Text:
        """What the labels are, of the lines and of the columns."""
        return Text(f"{lines.rjust(self.label_width)}  {columns} →", style="dim")

    def line(self, at: int) -> Text:
        """A line of cells behind its label."""
        text = Text(self.lines[at].rjust(self.label_width) + " ", no_wrap=True)
        for column in range(len(self.columns)):
            text.append_text(self._cell(at, column))
            if column + 1 == self.edge_columns:
                text.append("│" if at < self.edge_lines else " ", style="bold red")
        return text

    def _cell(self, line: int, column: int) -> Text:
        mark = self.marks.get((line, column))
        if mark is None:
            dot = "·" if (line, column) in self.marks else " "
            return Text(dot.rjust(self.cell_width), style="dim")
        style = "bold yellow" if mark.is_bright else "cyan"
        if self.cell_width >= _NUMBER_WIDTH:
            return Text(short(mark.number).rjust(self.cell_width - 1) + mark.shade, style=style)
        return Text(mark.shade * self.cell_width, style=style)

    def bottom(self) -> Text:
        """The lower side of the edge."""
        dashes = "─" * (self.cell_width * self.edge_columns)
        return Text(" " * (self.label_width + 1)).append(dashes + "┘", style="bold red")

    def axis(self) -> Text:
        """Labels under their columns, as many as fit."""
        line = ""
        for at, label in enumerate(self.columns):
            start = at * self.cell_width + (0 < self.edge_columns <= at)
            if self.cell_width > len(label) and self.cell_width >= _NUMBER_WIDTH:
                start += self.cell_width - 1 - len(label)
            if start > len(line) or not line:
                line = line.ljust(start) + label
        return Text(" " * (self.label_width + 1) + line, style="dim", no_wrap=True)
