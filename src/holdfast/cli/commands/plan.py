"""``holdfast plan``: which strategy costs least for a model, a cluster and a failure rate."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.output import Json, show, stderr
from holdfast.errors import InvalidRequestError, NotFoundError

SIMULATED = ("full", "cpr")


def plan(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="Numbers from a YAML file; flags win over it."),
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Rows of all tables.")] = None,
    row_bytes: Annotated[int | None, typer.Option(help="Bytes of a row with its state.")] = None,
    mtbf_h: Annotated[float | None, typer.Option(help="Hours between two failures.")] = None,
    servers: Annotated[int | None, typer.Option(help="Embedding servers.")] = None,
    lost: Annotated[int | None, typer.Option(help="Servers that go at each failure.")] = None,
    dense_bytes: Annotated[int | None, typer.Option(help="Bytes of the networks.")] = None,
    changed_per_hour: Annotated[
        float | None, typer.Option(help="Share of the rows that an hour changes.")
    ] = None,
    changed_growth: Annotated[
        float | None, typer.Option(help="t hours change that share times t to this power.")
    ] = None,
    updates_per_s: Annotated[
        float | None, typer.Option(help="Rows that all workers update in a second.")
    ] = None,
    job_h: Annotated[float | None, typer.Option(help="Hours a job trains.")] = None,
    reschedule_h: Annotated[
        float | None, typer.Option(help="Hours until a machine is replaced.")
    ] = None,
    copy_bytes_s: Annotated[float | None, typer.Option(help="A server copies in memory.")] = None,
    write_bytes_s: Annotated[float | None, typer.Option(help="A server writes to storage.")] = None,
    read_bytes_s: Annotated[float | None, typer.Option(help="A server reads from storage.")] = None,
    network_bytes_s: Annotated[float | None, typer.Option(help="A server's network.")] = None,
    memory_headroom: Annotated[
        float | None, typer.Option(help="Memory that may be added, as a share of the model's.")
    ] = None,
    pls: Annotated[float | None, typer.Option(help="Portion of lost samples to tolerate.")] = None,
    expected_restores: Annotated[
        float | None, typer.Option(min=0, help="Restores of a job: they decide the bits.")
    ] = None,
    r: Annotated[float | None, typer.Option("--r", help="Share of rows saved at a time.")] = None,
    coded: Annotated[int | None, typer.Option(help="Data rows of a stripe, k.")] = None,
    parity: Annotated[int | None, typer.Option(help="Coded rows of a stripe, r.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine, and a preset's training.")
    ] = False,
    preset: Annotated[str, typer.Option(help="With --measure: the model.")] = "kaggle",
    table_mb: Annotated[int, typer.Option(min=1, help="With --measure: its tables.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="With --measure: samples of a step.")] = 1024,
    steps: Annotated[int, typer.Option(min=4, help="With --measure: steps to train.")] = 100,
    folder: Annotated[
        Path, typer.Option(help="With --measure: where checkpoints would be written.")
    ] = Path(),
    jobs: Annotated[int, typer.Option(min=0, help="Jobs to simulate; 0: none.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Of the simulation.")] = 0,
    picture: Annotated[
        Path | None, typer.Option("--png", "--svg", help="Draw overheads and scaling here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Tell what every strategy costs here, and which one to take."""
    given = locals()
    from holdfast.checkpoint.planning.bits import choose_bits
    from holdfast.plan.advise import advise
    from holdfast.plan.scaling import MODELS, scale
    from holdfast.plan.situation import Situation, make_situation
    from holdfast.report.plan import Plan, draw, render

    names = inspect.signature(Situation).parameters
    numbers = {n: given[n] for n in names if given.get(n) is not None}
    numbers = _read(file) | numbers
    if expected_restores is not None:
        numbers["bits"] = choose_bits(expected_restores).bits
    if measure:
        numbers = _measure(folder, preset, table_mb << 20, batch, steps) | numbers
    situation = make_situation(numbers)
    advice = advise(situation)
    found = Plan(
        situation,
        frozenset(numbers),
        advice,
        _simulate(situation, advice, jobs, seed) if jobs else {},
        {name: scale(situation, make(situation)) for name, make in MODELS.items()},
    )
    if picture is not None:
        draw(found, picture)
    show(found.to_dict(), lambda width: render(found, width), is_json=as_json)


def _measure(folder: Path, preset: str, table_bytes: int, batch: int, steps: int) -> dict[str, Any]:
    from holdfast.recsys.measure import measure_machine, measure_model

    if not folder.is_dir():
        raise NotFoundError("no such folder", folder=str(folder))
    with stderr().status("measuring this machine ..."):
        machine = measure_machine(folder)
    with stderr().status(f"training {preset} for {steps} steps ..."):
        model = measure_model(preset, table_bytes=table_bytes, batch=batch, steps=steps)
    return {**machine, **model}


def _read(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        import yaml
    except ImportError as error:
        raise InvalidRequestError(
            "a file of numbers needs PyYAML", todo="run: pip install holdfast[plan]"
        ) from error
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NotFoundError("no such file", file=str(file)) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # such as a day that is none
        raise InvalidRequestError("not a YAML file", file=str(file), found=str(error)) from error
    if not isinstance(found, dict):
        raise InvalidRequestError(
            "a plan's file is a list of names and numbers", file=str(file),
            todo="write lines like 'rows: 1000000'",
        )  # fmt: skip
    return {str(name): value for name, value in found.items()}


def _simulate(situation: Any, advice: Any, jobs: int, seed: int) -> dict[str, Any]:
    import numpy as np

    from holdfast.plan.failures.models import Exponential
    from holdfast.plan.simulate import Job, simulate

    found = {}
    for estimate in advice.estimates:
        if estimate.strategy not in SIMULATED:
            continue
        job = Job(
            job_h=situation.job_h,
            interval_h=estimate.interval_h,
            costs=estimate.costs,
            kind="full" if estimate.strategy == "full" else "partial",
            servers=situation.servers,
            lost=situation.lost,
        )
        rng = np.random.default_rng(seed)
        found[estimate.strategy] = simulate(job, Exponential(situation.mtbf_h), rng=rng, jobs=jobs)
    return found
