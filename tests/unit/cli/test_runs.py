"""inspect, verify and restore: what they say is what the run holds."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import holdfast as hf
from holdfast.checkpoint.restoring import fetch
from holdfast.cli.main import run
from holdfast.errors import InvalidRequestError


def test_inspect_equals_the_run(call, trained: Path) -> None:
    code, data, _ = call("inspect", trained)
    opened = hf.open(trained)
    assert code == 0
    assert [line["step"] for line in data["checkpoints"]] == list(opened.steps)
    assert data["objects_bytes"] == opened.bytes
    info = opened.info(35)
    last = data["checkpoints"][-1]
    assert (last["kind"], last["bytes"], last["codec"]) == (info.kind, info.bytes, info.codec)
    assert [t["name"] for t in data["tables"]] == [t.name for t in info.tables]
    assert data["dead_rows"] == sum(opened.dead_rows(35).values()) > 0


def test_inspect_one_step_shows_that_step_alone(call, trained: Path) -> None:
    _, data, _ = call("inspect", trained, "--step", 20)
    assert [line["step"] for line in data["checkpoints"]] == [20]
    assert data["step"] == 20


@pytest.mark.parametrize("width", [80, 120])
def test_inspect_fits_the_terminal_and_cuts_nothing(
    trained: Path,
    width: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert run(["inspect", str(trained)]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown
    assert all(name in shown for name in ("step", "kind", "tables.25.weight", "fp32"))


def test_a_wrong_step_lists_those_that_exist(call, trained: Path, tmp_path: Path) -> None:
    for command in (["inspect", trained], ["restore", trained, "--out", tmp_path / "x"]):
        code, data, _ = call(*command, "--step", 7)
        assert code == 1
        assert data["error"]["facts"]["steps"] == [10, 20, 30, 35]
    assert not list(tmp_path.iterdir())


def test_verify_of_a_sound_run(call, trained: Path) -> None:
    code, data, _ = call("verify", trained)
    assert (code, data["sound"], data["damages"]) == (0, True, [])
    assert data["sound_steps"] == [10, 20, 30, 35]


def test_verify_names_the_damaged_object_and_the_steps_it_costs(
    call, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    opened = hf.open(tmp_path / "run")
    victim = next(s for s in opened.catalog.segments if s.born == 20)
    path = tmp_path / "run" / victim.extent.object
    data = bytearray(path.read_bytes())
    data[victim.extent.offset + victim.extent.bytes // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    code, found, _ = call("verify", tmp_path / "run")
    assert (code, found["sound"]) == (1, False)
    assert [d["where"].split("[")[0] for d in found["damages"]] == [victim.extent.object]
    assert found["damages"][0]["steps"] == [20]
    assert found["sound_steps"] == [10, 30, 35]
    assert run(["verify", str(tmp_path / "run")]) == 1
    shown = "".join(capsys.readouterr().out.split())
    assert victim.extent.object in shown


def test_restored_file_equals_the_run(call, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    code, data, _ = call("restore", trained, "--step", 20, "--out", out, "--with-state")
    assert code == 0
    opened = hf.open(trained)
    tensors = load_file(out)
    dense = opened.dense(20)["model"]
    schemas = opened.tables(20)
    names = {t.name for t in schemas} | {f"optimizer.{t.name}.sum" for t in schemas} | set(dense)
    assert set(tensors) == names
    assert data["tensors"] == len(names)
    for name, tensor in dense.items():
        assert np.array_equal(tensors[name], tensor.numpy())
    for schema in schemas:
        rows = opened.read(20, schema.name)
        assert np.array_equal(tensors[schema.name], rows.weight)
        assert np.array_equal(tensors[f"optimizer.{schema.name}.sum"], rows.state["sum"])
    with safe_open(out, "numpy") as file:
        assert file.metadata()["holdfast.step"] == "20"
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_restore_some_rows_of_one_table_of_the_last_step(
    call, trained: Path, tmp_path: Path
) -> None:
    out = tmp_path / "part"
    code, _, _ = call(
        "restore", trained, "--out", out, "--table", "tables.2.weight", "--rows", "5:25"
    )
    assert code == 0
    tensors = load_file(out)
    expected = hf.open(trained).read(35, "tables.2.weight", slice(5, 25)).weight
    assert list(tensors) == ["tables.2.weight"]
    assert np.array_equal(tensors["tables.2.weight"], expected)


def test_restore_overwrites_only_when_forced(call, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    out.write_text("precious")
    code, data, _ = call("restore", trained, "--out", out)
    assert code == 1
    assert "--force" in data["error"]["todo"]
    assert out.read_text() == "precious"
    code, _, _ = call("restore", trained, "--out", out, "--force")
    assert code == 0
    assert load_file(out)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rows", "0:1"], "rows of which table"),
        (["--table", "nope"], "no such table"),
        (["--table", "tables.2.weight", "--rows", "9:3"], "outside the table"),
        (["--table", "tables.2.weight", "--rows", "0:1000000"], "outside the table"),
        (["--table", "tables.2.weight", "--rows", "a:b"], "not a range"),
        (["--table", "tables.2.weight", "--rows", ""], "not a range"),
        (["--table", "tables.2.weight", "--rows", "1,2,999999"], "outside the table"),
    ],
)
def test_restore_refuses_what_is_not_there(
    call, trained: Path, tmp_path: Path, options: list[str], said: str
) -> None:
    code, data, _ = call("restore", trained, "--out", tmp_path / "x", *options)
    assert code == 1
    assert said in data["error"]["message"]
    assert not list(tmp_path.iterdir())


def test_restore_into_a_folder_that_is_missing(call, trained: Path, tmp_path: Path) -> None:
    code, data, _ = call("restore", trained, "--out", tmp_path / "no" / "x")
    assert code == 1
    assert "cannot write there" in data["error"]["message"]


@pytest.mark.parametrize("out", ["", "/", "."])
@pytest.mark.parametrize("format_", ["safetensors", "torch", "dcp"])
def test_restore_to_what_has_no_name_is_refused(
    call, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, format_: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, data, _ = call("restore", trained, "--out", out, "--format", format_, "--force")
    assert code == 1
    assert "cannot write there" in data["error"]["message"]
    assert not list(tmp_path.iterdir())


def test_restore_of_a_damaged_step_leaves_no_file(call, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    opened = hf.open(tmp_path / "run")
    victim = next(s for s in opened.catalog.segments if s.born == 35)
    path = tmp_path / "run" / victim.extent.object
    data = bytearray(path.read_bytes())
    data[victim.extent.offset + 40] ^= 255
    path.chmod(0o644)
    path.write_bytes(data)
    (tmp_path / "out").mkdir()
    code, found, _ = call("restore", tmp_path / "run", "--out", tmp_path / "out" / "x")
    assert (code, found["error"]["type"]) == (1, "CorruptDataError")
    assert not list((tmp_path / "out").iterdir())


def test_rows_are_parsed_strictly() -> None:
    from holdfast.interchange.weightsfile import parse_rows

    for text in ("", "1:2:3", "-1:4", "-1", "1.5:2", "٣:4", "٣", "3,", ",3", "3,,4", "9" * 30, "a"):
        with pytest.raises(InvalidRequestError):
            parse_rows(text)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("5", [5]),
        ("3,7,9", [3, 7, 9]),
        ("100:104", [100, 101, 102, 103]),
        ("9,0:3,7,:2", [9, 0, 1, 2, 7, 0, 1]),
        ("4, 5 ,6:8", [4, 5, 6, 7]),
    ],
)
@pytest.mark.parametrize("step", [15, 40, 60])
def test_rows_of_a_grid_come_in_the_order_they_were_asked_for(
    call, gridded: Path, tmp_path: Path, text: str, ids: list[int], step: int
) -> None:
    out = tmp_path / "rows"
    name = "tables.2.weight"
    options = ["--step", step, "--table", name, "--rows", text, "--with-state", "--out", out]
    code, data, _ = call("restore", gridded, *options)
    assert (code, data["rows"]) == (0, len(ids))
    tensors = load_file(out)
    whole = hf.open(gridded).read(step, name)
    assert np.array_equal(tensors[name], whole.weight[ids])
    assert np.array_equal(tensors[f"optimizer.{name}.sum"], whole.state["sum"][ids])


def test_rows_are_read_in_pieces(
    call, gridded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.interchange import weightsfile as export

    monkeypatch.setattr(export, "PIECE_BYTES", 2000)
    out = tmp_path / "rows"
    name = "tables.2.weight"
    call("restore", gridded, "--table", name, "--rows", "90:10,1:", "--out", out)
    assert not out.exists()
    code, _, _ = call("restore", gridded, "--table", name, "--rows", "50:120,1:", "--out", out)
    assert code == 0
    whole = hf.open(gridded).read(65, name).weight
    expected = np.concatenate([whole[50:120], whole[1:]])
    assert np.array_equal(load_file(out)[name], expected)


def test_rows_of_the_newest_segment_take_that_segment_alone(
    call, gridded: Path, tmp_path: Path
) -> None:
    name = "tables.2.weight"
    opened = hf.open(gridded)
    alive = opened.catalog.alive(40, name)
    fresh = fetch.PartReader(opened.storage).ids(alive[-1])[:3]
    options = ["--step", 40, "--table", name, "--with-state"]
    rows = ",".join(map(str, fresh))
    _, few, _ = call("restore", gridded, *options, "--rows", rows, "--out", tmp_path / "a")
    _, all_, _ = call("restore", gridded, *options, "--out", tmp_path / "b")
    assert few["segments"] == all_["segments"] == all_["read_segments"] == len(alive) > 1
    assert few["read_segments"] == 1
    assert alive[-1].extent.bytes <= few["read_bytes"] < all_["read_bytes"]
    assert all_["read_bytes"] >= sum(s.extent.bytes for s in alive)


def test_what_was_read_is_told(
    gridded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--table", "tables.2.weight", "--rows", "3,9", "--out", str(tmp_path / "x")]
    assert run(["restore", str(gridded), *options]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1 tensor, 2 rows" in said
    assert " of " in said.partition("read ")[2]
    assert said.endswith("segments")


def test_weights_alone_are_restored_from_a_grid(call, gridded: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    code, _, _ = call("restore", gridded, "--step", 40, "--out", out)
    assert code == 0
    opened, tensors = hf.open(gridded), load_file(out)
    for schema in opened.tables(40):
        assert np.array_equal(tensors[schema.name], opened.read(40, schema.name).weight)


def test_the_file_names_the_rows_in_it(call, gridded: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows"
    tables = ["--table", "tables.2.weight", "--table", "tables.3.weight"]
    call("restore", gridded, *tables, "--rows", "7,1:3,3,9", "--out", out)
    with safe_open(out, "numpy") as file:
        assert file.metadata()["holdfast.rows"] == "7:8,1:4,9:10;7:8,1:4,9:10"
