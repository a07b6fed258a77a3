"""``holdfast inspect``: what a run holds, without loading it."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.output import (
    Json,
    StorageOptions,
    Url,
    parse_storage_options,
    show,
    stderr,
)

if TYPE_CHECKING:
    from holdfast.checkpoint.run import Run
    from holdfast.report.grid import GridView
    from holdfast.report.inspection import Inspection

_GRID = "The chunk grid"


class Measure(StrEnum):
    """What a cell's shade or colour shows."""

    BYTES = "bytes"
    ROWS = "rows"


def inspect(
    url: Url,
    step: Annotated[
        int | None,
        typer.Option(
            metavar="S", help="Tables as of this step, or what it reads; default: the last."
        ),
    ] = None,
    is_all: Annotated[
        bool, typer.Option("--all", help="Show every checkpoint and table, however many.")
    ] = False,
    is_grid: Annotated[
        bool, typer.Option("--grid", help="Draw the chunk grid.", rich_help_panel=_GRID)
    ] = False,
    table: Annotated[
        str | None,
        typer.Option(metavar="T", help="Of this table alone.", rich_help_panel=_GRID),
    ] = None,
    base: Annotated[
        int | None,
        typer.Option(metavar="B", help="Over this base; default: newest.", rich_help_panel=_GRID),
    ] = None,
    by: Annotated[
        Measure, typer.Option(help="What shades show.", rich_help_panel=_GRID)
    ] = Measure.BYTES,
    png: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write a picture.", rich_help_panel=_GRID),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write a picture.", rich_help_panel=_GRID),
    ] = None,
    storage_options: StorageOptions = None,
    as_json: Json = False,
) -> None:
    """Show a run's checkpoints, its tables, what it takes up and what lies dead in it."""
    from holdfast.checkpoint import run as runs
    from holdfast.errors import InvalidRequestError, NotFoundError
    from holdfast.report.inspection import render

    only_grid = {"--table": table, "--base": base, "--png": png, "--svg": svg}
    given = [name for name, value in only_grid.items() if value is not None]
    if given and not is_grid:
        raise InvalidRequestError("an option of the grid alone", given=given, todo="add --grid")
    opened = runs.open(url, storage_options=parse_storage_options(storage_options))
    if not opened.steps:
        raise NotFoundError("the run has no checkpoints", url=opened.url)
    if is_grid:
        from holdfast.cli import grid as grids

        view = opened.settled(lambda _: grids.look(opened, base=base, step=step, table=table))
        pictures = {"png": png, "svg": svg}
        _show_grid(view, by.value, pictures, is_all=is_all, as_json=as_json)
        return
    seen = look(opened, opened.steps[-1] if step is None else step, only=step is not None)
    lines_max = max(len(seen.checkpoints), len(seen.tables)) if is_all else 30
    show(
        seen.to_dict(),
        lambda width: render(seen, width=width, lines_max=lines_max),
        is_json=as_json,
    )


def _show_grid(
    view: GridView, by: str, pictures: dict[str, Path | None], *, is_all: bool, as_json: bool
) -> None:
    """The grid in the terminal, and as pictures where they were asked for."""
    from holdfast.errors import InvalidRequestError
    from holdfast.report.grid import LINES_MAX, render
    from holdfast.report.grid_picture import draw_grid

    for kind, path in pictures.items():
        if path is None:
            continue
        if not draw_grid(view, path, by=by, kind=kind):
            raise InvalidRequestError(
                "no picture: matplotlib is missing", todo="pip install 'holdfast[plots]'"
            )
        stderr().print(f"picture: {path}", markup=False, soft_wrap=True)
    lines_max = len(view.checkpoints) + len(view.cells) + 1 if is_all else LINES_MAX
    show(
        {**view.to_dict(), "pictures": {k: str(p) for k, p in pictures.items() if p is not None}},
        lambda width: render(view, width=width, by=by, lines_max=lines_max),
        is_json=as_json,
    )


def look(run: Run, step: int, *, only: bool = False) -> Inspection:
    """Everything about a run; ``only``: the checkpoint of this step and no other.

    Raises:
        NotFoundError: lists the steps that exist.
    """
    from holdfast.checkpoint.store import catalogs
    from holdfast.report.inspection import CheckpointLine, Inspection, table_lines

    at = run.info(step)
    stored: dict[str, list[tuple[int, int, int]]] = {}
    for segment, dead in run.dead_rows(step).items():
        stored.setdefault(segment.table, []).append((segment.rows, segment.extent.bytes, dead))
    infos = [at] if only else [run.info(each) for each in run.steps]
    return Inspection(
        url=run.url,
        run=run.catalog.run,
        catalog=run.catalog.number,
        catalogs=len(catalogs.numbers(run.storage)),
        objects=len(run.catalog.objects),
        objects_bytes=run.bytes,
        restores=run.catalog.restores,
        now=time.time(),
        step=step,
        checkpoints=tuple(
            CheckpointLine(
                step=info.step,
                kind=info.kind,
                base=info.base,
                rows=info.rows,
                bytes=info.bytes,
                restore_bytes=info.restore_bytes,
                full_bytes=info.full_bytes,
                codec=info.codec,
                state_codec=info.state_codec,
                stall_s=info.stall_s,
                time=info.time,
                reason=info.reason,
                metrics=info.metrics,
                metadata=info.metadata,
            )
            for info in infos
        ),
        tables=table_lines(
            [
                (t.name, t.rows, tuple((c.name, c.width, c.dtype) for c in t.columns), t.row_bytes)
                for t in at.tables
            ],
            stored,
        ),
    )
