"""Processes of a cluster: started, watched, killed, stopped. The control plane's lower half.

    start -> child says where it listens -> Process; a thread waits for each child -> on_death

``Engine`` is what the coordinator needs of any place that can run processes; ``LocalEngine`` runs
them on this machine. What a process does, and what it says to others, is none of its business.

Invariants:
- A death is told once, at once, and only when nobody asked for it.
- After ``stop`` no child is left; neither after the driver's end, however it ended: children hold
  the other end of a pipe, and leave when it closes.
- What is secret travels through that pipe, never as an argument or in the environment.

Not here: hung processes (pulse.py), replacement (coordinator.py), a child's first lines (child.py).
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from holdfast.cluster.logs import read_tail
from holdfast.cluster.machines import LOOPBACK
from holdfast.cluster.message import ERROR, Message, as_error
from holdfast.cluster.roster import Roster, Starting
from holdfast.errors import HoldfastError, UnavailableError

START_S = 180.0  # without the time to compile kernels; a death is seen at once anyway


@dataclass(frozen=True, slots=True)
class Process:
    """A process that has said where it listens."""

    name: str
    role: str
    pid: int
    address: str


@dataclass(frozen=True, slots=True)
class Start:
    """What to start: a role, under a name, told a spec of JSON values."""

    role: str
    name: str
    spec: Mapping[str, Any]


OnDeath = Callable[[Process, str], None]


class Engine(Protocol):
    """A place that runs the processes of a cluster."""

    host: str
    """Where processes here listen, and their driver too."""

    def start(self, role: str, name: str, spec: Mapping[str, Any]) -> Process:
        """Start a process; returns when it has said where it listens."""

    def start_many(self, starts: Sequence[Start]) -> list[Process]:
        """Start processes at the same time: all of them, or none and an error."""

    def watch(self, on_death: OnDeath) -> None:
        """Call this, in some thread, with every process that dies unasked, and with how."""

    def kill(self, process: Process) -> None:
        """End a process at once, also a hung one; returns when it is gone."""

    def stop(self) -> None:
        """End all processes; returns when they are gone."""


class LocalEngine:
    """Runs processes on this machine, as children of this one."""

    host = LOOPBACK[0]

    def __init__(
        self,
        *,
        logs: Path | None = None,
        start_s: float = START_S,
        module: str = "holdfast.cluster.child",
    ) -> None:
        """``logs`` is a folder for what children write to stderr; without it, they share ours."""
        self._logs, self._module = logs, module
        self._roster = Roster(self._launch, start_s=start_s)
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
        atexit.register(self.stop)

    def start(self, role: str, name: str, spec: Mapping[str, Any]) -> Process:
        """Start a process; returns when it has said where it listens.

        Raises:
            UnavailableError: it ended or said nothing in time; the end of its stderr is told.
            HoldfastError: what it raised before it was ready.
        """
        return self.start_many([Start(role, name, spec)])[0]

    def start_many(self, starts: Sequence[Start]) -> list[Process]:
        """Start processes at the same time: all of them, or none and an error."""
        return self._roster.start_many(starts)

    def watch(self, on_death: OnDeath) -> None:
        """Call this with every process that dies unasked (also before now), and with how."""
        self._roster.watch(on_death)

    def kill(self, process: Process) -> None:
        """End a process at once, also a hung one; returns when it is gone."""
        self._roster.kill(process)

    def stop(self) -> None:
        """End all processes; returns when they are gone. May be called again."""
        self._roster.stop()
        atexit.unregister(self.stop)

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _launch(self, start: Start, line: str, told: OnDeath) -> _Child:
        log = None if self._logs is None else self._logs / f"{start.name}.log"
        return _Child(start, line, self._module, log, told)


class _Child:
    """One child process and the thread that waits for it."""

    def __init__(
        self, start: Start, line: str, module: str, log: Path | None, told: OnDeath
    ) -> None:
        self._start, self._log, self._told = start, log, told
        self.name = start.name
        self._is_asked = self._is_told = False
        self._ready, self._starting = threading.Event(), Starting()
        self._address = ""
        self._error: HoldfastError | None = None
        stderr: IO[bytes] | None = None if log is None else log.open("ab")
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        finally:
            if stderr is not None:
                stderr.close()
        self.pid = self._popen.pid
        self._thread = threading.Thread(
            target=self._wait,
            args=(line.encode() + b"\n",),
            name=f"holdfast-child-{start.name}",
            daemon=True,
        )
        self._thread.start()

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, and its death was told."""
        return not self._thread.is_alive()

    def is_of(self, process: Process) -> bool:
        """Whether this is that process."""
        return (process.name, process.pid) == (self.name, self.pid)

    def wait_ready(self, ends_at: float) -> Process:
        """The process, when it has said where it listens."""
        if not self._starting.wait(self._ready, ends_at):
            raise UnavailableError("a process did not start in time", **self._facts())
        if self._error is not None:
            raise self._error
        return self._process()

    def ask_to_end(self) -> None:
        """Close its stdin: it ends when it has put its things in order."""
        self._is_asked = True
        assert self._popen.stdin is not None
        if not self._is_told:  # closing would wait for a write that may never end
            self._popen.kill()
            return
        with suppress(OSError, ValueError):
            self._popen.stdin.close()

    def wait_gone(self, ends_at: float) -> None:
        """Wait until it is gone, or until then."""
        if self._thread is not threading.current_thread():
            self._thread.join(max(0.0, ends_at - time.monotonic()))

    def kill(self) -> None:
        """SIGKILL, which a stopped process obeys too; returns when it is gone."""
        self._is_asked = True
        self._popen.kill()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _wait(self, line: bytes) -> None:
        """Tell it what to be, hear where it listens, wait until it dies. The edge of a thread."""
        assert self._popen.stdin is not None and self._popen.stdout is not None
        with suppress(OSError, ValueError):
            self._popen.stdin.write(line)
            self._popen.stdin.flush()
        self._is_told = True
        is_ready = self._hear(self._popen.stdout)
        if is_ready:
            self._ready.set()
        self._popen.stdout.close()
        code = self._popen.wait()
        with suppress(OSError, ValueError):
            self._popen.stdin.close()
        if is_ready:
            if not self._is_asked:
                tail = read_tail(self._log)
                self._told(self._process(), f"{_how(code)}\n{tail}" if tail else _how(code))
            return
        if self._error is None:
            self._error = UnavailableError(
                f"a process {_how(code)} before it was ready", **self._facts()
            )
        self._ready.set()

    def _hear(self, answers: IO[bytes]) -> bool:
        """Whether it has said where it listens; before, it may say that it compiles."""
        with suppress(ValueError, TypeError, AttributeError):
            while "compiling_s" in (found := json.loads(answers.readline())):
                self._starting.tell(float(found["compiling_s"]))
            if ERROR in found:
                self._error = as_error(Message(ERROR, found[ERROR]))
            self._address = found.get("address", "")
        return bool(self._address)

    def _process(self) -> Process:
        return Process(self._start.name, self._start.role, self.pid, self._address)

    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"name": self._start.name, "role": self._start.role}
        tail = read_tail(self._log)
        return {**facts, "stderr": tail} if tail else facts


def _how(code: int) -> str:
    """How a process ended.

    >>> _how(-9), _how(3)
    ('was killed by signal 9', 'ended with code 3')
    """
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
