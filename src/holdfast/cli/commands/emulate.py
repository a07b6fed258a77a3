"""``holdfast emulate``: real training with emulated failures; what each strategy costs (CPR).

    options -> Job -> a study (research/studies.py) -> a table, JSON, a picture

Progress goes to stderr.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.commands.train import Preset, parse_data
from holdfast.cli.output import Json, show, stderr
from holdfast.errors import InvalidRequestError

if TYPE_CHECKING:
    from rich.console import Console

    from holdfast.research.emulation import Job, Outcome
    from holdfast.research.studies import Study
    from holdfast.research.update_size import Updates


class Figure(StrEnum):
    """The paper's figures there are."""

    UPDATES = "6"
    STRATEGIES = "7"
    TARGETS = "9"
    FAILURES = "10"
    PLS = "11"
    SLOPES = "12"


class EmulatedStrategy(StrEnum):
    """The strategies there are."""

    NONE = "none"
    FULL = "full"
    PARTIAL = "partial"
    CPR = "cpr"
    SCAR = "cpr-scar"
    MFU = "cpr-mfu"
    SSU = "cpr-ssu"


class RowOptimizer(StrEnum):
    """Optimizers whose row state exists from the first step on."""

    SGD = "sgd"
    ADAGRAD = "adagrad"


# which of the optional options a figure takes
_TAKES: Mapping[Figure, frozenset[str]] = {
    Figure.UPDATES: frozenset(),
    Figure.STRATEGIES: frozenset({"failures", "share", "pls", "strategies", "seeds"}),
    Figure.TARGETS: frozenset({"failures", "share", "strategies", "seeds"}),
    Figure.FAILURES: frozenset({"pls", "strategies", "seeds"}),
    Figure.PLS: frozenset({"runs", "strategies", "seeds"}),
    Figure.SLOPES: frozenset({"runs", "strategies", "seeds"}),
}
_SEEDS = {Figure.FAILURES: 200}  # a clock without training costs nothing
_SEEDS_TRAINED = 3
_STEPS, _BATCH = 800, 512
# CPR section 4.2 measures after 4096 iterations; 128 is the batch of DLRM's script for this data
_STEPS_UPDATES, _BATCH_UPDATES = 4096, 128
_RUNS = 30
_MODEL, _OTHER = "Model and data", "Other"


