"""Checkpoints as programs really save them are imported, and resumed bit for bit."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import holdfast as hf
from holdfast.boundary.budget import Budget
from holdfast.interchange.archive.files import find_file, whole
from holdfast.interchange.archive.structure import read_structure
from holdfast.interchange.handout import _placeholder
from tests.conftest import TinyModel, fingerprint, train_steps

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"
)
TABLES = ["users.weight", "items.weight"]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "nadam": lambda p: torch.optim.NAdam(p),
}


def trained(kind: str, dtype: torch.dtype = torch.float32) -> tuple[TinyModel, Any]:
    torch.manual_seed(1)
    model = TinyModel(sparse=False).to(dtype)
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    if dtype == torch.float32:
        train_steps(model, [optimizer], range(3))
    return model, optimizer


def resumed(url: Path, kind: str, dtype: torch.dtype = torch.float32) -> dict[str, bytes]:
    torch.manual_seed(9)
    model = TinyModel(sparse=False).to(dtype)
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    with hf.Checkpointer(url, model=model, optimizer=optimizer, codec="fp32") as ck:
        ck.resume()
    return fingerprint(model, [optimizer])


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_resumes_from_its_file(kind: str, protocol: int, tmp_path: Path) -> None:
    model, optimizer = trained(kind)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    torch.save(state, tmp_path / "a.pt", pickle_protocol=protocol)
    again = TinyModel(sparse=False)
    hf.import_checkpoint(
        tmp_path / "a.pt", tmp_path / "run", model=again,
        optimizer=OPTIMIZERS[kind](list(again.parameters())),
    )  # fmt: skip
    assert resumed(tmp_path / "run", kind) == fingerprint(model, [optimizer])
    assert hf.verify(tmp_path / "run").is_sound


@pytest.mark.parametrize("kind", ["adagrad", "adam", "sgd"])
def test_every_optimizer_resumes_from_its_folder(kind: str, tmp_path: Path) -> None:
    model, optimizer = trained(kind)
    weights, state = get_state_dict(model, optimizer)
    dcp.save(
        {"model": weights, "optimizer": state, "step": 3},
        checkpoint_id=tmp_path / "d",
        no_dist=True,
    )
    again = TinyModel(sparse=False)
    hf.import_checkpoint(
        tmp_path / "d", tmp_path / "run", model=again,
        optimizer=OPTIMIZERS[kind](list(again.parameters())),
    )  # fmt: skip
    assert resumed(tmp_path / "run", kind) == fingerprint(model, [optimizer])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_models_of_other_types_are_imported(dtype: torch.dtype, tmp_path: Path) -> None:
    model, optimizer = trained("adagrad", dtype)
    torch.save(
        {"model": dict(model.named_parameters()) | dict(model.named_buffers()),
         "optimizer": optimizer.state_dict()}, tmp_path / "a.pt"
    )  # fmt: skip
    again = TinyModel(sparse=False).to(dtype)
    hf.import_checkpoint(
        tmp_path / "a.pt", tmp_path / "run", model=again,
        optimizer=OPTIMIZERS["adagrad"](list(again.parameters())),
    )  # fmt: skip
    assert resumed(tmp_path / "run", "adagrad", dtype) == fingerprint(model, [optimizer])


class Sparse(nn.Module):
    """A table that SparseAdam trains."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(50, 4, sparse=True)


def test_sparse_adam_is_imported(tmp_path: Path) -> None:
    model = Sparse()
    optimizer = torch.optim.SparseAdam(list(model.parameters()))
    model.e(torch.tensor([1, 7])).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a")
    hf.import_checkpoint(tmp_path / "a", tmp_path / "run", tables=["e.weight"])
    rows = hf.open(tmp_path / "run").read(0, "e.weight")
    state = optimizer.state[model.e.weight]
    for key in ("exp_avg", "exp_avg_sq"):
        assert rows.state[key].tolist() == state[key].tolist()


