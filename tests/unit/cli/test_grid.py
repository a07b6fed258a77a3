"""inspect --grid: what it says of cells, dead rows and a step's reading is what the run does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from holdfast.checkpoint.planning import bases
from holdfast.checkpoint.restoring import fetch, restore
from holdfast.cli.main import run
from tests.unit.checkpoint.lives import Life
from tests.unit.cli.conftest import SMALL


def restored(opened: hf.Run, step: int) -> restore.RestoreStats:
    targets = {
        t.name: [np.empty((t.rows, c.width), np.float32) for c in t.columns]
        for t in opened.tables(step)
    }
    return restore.restore_rows(opened.storage, opened.catalog, step, targets)


def test_cells_hold_every_chunk_of_the_grid_once(call, gridded: Path) -> None:
    code, data, _ = call("inspect", gridded, "--grid")
    assert code == 0
    assert (data["base"], data["rollup"], data["rollups"], data["end"]) == (45, 45, [5, 45], None)
    segments = [s for s in hf.open(gridded).catalog.segments if s.born > 45]
    expected: dict[tuple[int, int | None], list[int]] = {}
    for s in segments:
        sums = expected.setdefault((s.born, s.died), [0, 0, 0])
        sums[0] += 1
        sums[1] += s.rows
        sums[2] += s.extent.bytes
    found = {(c["born"], c["died"]): [c["chunks"], c["rows"], c["bytes"]] for c in data["cells"]}
    assert found == expected
    assert any(died is not None for _, died in found)
    assert data["total"]["bytes"] == sum(s.extent.bytes for s in segments)
    assert data["checkpoints"] == [50, 55, 60, 65]
    assert (data["through"], data["waiting"]) == (65, [])


def test_a_grid_that_a_base_ended_keeps_its_row_zero(call, gridded: Path) -> None:
    _, data, _ = call("inspect", gridded, "--grid", "--base", 5)
    assert data["end"] == 45
    alive = [c for c in data["cells"] if c["died"] is None]
    catalog = hf.open(gridded).catalog
    assert data["alive"]["chunks"] == sum(s.died == 45 and s.born > 5 for s in catalog.segments)
    assert [c["born"] for c in alive][-1] == 40
    assert all(c["died"] is None or c["died"] < 45 for c in data["cells"])


@pytest.mark.parametrize("base", [5, 45])
def test_dead_rows_are_those_that_were_born_again(call, gridded: Path, base: int) -> None:
    _, data, _ = call("inspect", gridded, "--grid", "--base", base)
    opened = hf.open(gridded)
    parts = fetch.PartReader(opened.storage)
    end = data["end"] or 10**9
    chunks = [(s, parts.ids(s).tolist()) for s in opened.catalog.segments if base < s.born < end]
    births: dict[tuple[str, int], list[int]] = {}
    for s, ids in chunks:
        for row in ids:
            births.setdefault((s.table, row), []).append(s.born)
    dead: dict[tuple[int, int | None], int] = {}
    for s, ids in chunks:
        died = None if s.died == data["end"] else s.died
        later = [[b for b in births[s.table, row] if b > s.born] for row in ids]
        count = sum(bool(b) and (died is None or min(b) < died) for b in later)
        dead[s.born, died] = dead.get((s.born, died), 0) + count
    assert {(c["born"], c["died"]): c["dead_rows"] for c in data["cells"]} == dead
    if base == 5:
        assert data["total"]["dead_rows"] > 0
    assert data["total"]["dead_fraction"] == pytest.approx(
        sum(dead.values()) / data["total"]["rows"]
    )


@pytest.mark.parametrize("step", [5, 10, 25, 40, 55, 65])
def test_what_a_step_reads_is_what_its_restore_reads(call, gridded: Path, step: int) -> None:
    _, data, _ = call("inspect", gridded, "--grid", "--step", step)
    opened = hf.open(gridded)
    stats, read = restored(opened, step), data["read"]
    assert data["base"] == (5 if step < 45 else 45)
    assert read["bytes"] + read["base_bytes"] == stats.bytes
    assert read["base_bytes"] == stats.base_bytes
    assert read["rows"] + read["base_rows"] == stats.rows
    assert read["masked_rows"] == stats.masked_rows
    assert read["segments"] + read["base_segments"] == len(opened.catalog.alive(step))
    for cell in data["cells"]:
        is_inside = cell["born"] <= step and (cell["died"] is None or step < cell["died"])
        assert cell["is_read"] == is_inside
    assert sum(c["masked_rows"] for c in data["cells"]) == read["masked_rows"]


@pytest.fixture
def rolled_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a base at 1 and rollups at 4 and 7."""
    monkeypatch.setattr(bases, "ROLLUP_PAYS_AT", 1e-9)
    with Life(tmp_path / "run", extract=hf.Extract(0.2), rollups=True) as life:
        for start in range(9):
            life.save(range(start, 300, 14), range(start, 90, 15))
    return tmp_path / "run"


