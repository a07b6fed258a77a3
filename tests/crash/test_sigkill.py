"""A real process, really killed, 200 times in one run: the last commit is always there, exactly.

And again with extraction at work beside the training: every kept step is. HOLDFAST_KILLS asks for
another number of kills (and 3 in 10 of it with extraction).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.crash.death import Moment
from tests.crash.killed import GRID_TURNS, TURNS

KILLS, SEED = int(os.environ.get("HOLDFAST_KILLS", "200")), 20240611
GRID_KILLS = KILLS * 3 // 10
LIMIT_S = 280 + 2 * KILLS  # a hang; a life takes about 0.15 s
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.soak


def kill(folder: Path, kills: int, *more: str) -> dict[str, int]:
    """Kill a training so many times; what was seen."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.killed", str(folder), str(kills), str(SEED), *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"seed {SEED}: {done.stderr[-3000:]}"
    seen: dict[str, int] = json.loads(done.stdout)
    print(seen)
    # Otherwise the test would prove little: lives must get somewhere, and be cut off in mid-save.
    # None of this is left to chance, for enough lives choose such a moment.
    turns = GRID_TURNS if more else TURNS
    chosen = Counter(turns[number % len(turns)] for number in range(kills))
    del chosen[None]
    early = chosen[Moment.CALL]  # may die before they could check anything
    in_write = chosen[Moment.WRITE] + chosen[Moment.COMMIT] + chosen[Moment.BUNDLE]
    in_round = chosen[Moment.BUNDLE] + chosen[Moment.ROUND]
    assert min(in_write, chosen[Moment.SAVED] + in_round) >= kills // 10
    assert seen["kills"] == kills
    assert seen["chosen"] == chosen.total()
    assert seen["checks"] > chosen.total() - early
    assert seen["steps"] > chosen[Moment.SAVED] + in_round
    assert seen["leftovers"] >= in_write
    assert seen["waiting"] >= in_round
    return seen


@pytest.mark.timeout(LIMIT_S + 20)
def test_training_killed_again_and_again_restores_its_last_commit(tmp_path: Path) -> None:
    kill(tmp_path, KILLS)


@pytest.mark.timeout(LIMIT_S + 20)
def test_training_killed_while_extracting_restores_every_kept_step(tmp_path: Path) -> None:
    seen = kill(tmp_path, GRID_KILLS, "grid")
    assert seen["waiting"] >= GRID_KILLS // 4  # killed between a save and the end of its round
