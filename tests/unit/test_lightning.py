"""A Trainer that stops and is started again goes on as if it had not, beside Lightning's own."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast as hf

lightning = pytest.importorskip("lightning")
stateful = pytest.importorskip("torchdata.stateful_dataloader")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from holdfast.lightning import HoldfastCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers and loggers

ROWS, BATCHES = 60, 5


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Layers this small lose more to handing work around than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Pairs(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 8 * BATCHES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([index * 7 % ROWS, index * 11 % ROWS]), torch.tensor(float(index % 2))


class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
    """Tables, batch norm, dropout and a scheduler; with ``manual`` two optimizers."""

    def __init__(self, *, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.users = nn.Embedding(ROWS, 4, sparse=True)
        self.items = nn.Embedding(ROWS, 4, sparse=True)
        self.top = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.stop_after: int | None = None

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        ids, target = batch
        rows = torch.cat([self.users(ids[:, 0]), self.items(ids[:, 1])], 1)
        loss = nn.functional.binary_cross_entropy_with_logits(self.top(rows)[:, 0], target)
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.stop_after is not None and self.global_step >= self.stop_after:
            raise Stopped

    def configure_optimizers(self) -> Any:
        tables = [self.users.weight, self.items.weight]
        if not self.automatic_optimization:
            return [torch.optim.Adagrad(tables), torch.optim.Adam(self.top.parameters())]
        optimizer = torch.optim.Adagrad(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Stopped(Exception):
    """What a failure in the middle of a batch looks like."""


def fit(
    url: Path,
    steps: int,
    *,
    stop_after: int | None = None,
    manual: bool = False,
    every: int = 3,
    accumulate: int = 1,
    callbacks: tuple[Any, ...] = (),
    **arguments: Any,
) -> tuple[Module, Any, HoldfastCallback]:
    lightning.seed_everything(4, verbose=False)
    module = Module(manual=manual)
    module.stop_after = stop_after
    loader = stateful.StatefulDataLoader(Pairs(), batch_size=8, shuffle=True)
    callback = HoldfastCallback(url, every=every, codec="fp32")
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", devices=1, logger=False, barebones=False,
        enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=bool(callbacks), callbacks=[callback, *callbacks],
        accumulate_grad_batches=accumulate, default_root_dir=url.parent,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if stop_after is None:
            trainer.fit(module, loader, **arguments)
        else:
            with pytest.raises(Stopped):
                trainer.fit(module, loader, **arguments)
    return module, trainer, callback


def numbers(module: Module, trainer: Any) -> list[Any]:
    """Weights, optimizers, schedulers and progress, to the last bit."""
    found: list[Any] = [trainer.global_step, trainer.current_epoch]
    found += [(name, value.tolist()) for name, value in module.state_dict().items()]
    for optimizer in trainer.optimizers:
        for index, state in optimizer.state_dict()["state"].items():
            plain = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in state.items()}
            found.append((index, plain))
        found.append([group["lr"] for group in optimizer.param_groups])
    return found


# in an epoch, at its end, and after it: batches of an epoch are five
@pytest.mark.parametrize(("stop_after", "every"), [(8, 3), (6, 5), (11, 10), (13, 4)])
def test_stopped_trainer_goes_on_to_the_same_bits(
    tmp_path: Path, stop_after: int, every: int
) -> None:
    calm = numbers(*fit(tmp_path / "calm", 17, every=every)[:2])
    fit(tmp_path / "run", 17, stop_after=stop_after, every=every)
    assert hf.open(tmp_path / "run").steps[-1] == stop_after // every * every
    again = fit(tmp_path / "run", 17, every=every)
    assert numbers(*again[:2]) == calm
    assert hf.open(tmp_path / "run").steps[-1] == 17


def test_trainer_that_had_ended_has_nothing_to_do(tmp_path: Path) -> None:
    calm = numbers(*fit(tmp_path / "run", 7)[:2])
    again = numbers(*fit(tmp_path / "run", 7)[:2])
    del calm[1], again[1]  # Lightning counts the epoch that max_steps cut off, or it does not
    assert again == calm
    assert numbers(*fit(tmp_path / "run", 12)[:2]) == numbers(*fit(tmp_path / "calm", 12)[:2])


def test_two_optimizers_by_hand_go_along(tmp_path: Path) -> None:
    calm = numbers(*fit(tmp_path / "calm", 24, manual=True)[:2])
    fit(tmp_path / "run", 24, stop_after=16, manual=True)
    again = fit(tmp_path / "run", 24, manual=True)
    assert numbers(*again[:2]) == calm
    assert again[1].global_step == 24
    assert hf.open(tmp_path / "run").steps[-1] == 12  # batches; each optimizer's step counts there


def test_gathered_gradients_are_never_cut_in_two(tmp_path: Path) -> None:
    calm = numbers(*fit(tmp_path / "calm", 7, accumulate=2, every=1)[:2])
    fit(tmp_path / "run", 7, accumulate=2, every=1, stop_after=4)
    assert hf.open(tmp_path / "run").steps[-1] == 4
    assert numbers(*fit(tmp_path / "run", 7, accumulate=2, every=1)[:2]) == calm


# in mid-accumulation too, where Lightning by itself would stop at once
@pytest.mark.parametrize(("at", "accumulate", "saved"), [(7, 1, 8), (2, 2, 2), (4, 3, 2)])
def test_a_trainer_that_is_sent_sigterm_saves_the_step_and_stops(
    tmp_path: Path, at: int, accumulate: int, saved: int
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    calm = numbers(*fit(tmp_path / "calm", 10, accumulate=accumulate)[:2])

    class Ended(lightning.Callback):  # type: ignore[misc,name-defined]
        batches = 0

        def on_train_batch_start(self, *_: Any) -> None:
            self.batches += 1
            if self.batches == at + 1:
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit):
        fit(tmp_path / "run", 10, accumulate=accumulate, every=100, callbacks=(Ended(),))
    assert signal.getsignal(signal.SIGTERM) == before
    assert hf.open(tmp_path / "run").steps == (saved,)
    assert numbers(*fit(tmp_path / "run", 10, accumulate=accumulate)[:2]) == calm


def test_lightnings_own_checkpoints_work_beside_it(tmp_path: Path) -> None:
    own = ModelCheckpoint(dirpath=tmp_path / "own", every_n_train_steps=4, save_top_k=-1)
    calm = fit(tmp_path / "run", 11, callbacks=(own,))
    assert hf.open(tmp_path / "run").steps == (3, 6, 9, 11)
    (path,) = (tmp_path / "own").glob("*step=8*")
    with pytest.raises(hf.InvalidRequestError, match="ckpt_path"):
        fit(tmp_path / "run", 11, ckpt_path=path, weights_only=False)
    other = fit(tmp_path / "other", 11, ckpt_path=path, weights_only=False)
    weights = [value.tolist() for value in calm[0].state_dict().values()]
    assert len(weights) == len(other[0].state_dict())
    assert other[1].global_step == 11
    assert hf.open(tmp_path / "other").steps == (3,)  # counted from where it began


def test_imported_lightning_checkpoint_is_a_runs_base(tmp_path: Path) -> None:
    own = ModelCheckpoint(dirpath=tmp_path / "own", every_n_train_steps=4, save_top_k=-1)
    module, trainer, _ = fit(tmp_path / "run", 8, callbacks=(own,))
    (path,) = (tmp_path / "own").glob("*step=8*")
    done = hf.import_checkpoint(
        path, tmp_path / "new", tables=["users.weight", "items.weight"],
        parameters=[name for name, _ in module.named_parameters()],
    )  # fmt: skip
    assert (done.step, done.tables, done.state_columns) == (8, 2, 2)
    other = Module()
    optimizer = torch.optim.Adagrad(other.parameters(), lr=0.1)
    with hf.Checkpointer(tmp_path / "new", model=other, optimizer=optimizer) as ck:
        assert ck.resume() == 8
    for name, value in module.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    sums = [state["sum"] for state in trainer.optimizers[0].state.values()]
    assert all(
        torch.equal(a, b["sum"]) for a, b in zip(sums, optimizer.state.values(), strict=True)
    )
