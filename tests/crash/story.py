"""A short training with every kind of save, told on a storage that may fail, and its oracle.

    first part: base, deltas, retention with deletion; second part: resume, and a save
    with a grid: the same, and a round of extraction after every save; the last save is a base

What the model is after every step follows from the step alone, so the oracle trains once without
any checkpoint; a run that was interrupted and resumed must pass through the same states.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import holdfast as hf
from holdfast.checkpoint.format.catalog import RestoreTiming
from holdfast.checkpoint.grid.round_plan import plan_round
from holdfast.storage.base import ObjectWriter, Storage, StoredObjects
from tests.conftest import TinyModel, fingerprint, make_optimizers, train_steps

ROWS = 24
FIRST_STEPS, LAST_STEP = 3, 4
TABLES = ("users.weight", "items.weight")

State = dict[str, bytes]
Model = tuple[TinyModel, list[torch.optim.Optimizer]]


@dataclass(frozen=True, slots=True)
class Plot:
    """What varies between stories."""

    optimizer: str
    base: str
    base_later: str  # the policy after the first resume
    keep: int
    extract: float | None = None
    first_steps: int = FIRST_STEPS
    last_step: int = LAST_STEP

    def build(self, *, seed: int = 3) -> Model:
        """A new model; another seed gives one that only a restore makes right."""
        torch.manual_seed(seed)
        model = TinyModel(rows=ROWS)
        return model, make_optimizers(model, self.optimizer)

    def checkpointer(
        self, storage: Storage, model: Model, *, is_later: bool = False, **settings: Any
    ) -> hf.Checkpointer:
        """A checkpointer with the story's settings."""
        base = self.base_later if is_later else self.base
        rules = None if self.extract is None else hf.Extract(threshold=self.extract)
        strategy = hf.Strategy("mine", base=base, codec="fp32", extract=rules)
        given = {"strategy": strategy, "keep": self.keep, "threads": 1, **settings}
        return hf.Checkpointer(storage, model=model[0], optimizer=model[1], **given)

    def save(self, ck: hf.Checkpointer) -> int:
        """Save, and wait for the round that follows; the step that is durable.

        Whether a base is due by measured times is fixed, so that every telling makes the same
        calls: the last step is one, as if the last restore had been slow.
        """
        if self.base == "recovery-time":
            measured = RestoreTiming(1, 1e-9, 1, 1e9 if ck.current_step == self.last_step else 0.0)
            ck._writer.note(lambda now: dataclasses.replace(now, restore_timings=(measured,)))
        step = ck.save().result().step
        ck.wait()
        return step


@functools.cache
def oracle(plot: Plot) -> dict[int, State]:
    """The whole state after every step, without checkpoints."""
    with torch.random.fork_rng():
        model, optimizers = plot.build()
        torch.manual_seed(99)
        states: dict[int, State] = {0: fingerprint(model, optimizers)}

        def note() -> None:
            states[len(states)] = fingerprint(model, optimizers)

        train_steps(model, optimizers, range(2 * plot.last_step), rows=ROWS, after=note)
    return states


def train(model: Model, steps: range, after: Callable[[], object]) -> None:
    """Train so many steps."""
    train_steps(*model, steps, rows=ROWS, after=after)


class Recorder:
    """A storage that remembers which catalogs really reached it, whoever was told so."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self.committed: list[tuple[int, ...]] = []

    @property
    def last_step(self) -> int | None:
        """The newest step of the last catalog committed."""
        return self.committed[-1][-1] if self.committed else None

    @property
    def url(self) -> str:
        return self._inner.url

    def create(self, name: str) -> ObjectWriter:
        return self._inner.create(name)

    def put_if_absent(self, name: str, data: bytes) -> None:
        self._inner.put_if_absent(name, data)
        body = json.loads(data.split(b"\n")[1])
        self.committed.append(tuple(entry[0] for entry in body["checkpoints"]))

    def get(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        return self._inner.get(name, offset=offset, length=length)

    def get_into(self, name: str, buffer: Any, *, offset: int = 0) -> None:
        self._inner.get_into(name, buffer, offset=offset)

    def size(self, name: str) -> int:
        return self._inner.size(name)

    def list(self, prefix: str) -> StoredObjects:
        return self._inner.list(prefix)

    def delete(self, name: str) -> None:
        self._inner.delete(name)

    def clean(self) -> None:
        self._inner.clean()


def assert_every_kept_step_is_exact(storage: Storage, plot: Plot) -> tuple[int, ...]:
    """Read every checkpoint without a model and compare it with the oracle; the steps."""
    run = hf.open(storage)
    for step in run.steps:
        expected = oracle(plot)[step]
        for table in TABLES:
            rows = run.read(step, table)
            assert rows.weight.tobytes() == expected[f"model.{table}"], (step, table)
        dense = run.dense(step)["model"]
        for name, value in dense.items():
            assert value.numpy().tobytes() == expected[f"model.{name}"], (step, name)
    return run.steps


def assert_nothing_unreferenced(storage: Storage) -> None:
    """Every object there is, is one that the catalog names; at most two catalogs stay."""
    named = {name for name, _ in hf.open(storage).catalog.objects}
    found = {item.name for item in storage.list("objects/")}
    assert found == named
    assert len(storage.list("catalog/")) <= 2


def assert_recovers(storage: Storage, plot: Plot, expected_step: int | None) -> None:
    """What a process started after the accident must see: the last commit, exactly; and go on."""
    if expected_step is not None:
        assert assert_every_kept_step_is_exact(storage, plot)[-1] == expected_step
    model = plot.build(seed=3 if expected_step is None else 1234)
    torch.manual_seed(99)
    with plot.checkpointer(storage, model) as ck:
        start = ck.resume()
        assert start == (expected_step or 0)
        assert fingerprint(*model) == oracle(plot)[start]

        train(model, range(start, start + 1), ck.step)
        plot.save(ck)
        assert_nothing_unreferenced(storage)
        assert fingerprint(*model) == oracle(plot)[start + 1]
        if plot.extract is not None:
            assert plan_round(hf.open(storage).catalog) is None
    assert hf.verify(storage).is_sound
    assert assert_every_kept_step_is_exact(storage, plot)[-1] == start + 1
