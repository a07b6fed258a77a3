"""Limits that the size of a source sets, and the one way to lift them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import holdfast as hf
from holdfast.cli.main import run as run_command
from tests.hostile.import_bombs import dcp_folder, save, store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ROWS = 300_000  # of 64 floats, of which the file has one row: 77 MB


@pytest.fixture
def source(tmp_path: Path) -> Path:
    row = torch.arange(64.0).reshape(1, 64)
    save(tmp_path / "a.pt", model={"e.weight": row.expand(ROWS, 64)}, step=3)
    return tmp_path / "a.pt"


def test_claim_beyond_the_limit_is_refused_and_says_how_to_lift_it(
    source: Path, tmp_path: Path
) -> None:
    with pytest.raises(hf.InvalidRequestError, match="--trust, or trust=True") as caught:
        hf.import_checkpoint(source, tmp_path / "run", tables=["e.weight"])
    facts = caught.value.facts
    assert facts["claim"] == "table 'e.weight'"
    assert facts["needed_bytes"] == ROWS * 64 * 4 > facts["limit_bytes"]
    assert facts["input_bytes"] == source.stat().st_size
    assert not (tmp_path / "run").exists()


def test_trust_imports_what_is_claimed(source: Path, tmp_path: Path) -> None:
    done = hf.import_checkpoint(source, tmp_path / "run", tables=["e.weight"], trust=True)
    assert done.rows == ROWS
    some = hf.open(tmp_path / "run").read(3, "e.weight", [0, ROWS - 1]).weight
    assert some.tolist() == [list(range(64))] * 2


def test_command_has_the_same_limits_and_the_same_way(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["import", str(source), str(tmp_path / "run"), "--table", "e.weight", "--json"]
    assert run_command(command) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "InvalidRequestError" and "--trust" in error["todo"]
    assert not (tmp_path / "run").exists()
    assert run_command([*command, "--trust"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == ROWS


def test_trust_lifts_no_check_but_those_of_costs(tmp_path: Path) -> None:
    metadata = dcp_folder(tmp_path / "d")
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"
    store(tmp_path / "d", metadata)
    (tmp_path / "text.pt").write_bytes(b"text")
    made: list[object] = []
    made.append(made)
    save(
        tmp_path / "circle.pt", optimizer={"state": {}, "param_groups": [{"params": [], "x": made}]}
    )
    for name in ("d", "text.pt", "circle.pt"):
        with pytest.raises(hf.HoldfastError):
            hf.import_checkpoint(tmp_path / name, tmp_path / "run", tables=["*"], trust=True)
    assert not (tmp_path / "run").exists()
