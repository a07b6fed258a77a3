"""Loops that an earlier version saved go on as if they had not been stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import holdfast as hf
from tests.golden.make_loop import BATCH, EPOCHS, LOOPS, ROWS, STEPS, Program

STORE = Path(__file__).parent / "loop"


@pytest.mark.parametrize("name", LOOPS)
def test_the_store_is_there_and_sound(name: str) -> None:
    assert hf.open(STORE / name).steps == STEPS
    assert hf.verify(STORE / name).is_sound
    trace = json.loads((STORE / f"{name}.json").read_text())
    assert [seen["step"] for seen in trace] == list(range(1, EPOCHS * ROWS // BATCH + 1))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", LOOPS)
def test_a_stored_loop_goes_on_as_it_did(name: str, step: int, tmp_path: Path) -> None:
    shutil.copytree(STORE / name, tmp_path / "run")
    trace = json.loads((STORE / f"{name}.json").read_text())
    program = Program(seed=99)
    with program.checkpointer(tmp_path / "run") as ck:
        ck.restore(step)
        assert list(program.train(ck, ahead=LOOPS[name])) == trace[step:]
