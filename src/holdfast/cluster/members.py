"""The servers of a cluster as processes: members, spares and lost ones, and how to speak to them.

    lost -> fence -> choose spares -> (others make them ready) -> take over -> everybody sees

Invariants:
- A process that is fenced is surely gone.
- The view is published whole; epochs rise.

Not here: what happens to rows when a server is lost (coordinator.py, fallback.py), processes
(engine.py), workers (crew.py). Only the membership thread changes members.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast import events
from holdfast.cluster.engine import Engine, OnDeath, Process, Start
from holdfast.cluster.message import Message
from holdfast.cluster.pace import check_share
from holdfast.cluster.pulse import Pulse
from holdfast.cluster.spec import ClusterSpec
from holdfast.cluster.view import View
from holdfast.cluster.wire import Stream
from holdfast.errors import HoldfastError, UnavailableError

_DEADLINE_S = 30.0
_BEGIN_S = 600.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How a cluster is run."""

    spares: int = 1
    two_phase: bool = True
    flush_every_s: float = 2.0
    """Differences leave a server so seldom, so that those of one row add up."""
    pulse_s: float = 0.5
    """A server silent for so long is taken for dead; 0: only deaths are seen."""
    recovery_share: float = 0.03
    """Of the time, that bringing a lost server back takes while workers pull or push there."""

    def __post_init__(self) -> None:
        check_share(self.recovery_share)


class GoneError(Exception):
    """A server did not answer while membership was being changed."""

    def __init__(self, server: int) -> None:
        self.server = server
        super().__init__(server)


