"""One server's rows and parities, and what is known of them: no network, no threads of its own.

    push -> rows change, the record as parity knows it is kept -> flush: before XOR now -> parity
    freeze -> differences of some ranges wait; fetch -> rows as parity knows them -> decode

A flush carries the numbers of the pushes in it as marks: parity then knows, range by range, which
pushes its rows contain. A replacement reads those marks and applies a push that is sent again only
to the rows that lack it.

Invariants:
- For every stripe of a range that is ready: parity = code(rows as parity knows them), once the
  flush under way has arrived.
- A push changes all its rows, or none; each (worker, number) changes a row at most once.
- A flush is folded at most once, and by all parities of a stripe or by none; of one sent under an
  older epoch nothing is folded.
- Differences of frozen ranges wait; nobody who pulls or pushes waits for them.

Not here: its three books of pushes (pushes.py), of what leaves (outgoing.py) and of what arrives
(incoming.py); messages (server.py), decoding (recovery.py), who is alive (coordinator.py).

# N rows of a request, K differences, P parities of a stripe, G ranges, S servers, W workers
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.cluster import slab
from holdfast.cluster.arenashard import ArenaShard, Differences
from holdfast.cluster.changes import SnapshotOrder
from holdfast.cluster.commit import Held
from holdfast.cluster.flush import Flush, Report
from holdfast.cluster.incoming import Incoming
from holdfast.cluster.message import MESSAGE_BYTES_MAX
from holdfast.cluster.numbers import WORKERS_MAX
from holdfast.cluster.outgoing import Outgoing
from holdfast.cluster.pushes import Entrusted, Gradients, Part, Pushes
from holdfast.cluster.reserve import Reserve
from holdfast.cluster.spec import DIFFERENCE, GRADIENT, ClusterSpec, granules_of
from holdfast.errors import ConflictError, DataLossError, InvalidRequestError, UnavailableError

_TICK_S = 0.05
_TICKET_MAX = 100  # of its characters
_TICKETS_EACH = 16  # a server freezes twice at a time at most; some may not have heard of a thaw


def _check_answer(size: int) -> None:
    """Refuse what does not fit into an answer, before it is made."""
    if size > MESSAGE_BYTES_MAX:
        raise InvalidRequestError(
            "an answer would be too large", bytes=size, bytes_max=MESSAGE_BYTES_MAX,
            todo="ask for fewer rows at a time",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Copied:
    """Rows of one arena, whole records, as they were at one moment; ids ascend."""

    arena: int
    ids_N: np.ndarray
    records_NW: np.ndarray


@dataclass(frozen=True, slots=True)
class Renewal:
    """All parities of a cluster are built anew, since some servers were given rows of the past."""

    number: int
    servers: tuple[int, ...]


def books_bytes(spec: ClusterSpec) -> int:
    """What a server keeps of others' pushes, whatever they are: marks by range and worker."""
    return 8 * WORKERS_MAX * spec.locks * (2 * spec.servers + 1)


