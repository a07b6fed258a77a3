"""The tables of docs/training-loops.md: a row for each training program, as the matrix saw it.

    python -m tests.loops.page      writes the tables anew

A row says what a save takes and why. The matrix (test_matrix.py) runs the program and compares.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from holdfast.checkpoint.tracking import FULL_TURN_SAVES
from tests.loops import customizing, optimizing, touching, writing
from tests.loops.oracle import Lived, live_through
from tests.loops.program import LOOPS, Loop

PAGE = Path(__file__).parents[2] / "docs" / "training-loops.md"
SECTIONS = {
    "Ways of using a table": touching,
    "Optimizers and what surrounds them": optimizing,
    "Optimizers that Holdfast does not know": customizing,
    "Writes that are no training": writing,
}
ROWS, SAVES = 3_000, 8
_SAVED = {
    "gradient": "rows with a gradient",
    "trained": "rows that ever had a gradient",
    "compare": "rows that differ",
    "whole": "every row",
}
_ESCAPED = f"rows that differ, at most {FULL_TURN_SAVES} saves late"


def row_of(loop: Loop, lived: Lived) -> str:
    """The program's line in the page, from what was told while it ran."""
    told = [event for event in lived.told() if event.method in _SAVED]
    methods = list(dict.fromkeys(event.method for event in told)) or ["gradient"]
    saved = " or ".join(_SAVED[method] for method in methods)
    if loop.escapes:
        return f"| {loop.title} | {_ESCAPED} | torch does not count this write |"
    reasons = "; ".join(dict.fromkeys(event.reason for event in told))
    return f"| {loop.title} | {saved} | {reasons or '–'} |"


def rows_on_page() -> set[str]:
    """Every line of the page that is a row of a table."""
    return {line for line in PAGE.read_text().splitlines() if line.startswith("| ")}


def tables() -> str:
    """All tables, by running every program once."""
    parts = []
    for title, module in SECTIONS.items():
        lines = [f"### {title}", "", "| your loop | a delta holds | why |", "|---|---|---|"]
        lines += [_run(loop) for loop in LOOPS.values() if loop.make.__module__ == module.__name__]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _run(loop: Loop) -> str:
    torch.manual_seed(5)
    program = loop.make(ROWS)
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            lived = live_through(program, run, strategy="check-n-run", saves=SAVES)
        return row_of(loop, lived)
    finally:
        program.end()


BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def write() -> None:
    """Put new tables between the page's markers."""
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{tables()}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    write()
