"""What a deletion leaves: every other step as it was, and no byte that nobody reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast import events
from holdfast.checkpoint.planning.deletion import plan_deletion
from holdfast.storage import open_storage

ROWS = 60
STRATEGIES: list[tuple[str, dict[str, Any]]] = [
    ("one-shot", {"strategy": hf.Strategy("mine", "one-shot", "fp32")}),
    ("consecutive", {"strategy": hf.Strategy("mine", "consecutive", "fp32")}),
    ("incrcp", {"strategy": "incrcp", "extract": 0.0}),
    ("full", {"strategy": "full"}),
    ("servers", {"strategy": "full", "servers": 3}),
]


class Story:
    """A run of which every saved step's rows are known."""

    def __init__(self, url: Path, settings: dict[str, Any]) -> None:
        torch.manual_seed(1)
        self.url = url
        self.rows: dict[int, np.ndarray] = {}
        self.model = nn.Embedding(ROWS, 2, sparse=True)
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=1.0)
        self.settings = settings
        self.draw = np.random.default_rng(4)

    def open(self) -> hf.Checkpointer:
        return hf.Checkpointer(
            self.url, model=self.model, optimizer=self.optimizer, save_last=False, **self.settings
        )

    def train(self, ck: hf.Checkpointer, steps: int) -> None:
        """Train and save at each step."""
        for _ in range(steps):
            ids = torch.from_numpy(self.draw.choice(ROWS, 5, replace=False))
            self.optimizer.zero_grad()
            self.model(ids).sum().backward()
            self.optimizer.step()
            ck.step()
            ck.save().wait()
            self.rows[ck.current_step] = self.model.weight.detach().numpy().copy()

    def assert_exact(self, steps: tuple[int, ...]) -> None:
        """These steps are there and no other, to the bit, and every stored byte is needed."""
        run = hf.open(self.url)
        assert run.steps == steps
        for step in steps:
            assert np.array_equal(run.read(step, "weight").weight, self.rows[step]), step
        assert hf.verify(self.url).is_sound
        named = {name for name, _ in run.catalog.objects}
        assert {item.name for item in open_storage(self.url).list("objects/")} == named


@pytest.mark.parametrize(
    "settings", [s for _, s in STRATEGIES], ids=[name for name, _ in STRATEGIES]
)
@pytest.mark.parametrize("steps", [(1,), (3,), (2, 4), (5,), (6,), (4, 5, 6), (1, 2, 3, 4, 5)])
def test_every_other_step_stays_as_it_was(
    tmp_path: Path, settings: dict[str, Any], steps: tuple[int, ...]
) -> None:
    """Base, middle, newest and most of them; then training goes on from what is left."""
    story = Story(tmp_path, settings)
    with story.open() as ck:
        story.train(ck, 6)
    run = hf.open(tmp_path)
    plan = plan_deletion(run.catalog, steps)
    before = run.bytes
    run.delete(*steps)
    kept = tuple(step for step in range(1, 7) if step not in steps)
    assert run.steps == kept and before - run.bytes == plan.freed_bytes > 0
    story.assert_exact(kept)
    with story.open() as ck:
        assert ck.resume() == kept[-1]
        assert np.array_equal(story.model.weight.detach().numpy(), story.rows[kept[-1]])
        story.train(ck, 2)
        ck.wait()
    story.assert_exact((*kept, kept[-1] + 1, kept[-1] + 2))


@pytest.mark.parametrize("strategy", ["one-shot", "consecutive", "intermittent"])
def test_a_run_in_training_deletes_what_its_model_does_not_descend_from(
    tmp_path: Path, strategy: str
) -> None:
    told: list[events.Event] = []
    settings = {"strategy": hf.Strategy("mine", strategy, "fp32"), "events": told.append}
    story = Story(tmp_path, settings)
    with story.open() as ck:
        story.train(ck, 4)
        with pytest.raises(hf.InvalidRequestError, match="builds on it"):
            ck.delete(4)
        with pytest.raises(hf.NotFoundError, match="no checkpoint of this step"):
            ck.delete(9)
        ck.delete(1, 3)
        assert ck.all_steps() == (2, 4)
        story.train(ck, 1)
        ck.delete(4)
        story.train(ck, 1)
        story.assert_exact((2, 5, 6))
        ck.restore(2)  # the model descends from this one now
        with pytest.raises(hf.InvalidRequestError, match="builds on it"):
            ck.delete(2)
        ck.delete(5, 6)
        story.train(ck, 1)
    story.assert_exact((2, 3))
    dropped = [e for e in told if isinstance(e, events.CheckpointsDropped)]
    assert [(e.steps, e.reason) for e in dropped] == [
        ((1, 3), "deleted"), ((4,), "deleted"), ((5, 6), "deleted")
    ]  # fmt: skip


def test_what_others_read_of_a_deleted_step_is_named(tmp_path: Path) -> None:
    story = Story(tmp_path, {"strategy": hf.Strategy("mine", "consecutive", "fp32")})
    with story.open() as ck:
        story.train(ck, 3)
    plan = plan_deletion(hf.open(tmp_path).catalog, [1])
    assert plan.readers == (2, 3) and plan.shared_bytes > 0
    assert plan_deletion(hf.open(tmp_path).catalog, [3]).readers == ()


def test_a_run_keeps_a_checkpoint_and_an_older_catalog_cannot_be_changed(tmp_path: Path) -> None:
    story = Story(tmp_path, {})
    with story.open() as ck:
        story.train(ck, 2)
    run = hf.open(tmp_path)
    for steps in ((1, 2), ()):
        with pytest.raises(hf.InvalidRequestError, match="at least one"):
            run.delete(*steps)
    with pytest.raises(hf.InvalidRequestError, match="older catalog"):
        hf.open(tmp_path, catalog=run.catalog.number).delete(1)
    story.assert_exact((1, 2))


def test_a_training_whose_run_was_changed_by_another_process_is_told(tmp_path: Path) -> None:
    story = Story(tmp_path, {})
    with pytest.raises(hf.ConflictError, match="another writer"), story.open() as ck:
        story.train(ck, 2)
        hf.open(tmp_path).delete(1)
        story.train(ck, 1)
    assert hf.open(tmp_path).steps == (2,) and hf.verify(tmp_path).is_sound
