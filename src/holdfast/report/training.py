"""What a training run's events say: its checkpoints, what they cost, how well the model does.

Invariants:
- Everything comes from events alone, so a report can be made during a run, after it, or by another
  process.
- A checkpoint that was cancelled or failed is not counted; one that was saved again after a
  restart is listed once for each time it was written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.table import Table

from holdfast import events
from holdfast.report import words
from holdfast.report.layout import NAME_MAX, add_numbers, literal, make_grid, make_table


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """One checkpoint as it was written."""

    step: int
    kind: str
    codec: str
    rows: int
    bytes: int
    full_bytes: int
    stall_s: float
    durable_s: float


@dataclass(frozen=True, slots=True)
class Extraction:
    """What moved dead rows out of the live chunks of a grid, in the background, all in all."""

    rounds: int = 0
    failed: int = 0
    chunks: int = 0
    extracted: int = 0
    rows: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Training:
    """A training run, told by its events."""

    url: str
    steps: int
    resumed_from: int | None
    seconds: float
    samples: int
    loss: float | None
    auc: float | None
    best_auc: float | None
    checkpoints: tuple[SavedCheckpoint, ...]
    extraction: Extraction | None = None
    """None where no round ran: without a grid."""
    recoveries: tuple[events.Recovered, ...] = ()

    @property
    def bytes(self) -> int:
        """What all checkpoints together wrote."""
        return sum(item.bytes for item in self.checkpoints)

    @property
    def full_bytes(self) -> int:
        """What as many full fp32 checkpoints would have written."""
        return sum(item.full_bytes for item in self.checkpoints)

    @property
    def stall_s(self) -> float:
        """How long training stood still for checkpoints, in all."""
        return sum(item.stall_s for item in self.checkpoints)

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "samples_per_s": self.samples / self.seconds if self.seconds else None,
            "bytes": self.bytes,
            "full_bytes": self.full_bytes,
            "stall_s": self.stall_s,
            "checkpoints": [dataclasses.asdict(item) for item in self.checkpoints],
            "extraction": None if self.extraction is None else dataclasses.asdict(self.extraction),
            "recoveries": [dataclasses.asdict(item) for item in self.recoveries],
        }


def summarize(happened: Iterable[events.Event], *, best_auc: float | None = None) -> Training:
    """What the events of one process or of several in a row add up to."""
    url, resumed_from, steps, loss, auc = "", None, 0, None, None
    seconds = samples = 0.0
    run_seconds = run_samples = 0.0  # of the process that is reporting now
    checkpoints: list[SavedCheckpoint] = []
    extraction: Extraction | None = None
    recoveries: list[events.Recovered] = []
    for event in happened:
        match event:
            case events.RunOpened():
                url = event.url
                seconds, samples = seconds + run_seconds, samples + run_samples
                run_seconds = run_samples = 0.0
            case events.Restored():
                resumed_from, steps = event.step, event.step
            case events.TrainProgress():
                steps, run_seconds, run_samples = event.step, event.seconds, event.samples
                loss = event.loss if event.samples else loss
                auc = event.auc if event.auc is not None else auc
            case events.SaveDurable():
                checkpoints.append(
                    SavedCheckpoint(
                        step=event.step,
                        kind=event.checkpoint,
                        codec=event.codec,
                        rows=event.rows,
                        bytes=event.bytes,
                        full_bytes=event.full_bytes,
                        stall_s=event.stall_s,
                        durable_s=event.durable_s,
                    )
                )
            case events.Recovered():
                recoveries.append(event)
            case events.Extracted():
                extraction = _add_round(extraction or Extraction(), event)
            case events.ExtractionFailed():
                before = extraction or Extraction()
                extraction = dataclasses.replace(before, failed=before.failed + 1)
    return Training(
        url=url,
        steps=steps,
        resumed_from=resumed_from,
        seconds=seconds + run_seconds,
        samples=int(samples + run_samples),
        loss=loss,
        auc=auc,
        best_auc=best_auc,
        checkpoints=tuple(checkpoints),
        extraction=extraction,
        recoveries=tuple(recoveries),
    )


def _add_round(so_far: Extraction, event: events.Extracted) -> Extraction:
    return dataclasses.replace(
        so_far,
        rounds=so_far.rounds + 1,
        chunks=so_far.chunks + event.chunks,
        extracted=so_far.extracted + event.extracted + event.closed,
        rows=so_far.rows + event.rows,
        read_bytes=so_far.read_bytes + event.read_bytes,
        written_bytes=so_far.written_bytes + event.written_bytes,
        seconds=so_far.seconds + event.seconds - event.wait_s,
    )


def checkpoint_line(event: events.SaveDurable) -> str:
    """One checkpoint in one line, for a log."""
    return (
        f"checkpoint of step {event.step}: {event.checkpoint}, {words.size(event.bytes)} "
        f"({words.share(event.bytes, event.full_bytes)} of full fp32), "
        f"stall {words.duration(event.stall_s)}"
    )


def extraction_line(event: events.Extracted) -> str:
    """One round of extraction in one line, for a log."""
    return (
        f"extraction up to step {event.step}: {event.extracted + event.closed} of "
        f"{words.counted(event.chunks, 'chunk')}, {words.counted(event.rows, 'dead row')} moved "
        f"({words.size(event.read_bytes)} read, {words.size(event.written_bytes)} written) "
        f"in {words.duration(event.seconds)}"
    )


def checkpoints_table(training: Training, *, lines_max: int = 20) -> Table:
    """The checkpoints this training wrote, the last ``lines_max`` of them."""
    table = make_table("Checkpoints written")
    table.add_column("step", justify="right", style="cyan", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("codec", no_wrap=True)
    add_numbers(table, "rows", "size", "of full", "stall", "durable")
    hidden = max(0, len(training.checkpoints) - lines_max)
    if hidden:
        table.add_row("…", f"{hidden} earlier", *[""] * 6, style="dim")
    for item in training.checkpoints[hidden:]:
        table.add_row(
            str(item.step),
            literal(item.kind, most=NAME_MAX),
            literal(item.codec, most=NAME_MAX),
            words.count(item.rows),
            words.size(item.bytes),
            words.share(item.bytes, item.full_bytes),
            words.duration(item.stall_s),
            words.duration(item.durable_s),
            style="bold" if item.kind == "base" else None,
        )
    return table


def summary_table(training: Training) -> Table:
    """The run in a few lines."""
    table = make_grid()
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in summary_lines(training):
        table.add_row(name, text)
    return table


def summary_lines(training: Training) -> list[tuple[str, str]]:
    """What to know of a training, as (name, text)."""
    start = training.resumed_from
    lines = [("steps", f"{training.steps}" + (f", resumed from {start}" if start else ""))]
    if training.seconds and training.samples:
        rate = words.count(round(training.samples / training.seconds))
        lines.append(("speed", f"{rate} samples/s"))
    if training.auc is not None:
        best = f" (the best possible is {training.best_auc:.4f})" if training.best_auc else ""
        lines.append(("held-out AUC", f"{training.auc:.4f}{best}"))
    if training.checkpoints:
        lines += [("checkpoints", kinds(training)), ("written", written(training))]
        lines.append(("stall", stalls(training)))
    if training.extraction is not None:
        lines.append(("extraction", extractions(training.extraction)))
    if training.recoveries:
        lines.append(("recovered", recovered(training.recoveries)))
    lines.append(("run", training.url))
    return lines


def recovered(recoveries: Sequence[events.Recovered]) -> str:
    """Which rows came back alone, and what was lost with them."""
    servers = sum(len(item.servers) for item in recoveries)
    known = [item.pls for item in recoveries if item.pls is not None]
    return (
        f"{words.counted(servers, 'server')}: {words.count(sum(r.rows for r in recoveries))} rows, "
        f"{words.size(sum(r.bytes for r in recoveries))} read in "
        f"{words.duration(sum(r.seconds for r in recoveries))}"
    ) + (f"; PLS {sum(known):.3f}" if known else "")


def kinds(training: Training) -> str:
    """How many checkpoints of which kind."""
    bases = sum(item.kind == "base" for item in training.checkpoints)
    deltas = len(training.checkpoints) - bases
    return (
        f"{len(training.checkpoints)}: {words.counted(bases, 'base')}, "
        f"{words.counted(deltas, 'delta')}"
    )


def written(training: Training) -> str:
    """What the checkpoints wrote, against full ones."""
    return (
        f"{words.size(training.bytes)}, {words.share(training.bytes, training.full_bytes)} of "
        f"{words.size(training.full_bytes)} for as many full fp32 checkpoints"
    )


def stalls(training: Training) -> str:
    """How long checkpoints held training up."""
    each = [item.stall_s for item in training.checkpoints]
    text = f"{words.duration(median(each))} a checkpoint (most {words.duration(max(each))})"
    if training.seconds:
        text += f", {words.share(training.stall_s, training.seconds)} of the training time"
    return text


def extractions(extraction: Extraction) -> str:
    """What extraction did, all in all."""
    text = (
        f"{words.counted(extraction.rounds, 'round')}, {words.counted(extraction.rows, 'dead row')}"
        f" moved out of {words.counted(extraction.extracted, 'chunk')}, "
        f"{words.size(extraction.written_bytes)} written in {words.duration(extraction.seconds)}"
    )
    return text + (
        f"; {words.counted(extraction.failed, 'round')} failed" * bool(extraction.failed)
    )
