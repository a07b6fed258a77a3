"""Programs with several loops, several loaders or none that is named: the same run, or a notice."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast import events
from holdfast.errors import HoldfastWarning, InvalidRequestError
from holdfast.loading.reader_slot import ReaderSlot
from tests.unit.loading.readerjob import (
    BATCHES,
    Plain,
    Run,
    Samples,
    Stopped,
    make_loader,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*")

Program = Callable[[Run, "int | None"], None]
STOPS = (1, 8, 9, 10, 11, 15, 16, 20, 21, 29)


def pretrain_and_tune(run: Run, stop: int | None) -> None:
    """Two loaders, and a draw between their loops, as of a new layer."""
    run.train(run.ck.epochs(make_loader("plain"), 1), stop=stop)
    torch.rand(3)
    run.train(run.ck.epochs(make_loader("stateful-own"), 2), stop=stop)


def tune_the_same(run: Run, stop: int | None) -> None:
    """Two loops over one loader."""
    loader = make_loader("plain-own")
    run.train(run.ck.epochs(loader, 1), stop=stop)
    random.random()
    run.train(run.ck.epochs(loader, 2), stop=stop)


def call_every_epoch(run: Run, stop: int | None) -> None:
    """One call an epoch; the sampler asks which epoch it is."""
    samples = Samples()
    sampler: Any = torch.utils.data.DistributedSampler(samples, 1, 0)
    loader: Any = DataLoader(samples, batch_size=4, sampler=sampler)
    for _ in range(3):
        run.train(run.ck.epochs(loader, 1), stop=stop)


def build_every_epoch(run: Run, stop: int | None) -> None:
    """One loader an epoch."""
    for _ in range(3):
        run.train(run.ck.epochs(make_loader("plain"), 1), stop=stop)


def take_turns(run: Run, stop: int | None) -> None:
    """Two loaders by turns."""
    one, other = make_loader("plain-own"), make_loader("iterable")
    for _ in range(2):
        run.train(run.ck.epochs(one, 1), stop=stop)
        run.train(run.ck.epochs(other, 1), stop=stop)


def side_by_side(run: Run, stop: int | None) -> None:
    """Two loaders at once."""
    pairs = zip(
        run.ck.epochs(make_loader("plain"), 3), run.ck.epochs(make_loader("iterable"), 3),
        strict=True,
    )  # fmt: skip
    for pair in pairs:
        run.train([torch.cat(pair)], stop=stop)


def side_by_side_every_epoch(run: Run, stop: int | None) -> None:
    """Two loaders at once, one call an epoch; the longer one is never read to its end."""
    longer, shorter = make_loader("plain"), [torch.full((4, 4), float(i)) for i in range(8)]
    for _ in range(4):
        for pair in zip(run.ck.epochs(longer, 1), run.ck.epochs(shorter, 1), strict=False):
            run.train([torch.cat(pair)], stop=stop)


def shorter_first_every_epoch(run: Run, stop: int | None) -> None:
    """The same, the shorter one first: at its end nothing asks the other one."""
    longer, shorter = make_loader("plain"), [torch.full((4, 4), float(i)) for i in range(8)]
    for _ in range(4):
        for pair in zip(run.ck.epochs(shorter, 1), run.ck.epochs(longer, 1), strict=False):
            run.train([torch.cat(pair)], stop=stop)


def leave_early(run: Run, stop: int | None) -> None:
    """The first loop is left in mid-epoch; the second goes on with another loader."""
    for batch in run.ck.epochs(make_loader("plain"), 5):
        run.train([batch], stop=stop)
        if run.ck.current_step == 13:
            break
    run.train(run.ck.epochs(make_loader("stateful"), 2), stop=stop)


def leave_and_return(run: Run, stop: int | None) -> None:
    """The first loop is left in mid-epoch; the second begins the same loader anew."""
    loader = make_loader("plain-own")
    for batch in run.ck.epochs(loader, 5):
        run.train([batch], stop=stop)
        if run.ck.current_step == 13:
            break
    run.train(run.ck.epochs(loader, 2), stop=stop)


def look_first(run: Run, stop: int | None) -> None:
    """Looks at a batch before it trains. Own generators: a resumed process looks once more."""
    loader = make_loader("quiet")
    next(run.ck.epochs(loader, 3))
    run.train(run.ck.epochs(loader, 3), stop=stop)


@pytest.mark.parametrize(
    "program",
    [pretrain_and_tune, tune_the_same, call_every_epoch, build_every_epoch, take_turns,
     side_by_side, side_by_side_every_epoch, shorter_first_every_epoch, leave_early,
     leave_and_return, look_first],
)  # fmt: skip
def test_a_program_of_several_loops_resumes_in_the_right_one(
    program: Program, tmp_path: Path
) -> None:
    whole = Run(tmp_path / "whole", seed=1)
    with whole.ck:
        program(whole, None)
    assert len(whole.seen) >= 3 * BATCHES
    for stop in STOPS:
        url = tmp_path / str(stop)
        first = Run(url, seed=1)
        with first.ck, contextlib.suppress(Stopped):
            program(first, stop)
        rest = Run(url, seed=stop + 9)
        with rest.ck:
            assert rest.ck.resume() == stop
            program(rest, None)
        assert [row for _, row in first.seen + rest.seen] == [row for _, row in whole.seen], stop
        assert rest.digest() == whole.digest(), stop


def test_a_run_is_stopped_twice_between_loops(tmp_path: Path) -> None:
    """What is known of loaders that are not named yet goes into the next checkpoint, too."""
    whole = Run(tmp_path / "whole", seed=1)
    with whole.ck:
        take_turns(whole, None)
    seen: list[Any] = []
    for stop in (10, 15, 20, 21, 33, None):
        run = Run(tmp_path / "stopped", seed=1)
        with run.ck, contextlib.suppress(Stopped):
            run.ck.resume()
            take_turns(run, stop)
        seen += run.seen
    assert [row for _, row in seen] == [row for _, row in whole.seen]
    assert run.digest() == whole.digest()


@pytest.mark.parametrize("make", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("way", ["epochs", "reader"])
def test_a_loop_of_500_steps_trains_500(make: Any, way: str, tmp_path: Path) -> None:
    """Stopped at 225, in the third of five epochs."""
    steps = 0
    for stop in (225, None):
        loader = make(list(range(400)), batch_size=4, shuffle=True)
        run = Run(tmp_path / "run", seed=1, reader=loader if way == "reader" else None)
        with run.ck:
            run.ck.resume()
            batches: Any = (
                run.ck.epochs(loader, 5)
                if way == "epochs"
                else itertools.chain.from_iterable(loader for _ in range(run.ck.epoch, 5))
            )
            for _ in batches:
                run.ck.step()
                steps += 1
                if run.ck.current_step == stop:
                    break
    assert steps == run.ck.current_step == 500


@pytest.mark.parametrize("is_intercepted", [False, True])
def test_loaders_go_without_the_garbage_collector(is_intercepted: bool) -> None:
    """In a cycle torch's iterators cannot tell their workers to end, and wait 5 s for each."""
    gc.collect()
    gc.disable()
    try:
        loaders = [make_loader("plain"), make_loader("stateful")]
        slot = ReaderSlot(loaders[0] if is_intercepted else None, events.EventLog())
        batches = [slot.epochs(loader, 2, batches_per_step=None) for loader in loaders]
        for _ in range(3):
            for each in batches:
                next(each)
            slot.trained()
        slot.load_state_dict(slot.state_dict())
        for each in batches:
            next(each)
        left = [weakref.ref(loader) for loader in loaders]
        del loaders, batches, each, slot
        assert [ref() for ref in left] == [None, None]
    finally:
        gc.enable()


