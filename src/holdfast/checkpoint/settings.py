"""How a Checkpointer behaves, beyond where and what: every default lives here."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict

from holdfast import events
from holdfast.checkpoint.format.codec import Codec
from holdfast.checkpoint.grid.decide import Extract, as_extract
from holdfast.checkpoint.planning.bits import PAPER_TABLE, BitsFor, FailureEstimate
from holdfast.checkpoint.planning.interval import Every, Interval, Pls, as_every
from holdfast.checkpoint.planning.retention import Keep
from holdfast.checkpoint.preempting.signals import as_signums, check_deadline
from holdfast.checkpoint.selecting.priority import Priority
from holdfast.checkpoint.strategy import Strategy, as_strategy
from holdfast.checkpoint.tracking import AUTO
from holdfast.errors import InvalidRequestError, unknown_name
from holdfast.model.placement import Placement
from holdfast.plan.pls import PlsMeter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

WAIT: Final = "wait"
CANCEL: Final = "cancel"

StrategyName = Literal[
    "full", "check-n-run", "incrcp", "cpr", "cpr-mfu", "cpr-ssu", "cpr-scar"
]  # fmt: skip
TrackingName = Literal["auto", "lookup", "hash"]
EventTarget = str | os.PathLike[str] | events.Sink | events.EventLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a Checkpointer behaves. Each field is a keyword argument of ``Checkpointer``."""

    strategy: StrategyName | Strategy = "check-n-run"
    """Which checkpoints are bases, what deltas hold, how it is stored; see docs."""
    every: Interval | None = None
    """From save to save: steps, a time ("30min"), ``Every`` or ``Pls``. None: call ``save()``."""
    codec: str | Codec | None = None
    """How weights are stored: "fp16", "asym8", "adaptive4", ...; None: every bit of them."""
    state_codec: str | Codec | None = None
    """How optimizer row state is stored; None: lossless with lossless weights, else by its kind."""
    expected_restores: float | FailureEstimate | None = None
    """Store few bits, chosen from how often the run will be restored; None: store every bit."""
    bits_table: Sequence[BitsFor] = PAPER_TABLE
    """How many restores each number of bits is good for."""
    keep: Keep | int | None = None
    """Which checkpoints stay: the last n, or ``Keep``; None: all."""
    extract: Extract | float | None = None
    """IncrCP: the share R of dead rows that a restore may read; None: by the strategy."""
    priority: Priority | None = None
    """Save hot rows first (CPR); None: by the strategy."""
    servers: Placement | int | None = None
    """Store the rows of this many servers apart, so that each can be recovered alone."""
    total_steps: int | None = None
    """How long training is planned: what lost samples are a portion of (``pls``)."""
    on_busy: Literal["wait", "cancel"] = WAIT
    """What happens to a save that still runs when the next is due."""
    save_last: bool = True
    """Save the last step when the ``with`` block ends without an error."""
    preempt_signals: Sequence[str | int] = ("SIGTERM",)
    """Save when one of these arrives, then end; (): leave signals alone."""
    preempt_deadline_s: float = 30.0
    """How long such a save may take."""
    tracking: TrackingName = AUTO
    """How changed rows are found: always right; by gradients alone; by comparing every row."""
    staging_bytes_max: int | None = None
    """Bound of the staging buffer; None: room for a base, at most half of the free memory."""
    threads: int | None = None
    """Threads that copy and threads that encode; None: by the machine."""
    ranks: ProcessGroup | bool | None = None
    """Which ranks save together: a process group, False for this process alone; None: all."""
    ranks_timeout_s: float = 300.0
    """How long a rank waits for the others."""
    events: EventTarget | None = None
    """Where events go: a file of JSON lines, a function, or an ``EventLog``."""
    clock: Callable[[], float] = time.time
    """What time it is, in seconds since 1970."""
    storage_options: Mapping[str, Any] | None = None
    """How a remote URL is reached: what fsspec takes, and {"holdfast": {...}}."""

    def __post_init__(self) -> None:
        as_every(self.every)  # refuses what is no interval
        if self.servers is not None and not isinstance(self.servers, Placement):
            Placement(self.servers)  # refuses what is no number of servers
        placement = self.placement
        if isinstance(self.every, Pls) and placement is not None:
            self.every.check_servers(placement.servers)
        if self.on_busy not in (WAIT, CANCEL):
            raise unknown_name("on_busy", self.on_busy, [WAIT, CANCEL])
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


class SettingsKeywords(TypedDict, total=False):
    """The fields of ``Settings`` as keyword arguments: for editors and type checkers."""

    strategy: StrategyName | Strategy
    every: Interval | None
    codec: str | Codec | None
    state_codec: str | Codec | None
    expected_restores: float | FailureEstimate | None
    bits_table: Sequence[BitsFor]
    keep: Keep | int | None
    extract: Extract | float | None
    priority: Priority | None
    servers: Placement | int | None
    total_steps: int | None
    on_busy: Literal["wait", "cancel"]
    save_last: bool
    preempt_signals: Sequence[str | int]
    preempt_deadline_s: float
    tracking: TrackingName
    staging_bytes_max: int | None
    threads: int | None
    ranks: ProcessGroup | bool | None
    ranks_timeout_s: float
    events: EventTarget | None
    clock: Callable[[], float]
    storage_options: Mapping[str, Any] | None


def make_settings(given: Mapping[str, Any]) -> Settings:
    """Settings from keyword arguments.

    Raises:
        InvalidRequestError: names what is unknown and lists what is known.
    """
    known = [field.name for field in dataclasses.fields(Settings)]
    for name in given:
        if name not in known:
            raise unknown_name("setting", name, known)
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