@pytest.mark.parametrize(("step", "rollup"), [(1, 1), (3, 1), (4, 4), (6, 4), (7, 7), (9, 7)])
def test_a_grid_over_a_rollup_shows_the_rollup_like_the_base(
    call, rolled_up: Path, step: int, rollup: int
) -> None:
    code, data, _ = call("inspect", rolled_up, "--grid", "--step", step)
    assert code == 0
    assert (data["base"], data["rollup"], data["rollups"]) == (1, rollup, [1, 4, 7])
    opened = hf.open(rolled_up)
    stats, read = restored(opened, step), data["read"]
    held = [s for s in opened.catalog.segments if s.born == rollup > 1]
    assert read["rollup_rows"] == data["rollup_rows"] == sum(s.rows for s in held)
    assert read["base_bytes"] == stats.base_bytes
    assert read["base_bytes"] + read["rollup_bytes"] + read["bytes"] == stats.bytes
    assert read["base_rows"] + read["rollup_rows"] + read["rows"] == stats.rows
    assert read["masked_rows"] == stats.masked_rows
    assert all(rollup < cell["born"] < (data["end"] or 10) for cell in data["cells"])
    text = ["inspect", str(rolled_up), "--grid", "--base", str(rollup), "--step", str(step)]
    assert run(text) == 0


def test_a_step_over_another_rollup_is_refused(call, rolled_up: Path) -> None:
    code, data, _ = call("inspect", rolled_up, "--grid", "--base", 4, "--step", 9)
    assert (code, data["error"]["facts"]["its_own"]) == (1, 7)


def test_one_table_and_the_rest_add_up_to_all(call, gridded: Path) -> None:
    _, whole, _ = call("inspect", gridded, "--grid", "--step", 60)
    parts = [
        call("inspect", gridded, "--grid", "--step", 60, "--table", name)[1]
        for name in whole["tables"]
    ]
    for part, name in zip(parts, whole["tables"], strict=True):
        assert part["tables"] == [name]
    for key in ("chunks", "rows", "bytes", "dead_rows"):
        assert sum(p["total"][key] for p in parts) == whole["total"][key]
    assert sum(p["read"]["bytes"] for p in parts) == whole["read"]["bytes"]
    assert sum(p["deleted_rows"] for p in parts) == whole["deleted_rows"]


def test_bundles_count_what_lives_in_them(call, gridded: Path) -> None:
    _, data, _ = call("inspect", gridded, "--grid", "--base", 5)
    catalog = hf.open(gridded).catalog
    held = {s.extent.object for s in catalog.segments if 5 < s.born < 45}
    assert {b["object"] for b in data["bundles"]} == held
    assert {b["kind"] for b in data["bundles"]} >= {"live", "extracted"}
    for bundle in data["bundles"]:
        inside = [s for s in catalog.segments if s.extent.object == bundle["object"]]
        assert bundle["chunks"] == len(inside) > 0
        assert bundle["chunk_bytes"] == sum(s.extent.bytes for s in inside)
        size = (gridded / bundle["object"]).stat().st_size
        assert bundle["bytes"] == size > bundle["chunk_bytes"] + bundle["garbage_bytes"]
    assert data["garbage_bytes"] == sum(b["garbage_bytes"] for b in data["bundles"])


