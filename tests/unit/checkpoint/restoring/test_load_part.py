"""Loading into a changed model: some names, other names, and what the two do not have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf


class Net(nn.Module):
    """Two tables and two layers, of which tests leave some out or name them otherwise."""

    def __init__(self, *, rows: int = 9, **names: str) -> None:
        super().__init__()
        self.names = {"users": "users", "items": "items", "low": "low", "top": "top", **names}
        made: dict[str, nn.Module] = {
            "users": nn.Embedding(rows, 2), "items": nn.Embedding(5, 2),
            "low": nn.Linear(2, 3), "top": nn.Linear(3, 1),
        }  # fmt: skip
        for role, name in self.names.items():
            if name:
                self.add_module(name, made[role])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        parts = dict(self.named_children())
        row = parts[self.names["users"]](ids) + parts[self.names["items"]](ids % 5)
        score: torch.Tensor = parts[self.names["top"]](parts[self.names["low"]](row).relu())
        return score


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.tensor([1, 3, 4])).square().sum().backward()
        optimizer.step()


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Every number, with its optimizer state, by the parameter's name."""
    found = {}
    for name, parameter in model.named_parameters():
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        found[name] = (
            parameter.detach().clone(), {k: torch.as_tensor(v).clone() for k, v in state.items()}
        )  # fmt: skip
    return found


