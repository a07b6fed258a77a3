"""The processes an engine started: what is the same wherever they run.

    start_many -> launch each -> wait until all are ready;   a death -> whoever watches

Invariants:
- All processes of one ``start_many`` run, or none.
- No two living processes have one name.
- Every death is told to every watcher once, also to those who began to watch after it.

Not here: how a process is launched and ended (engine.py, rayengine.py).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from holdfast.errors import InvalidRequestError, NotFoundError

if TYPE_CHECKING:
    from holdfast.cluster.engine import OnDeath, Process, Start

KERNEL_S = 60.0  # to compile one kernel, on a machine that is very busy
_LOOK_S = 1.0
STOP_S = 3.0  # longer than a child gives its role to end (child.py)


class Handle(Protocol):
    """One process as its engine sees it."""

    @property
    def name(self) -> str:
        """As it was started."""

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, and its death was told."""

    def is_of(self, process: Process) -> bool:
        """Whether this is that process."""

    def wait_ready(self, ends_at: float) -> Process:
        """The process, when it has said where it listens."""

    def ask_to_end(self) -> None:
        """It ends when it has put its things in order."""

    def wait_gone(self, ends_at: float) -> None:
        """Wait until it is gone, or until then."""

    def kill(self) -> None:
        """End it, also when it hangs; returns when it is gone."""


H = TypeVar("H", bound=Handle)


class Starting:
    """How long a process that starts is waited for: the time it compiles kernels does not count."""

    def __init__(self) -> None:
        self._compiling_s = self._told_at = 0.0

    def tell(self, compiling_s: float) -> None:
        """It has said how long it has compiled until now."""
        self._compiling_s, self._told_at = compiling_s, time.monotonic()

    def wait(self, ready: threading.Event, ends_at: float) -> bool:
        """Whether it is ready by then, or later by as long as it compiled.

        A process that has compiled and says nothing more is given ``KERNEL_S`` besides.
        """
        while not ready.is_set():
            now = time.monotonic()
            silent_s = now - self._told_at if self._told_at else 0.0
            left_s = ends_at + self._compiling_s + min(silent_s, KERNEL_S) - now
            if left_s <= 0:
                return False
            ready.wait(min(left_s, _LOOK_S))  # it may say meanwhile that it compiles
        return True


class Roster(Generic[H]):
    """All processes of one engine, the dead ones too."""

    def __init__(self, launch: Callable[[Start, str, OnDeath], H], *, start_s: float) -> None:
        """``launch`` is given a start, the same as a line of JSON, and whom to tell of its death;
        ``start_s`` is how long a process may take to be ready."""
        self._launch, self._start_s = launch, start_s
        self._lock = threading.Lock()
        self._handles: list[H] = []
        self._watchers: list[OnDeath] = []
        self._deaths: list[tuple[Process, str]] = []
        self._is_stopped = False

    def start_many(self, starts: Sequence[Start]) -> list[Process]:
        """Start processes at the same time: all of them, or none and an error."""
        handles: list[H] = []
        try:
            for each in starts:  # one by one: those launched before an error must be known
                handles.append(self._start(each))  # noqa: PERF401
            ends_at = time.monotonic() + self._start_s
            return [handle.wait_ready(ends_at) for handle in handles]
        except BaseException:
            for handle in handles:
                handle.kill()
            raise

    def _start(self, start: Start) -> H:
        order = {"role": start.role, "name": start.name, "spec": dict(start.spec)}
        try:
            line = json.dumps(order, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InvalidRequestError("a spec must be JSON", name=start.name) from error
        with self._lock:
            if self._is_stopped:
                raise InvalidRequestError("the engine is stopped", name=start.name)
            if any(each.name == start.name and not each.is_gone for each in self._handles):
                raise InvalidRequestError("a process of this name runs", name=start.name)
            handle = self._launch(start, line, self._told)
            self._handles.append(handle)
        return handle

    def watch(self, on_death: OnDeath) -> None:
        """Call this with every process that dies unasked (also before now), and with how."""
        with self._lock:
            self._watchers.append(on_death)
            deaths = list(self._deaths)
        for process, how in deaths:
            on_death(process, how)

    def _told(self, process: Process, how: str) -> None:
        with self._lock:
            self._deaths.append((process, how))
            watchers = list(self._watchers)
        for on_death in watchers:
            on_death(process, how)

    def kill(self, process: Process) -> None:
        """End a process at once, also a hung one; returns when it is gone."""
        with self._lock:
            handle = next((each for each in self._handles if each.is_of(process)), None)
        if handle is None:
            raise NotFoundError("no such process", name=process.name, pid=process.pid)
        handle.kill()

    def stop(self) -> None:
        """End all processes; returns when they are gone. May be called again."""
        with self._lock:
            self._is_stopped = True
            handles = list(self._handles)
        try:
            for handle in handles:
                handle.ask_to_end()
            ends_at = time.monotonic() + STOP_S
            for handle in handles:
                handle.wait_gone(ends_at)
        finally:  # also when interrupted
            for handle in handles:
                handle.kill()
