"""When a checkpoint is due: every so many steps, or as rarely as a tolerated loss allows.

With ``Pls`` the interval is hours (CPR: 2 · PLS · servers · MTBF), and hours become steps by how
long a step takes. A step is fixed ahead of time, because readers are told how far to read before
the next checkpoint.

Invariants:
- A step is due only if it was announced: once ``steps_left`` is known it counts down to zero.
- A reader is granted the steps until the next checkpoint as soon as they are known, and not before
  the one that is due has been taken.

Not here: the equations (plan/), what is saved (selection.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.errors import InvalidRequestError
from holdfast.plan.pls import interval_part

STEPS_TIMED = 10  # before an interval in steps is known
_STEPS_MAX = 1 << 40


@dataclass(frozen=True, slots=True)
class Pls:
    """Save as rarely as the portion of lost samples ``target`` allows.

    ``mtbf_h``: mean hours between failures of the job; ``lost``: servers that go at each.
    """

    target: float
    mtbf_h: float
    servers: int
    lost: int = 1

    def __post_init__(self) -> None:
        _ = self.interval_h  # refuses nonsense where it is written

    @property
    def interval_h(self) -> float:
        """Hours between two checkpoints of all rows."""
        return interval_part(self.target, mtbf_h=self.mtbf_h, servers=self.servers, lost=self.lost)

    def check_servers(self, servers: int) -> None:
        """Refuse another number of servers.

        Raises:
            InvalidRequestError: says what to do.
        """
        if servers != self.servers:
            raise InvalidRequestError(
                "two numbers of servers",
                servers=servers,
                every=self,
                todo="give the same number twice, or leave servers= out",
            )


class Schedule:
    """Tells when a checkpoint is due; ``part`` of the interval where only a part is saved."""

    def __init__(
        self,
        every: int | Pls | None,
        *,
        clock: Callable[[], float],
        part: float = 1.0,
        grant: Callable[[int], object] | None = None,
    ) -> None:
        """``grant`` tells a reader how many batches to read until the next checkpoint."""
        self._pls = every if isinstance(every, Pls) else None
        self._steps = None if every is None or isinstance(every, Pls) else int(every)
        self._part = part
        self._clock = clock
        self._grant = grant
        self._timed_from = (0, clock())
        self._due: int | None = None

    def start(self, step: int) -> None:
        """Training begins, or goes on, at a step."""
        self._timed_from = (step, self._clock())
        self._due = self._next_multiple(step)
        self._tell(step)

    def _next_multiple(self, step: int) -> int | None:
        return None if self._steps is None else (step // self._steps + 1) * self._steps

    def is_due(self, step: int) -> bool:
        """Whether to save after this step."""
        if self._due is None:
            self._announce(step)
            self._tell(step)
        return self._due is not None and step >= self._due

    def steps_left(self, step: int) -> int | None:
        """Steps until the next checkpoint; None while nobody knows."""
        return None if self._due is None else max(0, self._due - step)

    def saved(self, step: int) -> None:
        """A checkpoint was begun that was due at this step."""
        self._due = self._next_multiple(step)
        self._announce(step)
        self._tell(step)

    def close(self) -> None:
        """Let go of the reader."""
        self._grant = None

    def _tell(self, step: int) -> None:
        left = self.steps_left(step)
        if self._grant is not None and left is not None:
            self._grant(left)

    def _announce(self, step: int) -> None:
        first, started = self._timed_from
        if self._pls is None or step - first < STEPS_TIMED:
            return
        now = self._clock()
        step_s = max((now - started) / (step - first), 1e-9)
        steps = self._pls.interval_h * 3600 * self._part / step_s
        self._due = step + max(1, min(int(steps), _STEPS_MAX))
        self._timed_from = (step, now)


def check_every(every: Any) -> None:
    """Refuse what is no interval.

    Raises:
        InvalidRequestError: says what one is.
    """
    if every is None or isinstance(every, Pls):
        return
    is_number = isinstance(every, int | float) and not isinstance(every, bool)
    if not (is_number and every >= 1 and float(every).is_integer()):
        raise InvalidRequestError(
            "a checkpoint interval is a whole number of steps", every=every,
            todo="pass every=1000 or every=hf.Pls(0.1, mtbf_h=28, servers=8), or leave it out and "
            "call ck.save()",
        )  # fmt: skip