# Notices.


def test_a_loader_that_nobody_named_is_reported(tmp_path: Path) -> None:
    """In the first run, and again after a resume, where it begins from the start."""
    for text in ("no checkpoint knows of", "at step 3, reading begins from the start"):
        run = Run(tmp_path, seed=1)
        with run.ck, pytest.warns(HoldfastWarning, match=text), contextlib.suppress(Stopped):
            run.ck.resume()
            run.train(make_loader("plain"), stop=run.ck.current_step + 3)
        run.ck.close()


def test_a_loader_among_the_extras_is_not_reported(tmp_path: Path) -> None:
    loader = make_loader("stateful")
    found: list[events.Event] = []
    run = Run(tmp_path, seed=1, extras={"data": loader}, events=found.append)
    with run.ck:
        run.train(loader, stop=None)
    assert not [event for event in found if isinstance(event, events.ReaderNotice)]


def test_a_resumed_run_without_a_loader_says_so_in_its_events(tmp_path: Path) -> None:
    """No warning: batches may depend on the step alone."""
    found: list[events.Event] = []
    for _ in range(2):
        run = Run(tmp_path, seed=1, events=found.append)
        with run.ck:
            for _ in range(run.ck.resume(), run.ck.current_step + 3):
                run.step(None)
    (notice,) = [event for event in found if isinstance(event, events.ReaderNotice)]
    assert "at step 3, and no loader was named" in notice.reason


