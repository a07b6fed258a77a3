"""What the ranks do in the tests: train, save, restore, and tell what they hold."""

from __future__ import annotations

import contextlib
import io
import runpy
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

import holdfast as hf
from holdfast.checkpoint.tracking import Tracker
from holdfast.kernels.rows import bitmap
from holdfast.model.model_state import ModelState
from tests.gpu.pretend import PretendDevice, pretending
from tests.torchrec.cases import EXAMPLE, Shards
from tests.torchrec.models import (
    Local,
    Model,
    Trainer,
    make_optimizers,
    make_plain_shards,
    numbers_of,
    unsupported_bags,
)


def make_checkpointer(url: str, trainer: Trainer, **settings: Any) -> hf.Checkpointer:
    """A checkpointer that keeps every bit."""
    settings = {"codec": "fp32", "tracking": trainer.tracking, **settings}
    return hf.Checkpointer(url, model=trainer.model, optimizer=trainer.optimizers, **settings)


def track(
    *, optimizer: str, layout: int, steps: int, is_away: bool = False
) -> dict[str, list[tuple[set[int], set[int]]]]:
    """By stored table and step: the rows that were marked, and those that differ from before.

    ``is_away``: tables pretend to be on a device that is behind.
    """
    if is_away:
        with pretending(PretendDevice(is_prompt=False)):
            return track(optimizer=optimizer, layout=layout, steps=steps)
    trainer = Trainer(optimizer=optimizer, layout=layout)
    tables = ModelState(trainer.model, trainer.optimizers).tables
    tracker = Tracker(tables)
    cursor = tracker.cursor()
    found: dict[str, list[tuple[set[int], set[int]]]] = {table.name: [] for table in tables}
    for step in range(steps):
        before = Local(trainer).copy()
        trainer.evaluate(100 + step)  # looks up other rows, and changes none
        trainer.train(range(step, step + 1))
        after = Local(trainer).copy()
        tracker.catch_up(cursor)
        marks = cursor.advance()
        for table in tables:
            index = [c for _, c, _ in after[table.whole_name]].index(table.shard.floats.start)
            old, new = before[table.whole_name][index][2], after[table.whole_name][index][2]
            differs = np.zeros(table.rows, bool)
            for column in old:
                differs |= (old[column] != new[column]).reshape(table.rows, -1).any(1)
            marked = bitmap.ids(marks[table.name], 0, table.rows)
            found[table.name].append((set(marked.tolist()), set(np.flatnonzero(differs).tolist())))
    tracker.close()
    return found


def save(
    *,
    url: str,
    optimizer: str,
    layout: int,
    strategy: str,
    saves: tuple[int, ...],
    is_away: bool = False,
) -> list[Shards]:
    """Train, and save after these steps; what was held at each."""
    if is_away:
        with pretending(PretendDevice(is_prompt=False)):
            return save(url=url, optimizer=optimizer, layout=layout, strategy=strategy, saves=saves)
    trainer = Trainer(optimizer=optimizer, layout=layout)
    held: list[Shards] = []
    with make_checkpointer(url, trainer, strategy=strategy) as ck:

        def after(step: int) -> None:
            ck.step()
            if step + 1 in saves:
                held.append(Local(trainer).copy())
                ck.save()

        trainer.train(range(saves[-1]), after=after)
    return held


def restore(*, url: str, optimizer: str, layout: int, step: int) -> Shards:
    """What is held after a restore into a model that was trained otherwise."""
    trainer = Trainer(optimizer=optimizer, layout=layout, seed=9)
    trainer.train(range(50, 52))
    with make_checkpointer(url, trainer) as ck:
        assert ck.restore(step) == step
        held = Local(trainer).copy()
    trainer.train(range(step, step + 1))  # what was restored can be trained on
    return held


def restore_plain(*, url: str, optimizer: str, step: int) -> Shards:
    """The same, into the model as it is without sharding."""
    torch.manual_seed(9)
    kind, numbers = numbers_of(optimizer)
    model = Model(numbers)
    optimizers = make_optimizers(model, kind)
    with hf.Checkpointer(
        url, model=model, optimizer=optimizers, codec="fp32", tracking="hash"
    ) as ck:
        assert ck.restore(step) == step
        return make_plain_shards(model, optimizers)


def resume(
    *, url: str, optimizer: str, layout: int, stop: int, until: int
) -> tuple[Shards, Shards]:
    """What is held in the end: trained at one go, and stopped and resumed by another model."""
    whole = Trainer(optimizer=optimizer, layout=layout)
    whole.train(range(until))
    first = Trainer(optimizer=optimizer, layout=layout)
    with make_checkpointer(url, first) as ck:
        first.train(range(stop), after=lambda step: ck.step())
        ck.save()
    second = Trainer(optimizer=optimizer, layout=layout, seed=9)
    with make_checkpointer(url, second) as ck:
        assert ck.resume() == stop
        second.train(range(stop, until), after=lambda step: ck.step())
    return Local(whole).copy(), Local(second).copy()


def example(*, url: str, steps: int) -> None:
    """The example's training, at one go."""
    found = runpy.run_path(str(EXAMPLE))
    with contextlib.redirect_stdout(io.StringIO()):
        found["train"](url, steps)


def pipelined(*, url: str, steps: int) -> dict[str, Any]:
    """The training behind a pipeline, at one go."""
    from tests.torchrec.pipelined import train  # imports what other jobs do not need

    return train(url, steps)


