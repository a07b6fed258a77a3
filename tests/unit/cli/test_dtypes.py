"""Commands on a run whose tables are not float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import holdfast as hf
from holdfast.cli.main import run
from tests.unit.checkpoint.typed import DENSE, Net, batches, bits, copy_of, train


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Net]:
    """A run of three steps, and the model as it was in the end."""
    url = tmp_path_factory.mktemp("typed") / "run"
    model = Net(torch.bfloat16, torch.float64)
    optimizer = DENSE["mixed"](model)
    with hf.Checkpointer(
        url, model=model, optimizer=optimizer, strategy="incrcp", codec="fp32", every=1
    ) as ck:
        for batch in batches(3):
            train(model, [optimizer], batch)
            ck.step()
            ck.wait()
    return url, model


def test_inspect_shows_the_types(call, typed: tuple[Path, Net], capsys) -> None:
    url, _ = typed
    code, facts, _ = call("inspect", url)
    assert code == 0
    users, items = facts["tables"]
    assert [c["dtype"] for c in users["columns"]] == ["bfloat16", "float32", "float64"]
    assert users["model_bytes"] == 3000 * (2 * 5 + 4 * 5 + 8)
    assert items["columns"][0] == {"name": "weight", "width": 8, "dtype": "float64"}
    assert run(["inspect", str(url)]) == 0
    assert "5 bf16" in capsys.readouterr().out


def test_verify_and_diff_read_them(call, typed: tuple[Path, Net]) -> None:
    url, _ = typed
    code, facts, _ = call("verify", url)
    assert (code, facts["damages"]) == (0, [])
    code, facts, _ = call("diff", url, 1, 3)
    assert code == 0
    tables = {table["table"]: table for table in facts["tables"]}
    assert 0 < tables["users.weight"]["changed"] <= tables["users.weight"]["rewritten"] < 100
    assert tables["items.weight"]["l2_max"] > 0


@pytest.mark.parametrize("format_", ["safetensors", "torch", "dcp"])
def test_restore_writes_the_types(
    call, typed: tuple[Path, Net], tmp_path: Path, format_: str
) -> None:
    url, model = typed
    out = tmp_path / "out"
    code, _, _ = call("restore", url, "--format", format_, "--out", out, "--step", 3)
    assert code == 0
    if format_ == "safetensors":
        state = load_file(out)
        assert bits([state[name] for name in model.state_dict()]) == bits(copy_of(model, []))
        return
    code, facts, _ = call("import", out, tmp_path / "run", "--table", "users.weight",
                          "--table", "items.weight")  # fmt: skip
    assert (code, facts["tables"]) == (0, 2)
    again = Net(torch.bfloat16, torch.float64)
    optimizer = DENSE["mixed"](again)
    with hf.Checkpointer(tmp_path / "run", model=again, optimizer=optimizer) as ck:
        ck.resume()
    assert bits(copy_of(again, [])) == bits(copy_of(model, []))
