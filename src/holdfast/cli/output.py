"""Where a command's words go: results to stdout, everything else to stderr.

Invariant: with ``--json`` stdout holds exactly one JSON value, also when the command fails.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines, to stdout.")]
Url = Annotated[
    str, typer.Argument(metavar="URL", help="Where the run is: a folder or any fsspec URL.")
]
StorageOptions = Annotated[
    str | None,
    typer.Option(
        "--storage-options",
        metavar="JSON|@FILE",
        help="How a remote URL is reached: endpoint, keys, settings; secrets better in a file.",
    ),
]


def parse_storage_options(text: str | None) -> dict[str, Any]:
    """What ``--storage-options`` says.

    >>> parse_storage_options('{"endpoint_url": "http://127.0.0.1:9000"}')
    {'endpoint_url': 'http://127.0.0.1:9000'}

    Raises:
        InvalidRequestError: it is not a JSON object; what it is, is not shown.
    """
    from holdfast.errors import InvalidRequestError

    if text is None:
        return {}
    try:
        found = json.loads(Path(text[1:]).read_text() if text.startswith("@") else text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidRequestError(
            "storage options are not a JSON object",
            todo="""write --storage-options '{"endpoint_url": "http://..."}', or @FILE""",
        )
    return found


def stderr() -> Console:
    """For progress, notes and errors."""
    return Console(stderr=True, highlight=False)


def show(facts: Mapping[str, Any], draw: Callable[[int], RenderableType], *, is_json: bool) -> None:
    """Print a result: its facts as JSON, or what ``draw`` makes of the terminal's width."""
    if is_json:
        print(json.dumps(facts, indent=2))
        return
    console = Console(file=sys.stdout, highlight=False)
    console.print(draw(console.width))
