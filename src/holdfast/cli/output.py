"""Where a command's words go: results to stdout, everything else to stderr.

Invariants:
- With ``--json`` stdout holds exactly one JSON value, in ASCII, also when the command fails.
- Nothing that a file, a peer or an error says is taken for markup, or acted on by a terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment

from holdfast.visible import as_json_value, visible

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
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidRequestError(
            "storage options are not a JSON object",
            todo="""write --storage-options '{"endpoint_url": "http://..."}', or @FILE""",
        )
    return found


class _LiteralConsole(Console):
    """A terminal that takes strings at their word.

    Reports make what they show visible themselves, so that columns fit; what one of them forgot
    is made visible here.
    """

    def __init__(self, **more: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **more)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """As the class above; only its own segments of control reach the terminal as they are."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(visible(segment.text, keep="\n"), segment.style)


def stderr() -> Console:
    """For progress, notes and errors."""
    return _LiteralConsole(stderr=True)


def described(text: str) -> str:
    """A description for a bar of progress, which takes it for markup whatever the terminal does."""
    return escape(visible(text, most=80))


def print_json(facts: Mapping[str, Any], default: Callable[[Any], Any] | None = None) -> None:
    """Print facts as JSON that every parser takes."""
    print(json.dumps(as_json_value(facts), indent=2, allow_nan=False, default=default))


def show(facts: Mapping[str, Any], draw: Callable[[int], RenderableType], *, is_json: bool) -> None:
    """Print a result: its facts as JSON, or what ``draw`` makes of the terminal's width."""
    if is_json:
        print_json(facts)
        return
    console = _LiteralConsole(file=sys.stdout)
    console.print(draw(console.width))
