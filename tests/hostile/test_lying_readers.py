"""Checkpoints whose reader's state lies: an error of ours, wherever it is taken up, or training."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import holdfast as hf
from holdfast.checkpoint.format import tree
from tests.hostile.campaign_runs import make_small, train, watch
from tests.hostile.campaign_storage import MemoryStorage
from tests.hostile.mutators.stored_run import StoredRun, lay_out, take_apart

GONE = object()
VALUES: dict[str, Any] = {
    "gone": GONE, "none": None, "text": "x", "list": [1], "dict": {"a": {}}, "negative": -1,
    "huge": 1 << 200, "infinite": float("inf"), "tensor": torch.zeros(3), "array": np.zeros(3),
    "numbers": (3, (1 << 70,) * 625, None),
}  # fmt: skip
Path = tuple[str, ...]


def make_loader() -> DataLoader[Any]:
    ids = TensorDataset(torch.arange(40).view(20, 2))
    return DataLoader(ids, 2, shuffle=True, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def run() -> StoredRun:
    storage = MemoryStorage()
    live = make_small()
    with watch(live, storage) as ck:
        ck.resume()
        for number, (batch,) in enumerate(ck.epochs(make_loader(), 2)):
            train(live, batch)
            ck.step()
            if number == 13:
                break
        ck.save().result()
    return take_apart(storage.files)


def parts_of(state: Any, path: Path = ()) -> Iterator[Path]:
    yield path
    if isinstance(state, dict):
        for name, value in state.items():
            yield from parts_of(value, (*path, name))


def change(state: Any, path: Path, value: Any) -> Any:
    """A state with one part changed."""
    holder = made = {"": copy.deepcopy(state)}
    for name in ("", *path)[:-1]:
        holder = holder[name]
    last = ("", *path)[-1]
    if value is GONE:
        del holder[last]
    else:
        holder[last] = value
    return made.get("", {})


def go_on(storage: MemoryStorage, *, is_late: bool) -> None:
    """Resume, and train some batches; the loader is known when it resumes, or named later."""
    loader = make_loader()
    live = dataclasses.replace(make_small(), reader=None if is_late else loader)
    with watch(live, storage) as ck:
        ck.resume()
        assert ck.epoch >= 0
        for number, (batch,) in enumerate(ck.epochs(loader, 2)):
            train(live, batch)
            ck.step()
            if number == 2:
                break
        ck.save().result()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_lying_state_of_a_reader_ends_in_errors_of_ours(run: StoredRun, value: Any) -> None:
    (part,) = [part for _, part in run.parts("dense")][-1:]
    state = tree.from_bytes(part.data)["extras"]["reader"]
    paths = list(parts_of(state))
    assert ("start", "own", ".sampler.generator") in paths
    for path in paths:
        lying = run.copy()
        for _, part in lying.parts("dense"):
            dense = tree.from_bytes(part.data)
            dense["extras"]["reader"] = change(state, path, value)
            part.data = tree.to_bytes(*tree.flatten(dense))
        files = lay_out(lying).files()
        for is_late in (True, False):
            with contextlib.suppress(hf.HoldfastError):
                go_on(MemoryStorage(files), is_late=is_late)


def test_the_state_itself_is_taken(run: StoredRun) -> None:
    for is_late in (True, False):
        go_on(MemoryStorage(lay_out(run.copy()).files()), is_late=is_late)


@pytest.mark.parametrize("lack", ["model", "optimizers", "row_state_shapes", "all", "one"])
def test_a_part_of_dense_state_that_is_lacking_is_named(run: StoredRun, lack: str) -> None:
    """Its reader alone knows that it needs it: the run itself may be sound."""
    lying = run.copy()
    for _, part in lying.parts("dense"):
        dense = tree.from_bytes(part.data)
        shapes = dense["row_state_shapes"]
        table = next(name for name, columns in shapes.items() if columns)
        if lack == "all":
            shapes.clear()
        elif lack == "one":
            del shapes[table]
        else:
            del dense[lack]
        part.data = tree.to_bytes(*tree.flatten(dense))
    storage = MemoryStorage(lay_out(lying).files())
    with (
        watch(make_small(), storage) as ck,
        pytest.raises(hf.CorruptDataError, match=r"lacks a part. part=|another shape than its col"),
    ):
        ck.resume()
