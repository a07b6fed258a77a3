"""``holdfast train``: train a click model with checkpoints; the same command again resumes.

    options -> Recipe -> the plan saved with the run, or a new one -> model, reader, checkpointer
    -> steps -> AUC -> summary

Ctrl-C and SIGTERM end the loop after the step it is in, save that step and leave: nothing is lost.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from holdfast.cli.output import Json, show, stderr

if TYPE_CHECKING:
    from holdfast import events
    from holdfast.checkpoint.checkpointer import Checkpointer
    from holdfast.checkpoint.strategy import Strategy
    from holdfast.recsys.train import Plan, Recipe


class Model(StrEnum):
    """The models there are."""

    DLRM = "dlrm"
    DEEPFM = "deepfm"
    PNN = "pnn"


class Preset(StrEnum):
    """The sizes there are."""

    TINY = "tiny"
    SMALL = "small"
    KAGGLE = "kaggle"
    TERABYTE = "terabyte"


class Optimizer(StrEnum):
    """The tables' optimizers there are."""

    SGD = "sgd"
    ADAGRAD = "adagrad"
    SPARSE_ADAM = "sparse-adam"


class StrategyName(StrEnum):
    """The strategies there are."""

    CHECK_N_RUN = "check-n-run"
    FULL = "full"
    INCRCP = "incrcp"
    CPR = "cpr"
    CPR_MFU = "cpr-mfu"
    CPR_SSU = "cpr-ssu"
    CPR_SCAR = "cpr-scar"


class BasePolicy(StrEnum):
    """The base policies there are."""

    INTERMITTENT = "intermittent"
    ONE_SHOT = "one-shot"
    CONSECUTIVE = "consecutive"
    FULL = "full"
    RECOVERY_TIME = "recovery-time"


_MODEL, _SAVES, _DATA, _OTHER = "Model", "Checkpoints", "Data", "Other"


def _option(help_: str, panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help_, rich_help_panel=panel, **more)


