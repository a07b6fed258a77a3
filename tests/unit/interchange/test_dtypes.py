"""Tables of every number type leave as files of other programs, and come back, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import holdfast as hf
from holdfast.interchange.dcpfolder import write_dcp
from holdfast.interchange.handout import hand_out
from holdfast.interchange.torchfile import write_torch
from holdfast.interchange.weightsfile import Wanted, export
from tests.unit.checkpoint.typed import DENSE, Net, batches, bits, copy_of, train

WRITERS = {"torch": write_torch, "dcp": write_dcp}
PAIRS = [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float64)]
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"
)


def trained(url: Path, pair: tuple[torch.dtype, torch.dtype], optimizer: str) -> tuple[Net, Any]:
    """A model that was trained with checkpoints, deltas among them."""
    torch.manual_seed(3)
    model = Net(*pair)
    made = DENSE[optimizer](model)
    with hf.Checkpointer(
        url, model=model, optimizer=made, strategy="incrcp", codec="fp32", every=1
    ) as ck:
        for batch in batches(3):
            train(model, [made], batch)
            ck.step()
            ck.wait()
    return model, made


@pytest.mark.parametrize("format_", WRITERS)
@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "mixed"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_exported_and_imported_run_is_the_same(
    tmp_path: Path, pair: tuple[torch.dtype, torch.dtype], optimizer: str, format_: str
) -> None:
    model, made = trained(tmp_path / "run", pair, optimizer)
    handout = hand_out(hf.open(tmp_path / "run"), 3, weights_only=False)
    WRITERS[format_](handout, tmp_path / "out", on_table=lambda done, total: None)
    if format_ == "torch":
        state = torch.load(tmp_path / "out", weights_only=True)["model"]
    else:
        state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
        dcp.load({"model": state}, checkpoint_id=tmp_path / "out", no_dist=True)
    assert bits([state[name] for name in model.state_dict()]) == bits(copy_of(model, []))
    again = Net(*pair)
    other = DENSE[optimizer](again)
    done = hf.import_checkpoint(tmp_path / "out", tmp_path / "new", model=again, optimizer=other)
    assert (done.tables, done.rows) == (2, 4500)
    new, old = hf.open(tmp_path / "new"), hf.open(tmp_path / "run")
    assert {t.name: t.columns for t in new.tables(3)} == {t.name: t.columns for t in old.tables(3)}
    with hf.Checkpointer(
        tmp_path / "new", model=again, optimizer=other, strategy="incrcp", codec="fp32", every=1
    ) as ck:
        assert ck.resume() == 3
        assert bits(copy_of(again, [other])) == bits(copy_of(model, [made]))
    assert hf.verify(tmp_path / "new").is_sound


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_imported_by_name_a_table_keeps_its_type(
    tmp_path: Path, pair: tuple[torch.dtype, torch.dtype]
) -> None:
    model = Net(*pair)
    torch.save(model.state_dict(), tmp_path / "a.pt")
    hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "run", tables=["users.*", "items.*"])
    again = Net(*pair)
    with hf.Checkpointer(tmp_path / "run", model=again) as ck:
        ck.resume()
    assert bits(copy_of(again, [])) == bits(copy_of(model, []))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("rows", [None, ((2, 5), (None, 1), (900, 1100))])
def test_safetensors_have_the_right_types(
    tmp_path: Path, pair: tuple[torch.dtype, torch.dtype], rows: Any
) -> None:
    model, made = trained(tmp_path / "run", pair, "mixed")
    run = hf.open(tmp_path / "run")
    out = tmp_path / "out.safetensors"
    tables = None if rows is None else ("users.weight", "items.weight")
    export(run, 3, out, Wanted(tables=tables, rows=rows, has_state=True))
    found = load_file(out)
    chosen = slice(None) if rows is None else np.r_[2:5, 0:1, 900:1100]
    for name, parameter in model.named_parameters():
        if name not in found:
            assert rows is not None
            continue
        wanted = [parameter.detach()]
        names = [name]
        if "top" not in name:
            state = made.state[parameter]
            names += [f"optimizer.{name}.{key}" for key in ("sum", "uses")]
            wanted += [state["sum"], state["uses"].reshape(-1, 1)]
            wanted = [each[chosen] for each in wanted]
        assert bits([found[each] for each in names]) == bits(wanted)