def test_a_loop_that_begins_at_the_epoch_and_plans_each_is_reported(tmp_path: Path) -> None:
    """Each ck.epochs() stands for epochs from the first on: such a loop trains too few."""

    def train(stop: int | None) -> int:
        loader = make_loader("plain")
        run = Run(tmp_path, seed=1)
        with run.ck, contextlib.suppress(Stopped):
            run.ck.resume()
            for _ in range(run.ck.epoch, 3):
                for _ in run.ck.epochs(loader, 1):
                    run.step(stop)
        return run.ck.current_step

    stopped = train(BATCHES + 2)
    assert stopped == BATCHES + 2
    with pytest.warns(HoldfastWarning, match="trains too few"):
        assert train(None) < 3 * BATCHES


def test_a_loop_that_counts_epochs_from_0_after_a_resume_is_reported(tmp_path: Path) -> None:
    def train(stop: int | None) -> None:
        loader = make_loader("plain")
        run = Run(tmp_path, seed=1, reader=loader)
        with run.ck, contextlib.suppress(Stopped):
            run.ck.resume()
            for _ in range(3):
                for _ in loader:
                    run.step(stop)

    train(13)
    with pytest.warns(HoldfastWarning, match=r"in epoch 1, .* range\(ck.epoch, n\)"):
        train(None)


def test_several_steps_for_one_batch_are_reported(tmp_path: Path) -> None:
    run = Run(tmp_path, seed=1)
    with run.ck, pytest.warns(HoldfastWarning, match="several steps are counted for one batch"):
        for _ in run.ck.epochs(make_loader("plain"), 1):
            run.step(None)
            run.step(None)


@pytest.mark.parametrize("way", ["followed", "epochs"])
def test_batches_that_are_kept_for_later_passes_are_reported(way: str, tmp_path: Path) -> None:
    loader = make_loader("plain")
    run = Run(tmp_path, seed=1, reader=loader if way == "followed" else None)
    batches = loader if way == "followed" else run.ck.epochs(loader, 1)
    with run.ck, pytest.warns(HoldfastWarning, match="nothing reads it again"):
        run.train(itertools.islice(itertools.cycle(batches), 2 * BATCHES), stop=None)


def _evaluate(run: Run, scheduler: Any) -> None:
    list(DataLoader(Plain(), batch_size=4))


def _schedule(run: Run, scheduler: Any) -> None:
    scheduler.step()


def _slow_down(run: Run, scheduler: Any) -> None:
    run.optimizer.param_groups[0]["lr"] *= 0.9
    scheduler.optimizer.param_groups[0]["lr"] *= 0.9


def _average(run: Run, scheduler: Any) -> None:
    with torch.no_grad():
        run.model.top[1].bias.lerp_(run.model.top[1].bias.detach() + 1, 0.1)


