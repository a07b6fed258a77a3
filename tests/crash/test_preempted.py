"""Real processes, really sent SIGTERM at chosen and random moments; each resumed and compared.

HOLDFAST_KILLS asks for other numbers of random moments (a fifth of it).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.crash.preempted import AT, EVERY, MOMENTS, STEPS

LIVES, SEED = int(os.environ.get("HOLDFAST_KILLS", "200")) // 5, 20251118
ROOT = Path(__file__).parents[2]
HANG_S = 600
ENDED, KILLED = 143, -15
pytestmark = [pytest.mark.soak, pytest.mark.timeout(HANG_S + 20)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of all lives."""
    folder = tmp_path_factory.mktemp("preempted")
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.preempted", str(folder), str(LIVES), str(SEED)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, f"seed {SEED}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", MOMENTS)
def test_after_every_chosen_moment_training_goes_on_as_if_never_stopped(
    seen: dict[str, Any], name: str
) -> None:
    facts = seen["chosen"][name]
    last = facts["steps"][-1] if facts["steps"] else 0
    assert facts["later_code"] == 0, facts["later_stderr"]
    assert facts["later"][:2] == ["resumed", str(last)]
    assert len(facts["later"]) == 2 + STEPS - last


def test_a_signal_in_mid_step_saves_that_step_and_runs_finally_blocks(seen: dict[str, Any]) -> None:
    facts = seen["chosen"]["step"]
    assert facts["code"] == ENDED and facts["told"][-2:] == [str(AT), "finally"]
    assert facts["steps"] == [EVERY, AT]
    assert facts["answers"] == [{"step": AT, "is_saved": True, "reason": "SIGTERM"}]
    assert f"SIGTERM: step {AT} is saved" in facts["stderr"]


def test_a_signal_in_a_save_lets_it_end_and_saves_the_step_after(seen: dict[str, Any]) -> None:
    facts = seen["chosen"]["save"]
    assert facts["code"] == ENDED
    (answer,) = facts["answers"]
    assert answer["is_saved"] and answer["step"] == int(facts["told"][-2])
    assert facts["steps"] == sorted({EVERY, answer["step"]})


def test_a_signal_before_the_first_step_ends_the_process_at_once(seen: dict[str, Any]) -> None:
    facts = seen["chosen"]["start"]
    assert (facts["code"], facts["told"], facts["steps"]) == (KILLED, [], [])
    facts = seen["chosen"]["stuck at start"]
    assert (facts["told"], facts["steps"]) == ([], [])
    assert facts["code"] in (ENDED, KILLED)  # killed: it was not stuck yet


def test_a_second_signal_ends_the_process_at_once(seen: dict[str, Any]) -> None:
    facts = seen["chosen"]["twice"]
    assert facts["code"] == KILLED
    assert facts["told"][-1] == str(AT)
    assert facts["steps"] == [EVERY]
    # Also where the main thread cannot look: the deadline there is half a minute.
    facts = seen["chosen"]["stuck twice"]
    assert facts["code"] == ENDED and facts["steps"] == [EVERY]
    assert facts["answers"] == []


def test_a_signal_at_the_end_of_the_block_leaves_the_last_step_saved(seen: dict[str, Any]) -> None:
    facts = seen["chosen"]["close"]
    assert facts["code"] == ENDED and facts["told"][-1] == "finally"
    assert facts["steps"][-1] == STEPS - 1
    assert [(a["step"], a["is_saved"]) for a in facts["answers"]] == [(STEPS - 1, True)]


@pytest.mark.parametrize("name", ["hanging", "endless", "stuck"])
def test_when_the_deadline_is_over_the_process_ends_and_says_what_is_not_saved(
    seen: dict[str, Any], name: str
) -> None:
    facts = seen["chosen"][name]
    step = AT if name == "hanging" else AT - 1  # that ended
    assert facts["code"] == ENDED and facts["steps"] == [EVERY]
    (answer,) = facts["answers"]
    assert (answer["step"], answer["is_saved"]) == (step, False)
    assert f"step {step} is not saved" in facts["stderr"]
    assert f"the last checkpoint is step {EVERY}" in facts["stderr"]


def test_at_random_moments_the_last_step_that_was_counted_is_saved(seen: dict[str, Any]) -> None:
    lives, last, ended, run = seen["random"], 0, 0, 0
    for life in lives:
        if life["run"] != run:
            run, last = life["run"], 0
        told = life["told"]
        steps = [int(text) for text in told if text.isdecimal()]
        now = life["steps"][-1] if life["steps"] else 0
        if life["code"] == KILLED:  # before its first step was over
            assert len(steps) <= 2 and now == last, (SEED, life)
        elif life["code"] == 0:  # before it could listen, or after the last step
            assert told[-1:] == [str(now)], (SEED, life)
        else:
            assert life["code"] == ENDED and told[-1] == "finally", (SEED, life)
            assert now == steps[-1], (SEED, life)
            ended += 1
        if last and told:
            assert told[:2] == ["resumed", str(last)], (SEED, life)
        last = now
    # Otherwise the test would prove little.
    assert ended >= len(lives) // 4, (SEED, [life["code"] for life in lives])
