"""The coordinator: who is a member, who takes a lost one's place, who trains which batch.

    a death or a silence -> fence it -> new epoch -> settle its last flush -> a spare adopts

It runs in the driver. Membership is changed by one thread, one event at a time, so that every
change sees the one before; workers and servers ask it or are told by it over control streams.

Invariants:
- A server is replaced only after its process is surely gone.
- Everyone alive has entered the new epoch before anybody hears where the replacement is.
- Every batch is trained once: a lost worker's push is resolved before its batch goes elsewhere.

Not here: rows (shard.py), decoding (recovery.py), processes (engine.py), the rules for lost workers
(commit.py) and batches (leases.py).
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast import events
from holdfast.cluster.commit import Held, choose_commits
from holdfast.cluster.engine import Engine, Process, Start
from holdfast.cluster.leases import Leases
from holdfast.cluster.message import Message
from holdfast.cluster.pulse import Pulse
from holdfast.cluster.shard import Report, choose_settlement
from holdfast.cluster.spec import ClusterSpec
from holdfast.cluster.view import View
from holdfast.cluster.wire import Caller, Listener, Stream
from holdfast.errors import DataLossError, HoldfastError, InvalidRequestError, UnavailableError

_POLL_S = 1.0  # how long a question for the next view is kept waiting
_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How a cluster is run."""

    spares: int = 1
    two_phase: bool = True
    flush_every_s: float = 0.0
    """Differences wait at least so long, so that those of one row add up."""
    pulse_s: float = 0.5
    """A server silent for so long is taken for dead; 0: only deaths are seen."""


class _GoneError(Exception):
    """A server did not answer while membership was being changed."""

    def __init__(self, server: int) -> None:
        self.server = server
        super().__init__(server)


