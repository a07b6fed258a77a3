"""``holdfast bench``: measure, side by side, on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.output import Json


def bench(
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Run only this one; repeatable.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, rough numbers.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the page here; with --only, put these into it."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure kernels, checkpoints and restores against torch.save on this machine."""
    from holdfast.bench.run import run_all

    results = run_all(only=tuple(only or ()), quick=quick, out=out)
    if as_json:
        print(json.dumps(results, indent=2, default=float))