def refusals() -> dict[str, str]:
    """What is said of models that are not supported, by what is wrong with them."""
    said = {}
    for wrong, bags in unsupported_bags().items():
        try:
            ModelState(bags, None)
        except hf.InvalidRequestError as error:
            said[wrong] = str(error)
    return said


def combined(*, url: str) -> dict[str, Any]:
    """Save with TorchRec's optimizer of all optimizers, resume with another; what it sees then."""
    first = Trainer(optimizer="rowwise-adagrad")
    one = combine(first)
    with hf.Checkpointer(url, model=first.model, optimizer=one, codec="fp32") as ck:
        for group in first.model.fused_optimizer.param_groups:
            group["lr"] = 0.025
        first.model.fused_optimizer.step()
        first.train(range(2), after=lambda step: ck.step())
        ck.save()
    second = Trainer(optimizer="rowwise-adagrad", seed=9)
    other = combine(second)
    with hf.Checkpointer(url, model=second.model, optimizer=other, codec="fp32") as ck:
        ck.resume()
        restored = Local(second).copy()
    saved = Local(first).copy()
    for trainer in (first, second):
        trainer.train(range(2, 4))
    wrappers = [part for _, part in other.optimizers if isinstance(part, KeyedOptimizerWrapper)]
    return {
        "saved": saved,
        "restored": restored,
        "once": Local(first).copy(),
        "resumed": Local(second).copy(),
        "is_joined": [part.state is part._optimizer.state for part in wrappers]
        + [part.param_groups is part._optimizer.param_groups for part in wrappers],
        "rates": [group["lr"] for group in second.model.fused_optimizer.param_groups],
    }


def scheduled(*, url: str) -> dict[str, Any]:
    """Train with a rate that falls exactly at the checkpoint; the rates and rows that follow."""

    def train(trainer: Trainer, schedule: Any, ck: hf.Checkpointer | None, steps: range) -> None:
        def after(step: int) -> None:
            trainer.model.fused_optimizer.step()
            schedule.step()
            if ck is not None:
                ck.step()

        trainer.train(steps, after=after)

    def make(seed: int) -> tuple[Trainer, Any]:
        trainer = Trainer(optimizer="rowwise-adagrad", seed=seed)
        fused = trainer.model.fused_optimizer
        return trainer, torch.optim.lr_scheduler.StepLR(fused, step_size=3, gamma=0.1)

    whole, schedule = make(5)
    train(whole, schedule, None, range(5))
    first, schedule = make(5)
    with make_checkpointer(url, first, extras={"schedule": schedule}, every=3) as ck:
        train(first, schedule, ck, range(3))
    second, schedule = make(9)
    with make_checkpointer(url, second, extras={"schedule": schedule}, every=3) as ck:
        assert ck.resume() == 3
        rates = [group["lr"] for group in second.model.fused_optimizer.param_groups]
        train(second, schedule, ck, range(3, 5))
    return {"rates": rates, "once": Local(whole).copy(), "resumed": Local(second).copy()}


def combine(trainer: Trainer) -> CombinedOptimizer:
    """One optimizer of the fused ones and of the torch optimizers of a trainer."""
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    wrapped = []
    for optimizer in trainer.optimizers.values():
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        named = {names[id(p)]: p for p in parameters}
        wrapped.append(KeyedOptimizerWrapper(named, lambda _, made=optimizer: made))
    return CombinedOptimizer([trainer.model.fused_optimizer, *wrapped])


def load_file(*, path: str, optimizer: str, layout: int) -> Shards:
    """What is held after plain torch has loaded an exported file; nothing of Holdfast is used."""
    trainer = Trainer(optimizer=optimizer, layout=layout, seed=9)
    trainer.train(range(50, 52))
    file = torch.load(path, weights_only=True)
    trainer.model.load_state_dict(file["model"])  # TorchRec cuts whole tensors itself
    held = trainer.model.fused_optimizer.state_dict()["state"]
    for name, states in held.items():  # of tables that this rank holds something of
        for key, sharded in states.items():
            whole = file["fused_optimizer"]["state"][name][key]
            for shard in sharded.local_shards():
                # Where columns are cut, TorchRec counts one number a row on over the cuts.
                first, *rest = shard.metadata.shard_offsets
                sizes = shard.metadata.shard_sizes
                starts = [first % len(whole), *rest]
                where = [slice(a, a + n) for a, n in zip(starts, sizes, strict=True)]
                shard.tensor.copy_(whole[tuple(where)])
    (rate,) = {group["lr"] for group in file["fused_optimizer"]["param_groups"]}
    for group in trainer.model.fused_optimizer.param_groups:
        group["lr"] = rate
    for name, each in trainer.optimizers.items():
        each.load_state_dict(file["optimizers"][name])
    return Local(trainer).copy()


def load_folder(*, path: str, optimizer: str, layout: int) -> Shards:
    """The same of a folder, which DCP loads into sharded tensors."""
    trainer = Trainer(optimizer=optimizer, layout=layout, seed=9)
    trainer.train(range(50, 52))
    fused = trainer.model.fused_optimizer
    state = {"model": trainer.model.state_dict(), "fused_optimizer": fused.state_dict()}
    dcp.load(state, checkpoint_id=path)
    trainer.model.load_state_dict(state["model"])
    fused.load_state_dict(state["fused_optimizer"])
    return Local(trainer).copy()
