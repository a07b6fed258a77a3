"""Every training program under every strategy: every row of every restored step, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.loops.oracle import check, live_through
from tests.loops.page import ROWS, SAVES, row_of, rows_on_page
from tests.loops.program import LOOPS, Program

STRATEGIES = ("full", "check-n-run", "incrcp", "cpr-mfu")
LARGE = 1_000_003
CELLS = [name for name, loop in LOOPS.items() if not loop.escapes]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CELLS)
def test_every_row_of_every_step_is_restored_as_it_was(
    name: str, strategy: str, tmp_path: Path, begin: Callable[[str, int], Program]
) -> None:
    program = begin(name, ROWS)
    lived = live_through(program, tmp_path / "run", strategy=strategy, saves=SAVES)
    if strategy == "check-n-run":  # the page says what this loop costs
        assert row_of(LOOPS[name], lived) in rows_on_page(), "run: python -m tests.loops.page"
    live_through(program, tmp_path / "run", strategy=strategy, saves=2, lived=lived)  # resumed
    check(tmp_path / "run", lived, strategy=strategy)


@pytest.mark.parametrize("name", CELLS)
def test_no_row_of_a_million_is_missed(
    name: str, tmp_path: Path, begin: Callable[[str, int], Program]
) -> None:
    program = begin(name, LARGE)
    lived = live_through(program, tmp_path / "run", strategy="check-n-run", saves=6)
    check(tmp_path / "run", lived, strategy="check-n-run")
