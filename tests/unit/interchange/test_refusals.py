"""What cannot be imported is refused with the reason, and nothing is left where a run would be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast as hf
from tests.conftest import TinyModel, make_optimizers, train_steps


def refuse(source: Path, url: Path, error: type[Exception], match: str, **settings: object) -> None:
    with pytest.raises(error, match=match):
        hf.import_checkpoint(source, url, **settings)
    assert not url.exists()


def test_missing_source_is_named(tmp_path: Path) -> None:
    refuse(tmp_path / "no.pt", tmp_path / "run", hf.NotFoundError, "no.pt", tables=["*"])


@pytest.mark.parametrize("content", [b"", b"text", b"\x80\x02}q\x00.", b"PK\x03\x04 cut off"])
def test_other_files_are_no_checkpoints(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    refuse(tmp_path / "x.pt", tmp_path / "run", hf.HoldfastError, "torch.save|cut off", tables=[])


def test_folder_without_metadata_is_no_dcp(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    refuse(tmp_path / "d", tmp_path / "run", hf.InvalidRequestError, "metadata", tables=[])


def test_tables_are_asked_for_with_those_that_could_be_meant(tmp_path: Path) -> None:
    torch.save(TinyModel().state_dict(), tmp_path / "a.pt")
    refuse(tmp_path / "a.pt", tmp_path / "run", hf.InvalidRequestError, "users.weight.*--table")


def test_table_of_another_type_is_refused(tmp_path: Path) -> None:
    torch.save({"e.weight": torch.zeros(5, 2, dtype=torch.int16)}, tmp_path / "a.pt")
    refuse(tmp_path / "a.pt", tmp_path / "run", hf.InvalidRequestError, "int16",
           tables=["e.weight"])  # fmt: skip
    refuse(tmp_path / "a.pt", tmp_path / "run", hf.NotFoundError, "no such", tables=["f.weight"])


def test_model_that_the_file_lacks_a_table_of_is_refused(tmp_path: Path) -> None:
    torch.save({"users.weight": torch.zeros(200, 8)}, tmp_path / "a.pt")
    refuse(tmp_path / "a.pt", tmp_path / "run", hf.NotFoundError, "items.weight", model=TinyModel())


def test_two_models_in_a_file_must_be_told_apart(tmp_path: Path) -> None:
    weights = {"e.weight": torch.zeros(5, 2)}
    torch.save({"model": weights, "state_dict": weights}, tmp_path / "a.pt")
    refuse(tmp_path / "a.pt", tmp_path / "run", hf.InvalidRequestError, "model_key", tables=["*"])
    done = hf.import_checkpoint(
        tmp_path / "a.pt", tmp_path / "run", tables=["*"], model_key="state_dict"
    )
    assert done.rows == 5


def test_names_that_clash_without_their_prefix_are_refused(tmp_path: Path) -> None:
    tensors = {"module.e.weight": torch.zeros(5, 2), "e.weight": torch.ones(5, 2)}
    torch.save(tensors, tmp_path / "a.pt")
    refuse(tmp_path / "a.pt", tmp_path / "run", hf.InvalidRequestError, "one name",
           tables=["*"], strip_prefix="module.")  # fmt: skip


def test_run_that_is_there_is_never_overwritten(tmp_path: Path) -> None:
    torch.save({"e.weight": torch.ones(5, 2)}, tmp_path / "a.pt")
    hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "run", tables=["*"])
    before = sorted(p.name for p in (tmp_path / "run").rglob("*"))
    with pytest.raises(hf.InvalidRequestError, match="already"):
        hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "run", tables=["*"])
    assert sorted(p.name for p in (tmp_path / "run").rglob("*")) == before


class Twins(nn.Module):
    """Two tables that only their order tells apart."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Embedding(20, 4, sparse=True)
        self.b = nn.Embedding(20, 4, sparse=True)


def twins_file(path: Path) -> tuple[Twins, torch.optim.Optimizer]:
    """Tables in the optimizer in another order than in the model."""
    model = Twins()
    optimizer = torch.optim.Adagrad([model.b.weight, model.a.weight], lr=0.1)
    (model.a(torch.tensor([1, 2])).sum() + 3 * model.b(torch.tensor([2, 7])).sum()).backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return model, optimizer


def test_state_that_could_be_of_two_tables_is_not_guessed(tmp_path: Path) -> None:
    model, optimizer = twins_file(tmp_path / "a.pt")
    sums = {f"{name}.weight": optimizer.state[getattr(model, name).weight]["sum"] for name in "ab"}
    assert not torch.equal(sums["a.weight"], sums["b.weight"])
    refuse(tmp_path / "a.pt", tmp_path / "run", hf.InvalidRequestError, "--param", tables=["*"])
    by_hand = {"tables": ["*"], "parameters": ["b.weight", "a.weight"]}
    by_model = {"model": model, "optimizer": optimizer}
    for index, settings in enumerate((by_hand, by_model)):
        url = tmp_path / f"run{index}"
        hf.import_checkpoint(tmp_path / "a.pt", url, **settings)
        for name, expected in sums.items():
            found = hf.open(url).read(0, name).state["sum"]
            assert torch.equal(torch.from_numpy(found), expected)


def test_optimizers_that_are_not_the_models_are_refused(tmp_path: Path) -> None:
    model = TinyModel()
    optimizers = make_optimizers(model, "adagrad")
    train_steps(model, optimizers, range(2))
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizers[0].state_dict()}, tmp_path / "a.pt"
    )
    refuse(tmp_path / "a.pt", tmp_path / "run", hf.InvalidRequestError, "other optimizers",
           model=model, optimizer=optimizers)  # fmt: skip
    refuse(tmp_path / "a.pt", tmp_path / "run", hf.InvalidRequestError, "other parameters",
           model=model, optimizer=optimizers[1])  # fmt: skip


def test_failed_store_leaves_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.checkpoint.store.writer import RunWriter

    def fail(self: RunWriter, change: object) -> None:
        raise OSError("no room")

    torch.save({"e.weight": torch.ones(5, 2)}, tmp_path / "a.pt")
    monkeypatch.setattr(RunWriter, "update", fail)
    refuse(tmp_path / "a.pt", tmp_path / "run", OSError, "no room", tables=["*"])


@pytest.mark.parametrize(
    ("fused", "said"),
    [
        ({"state": {"items.weight": {"items.momentum1": torch.ones(9)}}}, "not among those named"),
        ({"state": {"users.weight": {"users.momentum1": torch.ones(3)}}}, "not of its table's"),
        ({"state": {"users.weight": {"users.momentum1": 3}}}, "not of its table's"),
        ({"state": {"users.weight": {"a.momentum1": torch.ones(9), "a.b": 1}}}, "fused optimizer"),
        ({"state": [1]}, "not a fused optimizer"),
        (7, "not a fused optimizer"),
    ],
)
def test_fused_state_that_is_not_of_a_named_tables_rows_is_refused(
    fused: object, said: str, tmp_path: Path
) -> None:
    model = {"users.weight": torch.ones(9, 4), "items.weight": torch.ones(9, 4)}
    torch.save({"model": model, "fused_optimizer": fused}, tmp_path / "a.pt")
    with pytest.raises(hf.HoldfastError, match=said):
        hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "run", tables=["users.weight"], step=1)
    assert not (tmp_path / "run").exists()
