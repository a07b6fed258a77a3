"""hf.attach: loops that know nothing of checkpoints, stopped and begun again, end as if never."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import holdfast as hf
from holdfast.errors import HoldfastWarning
from tests.unit.integrations import loops
from tests.unit.integrations.loops import EPOCHS, LOOPS, PER_EPOCH, Trainer


class Killed(Exception):
    """Stands for the end of a process."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train(
    kind: type[Trainer],
    url: Path,
    *,
    every: int = 3,
    kill_at: int | None = None,
    starts_later: bool = False,
    seed: int = 1,
    **given: Any,
) -> tuple[Trainer, hf.Attachment, int]:
    """A process's life: what it had in the end, and how many steps it trained."""
    torch.manual_seed(seed)
    count = 0

    def on_step() -> None:
        nonlocal count
        count += 1
        if ck.current_step == kill_at:
            raise Killed

    trainer = kind(on_step)
    goes_along = {"trainer": trainer} if kind is loops.Deciding else {"extras": trainer.extras}
    ck = hf.attach(
        trainer.optimizer,
        url,
        model=trainer.model,
        every=every,
        codec="fp32",
        **{"loader": trainer.loader, **goes_along, **given},
    )
    try:
        with ck:
            trainer.fit(ck.start_epoch() if starts_later else 0)
    except Killed:
        assert kill_at is not None
    else:
        assert kill_at is None
    return trainer, ck, count


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Every tensor and rate of a trainer's model and optimizers."""
    found = {f"model.{name}": part.clone() for name, part in trainer.model.state_dict().items()}
    optimizers = trainer.optimizer if isinstance(trainer.optimizer, list) else [trainer.optimizer]
    for place, optimizer in enumerate(optimizers):
        saved = optimizer.state_dict()
        for number, group in enumerate(saved["param_groups"]):
            found[f"{place}.lr.{number}"] = torch.tensor(float(group["lr"]), dtype=torch.float64)
        for key, state in saved["state"].items():
            for name, value in state.items():
                found |= {f"{place}.{key}.{name}.{i}": t for i, t in enumerate(_tensors(value))}
    return found


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value.clone()]
    if isinstance(value, list):
        return [tensor for item in value for tensor in _tensors(item)]
    return [] if value is None else [torch.tensor(float(value), dtype=torch.float64)]


def assert_same(one: Trainer, other: Trainer) -> None:
    left, right = state_of(one), state_of(other)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def last_saved(url: Path) -> int:
    return hf.open(url).steps[-1] if url.exists() else 0


@pytest.mark.parametrize("starts_later", [False, True], ids=["empty", "later"])
@pytest.mark.parametrize("every", [1, 3, PER_EPOCH])
@pytest.mark.parametrize("kind", LOOPS, ids=lambda kind: kind.__name__)
def test_a_stopped_loop_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path, kind: type[Trainer], every: int, starts_later: bool
) -> None:
    if kind is loops.Deciding and not starts_later:
        pytest.skip("early stopping sees the same metric in every empty epoch (tested below)")
    calm, _, steps = train(kind, tmp_path / "calm", every=every)
    last_of_two = 2 * steps // EPOCHS if kind is not loops.Deciding else 2 * PER_EPOCH
    resumed = 0
    for life, kill_at in enumerate((last_of_two - 3, last_of_two + 1, last_of_two + 4, None)):
        trainer, ck, count = train(
            kind, tmp_path / "run", every=every, kill_at=kill_at, starts_later=starts_later,
            seed=50 + life if resumed else 1,
        )  # fmt: skip
        assert ck.resumed_step == resumed
        assert ck.resumed_step + count == (kill_at or steps)
        resumed = last_saved(tmp_path / "run")
        if kill_at is not None:
            assert resumed == (kill_at - 1) // every * every
    assert_same(trainer, calm)
    assert resumed == steps


def test_a_trainer_may_be_extended(tmp_path: Path) -> None:
    class Longer(Trainer):
        """What the user asks for now, not what the checkpoint's process was asked for."""

        def begin_fit(self) -> None:
            assert self.epochs == EPOCHS + 1
            self.begun = True

    calm, _, _ = train(Trainer, tmp_path / "calm")
    torch.manual_seed(1)
    first = Trainer(lambda: None)
    with hf.attach(first.optimizer, tmp_path / "run", model=first.model, loader=first.loader,
                   trainer=first, codec="fp32"):  # fmt: skip
        first.fit()
    assert_same(first, calm)
    later = Longer(lambda: None)
    later.epochs = EPOCHS + 1
    with hf.attach(later.optimizer, tmp_path / "run", model=later.model, loader=later.loader,
                   trainer=later, codec="fp32") as ck:  # fmt: skip
        assert ck.resumed_step == EPOCHS * PER_EPOCH
        later.fit()
    assert hf.open(tmp_path / "run").steps[-1] == (EPOCHS + 1) * PER_EPOCH


