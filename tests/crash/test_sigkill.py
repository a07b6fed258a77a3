"""A real process, really killed, 200 times in one run: the last commit is always there, exactly.

And again with extraction at work beside the training: every kept step is.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

KILLS, SEED = 200, 20240611
GRID_KILLS = 60
ROOT = Path(__file__).parents[2]


def kill(folder: Path, kills: int, *more: str) -> dict[str, int]:
    """Kill a training so many times; what was seen."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.killed", str(folder), str(kills), str(SEED), *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, f"seed {SEED}: {done.stderr[-3000:]}"
    seen: dict[str, int] = json.loads(done.stdout)
    assert seen["kills"] == kills
    # Otherwise the test would prove little: lives must get somewhere, and be cut off in mid-save.
    assert seen["checks"] > kills // 2
    assert seen["steps"] > kills // 4
    assert seen["leftovers"] > kills // 20
    return seen


def test_training_killed_again_and_again_restores_its_last_commit(tmp_path: Path) -> None:
    kill(tmp_path, KILLS)


def test_training_killed_while_extracting_restores_every_kept_step(tmp_path: Path) -> None:
    seen = kill(tmp_path, GRID_KILLS, "grid")
    assert seen["waiting"] > GRID_KILLS // 10  # killed between a save and the end of its round