class Members:
    """Who is a server, who could be, and who was."""

    def __init__(
        self,
        engine: Engine,
        spec: ClusterSpec,
        *,
        token: str,
        settings: Settings,
        log: events.EventLog,
        changed: threading.Condition,
        coordinator: str,
        on_death: OnDeath,
    ) -> None:
        """``changed`` is told of every change; ``coordinator`` is where servers report to."""
        self.members: dict[int, Process] = {}
        self.spares: list[Process] = []
        self.lost: dict[int, tuple[Process, float]] = {}
        self.renewals = 0  # of all parities
        self._engine, self._spec, self._settings, self._log = engine, spec, settings, log
        self._token, self._coordinator, self._on_death = token, coordinator, on_death
        self._changed = changed
        self._names = itertools.count(1)  # spares are started by several threads
        self._epoch = 1
        self._view: View | None = None
        self._pulses: dict[str, Pulse] = {}
        self._controls: dict[str, Stream] = {}
        self._starting: list[threading.Thread] = []
        self._coming = 0  # spares that are being started
        self._is_closing = False

    @property
    def view(self) -> View:
        """The members now."""
        assert self._view is not None
        return self._view

    def start(self) -> None:
        """Start all servers and spares, and give the servers their shards."""
        servers = self._spec.servers
        wanted = servers + self._settings.spares
        processes = self._engine.start_many([self._start_order() for _ in range(wanted)])
        self.members.update(enumerate(processes[:servers]))
        self.spares += processes[servers:]
        addresses = tuple(process.address for process in processes[:servers])
        view = View(self._epoch, addresses, version=1)
        for server, process in self.members.items():
            self._control(process).send(Message("begin", self.meta(server, view)))
        for process in self.members.values():
            self._control(process).receive(deadline_s=_BEGIN_S)
        for server, process in enumerate(processes):
            self._tell_started(server if server < servers else -1, process)
        self._make_ready(self.spares)
        self.publish(view)

    def close(self) -> None:
        """Watch and speak to nobody any more."""
        self._is_closing = True
        for thread in self._starting:
            thread.join(timeout=10)
        for pulse in list(self._pulses.values()):
            pulse.close()
        for stream in list(self._controls.values()):
            stream.close()

    # Speaking to them.

    def ask_apart(self, messages: Mapping[int, Message]) -> dict[int, Message]:
        """Ask servers at once, on streams of their own.

        Raises:
            HoldfastError: one is gone, or answers with an error.
        """
        with contextlib.ExitStack() as stack:
            streams = {}
            for server, message in messages.items():
                streams[server] = stack.enter_context(
                    Stream(self.view.addresses[server], token=self._token, name="driver",
                           epoch=None, deadline_s=_DEADLINE_S)
                )  # fmt: skip
                streams[server].send(message)
            return {server: stream.receive() for server, stream in streams.items()}

    def ask(self, server: int, message: Message) -> Message:
        """Ask a member on its control stream.

        Raises:
            GoneError: it does not answer.
        """
        return self.ask_process(server, self.members[server], message)

    def ask_each(self, servers: Collection[int], message: Message) -> dict[int, Message]:
        """Ask members the same at once; raises as ``ask``, when all have answered or failed."""
        answers: dict[int, Message] = {}
        failures: list[Exception] = []
        asked = {}
        for server in servers:
            try:
                stream = self._control(self.members[server])
                stream.send(message)
                asked[server] = stream
            except UnavailableError:
                failures.append(GoneError(server))
        for server, stream in asked.items():
            try:
                answers[server] = stream.receive()
            except UnavailableError:
                failures.append(GoneError(server))
            except HoldfastError as error:  # what it answered
                failures.append(error)
        if failures:
            raise failures[0]
        return answers

    def ask_process(self, server: int, process: Process, message: Message) -> Message:
        """Ask a process that is, or will be, a server; raises as ``ask``."""
        try:
            return self._control(process).ask(message)
        except UnavailableError as error:
            raise GoneError(server) from error

    def _control(self, process: Process) -> Stream:
        stream = self._controls.get(process.name)
        if stream is None or not stream.is_open:
            stream = self._controls[process.name] = Stream(
                process.address, token=self._token, name="coordinator", epoch=None,
                deadline_s=_DEADLINE_S,
            )  # fmt: skip
        return stream

    def publish(self, view: View) -> None:
        """From now on this is the view."""
        with self._changed:
            self._view = view
            self._changed.notify_all()

    # Losing and replacing them.

    def _start_order(self) -> Start:
        return Start("server", f"server-{next(self._names)}", {"token": self._token})

    def meta(self, server: int, view: View) -> dict[str, Any]:
        """What a process must know to be a server."""
        return {
            "spec": self._spec.to_json(),
            "server": server,
            "view": view.to_json(),
            "coordinator": self._coordinator,
            "flush_every_s": self._settings.flush_every_s,
            "recovery_share": self._settings.recovery_share,
            "two_phase": self._settings.two_phase,
            "renewal": self.renewals,
        }

    def _tell_started(self, server: int, process: Process) -> None:
        self._log.emit(
            events.ServerStarted(
                server=server, name=process.name, pid=process.pid, address=process.address
            )
        )
        if self._settings.pulse_s > 0:
            self._pulses[process.name] = Pulse(
                process.address,
                self._token,
                deadline_s=self._settings.pulse_s,
                on_silent=lambda reason: self._on_death(process, f"silent: {reason}"),
            )

    def _start_spares(self, count: int) -> list[Process]:
        processes = self._engine.start_many([self._start_order() for _ in range(count)])
        for process in processes:
            self._tell_started(-1, process)
        self._make_ready(processes)
        return processes

    def _make_ready(self, spares: Collection[Process]) -> None:
        """Have spares reserve memory, meanwhile; one that is gone will be noticed."""
        for process in spares:
            with contextlib.suppress(UnavailableError):
                self._control(process).ask(Message("reserve", {"spec": self._spec.to_json()}))

    def replenish(self, later: Callable[[Callable[[], None]], None]) -> None:
        """Start spares in the background, until there are as many as wanted; ``later`` hands them
        to the membership thread."""
        missing = self._settings.spares - len(self.spares) - self._coming
        if missing <= 0 or self._is_closing:
            return
        self._coming += missing

        def come(processes: list[Process]) -> None:
            self._coming -= 1
            self.spares.extend(processes)

        def start() -> None:
            for _ in range(missing):
                processes: list[Process] = []
                try:
                    if not self._is_closing:
                        processes = self._start_spares(1)
                finally:
                    later(functools.partial(come, processes))

        thread = threading.Thread(target=start, name="holdfast-spares", daemon=True)
        self._starting = [each for each in self._starting if each.is_alive()] + [thread]
        thread.start()

    def fence(self, process: Process) -> None:
        """Make sure that a process is gone, and forget how to reach it."""
        self._engine.kill(process)
        pulse = self._pulses.pop(process.name, None)
        if pulse is not None:
            pulse.close()
        stream = self._controls.pop(process.name, None)
        if stream is not None:
            stream.close()

    def lacking(self) -> frozenset[int]:
        """Servers that are lost, or not whole yet."""
        return self.view.lacking | set(self.lost)

    def choose_spares(self) -> tuple[dict[int, Process], View]:
        """A spare for each lost server, and the view of the next epoch."""
        missing = len(self.lost) - len(self.spares)
        if missing > 0:
            self.spares += self._start_spares(missing)
        chosen = dict(zip(sorted(self.lost), self.spares, strict=False))
        addresses = {server: process.address for server, process in chosen.items()}
        self._epoch += 1  # also after an attempt that some have entered already
        return chosen, self.view.replacing(addresses, epoch=self._epoch)

    def take_over(self, view: View, chosen: Mapping[int, Process]) -> None:
        """Everybody is ready: from now on spares are the servers."""
        for server, process in chosen.items():
            _, seen = self.lost[server]
            self.members[server] = process
            self.spares.remove(process)
            self._log.emit(
                events.ServerReplaced(
                    server=server,
                    pid=process.pid,
                    epoch=view.epoch,
                    seconds=time.monotonic() - seen,
                )
            )
        with self._changed:  # both at once: else a lost server would be whole for a moment
            self.lost.clear()
            self.publish(view)

    def tell_to_recover(self, servers: Collection[int]) -> None:
        """Have servers bring back what they lack; one that does not answer is lost."""
        for server in servers:
            try:
                self.ask(server, Message("recover"))
            except GoneError:
                self.gone(server, {})

    def lose(self, server: int, seen: float) -> None:
        """A member is lost; its process is surely gone."""
        with self._changed:
            self.lost[server] = (self.members[server], seen)

    def gone(self, server: int, chosen: Mapping[int, Process]) -> None:
        """A member, or the spare chosen in its place, did not answer: it is lost."""
        process = chosen.get(server) or self.members[server]
        self.fence(process)
        self._log.emit(events.ServerLost(server=server, pid=process.pid, how="did not answer"))
        if process in self.spares:
            self.spares.remove(process)
        else:
            self.lose(server, time.monotonic())
