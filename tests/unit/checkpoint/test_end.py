"""How a ``with`` block ends: the last step is saved, unless it was, or an error was raised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast import events
from holdfast.storage import open_storage
from tests.conftest import TinyModel, fingerprint, make_optimizers, train_steps


def build(seed: int = 3) -> tuple[TinyModel, Any]:
    torch.manual_seed(seed)
    model = TinyModel()
    return model, make_optimizers(model, "adagrad")


def open_run(url: Path, **settings: Any) -> tuple[hf.Checkpointer, Callable[[int, int], None]]:
    """A checkpointer, and what trains from one step to another."""
    model, optimizers = build()
    torch.manual_seed(99)
    ck = hf.Checkpointer(url, model=model, optimizer=optimizers, codec="fp32", **settings)

    def train(first: int, last: int) -> None:
        train_steps(model, optimizers, range(first, last), after=ck.step)

    return ck, train


def steps_of(url: Path) -> tuple[int, ...]:
    return hf.open(url).steps


def test_an_orderly_end_leaves_the_last_step_saved_exactly(tmp_path: Path) -> None:
    model, optimizers = build()
    torch.manual_seed(99)
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizers, every=5, codec="fp32") as ck:
        train_steps(model, optimizers, range(7), after=ck.step)
    expected = fingerprint(model, optimizers)
    assert steps_of(tmp_path) == (5, 7)
    other, others = build(seed=1)
    with hf.Checkpointer(tmp_path, model=other, optimizer=others, codec="fp32") as ck:
        assert ck.resume() == 7
        assert fingerprint(other, others) == expected


def test_save_last_off_leaves_the_last_interval_unsaved(tmp_path: Path) -> None:
    ck, train = open_run(tmp_path, every=5, save_last=False)
    with ck:
        train(0, 7)
    assert steps_of(tmp_path) == (5,)


def test_a_run_of_no_steps_writes_nothing(tmp_path: Path) -> None:
    ck, _ = open_run(tmp_path / "run", every=5)
    with ck:
        ck.resume()
    with pytest.raises(hf.NotFoundError):
        hf.open(tmp_path / "run")


@pytest.mark.parametrize("is_durable", [False, True])
def test_a_step_that_is_saved_is_not_saved_again(tmp_path: Path, is_durable: bool) -> None:
    seen: list[events.Event] = []
    ck, train = open_run(tmp_path, events=seen.append)
    with ck:
        train(0, 4)
        save = ck.save()
        if is_durable:
            save.result()
    assert steps_of(tmp_path) == (4,)
    assert len([event for event in seen if isinstance(event, events.SaveStarted)]) == 1


def test_a_run_that_was_only_resumed_writes_nothing(tmp_path: Path) -> None:
    ck, train = open_run(tmp_path)
    with ck:
        train(0, 4)
    number = hf.open(tmp_path).catalog.number
    ck, _ = open_run(tmp_path)
    with ck:
        ck.restore(4)
    assert hf.open(tmp_path).catalog.number == number


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_nothing_is_saved_after_an_exception(tmp_path: Path, error: type[BaseException]) -> None:
    ck, train = open_run(tmp_path, every=5)
    with pytest.raises(error), ck:
        train(0, 7)
        raise error
    assert steps_of(tmp_path) == (5,)


def test_close_by_itself_does_not_save(tmp_path: Path) -> None:
    ck, train = open_run(tmp_path, every=5)
    train(0, 7)
    ck.close()
    assert steps_of(tmp_path) == (5,)
    ck, train = open_run(tmp_path / "other", every=5)
    with ck:
        train(0, 7)
        ck.close()
    assert steps_of(tmp_path / "other") == (5,)


def test_a_last_step_that_cannot_be_saved_is_told(tmp_path: Path) -> None:
    ck, train = open_run(tmp_path)
    with ck:
        train(0, 2)
    ck, train = open_run(tmp_path)
    with pytest.raises(hf.InvalidRequestError, match="there are checkpoints here already"), ck:
        train(0, 1)
    # It is closed all the same.
    with pytest.raises(hf.InvalidRequestError, match="closed"):
        ck.step()


def test_a_model_that_is_torn_is_left_alone(tmp_path: Path) -> None:
    ck, train = open_run(tmp_path)
    with ck:
        train(0, 2)
    storage = open_storage(str(tmp_path))
    for item in storage.list("objects/"):
        path = tmp_path / item.name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))
    ck, _ = open_run(tmp_path)
    with ck, pytest.raises(hf.CorruptDataError):
        ck.resume()


def test_saves_by_time_happen_in_a_real_run(tmp_path: Path) -> None:
    now = [0.0]
    model, optimizers = build()
    settings: dict[str, Any] = {"every": "30min", "clock": lambda: now[0], "save_last": False}
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizers, **settings) as ck:

        def after() -> None:
            now[0] += 600
            ck.step()

        train_steps(model, optimizers, range(10), after=after)
    assert steps_of(tmp_path) == (3, 6, 9)
