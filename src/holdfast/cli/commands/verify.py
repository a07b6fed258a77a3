"""``holdfast verify``: read every byte of a run, name what is damaged and which steps it costs."""

from __future__ import annotations

import time

import typer

from holdfast.cli.output import (
    Json,
    StorageOptions,
    Url,
    parse_storage_options,
    show,
    stderr,
)


def verify(url: Url, storage_options: StorageOptions = None, as_json: Json = False) -> None:
    """Read and check every byte of a run. Exit code 1 if anything is damaged."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from holdfast.checkpoint.store import catalogs
    from holdfast.checkpoint.verify import verify as check
    from holdfast.errors import HoldfastError
    from holdfast.report.soundness import DamageLine, Soundness, render
    from holdfast.storage import open_storage

    storage = open_storage(url, **parse_storage_options(storage_options))
    started = time.perf_counter()
    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=stderr(), transient=True) as bar:
        task = bar.add_task("verifying", total=None)
        report = check(
            storage, on_progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    steps: tuple[int, ...] = ()
    for number in reversed(catalogs.numbers(storage)):
        try:
            steps = catalogs.load(storage, number).steps
            break
        except HoldfastError:
            continue  # named among the damages
    found = Soundness(
        url=storage.url,
        catalogs=report.catalogs,
        objects=report.objects,
        segments=report.segments,
        bytes=report.bytes,
        seconds=time.perf_counter() - started,
        steps=steps,
        damages=tuple(DamageLine(d.where, d.error, d.steps) for d in report.damages),
    )
    show(found.to_dict(), lambda width: render(found), is_json=as_json)
    if not found.is_sound:
        raise typer.Exit(1)
