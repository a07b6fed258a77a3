"""What happens around training: two Checkpointers, a restore, a save that gives way, an export."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.checkpoint.tracking import FULL_TURN_SAVES
from tests.loops.oracle import Columns, Lived, check_exact, copy_tables, live_through, stale_by_step
from tests.loops.program import Items, Program, adagrad, draw, loss_of, plain, train
from tests.loops.unusual import Handmade

ROWS = 3_000
STRATEGIES = pytest.mark.parametrize("strategy", ["check-n-run", "incrcp"])


def watch(folder: Path, program: Program, strategy: str, **settings: Any) -> hf.Checkpointer:
    return hf.Checkpointer(
        folder,
        model=program.model,
        optimizer=program.optimizers,
        strategy=strategy,
        codec="fp32",
        **settings,
    )


def live(program: Program) -> dict[str, Columns]:
    return copy_tables(program.model, program.optimizers)


def optimizers() -> dict[str, Callable[[Items], torch.optim.Optimizer]]:
    return {
        "adagrad": adagrad,
        "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    }


OPTIMIZERS = pytest.mark.parametrize("make", optimizers().values(), ids=optimizers())


@STRATEGIES
@OPTIMIZERS
def test_two_checkpointers_of_one_model_each_find_every_change(
    make: Callable[[Items], torch.optim.Optimizer], strategy: str, tmp_path: Path
) -> None:
    program = plain(ROWS, make)
    often, seldom = Lived(), Lived()
    with (
        watch(tmp_path / "often", program, strategy) as first,
        watch(tmp_path / "seldom", program, strategy) as second,
    ):
        for step in range(1, 19):
            program.step(step)
            if step == 7:
                with torch.no_grad():
                    program.model.item.weight[ROWS - 5] += 1  # type: ignore[union-attr, operator]
            for ck, lived, every in ((first, often, 2), (second, seldom, 6)):
                ck.step()
                if step % every == 0:
                    lived.live[step] = live(program)
                    ck.save().result()
    check_exact(tmp_path / "often", often)
    check_exact(tmp_path / "seldom", seldom)


@STRATEGIES
@OPTIMIZERS
def test_training_on_from_an_older_step_misses_nothing(
    make: Callable[[Items], torch.optim.Optimizer], strategy: str, tmp_path: Path
) -> None:
    program = plain(ROWS, make)
    lived = Lived()
    with watch(tmp_path / "run", program, strategy, keep=hf.Keep(last=99)) as ck:
        for step in range(1, 9):
            program.step(step)
            ck.step()
            lived.live[step] = live(program)
            ck.save().result()
        ck.restore(4, discard_later=True)
        for step in range(5, 11):
            program.step(step)
            ck.step()
            lived.live[step] = live(program)
            ck.save().result()
    check_exact(tmp_path / "run", lived)


@STRATEGIES
@OPTIMIZERS
def test_a_save_that_gives_way_to_the_next_loses_no_row(
    make: Callable[[Items], torch.optim.Optimizer], strategy: str, tmp_path: Path
) -> None:
    program = plain(ROWS, make)
    lived = Lived()
    with watch(tmp_path / "run", program, strategy, on_busy="cancel") as ck:
        for step in range(1, 31):
            program.step(step)
            ck.step()
            lived.live[step] = live(program)
            save = ck.save()
            if step % 5 == 0:
                save.result()
    lived.live = {step: lived.live[step] for step in hf.open(tmp_path / "run").steps}
    check_exact(tmp_path / "run", lived)


@STRATEGIES
def test_a_new_checkpointer_knows_nothing_of_the_last_and_misses_nothing(
    strategy: str, tmp_path: Path
) -> None:
    program = plain(ROWS, adagrad)
    for turn in range(3):
        folder = tmp_path / str(turn)
        lived = live_through(program, folder, strategy=strategy, saves=3, steps_a_save=2)
        check_exact(folder, lived)
        program.model.item.weight.data[7 + turn] = 5.0  # type: ignore[union-attr, index]
        program.step(0)


@STRATEGIES
def test_an_optimizer_of_none_kind_in_turns_with_one_of_torch_is_found_out(
    strategy: str, tmp_path: Path
) -> None:
    """``p.data.add_(...)`` is not counted: stale for at most a turn of saves, then never again."""
    model = Items(ROWS)
    first, second = adagrad(model), Handmade(model.parameters())

    def step(t: int) -> None:
        model.zero_grad()
        loss_of(model(draw(ROWS))).backward()
        (first if t % 2 else second).step()

    program = Program(model, [first], step)
    lived = live_through(program, tmp_path / "run", strategy=strategy, saves=20, steps_a_save=2)
    stale = stale_by_step(tmp_path / "run", lived)
    assert len(stale) <= FULL_TURN_SAVES
    assert {told.table for told in lived.told() if told.is_escape} <= {"item.weight", "user.weight"}
    assert max(stale, default=0) < 40, "the last save is exact"


def test_a_watched_model_can_be_scripted_and_copied(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(ROWS, 4, max_norm=1.0), torch.nn.Linear(4, 1))
    optimizer = adagrad(model)
    program = Program(model, [optimizer], lambda t: None)
    with (
        watch(tmp_path / "run", program, "check-n-run") as ck,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit
        ck.step()
        ck.save().result()
        ids = draw(ROWS)
        expected = model(ids)
        assert torch.equal(torch.jit.script(model)(ids), expected)
        assert torch.equal(copy.deepcopy(model)(ids), expected)


class Counts(torch.optim.SGD):
    """Keeps a number for itself, beside what it keeps for parameters (as MADGRAD does)."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["count"] = self.state.get("count", 0) + 1  # type: ignore[index, call-overload]
        self.state["mean"] = torch.full((2,), float(self.state["count"]))  # type: ignore[index]
        super().step(closure)


