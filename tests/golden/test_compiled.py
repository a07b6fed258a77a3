"""What 0.4.0 stored of compiled models, with ``_orig_mod.`` in the names, is still read."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast as hf
from tests.golden.make_compiled import STEPS, Model, make_optimizers, numbers, train

STORE = Path(__file__).parent / "compiled"
EXPECTED = dict(np.load(Path(__file__).parent / "compiled.npz"))


def expected(step: int) -> dict[str, np.ndarray]:
    prefix = f"{step}/"
    return {k.removeprefix(prefix): v for k, v in EXPECTED.items() if k.startswith(prefix)}


def assert_same(model: Model, optimizers: list[torch.optim.Optimizer], step: int) -> None:
    found = numbers(model, optimizers)
    assert found.keys() == expected(step).keys()
    for name, value in expected(step).items():
        assert np.array_equal(found[name], value), name


def test_the_store_has_the_names_of_then_and_is_sound() -> None:
    newest = max((STORE / "catalog").iterdir()).read_text()
    assert '"_orig_mod.users.weight"' in newest
    assert '"users.weight"' not in newest
    assert "/kills-" in newest  # names in deletion vectors, too
    assert hf.open(STORE).steps == tuple(range(1, STEPS + 1))
    assert hf.verify(STORE).is_sound


@pytest.mark.parametrize("step", range(1, STEPS + 1))
@pytest.mark.parametrize("is_compiled", [False, True])
def test_every_step_is_restored_into_plain_and_compiled_models(
    step: int, is_compiled: bool
) -> None:
    torch.manual_seed(99)
    model = Model()
    optimizers = make_optimizers(model)
    call = torch.compile(model, backend="eager") if is_compiled else model
    with hf.Checkpointer(STORE, model=call, optimizer=optimizers, codec="fp32") as ck:
        ck.restore(step)
    assert_same(model, optimizers, step)


def test_a_reader_finds_tables_by_their_plain_names_and_by_those_of_then() -> None:
    run = hf.open(STORE)
    assert [table.name for table in run.tables(STEPS)] == ["users.weight", "items.weight"]
    for name in ("items.weight", "_orig_mod.items.weight"):
        assert np.array_equal(run.read(STEPS, name).weight, expected(STEPS)["items.weight"])
    dense = run.dense(STEPS)
    assert dense["aliases"] == {"again.weight": "items.weight"}
    assert "net.0.weight" in dense["model"]
    assert "_orig_mod" not in repr(dense)


def test_the_run_goes_on_from_there_under_plain_names(tmp_path: Path) -> None:
    url = tmp_path / "run"
    shutil.copytree(STORE, url)
    model = Model()
    optimizers = make_optimizers(model)
    with hf.Checkpointer(
        url, model=model, optimizer=optimizers, strategy="incrcp", codec="fp32"
    ) as ck:
        assert ck.resume() == STEPS
        last = STEPS + 3
        for step in range(STEPS + 1, last + 1):
            train(model, optimizers, step)
            ck.step()
            ck.save().result(timeout=60)
            ck.wait()
    assert "_orig_mod" not in max((url / "catalog").iterdir()).read_text()
    assert hf.verify(url).is_sound
    run = hf.open(url)
    for name in ("users.weight", "items.weight"):
        assert np.array_equal(run.read(last, name).weight, model.state_dict()[name].numpy())
        assert np.array_equal(run.read(STEPS, name).weight, expected(STEPS)[name])
