"""A real process, really killed, 200 times in one run: the last commit is always there, exactly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

KILLS, SEED = 200, 20240611
ROOT = Path(__file__).parents[2]


def test_training_killed_again_and_again_restores_its_last_commit(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.killed", str(tmp_path), str(KILLS), str(SEED)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, f"seed {SEED}: {done.stderr[-3000:]}"
    seen = json.loads(done.stdout)
    assert seen["kills"] == KILLS
    # Otherwise the test would prove little: lives must get somewhere, and be cut off in mid-save.
    assert seen["checks"] > KILLS // 2
    assert seen["steps"] > KILLS // 4
    assert seen["leftovers"] > KILLS // 20
