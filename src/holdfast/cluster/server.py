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

from holdfast.cluster import parts
from holdfast.cluster.delivery import Delivery
from holdfast.cluster.flush import Report
from holdfast.cluster.giver import Giver
from holdfast.cluster.keeper import Keeper
from holdfast.cluster.message import Message
from holdfast.cluster.peers import Peers, PipedPeers
from holdfast.cluster.pushes import Gradients, Part
from holdfast.cluster.recovery import Recovery, StoppedError
from holdfast.cluster.reserve import Reserve, reserve_for
from holdfast.cluster.shard import Renewal, Shard
from holdfast.cluster.spec import ClusterSpec
from holdfast.cluster.trustee import Trustee
from holdfast.cluster.view import View
from holdfast.cluster.warm import warm_kernels
from holdfast.cluster.wire import Caller, Listener, Stream
from holdfast.errors import (
    ConflictError,
    DataLossError,
    HoldfastError,
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
            self._handle, token=token, host=host, port=port, allow_remote=allow_remote
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
        handler = self._handlers.get(message.kind)
        if handler is None:
            raise InvalidRequestError("unknown kind of message", kind=message.kind)
        try:
            answer = handler(caller, message)
            self._count(caller, message, answer)
            return answer
        except StoppedError as error:
            raise UnavailableError("this server is closing") from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            if isinstance(error, HoldfastError):
                raise
            raise InvalidRequestError(
                "malformed message", kind=message.kind, found=repr(error)
            ) from error

    def _count(self, caller: Caller, *messages: Message) -> None:
        """Bytes of rows that went between this server and workers, or came here from servers."""
        who = caller.name.partition("-")[0]
        size = sum(array.nbytes for message in messages for array in message.arrays)
        with self._has_changed:
            self._bytes[who] += size

    # Membership.

    def _reserve(self, _: Caller, message: Message) -> Message:
        """Have memory ready for a shard; answers at once."""
        if self._shard is None:
            self._memory = reserve_for(ClusterSpec.from_json(message.meta["spec"]))
            self._spawn(self._memory.touch, "holdfast-reserve")
        return Message("reserved", {"bytes": self._memory.left})

    def _begin(self, _: Caller, message: Message) -> Message:
        shard = self._make_shard(message.meta)
        shard.begin()
        self._hold(shard, message.meta)
        self._serve()
        return Message("begun")

    def _adopt(self, _: Caller, message: Message) -> Message:
        shard = self._make_shard(message.meta)
        reports = {
            int(server): Report(int(flushed), None, (), marks_GW)
            for (server, flushed), marks_GW in zip(
                message.meta["reports"], message.arrays, strict=True
            )
        }
        shard.adopt(reports, [parts.whole(worker) for worker in message.meta.get("barred", ())])
        self._hold(shard, message.meta)
        return Message("adopted")

    def _load(self, _: Caller, message: Message) -> Message:
        """Begin to load a lost server's rows from a checkpoint, to take its place after."""
        shard = self._make_shard(message.meta)
        return self._keeper.load(shard, message, lambda: self._hold(shard, message.meta))

    def _make_shard(self, meta: Mapping[str, Any]) -> Shard:
        if self._is_serving:
            raise InvalidRequestError("this server holds a shard already")
        spec = ClusterSpec.from_json(meta["spec"])
        epoch = View.from_json(meta["view"]).epoch
        renewal = int(meta.get("renewal", 0))
        memory, self._memory = self._memory, Reserve()
        return Shard(
            spec,
            int(meta["server"]),
            epoch=epoch,
            renewal=renewal,
            memory=memory,
            has_witnesses=bool(meta.get("two_phase", False)),
        )

    def _hold(self, shard: Shard, meta: Mapping[str, Any]) -> None:
        self._flush_every_s = float(meta.get("flush_every_s", 0.0))
        self._coordinator = str(meta.get("coordinator", ""))
        self._recovery = Recovery(
            shard,
            Peers(f"server-{shard.server}-recovery", self._token),
            sweep_peers=PipedPeers(f"server-{shard.server}-sweep", self._token),
            share=float(meta.get("recovery_share", 1.0)),
            wait_for_view=self._wait_for_view,
            tell=self._tell,
        )
        self._shard = shard
        self._set_view(View.from_json(meta["view"]))

    def _serve(self) -> None:
        """From now on this shard counts: before, a spare may be given another one."""
        if self._is_serving:
            return
        self._is_serving = True
        if any(arena.code is not None for arena in self.shard.arenas):
            self._spawn(self._deliver, f"holdfast-flush-{self.shard.server}")

    def _spawn(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=self._guard, args=(work,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _guard(self, work: Callable[[], None]) -> None:
        """Run a thread's work; whatever ends it early is told, unless this server is closing."""
        try:
            work()
        except StoppedError:
            pass
        except DataLossError as error:
            self._tell("lost", {"error": str(error)})
        except Exception as error:  # a thread's edge
            if self._is_closing:
                return
            if self._shard is not None:
                self._tell("failed", {"error": repr(error)})
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
        view = View.from_json(message.meta["view"])
        if len(view.addresses) != self.shard.spec.servers:
            raise InvalidRequestError("a view names every server", addresses=len(view.addresses))
        with self._has_changed:
            old = self._view
            if old is not None and view.version <= old.version:
                return Message("entered")
        renewal = message.meta.get("renewal")
        self._set_view(
            view, None if renewal is None else Renewal(int(renewal[0]), tuple(renewal[1]))
        )
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

    def _tell(self, what: str, facts: dict[str, object]) -> None:
        """Tell the coordinator of progress; it may be gone, and then this process ends too."""
        shard = self.shard
        assert self._view is not None
        place = {"server": shard.server, "joined": self._view.joined[shard.server]}
        meta = {**place, "renewal": self._swept, "what": what, **facts}
        try:
            with Stream(
                self._coordinator, token=self._token, name=f"server-{shard.server}", epoch=None
            ) as stream:
                stream.ask(Message("progress", meta))
        except UnavailableError:
            pass  # the driver is gone, and this process will be

    def _report(self, _: Caller, message: Message) -> Message:
        report = self.shard.report(int(message.meta["source"]))
        meta = {
            "flushed": report.flushed,
            "kept": report.kept,
            "receivers": list(report.receivers),
        }
        return Message("report", meta, (report.marks_GW,))

    def _settle(self, _: Caller, message: Message) -> Message:
        self.shard.settle(parts.whole(message.meta["source"]), parts.whole(message.meta["number"]))
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
        worker, number = parts.whole(message.meta["worker"]), parts.whole(message.meta["number"])
        by_owner = parts.unpack_stage(message, self.shard.spec.dims)
        own = by_owner.pop(self.shard.server, [])
        servers = tuple(parts.whole(server) for server in message.meta["servers"])
        self.shard.stage(worker, number, own, by_owner, servers=servers, epoch=_epoch(caller))
        return self._reply("staged", worker)

    def _commit(self, _: Caller, message: Message) -> Message:
        worker, number = parts.whole(message.meta["worker"]), parts.whole(message.meta["number"])
        gradients = self.shard.staged(worker).get(number)
        if gradients is not None:
            self._change(worker, number, gradients)
        elif number > self.shard.applied_W[worker]:
            raise InvalidRequestError("this push was not staged here", worker=worker, number=number)
        return self._reply("committed", worker)

    def _push(self, _: Caller, message: Message) -> Message:
        worker, number = parts.whole(message.meta["worker"]), parts.whole(message.meta["number"])
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
        meta = message.meta
        rows_NW = self.shard.read(
            int(meta["arena"]),
            is_parity=bool(meta["is_parity"]),
            start=int(meta["start"]),
            stop=int(meta["stop"]),
        )
        return Message("records", {}, (rows_NW,))

    def _past(self, _: Caller, message: Message) -> Message:
        return Message("past", {"applied": int(self.shard.applied_W[int(message.meta["worker"])])})

    # Parity.

    def _deliver(self) -> None:
        Delivery(
            self.shard,
            Peers(f"server-{self.shard.server}", self._token),
            every_s=self._flush_every_s,
            get_view=lambda: self._wait_for_view(None),
        ).run()

    def _source(self, caller: Caller) -> int:
        name, _, index = caller.name.partition("-")
        if name != "server" or caller.epoch is None:
            raise InvalidRequestError("only servers send differences", caller=caller.name)
        return int(index)

    def _fold(self, caller: Caller, message: Message) -> Message:
        flush = parts.unpack_flush(message, self.shard.server)
        self.shard.fold(self._source(caller), flush, epoch=_epoch(caller))
        return Message("folded")

    def _apply(self, caller: Caller, message: Message) -> Message:
        number = parts.whole(message.meta["number"])
        self.shard.apply_flush(self._source(caller), number, epoch=_epoch(caller))
        return Message("applied")

    # Others' recovery.

    def _freeze(self, caller: Caller, message: Message) -> Message:
        granules = [int(granule) for granule in message.meta["granules"]]
        marks_GW = self.shard.freeze(str(message.meta["ticket"]), granules, epoch=_epoch(caller))
        return Message("frozen", {}, (marks_GW,))

    def _thaw(self, _: Caller, message: Message) -> Message:
        self.shard.thaw(str(message.meta["ticket"]))
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
