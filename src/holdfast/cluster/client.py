"""A worker's side of the rows: pull, push, and go on when a server is replaced.

    pull: rows by server -> one message each -> rows
    push: stage everywhere, each part at its server and at its witnesses -> commit everywhere

With two-phase commit a push is kept here until every server reports its differences at parity. A
server that takes a lost one's place is sent what was kept, in order, before anything else; it
applies each push to the rows that lack it.

Invariants:
- A push that returned is applied on every server, once; with two-phase commit it survives the loss
  of servers as long as the cluster does.
- Without it, what a lost server had applied and not yet sent to parity is lost; at most
  ``pushes_lost`` pushes.
- Whether a row is hot (hot.py) is seen here alone: who pulls and pushes names tables and ids.
- After a push that raised there are no further ones: servers would take it for one that happened.
- Requests are answered by members of one epoch; a change of members is waited for, not reported.

Not here: torch (worker.py), which batches are whose (leases.py).

# N rows of a request, D weights of a row
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from holdfast.cluster import parts
from holdfast.cluster.message import Message
from holdfast.cluster.peers import Failures, Peers, is_passing
from holdfast.cluster.pushes import Gradients
from holdfast.cluster.spec import ClusterSpec
from holdfast.cluster.view import View
from holdfast.errors import HoldfastError, InvalidRequestError, UnavailableError
from holdfast.kernels.rows import placed_rows

_RETRY_S = 0.005
_KEPT_MAX = 64  # pushes whose differences are not at parity yet

Ids = np.ndarray


@dataclass(slots=True)
class _Kept:
    """A push that may have to be sent again: what is left of it, by server."""

    number: int
    servers: tuple[int, ...]
    is_decided: bool = False
    by_server: dict[int, list[Gradients]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of a table in one arena: their ids there, and which of those asked for (None: all)."""

    table: str
    ids_N: Ids
    at_N: np.ndarray | None


def _join(ids: Sequence[Ids]) -> Ids:
    return ids[0] if len(ids) == 1 else np.concatenate(ids)


