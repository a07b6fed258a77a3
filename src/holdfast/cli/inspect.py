"""``holdfast inspect``: what a run holds, without loading it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.output import Json, Url, show

if TYPE_CHECKING:
    from holdfast.checkpoint.run import Run
    from holdfast.report.inspection import Inspection


def inspect(
    url: Url,
    step: Annotated[
        int | None, typer.Option(metavar="S", help="Tables as of this step; default: the last.")
    ] = None,
    is_all: Annotated[
        bool, typer.Option("--all", help="List every checkpoint and table, however many.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show a run's checkpoints, its tables, what it takes up and what lies dead in it."""
    from holdfast.checkpoint import run as runs
    from holdfast.errors import NotFoundError
    from holdfast.report.inspection import render

    opened = runs.open(url)
    if not opened.steps:
        raise NotFoundError("the run has no checkpoints", url=opened.url)
    seen = look(opened, opened.steps[-1] if step is None else step, only=step is not None)
    lines_max = max(len(seen.checkpoints), len(seen.tables)) if is_all else 30
    show(
        seen.to_dict(),
        lambda width: render(seen, width=width, lines_max=lines_max),
        is_json=as_json,
    )


def look(run: Run, step: int, *, only: bool = False) -> Inspection:
    """Everything about a run; ``only``: the checkpoint of this step and no other.

    Raises:
        NotFoundError: lists the steps that exist.
    """
    from holdfast.checkpoint import catalog as catalogs
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
            )
            for info in infos
        ),
        tables=table_lines(
            [(t.name, t.rows, tuple((c.name, c.width) for c in t.columns)) for t in at.tables],
            stored,
        ),
    )
