"""An engine whose servers are threads of this process: the real protocol, killed in no time."""

from __future__ import annotations

import itertools
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from holdfast.cluster.engine import OnDeath, Process, Start
from holdfast.cluster.message import Message
from holdfast.cluster.server import Server
from holdfast.cluster.wire import Caller
from holdfast.errors import UnavailableError

When = Literal["before", "after"]


class ThreadEngine:
    """Runs servers in this process. ``crash`` is a SIGKILL: nothing is put in order."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self.servers: dict[str, Server] = {}
        self._processes: dict[str, Process] = {}
        self._watchers: list[OnDeath] = []
        self._pids = itertools.count(1)
        self._closing: list[threading.Thread] = []

    def start(self, role: str, name: str, spec: Mapping[str, Any]) -> Process:
        server = self.make_server(spec)
        process = Process(name, role, next(self._pids), server.address)
        self.servers[name] = server
        self._processes[name] = process
        return process

    def make_server(self, spec: Mapping[str, Any]) -> Server:
        return Server(str(spec["token"]))

    def start_many(self, starts: Sequence[Start]) -> list[Process]:
        return [self.start(each.role, each.name, each.spec) for each in starts]

    def watch(self, on_death: OnDeath) -> None:
        self._watchers.append(on_death)

    def crash(self, process: Process, *, is_seen: bool = True) -> None:
        """The process is gone at once; whoever watches hears of it."""
        self.kill(process)
        if is_seen:
            for on_death in self._watchers:
                on_death(process, "was killed by signal 9")

    def kill(self, process: Process) -> None:
        server = self.servers.pop(process.name, None)
        if server is not None:
            server._is_closing = True  # answers nothing from here on
            thread = threading.Thread(target=server.close, daemon=True)
            thread.start()
            self._closing.append(thread)

    def stop(self) -> None:
        for process in list(self._processes.values()):
            self.kill(process)
        for thread in self._closing:
            thread.join(timeout=10)


class CrashingEngine(ThreadEngine):
    """A ThreadEngine whose servers ask at each message whether they crash."""

    @abstractmethod
    def choose(self, process: Process, kind: str) -> When | None:
        """Whether a server is to crash at this message: before or after it acts."""

    def start(self, role: str, name: str, spec: Mapping[str, Any]) -> Process:
        process = super().start(role, name, spec)
        handlers = self.servers[name]._handlers
        for kind, handler in list(handlers.items()):
            handlers[kind] = self._wrapped(process, kind, handler)
        return process

    def _wrapped(
        self, process: Process, kind: str, handler: Callable[[Caller, Message], Message]
    ) -> Callable[[Caller, Message], Message]:
        def wrapped(caller: Caller, message: Message) -> Message:
            when = self.choose(process, kind)
            if when is None:
                return handler(caller, message)
            if when == "after":
                handler(caller, message)
            self.crash(process)
            raise UnavailableError("crashed")

        return wrapped
