"""``holdfast calibrate``: which PLS a tolerated loss of accuracy allows, for one's own model.

emulated runs (or those of 'holdfast emulate --figure 11 --json') -> a line -> a target PLS
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.commands.emulate import (
    EmulatedStrategy,
    Figure,
    RowOptimizer,
    check_options,
    make_job,
    study,
)
from holdfast.cli.commands.train import Preset
from holdfast.cli.output import Json, show
from holdfast.errors import InvalidRequestError, NotFoundError


def calibrate(
    loss: Annotated[float, typer.Option(help="AUC that may be lost.")],
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            help="What 'holdfast emulate --figure 11 --json' printed; else run it.",
        ),
    ] = None,
    strategy: Annotated[
        EmulatedStrategy, typer.Option(help="How hot rows are chosen.")
    ] = EmulatedStrategy.SSU,
    runs: Annotated[int, typer.Option(help="Emulated runs.", min=3)] = 12,
    seeds: Annotated[int, typer.Option(help="Seeds to spread them over.", min=1)] = 3,
    steps: Annotated[int, typer.Option(help="Steps that stand for the job.", min=1)] = 800,
    preset: Annotated[Preset, typer.Option(help="Size of the networks.")] = Preset.SMALL,
    rows: Annotated[int, typer.Option(help="Rows of all tables.", min=1)] = 20_000,
    batch_size: Annotated[int, typer.Option(help="Samples a step.", min=1)] = 512,
    optimizer: Annotated[RowOptimizer, typer.Option(help="Of the tables.")] = RowOptimizer.ADAGRAD,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND[:PATH]", help="clicks, criteo:PATH or parquet:PATH."),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Runs at a time.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Tell which portion of lost samples (PLS) a tolerated loss of AUC allows."""
    from holdfast.plan.calibration import calibrate as fit
    from holdfast.plan.calibration import target_pls
    from holdfast.plan.checks import check_positive

    check_positive("loss", loss)
    if file is None:
        from holdfast.research import report as report

        job = make_job(
            data,
            steps=steps,
            preset=preset.value,
            rows=rows,
            batch_size=batch_size,
            optimizer=optimizer.value,
        )
        chosen = {"runs": runs, "seeds": seeds, "strategies": [strategy.value]}
        check_options(Figure.PLS, chosen)
        found = report.to_dict(
            study(Figure.PLS, job, chosen, workers=workers or os.cpu_count() or 1)
        )
    else:
        found = _read(file)
    points = _points(found, strategy.value)
    calibration = fit([p["pls"] for p in points], [p["loss"] for p in points])
    target = target_pls(calibration, loss)
    facts = {
        "loss": loss,
        "strategy": strategy.value,
        "pls": target.pls,
        "reason": target.reason,
        "slope": calibration.slope,
        "slope_error": calibration.slope_error,
        "runs": calibration.runs,
        "seed_noise": found.get("seed_noise"),
    }
    show(facts, lambda width: _words(facts), is_json=as_json)


def _words(facts: dict[str, Any]) -> str:
    noise = facts["seed_noise"]
    beside = "" if noise is None else f" The AUC of seeds without failures varies by {noise:.2g}."
    return (
        f"PLS {facts['pls']:.3g}: {facts['reason']}.{beside}\n"
        f"Use it: every=hf.Pls({facts['pls']:.3g}, mtbf_h=..., servers=...), or "
        f"holdfast plan --pls {facts['pls']:.3g}"
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NotFoundError("no such file", file=str(file)) from error
    except ValueError as error:
        raise InvalidRequestError("not JSON", file=str(file)) from error
    return found if isinstance(found, dict) else {}


def _points(found: dict[str, Any], strategy: str) -> list[dict[str, float]]:
    points = found.get("points")
    if not isinstance(points, list) or not all(
        isinstance(p, dict) and {"pls", "loss", "strategy"} <= set(p) for p in points
    ):
        raise InvalidRequestError(
            "these are no runs", todo="give what 'holdfast emulate --figure 11 --json' printed"
        )
    chosen = [p for p in points if p["strategy"] == strategy]
    if not chosen:
        known = sorted({str(p["strategy"]) for p in points})
        raise InvalidRequestError("no runs of this strategy", strategy=strategy, known=known)
    return chosen
