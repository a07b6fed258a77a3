"""A run whose bf16 and fp64 embeddings were dense state loads where they are tables now."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.errors import InvalidRequestError
from tests.golden.make_dense_bf16 import STEPS, make_model, train_step

STORE = Path(__file__).parent / "dense_bf16"


def flat(value: Any) -> Any:
    """A state as plain values, tensors as their type and bytes."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items()}
    return [flat(item) for item in value] if isinstance(value, list | tuple) else value


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return flat({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def test_the_store_is_there_and_sound() -> None:
    run = hf.open(STORE / "run")
    assert run.steps == STEPS
    assert [table.name for table in run.tables(4)] == ["exact.weight"]
    assert hf.verify(STORE / "run").is_sound


@pytest.mark.parametrize("step", STEPS)
def test_every_bit_comes_back(tmp_path: Path, step: int) -> None:
    shutil.copytree(STORE / "run", tmp_path / "run")
    model, optimizer = make_model(seed=9)
    with hf.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as ck:
        ck.restore(step)
        wanted = torch.load(STORE / f"{step}.pt", weights_only=True)
        assert state_of(model, optimizer) == flat(wanted)


def test_the_next_save_is_a_base_with_them_as_tables(tmp_path: Path) -> None:
    shutil.copytree(STORE / "run", tmp_path / "run")
    settings: dict[str, Any] = {"strategy": "incrcp", "codec": "fp32", "every": 1}
    model, optimizer = make_model(seed=9)
    with hf.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer, **settings) as ck:
        assert ck.resume() == 4
        for step in (4, 5):
            train_step(model, optimizer, step)
            ck.step()
            ck.wait()
        live = state_of(model, optimizer)
    run = hf.open(tmp_path / "run")
    assert run.info(5).kind == "base"
    assert {t.name: t.columns[0].dtype for t in run.tables(6)} == {
        "exact.weight": "float32",
        "brief.weight": "bfloat16",
        "wide.weight": "float64",
    }
    again, its = make_model(seed=10)
    with hf.Checkpointer(tmp_path / "run", model=again, optimizer=its, **settings) as ck:
        assert ck.resume() == 6
        assert state_of(again, its) == live
        ck.restore(4)  # as dense state again
        assert state_of(again, its) == flat(torch.load(STORE / "4.pt", weights_only=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_model_of_another_type_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    shutil.copytree(STORE / "run", tmp_path / "run")
    model, _ = make_model(seed=9)
    model.brief.to(dtype)
    model.twin.weight = model.brief.weight
    optimizer = torch.optim.Adam(model.parameters())
    with (
        hf.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as ck,
        pytest.raises(InvalidRequestError, match=r"brief\.weight"),
    ):
        ck.restore(4)
