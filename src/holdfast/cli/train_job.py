"""A training process with checkpoints: resume, train, save, stop when asked.

    Job -> the plan saved with the run, or a new one -> model, reader, checkpointer -> steps -> AUC
    -> summary

Ctrl-C and SIGTERM end the loop after the step it is in, save that step and leave: nothing is lost.

Not here: the options (cli/commands/train.py), training on a cluster (cli/commands/cluster.py).
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli.measuring import Measuring, metric_sinks
from holdfast.cli.output import show, stderr

if TYPE_CHECKING:
    from holdfast import events
    from holdfast.checkpoint.checkpointer import Checkpointer
    from holdfast.checkpoint.planning.interval import Every
    from holdfast.recsys.train import Plan, Recipe

_STEPS_OF_A_TIME = 100


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
    measuring: Measuring = field(default_factory=Measuring)


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
    plan = find_plan(
        job.url,
        job.recipe,
        interval=steps_of(job.settings["every"]),
        storage_options=job.settings.get("storage_options"),
    )
    training = make_training(plan, files=job.files, workers=job.workers, steps=job.steps)
    best_auc = None
    with (
        metric_sinks(job.measuring, console) as metrics,
        watch_training(console, job.steps) as watch,
        _stop_signals() as stop,
    ):
        log = events.EventLog([*sinks, *metrics, watch])
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
            if step > start and step not in ck.all_steps():
                ck.save().result()
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
    from holdfast.model.tables import find_tables, lose_rows

    ck.step()
    failed = losses.get(ck.current_step)
    placement = ck.settings.placement
    if failed and placement is not None:
        lose_rows(find_tables(model, optimizers), placement, failed)
        ck.recover(failed)


def steps_of(every: Every) -> int:
    """The steps of an interval; of a time the skew of synthetic clicks takes this many."""
    return _STEPS_OF_A_TIME if every.steps is None else every.steps


def find_plan(
    url: str,
    recipe: Recipe,
    *,
    interval: int,
    storage_options: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan of the run that is there, or a new one.

    Raises:
        InvalidRequestError: the run was started with other settings, or not by this command.
    """
    from holdfast.checkpoint import run as runs
    from holdfast.errors import InvalidRequestError, NotFoundError
    from holdfast.recsys.train import Plan, check_same, choose_skew, parse_plan

    try:
        run = runs.open(url, storage_options=storage_options)
    except NotFoundError:
        run = None
    if run is None or not run.steps:
        return Plan(recipe, choose_skew(recipe, interval=interval))
    saved = (run.dense(run.steps[-1])["extras"] or {}).get("plan")
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
