"""What a measurement found, as plain values: ratios with their targets, tables, plots.

Invariants:
- A ratio keeps both of its sides, so that nobody needs to trust the quotient alone.
- A target is met or not by the numbers; no section decides that by itself.

Not here: how they look (document.py).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Final, Literal

AT_LEAST: Final = "at least"
AT_MOST: Final = "at most"
TIMES_LESS: Final = "times less"
Sense = Literal["at least", "at most", "times less"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One of our numbers beside a peer's, and what the two should make.

    ``at least`` and ``at most`` compare ours / peer with the target (speeds, costs); ``times less``
    compares peer / ours with it (bytes and seconds saved), where more is better.

    >>> Ratio(name="bytes", ours=5, peer=85, against="fp32", unit="MB", target=17,
    ...       sense="times less").is_met
    True
    """

    name: str
    ours: float
    peer: float
    against: str
    unit: str
    target: float | None = None
    sense: Sense = AT_LEAST
    note: str = ""

    @property
    def ratio(self) -> float:
        """The quotient that the target speaks of."""
        over, under = (self.peer, self.ours) if self.sense == TIMES_LESS else (self.ours, self.peer)
        return over / under if under else float("inf")

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        if self.target is None:
            return None
        return self.ratio <= self.target if self.sense == AT_MOST else self.ratio >= self.target


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table of the document; cells are text already."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One line, or one group of bars, of a plot; ``spread`` is half the height of error bars."""

    label: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    spread: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A picture with one idea: its file's stem, its axes, its lines or bars."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    is_bars: bool = False
    has_log_y: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Everything one module measured."""

    name: str
    title: str
    text: str
    ratios: tuple[Ratio, ...] = ()
    sheets: tuple[Sheet, ...] = ()
    plots: tuple[Plot, ...] = ()
    findings: tuple[str, ...] = field(default=())


def to_json(section: Section) -> dict[str, Any]:
    """The section as JSON values, every quotient and verdict spelled out.

    >>> to_json(Section(name="n", title="t", text="x"))["ratios"]
    []
    """
    found = dataclasses.asdict(section)
    found["ratios"] = [
        {**dataclasses.asdict(r), "ratio": r.ratio, "is_met": r.is_met} for r in section.ratios
    ]
    return found