class Coordinator:
    """The servers of one cluster, kept complete."""

    def __init__(
        self,
        engine: Engine,
        spec: ClusterSpec,
        *,
        token: str,
        settings: Settings | None = None,
        log: events.EventLog | None = None,
        leases: Leases | None = None,
        on_worker_lost: Callable[[int], None] = lambda worker: None,
    ) -> None:
        """``on_worker_lost`` is called, in the membership thread, when a worker's pushes are
        resolved."""
        self.spec = spec
        self.settings = settings or Settings()
        self.log = log or events.EventLog()
        self.leases = leases
        self.failure: HoldfastError | None = None
        self._engine = engine
        self._token = token
        self._on_worker_lost = on_worker_lost
        self._members: dict[int, Process] = {}
        self._spares: list[Process] = []
        self._names = 0
        self._pulses: dict[str, Pulse] = {}
        self._controls: dict[str, Stream] = {}
        self._workers: dict[str, int] = {}
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._view: View | None = None
        self._lost: dict[int, tuple[Process, float]] = {}
        self._deaths = 0  # heard of and not yet acted on
        self._epoch = 1
        self._is_closing = False
        self._listener = Listener(self._handle, token=token)
        self._thread = threading.Thread(target=self._work, name="holdfast-coordinator", daemon=True)

    # The driver's side.

    @property
    def address(self) -> str:
        """Where workers and servers ask."""
        return self._listener.address

    @property
    def view(self) -> View:
        """The members now."""
        assert self._view is not None
        return self._view

    def get_view(self, after: int | None = None) -> View:
        """The members now; with ``after``, waits a while for a newer version than that.

        Raises:
            HoldfastError: what cannot be made good.
        """
        ends_at = time.monotonic() + _POLL_S
        with self._changed:
            while after is not None and self.view.version <= after and not self._is_closing:
                self.check()
                if not self._changed.wait(max(0.0, ends_at - time.monotonic())):
                    break
            self.check()
            return self.view

    def process(self, server: int) -> Process:
        """The process that is a server now."""
        return self._members[server]

    def start(self) -> None:
        """Start all servers and spares, and give the servers their shards."""
        servers = self.spec.servers
        wanted = servers + self.settings.spares
        processes = self._engine.start_many([self._start_order() for _ in range(wanted)])
        self._members = dict(enumerate(processes[:servers]))
        self._spares = processes[servers:]
        addresses = tuple(process.address for process in processes[:servers])
        view = View(self._epoch, addresses, version=1)
        for server, process in self._members.items():
            self._control(process).send(Message("begin", self._meta(server, view)))
        for process in self._members.values():
            self._control(process).receive(deadline_s=600)
        for server, process in enumerate(processes):
            self._tell_started(server if server < servers else -1, process)
        self._publish(view)
        self._thread.start()
        self._engine.watch(self._on_death)

    def join(self, process: Process, worker: int) -> None:
        """A worker process takes part."""
        with self._changed:
            self._workers[process.name] = worker
            if self.leases is not None:
                self.leases.join(worker)
        self.log.emit(events.WorkerStarted(worker=worker, pid=process.pid))

    def wait_whole(self, timeout_s: float) -> None:
        """Wait until no server lacks anything.

        Raises:
            UnavailableError: not within ``timeout_s``.
            HoldfastError: what cannot be made good.
        """
        ends_at = time.monotonic() + timeout_s
        with self._changed:
            while self._deaths or self._lost or self.view.lacking:
                self.check()
                if not self._changed.wait(max(0.0, ends_at - time.monotonic())):
                    raise UnavailableError(
                        "servers are not whole yet", servers=sorted(self.view.lacking)
                    )
            self.check()

    def check(self) -> None:
        """Raise what cannot be made good."""
        if self.failure is not None:
            raise self.failure

    def ask(self, server: int, message: Message) -> Message:
        """Ask a server on a stream of its own."""
        with Stream(
            self.view.addresses[server], token=self._token, name="driver", epoch=None,
            deadline_s=_DEADLINE_S,
        ) as stream:  # fmt: skip
            return stream.ask(message)

    def close(self) -> None:
        """Stop deciding. The engine stops the processes."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        for pulse in self._pulses.values():
            pulse.close()
        for stream in self._controls.values():
            stream.close()
        self._listener.close()

    # Processes.

    def _start_order(self) -> Start:
        self._names += 1
        return Start("server", f"server-{self._names}", {"token": self._token})

    def _meta(self, server: int, view: View) -> dict[str, Any]:
        return {
            "spec": self.spec.to_json(),
            "server": server,
            "view": view.to_json(),
            "coordinator": self.address,
            "flush_every_s": self.settings.flush_every_s,
        }

    def _tell_started(self, server: int, process: Process) -> None:
        self.log.emit(
            events.ServerStarted(
                server=server, name=process.name, pid=process.pid, address=process.address
            )
        )
        if self.settings.pulse_s > 0:
            self._pulses[process.address] = Pulse(
                process.address,
                self._token,
                deadline_s=self.settings.pulse_s,
                on_silent=lambda reason: self._on_death(process, f"silent: {reason}"),
            )

    def _control(self, process: Process) -> Stream:
        stream = self._controls.get(process.address)
        if stream is None or not stream.is_open:
            stream = self._controls[process.address] = Stream(
                process.address, token=self._token, name="coordinator", epoch=None,
                deadline_s=_DEADLINE_S,
            )  # fmt: skip
        return stream

    def _on_death(self, process: Process, how: str) -> None:
        seen = time.monotonic()
        with self._changed:
            self._deaths += 1
        self._queue.put(lambda: self._lose(process, how, seen))

    def _lose(self, process: Process, how: str, seen: float) -> None:
        try:
            if process.role == "worker":
                self._lose_worker(process, how)
            else:
                self._lose_server(process, how, seen)
        finally:
            with self._changed:
                self._deaths -= 1
                self._changed.notify_all()

    # The membership thread.

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                job()
            except Exception as error:  # a thread's edge: nobody can train on
                failure = error if isinstance(error, HoldfastError) else HoldfastError(
                    "the coordinator failed", error=repr(error)
                )  # fmt: skip
                with self._changed:
                    self.failure = self.failure or failure
                    self._changed.notify_all()

    def _lose_server(self, process: Process, how: str, seen: float) -> None:
        self._fence(process)
        if process in self._spares:
            self._spares.remove(process)
            self.log.emit(events.ServerLost(server=-1, pid=process.pid, how=how))
            self._replenish()
            return
        server = next((s for s, member in self._members.items() if member == process), None)
        if server is None or server in self._lost:
            return
        self.log.emit(events.ServerLost(server=server, pid=process.pid, how=how))
        with self._changed:
            self._lost[server] = (process, seen)
        self._replace_lost()

    def _fence(self, process: Process) -> None:
        """Make sure that a process is gone, and forget how to reach it."""
        self._engine.kill(process)
        pulse = self._pulses.pop(process.address, None)
        if pulse is not None:
            pulse.close()
        stream = self._controls.pop(process.address, None)
        if stream is not None:
            stream.close()

    def _replace_lost(self) -> None:
        """Put spares in the place of all lost servers, however many more are lost meanwhile."""
        while self._lost:
            self._check_decodable()
            while len(self._spares) < len(self._lost):
                self._spares.append(self._start_spare())
            chosen = dict(zip(sorted(self._lost), self._spares, strict=False))
            addresses = {server: process.address for server, process in chosen.items()}
            self._epoch += 1  # also after an attempt that some have entered already
            view = self.view.replacing(addresses, epoch=self._epoch)
            try:
                self._move_to(view, chosen)
            except _GoneError as gone:
                self._gone(gone.server, chosen)
                continue
            for server, process in chosen.items():
                _, seen = self._lost[server]
                self._members[server] = process
                self._spares.remove(process)
                self.log.emit(
                    events.ServerReplaced(
                        server=server,
                        pid=process.pid,
                        epoch=view.epoch,
                        seconds=time.monotonic() - seen,
                    )
                )
            with self._changed:
                self._lost.clear()
            self._publish(view)
            for server in chosen:
                try:
                    self._ask(server, Message("recover"))
                except _GoneError:
                    self._gone(server, {})
        self._replenish()

    def _gone(self, server: int, chosen: Mapping[int, Process]) -> None:
        process = chosen.get(server) or self._members[server]
        self._fence(process)
        self.log.emit(events.ServerLost(server=server, pid=process.pid, how="did not answer"))
        if process in self._spares:
            self._spares.remove(process)
        else:
            with self._changed:
                self._lost[server] = (process, time.monotonic())

    def _check_decodable(self) -> None:
        """Raise if more is lost than can be made good."""
        lacking = self.view.lacking | set(self._lost)
        if len(lacking) > self.spec.parity:
            error = DataLossError(
                "more servers are lost than their rows can be decoded without",
                servers=sorted(lacking),
                parity=self.spec.parity,
                todo="restore the last checkpoint, or begin again",
            )
            self.log.emit(events.RowsLost(servers=tuple(sorted(lacking)), error=str(error)))
            raise error

    def _move_to(self, view: View, chosen: Mapping[int, Process]) -> None:
        """Everyone alive enters the epoch; lost servers' flushes are settled; spares adopt."""
        living = [s for s in self._members if s not in self._lost]
        entering = Message("view", {"view": view.to_json()})
        for server in living:
            self._ask(server, entering)
        for server, process in chosen.items():
            reports = self._reports(server, living)
            settled = Message("settle", {"source": server, "number": choose_settlement(reports)})
            for other in living:
                self._ask(other, settled)
            reports = self._reports(server, living)
            meta = self._meta(server, view)
            meta["reports"] = [[other, report.flushed] for other, report in reports.items()]
            arrays = tuple(report.marks_GW for report in reports.values())
            self._ask_process(server, process, Message("adopt", meta, arrays))

    def _reports(self, lost: int, living: list[int]) -> dict[int, Report]:
        reports = {}
        for server in living:
            answer = self._ask(server, Message("report", {"source": lost}))
            meta = answer.meta
            reports[server] = Report(
                meta["flushed"], meta["kept"], tuple(meta["receivers"]), answer.arrays[0]
            )
        return reports

    def _ask(self, server: int, message: Message) -> Message:
        return self._ask_process(server, self._members[server], message)

    def _ask_process(self, server: int, process: Process, message: Message) -> Message:
        try:
            return self._control(process).ask(message)
        except UnavailableError as error:
            raise _GoneError(server) from error

    def _publish(self, view: View) -> None:
        with self._changed:
            self._view = view
            self._changed.notify_all()

    def _start_spare(self) -> Process:
        process = self._engine.start_many([self._start_order()])[0]
        self._tell_started(-1, process)
        return process

    def _replenish(self) -> None:
        """Start spares in the background, until there are as many as wanted."""
        missing = self.settings.spares - len(self._spares)
        if missing <= 0 or self._is_closing:
            return

        def start() -> None:
            for _ in range(missing):
                self._queue.put(functools.partial(self._spares.append, self._start_spare()))

        threading.Thread(target=start, name="holdfast-spares", daemon=True).start()

    # What servers report.

    def _progressed(self, meta: Mapping[str, Any]) -> None:
        server, what = int(meta["server"]), str(meta["what"])
        if self._members[server].address != meta["address"] or server in self._lost:
            return
        view = self.view
        if what == "range":
            self.log.emit(
                events.RangeRecovered(
                    server=server,
                    granule=int(meta["granule"]),
                    rows=int(meta["rows"]),
                    left=int(meta["left"]),
                    seconds=float(meta["seconds"]),
                )
            )
            return
        if what in ("lost", "failed"):
            raise DataLossError("a server cannot be recovered", server=server,
                                error=str(meta["error"]))  # fmt: skip
        view = view.with_rows(server) if what == "rows" else view.with_parities(server)
        seconds = float(meta["seconds"])
        self._publish(view)
        self.log.emit(events.ServerRecovered(server=server, what=what, seconds=seconds))
        entering = Message("view", {"view": view.to_json()})
        try:
            for member in self._members:
                self._ask(member, entering)
        except _GoneError as gone:
            self._lose_server(self._members[gone.server], "did not answer", time.monotonic())

    # Lost workers.

    def _lose_worker(self, process: Process, how: str) -> None:
        worker = self._workers.pop(process.name, None)
        if worker is None:
            return
        try:
            held = {}
            for server in self._members:
                answer = self._ask(server, Message("bar", {"worker": worker}))
                held[server] = Held(tuple(answer.meta["staged"]), int(answer.meta["applied"]))
            commits, applied = choose_commits(held)
            meta = {"worker": worker, "commit": sorted(commits)}
            for server in self._members:
                self._ask(server, Message("resolve", meta))
        except _GoneError as gone:
            # First the server, then this worker again.
            self._workers[process.name] = worker
            self._lose_server(self._members[gone.server], "did not answer", time.monotonic())
            self._queue.put(lambda: self._lose_worker(process, how))
            return
        batches: list[int] = []
        if self.leases is not None:
            with self._changed:
                batches = self.leases.lost(worker, committed=applied)
        self.log.emit(
            events.WorkerLost(worker=worker, pid=process.pid, how=how, batches=tuple(batches))
        )
        self._on_worker_lost(worker)

    # What workers and servers ask.

    def _handle(self, caller: Caller, message: Message) -> Message:
        meta = message.meta
        match message.kind:
            case "view":
                return Message("view", {"view": self.get_view(meta.get("after")).to_json()})
            case "progress":
                self._queue.put(lambda: self._progressed(meta))
                return Message("heard")
            case "turn":
                return self._answer_turn(int(meta["worker"]))
            case "lease":
                return self._answer_lease(int(meta["worker"]), meta.get("done"))
        raise InvalidRequestError("unknown kind of message", kind=message.kind)


    def _answer_turn(self, worker: int) -> Message:
        """A worker has staged: may it commit? Waits a while for its turn."""
        ends_at = time.monotonic() + _POLL_S
        with self._changed:
            leases = self.leases
            if leases is None or leases.open_number(worker) is None:
                raise InvalidRequestError("this worker has no batch", worker=worker)
            leases.stage(worker)
            self._changed.notify_all()
            while not leases.may_commit(worker):
                self.check()
                if not self._changed.wait(max(0.0, ends_at - time.monotonic())):
                    return Message("wait")
        return Message("turn")

    def _answer_lease(self, worker: int, done: int | None) -> Message:
        with self._changed:
            self.check()
            if self.leases is None:
                raise InvalidRequestError("this cluster has no batches to give")
            if done is not None:
                self.leases.done(worker, int(done))
                self._changed.notify_all()
            lease = self.leases.next(worker)
            if lease is None:
                return Message("over" if self.leases.is_over else "wait")
            return Message("lease", {"number": lease.number, "batch": lease.batch})
