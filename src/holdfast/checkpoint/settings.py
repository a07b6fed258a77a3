"""How a Checkpointer behaves, beyond where and what: every default lives here."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast import events
from holdfast.checkpoint.bitwidth import PAPER_TABLE, BitsFor, FailureEstimate
from holdfast.checkpoint.codec import Codec
from holdfast.checkpoint.grid import Extract, as_extract
from holdfast.checkpoint.interval import Every, Interval, Pls, as_every
from holdfast.checkpoint.preempting.signals import as_signums, check_deadline
from holdfast.checkpoint.priority import Priority
from holdfast.checkpoint.retention import Keep
from holdfast.checkpoint.strategy import Strategy, as_strategy
from holdfast.checkpoint.tracking import AUTO
from holdfast.errors import InvalidRequestError
from holdfast.placement import Placement
from holdfast.plan.pls import PlsMeter

WAIT, CANCEL = "wait", "cancel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the keyword arguments of a Checkpointer mean when they are left out."""

    strategy: str | Strategy = "check-n-run"
    every: Interval | None = None
    codec: str | Codec | None = None
    state_codec: str | Codec | None = None
    expected_restores: float | FailureEstimate | None = None
    bits_table: Sequence[BitsFor] = PAPER_TABLE
    keep: Keep | int | None = None
    extract: Extract | float | None = None
    priority: Priority | None = None
    servers: Placement | int | None = None
    total_steps: int | None = None
    on_busy: str = WAIT
    save_last: bool = True
    preempt_signals: Sequence[str | int] = ("SIGTERM",)
    preempt_deadline_s: float = 30.0
    tracking: str = AUTO
    staging_bytes_max: int | None = None
    threads: int | None = None
    ranks: Any = None
    ranks_timeout_s: float = 300.0
    events: str | os.PathLike[str] | events.Sink | events.EventLog | None = None
    clock: Callable[[], float] = time.time
    storage_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        as_every(self.every)  # refuses what is no interval
        if self.servers is not None and not isinstance(self.servers, Placement):
            Placement(self.servers)  # refuses what is no number of servers
        placement = self.placement
        if isinstance(self.every, Pls) and placement is not None:
            self.every.check_servers(placement.servers)
        if self.on_busy not in (WAIT, CANCEL):
            raise InvalidRequestError("unknown on_busy", on_busy=self.on_busy, known=[WAIT, CANCEL])
        if self.ranks_timeout_s <= 0:
            raise InvalidRequestError("ranks_timeout_s must be positive",
                                      value=self.ranks_timeout_s)  # fmt: skip
        as_signums(self.preempt_signals)  # refuses what is no signal
        check_deadline(self.preempt_deadline_s)
        for name in ("staging_bytes_max", "threads", "total_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequestError(f"{name} must be positive", value=value)

    @property
    def placement(self) -> Placement | None:
        """Which rows are saved apart, so that they can be recovered apart."""
        servers = self.servers
        if servers is None and isinstance(self.every, Pls):
            servers = self.every.servers
        return Placement(servers) if isinstance(servers, int) else servers

    def make_strategy(self) -> Strategy:
        """The strategy, with what was chosen by itself in place of its own choices.

        Raises:
            InvalidRequestError: there is none of this name, or the choices do not go together.
        """
        strategy = as_strategy(self.strategy)
        if self.extract is not None:
            strategy = dataclasses.replace(strategy, extract=as_extract(self.extract))
        if self.priority is not None:
            strategy = dataclasses.replace(strategy, priority=self.priority)
        hot = strategy.priority
        if hot is not None and self._steps is not None:
            strategy = dataclasses.replace(strategy, priority=hot.within(self._steps))
        return strategy

    @property
    def _steps(self) -> int | None:
        """``every`` as a number of steps, where it says one."""
        every = as_every(self.every)
        return every.steps if isinstance(every, Every) else None

    def interval_of(self, hot: Priority | None) -> Every | Pls | None:
        """From save to save: with hot rows first ``every`` is how long a round of saves takes, in
        which as many rows are saved as there are."""
        every = as_every(self.every)
        if hot is None or every is None:
            return every
        seconds = every.interval_h * 3600 if isinstance(every, Pls) else every.seconds
        return Every(
            steps=None if self._steps is None else hot.save_every(self._steps),
            seconds=None if seconds is None else seconds / hot.saves_a_round,
        )

    def check_ranks(self, ranks: int) -> None:
        """Refuse what many ranks could not agree on.

        Raises:
            InvalidRequestError: says what to do.
        """
        if isinstance(self.every, Pls) or self.placement is not None:
            raise InvalidRequestError(
                "servers= and every=Pls(...) are for one process; of many ranks each would count "
                "for itself",
                ranks=ranks,
                todo="give every= as a number of steps or a time, and leave servers= out",
            )

    def make_meter(self) -> PlsMeter | None:
        """What counts lost samples, where it is known of how many; a step is a sample here."""
        if self.placement is None or self.total_steps is None:
            return None
        return PlsMeter(self.total_steps, servers=self.placement.servers)

    @property
    def restores(self) -> float | None:
        """The expected number of restores; None: not said, so nothing may be approximated."""
        expected = self.expected_restores
        return expected.restores if isinstance(expected, FailureEstimate) else expected


def make_settings(given: Mapping[str, Any]) -> Settings:
    """Settings from keyword arguments.

    Raises:
        InvalidRequestError: names what is unknown and lists what is known.
    """
    known = [field.name for field in dataclasses.fields(Settings)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise InvalidRequestError("unknown setting", given=unknown, known=known)
    return Settings(**given)


def open_log(settings: Settings) -> events.EventLog:
    """The event log the settings ask for: a file, a function, or a log that exists already."""
    target = settings.events
    if isinstance(target, events.EventLog):
        return target
    if target is None:
        return events.EventLog(clock=settings.clock)
    sink = target if callable(target) else events.json_lines(os.fspath(target))
    return events.EventLog([sink], clock=settings.clock)
