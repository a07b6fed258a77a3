"""Mutated runs by the thousand: an error of ours, or exactly the right rows (campaign.py)."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.hostile import campaign
from tests.hostile.campaign_child import make_input
from tests.hostile.campaign_judge import ALL, Judge
from tests.hostile.campaign_runs import Prey, make_prey
from tests.hostile.mutators.all_mutators import MUTATORS
from tests.hostile.mutators.registry import PARTS, Mutator
from tests.hostile.mutators.stored_run import lay_out

COUNT = int(os.environ.get("HOLDFAST_HOSTILE_COUNT", "20000"))
# Where more inputs are asked for, new ones every time.
_DRAWN = random.SystemRandom().randrange(2**32) if COUNT > 20_000 else 20261118
SEED = int(os.environ.get("HOLDFAST_HOSTILE_SEED", _DRAWN))
SHARES = max(4, COUNT // 25_000)


@pytest.fixture(scope="module")
def prey() -> list[Prey]:
    return make_prey()


@pytest.mark.soak
@pytest.mark.parametrize("share", range(SHARES))
def test_mutated_inputs_give_our_errors_or_the_right_rows(share: int) -> None:
    start, stop = (COUNT * at // SHARES for at in (share, share + 1))
    print(f"HOLDFAST_HOSTILE_SEED={SEED}: inputs {start} to {stop}")
    found, facts = campaign.run(SEED, start, stop - start)
    assert not found, "\n".join(
        f"[{one.kind}] {one.cause} x{one.count}: {one.detail}\n"
        f"    python -m tests.hostile.campaign --seed {SEED} --index {one.indexes[0]}"
        for one in found
    )
    assert facts["inputs"] == stop - start


def test_a_run_taken_apart_and_put_together_is_the_same(prey: list[Prey]) -> None:
    for one in prey:
        assert lay_out(one.run.copy()).files() == one.files, one.name


def test_good_runs_are_sound_and_read_alike(prey: list[Prey], tmp_path: Path) -> None:
    for one in prey:
        verdict = Judge(one, one.files, tmp_path, random.Random(1)).run(ALL)
        assert verdict.is_sound and not verdict.findings, (one.name, verdict.findings)


def test_an_input_is_a_function_of_seed_and_index(prey: list[Prey]) -> None:
    for index in range(20):
        made = [make_input(prey, random.Random(f"1:{index}")) for _ in range(2)]
        assert made[0][1:] == made[1][1:]


@pytest.mark.parametrize("which", MUTATORS, ids=lambda mutator: mutator.name)
def test_every_mutator_changes_some_run(prey: list[Prey], which: Mutator) -> None:
    rng = random.Random(3)
    for _ in range(20):
        for one in prey:
            run = one.run.copy()
            laid = None if which.stage == PARTS else lay_out(run)
            if which.change(run if laid is None else laid, rng) is None:
                continue
            if (laid or lay_out(run)).files() != one.files:
                return
    raise AssertionError("it changed nothing")
