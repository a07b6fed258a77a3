"""``holdfast restore``: a step as a file that other programs load: safetensors, torch.save, DCP.

Not here: how they are written (interchange/).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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


class Format(StrEnum):
    """What a step can be written as."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"
    DCP = "dcp"


def restore(
    url: Url,
    out: Annotated[
        Path, typer.Option(metavar="OUT", help="The file, or for dcp the folder, to write.")
    ],
    step: Annotated[
        int | None, typer.Option(metavar="S", help="Which checkpoint; default: the last.")
    ] = None,
    format_: Annotated[
        Format,
        typer.Option(
            "--format",
            help="safetensors: weights, or some rows. torch: what torch.save makes of model and "
            "optimizer. dcp: a folder of torch.distributed.checkpoint.",
        ),
    ] = Format.SAFETENSORS,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="torch, dcp: without the optimizer's state.")
    ] = False,
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
    is_forced: Annotated[bool, typer.Option("--force", help="Overwrite OUT.")] = False,
    storage_options: StorageOptions = None,
    as_json: Json = False,
) -> None:
    """Export a step: the dense network and the tables, or only some tables."""
    from rich.progress import Progress

    from holdfast.checkpoint import run as runs
    from holdfast.errors import InvalidRequestError, NotFoundError
    from holdfast.interchange.weightsfile import Wanted, parse_rows
    from holdfast.interchange.wholeness import check_out
    from holdfast.report.layout import literal

    if rows is not None and not table:
        raise InvalidRequestError("rows of which table", rows=rows, todo="add --table T")
    wanted = Wanted(
        tuple(table) if table else None, parse_rows(rows) if rows is not None else None, has_state
    )
    is_weights_file = format_ == Format.SAFETENSORS
    if weights_only if is_weights_file else (wanted.tables or wanted.rows or has_state):
        raise InvalidRequestError(
            "an option of another format", format=format_.value,
            todo="--table, --rows and --with-state go with safetensors, --weights-only with others",
        )  # fmt: skip
    check_out(out, is_forced=is_forced, is_folder=format_ == Format.DCP)
    run = runs.open(url, storage_options=parse_storage_options(storage_options))
    if not run.steps:
        raise NotFoundError("the run has no checkpoints", url=run.url)
    chosen = run.steps[-1] if step is None else step
    run.info(chosen)  # a wrong step is refused before anything is written
    with Progress(console=stderr(), transient=True) as bar:
        task = bar.add_task(f"step {chosen}", total=None)

        def on_table(tables: int, total: int) -> None:
            bar.update(task, completed=tables, total=total)

        if is_weights_file:
            facts, text = _export_weights(run, chosen, out, wanted, on_table)
        else:
            facts, text = _export_state(
                run, chosen, out, format_, on_table, weights_only=weights_only
            )
    show(facts, lambda width: literal(text), is_json=as_json)


Told = tuple[dict[str, Any], str]


def _export_weights(
    run: Run, step: int, out: Path, wanted: Any, on_table: Callable[[int, int], None]
) -> Told:
    from holdfast.interchange.weightsfile import export
    from holdfast.report import words

    done = export(run, step, out, wanted, on_table=on_table)
    facts = {
        "url": run.url,
        "step": done.step,
        "out": str(done.path),
        "format": Format.SAFETENSORS.value,
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
    return facts, text


def _export_state(
    run: Run,
    step: int,
    out: Path,
    format_: Format,
    on_table: Callable[[int, int], None],
    *,
    weights_only: bool,
) -> Told:
    from holdfast.interchange.dcpfolder import write_dcp
    from holdfast.interchange.handout import hand_out
    from holdfast.interchange.torchfile import write_torch
    from holdfast.report import words

    handout = hand_out(run, step, weights_only=weights_only)
    write = write_dcp if format_ == Format.DCP else write_torch
    size = write(handout, out, on_table=on_table)
    facts = {
        "url": run.url,
        "step": step,
        "out": str(out),
        "format": format_.value,
        "tensors": len(handout.model),
        "rows": handout.rows,
        "optimizers": len(handout.optimizers),
        "bytes": size,
    }
    text = (
        f"step {step} -> {out} ({format_.value}): {words.counted(len(handout.model), 'tensor')}, "
        f"{words.counted(handout.rows, 'row')}, "
        f"{words.counted(len(handout.optimizers), 'optimizer')}, {words.size(size)}"
    )
    return facts, text
