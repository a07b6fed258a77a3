"""``holdfast diff``: which rows of which tables changed between two steps, and how much."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from holdfast.cli.output import (
    Json,
    StorageOptions,
    Url,
    parse_storage_options,
    show,
    stderr,
)


def diff(
    url: Url,
    a: Annotated[int, typer.Argument(metavar="A", help="A step.", show_default=False)],
    b: Annotated[int, typer.Argument(metavar="B", help="Another step.", show_default=False)],
    table: Annotated[
        list[str] | None, typer.Option(metavar="T", help="Only this table; repeatable.")
    ] = None,
    top: Annotated[
        int, typer.Option(metavar="N", min=0, help="Show the rows that moved most.")
    ] = 10,
    storage_options: StorageOptions = None,
    as_json: Json = False,
) -> None:
    """Tell which rows of which tables changed between two steps, and how much."""
    from rich.progress import Progress

    from holdfast.checkpoint import run as runs
    from holdfast.checkpoint.diff import diff_steps
    from holdfast.report.changes import Changes, render
    from holdfast.storage.counting import CountingStorage

    opened = runs.open(url, storage_options=parse_storage_options(storage_options))
    counter = CountingStorage(opened.storage)
    run = runs.Run(counter, opened.catalog)
    started = time.perf_counter()
    with Progress(console=stderr(), transient=True) as bar:
        task = bar.add_task("comparing", total=None)
        found = diff_steps(
            run,
            a,
            b,
            table or None,
            top=top,
            on_table=lambda done, total: bar.update(task, completed=done, total=total),
        )
    seen = Changes(run.url, found, counter.read_bytes, time.perf_counter() - started)
    show(seen.to_dict(), lambda width: render(seen), is_json=as_json)
