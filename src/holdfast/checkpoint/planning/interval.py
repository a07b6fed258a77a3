"""What ``every=`` can say: a number of steps, a time, both, or a tolerated loss.

    every=1000  every="30min"  every=timedelta(minutes=30)
    every=hf.Every(steps=1000, seconds=1800)  (whichever comes first)  every=hf.Pls(...)

Invariant: what is no interval is refused where it is written, never in mid-training.

Not here: when a checkpoint is due (schedule.py).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from holdfast.errors import InvalidRequestError
from holdfast.plan.pls import interval_part

_UNIT_S = {"ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z]+)")


@dataclass(frozen=True, slots=True)
class Every:
    """Save after so many steps, or after so many seconds; given both, whichever comes first.

    >>> Every(steps=1000, seconds=1800).seconds
    1800
    """

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.steps is None and self.seconds is None:
            raise _refusal(self)
        if self.steps is not None:
            _check_number(self.steps, every=self)
            if self.steps < 1 or not float(self.steps).is_integer():
                raise _refusal(self)
        if self.seconds is not None:
            _check_number(self.seconds, every=self)
            if not 0 < self.seconds < math.inf:
                raise _refusal(self)


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
        """Hours between two checkpoints of all rows (CPR: 2 · PLS · servers · MTBF)."""
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


Interval = int | str | timedelta | Every | Pls
"""What ``every=`` takes."""


def as_every(every: Interval | None) -> Every | Pls | None:
    """What ``every=`` means; a text is a time with a unit, or a number of steps.

    >>> as_every("1.5h"), as_every("100")
    (Every(steps=None, seconds=5400.0), Every(steps=100, seconds=None))

    Raises:
        InvalidRequestError: it is no interval; says what one is.
    """
    if every is None or isinstance(every, Every | Pls):
        return every
    if isinstance(every, timedelta):
        return _made(every, seconds=every.total_seconds())
    if isinstance(every, str):
        return _parse(every)
    _check_number(every, every=every)
    return _made(every, steps=every)


def _parse(text: str) -> Every:
    plain = text.strip().lower()
    if plain.isdecimal():
        return _made(text, steps=int(plain))
    found = _TIME.fullmatch(plain)
    if found is None or found[2] not in _UNIT_S:
        raise _refusal(text)
    return _made(text, seconds=float(found[1]) * _UNIT_S[found[2]])


def _made(given: Any, *, steps: float | None = None, seconds: float | None = None) -> Every:
    """An Every, or a refusal that shows what was given."""
    if steps is not None and not (math.isfinite(steps) and float(steps).is_integer()):
        raise _refusal(given)
    try:
        return Every(None if steps is None else int(steps), seconds)
    except InvalidRequestError:
        raise _refusal(given) from None


def _check_number(value: Any, *, every: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise _refusal(every)


def _refusal(every: Any) -> InvalidRequestError:
    return InvalidRequestError(
        "a checkpoint interval is a whole number of steps, or a time",
        every=every,
        todo='pass every=1000, every="30min", every=hf.Every(steps=1000, seconds=1800) or '
        "every=hf.Pls(0.1, mtbf_h=28, servers=8), or leave it out and call ck.save()",
    )
