"""The coordinator: who is a member, who takes a lost one's place, who trains which batch.

    a death or a silence -> fence it -> new epoch -> settle its last flush -> a spare adopts
    more than parity makes up for -> the second layer -> spares load -> all parities anew

It runs in the driver. Membership is changed by one thread, one event at a time, so that every
change sees the one before; workers and servers ask it or are told by it over control streams.

Invariants:
- A server is replaced only after its process is surely gone.
- Everyone alive has entered the new epoch before anybody hears where the replacement is.
- Every batch is trained once: a lost worker's push is resolved before its batch goes elsewhere.
- Nobody is told of a server whose rows neither it nor its stripes have: it loads them first.

Not here: rows (shard.py), decoding (recovery.py), processes and streams to them (members.py),
workers and batches (crew.py), going back to a checkpoint (fallback.py).
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Mapping

from holdfast import events
from holdfast.cluster.crew import Crew
from holdfast.cluster.engine import Engine, Process
from holdfast.cluster.fallback import Fallback, Restore, SecondLayer
from holdfast.cluster.flush import Report, choose_settlement, remember
from holdfast.cluster.kinds import COORDINATOR_KINDS, check_sender, role_of
from holdfast.cluster.leases import Leases
from holdfast.cluster.machines import LOOPBACK
from holdfast.cluster.members import GoneError, Members
from holdfast.cluster.members import Settings as Settings
from holdfast.cluster.message import Message
from holdfast.cluster.numbers import refusing_malformed, whole, worker_of
from holdfast.cluster.progress import FAILED, LOST, PARITIES, RANGE, ROWS, Progress
from holdfast.cluster.resolution import Resolution
from holdfast.cluster.spec import ClusterSpec
from holdfast.cluster.view import View
from holdfast.cluster.wire import Caller, Listener
from holdfast.errors import DataLossError, HoldfastError, InvalidRequestError, UnavailableError

_POLL_S = 1.0  # how long a question for the next view is kept waiting


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
        on_rewound: Callable[[], None] = lambda: None,
        count_workers: Callable[[], int] = lambda: 0,
    ) -> None:
        """In the membership thread ``on_worker_lost`` is called when a worker's pushes are
        resolved, ``on_rewound`` when all workers were stopped and training begins again at a
        checkpoint; ``count_workers`` says how many numbers of workers were given out."""
        self.spec = spec
        self.settings = settings or Settings()
        self.log = log or events.EventLog()
        self.failure: HoldfastError | None = None
        self._engine = engine
        self._on_worker_lost = on_worker_lost
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._deaths = 0  # heard of and not yet acted on
        self._is_closing = False
        self._listener = Listener(
            self._handle,
            token=token,
            host=engine.host,
            allow_remote=engine.host not in LOOPBACK,
            kinds=COORDINATOR_KINDS,
        )
        self._servers = Members(
            engine,
            spec,
            token=token,
            settings=self.settings,
            log=self.log,
            changed=self._changed,
            coordinator=self._listener.address,
            on_death=self._on_death,
        )
        self._members, self._lost = self._servers.members, self._servers.lost
        self._known: dict[int, dict[int, Report]] = {}
        self._resolution = Resolution(
            spec,
            self._servers,
            has_rounds=lambda: self.leases is not None and self.leases.has_rounds,
        )
        self.crew = Crew(
            engine,
            log=self.log,
            changed=self._changed,
            check=self.check,
            count_workers=count_workers,
        )
        self.crew.leases = leases
        self._fallback = Fallback(
            spec,
            self._servers,
            self.crew,
            log=self.log,
            on_loaded=self._on_loaded,
            on_rewound=on_rewound,
        )
        self._thread = threading.Thread(target=self._work, name="holdfast-coordinator", daemon=True)

    # The driver's side.

    @property
    def address(self) -> str:
        """Where workers and servers ask."""
        return self._listener.address

    @property
    def view(self) -> View:
        """The members now."""
        return self._servers.view

    @property
    def leases(self) -> Leases | None:
        """The batches that are trained now, or were last."""
        return self.crew.leases

    @leases.setter
    def leases(self, leases: Leases | None) -> None:
        self.crew.leases = leases

    @property
    def second(self) -> SecondLayer | None:
        """What to fall back to."""
        return self._fallback.second

    @second.setter
    def second(self, second: SecondLayer | None) -> None:
        self._fallback.second = second

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
        self._servers.start()
        self._thread.start()
        self._engine.watch(self._on_death)

    def join(self, process: Process, worker: int) -> None:
        """A worker process takes part."""
        if not self.crew.join(process, worker):
            self._on_death(process, "ended before it took part")

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
        return self._servers.ask_apart({server: message})[server]

    def ask_all(self, messages: Mapping[int, Message]) -> dict[int, Message]:
        """Ask several servers at once; raises what one of them answers."""
        return self._servers.ask_apart(messages)

    @property
    def is_complete(self) -> bool:
        """Whether every server that is known to be lost has been replaced."""
        with self._changed:
            return not (self._deaths or self._lost)

    @property
    def is_steady(self) -> bool:
        """Whether no server is lost and none lacks rows."""
        with self._changed:
            return not (self._deaths or self._lost or self.view.lacks_rows)

    def close(self) -> None:
        """Stop deciding. The engine stops the processes."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        self._servers.close()
        self._listener.close()

    # Deaths.

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
        servers = self._servers
        servers.fence(process)
        if process in servers.spares:
            servers.spares.remove(process)
            self.log.emit(events.ServerLost(server=-1, pid=process.pid, how=how))
            self._replenish()
            return
        server = next((s for s, member in self._members.items() if member == process), None)
        if server is None or server in self._lost:
            return
        self.log.emit(events.ServerLost(server=server, pid=process.pid, how=how))
        servers.lose(server, seen)
        self._replace_lost()

    def _replace_lost(self) -> None:
        """Put spares in the place of all lost servers, however many more are lost meanwhile."""
        self._replace_decodable()
        while self._lost:
            self._fallback.restore()
            self._replace_decodable()
        self._replenish()

    def _replenish(self) -> None:
        """Start spares, unless one more loss could not be decoded anyway: then the start of a
        process would only take time from those who make good the last one."""
        lacking = self._servers.lacking()
        others = set(self._members) - lacking
        if not lacking or any(self.spec.can_decode(lacking | {other}) for other in others):
            self._servers.replenish(self._queue.put)

    def _replace_decodable(self) -> None:
        """The same, as long as their rows can be decoded from the others'."""
        while self._lost or not self._resolution.is_handed_on:
            if not self._lost:
                self._hand_on_pushes()
            elif self.spec.can_decode(self._servers.lacking()):
                self._replace_once()
            else:
                return

    def _replace_once(self) -> None:
        chosen, view = self._servers.choose_spares()
        try:
            self._move_to(view, chosen)
        except GoneError as gone:
            self._servers.gone(gone.server, chosen)
            return
        self._servers.take_over(view, chosen)
        self._resolution.replaced(chosen)
        self._servers.tell_to_recover(chosen)

    def _hand_on_pushes(self) -> None:
        try:
            self._resolution.hand_on()
        except GoneError as gone:
            self._servers.gone(gone.server, {})

    def go_back(self, restore: Restore) -> None:
        """Bring everybody to a checkpoint; returns when their rows are loaded.

        Raises:
            HoldfastError: it cannot be loaded.
        """
        is_over = threading.Event()
        errors: list[BaseException] = []

        def work() -> None:
            try:
                self._fallback.restore_from(dataclasses.replace(restore, is_partial=False))
                self._replenish()
            except BaseException as error:
                errors.append(error)
                raise  # half of the servers may be of another time
            finally:
                is_over.set()

        self._queue.put(work)
        is_over.wait()
        if errors:
            raise errors[0]

    def _move_to(self, view: View, chosen: Mapping[int, Process]) -> None:
        """Everyone alive enters the epoch; lost servers' flushes are settled; spares adopt."""
        living = [s for s in self._members if s not in self._lost]
        entering = Message("view", {"view": view.to_json()})
        self._servers.ask_each(living, entering)
        for server, process in chosen.items():
            reports = self._reports(server, living)
            settled = Message("settle", {"source": server, "number": choose_settlement(reports)})
            self._servers.ask_each(living, settled)
            reports = self._reports(server, living)
            meta = self._servers.meta(server, view)
            known = self._known[server] = remember(self._known.get(server, {}), reports)
            meta["reports"] = [[other, report.flushed] for other, report in known.items()]
            meta["barred"] = self.crew.retired
            arrays = tuple(report.marks_GW for report in known.values())
            self._servers.ask_process(server, process, Message("adopt", meta, arrays))

    def _reports(self, lost: int, living: list[int]) -> dict[int, Report]:
        reports = {}
        answers = self._servers.ask_each(living, Message("report", {"source": lost}))
        for server, answer in answers.items():
            meta = answer.meta
            reports[server] = Report(
                meta["flushed"], meta["kept"], tuple(meta["receivers"]), answer.arrays[0]
            )
        return reports

    def _on_loaded(self, server: int) -> None:
        """A server's rows are of the past: nothing that was known of them, or owed to it, holds."""
        self._known.pop(server, None)
        self._resolution.loaded(server)

    # What servers report.

    def _progressed(self, progress: Progress) -> None:
        server, what = progress.server, progress.what
        view = self.view
        if view.joined[server] != progress.joined or server in self._lost:
            return
        if what == RANGE:
            self.log.emit(
                events.RangeRecovered(
                    server=server,
                    granule=progress.granule,
                    rows=progress.rows,
                    left=progress.left,
                    seconds=progress.seconds,
                )
            )
            return
        if what in (LOST, FAILED):
            raise DataLossError("a server cannot be recovered", server=server,
                                error=progress.error)  # fmt: skip
        if what == ROWS and server not in view.lacks_rows:
            return  # it only builds parities anew
        if what == PARITIES and progress.renewal != self._servers.renewals:
            return  # they are void by now, and it was told so
        view = view.with_rows(server) if what == ROWS else view.with_parities(server)
        self._servers.publish(view)
        self.log.emit(events.ServerRecovered(server=server, what=what, seconds=progress.seconds))
        entering = Message("view", {"view": view.to_json()})
        try:
            self._servers.ask_each(self._members, entering)
        except GoneError as gone:
            self._lose_server(self._members[gone.server], "did not answer", time.monotonic())
        self._replenish()

    # Lost workers.

    def _lose_worker(self, process: Process, how: str) -> None:
        worker = self.crew.leave(process)
        if worker is None:
            return
        try:
            last = self._resolution.resolve(worker)
        except GoneError as gone:
            # First the server, then this worker again.
            self.crew.stay(process, worker)
            self._on_death(process, how)  # counted, until it is resolved
            self._lose_server(self._members[gone.server], "did not answer", time.monotonic())
            return
        batches = self.crew.retire(worker, committed=last)
        self.log.emit(
            events.WorkerLost(worker=worker, pid=process.pid, how=how, batches=tuple(batches))
        )
        self._on_worker_lost(worker)

    # What workers and servers ask.

    def _handle(self, caller: Caller, message: Message) -> Message:
        check_sender(COORDINATOR_KINDS, caller, message)
        with refusing_malformed(message.kind):
            return self._answer(caller, message)

    def _answer(self, caller: Caller, message: Message) -> Message:
        meta = message.meta
        match message.kind:
            case "view":
                after = meta.get("after")
                after = None if after is None else whole(after)
                return Message("view", {"view": self.get_view(after).to_json()})
            case "progress":
                progress = Progress.from_json(meta, servers=self.spec.servers)
                if progress.server != role_of(caller)[1]:
                    raise InvalidRequestError("a server speaks for itself", caller=caller.name)
                self._queue.put(lambda: self._progressed(progress))
                return Message("heard")
            case "turn":
                return self.crew.answer_turn(worker_of(meta["worker"]))
            case "lease":
                done = meta.get("done")
                done = None if done is None else whole(done)
                return self.crew.answer_lease(worker_of(meta["worker"]), done)
        raise AssertionError(message.kind)
