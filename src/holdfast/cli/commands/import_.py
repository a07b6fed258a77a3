"""``holdfast import``: another program's checkpoint as the base of a new run.

Not here: reading and storing it (interchange/).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.output import (
    Json,
    StorageOptions,
    described,
    parse_storage_options,
    show,
    stderr,
)


def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC", help="A file of torch.save, or a folder of torch.distributed.checkpoint."
        ),
    ],
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Where the new run goes: a folder or fsspec URL.")
    ],
    table: Annotated[
        list[str] | None,
        typer.Option(
            metavar="T",
            help="A tensor that is an embedding table, named as in state_dict(); repeatable, "
            "* is anything. A file does not say which are.",
        ),
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(
            metavar="P",
            help="Name of an optimizer's parameter; repeat it for all, in their order. Only needed "
            "where shapes do not tell them apart.",
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="S", help="Of the base. Default: as the file says, or 0.", min=0),
    ] = None,
    model_key: Annotated[
        str | None, typer.Option(metavar="K", help="Where the model is. Default: model, ...")
    ] = None,
    optimizer_key: Annotated[
        str | None, typer.Option(metavar="K", help="Where optimizers are. Default: optimizer, ...")
    ] = None,
    strip_prefix: Annotated[
        str, typer.Option(metavar="P", help="Leave this out before names, like module.")
    ] = "",
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Leave optimizer state out.")
    ] = False,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust",
            help="Lift the limits on memory and on bytes written, which the size of SRC sets.",
        ),
    ] = False,
    storage_options: StorageOptions = None,
    as_json: Json = False,
) -> None:
    """Make another program's checkpoint the base of a new run; training then resumes from it.

    SRC is taken at its word: such files have no checksums, so damage to numbers is not seen.
    Nothing in them is executed, and one that claims more than its size allows is refused.
    """
    from rich.progress import Progress

    from holdfast import events
    from holdfast.interchange.importer import import_checkpoint
    from holdfast.report import words
    from holdfast.report.layout import literal

    with Progress(console=stderr(), transient=True) as bar:
        task = bar.add_task(described(f"import {source.name}"), total=None)

        def watch(event: events.Event) -> None:
            if isinstance(event, events.SaveProgress):
                bar.update(task, completed=event.rows, total=event.rows_total)

        done = import_checkpoint(
            source,
            url,
            tables=table,
            parameters=param,
            step=step,
            model_key=model_key,
            optimizer_key=optimizer_key,
            strip_prefix=strip_prefix,
            weights_only=weights_only,
            trust=trust,
            events=events.EventLog([watch]),
            storage_options=parse_storage_options(storage_options),
        )
    facts = {
        "source": done.source,
        "format": done.format,
        "url": done.url,
        "step": done.step,
        "tables": done.tables,
        "rows": done.rows,
        "tensors": done.tensors,
        "optimizers": done.optimizers,
        "state_columns": done.state_columns,
        "bytes": done.bytes,
        "seconds": done.seconds,
        "is_source_trusted": True,
    }
    has_state = words.counted(done.optimizers, "optimizer") if done.optimizers else "no optimizer"
    text = (
        f"{done.source} ({done.format}) -> {done.url}, step {done.step}: "
        f"{words.counted(done.tables, 'table')}, {words.counted(done.rows, 'row')}, "
        f"{words.counted(done.tensors, 'dense tensor')}, {has_state}, {words.size(done.bytes)}. "
        "The source was taken at its word: it has no checksums."
    )
    show(facts, lambda width: literal(text), is_json=as_json)
