"""What verification found: sound, or what is damaged and which steps that costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from holdfast.report import words
from holdfast.report.layout import make_table

_LINES_MAX = 200  # damages that are shown: a run that lies has as many as it likes


@dataclass(frozen=True, slots=True)
class DamageLine:
    """One thing that is wrong, and the steps that can no longer be restored because of it."""

    where: str
    error: str
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Soundness:
    """What was read and what is wrong with it."""

    url: str
    catalogs: int
    objects: int
    segments: int
    bytes: int
    seconds: float
    steps: tuple[int, ...]
    damages: tuple[DamageLine, ...]

    @property
    def is_sound(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damages

    @property
    def sound_steps(self) -> tuple[int, ...]:
        """The steps that can still be restored."""
        lost = {step for damage in self.damages for step in damage.steps}
        return tuple(step for step in self.steps if step not in lost)

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "sound": self.is_sound,
            **dataclasses.asdict(self),
            "sound_steps": list(self.sound_steps),
        }


def render(found: Soundness) -> RenderableType:
    """The verdict, then every damage."""
    read = (
        f"{words.counted(found.catalogs, 'catalog')}, {words.counted(found.objects, 'object')}, "
        f"{words.counted(found.segments, 'segment')}, {words.size(found.bytes)} read "
        f"in {words.duration(found.seconds)}"
    )
    if found.is_sound:
        checkpoints = words.counted(len(found.steps), "checkpoint")
        return Text.assemble(("sound", "bold green"), f": {checkpoints}; {read}")
    verdict = Text.assemble(
        ("damaged", "bold red"), f": {words.counted(len(found.damages), 'damage')}; {read}"
    )
    table = make_table("Damages")
    table.add_column("where", overflow="fold", style="cyan")
    table.add_column("what", overflow="fold")
    table.add_column("steps lost", overflow="fold")
    for damage in found.damages[:_LINES_MAX]:
        table.add_row(damage.where, damage.error, some_steps(damage.steps) or "none")
    hidden = len(found.damages) - _LINES_MAX
    if hidden > 0:
        table.add_row(f"… {words.counted(hidden, 'more damage')}: --json has all", style="dim")
    return Group(verdict, Text(), table, Text(), _advice(found))


def _advice(found: Soundness) -> Text:
    if not found.sound_steps:
        return Text("no checkpoint of this run can be restored", style="bold red")
    last = found.sound_steps[-1]
    if last == found.steps[-1]:
        advice = "the last one is: training can resume"
    else:
        advice = f"go back to the last of them with ck.restore({last}, discard_later=True)"
    return Text(f"sound: {some_steps(found.sound_steps)}; {advice}")


def some_steps(steps: Sequence[int], *, most: int = 12) -> str:
    """A list of steps that stays short.

    >>> some_steps([1, 2, 3]), some_steps(range(100), most=4)
    ('1, 2, 3', '0, 1, …, 98, 99')
    """
    if len(steps) <= most:
        return ", ".join(map(str, steps))
    half = most // 2
    return f"{some_steps(steps[:half])}, …, {some_steps(steps[-half:])}"
