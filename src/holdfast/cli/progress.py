"""Training as it goes, on stderr: a bar on a terminal, a line per checkpoint elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from holdfast import events
from holdfast.report import training as report
from holdfast.report import words
from holdfast.report.layout import literal


class TrainingBar:
    """A sink for events; also says in plain lines what a bar cannot keep."""

    def __init__(self, console: Console, bar: Progress | None, steps: int) -> None:
        self._console = console
        self._bar = bar
        self._task = bar.add_task("training", total=steps, loss="", rate="") if bar else None

    def __call__(self, event: events.Event) -> None:
        match event:
            case events.TrainProgress() if event.auc is None:
                rate = event.samples / event.seconds if event.seconds else 0.0
                self._update(
                    completed=event.step,
                    loss=f"loss {event.loss:.3f}",
                    rate=f"{words.count(round(rate))}/s",
                )
            case events.SaveDurable():
                self.say(report.checkpoint_line(event))
            case events.Restored():
                self._update(completed=event.step)
                self.say(
                    f"resumed from step {event.step}: {words.size(event.bytes)} read in "
                    f"{words.duration(event.seconds)}"
                )
            case events.SaveFailed():
                self.say(f"checkpoint of step {event.step} failed: {event.error}")
            case events.Extracted():
                self.say(report.extraction_line(event))
            case events.ExtractionFailed():
                self.say(f"extraction failed, the next save tries again: {event.error}")
            case events.CodecChosen():
                self.say(f"rows are stored as {event.codec}: {event.reason}")

    def say(self, line: str) -> None:
        """One line above the bar."""
        self._console.print(literal(line, style="dim"), soft_wrap=True)

    def _update(self, **fields: object) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, **fields)  # type: ignore[arg-type]


@contextmanager
def watch_training(console: Console, steps: int) -> Iterator[TrainingBar]:
    """A sink that shows events while the block runs."""
    if not console.is_terminal:
        yield TrainingBar(console, None, steps)
        return
    columns = (
        TextColumn("training"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[rate]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield TrainingBar(console, bar, steps)
