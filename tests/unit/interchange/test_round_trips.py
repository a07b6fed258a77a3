"""A step that leaves as a file of another program, and comes back, is the same to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import holdfast as hf
from holdfast.interchange.dcpfolder import write_dcp
from holdfast.interchange.handout import hand_out
from holdfast.interchange.torchfile import write_torch
from holdfast.model.model_state import ModelState
from tests.conftest import TinyModel, fingerprint, make_optimizers, train_steps

WRITERS: dict[str, Callable[..., int]] = {"torch": write_torch, "dcp": write_dcp}
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"
)


def nothing(done: int, total: int) -> None:
    pass


def trained(
    url: Path, kind: str, steps: int = 6, **settings: Any
) -> tuple[TinyModel, list[torch.optim.Optimizer]]:
    """A model that was trained with checkpoints, deltas among them."""
    torch.manual_seed(3)
    model = TinyModel()
    optimizers = make_optimizers(model, kind)
    with hf.Checkpointer(
        url, model=model, optimizer=optimizers, codec="fp32", every=2, **settings
    ) as ck:
        train_steps(model, optimizers, range(steps), after=ck.step)
    return model, optimizers


def fresh(kind: str) -> tuple[TinyModel, list[torch.optim.Optimizer]]:
    torch.manual_seed(99)
    model = TinyModel()
    return model, make_optimizers(model, kind)


def export(url: Path, format_: str, out: Path, *, weights_only: bool = False) -> None:
    run = hf.open(url)
    handout = hand_out(run, run.steps[-1], weights_only=weights_only)
    WRITERS[format_](handout, out, on_table=nothing)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "sparse-adam"])
def test_torch_file_loads_with_weights_only_into_model_and_optimizers(
    tmp_path: Path, kind: str
) -> None:
    model, optimizers = trained(tmp_path / "run", kind)
    export(tmp_path / "run", "torch", tmp_path / "out.pt")
    state = torch.load(tmp_path / "out.pt", weights_only=True)
    assert state["step"] == 6
    again, others = fresh(kind)
    again.load_state_dict(state["model"], strict=True)
    for name, optimizer in zip("01", others, strict=True):
        optimizer.load_state_dict(state["optimizers"][name])
    assert fingerprint(again, others) == fingerprint(model, optimizers)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "sparse-adam"])
def test_dcp_folder_loads_with_dcp_into_the_models_and_optimizers_state(
    tmp_path: Path, kind: str
) -> None:
    model, optimizers = trained(tmp_path / "run", kind)
    export(tmp_path / "run", "dcp", tmp_path / "out")
    again, others = fresh(kind)
    train_steps(again, others, range(1))  # so that there is state to load into
    weights, state = get_state_dict(again, others)
    held = {"model": weights, "optimizer": state}
    dcp.load(held, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(
        again,
        others,
        model_state_dict=held["model"],
        optim_state_dict=held["optimizer"],
        options=StateDictOptions(strict=False),  # plain SGD has no state, which DCP takes for lost
    )
    assert fingerprint(again, others) == fingerprint(model, optimizers)


@pytest.mark.parametrize("format_", ["torch", "dcp"])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "sparse-adam"])
def test_imported_run_resumes_exactly_and_trains_on_as_if_never_left(
    tmp_path: Path, kind: str, format_: str
) -> None:
    model, optimizers = trained(tmp_path / "run", kind)
    export(tmp_path / "run", format_, tmp_path / "out")
    again, others = fresh(kind)
    done = hf.import_checkpoint(tmp_path / "out", tmp_path / "new", model=again, optimizer=others)
    assert (done.step, done.tables, done.rows, done.optimizers) == (6, 2, 301, 2)
    with hf.Checkpointer(
        tmp_path / "new", model=again, optimizer=others, codec="fp32", every=2
    ) as ck:
        assert ck.resume() == 6
        assert fingerprint(again, others) == fingerprint(model, optimizers)
        for each, tools in ((model, optimizers), (again, others)):
            torch.manual_seed(11)
            after = ck.step if each is again else lambda: None
            train_steps(each, tools, range(6, 10), after=after)
        ck.wait()
        assert ck.all_steps() == (6, 8, 10)
    assert fingerprint(again, others) == fingerprint(model, optimizers)


def test_foreign_torch_file_imports_by_the_names_of_its_tables(tmp_path: Path) -> None:
    model, _ = fresh("sgd")
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    train_steps(model, [optimizer], range(3))
    torch.save(
        {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(),
         "global_step": 3, "note": "by hand"},
        tmp_path / "a.pt",
    )  # fmt: skip
    done = hf.import_checkpoint(
        tmp_path / "a.pt", tmp_path / "run", tables=["users.weight", "it*.weight"]
    )
    assert (done.step, done.tables, done.state_columns, done.optimizers) == (3, 2, 2, 1)
    again, _ = fresh("sgd")
    other = torch.optim.Adagrad(again.parameters(), lr=0.1)
    with hf.Checkpointer(tmp_path / "run", model=again, optimizer=other) as ck:
        assert ck.resume() == 3
    assert fingerprint(again, [other]) == fingerprint(model, [optimizer])
    assert hf.verify(tmp_path / "run").is_sound


def test_weights_alone_leave_a_new_optimizer_as_it_is(tmp_path: Path) -> None:
    model, _ = fresh("adagrad")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    hf.import_checkpoint(tmp_path / "weights.pt", tmp_path / "run", model=model, step=40)
    torch.manual_seed(5)
    again = TinyModel()
    others = make_optimizers(again, "adagrad")
    before = fingerprint(again, others)
    with hf.Checkpointer(tmp_path / "run", model=again, optimizer=others, every=1) as ck:
        assert ck.resume() == 40
        after = fingerprint(again, others)
        train_steps(again, others, range(2), after=ck.step)
    assert {k: v for k, v in after.items() if not k.startswith("model.")} == {
        k: v for k, v in before.items() if not k.startswith("model.")
    }
    assert after["model.users.weight"] == model.users.weight.detach().numpy().tobytes()
    assert hf.open(tmp_path / "run").steps == (40, 41, 42)


def test_dcp_folder_saved_in_pieces_imports_as_one_table(tmp_path: Path) -> None:
    """As several ranks save a sharded table: every rank its rows."""
    from tests.unit.interchange.sharded import save_sharded

    whole = torch.randn(101, 6)
    save_sharded(tmp_path / "d", {"model.users.weight": whole, "model.top.weight": torch.ones(3)})
    hf.import_checkpoint(tmp_path / "d", tmp_path / "run", tables=["users.weight"])
    run = hf.open(tmp_path / "run")
    assert torch.equal(torch.from_numpy(run.read(0, "users.weight").weight), whole)
    assert torch.equal(run.dense(0)["model"]["top.weight"], torch.ones(3))


class Tied(nn.Module):
    """Two modules share one table."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Embedding(20, 4, sparse=True)
        self.b = nn.Embedding(20, 4, sparse=True)
        self.b.weight = self.a.weight


