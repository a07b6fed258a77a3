"""Every training program of the matrix, its tables on a device that is behind: CPU tensors pretend.

The programs make their tensors in host memory, so these tests run on no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.pretend import PretendDevice, pretending
from tests.loops.conftest import (
    COMPILING,
    begin,  # noqa: F401
)
from tests.loops.oracle import check, live_through
from tests.loops.program import LOOPS, Program

ROWS = 3_000
CELLS = [name for name, loop in LOOPS.items() if not loop.escapes]

pytestmark = pytest.mark.filterwarnings(COMPILING)


@pytest.mark.parametrize("strategy", ["check-n-run", "cpr-mfu"])
@pytest.mark.parametrize("name", CELLS)
def test_every_row_of_every_step_is_restored_as_it_was(
    name: str,
    strategy: str,
    tmp_path: Path,
    begin: Callable[[str, int], Program],  # noqa: F811
) -> None:
    with pretending(PretendDevice(is_prompt=False)):
        program = begin(name, ROWS)
        lived = live_through(program, tmp_path / "run", strategy=strategy, saves=6)
        live_through(program, tmp_path / "run", strategy=strategy, saves=2, lived=lived)
        check(tmp_path / "run", lived, strategy=strategy)