def test_a_finished_run_begun_again_trains_nothing(tmp_path: Path) -> None:
    calm, _, steps = train(Trainer, tmp_path / "run")
    for starts_later in (False, True):
        again, ck, count = train(Trainer, tmp_path / "run", starts_later=starts_later, seed=9)
        assert (count, ck.current_step) == (0, steps)
        assert_same(again, calm)
    assert hf.open(tmp_path / "run").steps[-1] == steps


def test_a_run_that_stopped_early_goes_on_when_begun_again(tmp_path: Path) -> None:
    _, ck, _ = train(loops.Deciding, tmp_path / "run")
    _, again, count = train(loops.Deciding, tmp_path / "run", starts_later=True)
    assert again.resumed_step == ck.current_step
    assert count > 0


def test_early_stopping_in_empty_epochs_is_told(tmp_path: Path) -> None:
    train(loops.Deciding, tmp_path / "run", kill_at=4 * PER_EPOCH + 4)
    with pytest.warns(HoldfastWarning, match=r"stopped after [123] of 4 epochs.*start_epoch"):
        _, _, count = train(loops.Deciding, tmp_path / "run")
    assert count == 0


def test_a_trainer_that_fails_on_an_empty_epoch_is_told_why(tmp_path: Path) -> None:
    class Dividing(Trainer):
        def train_epoch(self) -> None:
            done = 0
            for batch in self.loader:
                self.train_batch(batch)
                done += 1
            assert 1 / done

    train(Dividing, tmp_path / "run", kill_at=PER_EPOCH + 2)
    with pytest.raises(ZeroDivisionError) as caught:
        train(Dividing, tmp_path / "run")
    assert any("ck.start_epoch()" in note for note in caught.value.__notes__)
    calm, _, _ = train(Dividing, tmp_path / "calm")
    later, _, _ = train(Dividing, tmp_path / "run", starts_later=True)
    assert_same(later, calm)


def test_start_epoch_is_asked_before_training(tmp_path: Path) -> None:
    _, ck, _ = train(Trainer, tmp_path / "run")
    with pytest.raises(hf.InvalidRequestError, match="begun already"):
        ck.start_epoch()


def test_a_rate_that_nothing_knows_of_is_told(tmp_path: Path) -> None:
    with (
        pytest.warns(HoldfastWarning, match="learning rate changes"),
        pytest.warns(HoldfastWarning, match="begins its schedule anew"),
    ):
        train(loops.EpochScheduler, tmp_path / "run", extras=None)


def test_a_loader_that_is_not_the_trained_one_is_told(tmp_path: Path) -> None:
    other = DataLoader(loops.make_data(), batch_size=10)
    with pytest.warns(HoldfastWarning, match="the loader is not read"):
        _, ck, count = train(Trainer, tmp_path / "run", loader=other)
    assert ck.current_step == count == EPOCHS * PER_EPOCH  # saved all the same

    class Peeking(Trainer):
        def begin_fit(self) -> None:
            next(iter(other))

    with pytest.warns(HoldfastWarning, match="the loader is not read"):
        _, ck, _ = train(Peeking, tmp_path / "peeked", loader=other)
    assert ck.all_steps()[:2] == (3, 6)


def test_another_batch_size_is_told(tmp_path: Path) -> None:
    train(Trainer, tmp_path / "run", kill_at=5)

    class Other(Trainer):
        def __init__(self, on_step: Any) -> None:
            super().__init__(on_step)
            self.loader = DataLoader(loops.make_data(), batch_size=10, shuffle=True)

    with pytest.warns(HoldfastWarning, match="not those of the checkpoint"):
        train(Other, tmp_path / "run")


def test_batches_that_are_all_read_first_are_told(tmp_path: Path) -> None:
    class Listing(Trainer):
        def train_epoch(self) -> None:
            for batch in list(self.loader):
                self.train_batch(batch)

    with (
        pytest.warns(HoldfastWarning, match="batches_per_step=1"),
        pytest.warns(HoldfastWarning, match="read before the first step"),
    ):
        train(Listing, tmp_path / "told")
    calm, _, steps = train(Listing, tmp_path / "calm", batches_per_step=1)
    train(Listing, tmp_path / "run", kill_at=12, batches_per_step=1)
    assert last_saved(tmp_path / "run") == 12
    again, ck, count = train(Listing, tmp_path / "run", batches_per_step=1, seed=9)
    assert ck.resumed_step + count == steps
    assert_same(again, calm)


