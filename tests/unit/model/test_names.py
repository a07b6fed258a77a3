"""Compiled and plain models have the same names everywhere, and load each other's checkpoints."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf
from holdfast.errors import InvalidRequestError
from holdfast.model.model_state import ModelState
from holdfast.model.names import plain_dense
from tests.conftest import TinyModel, fingerprint, make_optimizers, train_steps

EXACT = {"codec": "fp32", "ranks": False}
# torch.compile looks at gradients of its inputs, and uses what torch has deprecated
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
]
INDUCTOR = pytest.param(
    "inductor", "check-n-run", False,
    marks=pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No test sees what another one compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A group of one process, which DDP needs."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def parts(model: nn.Module) -> nn.Module:
    model.top = compiled(model.top)
    model.users = compiled(model.users)
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "whole": compiled,
    "in place": in_place,
    "parts": parts,
    "parts and whole": lambda model: compiled(parts(model)),
    "compiled in DDP": lambda model: DistributedDataParallel(compiled(model)),
    "DDP in compiled": lambda model: compiled(DistributedDataParallel(model)),
}


def build(seed: int) -> tuple[TinyModel, list[torch.optim.Optimizer]]:
    torch.manual_seed(seed)
    model = TinyModel(sparse=False)
    return model, make_optimizers(model, "adagrad")


def train_saved(
    url: Path, call: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range
) -> None:
    """Train from wherever the run stands, a save at every step."""
    with hf.Checkpointer(url, model=call, optimizer=optimizers, every=1, **EXACT) as ck:
        assert ck.resume() == steps.start
        train_steps(call, optimizers, steps, after=ck.step)  # type: ignore[arg-type]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_compiled_and_plain_take_turns_and_end_as_if_undisturbed(
    wrapper: str, tmp_path: Path
) -> None:
    turns = [range(3), range(3, 6), range(6, 9), range(9, 12)]
    undisturbed = build(1)
    train_saved(tmp_path / "plain", undisturbed[0], undisturbed[1], range(12))
    for number, steps in enumerate(turns):
        torch.manual_seed(1 if number == 0 else 100 + number)
        model, optimizers = build(1 if number == 0 else 100 + number)
        inner = model.users, model.top  # the plain parts, wherever they are wrapped
        call = WRAPPERS[wrapper](model) if number % 2 == 0 else model
        train_saved(tmp_path / "run", call, optimizers, steps)
        model.users, model.top = inner
    assert fingerprint(model, optimizers) == fingerprint(*undisturbed)
    for path in ("plain", "run"):
        assert hf.verify(tmp_path / path).is_sound
    ours, others = hf.open(tmp_path / "run"), hf.open(tmp_path / "plain")
    for step in ours.steps:
        assert ours.info(step).kind == others.info(step).kind  # nothing is saved again for a name
        for table in ("users.weight", "items.weight"):
            assert np.array_equal(ours.read(step, table).weight, others.read(step, table).weight)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_name_is_that_of_the_plain_model(wrapper: str) -> None:
    plain_model, plain_optimizers = build(1)
    model, optimizers = build(1)
    plain = ModelState(plain_model, plain_optimizers)
    state = ModelState(WRAPPERS[wrapper](model), optimizers)
    for part in ("row_state_shapes", "table_state", "aliases", "parameters"):
        assert str(state.tables_dense()[part]) == str(plain.tables_dense()[part])
    assert list(state.dense()["model"]) == list(plain.dense()["model"])
    assert [t.name for t in state.tables] == [t.name for t in plain.tables]
    for name, packed in plain.dense()["optimizers"].items():
        assert list(state.dense()["optimizers"][name]["named"]) == list(packed["named"])
        assert state.dense()["optimizers"][name]["param_groups"] == packed["param_groups"]


def test_shared_tables_and_shards_go_by_plain_names() -> None:
    model, _ = build(1)
    model.add_module("again", compiled(model.items))
    state = ModelState(compiled(model))
    assert state.aliases() == {"again.weight": "items.weight"}
    shards = {"_orig_mod.items.weight": hf.Shard(400, 5, range(101))}
    (held,) = (t for t in ModelState(compiled(model), shards=shards).tables if t.shard.rows == 400)
    assert held.whole_name == "items.weight"


def test_rows_are_named_by_hand_under_either_name(tmp_path: Path) -> None:
    model, optimizers = build(1)
    call = compiled(model)
    with hf.Checkpointer(tmp_path, model=call, optimizer=optimizers, **EXACT) as ck:
        ck.save().result(timeout=60)
        ck.mark("_orig_mod.users.weight", [3])
        ck.mark("users.weight", [5])
        train_steps(call, optimizers, range(1))  # type: ignore[arg-type]
        ck.step()
        ck.save().result(timeout=60)
    changed = {i for t, ids, _ in hf.open(tmp_path).updates(since=0) if t == "users.weight"
               for i in ids.tolist()}  # fmt: skip
    assert {3, 5} <= changed


def test_two_tensors_of_one_plain_name_are_refused_at_the_start() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.top = nn.Linear(2, 2)
            self._orig_mod = nn.ModuleDict({"top": nn.Linear(2, 2)})

    with pytest.raises(InvalidRequestError, match="two tensors have one name"):
        ModelState(Odd())


class Renormed(nn.Module):
    """A table whose lookups rewrite rows, beside one whose do not."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.EmbeddingBag(4000, 8, mode="sum", max_norm=0.5)
        self.items = nn.Embedding(4000, 8)
        self.top = nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.top(self.users(ids) + self.items(ids[:, 0])).squeeze(1)
        return scores


@pytest.mark.parametrize(
    ("backend", "strategy", "is_compiled_first"),
    [
        *itertools.product(("eager", "aot_eager"), ("check-n-run", "incrcp"), (False, True)),
        INDUCTOR,  # once: it takes seconds
    ],
)
def test_no_row_is_missed_in_a_compiled_model(
    backend: str, strategy: str, is_compiled_first: bool, tmp_path: Path
) -> None:
    """Also without graph breaks, and whether it was compiled before it is watched or after."""
    torch.manual_seed(4)
    model = Renormed()
    call = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.Adagrad(call.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(5)

    def train() -> None:
        optimizer.zero_grad()
        ids = torch.randint(0, 4000, (12, 2), generator=draw)
        call(ids).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            call(torch.randint(0, 4000, (12, 2), generator=draw))  # renormed, without a gradient

    if is_compiled_first:
        train()
    copies = {}
    with hf.Checkpointer(
        tmp_path, model=call, optimizer=optimizer, strategy=strategy, **EXACT
    ) as ck:
        for _ in range(5):
            train()
            ck.step()
            ck.save().result(timeout=60)
            copies[ck.current_step] = {k: v.numpy().copy() for k, v in model.state_dict().items()}
    run = hf.open(tmp_path)
    kinds = {run.info(step).kind for step in run.steps}
    assert kinds == {"base", "delta"}
    for step, copy in copies.items():
        for table in ("users.weight", "items.weight"):
            assert np.array_equal(run.read(step, table).weight, copy[table]), (step, table)


def test_dense_state_of_another_structure_is_left_alone() -> None:
    for odd in (None, [1], {"model": 3, "optimizers": {"0": 7}, "parameters": {"0": 8}}):
        assert plain_dense(odd) == odd
    both = {"model": {"_orig_mod.a": 1, "a": 2}}
    assert plain_dense(both) == both  # neither may replace the other
