"""How tables look: few lines, close columns, so that ten columns fit a terminal of eighty."""

from __future__ import annotations

from rich import box
from rich.table import Table


def make_table(title: str) -> Table:
    """An empty table under a title."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )


def add_numbers(table: Table, *names: str) -> None:
    """Columns of numbers: to the right, never broken."""
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