def _nothing(run: Run, scheduler: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("follows", "told"),
    [
        (_evaluate, "random numbers are drawn"),
        (_schedule, "scheduler steps"),
        (_slow_down, "learning rate changes"),
        (_average, "model is written to"),
    ],
)
@pytest.mark.parametrize("is_last", [True, False])
def test_what_follows_a_save_is_reported(
    follows: Any, told: str, is_last: bool, tmp_path: Path
) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    run = Run(tmp_path, seed=1, every=4, extras={"scheduler": scheduler})
    optimizer.step()
    before, behind = (follows, _nothing) if is_last else (_nothing, follows)
    expected = contextlib.nullcontext() if is_last else pytest.warns(HoldfastWarning, match=told)
    with run.ck, expected:
        for batch in run.ck.epochs(make_loader("plain"), 2):
            before(run, scheduler)
            run.train([batch], stop=None)
            behind(run, scheduler)


def test_two_loaders_side_by_side_are_not_taken_for_draws_behind_a_save(tmp_path: Path) -> None:
    told: list[events.Event] = []
    run = Run(tmp_path, seed=1, every=4, events=told.append)
    with run.ck:
        side_by_side(run, None)
    assert not [event for event in told if isinstance(event, events.ReaderNotice)]


def test_generators_of_the_program_go_along_as_extras(tmp_path: Path) -> None:
    def begin() -> tuple[Run, dict[str, Any]]:
        own = {
            "numpy": np.random.default_rng(1),
            "old": np.random.RandomState(1),
            "torch": torch.Generator().manual_seed(1),
            "python": random.Random(1),
        }
        return Run(tmp_path, seed=1, extras=own), own

    def draw(own: dict[str, Any]) -> list[float]:
        drawn = torch.rand(1, generator=own["torch"]).item()
        return [own["numpy"].random(), own["old"].rand(), drawn, own["python"].random()]

    run, own = begin()
    with run.ck:
        draw(own)
        run.ck.step()
    expected = draw(own)
    run, own = begin()
    with run.ck:
        assert run.ck.resume() == 1
        assert draw(own) == expected


def test_a_loader_without_an_order_is_reported(tmp_path: Path) -> None:
    loader: Any = DataLoader(Plain(), num_workers=2, in_order=False)
    run = Run(tmp_path, seed=1)
    with run.ck, pytest.warns(HoldfastWarning, match="in_order=True"):
        run.ck.epochs(loader, 1)


def test_a_restore_to_another_loaders_time_is_reported(tmp_path: Path) -> None:
    run = Run(tmp_path, seed=1, every=5)
    with run.ck:
        run.train(run.ck.epochs(make_loader("list"), 1), stop=None)
        other = run.ck.epochs(make_loader("plain"), 1)
        run.train(itertools.islice(other, 3), stop=None)
        with pytest.warns(HoldfastWarning, match="another loader was trained"):
            run.ck.restore(5)


def test_reader_and_epochs_must_be_the_same_object(tmp_path: Path) -> None:
    run = Run(tmp_path, seed=1, reader=make_loader("granted"))
    with run.ck, pytest.raises(InvalidRequestError, match="another loader"):
        run.ck.epochs(make_loader("granted"), 1)


def nested(run: Run) -> None:
    """A loop over one loader for each batch of another."""
    outer, inner = make_loader("plain"), make_loader("iterable")
    for _ in run.ck.epochs(outer, 1):
        run.train(run.ck.epochs(inner, 1), stop=None)


def lazily_beside(run: Run) -> None:
    """A second loader that is named late, and drawn from now and then."""
    others: Any = None
    for number, batch in enumerate(run.ck.epochs(make_loader("plain"), 2)):
        if number % 3 == 1:
            others = others or run.ck.epochs(make_loader("iterable"), 9)
            batch = torch.cat([batch, next(others)])
        run.train([batch], stop=None)


@pytest.mark.parametrize(("program", "is_told"), [(nested, True), (lazily_beside, False)])
def test_calls_inside_of_a_loop_are_reported(
    program: Callable[[Run], None], is_told: bool, tmp_path: Path
) -> None:
    told: list[events.Event] = []
    run = Run(tmp_path, seed=1, events=told.append)
    expected = pytest.warns(HoldfastWarning, match="called again for each batch of another")
    with run.ck, expected if is_told else contextlib.nullcontext():
        program(run)
    assert len([event for event in told if isinstance(event, events.ReaderNotice)]) == is_told
