"""``holdfast restore --format`` and ``holdfast import``: what they write, say and refuse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast as hf


@pytest.mark.parametrize("format_", ["torch", "dcp"])
def test_step_goes_out_and_comes_back_by_commands(
    call, trained: Path, tmp_path: Path, format_: str
) -> None:
    out, url = tmp_path / "out", tmp_path / "run"
    code, facts, _ = call("restore", trained, "--format", format_, "--out", out, "--step", 20)
    assert (code, facts["format"], facts["step"], facts["optimizers"]) == (0, format_, 20, 2)
    size = out.stat().st_size if out.is_file() else sum(p.stat().st_size for p in out.iterdir())
    assert facts["bytes"] == size
    code, facts, _ = call("import", out, url, "--table", "tables.*.weight")
    assert (code, facts["step"], facts["format"], facts["is_source_trusted"]) == (
        0, 20, format_, True
    )  # fmt: skip
    before, after = hf.open(trained), hf.open(url)
    assert [(t.name, t.rows, t.columns) for t in after.tables(20)] == [
        (t.name, t.rows, t.columns) for t in before.tables(20)
    ]
    for schema in before.tables(20):
        old, new = before.read(20, schema.name), after.read(20, schema.name)
        assert np.array_equal(old.weight, new.weight)
        assert np.array_equal(old.state["sum"], new.state["sum"])
    assert hf.verify(url).is_sound


def test_weights_alone_have_no_optimizer(call, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "w.pt"
    code, facts, _ = call("restore", trained, "--format", "torch", "--weights-only", "--out", out)
    assert (code, facts["optimizers"]) == (0, 0)
    assert set(torch.load(out, weights_only=True)) == {"model", "step"}


@pytest.mark.parametrize("options", [["--format", "torch", "--table", "tables.0.weight"],
                                     ["--format", "dcp", "--with-state"],
                                     ["--weights-only"]])  # fmt: skip
def test_options_of_another_format_are_refused(
    call, trained: Path, tmp_path: Path, options: list[str]
) -> None:
    code, facts, _ = call("restore", trained, "--out", tmp_path / "out", *options)
    assert (code, facts["error"]["type"]) == (1, "InvalidRequestError")
    assert not (tmp_path / "out").exists()


def test_folder_that_exists_is_replaced_only_by_force(call, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    code, _, _ = call("restore", trained, "--format", "dcp", "--out", out)
    assert (code, (out / "mine").exists()) == (1, True)
    code, _, _ = call("restore", trained, "--format", "dcp", "--out", out, "--force")
    assert (code, (out / "mine").exists(), (out / ".metadata").exists()) == (0, False, True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_import_says_what_is_missing(call, tmp_path: Path) -> None:
    torch.save({"e.weight": torch.ones(4, 2)}, tmp_path / "a.pt")
    code, facts, err = call("import", tmp_path / "a.pt", tmp_path / "run")
    assert (code, facts["error"]["type"]) == (1, "InvalidRequestError")
    assert "e.weight" in err and "--table" in err
    code, facts, _ = call("import", tmp_path / "no.pt", tmp_path / "run", "--table", "*")
    assert (code, facts["error"]["type"]) == (1, "NotFoundError")
    assert not (tmp_path / "run").exists()
