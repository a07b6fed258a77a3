"""``holdfast restore``: a step's weights as a safetensors file that anything can load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.output import Json, Url, show, stderr


def restore(
    url: Url,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The safetensors file to write.")],
    step: Annotated[
        int | None, typer.Option(metavar="S", help="Which checkpoint; default: the last.")
    ] = None,
    table: Annotated[
        list[str] | None, typer.Option(metavar="T", help="Only this table; repeatable.")
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(
            metavar="ROWS",
            help="Only these rows of the tables named: 5, or 3,7,9, or 100:200, or a mixture.",
        ),
    ] = None,
    has_state: Annotated[
        bool, typer.Option("--with-state", help="The optimizer's row state of the tables too.")
    ] = False,
    is_forced: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    as_json: Json = False,
) -> None:
    """Export the weights of a step: the dense network and the tables, or only some tables."""
    from rich.progress import Progress
    from rich.text import Text

    from holdfast.checkpoint import run as runs
    from holdfast.cli.export import Wanted, export, parse_rows
    from holdfast.errors import InvalidRequestError, NotFoundError
    from holdfast.report import words

    if rows is not None and not table:
        raise InvalidRequestError("rows of which table", rows=rows, todo="add --table T")
    wanted = Wanted(
        tuple(table) if table else None, parse_rows(rows) if rows is not None else None, has_state
    )
    if out.is_dir() or not out.parent.is_dir():
        raise InvalidRequestError(
            "cannot write there", out=str(out), todo="name a file in a folder that exists"
        )
    if out.exists() and not is_forced:
        raise InvalidRequestError(
            "the file exists", out=str(out), todo="name another, or overwrite it with --force"
        )
    run = runs.open(url)
    if not run.steps:
        raise NotFoundError("the run has no checkpoints", url=run.url)
    chosen = run.steps[-1] if step is None else step
    run.info(chosen)  # a wrong step is refused before anything is written
    with Progress(console=stderr(), transient=True) as bar:
        task = bar.add_task(f"step {chosen}", total=None)
        done = export(
            run,
            chosen,
            out,
            wanted,
            on_table=lambda tables, total: bar.update(task, completed=tables, total=total),
        )
    facts = {
        "url": run.url,
        "step": done.step,
        "out": str(done.path),
        "tensors": done.tensors,
        "rows": done.rows,
        "bytes": done.bytes,
        "read_bytes": done.read_bytes,
        "read_segments": done.read_segments,
        "segments": done.segments,
    }
    text = (
        f"step {done.step} -> {done.path}: {words.counted(done.tensors, 'tensor')}, "
        f"{words.counted(done.rows, 'row')}, {words.size(done.bytes)}; "
        f"read {words.size(done.read_bytes)} from {words.count(done.read_segments)} of "
        f"{words.counted(done.segments, 'segment')}"
    )
    show(facts, lambda width: Text(text, overflow="fold"), is_json=as_json)
