"""Where a command's words go: results to stdout, everything else to stderr.

Invariant: with ``--json`` stdout holds exactly one JSON value, also when the command fails.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines, to stdout.")]
Url = Annotated[
    str, typer.Argument(metavar="URL", help="Where the run is: a folder or any fsspec URL.")
]


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
