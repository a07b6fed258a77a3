"""The drawing of a grid: nothing is lost when cells are joined, the rectangle has true edges."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from holdfast.report import grid
from holdfast.report.grid_picture import draw_grid


def make(
    checkpoints: int, *, step: int | None = None, gap: int = 10, has_rollup: bool = False
) -> grid.GridView:
    """A full triangle: every cell (born, died) of so many checkpoints, and row 0."""
    steps = [gap * (at + 1) for at in range(checkpoints)]
    cells = []
    for at, born in enumerate(steps):
        deaths: list[int | None] = [*steps[at + 1 :], None]
        for died in deaths:
            is_read = step is not None and born <= step and (died is None or step < died)
            cells.append(
                grid.GridCell(
                    born=born,
                    died=died,
                    chunks=1,
                    rows=born,
                    bytes=64 * born,
                    dead_rows=1 if died is None else 0,
                    is_read=is_read,
                )
            )
    read = None
    if step is not None:
        chosen = [cell for cell in cells if cell.is_read]
        read = grid.StepRead(
            step=step, base_segments=1, base_rows=9, base_bytes=99, rollup_segments=has_rollup,
            rollup_rows=7 * has_rollup, rollup_bytes=77 * has_rollup, segments=len(chosen),
            rows=sum(c.rows for c in chosen), bytes=sum(c.bytes for c in chosen), masked_rows=3,
            waiting_segments=0,
        )  # fmt: skip
    return grid.GridView(
        url="runs/x", rollups=(5,) if has_rollup else (0,), base=0, rollup=5 * has_rollup,
        end=None, through=steps[-1], tables=("t",), checkpoints=tuple(steps), cells=tuple(cells),
        bundles=(grid.Bundle("objects/c1/live-a.hf", "live", 1000, 3, 800, 100),),
        base_chunks=1, base_rows=9, base_bytes=99, rollup_chunks=int(has_rollup),
        rollup_rows=7 * has_rollup, rollup_bytes=77 * has_rollup, deleted_rows=5,
        deletion_vector_bytes=50, waiting=(),
        read=read,
    )  # fmt: skip


def shown(seen: grid.GridView, width: int, **more) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(grid.render(seen, width=width, **more))
    return console.export_text()


@pytest.mark.parametrize("checkpoints", [1, 2, 7, 40, 150, 300])
@pytest.mark.parametrize("step", [None, 10, 70, 400])
def test_joined_cells_hold_every_cell_once(checkpoints: int, step: int | None) -> None:
    seen = make(checkpoints, step=step)
    plan = grid.plan_layout(seen, columns_max=60, lines_max=25)
    assert len(plan.columns) <= 60
    assert len(plan.lines) <= 25
    for key in ("chunks", "rows", "bytes", "dead_rows"):
        joined = sum(getattr(cell, key) for _, _, cell in plan.cells)
        assert joined == getattr(seen.total, key)
    assert [born for group in plan.columns for born in group] == list(seen.checkpoints)


@pytest.mark.parametrize("checkpoints", [3, 40, 150])
@pytest.mark.parametrize("step", [10, 20, 390, 10_000])
def test_the_rectangle_holds_what_is_read_and_nothing_else(checkpoints: int, step: int) -> None:
    seen = make(checkpoints, step=step)
    plan = grid.plan_layout(seen, columns_max=50, lines_max=20)
    for line, column, cell in plan.cells:
        is_inside = line < plan.read_lines and column < plan.read_columns
        assert cell.is_read == is_inside
    inside = [c for line, column, c in plan.cells if line < plan.read_lines and c.is_read]
    assert seen.read is not None
    assert sum(cell.bytes for cell in inside) == seen.read.bytes


def test_a_step_before_every_birth_has_no_rectangle() -> None:
    seen = make(5, step=3)
    plan = grid.plan_layout(seen, columns_max=50, lines_max=20)
    assert (plan.read_columns, plan.read_lines) == (0, 0)
    assert "┘" not in shown(seen, 80)


@pytest.mark.parametrize("width", [60, 80, 140, 200])
@pytest.mark.parametrize("checkpoints", [1, 9, 30, 150, 600])
def test_any_grid_fits_any_terminal(width: int, checkpoints: int) -> None:
    text = shown(make(checkpoints, step=10 * (checkpoints // 2 or 1)), width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) < 75
    assert "alive" in text
    assert ("to fit, a column is up to" in text) == (checkpoints > width - 12)
    assert ("a line up to" in text) == (checkpoints > 30)


def test_every_line_can_be_asked_for() -> None:
    seen = make(60)
    lines = [line.split() for line in shown(seen, 140, lines_max=1000).splitlines()]
    labels = {words[0] for words in lines if words}
    assert {str(step) for step in seen.checkpoints[1:]} <= labels


def test_few_checkpoints_show_their_numbers() -> None:
    text = shown(make(3), 80, by="rows")
    top = next(line for line in text.splitlines() if line.strip().startswith("alive "))
    assert [word.strip("░▒▓█") for word in top.split()] == ["alive", "10", "20", "30"]


def test_a_rollup_is_named_beside_its_base_and_only_where_there_is_one() -> None:
    with_rollup = shown(make(3, step=20, has_rollup=True), 100)
    assert "5, over the base of step 0" in with_rollup
    assert "1 segment of the rollup, 77 B" in " ".join(with_rollup.split())
    assert "rollup" not in shown(make(3, step=20), 100)


def test_the_rectangle_is_drawn_without_colour() -> None:
    lines = shown(make(4, step=20), 80).splitlines()
    top = next(at for at, line in enumerate(lines) if line.strip().startswith("alive "))
    bottom = next(at for at, line in enumerate(lines) if "┘" in line)
    assert [line.split()[0] for line in lines[top:bottom]] == ["alive", "40", "30"]
    assert all("│" in line for line in lines[top:bottom])
    assert lines[bottom + 1].split()[0] == "20"


def test_the_dictionary_has_every_cell_and_the_sums() -> None:
    data = make(150, step=70).to_dict()
    assert len(data["cells"]) == 150 * 151 // 2
    assert data["alive"]["dead_rows"] == data["total"]["dead_rows"] == 150
    assert data["alive"]["dead_fraction"] == 150 / data["alive"]["rows"]
    assert (data["garbage_bytes"], data["bundle_bytes"]) == (100, 1000)


@pytest.mark.parametrize("kind", ["png", "svg"])
@pytest.mark.parametrize("checkpoints", [1, 300])
def test_pictures_of_small_and_large_grids(tmp_path: Path, checkpoints: int, kind: str) -> None:
    path = tmp_path / "picture"
    assert draw_grid(make(checkpoints, step=10), path, kind=kind)
    assert path.read_bytes().startswith(b"\x89PNG" if kind == "png" else b"<?xml")
