"""Schedulers that do not go along are reported; what is done behind trained epochs is done once."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import holdfast as hf
from holdfast import events
from holdfast.errors import HoldfastWarning
from tests.unit.loading.readerjob import Model, Plain, Run, Stopped, make_loader

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*")

STOPS = (1, 9, 10, 11, 15, 20, 21, 25, 29)


class Ends:
    """Counts the ends of epochs, as early stopping does."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        """How many."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """So many."""
        self.count = state["count"]


def end(run: Run, ends: Ends) -> None:
    """What programs do at an epoch's end: count, slow down, evaluate."""
    ends.count += 1
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.5
    list(DataLoader(Plain(), batch_size=4))


def every_epoch(run: Run, ends: Ends, stop: int | None) -> None:
    """A call an epoch."""
    loader = make_loader("plain")
    for _ in range(3):
        run.train(run.ck.epochs(loader, 1), stop=stop)
        end(run, ends)


def another_loader_every_epoch(run: Run, ends: Ends, stop: int | None) -> None:
    """A loader an epoch."""
    for _ in range(3):
        run.train(run.ck.epochs(make_loader("plain"), 1), stop=stop)
        end(run, ends)


def by_turns(run: Run, ends: Ends, stop: int | None) -> None:
    """Two loaders by turns."""
    one, other = make_loader("plain-own"), make_loader("stateful-own")
    for _ in range(2):
        run.train(run.ck.epochs(one, 1), stop=stop)
        run.train(run.ck.epochs(other, 1), stop=stop)
        end(run, ends)


def side_by_side(run: Run, ends: Ends, stop: int | None) -> None:
    """Two loaders at once."""
    one, other = make_loader("plain-own"), make_loader("plain-own")
    for _ in range(3):
        for pair in zip(run.ck.epochs(one, 1), run.ck.epochs(other, 1), strict=True):
            run.train([torch.cat(pair)], stop=stop)
        end(run, ends)


def two_phases(run: Run, ends: Ends, stop: int | None) -> None:
    """The second phase sets a rate of its own, and lowers it at each step."""
    loader = make_loader("plain")
    run.train(run.ck.epochs(loader, 1), stop=stop)
    for group in run.optimizer.param_groups:
        group["lr"] = 0.2
    for batch in run.ck.epochs(loader, 2):
        for group in run.optimizer.param_groups:
            group["lr"] *= 0.9
        run.train([batch], stop=stop)


@pytest.mark.parametrize(
    "program", [every_epoch, another_loader_every_epoch, by_turns, side_by_side, two_phases]
)
def test_what_is_done_behind_an_epoch_is_done_once_wherever_a_run_is_stopped(
    program: Callable[[Run, Ends, int | None], None], tmp_path: Path
) -> None:
    ends = Ends()
    whole = Run(tmp_path / "whole", seed=1, extras={"ends": ends})
    with whole.ck:
        program(whole, ends, None)
    for stop in STOPS:
        first = Run(tmp_path / str(stop), seed=1, extras={"ends": (begun := Ends())})
        with first.ck, contextlib.suppress(Stopped):
            program(first, begun, stop)
        rest = Run(tmp_path / str(stop), seed=stop + 9, extras={"ends": (again := Ends())})
        with rest.ck:
            assert rest.ck.resume() == stop
            program(rest, again, None)
        assert again.count == ends.count, stop
        assert rest.digest() == whole.digest(), stop


def test_writes_to_the_model_behind_trained_epochs_are_reported(tmp_path: Path) -> None:
    def program(run: Run, stop: int | None) -> None:
        for _ in range(3):
            run.train(run.ck.epochs(make_loader("quiet"), 1), stop=stop)
            with torch.no_grad():
                run.model.top[1].weight.mul_(0.9)

    first = Run(tmp_path, seed=1)
    with first.ck, contextlib.suppress(Stopped):
        program(first, 15)
    rest = Run(tmp_path, seed=1)
    with rest.ck, pytest.warns(HoldfastWarning, match="behind epochs that are trained"):
        rest.ck.resume()
        program(rest, None)


