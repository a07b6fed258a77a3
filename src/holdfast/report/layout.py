"""How tables look: few lines, close columns, so that ten columns fit a terminal of eighty.

Invariant: a cell is shown as it is. A name with markup in it is no markup, and nothing in it is
acted on by a terminal.
"""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.visible import visible

# Characters of a cell, and of a name in a column that is never broken; ``--json`` has all of them.
_CELL_MAX = 1000
NAME_MAX = 40


class _LiteralTable(Table):
    """A table that takes strings at their word."""

    def add_row(self, *cells: RenderableType | None, **more: Any) -> None:
        super().add_row(*(literal(c) if isinstance(c, str) else c for c in cells), **more)


def literal(text: str, *, style: str = "", most: int = _CELL_MAX) -> Text:
    """A string as it is, in one line; the end of a very long one is left out."""
    return Text(visible(text, most=most), style=style)


def make_table(title: str) -> Table:
    """An empty table under a title."""
    return _LiteralTable(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )


def make_grid() -> Table:
    """Lines of a few cells, without a frame."""
    return _LiteralTable.grid(padding=(0, 2))


def add_numbers(table: Table, *names: str) -> None:
    """Columns of numbers: to the right, never broken."""
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