@pytest.mark.parametrize("format_", ["torch", "dcp"])
def test_shared_table_is_exported_under_all_its_names_and_imported_once(
    tmp_path: Path, format_: str
) -> None:
    model = Tied()
    with hf.Checkpointer(tmp_path / "run", model=model, codec="fp32", strategy="full") as ck:
        ck.save()
    export(tmp_path / "run", format_, tmp_path / "out")
    if format_ == "torch":
        state = torch.load(tmp_path / "out", weights_only=True)["model"]
        Tied().load_state_dict(state, strict=True)
        assert torch.equal(state["b.weight"], model.a.weight)
    again = Tied()
    done = hf.import_checkpoint(tmp_path / "out", tmp_path / "new", model=again)
    assert (done.tables, done.tensors) == (1, 0)
    with hf.Checkpointer(tmp_path / "new", model=again, strategy="full") as ck:
        ck.resume()
    assert torch.equal(again.b.weight, model.a.weight)


@pytest.mark.parametrize("format_", ["torch", "dcp"])
def test_damaged_run_leaves_nothing_where_an_export_would_be(tmp_path: Path, format_: str) -> None:
    trained(tmp_path / "run", "adagrad")
    (tmp_path / "out").mkdir() if format_ == "dcp" else (tmp_path / "out").write_text("old")
    for path in (tmp_path / "run" / "objects").rglob("rows*.hf"):
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 1
        path.write_bytes(data)
    with pytest.raises(hf.CorruptDataError):
        export(tmp_path / "run", format_, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run"]
    assert (tmp_path / "out").is_dir() or (tmp_path / "out").read_text() == "old"


def test_run_saved_before_names_were_kept_still_resumes_and_exports_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_positions(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        packed = optimizer.state_dict()
        state = {
            index: {k: v for k, v in entries.items() if v.ndim < 2 or len(v) not in (200, 101)}
            for index, entries in packed["state"].items()
        }
        return {"state": state, "param_groups": packed["param_groups"]}

    whole, of_tables = ModelState.dense, ModelState.tables_dense

    def old(self: ModelState) -> dict[str, Any]:
        optimizers = {key: by_positions(each) for key, each in self.optimizers.items()}
        return {**whole(self), "optimizers": optimizers}

    def old_of_tables(self: ModelState) -> dict[str, Any]:
        return {"row_state_shapes": of_tables(self)["row_state_shapes"]}

    with monkeypatch.context() as before:
        before.setattr(ModelState, "dense", old)
        before.setattr(ModelState, "tables_dense", old_of_tables)
        model, optimizers = trained(tmp_path / "run", "adagrad")
    with pytest.raises(hf.InvalidRequestError, match="weights-only"):
        export(tmp_path / "run", "torch", tmp_path / "out")
    export(tmp_path / "run", "torch", tmp_path / "out", weights_only=True)
    state = torch.load(tmp_path / "out", weights_only=True)
    assert set(state) == {"model", "step"}
    model.load_state_dict(state["model"])
    again, others = fresh("adagrad")
    with hf.Checkpointer(tmp_path / "run", model=again, optimizer=others) as ck:
        assert ck.resume() == 6
    assert fingerprint(again, others) == fingerprint(model, optimizers)


def test_exported_optimizer_has_tables_in_their_places_among_all_parameters(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = TinyModel(sparse=False)
    mixed = [model.top[0].weight, model.items.weight, model.top[0].bias]
    rest = [p for p in model.parameters() if all(p is not other for other in mixed)]
    groups = [{"params": mixed, "lr": 0.1}, {"params": rest, "lr": 0.2}]
    optimizer = torch.optim.Adagrad(groups)
    with hf.Checkpointer(
        tmp_path / "run", model=model, optimizer=optimizer, codec="fp32", every=2
    ) as ck:
        train_steps(model, [optimizer], range(2), after=ck.step)
    export(tmp_path / "run", "torch", tmp_path / "out")
    state = torch.load(tmp_path / "out", weights_only=True)
    names = {id(p): name for name, p in model.named_parameters()}
    assert state["parameter_names"] == {"0": [names[id(p)] for p in (*mixed, *rest)]}
    live = optimizer.state_dict()
    assert state["optimizer"]["param_groups"] == live["param_groups"]
    assert state["optimizer"]["state"].keys() == live["state"].keys()
    for index, entries in live["state"].items():
        for key, value in entries.items():
            assert torch.equal(state["optimizer"]["state"][index][key], value), (index, key)


def test_parameters_that_a_file_has_no_names_for_are_known_by_their_places(tmp_path: Path) -> None:
    """Plain SGD has no state whose shape would tell them, and a file of torch has no names."""
    model, _ = fresh("sgd")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_steps(model, [optimizer], range(2))
    optimizer.param_groups[0]["lr"] = 0.03
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt"
    )
    hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "run", tables=["users*", "items*"])
    again, _ = fresh("sgd")
    other = torch.optim.SGD(again.parameters(), lr=0.1)
    with hf.Checkpointer(tmp_path / "run", model=again, optimizer=other, codec="fp32") as ck:
        ck.resume()
    assert fingerprint(again, [other]) == fingerprint(model, [optimizer])
    fewer = torch.optim.SGD(list(again.parameters())[:-1], lr=0.1)
    with (
        hf.Checkpointer(tmp_path / "run", model=again, optimizer=fewer) as ck,
        pytest.raises(hf.InvalidRequestError, match="does not fit"),
    ):
        ck.resume()


def test_file_of_a_compiled_model_imports_under_plain_names(tmp_path: Path) -> None:
    model, optimizers = trained(tmp_path / "run", "adagrad")
    call = torch.compile(model, backend="eager")
    assert all(name.startswith("_orig_mod.") for name in call.state_dict())
    tree = {"model": call.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
    torch.save(tree, tmp_path / "compiled.pt")
    again, others = fresh("adagrad")
    hf.import_checkpoint(
        tmp_path / "compiled.pt", tmp_path / "new", model=again, optimizer=others, step=6
    )
    with hf.Checkpointer(tmp_path / "new", model=again, optimizer=others, codec="fp32") as ck:
        assert ck.resume() == 6
    assert fingerprint(again, others) == fingerprint(model, optimizers)
