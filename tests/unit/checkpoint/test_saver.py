"""What is said of a checkpoint when it is saved, and where that is found again."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast import events
from tests.conftest import TinyModel, make_optimizers, train_steps


def make(url: Path, **settings: Any) -> hf.Checkpointer:
    torch.manual_seed(1)
    model = nn.Embedding(9, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return hf.Checkpointer(url, model=model, optimizer=optimizer, **settings)


def test_a_step_is_said_something_of_only_if_it_is_saved(tmp_path: Path) -> None:
    with make(tmp_path, every=2) as ck:
        for step in range(1, 6):
            ck.step(metrics={"auc": step / 10}, metadata={"day": step})
            assert ck.current_step == step
        ck.wait()
        assert (ck.all_steps(), ck.latest_step()) == ((2, 4), 4)
    run = hf.open(tmp_path)
    assert [(c.step, c.metrics, c.metadata) for c in run.checkpoints] == [
        (2, {"auc": 0.2}, {"day": 2}),
        (4, {"auc": 0.4}, {"day": 4}),
        (5, {"auc": 0.5}, {"day": 5}),  # saved when the block ended
    ]
    assert run.latest_step() == 5 and run.best("auc", mode="min").step == 2
    with pytest.raises(hf.NotFoundError, match="auc"):
        run.best("acu")
    with pytest.raises(hf.InvalidRequestError, match="max"):
        run.best("auc", mode="mix")  # type: ignore[arg-type]


def test_a_new_run_has_no_steps(tmp_path: Path) -> None:
    with make(tmp_path, save_last=False) as ck:
        assert (ck.all_steps(), ck.latest_step(), ck.best_step("auc")) == ((), None, None)


def test_a_saved_step_may_be_evaluated_afterwards(tmp_path: Path) -> None:
    """The checkpoint is not written again: what is said is added to it, once it is durable."""
    seen: list[events.Event] = []
    with make(tmp_path, every=1, events=seen.append) as ck:
        ck.step(metrics={"loss": 2.0, "auc": 0.5})
        save = ck.save(metrics={"auc": 0.8}, metadata={"by": "evaluation"})
        assert save.done() and ck.best_step("auc") == 1
        number = hf.open(tmp_path).catalog.number
        assert ck.save() is save
        assert hf.open(tmp_path).catalog.number == number  # nothing to say: no commit
    info = hf.open(tmp_path).info(1)
    assert info.metrics == {"loss": 2.0, "auc": 0.8} and info.metadata == {"by": "evaluation"}
    assert sum(isinstance(event, events.SaveStarted) for event in seen) == 1


def test_what_was_said_of_a_step_is_not_said_of_the_one_that_is_restored(tmp_path: Path) -> None:
    with make(tmp_path, save_last=False) as ck:
        ck.step()
        ck.save(metrics={"auc": 0.5}).wait()
        ck.step()
        ck.save().wait()
        ck.step(metrics={"auc": 0.9})
        ck.restore(1, discard_later=True)
        ck.step()
        ck.save().wait()
        ck.step(metrics={"auc": 0.7})
    assert [c.metrics for c in hf.open(tmp_path).checkpoints] == [{"auc": 0.5}, {}]


def test_a_failed_word_is_told_and_the_checkpoint_stays(tmp_path: Path) -> None:
    with make(tmp_path, save_last=False) as ck:
        ck.step()
        ck.save(metrics={f"m{i}": 0.0 for i in range(40)}).wait()
        with pytest.raises(hf.InvalidRequestError, match="64"):
            ck.save(metrics={f"n{i}": 0.0 for i in range(40)})
        ck.step()
        ck.save().wait()
        assert ck.all_steps() == (1, 2)
    assert len(hf.open(tmp_path).info(1).metrics) == 40


def test_a_metric_that_cannot_be_stored_is_refused_before_anything_is_copied(
    tmp_path: Path,
) -> None:
    with make(tmp_path, every=1, save_last=False) as ck:
        with pytest.raises(hf.InvalidRequestError, match="number"):
            ck.step(metrics={"auc": "high"})
        ck.save().wait()
        assert ck.all_steps() == (1,)


@pytest.mark.parametrize("action", ["always", "error"])
def test_nan_is_left_out_and_training_goes_on(tmp_path: Path, action: Any) -> None:
    with make(tmp_path) as ck, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter(action)
        ck.step()
        ck.save(metrics={"auc": float("nan"), "loss": 1.0}).wait()
    assert hf.open(tmp_path).info(1).metrics == {"loss": 1.0}
    if action == "always":
        (warning,) = told
        assert warning.category is hf.HoldfastWarning and "auc" in str(warning.message)


def test_the_best_checkpoints_stay_and_restore_exactly(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = TinyModel(sparse=True)
    optimizers = make_optimizers(model, "adagrad")
    scores = [0.1, 0.9, 0.2, 0.8, 0.3, 0.4]
    states = {}
    with hf.Checkpointer(
        tmp_path, model=model, optimizer=optimizers,
        keep=hf.Keep(best=2, metric="auc"), save_last=False,
    ) as ck:  # fmt: skip
        for step, score in enumerate(scores, 1):
            train_steps(model, optimizers, [step])
            ck.step(metrics={"auc": score})
            ck.save().wait()
            states[step] = {k: v.clone() for k, v in model.state_dict().items()}
        assert ck.all_steps() == (2, 4, 6) and ck.best_step("auc") == 2
        for step in ck.all_steps():
            ck.restore(step)
            assert all(torch.equal(v, states[step][k]) for k, v in model.state_dict().items())
    assert hf.verify(tmp_path).is_sound


def test_steps_is_the_old_name_of_all_steps(tmp_path: Path) -> None:
    with make(tmp_path) as ck:
        ck.save().wait()
        with pytest.warns(DeprecationWarning, match=r"all_steps\(\)"):
            assert ck.steps == (0,)