@pytest.mark.parametrize("kill_at", [13, 15, 16, 17])
def test_a_thread_that_reads_ahead_loses_no_batch(tmp_path: Path, kill_at: int) -> None:
    _, _, steps = train(loops.Threaded, tmp_path / "calm", every=1)
    train(loops.Threaded, tmp_path / "run", every=1, kill_at=kill_at)
    assert last_saved(tmp_path / "run") == kill_at  # at once: no batch is drawn in this thread
    _, ck, count = train(loops.Threaded, tmp_path / "run", starts_later=True)
    assert ck.resumed_step + count == steps == EPOCHS * PER_EPOCH


def test_a_rate_that_falls_behind_a_saved_step_is_told(tmp_path: Path) -> None:
    class Falling(loops.Threaded, loops.StepScheduler):
        pass

    with pytest.warns(HoldfastWarning, match="right after a step that was saved"):
        train(Falling, tmp_path / "run")


def test_a_loader_that_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(lambda: None)
    with pytest.raises(hf.InvalidRequestError, match="cannot be followed"):
        hf.attach(trainer.optimizer, tmp_path, model=trainer.model, loader=[1, 2])
    with pytest.raises(hf.InvalidRequestError, match="uses itself"):
        hf.attach(trainer.optimizer, tmp_path, model=trainer.model, loader=trainer.loader,
                  extras={"trainer": trainer})  # fmt: skip


@pytest.mark.parametrize("kill_at", [14, 2 * PER_EPOCH + 1])
def test_a_loader_of_a_class_of_ones_own_is_followed(tmp_path: Path, kill_at: int) -> None:
    class Batches:
        """Without a length: the step before its end is saved before the epoch's end, which is done
        again after a resume."""

        def __iter__(self) -> Iterator[Any]:
            order = torch.randperm(loops.ROWS).split(loops.BATCH)
            yield from (loops.make_data()[ids] for ids in order)

    class Own(loops.EpochScheduler):
        def __init__(self, on_step: Any) -> None:
            super().__init__(on_step)
            self.loader = Batches()

    calm, _, steps = train(Own, tmp_path / "calm", every=PER_EPOCH)
    train(Own, tmp_path / "run", every=PER_EPOCH, kill_at=kill_at)
    again, ck, count = train(Own, tmp_path / "run", every=PER_EPOCH, starts_later=True, seed=9)
    assert ck.resumed_step == (kill_at - 1) // PER_EPOCH * PER_EPOCH
    assert ck.resumed_step + count == steps
    assert_same(again, calm)


def test_what_was_changed_is_given_back(tmp_path: Path) -> None:
    own = DataLoader.__iter__
    kind = type(Trainer(lambda: None).loader)
    trainer, _, _ = train(Trainer, tmp_path / "given")
    assert type(trainer.loader) is kind
    assert not trainer.optimizer._optimizer_step_post_hooks
    trainer, _, _ = train(loops.MakesLoader, tmp_path / "found")
    assert DataLoader.__iter__ is own
    scaled, _, _ = train(loops.Scaled, tmp_path / "scaled")
    assert "update" not in vars(scaled.scaler)  # type: ignore[attr-defined]
    with pytest.raises(hf.InvalidRequestError):
        train(loops.MakesLoader, tmp_path / "found", strategy="none such")
    assert DataLoader.__iter__ is own


PROGRAM = """
import os, signal, sys
import torch
import holdfast as hf
from tests.unit.integrations.loops import StepScheduler

def main(url, how):
    torch.manual_seed(1)
    torch.set_num_threads(1)
    def on_step():
        if how == "signal" and ck.current_step == 13:
            os.kill(os.getpid(), signal.SIGTERM)
        if how == "error" and ck.current_step == 13:
            raise RuntimeError("a batch is broken")
    trainer = StepScheduler(on_step)
    ck = hf.attach(trainer.optimizer, url, model=trainer.model, loader=trainer.loader, every=5,
                   extras=trainer.extras, codec="fp32")
    trainer.fit()

main(*sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("how", "code", "saved"),
    [("end", 0, EPOCHS * PER_EPOCH), ("error", 1, 10), ("signal", 128 + signal.SIGTERM, 13)],
)
def test_a_program_that_never_closes_leaves_what_it_should(
    tmp_path: Path, how: str, code: int, saved: int
) -> None:
    root = Path(__file__).parents[3]
    path = os.pathsep.join([str(root), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "run"), how],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert hf.open(tmp_path / "run").steps[-1] == saved
    calm, _, steps = train(loops.StepScheduler, tmp_path / "calm")
    again, ck, count = train(loops.StepScheduler, tmp_path / "run", seed=9)
    assert (ck.resumed_step, count) == (saved, steps - saved)
    assert_same(again, calm)
