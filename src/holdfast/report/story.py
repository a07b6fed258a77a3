"""The demo's story: a training that was killed, resumed and finished, told by its events.

Invariants:
- Times are the events' own; nothing is measured twice.
- What a kill cost is counted from the checkpoint that was resumed, not from the kill.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from holdfast import events
from holdfast.report import training as report
from holdfast.report import words
from holdfast.report.layout import make_grid
from holdfast.report.training import Training


@dataclass(frozen=True, slots=True)
class Kill:
    """What a SIGKILL cost and how training came back."""

    step: int
    resumed_from: int
    time: float
    lost_s: float
    down_s: float
    load_s: float
    load_bytes: int

    @property
    def lost_steps(self) -> int:
        """Steps that had to be taken again."""
        return self.step - self.resumed_from


@dataclass(frozen=True, slots=True)
class Story:
    """A whole demo."""

    training: Training
    kill: Kill
    uninterrupted_auc: float | None
    is_sound: bool
    seconds: float
    picture: Path | None

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            **self.training.to_dict(),
            "kill": {**dataclasses.asdict(self.kill), "lost_steps": self.kill.lost_steps},
            "uninterrupted_auc": self.uninterrupted_auc,
            "sound": self.is_sound,
            "demo_seconds": self.seconds,
            "picture": str(self.picture) if self.picture else None,
        }


def find_kill(happened: Sequence[events.Event], *, killed_at: float) -> Kill:
    """What a kill at this moment cost; the events go on with the process that came after."""
    before = [event for event in happened if event.time <= killed_at]
    after = [event for event in happened if event.time > killed_at]
    step = max(
        (e.step for e in before if isinstance(e, events.TrainProgress)),
        default=0,
    )
    restored = next(e for e in after if isinstance(e, events.Restored))
    staged_at = next(
        e.time
        for e in reversed(before)
        if isinstance(e, events.SaveStaged) and e.step == restored.step
    )
    back = next(e for e in after if isinstance(e, events.TrainProgress))
    return Kill(
        step=step,
        resumed_from=restored.step,
        time=killed_at,
        lost_s=killed_at - staged_at,
        # the first report comes some steps after training went on
        down_s=back.time - back.seconds - killed_at,
        load_s=restored.seconds,
        load_bytes=restored.bytes,
    )


def render(story: Story) -> RenderableType:
    """The story for somebody who has never heard of it."""
    training, kill = story.training, story.kill
    grid = make_grid()
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    headline = Text.assemble(
        "The training process was ",
        ("killed", "bold red"),
        f" (SIGKILL) at step {kill.step}, ",
        ("resumed", "bold green"),
        f" from the checkpoint of step {kill.resumed_from}, and finished all "
        f"{training.steps} steps.",
    )
    grid.add_row(
        "lost by the kill",
        f"{words.counted(kill.lost_steps, 'step')}, {words.duration(kill.lost_s)} of training",
    )
    grid.add_row(
        "back after",
        f"{words.duration(kill.down_s)}: starting Python and torch; loading the checkpoint took "
        f"{words.duration(kill.load_s)} of it ({words.size(kill.load_bytes)} read)",
    )
    grid.add_row("checkpoints", report.kinds(training))
    full = training.checkpoints[-1].full_bytes if training.checkpoints else 0
    grid.add_row("model", f"{words.size(full)} in fp32, with its optimizer's row state")
    grid.add_row("written", report.written(training))
    grid.add_row("training stalled", report.stalls(training))
    if training.auc is not None:
        grid.add_row("held-out AUC", _aucs(story, training.auc))
    grid.add_row(
        "stored bytes",
        Text("all read back and verified", style="green")
        if story.is_sound
        else Text("damaged", style="bold red"),
    )
    footer = make_grid()
    footer.add_column(style="dim", no_wrap=True)
    footer.add_column(overflow="fold")
    if story.picture is not None:
        footer.add_row("picture", str(story.picture))
    footer.add_row("look closer", f"holdfast inspect {training.url}")
    return Panel(
        Group(headline, Text(), grid, Text(), footer),
        title=f"Holdfast demo, {words.duration(story.seconds)}",
        border_style="green" if story.is_sound else "red",
        padding=(1, 2),
    )


def _aucs(story: Story, reached: float) -> str:
    text = f"{reached:.4f}"
    others = []
    if story.uninterrupted_auc is not None:
        others.append(f"{story.uninterrupted_auc:.4f} never killed")
    if story.training.best_auc is not None:
        others.append(f"{story.training.best_auc:.4f} at best, for a model that knows the truth")
    return f"{text} ({'; '.join(others)})" if others else text
