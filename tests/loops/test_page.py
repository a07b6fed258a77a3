"""docs/training-loops.md has a row for every training program, and none without one."""

from __future__ import annotations

from tests.loops.page import BEGIN, END, PAGE
from tests.loops.program import LOOPS


def test_every_program_has_its_row_and_every_row_its_program() -> None:
    tables = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    rows = [line for line in tables.splitlines() if line.startswith("| ")]
    titles = [line.removeprefix("| ").split(" | ")[0] for line in rows]
    titles = [title for title in titles if title != "your loop"]
    assert sorted(titles) == sorted(loop.title for loop in LOOPS.values())