class Shard:
    """Everything one server holds; safe to call from many threads."""

    def __init__(
        self,
        spec: ClusterSpec,
        server: int,
        *,
        epoch: int,
        renewal: int = 0,
        memory: Reserve | None = None,
        has_witnesses: bool = False,
    ) -> None:
        """A shard with nothing in it: ``begin`` gives it first values, ``adopt`` lost ones.

        ``has_witnesses``: workers stage their pushes, with copies at other servers.
        """
        self.spec = spec
        self.server = server
        self.arenas = [
            ArenaShard(at, arena, server, locks=spec.locks, room=spec.waiting_rows, memory=memory)
            for at, arena in enumerate(spec.arenas)
        ]
        self._epoch = epoch
        self._renewal = renewal
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        # Wakes the thread that flushes: who waits for a flush does, not every push.
        self._hurry = threading.Condition(lock)
        self._is_closed = False
        witnesses = spec.witnesses[server] if has_witnesses else ()
        self._wards = frozenset(owner for owner, of in enumerate(spec.witnesses) if server in of)
        self._pushes = Pushes(is_keeping=len(witnesses) > 0)
        self._out = Outgoing(ranges=spec.locks, workers=WORKERS_MAX, witnesses=witnesses)
        self._in = Incoming(servers=spec.servers, ranges=spec.locks, workers=WORKERS_MAX)
        self._flushed_at = 0.0
        self._hurried = 0  # who waits for differences to leave
        self._resolving = 0
        # What parity said when this server took a lost one's place.
        self._past_SGW = np.full((spec.servers, spec.locks, WORKERS_MAX), -1, np.int64)
        self._past_W = np.full(WORKERS_MAX, -1, np.int64)
        self.counts = Counter[str]()

    def begin(self) -> None:
        """First values for all rows and parities."""
        for arena in self.arenas:
            arena.fill()
        self._in.set_ready(range(self.spec.locks), {})

    def adopt(self, reports: Mapping[int, Report], barred: Collection[int] = ()) -> None:
        """Take the place of a server that is lost, given what every other one knows of it, and
        which workers are lost."""
        with self._changed:
            self._pushes.bar(barred)
            for server, report in reports.items():
                self._past_SGW[server] = report.marks_GW
            self._past_W = self._past_SGW.max(axis=(0, 1))
            self._out.adopt(reports)

    def resume(self, applied: Sequence[int], barred: Collection[int]) -> None:
        """Rows are loaded from a checkpoint: pushes up to these are in them. Parities follow."""
        with self._changed:
            self._out.resume(applied)
            self._pushes.bar(barred)

    def close(self) -> None:
        """Whoever waits for something here waits no longer."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self._hurry.notify_all()

    @property
    def is_closed(self) -> bool:
        """Whether its server is closing."""
        return self._is_closed

    def _wait(self, timeout_s: float | None = None) -> None:
        """Until something changes; the lock is held."""
        if self._is_closed:
            raise UnavailableError("this server is closing")
        self._changed.wait(timeout_s)

    # The epoch: which members a shard believes in.

    def enter(self, epoch: int, renewal: Renewal | None = None) -> None:
        """From now on nothing of an older epoch is folded, and nothing of it is frozen any more.

        Within one epoch freezes stay: whoever asked for them counts on it that nothing passes by.
        With a renewal the parities here are void, and so is what lost servers had sent.
        """
        with self._changed:
            if epoch > self._epoch:
                self._epoch = epoch
                self._out.thaw()
                self._hurry.notify_all()
            if renewal is not None and renewal.number > self._renewal:
                self._renewal = renewal.number
                self._in.void(renewal.servers)
                for server in renewal.servers:
                    self._pushes.forget_copies(server)
            self._changed.notify_all()

    @property
    def renewal(self) -> int:
        """The last renewal of all parities; 0: there was none."""
        return self._renewal

    @property
    def epoch(self) -> int:
        """The epoch this shard is in."""
        return self._epoch

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise ConflictError(
                "the cluster has changed", epoch=epoch, now=self._epoch, todo="ask for the view"
            )

    # What workers do.

    def missing(self, wants: Iterable[tuple[int, np.ndarray]]) -> list[tuple[int, np.ndarray]]:
        """Of rows asked for, by arena, those that must be decoded first."""
        found = [(arena, self._arena(arena).missing(slots_N)) for arena, slots_N in wants]
        return [(arena, slots_N) for arena, slots_N in found if len(slots_N)]

    def _arena(self, index: int) -> ArenaShard:
        if not 0 <= index < len(self.arenas):
            raise InvalidRequestError("no such arena", arena=index, arenas=len(self.arenas))
        return self.arenas[index]

    def pull(self, wants: Sequence[tuple[int, np.ndarray]]) -> list[np.ndarray]:
        """The weights of rows that are here, arena by arena."""
        _check_answer(sum(4 * len(slots) * self._arena(arena).spec.dim for arena, slots in wants))
        with self._changed:
            self.counts["rows_pulled"] += sum(len(slots_N) for _, slots_N in wants)
            return [self._arena(arena).pull(slots_N) for arena, slots_N in wants]

    def stage(
        self,
        worker: int,
        number: int,
        part: Part,
        copies: Mapping[int, Part] | None = None,
        *,
        servers: tuple[int, ...] = (),
        epoch: int | None = None,
    ) -> None:
        """Keep a push until it is committed or dropped; and copies of others' parts of it.
        ``servers`` are all that have a part of it.

        Raises:
            ConflictError: its worker is taken for lost, or is of an older epoch: a witness that is
                new in this one would have no copy.
        """
        self._check_push(worker, part)
        with self._changed:
            self._pushes.check_heard(worker)
            if epoch is not None:
                self._check_epoch(epoch)
            self._check_wards(copies or ())
            self._pushes.check_room(1 + len(copies or ()))
            if part and number > self._out.applied_W[worker]:
                self._pushes.put(Entrusted(worker, number, part, servers))
            for owner, copy in (copies or {}).items():
                self._pushes.witness(owner, Entrusted(worker, number, copy, servers))

    def _check_wards(self, owners: Iterable[int]) -> None:
        for owner in owners:
            if owner not in self._wards:
                raise InvalidRequestError("this server is no witness of that one", owner=owner)

    def staged(self, worker: int) -> dict[int, Part]:
        """A worker's parts that are here and not applied: staged by it, or given by witnesses."""
        with self._changed:
            found = self._pushes.find(worker, after=int(self._out.applied_W[worker]))
            return {number: push.part for number, push in found.items()}

    # Lost workers, and servers that only they could have told.

    def bar(self, worker: int) -> Held:
        """Hear nothing more of a worker that is lost: what there is of its pushes here."""
        with self._changed:
            held = self.held(worker)
            self._pushes.bar([worker])
            return held

    def held(self, worker: int) -> Held:
        """What there is of a worker's pushes here."""
        self._check_worker(worker)
        with self._changed:
            applied = int(self._out.applied_W[worker])
            return Held(
                staged=tuple(self._pushes.find(worker, after=applied)),
                applied=applied,
                seen=max(applied, int(self._past_W[worker])),
                copies=self._pushes.copied(worker),
                servers=self._pushes.servers(worker),
            )

    def begin_resolving(self, worker: int, last: int, *, is_lost: bool = True) -> None:
        """Pushes of a worker up to ``last`` happened; if it is lost, later ones did not. Nothing
        counts as drained until ``end_resolving``."""
        self._check_worker(worker)
        with self._changed:
            if is_lost:
                self._pushes.bar([worker])
                self._pushes.drop(worker, after=last)
            self._resolving += 1

    def end_resolving(self) -> None:
        """What was to be applied is."""
        with self._changed:
            self._resolving -= 1
            self._changed.notify_all()

    def copies(self, owner: int, workers: Collection[int] | None = None) -> list[Entrusted]:
        """Copies of a server's parts of some workers' pushes that are kept here."""
        with self._changed:
            return self._pushes.copies(owner, workers)

    def owed(self, workers: Collection[int] | None = None) -> list[Entrusted]:
        """Parts of some workers' pushes that are here, and not known to be at parity."""
        with self._changed:
            return self._pushes.owed(workers)

    def inherit(self, given: Sequence[Entrusted]) -> None:
        """Stage what a lost server, whose place this one has, had of pushes."""
        for each in given:
            self._check_push(each.worker, each.part)
        with self._changed:
            self._pushes.check_room(len(given))
            for each in given:
                if each.number > self._out.applied_W[each.worker]:
                    self._pushes.put(each)

    def entrust(self, owner: int, given: Sequence[Entrusted]) -> None:
        """Keep copies of a server's parts."""
        with self._changed:
            self._check_wards([owner])
            for each in given:
                self._check_worker(each.worker)
            self._pushes.check_room(len(given))
            for each in given:
                self._pushes.witness(owner, each)

    def _check_push(self, worker: int, parts: Sequence[Gradients]) -> None:
        self._check_worker(worker)
        for part in parts:
            arena = self._arena(part.arena)
            arena.check_slots(part.slots_N)
            if part.grads_ND.shape != (len(part.slots_N), arena.spec.dim):
                raise InvalidRequestError(
                    "gradients do not fit their rows",
                    tables=arena.spec.name,
                    shape=part.grads_ND.shape,
                    rows=len(part.slots_N),
                    dim=arena.spec.dim,
                )

    def push(
        self, worker: int, number: int, parts: Sequence[Gradients], *, is_resolved: bool = False
    ) -> bool:
        """Apply a push to rows that are here; False if it was applied before.

        Waits while too many differences wait for parity. ``is_resolved``: its worker is lost, and
        it was decided that it counts.
        """
        self._check_push(worker, parts)
        with self._changed:
            while number > self._out.applied_W[worker]:
                if not is_resolved:  # again after each wait: it may have been taken for lost
                    self._pushes.check_heard(worker)
                wanted = [self._wanted(worker, number, part) for part in parts]
                if not self._has_room(wanted):
                    with self._hurrying():
                        self._wait()
                    continue
                for part in wanted:
                    self.arenas[part.arena].update(part.slots_N, part.grads_ND)
                self._out.applied_W[worker] = number
                self._pushes.apply(Entrusted(worker, number, parts))
                self.counts["rows_updated"] += sum(len(part.slots_N) for part in wanted)
                self._changed.notify_all()
                return True
            return False

    def assign(self, parts: Sequence[Gradients]) -> None:
        """Set weights instead of training them: before training, or where it does not matter when.

        The parts hold weights in the place of gradients.
        """
        self._check_push(0, parts)
        with self._changed:
            with self._hurrying():
                while not self._has_room(parts):
                    self._wait()
            for part in parts:
                self.arenas[part.arena].assign(part.slots_N, part.grads_ND)
            self._changed.notify_all()

    def snapshot(self, order: SnapshotOrder) -> tuple[list[Copied], np.ndarray]:
        """Copy the rows that a checkpoint must hold; also the last push of each worker in them.

        Raises:
            ConflictError: not all rows are here.
        """
        with self._changed:
            if any(arena.rows_missing for arena in self.arenas):
                raise ConflictError("rows are missing here", server=self.server)
            copied = [Copied(arena.index, *arena.copy(order)) for arena in self.arenas]
            return copied, self._out.applied_W.copy()

    def read(self, arena: int, *, is_parity: bool, start: int, stop: int) -> np.ndarray:
        """Whole records, or parities, from slot to slot."""
        found = self._arena(arena)
        with self._changed:
            rows_MW = found.parities_QW if is_parity else found.records_MW
            wanted_NW = rows_MW[start:stop]
            _check_answer(wanted_NW.nbytes)
            return wanted_NW.copy()

    def _wanted(self, worker: int, number: int, part: Gradients) -> Gradients:
        """What of a push rows lack: of one sent again, parity may have some."""
        if number > self._past_W[worker]:
            return part
        arena = self.arenas[part.arena]
        placement = arena.spec.placement
        stripes_N = placement.stripes_of(arena.ids_M[part.slots_N])
        servers_NP = placement.parity_servers_of(stripes_N)
        granules_N = arena.granules(part.slots_N)
        marks_N = self._past_SGW[servers_NP, granules_N[:, None], worker].max(axis=1, initial=-1)
        is_wanted_N = marks_N < number
        self.counts["rows_sent_again"] += int(is_wanted_N.sum())
        self.counts["rows_kept_by_parity"] += int((~is_wanted_N).sum())
        return Gradients(part.arena, part.slots_N[is_wanted_N], part.grads_ND[is_wanted_N])

    def _has_room(self, parts: Sequence[Gradients]) -> bool:
        """Whether the differences of all rows of a push can wait.

        While ranges are frozen there is always room: the queue grows up to one record a row.
        """
        for part in parts:
            arena = self.arenas[part.arena]
            if arena.code is None or arena.room() >= len(part.slots_N):
                continue
            if not self._out.frozen and arena.waiting > 0:
                return False
            arena.grow(len(part.slots_N))
        return True

    def durable_W(self) -> np.ndarray:
        """For each worker the last push whose differences have all arrived at parity."""
        with self._changed:
            if all(arena.code is None for arena in self.arenas):
                return self._out.applied_W.copy()
            return self._out.known_W

    def traffic(self) -> int:
        """A number that rises when workers pull or push."""
        return self.counts["rows_pulled"] + self.counts["rows_updated"]

    @property
    def applied_W(self) -> np.ndarray:
        """For each worker the last push that changed rows here."""
        with self._changed:
            return self._out.applied_W.copy()

    # Differences out.

    def waiting(self) -> int:
        """How many rows' differences wait."""
        return sum(arena.waiting for arena in self.arenas)

    def wait_for_work(self, timeout_s: float, *, every_s: float = 0.0) -> None:
        """Return when something may be flushed, or after a while.

        Flushes are at least ``every_s`` apart, so that differences add up, except while somebody
        waits for one.
        """
        with self._changed:
            if (self._out.frozen or not self._has_news()) and not self._is_closed:
                self._hurry.wait(timeout_s)
            while self._hurried == 0 and not self._is_closed:
                left_s = self._flushed_at + every_s - time.monotonic()
                if left_s <= 0:
                    return
                self._hurry.wait(left_s)

    @contextlib.contextmanager
    def _hurrying(self) -> Iterator[None]:
        """Differences leave at once while the block runs; the lock is held."""
        self._hurried += 1
        self._hurry.notify_all()
        try:
            yield
        finally:
            self._hurried -= 1

    def _has_news(self) -> bool:
        return self.waiting() > 0 or self._out.has_news()

    def wait_until_drained(self) -> None:
        """Return when all differences that wait now, or are on their way, have arrived. Those of
        later pushes may wait: others go on pushing."""
        with self._changed, self._hurrying():
            applied_W, after = self._out.applied_W.copy(), self._out.next
            while not self._is_drained(applied_W, after):
                self._wait(_TICK_S)

    def _is_drained(self, applied_W: np.ndarray, after: int) -> bool:
        if self._resolving:
            return False
        if self._out.flush is None and not self.waiting():
            return True
        return self._out.has_arrived(applied_W, after)

    def wait_durable(self, worker: int, timeout_s: float) -> None:
        """Return when what a worker pushed is at parity, or after a while."""
        ends_at = time.monotonic() + timeout_s
        with self._changed, self._hurrying():
            while self.durable_W()[worker] < self._out.applied_W[worker]:
                left_s = ends_at - time.monotonic()
                if left_s <= 0:
                    return
                self._wait(min(left_s, _TICK_S))

    def begin_flush(self) -> Flush | None:
        """Differences that may leave; None if none wait. One flush at a time."""
        with self._changed:
            if not self._has_news():
                return None
            parts: dict[int, list[Differences]] = {}
            for arena in self.arenas:
                for server, found in arena.take(self._out.frozen).items():
                    parts.setdefault(server, []).extend(found)
            return self._out.begin(parts)

    def end_flush(self) -> None:
        """The flush under way has arrived everywhere, or its receiver is lost."""
        with self._changed:
            flush = self._out.end()
            self._pushes.forget(self._out.applied_W, self._out.known_W)
            if len(flush.frozen) < self.spec.locks:  # else the next must not wait: nothing left
                self._flushed_at = time.monotonic()
            self.counts["flushes"] += 1
            self.counts["differences"] += flush.rows
            self.counts["difference_bytes"] += flush.bytes_of(DIFFERENCE)
            self.counts["gradient_bytes"] += flush.bytes_of(GRADIENT)
            self._changed.notify_all()

    # Differences in.

    def fold(self, source: int, flush: Flush, *, epoch: int) -> None:
        """Fold a server's flush into the parities here, once; with several parities a stripe it is
        kept until ``apply_flush``, so that all of them have it or none.

        Raises:
            ConflictError: the sender, or this server, does not know who else is alive.
        """
        with self._changed:
            self._check_epoch(epoch)
            self._check_server(source)
            self._check_flush(flush)
            self._pushes.forget_copies(source, flush.durable_W)
            if self._in.keep(source, flush) and self.spec.parity_max <= 1:
                self._apply(source, flush.number)

    def _check_flush(self, flush: Flush) -> None:
        """Refuse a flush that cannot be folded whole, before anything of it is."""
        self._check_granules(flush.frozen)
        for part in flush.parts[self.server]:
            self._arena(part.arena).check_differences(part)

    def _check_granules(self, granules: Collection[int]) -> None:
        is_known = all(0 <= granule < self.spec.locks for granule in granules)
        if len(granules) > self.spec.locks or not is_known:
            raise InvalidRequestError(
                "no such range", ranges=sorted(granules)[:5], locks=self.spec.locks
            )

    def _check_server(self, server: int) -> None:
        if not 0 <= server < self.spec.servers:
            raise InvalidRequestError("no such server", server=server)

    def _check_worker(self, worker: int) -> None:
        if not 0 <= worker < WORKERS_MAX:
            raise InvalidRequestError("no such worker", worker=worker, most=WORKERS_MAX - 1)

    def apply_flush(self, source: int, number: int, *, epoch: int) -> None:
        """All parities have been given this flush: fold it."""
        with self._changed:
            self._check_epoch(epoch)
            self._apply(source, number)

    def settle(self, source: int, number: int) -> None:
        """Of a lost server's last flush: fold it if it has this number, else forget it."""
        self._check_server(source)
        with self._changed:
            self._apply(source, number)
            self._in.forget(source)

    def _apply(self, source: int, number: int) -> None:
        flush = self._in.take(source, number)
        if flush is None:
            return
        for part in flush.parts[self.server]:
            self.counts["rows_folded"] += self._arena(part.arena).fold(part, self._in.is_ready_G)
        self._in.note(source, flush)

    def report(self, source: int) -> Report:
        """What is known here of a server's flushes."""
        self._check_server(source)
        with self._changed:
            return self._in.report(source)

    # Recovery: others', and this server's own.

    def freeze(self, ticket: str, granules: Collection[int], *, epoch: int) -> np.ndarray:
        """Let differences of ranges wait from now on; returns when none is on its way.

        Returns the marks of what has left of each range, in the order given.
        """
        self._check_granules(granules)
        with self._changed:
            self._check_epoch(epoch)
            self._check_ticket(ticket)
            self._out.freeze(ticket, granules)
            while self._out.flush is not None:
                self._wait()
                self._check_epoch(epoch)
            return self._out.known_of(granules)

    def _check_ticket(self, ticket: str) -> None:
        """Refuse a freeze where there are more than all servers together ask for at a time."""
        most = _TICKETS_EACH * self.spec.servers
        if len(ticket) > _TICKET_MAX or self._out.tickets >= most:
            raise InvalidRequestError("no such freeze", ticket=ticket[:_TICKET_MAX], most=most)

    def thaw(self, ticket: str) -> None:
        """Let differences of ranges leave again."""
        with self._changed:
            self._out.thaw(ticket)
            self._changed.notify_all()
            self._hurry.notify_all()  # what was held back may leave

    def fetch(
        self, ticket: str, arena: int, slots_N: np.ndarray, parities_N: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows as parity knows them, and parities, of ranges that are frozen.

        Raises:
            ConflictError: they are not frozen any more.
        """
        with self._changed:
            self._check_frozen(ticket)
            found = self._arena(arena)
            _check_answer(4 * (len(slots_N) + len(parities_N)) * found.spec.width)
            if len(found.missing(slots_N)):
                raise ConflictError("rows are missing here", tables=found.spec.name)
            return found.as_parity_knows(slots_N), found.parities(parities_N)

    def slab_shape(self, arena: int, lost: int, stripes: range) -> tuple[int, int]:
        """Rows and floats of what a lost server needs of some stripes.

        Raises:
            InvalidRequestError: there are no such stripes, or nothing is rebuilt from them so.
        """
        found = self._arena(arena)
        self._check_server(lost)
        is_known = 0 <= stripes.start <= stripes.stop <= found.spec.stripes
        if not is_known or lost == self.server or found.code is None or not found.code.is_exact:
            raise InvalidRequestError("no slab of such stripes", tables=found.spec.name, lost=lost,
                                      first=stripes.start, last=stripes.stop)  # fmt: skip
        rows = slab.slab_rows(found, giver=self.server, lost=lost, stripes=stripes)
        return rows, found.spec.width

    def pack_slab(
        self, ticket: str, arena: int, lost: int, stripes: range, out_NW: np.ndarray
    ) -> None:
        """Copy what a lost server needs of some stripes, as parity knows it.

        Raises:
            ConflictError: they are not frozen any more, or not all is here.
        """
        with self._changed:
            frozen = self._check_frozen(ticket)
            found = self._arena(arena)
            if not stripes:
                return
            first, last = granules_of(
                np.array([stripes[0], stripes[-1]]), stripes=found.spec.stripes,
                locks=self.spec.locks,
            )  # fmt: skip
            if not frozen.issuperset(range(first, last + 1)):
                raise ConflictError("these stripes are not frozen", ticket=ticket)
            is_ready = self._in.is_ready_G[first : last + 1].all()
            if not is_ready or not slab.has_all(found, stripes):
                raise ConflictError("not all of these stripes is here", tables=found.spec.name)
            slab.pack_slab(found, out_NW, giver=self.server, lost=lost, stripes=stripes)

    def install_block(self, block: slab.Block, slabs: Mapping[int, np.ndarray]) -> int:
        """Make rows of what others gave, and parities of a range that is not ready yet; how many
        rows were new. The parities count from ``install_parities`` on."""
        with self._changed:
            arena = self.arenas[block.arena]
            return slab.install_block(arena, block, slabs, lost=self.server)

    def supply(self, parts: Sequence[Gradients]) -> int:
        """Weights of rows that workers hold, for those that are lost here; how many were."""
        self._check_push(0, parts)
        for part in parts:
            if not self._arena(part.arena).spec.is_held:
                raise InvalidRequestError("these rows are not held by workers", arena=part.arena)
        rows = 0
        with self._changed:
            for part in parts:
                arena = self.arenas[part.arena]
                values_NW = np.zeros((len(part.slots_N), arena.spec.width), np.float32)
                values_NW[:, : arena.spec.dim] = part.grads_ND
                rows += arena.install(part.slots_N, values_NW)
        return rows

    def _check_frozen(self, ticket: str) -> frozenset[int]:
        """The ranges that are frozen under a ticket."""
        frozen = self._out.frozen_by(ticket)
        if frozen is None:
            raise ConflictError("the ranges are not frozen any more", ticket=ticket)
        return frozen

    def install(self, arena: int, slots_N: np.ndarray, records_NW: np.ndarray) -> int:
        """Put decoded rows in place; how many were new."""
        with self._changed:
            return self.arenas[arena].install(slots_N, records_NW)

    def install_parities(
        self,
        ticket: str,
        granules: Sequence[int],
        built: Iterable[tuple[int, np.ndarray, np.ndarray]],
        marks: Mapping[int, np.ndarray],
    ) -> None:
        """Put parities of frozen ranges in place: from now on differences are folded into them.

        ``marks`` are what each server had sent of these ranges.

        Raises:
            ConflictError: they are not frozen any more: differences may have passed by.
            DataLossError: parities of gradients have states, which are not built anew.
        """
        for each in self.arenas:
            if each.spec.keeps_states:
                raise DataLossError("float sums of gradients cannot be built anew",
                                    tables=each.spec.name,
                                    todo="use propagation='difference' to recover")  # fmt: skip
        with self._changed:
            self._check_frozen(ticket)
            for arena, slots_N, parities_NW in built:
                self.arenas[arena].parities_QW[slots_N] = parities_NW
            self._in.set_ready(granules, marks)

    @property
    def ready_G(self) -> np.ndarray:
        """Of which ranges the parities are here."""
        return self._in.is_ready_G.copy()

    @property
    def rows_missing(self) -> int:
        """Data rows that are not decoded yet."""
        return sum(arena.rows_missing for arena in self.arenas if not arena.spec.is_held)