def emulate(
    figure: Annotated[
        Figure,
        typer.Option(
            help="Of the paper: 7 strategies, 9 by PLS, 10 by failures (clock only), 11 AUC "
            "against PLS, 12 the same for cpr-ssu beside cpr, 6 use against change of rows.",
        ),
    ] = Figure.STRATEGIES,
    strategy: Annotated[
        list[EmulatedStrategy] | None, typer.Option(help="Only these; repeatable.")
    ] = None,
    failures: Annotated[int | None, typer.Option(help="Failures of a job. Default: 2.")] = None,
    share: Annotated[
        float | None, typer.Option(help="Share of the servers a failure takes. Default: 0.125.")
    ] = None,
    pls: Annotated[
        float | None,
        typer.Option(help="Portion of lost samples to tolerate. Default: 0.1; figure 10: 0.02."),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Runs of a setting. Default: 3; figure 10: 200.")
    ] = None,
    runs: Annotated[
        int | None, typer.Option(help="Random scenarios of figures 11 and 12. Default: 30.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Steps of training that stand for the job. Default: 800; figure 6: 4096.", min=1
        ),
    ] = None,
    hours: Annotated[float, typer.Option(help="Hours of the job.")] = 56.0,
    preset: Annotated[
        Preset, typer.Option(help="Size of the networks.", rich_help_panel=_MODEL)
    ] = Preset.SMALL,
    rows: Annotated[
        int, typer.Option(help="Rows of all tables.", min=1, rich_help_panel=_MODEL)
    ] = 20_000,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Samples a step. Default: 512; figure 6: 128.", min=1, rich_help_panel=_MODEL
        ),
    ] = None,
    optimizer: Annotated[
        RowOptimizer, typer.Option(help="Of the tables.", rich_help_panel=_MODEL)
    ] = RowOptimizer.SGD,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND[:PATH]",
            help="clicks (synthetic, the default), criteo:PATH or parquet:PATH (a file or a "
            "folder; repeatable).",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    data_seed: Annotated[
        int, typer.Option(help="Of the synthetic clicks.", min=0, rich_help_panel=_MODEL)
    ] = 0,
    workers: Annotated[
        int | None,
        typer.Option(help="Runs at a time. Default: one a core.", min=1, rich_help_panel=_OTHER),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option("--png", "--svg", help="Draw the figure here.", rich_help_panel=_OTHER),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train with emulated failures: what each strategy costs in time and in AUC."""
    given = {
        "failures": failures,
        "share": share,
        "pls": pls,
        "runs": runs,
        "strategies": [item.value for item in strategy] if strategy else None,
        "seeds": seeds,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    check_options(figure, chosen)

    from holdfast.research import report as report

    if picture is not None:
        report.check_picture(picture)
    is_updates = figure == Figure.UPDATES
    job = make_job(
        data,
        steps=steps or (_STEPS_UPDATES if is_updates else _STEPS),
        hours=hours,
        preset=preset.value,
        rows=rows,
        batch_size=batch_size or (_BATCH_UPDATES if is_updates else _BATCH),
        optimizer=optimizer.value,
        seed=data_seed,
    )
    found = study(figure, job, chosen, workers=workers or os.cpu_count() or 1)
    if picture is not None:
        report.draw(found, picture)
    show(report.to_dict(found), lambda width: report.render(found), is_json=as_json)


def make_job(data: list[str] | None, *, steps: int, hours: float = 56.0, **recipe: Any) -> Job:
    """A job from what a command was given; ``recipe`` are fields of a Recipe."""
    from holdfast.recsys.train import Recipe
    from holdfast.research.emulation import Job

    kind, files = parse_data(data or ["clicks"])
    return Job(steps=steps, hours=hours, recipe=Recipe(data=kind, **recipe), files=tuple(files))


def check_options(figure: Figure, chosen: Mapping[str, Any]) -> None:
    """Refuse options that a figure decides by itself.

    Raises:
        InvalidRequestError: names them.
    """
    refused = sorted(set(chosen) - _TAKES[figure])
    if refused:
        raise InvalidRequestError(
            "this figure does not take such options",
            figure=figure.value,
            options=["strategy" if name == "strategies" else name for name in refused],
            todo="leave them out, or choose another figure",
        )
    for name in ("seeds", "runs"):
        if chosen.get(name, 1) < 1:
            raise InvalidRequestError(f"{name} must be 1 or more", **{name: chosen[name]})
    without = {"none", "full"} & set(chosen.get("strategies", ()))
    if without and figure in (Figure.TARGETS, Figure.FAILURES, Figure.PLS, Figure.SLOPES):
        raise InvalidRequestError(
            "without partial recovery no sample is lost",
            figure=figure.value,
            strategy=sorted(without),
            todo="choose cpr, cpr-scar, cpr-mfu or cpr-ssu",
        )


def study(figure: Figure, job: Job, chosen: Mapping[str, Any], *, workers: int) -> Study | Updates:
    """Carry out what a figure shows; ``chosen`` replaces its defaults."""
    import torch

    from holdfast.research import emulation, studies, update_size

    # torch warns when nobody has chosen; its own optimizers make the sparse tensors
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)  # layers this small lose more to handing work around than they gain
    options = {"seeds": _SEEDS.get(figure, _SEEDS_TRAINED), **chosen}
    if figure == Figure.UPDATES:
        with _bar(stderr(), "steps") as advance:
            return update_size.correlate_updates(job, tell=lambda step: advance(step, job.steps))
    if figure == Figure.FAILURES:
        return studies.study_failures(job, **options)
    with _progress() as tell:
        runner = emulation.Runner(job=job, workers=workers, tell=tell)
        if figure == Figure.STRATEGIES:
            return studies.study_strategies(runner, **options)
        if figure == Figure.TARGETS:
            return studies.study_targets(runner, **options)
        options = {"runs": _RUNS, **options}
        if figure == Figure.PLS:
            return studies.study_pls(runner, **options)
        options = {"strategies": ("cpr", "cpr-ssu"), **options}
        return studies.study_pls(runner, **options, figure=12)


@contextmanager
def _bar(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """Shows how many are done, of how many; nothing where there is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn(f"emulating, {what}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def _progress() -> Iterator[Callable[[Outcome, int, int], None]]:
    """What is told of a run that ended: a bar on a terminal, and a line."""
    from holdfast.research.report import run_line

    console = stderr()
    with _bar(console, "runs") as advance:

        def tell(outcome: Outcome, done: int, total: int) -> None:
            advance(done, total)
            console.print(run_line(outcome, done, total), style="dim", soft_wrap=True)

        yield tell