def test_state_that_belongs_to_no_parameter_comes_back(tmp_path: Path) -> None:
    model = Items(ROWS)
    optimizer = Counts(model.parameters(), lr=0.1, momentum=0.9)
    program = Program(model, [optimizer], lambda t: None)
    with watch(tmp_path / "run", program, "check-n-run") as ck:
        for _ in range(3):
            train(model, optimizer, lambda: loss_of(model(draw(ROWS))))
            ck.step()
    other = Items(ROWS)
    again = Counts(other.parameters(), lr=0.1, momentum=0.9)
    with watch(tmp_path / "run", Program(other, [again], lambda t: None), "check-n-run") as ck:
        assert ck.resume() == 3
    assert again.state["count"] == 3  # type: ignore[index, comparison-overlap]
    assert again.state["mean"].tolist() == [3.0, 3.0]  # type: ignore[index, union-attr]
    first, second = optimizer.state_dict()["state"], again.state_dict()["state"]
    assert set(first) == set(second)


class Around(torch.optim.Optimizer):
    """Passes everything on to another optimizer (as accelerate's AcceleratedOptimizer)."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def __getattribute__(self, name: str) -> Any:
        if name in ("inner", "__class__"):
            return object.__getattribute__(self, name)
        return getattr(self.inner, name)


def test_the_optimizer_inside_of_another_is_not_told_to_be_unsaved(tmp_path: Path) -> None:
    model = Items(ROWS)
    around = Around(torch.optim.Adam(model.parameters(), lr=0.01))
    program = Program(
        model, [around], lambda t: train(model, around, lambda: loss_of(model(draw(ROWS))))
    )
    lived = live_through(program, tmp_path / "run", strategy="incrcp", saves=4)
    check_exact(tmp_path / "run", lived)
    assert {told.method for told in lived.told()} == {"trained"}


class Slow:
    """Slow weights around an optimizer; its state has a form of its own (as Lookahead's)."""

    def __init__(self, inner: torch.optim.Optimizer, weights: list[torch.nn.Parameter]) -> None:
        self.inner = inner
        self.weights = weights
        self.slow = [weight.detach().clone() for weight in weights]
        self.zero_grad = inner.zero_grad

    def step(self) -> None:
        self.inner.step()
        with torch.no_grad():
            for slow, weight in zip(self.slow, self.weights, strict=True):
                weight.copy_(slow.lerp_(weight, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"slow": self.slow, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        for slow, stored in zip(self.slow, state["slow"], strict=True):
            slow.copy_(stored)


class SlowOptimizer(Slow, torch.optim.Optimizer):
    """The same, and counts as an optimizer."""


def test_an_optimizer_with_a_state_of_its_own_form_is_refused_before_training(
    tmp_path: Path,
) -> None:
    model = Items(ROWS)
    slow = SlowOptimizer(adagrad(model), list(model.parameters()))
    with pytest.raises(hf.InvalidRequestError, match=r"extras=\{'around': it\}"):
        hf.Checkpointer(tmp_path / "run", model=model, optimizer=slow)


@STRATEGIES
def test_what_is_around_an_optimizer_comes_back_as_an_extra(strategy: str, tmp_path: Path) -> None:
    def begin() -> tuple[Items, Slow, Program]:
        torch.manual_seed(5)
        model = Items(ROWS)
        slow = Slow(adagrad(model), list(model.parameters()))
        step = lambda t: train(model, slow, lambda: loss_of(model(draw(ROWS))))  # type: ignore[arg-type]  # noqa: E731
        return model, slow, Program(model, [slow.inner], step)

    model, slow, program = begin()
    extras = {"around": slow}
    lived = live_through(program, tmp_path / "run", strategy=strategy, saves=4, extras=extras)
    check_exact(tmp_path / "run", lived)
    other, again, program = begin()
    with watch(tmp_path / "run", program, strategy, extras={"around": again}) as ck:
        assert ck.resume() == 12
    for now, stored in zip([*slow.slow, *model.parameters()], [*again.slow, *other.parameters()], strict=True):  # fmt: skip  # noqa: E501
        assert torch.equal(now, stored)
