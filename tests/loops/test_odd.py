"""Odd programs: every row of every restored step, to the bit.

With ``incrcp`` a row that is missed once stays stale, so it is the strictest strategy; with
``cpr-mfu`` rows must stay marked until they are saved.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.loops.oracle import check, live_through
from tests.loops.program import ODD, Program

ROWS = 3_000


@pytest.mark.parametrize("strategy", ["incrcp", "cpr-mfu"])
@pytest.mark.parametrize("name", ODD)
def test_every_row_of_every_step_is_restored_as_it_was(
    name: str, strategy: str, tmp_path: Path, begin: Callable[[str, int], Program]
) -> None:
    program = begin(name, ROWS)
    lived = live_through(program, tmp_path / "run", strategy=strategy, saves=8)
    live_through(program, tmp_path / "run", strategy=strategy, saves=2, lived=lived)  # resumed
    check(tmp_path / "run", lived, strategy=strategy)