def test_garbage_is_what_no_catalog_names(call, tmp_path: Path) -> None:
    url = tmp_path / "run"
    options = ["--strategy", "incrcp", "--base-policy", "consecutive", "--extract", 0]
    call("train", "--url", url, *SMALL, *options, "--steps", 30)
    data = call("inspect", url, "--grid")[1]
    catalog = hf.open(url).catalog
    named = {(s.extent.object, s.extent.offset) for s in catalog.segments}
    named |= {(e.dense.object, e.dense.offset) for e in catalog.checkpoints}
    garbage = 0
    for bundle in data["bundles"]:
        raw = (url / bundle["object"]).read_bytes()
        footer_bytes = int.from_bytes(raw[-24:-16], "little")
        index = json.loads(raw[-24 - footer_bytes : -24])["segments"]
        garbage += sum(item[3] for item in index if (bundle["object"], item[2]) not in named)
    assert data["garbage_bytes"] == garbage > 0


@pytest.mark.parametrize("width", [80, 140])
def test_the_grid_fits_the_terminal(
    gridded: Path,
    width: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert run(["inspect", str(gridded), "--grid", "--step", "25"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    for word in ("alive", "│", "┘", "step 25 reads", "dead in place", "garbage", "other grid"):
        assert word in shown


def test_pictures_are_written(call, gridded: Path, tmp_path: Path) -> None:
    png, svg = tmp_path / "grid.png", tmp_path / "grid.svg"
    code, data, _ = call(
        "inspect", gridded, "--grid", "--step", 25, "--png", png, "--svg", svg, "--by", "rows"
    )
    assert code == 0
    assert data["pictures"] == {"png": str(png), "svg": str(svg)}
    assert png.read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in svg.read_bytes()


def test_a_picture_in_a_folder_that_is_missing_is_refused(
    call, gridded: Path, tmp_path: Path
) -> None:
    code, data, _ = call("inspect", gridded, "--grid", "--png", tmp_path / "no" / "grid.png")
    assert code == 1
    assert "no such file" in data["error"]["message"]


@pytest.mark.parametrize(
    ("options", "said", "fact"),
    [
        (["--grid", "--base", 20], "no grid of this base", ("grids", [5, 45])),
        (["--grid", "--step", 7], "no checkpoint of this step", ("step", 7)),
        (["--grid", "--table", "nope"], "no such table", ("table", "nope")),
        (["--grid", "--base", 45, "--step", 10], "stands on another base", ("its_own", 5)),
        (["--table", "tables.2.weight"], "option of the grid alone", ("given", ["--table"])),
        (["--svg", "x.svg"], "option of the grid alone", ("given", ["--svg"])),
    ],
)
def test_a_wrong_question_is_refused_with_what_exists(
    call, gridded: Path, options: list[object], said: str, fact: tuple[str, object]
) -> None:
    code, data, _ = call("inspect", gridded, *options)
    assert code == 1
    assert said in data["error"]["message"]
    assert data["error"]["facts"][fact[0]] == fact[1]


def test_a_run_without_a_grid_says_so(call, trained: Path) -> None:
    code, data, err = call("inspect", trained, "--grid")
    assert (code, data["error"]["type"]) == (1, "NotFoundError")
    assert "the run has no grid" in err
    assert "incrcp" in data["error"]["todo"]


def test_a_grid_with_only_its_base_can_be_shown(call, tmp_path: Path) -> None:
    call("train", "--url", tmp_path / "run", *SMALL, "--strategy", "incrcp", "--steps", 10)
    code, data, _ = call("inspect", tmp_path / "run", "--grid", "--step", 10)
    assert code == 0
    assert data["cells"] == []
    assert data["read"]["base_rows"] == 2000
    assert run(["inspect", str(tmp_path / "run"), "--grid", "--step", "10"]) == 0