def assert_equal(one: Any, other: Any) -> None:
    assert torch.equal(one[0], other[0]) and one[1].keys() == other[1].keys()
    assert all(torch.equal(one[1][key], other[1][key]) for key in one[1])


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A run with a base at step 3 and a delta at step 5, and what step 5 was."""
    torch.manual_seed(1)
    model = Net()
    optimizer = adam(model)
    url = tmp_path / "run"
    with hf.Checkpointer(url, model=model, optimizer=optimizer, strategy=CONSECUTIVE) as ck:
        for steps in (3, 2):
            for _ in range(steps):
                train(model, optimizer, 1)
                ck.step()
            ck.save().wait()
    return url, tensors(model, optimizer)


CONSECUTIVE = hf.Strategy("mine", "consecutive", "fp32")


def changed(
    url: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **more: Any
) -> hf.Checkpointer:
    return hf.Checkpointer(
        url, model=model, optimizer=optimizer, strategy=CONSECUTIVE, save_last=False, **more
    )


def test_renamed_tensors_come_back_with_their_optimizer_state(trained: Any) -> None:
    url, saved = trained
    model = Net(users="people", low="hidden")
    optimizer = adam(model)
    names = {
        "users.weight": "people.weight", "low.weight": "hidden.weight", "low.bias": "hidden.bias"
    }  # fmt: skip
    with changed(url, model, optimizer) as ck:
        with pytest.raises(hf.InvalidRequestError, match="table that the model lacks"):
            ck.restore(5)
        assert ck.restore(5, rename=names) == ck.current_step == 5
        assert ck.restore_stats is not None
        assert ck.restore_stats.missing == ck.restore_stats.unexpected == ()
        now = tensors(model, optimizer)
        assert len(now) == 6
        for name in saved:
            assert_equal(now[names.get(name, name)], saved[name])
        train(model, optimizer, 1)
        ck.step()
        assert ck.save().result().kind == "base"
        last = tensors(model, optimizer)
    again = Net(users="people", low="hidden")
    optimizer = adam(again)
    with changed(url, again, optimizer) as ck:
        assert ck.resume() == 6
        for name, value in tensors(again, optimizer).items():
            assert_equal(value, last[name])


def test_a_part_is_loaded_and_all_else_stays(trained: Any) -> None:
    url, saved = trained
    torch.manual_seed(7)
    model = Net()
    optimizer = adam(model)
    train(model, optimizer, 2)
    optimizer.param_groups[0]["lr"] = 0.25
    before = tensors(model, optimizer)
    drawn = torch.get_rng_state()
    with changed(url, model, optimizer) as ck:
        ck.restore(5, only=["users.*", "top.bias"])
        now = tensors(model, optimizer)
        for name in now:
            is_loaded = name in ("users.weight", "top.bias")
            assert_equal(now[name], saved[name] if is_loaded else before[name])
        assert optimizer.param_groups[0]["lr"] == 0.25
        assert torch.equal(torch.get_rng_state(), drawn)
        ck.step()  # rows that were not loaded differ from the checkpoint: all are saved
        assert ck.save().result().kind == "base"
    rows = hf.open(url).read(6, "items.weight")
    assert np.array_equal(rows.weight, before["items.weight"][0].numpy())


def test_what_the_two_do_not_have_in_common_is_reported(trained: Any) -> None:
    url, saved = trained
    model = Net(items="", top="head")
    optimizer = adam(model)
    fresh = tensors(model, optimizer)
    with changed(url, model, optimizer) as ck:
        with pytest.raises(hf.InvalidRequestError, match="do not have the same names") as caught:
            ck.restore(5, only=["*"])
        assert "items.weight" in str(caught.value) and "head.weight" in str(caught.value)
        ck.restore(5, strict=False)
        assert ck.restore_stats is not None
        assert ck.restore_stats.missing == ("head.weight", "head.bias")
        assert set(ck.restore_stats.unexpected) == {"items.weight", "top.weight", "top.bias"}
        now = tensors(model, optimizer)
        for name in ("users.weight", "low.weight", "low.bias"):
            assert_equal(now[name], saved[name])
        assert_equal(now["head.weight"], fresh["head.weight"])


def test_a_table_of_another_size_is_refused_unless_it_is_left_out(trained: Any) -> None:
    url, saved = trained
    model = Net(rows=10)
    optimizer = adam(model)
    fresh = tensors(model, optimizer)
    with changed(url, model, optimizer) as ck:
        for given in ({}, {"strict": False}, {"only": ["users.*"]}):
            with pytest.raises(hf.InvalidRequestError, match="another shape"):
                ck.restore(5, **given)  # type: ignore[arg-type]
        ck.restore(5, strict=False, skip=["users.*"])
        now = tensors(model, optimizer)
        assert_equal(now["users.weight"], fresh["users.weight"])
        assert_equal(now["items.weight"], saved["items.weight"])


@pytest.mark.parametrize("kind", ["none", "sgd", "frozen"])
def test_weights_come_without_the_optimizer_they_were_trained_with(trained: Any, kind: str) -> None:
    url, saved = trained
    model = Net()
    if kind == "frozen":
        model.users.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    optimizer: torch.optim.Optimizer | None = None
    if kind != "none":
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trainable, lr=1.0)
    with changed(url, model, optimizer) as ck:
        ck.restore(3 if kind == "x" else 5, strict=False)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, saved[name][0]), name
        ck.step()
        ck.save().wait()
        assert hf.verify(url).is_sound


def test_extras_in_common_come_back_unless_a_part_is_named(trained: Any, tmp_path: Path) -> None:
    url = tmp_path / "extras"
    model = Net()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    old = torch.Generator().manual_seed(3)
    with changed(url, model, optimizer, extras={"s": scheduler, "gone": old}) as ck:
        train(model, optimizer, 1)
        scheduler.step()
        ck.step()
        ck.save().wait()
    for given, epoch in (({"strict": False}, 1), ({"only": ["users.*"]}, 0)):
        optimizer = adam(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with changed(url, model, optimizer, extras={"s": scheduler, "new": old}) as ck:
            ck.restore(1, **given)  # type: ignore[arg-type]
        assert scheduler.last_epoch == epoch
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 if epoch else 0.1)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"only": "users.*"}, "list of patterns"),
        ({"skip": [3]}, "list of patterns"),
        ({"only": ["user.*"]}, "fits no name"),
        ({"strict": False, "skip": ["nothing"]}, "fits no name"),
        ({"rename": {"user.weight": "users.weight"}}, "the checkpoint"),
        ({"rename": {"users.weight": "people.weight"}}, "the model"),
        ({"rename": {"users.weight": "items.weight"}}, "two stored names"),
        ({"rename": {"users.weight": "low.weight", "low.weight": "users.weight"}}, "another shape"),
    ],
)
def test_words_that_fit_nothing_are_refused(trained: Any, given: Any, told: str) -> None:
    url, saved = trained
    model = Net()
    with changed(url, model, adam(model)) as ck:
        with pytest.raises(hf.InvalidRequestError, match=told):
            ck.restore(5, **given)
        ck.restore(5)  # nothing is lost by a mistyped word
        assert torch.equal(model.state_dict()["users.weight"], saved["users.weight"][0])
        assert ck.restore_stats is not None and ck.restore_stats.rows > 0


def test_a_save_that_fails_after_a_partial_restore_is_followed_by_a_base(trained: Any) -> None:
    url, _ = trained
    model = Net()
    with changed(url, model, adam(model)) as ck:
        ck.restore(5, only=["users.*"])
        ck.step()
        if ck.save().cancel():
            ck.step()
            assert ck.save().result().kind == "base"
        ck.step()
        assert ck.save().result().kind == "delta"