def train(
    url: Annotated[str, _option("Where checkpoints go: a folder or URL.", _SAVES)] = "runs/train",
    model: Annotated[Model, _option("Kind of model.", _MODEL)] = Model.DLRM,
    preset: Annotated[Preset, _option("Size of its networks.", _MODEL)] = Preset.SMALL,
    rows: Annotated[int, _option("Rows of all tables together.", _MODEL, min=1)] = 500_000,
    optimizer: Annotated[Optimizer, _option("Of the tables.", _MODEL)] = Optimizer.ADAGRAD,
    steps: Annotated[int, _option("Steps in all, resumed ones included.", _OTHER, min=1)] = 1000,
    batch_size: Annotated[int, _option("Samples a step.", _DATA, min=1)] = 1024,
    strategy: Annotated[
        StrategyName, _option("How to checkpoint.", _SAVES)
    ] = StrategyName.CHECK_N_RUN,
    base_policy: Annotated[
        BasePolicy | None, _option("When to take a base, if not as the strategy says.", _SAVES)
    ] = None,
    codec: Annotated[
        str | None, _option("How weights are stored: fp32, asym8, adaptive4, ...", _SAVES)
    ] = None,
    state_codec: Annotated[
        str | None, _option("How row state is stored: fp32, log8, ...", _SAVES)
    ] = None,
    extract: Annotated[
        float | None,
        _option(
            "Share of dead rows that a grid's chunks may keep (R), 0 to 1. Default: chosen by "
            "itself.",
            _SAVES,
            metavar="R",
        ),
    ] = None,
    expected_restores: Annotated[
        float, _option("The fewer, the fewer bits are stored.", _SAVES, min=0)
    ] = 20,
    every: Annotated[int, _option("Steps between checkpoints.", _SAVES, min=1)] = 100,
    keep: Annotated[int | None, _option("Keep only the last so many.", _SAVES, min=1)] = None,
    servers: Annotated[
        int | None,
        _option("Divide the rows among so many servers, recovered apart.", _SAVES, min=1),
    ] = None,
    lose: Annotated[
        list[str] | None,
        _option(
            "Let a server lose its rows after a step and recover them (repeatable).",
            _SAVES,
            metavar="SERVER@STEP",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        _option(
            "clicks (synthetic, the default), criteo:PATH or parquet:PATH (a file or a folder; "
            "repeatable).",
            _DATA,
            metavar="KIND[:PATH]",
        ),
    ] = None,
    touched: Annotated[
        float | None,
        _option(
            "Share of the rows an interval touches (synthetic clicks). Default: 0.26, as in "
            "production, where the interval is long enough.",
            _DATA,
        ),
    ] = None,
    seed: Annotated[int, _option("Of the model and the synthetic clicks.", _OTHER, min=0)] = 0,
    workers: Annotated[int, _option("Processes that prefetch synthetic clicks.", _DATA, min=0)] = 0,
    threads: Annotated[
        int | None, _option("Torch's threads. Default: 1 for small models.", _OTHER, min=1)
    ] = None,
    events_file: Annotated[
        Path | None, _option("Append what happens here, as JSON lines.", _OTHER, "--events")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a click model with checkpoints. The same command again resumes."""
    from holdfast.recsys.train import Recipe

    kind, files = parse_data(data or ["clicks"])
    recipe = Recipe(
        model=cast(Any, model.value),
        preset=preset.value,
        rows=rows,
        batch_size=batch_size,
        optimizer=optimizer.value,
        seed=seed,
        data=kind,
        touched=touched,
    )
    settings: dict[str, Any] = {
        "every": every,
        "codec": codec,
        "state_codec": state_codec,
        "expected_restores": expected_restores,
        "keep": keep,
        "strategy": choose_strategy(strategy.value, base_policy, extract),
        "servers": servers,
        "total_steps": steps,
    }
    losses = parse_losses(lose or [], servers)
    if threads is None and preset in (Preset.TINY, Preset.SMALL):
        threads = 1  # layers this small lose more to handing work around than they gain
    job = Job(url, recipe, files, steps, settings, workers, threads, events_file, losses)
    code = run_job(job, is_json=as_json)
    if code:
        raise typer.Exit(code)


def choose_strategy(name: str, base_policy: BasePolicy | None, extract: float | None) -> Strategy:
    """A strategy by name, with what was chosen otherwise.

    Raises:
        InvalidRequestError: the choices do not go together.
    """
    from holdfast.checkpoint.grid import as_extract
    from holdfast.checkpoint.strategy import STRATEGIES

    other: dict[str, Any] = {}
    if base_policy is not None:
        other["base"] = base_policy.value
    if extract is not None:
        other["extract"] = as_extract(extract)
    return dataclasses.replace(STRATEGIES[name], **other)


def parse_losses(given: list[str], servers: int | None) -> dict[int, list[int]]:
    """Which servers fail after which steps.

    >>> parse_losses(["3@500", "1@500", "3@800"], 4)
    {500: [3, 1], 800: [3]}

    Raises:
        InvalidRequestError: not a server and a step, or no such server.
    """
    from holdfast.errors import InvalidRequestError
    from holdfast.placement import Placement

    found: dict[int, list[int]] = {}
    for item in given:
        server, at, step = item.partition("@")
        if not at or not server.isdecimal() or not step.isdecimal() or int(step) < 1:
            raise InvalidRequestError(
                "not a server and a step", lose=item, todo="write it like --lose 3@500"
            )
        if servers is None:
            raise InvalidRequestError("rows are lost by servers", todo="give --servers too")
        Placement(servers).check_server(int(server))
        found.setdefault(int(step), []).append(int(server))
    return found


def parse_data(given: list[str]) -> tuple[str, list[str]]:
    """The kind of data, and its files.

    >>> parse_data(["criteo:day_0", "criteo:day_1"])
    ('criteo', ['day_0', 'day_1'])

    Raises:
        InvalidRequestError: unknown, mixed, or without a path.
    """
    from holdfast.errors import InvalidRequestError

    pairs = [item.partition(":") for item in given]
    kinds = {kind for kind, _, _ in pairs}
    paths = [path for _, _, path in pairs]
    todo = "write clicks, criteo:PATH or parquet:PATH; repeat it for more files of one kind"
    if len(kinds) != 1 or not kinds <= {"clicks", "criteo", "parquet"}:
        raise InvalidRequestError("unknown or mixed data", data=given, todo=todo)
    kind = kinds.pop()
    if (kind == "clicks") == any(paths) or (kind != "clicks" and not all(paths)):
        raise InvalidRequestError("data with the wrong path", data=given, todo=todo)
    return kind, [] if kind == "clicks" else paths


@dataclass(frozen=True, slots=True)
class Job:
    """One training process: what to train, where to, how."""

    url: str
    recipe: Recipe
    files: list[str]
    steps: int
    settings: dict[str, Any]
    workers: int
    threads: int | None
    events_file: Path | None
    losses: Mapping[int, list[int]] = field(default_factory=dict)
    """Servers that lose their rows, by step."""


def run_job(job: Job, *, is_json: bool) -> int:
    """Train to the end, or until asked to stop; the exit code."""
    import torch

    from holdfast import events
    from holdfast.checkpoint.checkpointer import Checkpointer
    from holdfast.cli.progress import watch_training
    from holdfast.recsys.train import evaluate, make_training
    from holdfast.recsys.train import train as train_steps
    from holdfast.report import training as report

    # torch warns when nobody has chosen; its own optimizers make the sparse tensors
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    happened: list[events.Event] = []
    sinks: list[events.Sink] = [_remember(happened)]
    if job.events_file is not None:
        sinks.append(events.json_lines(job.events_file))
    console = stderr()
    plan = find_plan(job.url, job.recipe, interval=job.settings["every"])
    training = make_training(plan, files=job.files, workers=job.workers, steps=job.steps)
    best_auc = None
    with watch_training(console, job.steps) as watch, _stop_signals() as stop:
        log = events.EventLog([*sinks, watch])
        with Checkpointer(
            job.url,
            model=training.model,
            optimizer=training.optimizers,
            reader=training.reader,
            extras={"plan": training.plan},
            events=log,
            **job.settings,
        ) as ck:
            start = ck.resume()
            step = train_steps(
                training,
                start=start,
                steps=job.steps,
                after_step=lambda: _step(ck, training.model, training.optimizers, job.losses),
                emit=log.emit,
                report_every=max(1, job.steps // 200),
                should_stop=lambda: stop.signal is not None,
            )
            ck.wait()
            if step > start and step not in ck.steps:
                ck.save().durable()
            if stop.signal is None:
                auc = evaluate(training.model, training.heldout())
                best_auc = training.best_auc()
                log.emit(_final(step, job.steps, happened, auc))
    told = report.summarize(happened, best_auc=best_auc)
    if stop.signal is not None:
        console.print(
            f"holdfast: stopped at step {step} of {job.steps}, which is saved; "
            "the same command again goes on from there",
            soft_wrap=True,
        )
    elif start >= job.steps:
        console.print(
            f"holdfast: the run is at step {start} already; give more --steps to train on",
            soft_wrap=True,
        )
    facts = {**told.to_dict(), "steps_total": job.steps, "is_complete": stop.signal is None}
    show(facts, lambda width: _draw(told), is_json=is_json)
    return 0 if stop.signal is None else 128 + stop.signal


def _step(ck: Checkpointer, model: Any, optimizers: Any, losses: Mapping[int, list[int]]) -> None:
    """Count a step; then let servers fail that are to fail after it."""
    from holdfast.tables import find_tables, lose_rows

    ck.step()
    failed = losses.get(ck.current_step)
    placement = ck.settings.placement
    if failed and placement is not None:
        lose_rows(find_tables(model, optimizers), placement, failed)
        ck.recover(failed)


def find_plan(url: str, recipe: Recipe, *, interval: int) -> Plan:
    """The plan of the run that is there, or a new one.

    Raises:
        InvalidRequestError: the run was started with other settings, or not by this command.
    """
    from holdfast.checkpoint import run as runs
    from holdfast.errors import InvalidRequestError, NotFoundError
    from holdfast.recsys.train import Plan, check_same, choose_skew, parse_plan

    try:
        run = runs.open(url)
    except NotFoundError:
        run = None
    if run is None or not run.steps:
        return Plan(recipe, choose_skew(recipe, interval=interval))
    saved = run.dense(run.steps[-1])["extras"].get("plan")
    if saved is None:
        raise InvalidRequestError(
            "the run there was not made by 'holdfast train'", url=run.url, todo="give another --url"
        )
    plan = parse_plan(saved)
    check_same(plan.recipe, recipe)
    return plan


def _final(
    step: int, steps: int, happened: list[events.Event], auc: float | None
) -> events.TrainProgress:
    """The last report, with the AUC."""
    from holdfast import events

    last = [item for item in happened if isinstance(item, events.TrainProgress)]
    return events.TrainProgress(
        step=step,
        steps_total=steps,
        samples=last[-1].samples if last else 0,
        loss=last[-1].loss if last else 0.0,
        seconds=last[-1].seconds if last else 0.0,
        auc=auc,
    )


def _draw(told: Any) -> Any:
    from rich.console import Group
    from rich.text import Text

    from holdfast.report import training as report

    parts: list[Any] = [report.checkpoints_table(told), Text()] if told.checkpoints else []
    return Group(*parts, report.summary_table(told))


def _remember(happened: list[events.Event]) -> Callable[[events.Event], None]:
    """A sink that keeps what a summary needs; progress of a single save is not."""
    from holdfast import events

    def keep(event: events.Event) -> None:
        if not isinstance(event, events.SaveProgress):
            happened.append(event)

    return keep


@dataclass(slots=True)
class _Stop:
    """Which signal asked the loop to stop, if one did."""

    signal: int | None = None


@contextmanager
def _stop_signals() -> Iterator[_Stop]:
    """Turn the first Ctrl-C or SIGTERM into a request; a second one interrupts at once."""
    stop = _Stop()

    def ask(number: int, frame: object) -> None:
        if stop.signal is not None:
            raise KeyboardInterrupt
        stop.signal = number
        print("holdfast: stopping after this step ...", file=sys.stderr)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
