"""An embedding server: answers messages about its shard, and sends differences to parity servers.

    worker -> pull | push | stage, commit      coordinator -> begin | adopt | view | report | settle
    server -> fold, apply | freeze, fetch, thaw    driver -> prepare | snapshot, store | load | job

Invariants:
- A row that is not here yet is decoded before it is read or changed.
- What a thread of this server's fails of is told to the coordinator: nobody waits for it in vain.
- This process never imports torch.

Not here: what a shard does (shard.py), how messages travel (wire.py), flushes on their way
(delivery.py), what others' recovery is given (giver.py), what there is of lost ones' pushes
(trustee.py), checkpoints (keeper.py), who is alive (coordinator.py).

# N rows of a request, G ranges, W workers
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from holdfast.cluster import numbers, parts
from holdfast.cluster.delivery import Delivery
from holdfast.cluster.giver import Giver
from holdfast.cluster.keeper import Keeper, LoadOrder
from holdfast.cluster.kinds import SERVER, SERVER_KINDS, check_sender, role_of
from holdfast.cluster.message import Message
from holdfast.cluster.orders import ServerOrder, check_fits, check_next, check_view, renewal_of
from holdfast.cluster.peers import Peers, PipedPeers
from holdfast.cluster.progress import FAILED, LOST, Progress
from holdfast.cluster.pushes import Gradients, Part
from holdfast.cluster.recovery import Recovery, StoppedError
from holdfast.cluster.reserve import Reserve, reserve_for
from holdfast.cluster.shard import Renewal, Shard
from holdfast.cluster.spec import ClusterSpec
from holdfast.cluster.trustee import Trustee
from holdfast.cluster.view import View
from holdfast.cluster.warm import warm_kernels, warm_sum
from holdfast.cluster.wire import Caller, Listener, Stream
from holdfast.errors import (
    ConflictError,
    DataLossError,
    InvalidRequestError,
    UnavailableError,
)


class Server:
    """One server process's work; it knows its shard once it is told to begin or to adopt."""

    def __init__(
        self, token: str, *, host: str = "127.0.0.1", port: int = 0, allow_remote: bool = False
    ) -> None:
        self._token = token
        self._shard: Shard | None = None
        self._view: View | None = None
        self._recovery: Recovery | None = None
        self._flush_every_s = 0.0
        self._has_changed = threading.Condition()
        self._is_closing = False
        self._is_serving = False
        self._threads: list[threading.Thread] = []
        self._coordinator = ""
        self._sweeps = 0  # asked for; one thread makes them all
        self._bytes = Counter[str]()  # of arrays in messages, by who asked
        self._swept = 0  # the renewal whose parities are built
        self._memory = Reserve()
        self._giver = Giver(lambda: self.shard)
        self._keeper = Keeper(lambda: self.shard)
        self._trustee = Trustee(
            lambda: self.shard,
            apply=lambda worker, number, part: self._change(worker, number, part, is_resolved=True),
            spawn=self._spawn,
        )
        self._handlers: dict[str, Callable[[Caller, Message], Message]] = {
            "reserve": self._reserve,
            "begin": self._begin,
            "adopt": self._adopt,
            "recover": self._recover,
            "view": self._enter,
            "report": self._report,
            "settle": self._settle,
            "pull": self._pull,
            "stage": self._stage,
            "commit": self._commit,
            "push": self._push,
            "present": self._bring,
            "assign": self._assign,
            "supply": self._supply,
            "read": self._read,
            "bar": self._trustee.bar,
            "held": self._trustee.held,
            "past": self._past,
            "resolve": self._trustee.resolve,
            "copies": self._trustee.copies,
            "owed": self._trustee.owed,
            "entrust": self._trustee.entrust,
            "inherit": self._trustee.inherit,
            "fold": self._fold,
            "apply": self._apply,
            "freeze": self._freeze,
            "thaw": self._thaw,
            "fetch": self._giver.fetch,
            "handover": self._giver.open,
            "slab": self._giver.slab,
            "drain": self._drain,
            "stats": self._stats,
            "load": self._load,
            "prepare": self._keeper.prepare,
            "snapshot": self._keeper.snapshot,
            "store": self._keeper.store,
            "job": self._keeper.ask_job,
        }
        self._listener = Listener(
            self._handle,
            token=token,
            host=host,
            port=port,
            allow_remote=allow_remote,
            kinds=SERVER_KINDS,
        )

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._listener.address

    @property
    def shard(self) -> Shard:
        """What it holds.

        Raises:
            ConflictError: nothing yet; whoever asks may know of a place it has not taken yet.
        """
        if self._shard is None:
            raise ConflictError("this server holds nothing yet", todo="ask again")
        return self._shard

    def close(self) -> None:
        """Stop answering; threads end."""
        with self._has_changed:
            self._is_closing = True
            self._has_changed.notify_all()
        if self._shard is not None:
            self._shard.close()
        self._listener.close()
        self._keeper.close()
        if self._recovery is not None:
            self._recovery.close()
        for thread in self._threads:
            thread.join(timeout=5)

    def _handle(self, caller: Caller, message: Message) -> Message:
        if self._is_closing:
            raise UnavailableError("this server is closing")
        servers = None if self._shard is None else self._shard.spec.servers
        check_sender(SERVER_KINDS, caller, message, servers=servers)
        try:
            with numbers.refusing_malformed(message.kind):
                answer = self._handlers[message.kind](caller, message)
        except StoppedError as error:
            raise UnavailableError("this server is closing") from error
        self._count(caller, message, answer)
        return answer

    def _count(self, caller: Caller, *messages: Message) -> None:
        """Bytes of rows that went between this server and workers, or came here from servers."""
        role, _ = role_of(caller)
        size = sum(array.nbytes for message in messages for array in message.arrays)
        if role and size:
            with self._has_changed:
                self._bytes[role] += size

    # Membership.

    def _reserve(self, _: Caller, message: Message) -> Message:
        """Have memory ready for a shard; answers at once."""
        spec = ClusterSpec.from_json(message.meta["spec"])
        check_fits(spec, 0)
        if self._shard is None:
            self._memory = reserve_for(spec)
            self._spawn(self._memory.touch, "holdfast-reserve")
        return Message("reserved", {"bytes": self._memory.left})

    def _begin(self, _: Caller, message: Message) -> Message:
        order = self._take_order(message)
        shard = self._make_shard(order)
        shard.begin()
        self._hold(shard, order)
        self._serve()
        return Message("begun")

    def _adopt(self, _: Caller, message: Message) -> Message:
        order = self._take_order(message)
        reports = parts.unpack_reports(message, order.spec)
        barred = [numbers.worker_of(worker) for worker in message.meta.get("barred", ())]
        shard = self._make_shard(order)
        shard.adopt(reports, barred)
        self._hold(shard, order)
        return Message("adopted")

    def _load(self, _: Caller, message: Message) -> Message:
        """Begin to load a lost server's rows from a checkpoint, to take its place after."""
        order = self._take_order(message)
        loading = LoadOrder.from_json(message.meta)
        shard = self._make_shard(order)
        return self._keeper.load(shard, loading, lambda: self._hold(shard, order))

    def _take_order(self, message: Message) -> ServerOrder:
        if self._is_serving:
            raise InvalidRequestError("this server holds a shard already")
        order = ServerOrder.from_json(message.meta)
        if order.view.epoch < self._listener.epoch:
            raise InvalidRequestError("this server is in a later epoch", now=self._listener.epoch)
        return order

    def _make_shard(self, order: ServerOrder) -> Shard:
        if any(table.code == "sum" for table in order.spec.tables):
            warm_sum()
        memory, self._memory = self._memory, Reserve()
        return Shard(
            order.spec,
            order.server,
            epoch=order.view.epoch,
            renewal=order.renewal,
            memory=memory,
            has_witnesses=order.two_phase,
        )

    def _hold(self, shard: Shard, order: ServerOrder) -> None:
        self._flush_every_s = order.flush_every_s
        self._coordinator = order.coordinator
        self._recovery = Recovery(
            shard,
            Peers(f"server-{shard.server}-recovery", self._token),
            sweep_peers=PipedPeers(f"server-{shard.server}-sweep", self._token),
            share=order.recovery_share,
            wait_for_view=self._wait_for_view,
            tell=self._tell,
        )
        self._shard = shard
        self._set_view(order.view)

    def _serve(self) -> None:
        """From now on this shard counts: before, a spare may be given another one."""
        shard = self.shard
        if self._is_serving:
            return
        self._is_serving = True
        if any(arena.code is not None for arena in shard.arenas):
            self._spawn(self._deliver, f"holdfast-flush-{shard.server}")

    def _spawn(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=self._guard, args=(work,), name=name, daemon=True)
        with self._has_changed:
            self._threads = [each for each in self._threads if each.is_alive()] + [thread]
            thread.start()

    def _guard(self, work: Callable[[], None]) -> None:
        """Run a thread's work; whatever ends it early is told, unless this server is closing."""
        try:
            work()
        except StoppedError:
            pass
        except DataLossError as error:
            self._tell(LOST, {"error": str(error)})
        except Exception as error:  # a thread's edge
            if self._is_closing:
                return
            if self._shard is not None:
                self._tell(FAILED, {"error": repr(error)})
            raise

    def _recover(self, _: Caller, message: Message) -> Message:
        """Begin to bring everything back; answers at once."""
        self._serve()
        with self._has_changed:
            self._sweeps += 1
            is_first = self._sweeps == 1
        if is_first:
            self._spawn(self._sweep, f"holdfast-sweep-{self.shard.server}")
        return Message("recovering")

    def _sweep(self) -> None:
        assert self._recovery is not None
        done = 0
        while True:
            with self._has_changed:
                if done == self._sweeps:
                    self._sweeps = 0
                    return
                done = self._sweeps
            self._swept = self.shard.renewal
            self._recovery.sweep()

    def _enter(self, _: Caller, message: Message) -> Message:
        spec, view = self.shard.spec, View.from_json(message.meta["view"])
        check_view(view, spec)
        renewal = renewal_of(message.meta.get("renewal"), spec)
        with self._has_changed:
            old = self._view
            if old is not None and view.version <= old.version:
                return Message("entered")
        if old is not None:
            check_next(view, old)
        self._set_view(view, renewal)
        return Message("entered")

    def _set_view(self, view: View, renewal: Renewal | None = None) -> None:
        """The view before the shard: differences that the new epoch sets free must not travel in
        the old one, to a server that still believes them frozen."""
        if view.epoch > self._listener.epoch:
            self._listener.epoch = view.epoch
            self._giver.clear()  # of members that may be gone
        with self._has_changed:
            self._view = view
            self._has_changed.notify_all()
        self.shard.enter(view.epoch, renewal)

    def _wait_for_view(self, after: int | None) -> View:
        with self._has_changed:
            while not self._is_closing:
                view = self._view
                if view is not None and (after is None or view.version > after):
                    return view
                self._has_changed.wait()
        raise StoppedError

    def _tell(self, what: str, facts: Mapping[str, Any]) -> None:
        """Tell the coordinator of progress; it may be gone, and then this process ends too."""
        shard = self.shard
        assert self._view is not None
        progress = Progress(
            shard.server, self._view.joined[shard.server], self._swept, what, **facts
        )
        try:
            with Stream(
                self._coordinator, token=self._token, name=f"server-{shard.server}", epoch=None
            ) as stream:
                stream.ask(Message("progress", progress.to_json()))
        except UnavailableError:
            pass  # the driver is gone, and this process will be

    def _report(self, _: Caller, message: Message) -> Message:
        report = self.shard.report(numbers.whole(message.meta["source"]))
        meta = {
            "flushed": report.flushed,
            "kept": report.kept,
            "receivers": list(report.receivers),
        }
        return Message("report", meta, (report.marks_GW,))

    def _settle(self, _: Caller, message: Message) -> Message:
        self.shard.settle(
            numbers.whole(message.meta["source"]), numbers.whole(message.meta["number"])
        )
        return Message("settled")

    # Workers.

    def _present(self, wants: Sequence[tuple[int, np.ndarray]]) -> None:
        """Decode rows that are asked for and not here yet."""
        missing = self.shard.missing(wants)
        if missing:
            assert self._recovery is not None
            self._recovery.ensure(missing)

    def _pull(self, _: Caller, message: Message) -> Message:
        wants = parts.unpack_slots(message)
        self._present(wants)
        return Message("rows", {}, (parts.flatten(self.shard.pull(wants)),))

    def _bring(self, _: Caller, message: Message) -> Message:
        """Have rows here that will be asked for, all decoded at once."""
        self._present(parts.unpack_slots(message))
        return Message("present")

    def _gradients(self, message: Message) -> list[Gradients]:
        return parts.unpack_gradients(message, self.shard.spec.dims)

    def _stage(self, caller: Caller, message: Message) -> Message:
        """A push's part for this server, and copies of those for others."""
        worker, number = parts.push_of(message)
        by_owner = parts.unpack_stage(message, self.shard.spec.dims)
        own = by_owner.pop(self.shard.server, [])
        servers = tuple(numbers.whole(server) for server in message.meta["servers"])
        self.shard.stage(worker, number, own, by_owner, servers=servers, epoch=_epoch(caller))
        return self._reply("staged", worker)

    def _commit(self, _: Caller, message: Message) -> Message:
        worker, number = parts.push_of(message)
        gradients = self.shard.staged(worker).get(number)
        if gradients is not None:
            self._change(worker, number, gradients)
        elif number > self.shard.applied_W[worker]:
            raise InvalidRequestError("this push was not staged here", worker=worker, number=number)
        return self._reply("committed", worker)

    def _push(self, _: Caller, message: Message) -> Message:
        worker, number = parts.push_of(message)
        self._change(worker, number, self._gradients(message))
        return self._reply("pushed", worker)

    def _change(
        self,
        worker: int,
        number: int,
        gradients: Part,
        *,
        is_resolved: bool = False,
    ) -> None:
        self._present([(part.arena, part.slots_N) for part in gradients])
        self.shard.push(worker, number, gradients, is_resolved=is_resolved)

    def _reply(self, kind: str, worker: int) -> Message:
        return Message(kind, {"durable": int(self.shard.durable_W()[worker])})

    def _assign(self, _: Caller, message: Message) -> Message:
        weights = self._gradients(message)
        self._present([(part.arena, part.slots_N) for part in weights])
        self.shard.assign(weights)
        return Message("assigned")

    def _supply(self, _: Caller, message: Message) -> Message:
        return Message("supplied", {"rows": self.shard.supply(self._gradients(message))})

    def _read(self, _: Caller, message: Message) -> Message:
        arena, start, stop = (
            numbers.whole(message.meta[name]) for name in ("arena", "start", "stop")
        )
        rows_NW = self.shard.read(
            arena, is_parity=bool(message.meta["is_parity"]), start=start, stop=stop
        )
        return Message("records", {}, (rows_NW,))

    def _past(self, _: Caller, message: Message) -> Message:
        worker = numbers.worker_of(message.meta["worker"])
        return Message("past", {"applied": int(self.shard.applied_W[worker])})

    # Parity.

    def _deliver(self) -> None:
        Delivery(
            self.shard,
            Peers(f"server-{self.shard.server}", self._token),
            every_s=self._flush_every_s,
            get_view=lambda: self._wait_for_view(None),
        ).run()

    def _source(self, caller: Caller) -> int:
        role, index = role_of(caller)
        if role != SERVER or caller.epoch is None:
            raise InvalidRequestError("only servers send differences", caller=caller.name)
        return index

    def _fold(self, caller: Caller, message: Message) -> Message:
        flush = parts.unpack_flush(message, self.shard.server)
        self.shard.fold(self._source(caller), flush, epoch=_epoch(caller))
        return Message("folded")

    def _apply(self, caller: Caller, message: Message) -> Message:
        number = numbers.whole(message.meta["number"])
        self.shard.apply_flush(self._source(caller), number, epoch=_epoch(caller))
        return Message("applied")

    # Others' recovery.

    def _freeze(self, caller: Caller, message: Message) -> Message:
        granules = [numbers.whole(granule) for granule in message.meta["granules"]]
        ticket = numbers.text(message.meta["ticket"])
        marks_GW = self.shard.freeze(ticket, granules, epoch=_epoch(caller))
        return Message("frozen", {}, (marks_GW,))

    def _thaw(self, _: Caller, message: Message) -> Message:
        self.shard.thaw(numbers.text(message.meta["ticket"]))
        return Message("thawed")

    # Watching.

    def _drain(self, _: Caller, message: Message) -> Message:
        """Answer when no difference waits or is on its way."""
        self.shard.wait_until_drained()
        return Message("drained", {"durable": self.shard.durable_W().tolist()})

    def _stats(self, _: Caller, message: Message) -> Message:
        shard = self.shard
        return Message("stats", {
            "server": shard.server,
            "counts": dict(shard.counts),
            "waiting": shard.waiting(),
            "rows_missing": shard.rows_missing,
            "cpu_s": time.process_time(),
            "applied": shard.applied_W.tolist(),
            "bytes": {
                "queues": sum(arena.waiting_bytes for arena in shard.arenas),
                "workers": self._bytes["worker"],
                "servers": self._bytes["server"],
            },
        })  # fmt: skip


def _epoch(caller: Caller) -> int:
    """The epoch of a caller that must be a member.

    Raises:
        InvalidRequestError: it is none.
    """
    if caller.epoch is None:
        raise InvalidRequestError("only members may ask for this", caller=caller.name)
    return caller.epoch


def run(spec: Mapping[str, Any], ready: Callable[[str], None], stop: threading.Event) -> None:
    """A server process: listens, says where, and works until told to stop."""
    warm_kernels()
    server = Server(
        str(spec["token"]),
        host=str(spec.get("host", "127.0.0.1")),
        allow_remote=bool(spec.get("allow_remote", False)),
    )
    ready(server.address)
    stop.wait()
    server.close()