def trained(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """So that schedulers do not warn."""
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("stop", [4, 15])
def test_a_scheduler_that_steps_before_its_batches_is_reported(stop: int, tmp_path: Path) -> None:
    def program(stop: int | None) -> None:
        model = Model()
        optimizer = trained(torch.optim.Adagrad(model.parameters(), lr=0.05))
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
        optimizer.step()
        ck = hf.Checkpointer(
            tmp_path, model=model, optimizer=optimizer, extras={"scheduler": scheduler}
        )
        with ck:
            ck.resume()
            for _ in range(3):
                scheduler.step()
                for batch in ck.epochs(make_loader("quiet"), 1):
                    model(batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    ck.step()
                    if ck.current_step == stop:
                        ck.save().wait()
                        raise Stopped

    with contextlib.suppress(Stopped):
        program(stop)
    with pytest.warns(HoldfastWarning, match=r"between ck.resume\(\) and the first batch"):
        program(None)


class Holder:
    """Has a scheduler among its own, deep down."""

    def __init__(self, scheduler: Any) -> None:
        self.parts = {"of": [{"rates": scheduler}]}

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's."""
        state: dict[str, Any] = self.parts["of"][0]["rates"].state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The scheduler's."""
        self.parts["of"][0]["rates"].load_state_dict(state)


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    """Leaves nothing in the groups of its optimizer."""
    return lr_scheduler.ReduceLROnPlateau(optimizer)


def sequence(optimizer: torch.optim.Optimizer) -> Any:
    """Holds others."""
    return lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[5],
    )


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    """The usual."""
    return lr_scheduler.StepLR(optimizer, 5)


NOTHING: Callable[[Any], dict[str, Any]] = lambda scheduler: {}  # noqa: E731
ITSELF: Callable[[Any], dict[str, Any]] = lambda scheduler: {"s": scheduler}  # noqa: E731
HELD: Callable[[Any], dict[str, Any]] = lambda scheduler: {"s": Holder(scheduler)}  # noqa: E731
OTHER: Callable[[Any], dict[str, Any]] = lambda scheduler: {"s": Ends()}  # noqa: E731


@pytest.mark.parametrize("make", [plateau, sequence, step_lr])
@pytest.mark.parametrize(
    ("extras", "is_told"), [(NOTHING, True), (ITSELF, False), (HELD, False), (OTHER, True)]
)
def test_a_scheduler_that_does_not_go_along_is_reported(
    make: Any, extras: Any, is_told: bool, tmp_path: Path
) -> None:
    model = Model()
    optimizer = trained(torch.optim.Adagrad(model.parameters(), lr=0.05))
    scheduler = make(optimizer)
    told: list[events.Event] = []
    ck = hf.Checkpointer(
        tmp_path,
        model=model,
        optimizer=optimizer,
        extras=extras(scheduler),
        events=told.append,
        save_last=False,
    )
    expected = pytest.warns(HoldfastWarning, match="begins its schedule anew")
    with ck, expected if is_told else contextlib.nullcontext():
        for _ in range(3):
            ck.step()
            ck.save().wait()
    notices = [event for event in told if isinstance(event, events.ReaderNotice)]
    assert len(notices) == is_told


def test_one_of_two_schedulers_that_does_not_go_along_is_reported(tmp_path: Path) -> None:
    model = Model()
    optimizers = [
        trained(torch.optim.Adagrad(part.parameters(), lr=0.05))
        for part in (model.table, model.top)
    ]
    first, second = map(step_lr, optimizers)
    with (
        hf.Checkpointer(tmp_path, model=model, optimizer=optimizers, extras={"first": first}) as ck,
        pytest.warns(HoldfastWarning, match="begins its schedule anew"),
    ):
        ck.step()
        ck.save().wait()
    assert second.last_epoch == 0


def accumulating(run: Run, *, counts_batches: bool) -> None:
    """A step trains four batches, and is counted four times or once."""
    for number, batch in enumerate(run.ck.epochs(make_loader("plain"), 2), 1):
        run.model(batch).backward()
        if number % 4 == 0:
            run.optimizer.step()
            run.optimizer.zero_grad()
        if counts_batches or number % 4 == 0:
            run.ck.step()


def test_a_save_between_gradients_and_their_step_is_reported(tmp_path: Path) -> None:
    run = Run(tmp_path, seed=1, every=3)
    with run.ck, pytest.warns(HoldfastWarning, match=r"gradients wait for optimizer.step\(\)"):
        accumulating(run, counts_batches=True)


@pytest.mark.parametrize("clears", ["before", "behind", "never"])
def test_gradients_that_were_used_or_left_out_are_not_reported(clears: str, tmp_path: Path) -> None:
    told: list[events.Event] = []
    run = Run(tmp_path / "whole", seed=1, every=3, events=told.append)
    with run.ck:
        accumulating(run, counts_batches=False)
    run = Run(tmp_path / "scaled", seed=1, every=1, events=told.append)
    with run.ck:
        for number, batch in enumerate(itertools.islice(run.ck.epochs(make_loader("plain"), 1), 6)):
            if clears == "before":
                run.optimizer.zero_grad()
            loss = run.model(batch)
            (loss * float("inf") if number % 2 else loss).backward()
            if not number % 2:  # what a GradScaler does
                run.optimizer.step()
            if clears == "behind":
                run.optimizer.zero_grad()
            run.ck.step()
    assert not [event for event in told if isinstance(event, events.ReaderNotice)]