class Client:
    """One worker's connection to all servers; used by one thread."""

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        worker: int,
        token: str,
        get_view: Callable[[int | None], View],
        two_phase: bool = True,
        wait_turn: Callable[[], None] | None = None,
        patience_s: float = 60.0,
    ) -> None:
        """``get_view`` gives the view, or waits for one after a version; ``wait_turn`` is called
        between staging and committing, where workers train in rounds; ``patience_s`` is how long a
        server may be gone before that is an error."""
        if wait_turn is not None and not two_phase:
            raise InvalidRequestError("rounds need two-phase commit: staging is their barrier")
        self.spec = spec
        self.worker = worker
        self.two_phase = two_phase
        self.pushes_lost = 0
        self.bytes_sent = 0
        self._get_view = get_view
        self._wait_turn = wait_turn
        self._patience_s = patience_s
        self._peers = Peers(f"worker-{worker}", token)
        self._peers.enter(get_view(None))
        self._kept: dict[int, _Kept] = {}
        self._acked: dict[int, int] = {}
        self._held: dict[str, np.ndarray] = {}
        self._behind: set[int] = set()
        self._number = -1
        self._is_torn = False

    # What a training loop needs.

    def pull(self, wants: Mapping[str, Ids]) -> dict[str, np.ndarray]:
        """The weights of rows of some tables, in the order asked for; ids may repeat."""
        by_server: dict[int, list[tuple[int, np.ndarray]]] = {}
        targets: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        out: dict[str, np.ndarray] = {}
        scattered: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for index, pieces in self._by_arena(wants).items():
            ids_N = _join([piece.ids_N for piece in pieces])
            rows_ND = np.empty((len(ids_N), self.spec.arenas[index].dim), np.float32)
            for server, at_N, slots_N in self._split(index, ids_N):
                by_server.setdefault(server, []).append((index, slots_N))
                targets.setdefault(server, []).append((rows_ND, at_N))
            start = 0
            for piece in pieces:
                found_ND = rows_ND[start : start + len(piece.ids_N)]
                start += len(piece.ids_N)
                if piece.at_N is None:
                    out[piece.table] = found_ND
                    continue
                if piece.table not in out:
                    shape = (len(wants[piece.table]), rows_ND.shape[1])
                    out[piece.table] = np.empty(shape, np.float32)
                scattered.append((out[piece.table], piece.at_N, found_ND))
        messages = {s: parts.pack_slots("pull", found) for s, found in by_server.items()}
        for server, answer in self._exchange(messages).items():
            flat, start = answer.arrays[0], 0
            for rows_ND, at_N in targets[server]:
                size = len(at_N) * rows_ND.shape[1]
                rows_ND[at_N] = flat[start : start + size].reshape(len(at_N), -1)
                start += size
        for whole_ND, at_N, found_ND in scattered:
            whole_ND[at_N] = found_ND
        return {name: out[name] for name in wants}

    def push(self, number: int, gradients: Mapping[str, tuple[Ids, np.ndarray]]) -> None:
        """Apply gradients to rows, each id of a table named once. Numbers must rise."""
        if number <= self._number:
            raise InvalidRequestError(
                "pushes are numbered upwards", number=number, last=self._number
            )
        if self._is_torn:
            raise InvalidRequestError(
                "a push of this worker failed half way", todo="connect again, as another worker"
            )
        self._number = number
        by_server = self._gradients_by_server(gradients)
        meta = {"worker": self.worker, "number": number}
        if not self.two_phase:
            messages = {
                s: parts.pack_gradients("push", meta, found) for s, found in by_server.items()
            }
            for server in self._exchange(messages):
                self._acked[server] = number
            return
        servers = tuple(sorted(by_server))
        kept = self._kept[number] = _Kept(number, servers, by_server=by_server)
        self._is_torn = True  # until it is over
        staging = {*servers, *(w for server in servers for w in self.spec.witnesses[server])}
        self._exchange({server: self._stage(kept, server) for server in sorted(staging)})
        if self._wait_turn is not None:
            self._wait_turn()
        kept.is_decided = True  # from here on it happens, whoever is lost
        for server, answer in self._exchange(
            {server: Message("commit", meta) for server in servers}
        ).items():
            self._forget(server, int(answer.meta["durable"]))
        self._is_torn = False
        if len(self._kept) > _KEPT_MAX or self._wait_turn is not None:
            self.drain()  # in rounds parity is part of the barrier

    def hold(self, table: str, weights_ND: np.ndarray) -> None:
        """These are all weights of a table that workers hold: a server that loses them is given
        them back."""
        self._held[table] = weights_ND

    def assign(self, weights: Mapping[str, tuple[Ids, np.ndarray]]) -> None:
        """Set the weights of rows, and their optimizer state to zero."""
        by_server = self._gradients_by_server(weights)
        self._exchange(
            {s: parts.pack_gradients("assign", {}, found) for s, found in by_server.items()}
        )

    def drain(self) -> None:
        """Wait until everything pushed is at parity."""
        messages = {server: Message("drain") for server in range(self.spec.servers)}
        for server, answer in self._exchange(messages).items():
            self._forget(server, int(answer.meta["durable"][self.worker]))

    def close(self) -> None:
        """End all streams."""
        self._peers.close()

    # Where rows are.

    def _by_arena(self, wants: Mapping[str, Ids]) -> dict[int, list[_Piece]]:
        """Rows of tables as arenas number them; a table's hot rows lie apart from its others."""
        found: dict[int, list[_Piece]] = {}
        for name, ids_N in wants.items():
            if name not in self.spec.index:
                raise InvalidRequestError("no such table", table=name, tables=list(self.spec.index))
            rows = self.spec.tables[self.spec.index[name]].rows
            if len(ids_N) and not (ids_N.min() >= 0 and ids_N.max() < rows):
                raise InvalidRequestError("an id is outside its table", table=name, rows=rows)
            hot = self.spec.hot_tables.get(name)
            if hot is None:
                self._add_piece(found, name, name, ids_N, None)
                continue
            is_hot_N, ranks_N = hot.find(ids_N)
            self._add_piece(found, name, name, ids_N[~is_hot_N], np.flatnonzero(~is_hot_N))
            self._add_piece(found, name, hot.table.name, ranks_N, np.flatnonzero(is_hot_N))
        return found

    def _add_piece(
        self,
        found: dict[int, list[_Piece]],
        name: str,
        placed: str,
        ids_N: Ids,
        at_N: np.ndarray | None,
    ) -> None:
        index, start = self.spec.places[placed]
        found.setdefault(index, []).append(_Piece(name, ids_N + start, at_N))

    def _split(self, index: int, ids_N: Ids) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Rows of an arena by server: (server, which of them, their slots there)."""
        numbers = self.spec.arenas[index].placement.numbers
        at_N, slots_N, ends = placed_rows.sort_rows(ids_N, numbers)
        return [
            (server, at_N[start:stop], slots_N[start:stop])
            for server, (start, stop) in enumerate(itertools.pairwise(ends))
            if start < stop
        ]

    def _gradients_by_server(
        self, gradients: Mapping[str, tuple[Ids, np.ndarray]]
    ) -> dict[int, list[Gradients]]:
        by_server: dict[int, list[Gradients]] = {}
        by_arena = self._by_arena({name: ids_N for name, (ids_N, _) in gradients.items()})
        for name, (ids_N, grads_ND) in gradients.items():
            dim = self.spec.tables[self.spec.index[name]].dim
            if grads_ND.shape != (len(ids_N), dim):
                raise InvalidRequestError(
                    "gradients do not fit their rows",
                    table=name,
                    shape=grads_ND.shape,
                    rows=len(ids_N),
                    dim=dim,
                )
        for index, pieces in by_arena.items():
            ids_N = _join([piece.ids_N for piece in pieces])
            found = [(gradients[piece.table][1], piece.at_N) for piece in pieces]
            grads_ND = np.concatenate(
                [each_ND if at_N is None else each_ND[at_N] for each_ND, at_N in found],
                dtype=np.float32,
            )
            for server, at_N, slots_N in self._split(index, ids_N):
                by_server.setdefault(server, []).append(Gradients(index, slots_N, grads_ND[at_N]))
        return by_server

    # Members that come and go.

    def _exchange(self, messages: Mapping[int, Message]) -> dict[int, Message]:
        """Ask servers until all have answered, whoever answers for them."""
        answers: dict[int, Message] = {}
        waiting = dict(messages)
        started = time.monotonic()
        while waiting:
            # One that is behind is first given what it may lack.
            ready = {s: message for s, message in waiting.items() if s not in self._behind}
            for message in ready.values():
                self.bytes_sent += sum(array.nbytes for array in message.arrays)
            found, failures = self._peers.ask_all(ready)
            answers |= found
            waiting = {s: message for s, message in waiting.items() if s not in found}
            if waiting:
                self._renew(failures, started)
        return answers

    def _renew(self, failures: Failures, started: float) -> None:
        """Learn who is there now; give replacements what they may lack."""
        old = self._peers.view
        time.sleep(_RETRY_S)
        view = self._get_view(None)
        if view.epoch == old.epoch and time.monotonic() - started > self._patience_s:
            raise UnavailableError(
                "servers do not answer and nobody replaces them",
                servers=sorted({*failures, *self._behind}),
                waited_s=round(time.monotonic() - started, 1),
            ) from next(iter(failures.values()), None)
        self._behind |= view.replaced_since(old)
        self._peers.enter(view)
        for server in sorted(self._behind):
            try:
                self._send_again(server)
            except HoldfastError as error:
                if not is_passing(error):
                    raise
                return  # lost again: whoever comes next is given it
            self._behind.discard(server)

    def _send_again(self, server: int) -> None:
        """Give a replacement every push that is not known to be at parity: what is decided as a
        push, the one under way as a stage, which the lost server may have answered; and copies of
        other servers' parts, of which it is a witness now."""
        held = {
            name: (np.arange(len(weights_ND)), weights_ND)
            for name, weights_ND in self._held.items()
        }
        supplied = self._gradients_by_server(held).get(server)
        if supplied:
            self._peers.ask(server, parts.pack_gradients("supply", {}, supplied))
        if not self.two_phase:
            past = self._peers.ask(server, Message("past", {"worker": self.worker}))
            self.pushes_lost += max(0, self._acked.get(server, -1) - int(past.meta["applied"]))
            return
        again = []
        slots: dict[int, list[np.ndarray]] = {}
        for number, kept in sorted(self._kept.items()):
            meta = {"worker": self.worker, "number": number}
            if kept.is_decided and server in kept.by_server:
                again.append(parts.pack_gradients("push", meta, kept.by_server[server]))
                for part in kept.by_server[server]:
                    slots.setdefault(part.arena, []).append(part.slots_N)
            staged = self._stage(kept, server)
            if staged.arrays:
                again.append(staged)
        wants = [(arena, np.unique(np.concatenate(each))) for arena, each in slots.items()]
        if wants:  # else each push would have its rows decoded by itself
            self._peers.ask(server, parts.pack_slots("present", wants))
        self._peers.ask_in_order(server, again)

    def _stage(self, kept: _Kept, server: int) -> Message:
        """What a server keeps of a push: its own part until it is decided, copies of others'."""
        by_owner = {
            owner: found
            for owner, found in sorted(kept.by_server.items())
            if server in self.spec.witnesses[owner] or (owner == server and not kept.is_decided)
        }
        return parts.pack_stage(self.worker, kept.number, by_owner, kept.servers)

    def _forget(self, server: int, durable: int) -> None:
        """What is at parity need not be kept."""
        for number in [number for number in self._kept if number <= durable]:
            kept = self._kept[number]
            kept.by_server.pop(server, None)
            if not kept.by_server and kept.is_decided:
                del self._kept[number]
