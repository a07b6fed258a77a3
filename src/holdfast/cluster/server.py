"""An embedding server: answers messages about its shard, and sends differences to parity servers.

    worker -> pull | push | stage, commit      coordinator -> begin | adopt | view | report | settle
    server -> fold, apply | freeze, fetch, thaw    driver -> prepare | snapshot, store | load | job

Invariants:
- A row that is not here yet is decoded before it is read or changed.
- A flush is delivered to every receiver that is still the process it was made for, however often
  the members change meanwhile; a receiver that was replaced builds its parities anew.
- This process never imports torch.

Not here: what a shard does (shard.py), how messages travel (wire.py), who is alive
(coordinator.py), checkpoints (keeper.py), what others' recovery is given (giver.py).

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
from holdfast.cluster.flush import Flush, Report
from holdfast.cluster.giver import Giver
from holdfast.cluster.keeper import Keeper
from holdfast.cluster.message import Message
from holdfast.cluster.peers import Peers, PipedPeers
from holdfast.cluster.pushes import Entrusted, Gradients, Part, slices
from holdfast.cluster.recovery import Recovery, StoppedError
from holdfast.cluster.reserve import Reserve, reserve_for
from holdfast.cluster.shard import Renewal, Shard
from holdfast.cluster.spec import ClusterSpec
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

_IDLE_S = 0.05
_RETRY_S = 0.005
_RESOLVED_S = 0.3


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
        self._resolving = threading.Lock()  # a lost worker's pushes are applied in order
        self._giver = Giver(lambda: self.shard)
        self._keeper = Keeper(lambda: self.shard)
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
            "bar": self._bar,
            "held": self._held,
            "past": self._past,
            "resolve": self._resolve,
            "copies": self._copies,
            "unsettled": self._unsettled,
            "entrust": self._entrust,
            "keep": self._keep,
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
            self._spawn(self._flush_forever, f"holdfast-flush-{self.shard.server}")

    def _spawn(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

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
        try:
            done = 0
            while True:
                with self._has_changed:
                    if done == self._sweeps:
                        self._sweeps = 0
                        return
                    done = self._sweeps
                self._swept = self.shard.renewal
                self._recovery.sweep()
        except StoppedError:
            pass
        except DataLossError as error:
            self._tell("lost", {"error": str(error)})
        except Exception as error:  # a thread's edge
            if not self._is_closing:
                self._tell("failed", {"error": repr(error)})
                raise

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

    @property
    def _dims(self) -> list[int]:
        return [arena.dim for arena in self.shard.spec.arenas]

    def _gradients(self, message: Message) -> list[Gradients]:
        return parts.unpack_gradients(message, self._dims)

    def _stage(self, caller: Caller, message: Message) -> Message:
        """A push's part for this server, and copies of those for others."""
        worker, number = parts.whole(message.meta["worker"]), parts.whole(message.meta["number"])
        by_owner = parts.unpack_stage(message, self._dims)
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

    # Lost workers.

    def _bar(self, _: Caller, message: Message) -> Message:
        return Message("barred", self.shard.bar(int(message.meta["worker"])).to_json())

    def _held(self, _: Caller, message: Message) -> Message:
        return Message("held", self.shard.held(int(message.meta["worker"])).to_json())

    def _resolve(self, _: Caller, message: Message) -> Message:
        """Pushes of a worker up to a number happened; if it is lost, later ones did not.

        Answers soon, whether all are applied by then or not: rows may have to be decoded first, and
        that may have to wait until whoever asks has replaced another server.
        """
        worker, last = int(message.meta["worker"]), int(message.meta["last"])
        is_lost = bool(message.meta["is_lost"])
        self.shard.begin_resolving(worker, last, is_lost=is_lost)
        is_over = threading.Event()
        self._spawn(lambda: self._carry_out(worker, last, is_over), f"holdfast-resolve-{worker}")
        is_over.wait(_RESOLVED_S if is_lost else 0)
        return Message("resolved")

    def _carry_out(self, worker: int, last: int, is_over: threading.Event) -> None:
        """Apply what a worker committed; it then goes to parity at once."""
        shard = self.shard
        try:
            with self._resolving:
                for number, part in shard.staged(worker).items():
                    if number <= last:
                        self._change(worker, number, part, is_resolved=True)
            shard.wait_durable(worker, _RESOLVED_S)
        except (StoppedError, UnavailableError):
            pass  # this server is closing
        except Exception as error:  # a thread's edge
            if not self._is_closing:
                self._tell("failed", {"error": repr(error)})
                raise
        finally:
            shard.end_resolving()
            is_over.set()

    def _copies(self, _: Caller, message: Message) -> Message:
        """What this server keeps for another."""
        owner, workers = parts.whole(message.meta["owner"]), _workers(message)
        return _slice("copies", self.shard.copies(owner, workers), message)

    def _unsettled(self, _: Caller, message: Message) -> Message:
        """What witnesses of this server are to keep."""
        return _slice("unsettled", self.shard.unsettled(_workers(message)), message)

    def _entrust(self, _: Caller, message: Message) -> Message:
        given = parts.unpack_entrusted(message, self._dims)
        self.shard.entrust(parts.whole(message.meta["owner"]), given)
        return Message("entrusted")

    def _keep(self, _: Caller, message: Message) -> Message:
        self.shard.keep(parts.unpack_entrusted(message, self._dims))
        return Message("kept")

    # Parity.

    def _flush_forever(self) -> None:
        shard = self.shard
        peers = Peers(f"server-{shard.server}", self._token)
        try:
            while not self._is_closing:
                shard.wait_for_work(_IDLE_S, every_s=self._flush_every_s)
                flush = shard.begin_flush()
                if flush is not None:
                    self._deliver(peers, flush)
                    shard.end_flush()
        except StoppedError:
            pass
        except Exception as error:  # a thread's edge: differences would wait for ever
            if not self._is_closing:
                self._tell("failed", {"error": repr(error)})
                raise
        finally:
            peers.close()

    def _deliver(self, peers: Peers, flush: Flush) -> None:
        made_in = self._wait_for_view(None)
        self._deliver_all(peers, made_in, flush, lambda to: parts.pack_flush(flush, to))
        if self.shard.spec.parity_max > 1:
            applying = Message("apply", {"number": flush.number})
            self._deliver_all(peers, made_in, flush, lambda _: applying)

    def _deliver_all(
        self, peers: Peers, made_in: View, flush: Flush, make: Callable[[int], Message]
    ) -> None:
        """Give a message to every receiver that is still the process it was."""
        waiting = set(flush.receivers)
        while waiting:
            view = self._wait_for_view(None)
            waiting -= view.replaced_since(made_in)
            peers.enter(view)
            answers, _ = peers.ask_all({receiver: make(receiver) for receiver in waiting})
            waiting -= set(answers)
            if waiting:
                time.sleep(_RETRY_S)

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


def _slice(kind: str, found: Sequence[Entrusted], message: Message) -> Message:
    """Parts after the one that a question names, as many as fit; whether there are more."""
    after = tuple(message.meta["after"])
    left = [each for each in found if (each.worker, each.number) > after]
    first = next(slices(left), [])
    return parts.pack_entrusted(kind, {"has_more": len(first) < len(left)}, first)


def _workers(message: Message) -> list[int] | None:
    """Which workers a question is about; None: all."""
    workers = message.meta["workers"]
    return None if workers is None else [parts.whole(worker) for worker in workers]


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
