"""What a server answers about pushes that parity may lack: its own parts, and copies of others'.

    a worker is lost:  bar, held -> what is here; resolve -> what happened is applied, the rest not
    a server is lost:  copies, owed -> parts for the new one; inherit, entrust <- others' parts

Invariants:
- Pushes of one worker are applied in their order, one worker at a time.
- Nothing counts as drained while pushes that happened are still to be applied.

Not here: which pushes happened (commit.py), who asks (resolution.py), the book (pushes.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from holdfast.cluster import numbers, parts
from holdfast.cluster.message import Caller, Message
from holdfast.cluster.pushes import Entrusted, Part, slices
from holdfast.cluster.shard import Shard
from holdfast.errors import InvalidRequestError

_RESOLVED_S = 0.3
_RESOLVING_MAX = 2 * numbers.WORKERS_MAX  # at once, each in a thread of its own


class Trustee:
    """Answers whoever resolves what lost workers and servers had of pushes."""

    def __init__(
        self,
        get_shard: Callable[[], Shard],
        *,
        apply: Callable[[int, int, Part], None],
        spawn: Callable[[Callable[[], None], str], None],
    ) -> None:
        """``apply`` changes rows by a worker's push that happened, and decodes them before where
        they are missing; ``spawn`` runs something in a thread of the server's."""
        self._get_shard, self._apply, self._spawn = get_shard, apply, spawn
        self._turn, self._counting = threading.Lock(), threading.Lock()
        self._under_way = 0

    def bar(self, _: Caller, message: Message) -> Message:
        """Hear a worker no more; what there is of its pushes."""
        return Message("barred", self._get_shard().bar(_worker(message)).to_json())

    def held(self, _: Caller, message: Message) -> Message:
        """What there is of a worker's pushes."""
        return Message("held", self._get_shard().held(_worker(message)).to_json())

    def resolve(self, _: Caller, message: Message) -> Message:
        """Pushes of a worker up to a number happened; if it is lost, later ones did not.

        Answers soon, whether all are applied by then or not: rows may have to be decoded first, and
        that may have to wait until whoever asks has replaced another server.
        """
        worker, last = _worker(message), numbers.number_of(message.meta["last"])
        is_lost = bool(message.meta["is_lost"])
        if self._under_way > _RESOLVING_MAX:
            raise InvalidRequestError("too many workers are being resolved", most=_RESOLVING_MAX)
        self._get_shard().begin_resolving(worker, last, is_lost=is_lost)
        with self._counting:
            self._under_way += 1
        is_over = threading.Event()
        self._spawn(lambda: self._carry_out(worker, last, is_over), f"holdfast-resolve-{worker}")
        is_over.wait(_RESOLVED_S if is_lost else 0)
        return Message("resolved")

    def _carry_out(self, worker: int, last: int, is_over: threading.Event) -> None:
        """Apply what a worker committed; it then goes to parity at once."""
        shard = self._get_shard()
        try:
            with self._turn:
                for number, part in shard.staged(worker).items():
                    if number <= last:
                        self._apply(worker, number, part)
            shard.wait_durable(worker, _RESOLVED_S)
        finally:
            with self._counting:
                self._under_way -= 1
            shard.end_resolving()
            is_over.set()

    def copies(self, _: Caller, message: Message) -> Message:
        """What this server keeps for another."""
        owner = numbers.whole(message.meta["owner"])
        return _slice("copies", self._get_shard().copies(owner, _workers(message)), message)

    def owed(self, _: Caller, message: Message) -> Message:
        """What witnesses of this server are to keep."""
        return _slice("owed", self._get_shard().owed(_workers(message)), message)

    def entrust(self, _: Caller, message: Message) -> Message:
        """Keep copies of another's parts."""
        owner = numbers.whole(message.meta["owner"])
        self._get_shard().entrust(owner, self._unpack(message))
        return Message("entrusted")

    def inherit(self, _: Caller, message: Message) -> Message:
        """Stage what a lost server, whose place this one has, had of pushes."""
        self._get_shard().inherit(self._unpack(message))
        return Message("inherited")

    def _unpack(self, message: Message) -> list[Entrusted]:
        return parts.unpack_entrusted(message, self._get_shard().spec.dims)


def _slice(kind: str, found: Sequence[Entrusted], message: Message) -> Message:
    """Parts after the one that a question names, as many as fit; whether there are more."""
    worker, number = message.meta["after"]
    after = (numbers.number_of(worker), numbers.number_of(number))
    left = [each for each in found if (each.worker, each.number) > after]
    first = next(slices(left), [])
    return parts.pack_entrusted(kind, {"has_more": len(first) < len(left)}, first)


def _worker(message: Message) -> int:
    return numbers.worker_of(message.meta["worker"])


def _workers(message: Message) -> list[int] | None:
    """Which workers a question is about; None: all."""
    workers = message.meta["workers"]
    return None if workers is None else [numbers.whole(worker) for worker in workers]