def test_tables_that_are_views_are_imported_as_they_are(tmp_path: Path) -> None:
    """Transposed, sliced by rows and columns, expanded within the limits."""
    torch.manual_seed(2)
    base = torch.randn(400, 60)
    views = {"a": base.t(), "b": base[100:300], "c": base[:, 3:17], "d": base[::3, ::7],
             "e": base[:1].expand(90, 60), "f": base.reshape(40, 10, 60)[:, 2]}  # fmt: skip
    torch.save(views, tmp_path / "a.pt")
    hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "run", tables=["*"])
    run = hf.open(tmp_path / "run")
    for name, view in views.items():
        assert torch.equal(torch.from_numpy(run.read(0, name).weight), view), name


def test_tuples_of_settings_stay_tuples(tmp_path: Path) -> None:
    model, optimizer = trained("adam")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a")
    hf.import_checkpoint(
        tmp_path / "a", tmp_path / "run", tables=TABLES,
        parameters=[name for name, _ in model.named_parameters()],
    )  # fmt: skip
    (group,) = hf.open(tmp_path / "run").dense(0)["optimizers"]["0"]["param_groups"]
    assert group["betas"] == (0.9, 0.999)


def test_numpy_numbers_in_an_optimizers_settings_are_kept(tmp_path: Path) -> None:
    group = {"params": [0], "lr": np.float64(0.25), "table": np.arange(3, dtype=np.float32)}
    optimizer = {"state": {}, "param_groups": [group]}
    state = {"model": {"e.weight": torch.ones(5, 2)}, "optimizer": optimizer}
    torch.save({**state, "rng": np.arange(624, dtype=np.uint32)}, tmp_path / "a")
    hf.import_checkpoint(tmp_path / "a", tmp_path / "run", tables=["e.weight"])
    (found,) = hf.open(tmp_path / "run").dense(0)["optimizers"]["0"]["param_groups"]
    assert found["lr"] == 0.25 and type(found["lr"]) is np.float64
    assert found["table"].tolist() == [0, 1, 2]


def test_lightnings_checkpoints_with_hyperparameters_are_imported(tmp_path: Path) -> None:
    """As Lightning has saved them over the years: attributes, namespaces, callbacks, loops."""
    from lightning.fabric.utilities.data import AttributeDict

    state = {
        "epoch": 1, "global_step": 7, "pytorch-lightning_version": "2.6.0",
        "state_dict": {"e.weight": torch.ones(5, 2), "top": torch.ones(3)},
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {
            "best_k_models": {"/a/b.ckpt": torch.tensor(0.5)}, "kth_value": torch.tensor(1.0),
            "dirpath": Path("/a"), "seen": {1, 2}}},
        "optimizer_states": [], "lr_schedulers": [{"milestones": {3: 1}, "_last_lr": [0.1]}],
        "hparams_name": "kwargs", "hparams_type": AttributeDict,
        "hyper_parameters": AttributeDict(lr=0.1, layers=[1, 2]),
        "datamodule_hyper_parameters": argparse.Namespace(path="/x", sizes=(1, 2)),
    }  # fmt: skip
    torch.save(state, tmp_path / "a.ckpt")
    done = hf.import_checkpoint(tmp_path / "a.ckpt", tmp_path / "run", tables=["e.weight"])
    assert (done.step, done.tables, done.tensors) == (7, 1, 1)


def test_file_of_more_than_four_gigabytes_is_read_where_torch_reads_it(tmp_path: Path) -> None:
    """64-bit sizes in the zip, as torch writes them. The file has holes, and takes little room."""
    path = tmp_path / "a.pt"
    large = _placeholder(((1 << 30) + 1024,), torch.float32)
    with torch.serialization.skip_data():
        torch.save({"large": large, "small": torch.zeros(3, 3)}, path)
    file = find_file(path)
    assert file.bytes > 1 << 32
    found = read_structure(whole(file), Budget(file.bytes).open_account())
    for name, number in (("small", 7.0), ("large", 5.0)):
        found[name].pieces[0].ref.map().view(np.float32)[-3:] = number
    again = torch.load(path, mmap=True, weights_only=True)
    assert again["small"].reshape(-1)[-3:].tolist() == [7.0] * 3
    assert again["large"][-3:].tolist() == [5.0] * 3
    last = np.zeros((3, 1), np.float32)
    found["large"].rows_into(len(large) - 3, len(large), last)
    assert last.tolist() == [[5.0]] * 3
