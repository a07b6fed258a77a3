"""Writes that torch does not count are found within a turn of saves, told, and then compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.checkpoint.tracking import FULL_TURN_SAVES
from tests.loops.oracle import live_through, stale_by_step
from tests.loops.program import LOOPS, Program
from tests.loops.writing import EDITED_AT

SAVES = EDITED_AT[1] + 2
ESCAPES = [name for name, loop in LOOPS.items() if loop.escapes]


@pytest.mark.parametrize("strategy", ["check-n-run", "incrcp"])
@pytest.mark.parametrize(("name", "rows"), [(n, r) for n in ESCAPES for r in (3_000, 1_000_003)])
def test_what_torch_does_not_count_is_found_within_a_turn_and_told(
    name: str, rows: int, strategy: str, tmp_path: Path, begin: Callable[[str, int], Program]
) -> None:
    if rows > 3_000 and strategy == "incrcp":
        pytest.skip("a million rows once each")
    program = begin(name, rows)
    lived = live_through(program, tmp_path / "run", strategy=strategy, saves=SAVES, steps_a_save=1)
    stale = stale_by_step(tmp_path / "run", lived)
    first, second = EDITED_AT
    # Stale from the edit on, in at most a turn of saves; then none, though it is edited again.
    assert stale.keys() <= set(range(first, first + FULL_TURN_SAVES))
    assert sorted(stale) == list(range(first, first + len(stale)))
    assert second not in stale
    escapes = [told for told in lived.told() if told.is_escape]
    assert [told.table for told in escapes] == ["item.weight"]
    assert "ck.mark" in escapes[0].todo
    assert [told.method for told in lived.told()][-1] == "compare"


@pytest.mark.parametrize("name", ESCAPES)
def test_hash_tracking_never_misses_them(
    name: str, tmp_path: Path, begin: Callable[[str, int], Program]
) -> None:
    program = begin(name, 3_000)
    lived = live_through(
        program, tmp_path / "run", strategy="incrcp", saves=6, steps_a_save=1, tracking="hash"
    )
    assert stale_by_step(tmp_path / "run", lived) == {}
