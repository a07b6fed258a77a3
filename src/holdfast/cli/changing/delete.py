"""``holdfast delete``: checkpoints that are not needed any more; what others read of them stays."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.output import Json, StorageOptions, Url, parse_storage_options, show, stderr

if TYPE_CHECKING:
    from holdfast.checkpoint.planning.deletion import Deletion


def delete(
    url: Url,
    step: Annotated[
        list[int], typer.Option(metavar="S", help="The checkpoint to delete; repeatable.")
    ],
    is_sure: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    storage_options: StorageOptions = None,
    as_json: Json = False,
) -> None:
    """Delete checkpoints of a run that is not being trained; every other one stays readable."""
    from rich.text import Text

    from holdfast.checkpoint import run as runs
    from holdfast.checkpoint.planning.deletion import plan_deletion
    from holdfast.errors import InvalidRequestError

    run = runs.open(url, storage_options=parse_storage_options(storage_options))
    deletion = plan_deletion(run.catalog, step)
    if not is_sure:
        if as_json or not sys.stdin.isatty():
            raise InvalidRequestError("a deletion must be confirmed", steps=list(deletion.steps),
                                      todo="pass --yes")  # fmt: skip
        stderr().print(describe(deletion, run.url, is_done=False), markup=False, soft_wrap=True)
        stderr().print("No training may be running on it: its next save would fail.", markup=False)
        if not typer.confirm("Delete?", err=True):
            stderr().print("nothing was deleted", markup=False)
            return
    run.delete(*deletion.steps)
    show(
        facts(deletion, run.url),
        lambda width: Text(describe(deletion, run.url, is_done=True)),
        is_json=as_json,
    )


def facts(deletion: Deletion, url: str) -> dict[str, Any]:
    """For ``--json``."""
    return {
        "url": url,
        "deleted": list(deletion.steps),
        "steps": list(deletion.catalog.steps),
        "freed_bytes": deletion.freed_bytes,
        "shared_bytes": deletion.shared_bytes,
        "readers": list(deletion.readers),
    }


def describe(deletion: Deletion, url: str, *, is_done: bool) -> str:
    """What is, or would be, deleted, in a sentence or two."""
    from holdfast.report import words

    steps = ", ".join(map(str, deletion.steps))
    verb = "deleted" if is_done else "delete"
    text = f"{verb} step {steps} of {url}: {words.size(deletion.freed_bytes)} freed"
    if deletion.readers:
        text += (
            f"; {words.size(deletion.shared_bytes)} of its rows stay, because "
            f"{words.counted(len(deletion.readers), 'later checkpoint')} read them"
        )
    return text
