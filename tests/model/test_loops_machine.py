"""Random training loops against a plain copy: whatever writes to a table, no save misses a row.

Train by every kind of use, edit, load, replace, grow, change settings, hooks and optimizers, fail
in mid-step and in mid-save, resume; every committed step reads exactly as it was when it was saved.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import nn

import holdfast as hf
from holdfast.storage import open_storage
from tests.loops.customizing import Lazy, Mine, Moments, OnceOften, Wanderer
from tests.loops.oracle import Columns, copy_tables, stale_rows, stored_tables
from tests.model.test_machine import Shaky

ROWS, WIDTH = 700, 2  # so many that a few edits do not make every save a base
IDS = st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=4)
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "mine": lambda p: Mine(p, lr=0.1),
    "shrinks": lambda p: OnceOften(p, lr=0.1),
    "lazy": Lazy,
    "moments": Moments,
}


class Half(RuntimeError):
    """A step failed half way."""


class LoopMachine(RuleBasedStateMachine):
    """The machine; ``live`` is the oracle: what each committed step was."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.storage = Shaky(open_storage(self.folder))
        self.live: dict[int, dict[str, Columns]] = {}
        self.best: list[dict[str, Any]] = []
        self.shape = (0, 0)

    @initialize(
        kind=st.sampled_from(sorted(OPTIMIZERS)),
        strategy=st.sampled_from(["check-n-run", "incrcp"]),
        tracking=st.sampled_from(["auto", "auto", "hash"]),
        seed=st.integers(0, 99),
    )
    def begin(self, kind: str, strategy: str, tracking: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.kind, self.strategy, self.tracking = kind, strategy, tracking
        self.model = nn.ModuleDict({"item": nn.Embedding(ROWS, WIDTH)})
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.other: torch.optim.Optimizer | None = None
        self.hooks: list[Any] = []
        self.open()
        self.save()

    def open(self) -> None:
        self.ck = hf.Checkpointer(
            self.storage,
            model=self.model,
            optimizer=self.optimizer,
            strategy=self.strategy,
            tracking=self.tracking,
            codec="fp32",
        )

    @property
    def weight(self) -> nn.Parameter:
        weight: nn.Parameter = self.model["item"].weight
        return weight

    def loss(self, ids: list[int], how: str) -> torch.Tensor:
        if how == "product":
            return (self.weight @ torch.ones(WIDTH)).square().mean()
        rows = (
            self.weight[torch.tensor(ids)]
            if how == "index"
            else self.model["item"](torch.tensor(ids))
        )
        return (rows * torch.arange(1.0, 1 + WIDTH)).square().sum()

    @rule(ids=IDS, how=st.sampled_from(["module", "index", "index", "product"]))
    def train(self, ids: list[int], how: str) -> None:
        self.optimizer.zero_grad()
        self.loss(ids, how).backward()
        self.optimizer.step()

    @rule(ids=IDS, others=IDS, how=st.sampled_from(["module", "index"]))
    def train_and_save(self, ids: list[int], others: list[int], how: str) -> None:
        """What programs do most of the time; here hooks and decay end, which hide the rest."""
        while self.hooks:
            self.unhook()
        self.set_a_setting(on=False, name="weight_decay")
        self.set_a_setting(on=True, name="lr")
        self.save()
        for wanted in (ids, others):
            self.train(wanted, how)
            self.save()

    @rule(ids=IDS)
    def train_in_a_closure_that_edits(self, ids: list[int]) -> None:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(ids, "module")
            loss.backward()
            with torch.no_grad():
                self.weight[-1] += 1
            return loss

        self.optimizer.step(closure)

    @rule(ids=IDS, kind=st.sampled_from(["adam", "sgd", "wanders"]))
    def train_with_another_optimizer(self, ids: list[int], kind: str) -> None:
        if self.other is None or self.other.param_groups[0]["params"][0] is not self.weight:
            make = {**OPTIMIZERS, "wanders": lambda p: Wanderer(p, lr=0.1)}[kind]
            self.other = make([self.weight])
        self.other.zero_grad()
        self.loss(ids, "module").backward()
        self.other.step()

    @rule(ids=IDS, how=st.sampled_from(["set", "view", "lerp", "fill", "swap", "state"]))
    def edit(self, ids: list[int], how: str) -> None:
        with torch.no_grad():
            match how:
                case "set":
                    self.weight[torch.tensor(ids)] = 0.5
                case "view":
                    self.weight.detach()[ids[0]].add_(1)
                case "lerp":
                    self.weight[ids[0] : ids[0] + 9].lerp_(torch.ones(()), 0.25)
                case "fill":
                    self.weight.fill_(0.25)
                case "swap":
                    for _ in ids:
                        self.weight.data = self.weight.data * 0.5
                case "state":
                    for value in self.optimizer.state.get(self.weight, {}).values():
                        if torch.is_tensor(value) and value.ndim:
                            value[ids[0]] = 0.125

    @rule(ids=IDS, how=st.sampled_from(["set", "view", "swap", "state"]))
    def edit_between_trained_saves(self, ids: list[int], how: str) -> None:
        self.train_and_save(ids, ids, "module")
        self.edit(ids, how)
        self.train(ids[:1], "module")
        self.save()

    @rule(on=st.booleans(), name=st.sampled_from(["weight_decay", "lr", "momentum"]))
    def set_a_setting(self, on: bool, name: str) -> None:
        for group in self.optimizer.param_groups:
            if name in group and not (name == "momentum" and self.kind == "shrinks"):
                group[name] = 0.1 if on else 0.0

    @rule(write=st.booleans())
    def hook(self, write: bool) -> None:
        def act(*args: Any) -> None:
            with torch.no_grad():
                if write:
                    self.weight[3] += 1
                else:
                    self.optimizer.zero_grad(set_to_none=False)

        self.hooks.append(self.optimizer.register_step_post_hook(act))

    @precondition(lambda self: self.hooks)
    @rule()
    def unhook(self) -> None:
        self.hooks.pop().remove()

    @rule(row=st.integers(0, ROWS - 1))
    def a_step_raises_half_way(self, row: int) -> None:
        def fail(*args: Any) -> None:
            self.weight.data[row] = 7.0
            raise Half

        handle = self.optimizer.register_step_pre_hook(fail)
        with pytest.raises(Half):
            self.optimizer.step()
        handle.remove()

    @rule()
    def keep_the_best(self) -> None:
        self.best = copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()])

    @precondition(lambda self: self.best)
    @rule(part=st.sampled_from([(0,), (1,), (0, 1)]))
    def load_the_best(self, part: tuple[int, ...]) -> None:
        if self.best[0]["item.weight"].shape != self.weight.shape:
            return
        if 0 in part:
            self.model.load_state_dict(self.best[0])
        if 1 in part:
            self.optimizer.load_state_dict(self.best[1])

    @rule(more=st.sampled_from([0, 0, 1, 30]))
    def replace_the_module(self, more: int) -> None:
        old = self.weight
        self.model["item"] = nn.Embedding(min(len(old) + more, 2 * ROWS), WIDTH)
        self.optimizer.state.pop(old, None)
        self.optimizer.param_groups[0]["params"] = [self.weight]

    @rule()
    def save(self) -> None:
        self.ck.step()
        self.ck.save().result()
        self.committed()

    def committed(self) -> None:
        step = max(hf.open(self.folder).steps)
        self.live[step] = copy_tables(self.model, [self.optimizer])
        self.shape = tuple(self.weight.shape)  # type: ignore[assignment]
        self.check(step)

    @rule(at=st.sampled_from(["create", "commit"]))
    def a_save_fails(self, at: str) -> None:
        self.storage.fails_at = at
        self.ck.step()
        with pytest.raises(hf.UnavailableError):
            self.ck.save().result()
        assert self.storage.fails_at is None

    @precondition(lambda self: self.shape == tuple(self.weight.shape))
    @rule()
    def resume(self) -> None:
        self.ck.close()
        self.open()
        step = self.ck.resume()
        assert step == max(self.live)
        live = copy_tables(self.model, [self.optimizer])
        for name, columns in self.live[step].items():
            assert not len(stale_rows(live[name], columns))

    def check(self, step: int) -> None:
        stored = stored_tables(hf.open(self.folder), step)
        for name, columns in self.live[step].items():
            stale = stale_rows(stored[name], columns)
            assert not len(stale), f"step {step}, {name}: rows {stale[:9]} are stale"

    def teardown(self) -> None:
        if hasattr(self, "ck"):
            self.ck.close()
            for step in self.live:
                self.check(step)
        shutil.rmtree(self.folder)


TestLoops = LoopMachine.TestCase
TestLoops.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
