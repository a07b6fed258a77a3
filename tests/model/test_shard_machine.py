"""Random lives of a cluster's shards, without network or threads, against a plain oracle.

Workers stage and commit message by message, flushes are delivered to receivers in any order and
more than once, servers and workers are lost between any two messages, replacements freeze, decode
and thaw while all of that goes on. Whatever the order: parity is the code of what rows were told
to it, and in the end every push has happened once, to the bit.

The rules play the parts of cluster/client.py, cluster/server.py, cluster/recovery.py and
cluster/coordinator.py; shards, flushes, plans and decisions are the real ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from holdfast.cluster import audit, decode, message, parts, slab
from holdfast.cluster.arena import Arena
from holdfast.cluster.arenashard import fold_rows
from holdfast.cluster.commit import choose_commits
from holdfast.cluster.decode import Sources
from holdfast.cluster.flush import Flush, Report, choose_settlement, remember
from holdfast.cluster.pushes import Entrusted, Gradients
from holdfast.cluster.shard import Shard
from holdfast.cluster.spec import ClusterSpec, Optimizer, TableSpec, granule_stripes
from holdfast.cluster.view import View
from holdfast.errors import ConflictError
from holdfast.model.placement import Placement
from tests.cluster.oracle import Oracle, random_gradients

EXACT = Optimizer("sgd", lr=1.0)  # of whole numbers: the order of pushes does not matter


def make_spec(
    placement: Placement,
    code: str,
    optimizer: Optimizer,
    *,
    locks: int,
    waiting_rows: int,
    propagation: str = "difference",
) -> ClusterSpec:
    """``propagation`` is what parity is told of the dense table, whose parities are copies."""
    dense = dataclasses.replace(placement, data=1)
    bound = 0.0 if optimizer == EXACT else 0.5
    tables = (
        TableSpec("users", 23, 2, placement, code, optimizer, seed=1, bound=bound),
        TableSpec("ads", 5, 2, placement, code, optimizer, seed=3, bound=bound),  # one arena
        TableSpec(
            "dense", 4, 3, dense, code, optimizer, seed=2, bound=bound, propagation=propagation
        ),
    )
    return ClusterSpec(tables, locks=locks, waiting_rows=waiting_rows)


CODED = (
    (Placement(4, data=3, parity=1), "xor"),
    (Placement(3, data=2, parity=1), "rs"),
    (Placement(5, data=2, parity=2), "rs"),
    (Placement(5, data=3, parity=2), "rs"),
    (Placement(6, data=2, parity=1, groups=2), "xor"),
    (Placement(4, data=2, parity=1), "sum"),
)
ALONE = tuple(Optimizer(name, lr=0.25) for name in ("momentum", "rowwise-adagrad", "adam"))
PICKS = st.integers(0, 1 << 20)


@dataclass
class Push:
    """A push on its way: first to be staged, then to be committed, at every server in it."""

    number: int
    gradients: dict[str, tuple[np.ndarray, np.ndarray]]
    by_server: dict[int, list[Gradients]]
    pending: set[int] = field(default_factory=set)
    servers: frozenset[int] = frozenset()
    is_decided: bool = False


@dataclass
class Worker:
    index: int
    number: int = -1
    returned: int = -1
    kept: dict[int, Push] = field(default_factory=dict)
    current: Push | None = None
    behind: set[int] = field(default_factory=set)


@dataclass
class Flight:
    """A flush on its way: first to be kept, then to be folded, by everyone it was made for."""

    flush: Flush
    places: dict[int, str]
    pending: set[int]
    is_applying: bool = False


class World:
    """All shards of a cluster, and what is on its way between them."""

    def __init__(self, spec: ClusterSpec, *, workers: int, is_exact: bool) -> None:
        self.spec = spec
        self.is_exact = is_exact
        self.oracle = Oracle(spec)
        self.view = View(1, tuple(f"{server}.0" for server in range(spec.servers)), version=1)
        self.shards = [self.make_shard(server, 1) for server in range(spec.servers)]
        for shard in self.shards:
            shard.begin()
        self.workers = [Worker(index) for index in range(workers)]
        self.known: dict[int, dict[int, Report]] = {}
        self.flights: dict[int, Flight] = {}
        self.tickets: dict[int, tuple[str, list[int], dict[int, np.ndarray]]] = {}
        self.names = workers
        self.pushes: dict[tuple[int, int], Push] = {}
        self.last: dict[int, int] = {}  # of each lost worker, the last push that happened

    def make_shard(self, server: int, epoch: int) -> Shard:
        return Shard(self.spec, server, epoch=epoch, has_witnesses=True)

    # Workers.

    def begin_push(self, worker: Worker, seed: int) -> None:
        gradients = random_gradients(
            np.random.default_rng(seed), self.spec, rows=8, is_exact=self.is_exact
        )
        by_server: dict[int, list[Gradients]] = {}
        for index, arena in enumerate(self.spec.arenas):
            found = [(placed.start, *gradients[placed.table.name]) for placed in arena.tables]
            ids_N = np.concatenate([start + ids_N for start, ids_N, _ in found])
            grads_ND = np.concatenate([grads_ND for *_, grads_ND in found])
            servers_N = arena.placement.servers_of(ids_N)
            for server in np.unique(servers_N).tolist():
                at_N = np.flatnonzero(servers_N == server)
                slots_N = arena.placement.slots_of(ids_N[at_N])
                by_server.setdefault(server, []).append(Gradients(index, slots_N, grads_ND[at_N]))
        worker.number += 1
        witnesses = {w for server in by_server for w in self.spec.witnesses[server]}
        push = Push(
            worker.number, gradients, by_server, set(by_server) | witnesses, frozenset(by_server)
        )
        worker.current = worker.kept[worker.number] = push
        self.pushes[worker.index, worker.number] = push

    def copies(self, push: Push, witness: int) -> dict[int, list[Gradients]]:
        return {
            owner: found
            for owner, found in push.by_server.items()
            if witness in self.spec.witnesses[owner]
        }

    def send(self, worker: Worker, server: int) -> None:
        """What a worker tells a server next, if anything."""
        if server in worker.behind:
            self.send_again(worker, server)
        push = worker.current
        if push is None or server not in push.pending:
            return
        shard = self.shards[server]
        if not push.is_decided:
            own = push.by_server.get(server, [])
            copies = self.copies(push, server)
            shard.stage(worker.index, push.number, own, copies, servers=tuple(push.servers))
        else:
            staged = shard.staged(worker.index).get(push.number)
            if staged is None:
                assert push.number <= shard.applied_W[worker.index]
            else:
                self.change(server, worker.index, push, staged)
            self.forget(worker, server)
        push.pending.discard(server)
        if not push.pending and push.is_decided:
            worker.current, worker.returned = None, push.number
        elif not push.pending:
            push.is_decided, push.pending = True, set(push.servers)

    def send_again(self, worker: Worker, server: int) -> None:
        for number in sorted(worker.kept):
            push = worker.kept[number]
            own = push.by_server.get(server, [])
            if push.is_decided and own:
                self.change(server, worker.index, push, own)
            staged = [] if push.is_decided else own
            copies = self.copies(push, server)
            self.shards[server].stage(
                worker.index, number, staged, copies, servers=tuple(push.servers)
            )
        worker.behind.discard(server)

    def change(
        self,
        server: int,
        worker: int,
        push: Push,
        gradients: Sequence[Gradients],
        *,
        is_resolved: bool = False,
    ) -> None:
        shard = self.shards[server]
        self.present(server, [(part.arena, part.slots_N) for part in gradients])
        tables = [(shard.arenas[part.arena], len(part.slots_N)) for part in gradients]
        if not self.tickets and any(t.waiting and t.room() < rows for t, rows in tables):
            self.flush(server)  # else the push would wait for it
        shard.push(worker, push.number, gradients, is_resolved=is_resolved)
        assert not shard.push(worker, push.number, gradients, is_resolved=is_resolved)

    def forget(self, worker: Worker, server: int) -> None:
        durable = int(self.shards[server].durable_W()[worker.index])
        for number in [number for number in worker.kept if number <= durable]:
            push = worker.kept[number]
            push.by_server.pop(server, None)
            if not push.by_server and push.is_decided:
                del worker.kept[number]

    def lose_worker(self, worker: Worker) -> None:
        """Its last push happens everywhere or nowhere, those before everywhere."""
        held = {server: shard.bar(worker.index) for server, shard in enumerate(self.shards)}
        commits = choose_commits(held)
        self.last[worker.index] = commits.last
        assert commits.last >= worker.returned  # what returned happened, whoever is lost
        for server, shard in enumerate(self.shards):
            given = [
                each
                for witness, numbers in commits.given.get(server, {}).items()
                for each in self.shards[witness].copies(server, [worker.index])
                if each.number in numbers
            ]
            self.resolve(server, worker.index, given)
            with pytest.raises(ConflictError, match="taken for lost"):
                shard.stage(worker.index, worker.number + 1, [])
        self.entrust(range(self.spec.servers), [worker.index])
        self.workers.remove(worker)
        self.workers.append(Worker(self.names))
        self.names += 1

    def resolve(self, server: int, worker: int, given: Sequence[Entrusted]) -> None:
        shard = self.shards[server]
        shard.inherit(given)
        is_lost = worker in self.last
        if not is_lost:
            held = {s: each.held(worker) for s, each in enumerate(self.shards)}
        last = self.last[worker] if is_lost else choose_commits(held).last
        shard.begin_resolving(worker, last, is_lost=is_lost)
        for number, part in shard.staged(worker).items():
            if number <= last:
                self.change(server, worker, self.pushes[worker, number], part, is_resolved=True)
        shard.end_resolving()

    def entrust(self, witnesses: Sequence[int], workers: Sequence[int] | None) -> None:
        for owner, others in enumerate(self.spec.witnesses):
            for witness in set(others) & set(witnesses):
                self.shards[witness].entrust(owner, self.shards[owner].owed(workers))

    # Differences.

    def begin_flush(self, source: int) -> None:
        flush = self.shards[source].begin_flush()
        if flush is not None:
            places = {receiver: self.view.addresses[receiver] for receiver in flush.receivers}
            self.flights[source] = Flight(flush, places, set(flush.receivers))
            self._advance(source)

    def deliver(self, source: int, receiver: int, *, is_heard: bool = True) -> None:
        """Give a receiver what is next; unheard answers are asked for again."""
        flight, shard = self.flights[source], self.shards[receiver]
        epoch = self.view.epoch
        if self.view.addresses[receiver] != flight.places[receiver]:
            is_heard = True  # it was replaced, and builds its parities anew
        elif flight.is_applying:
            shard.apply_flush(source, flight.flush.number, epoch=epoch)
        else:
            sent = message.decode(*message.encode(parts.pack_flush(flight.flush, receiver)))
            shard.fold(source, parts.unpack_flush(sent, receiver), epoch=epoch)
        if is_heard:
            flight.pending.discard(receiver)
            self._advance(source)

    def _advance(self, source: int) -> None:
        flight = self.flights[source]
        if flight.pending:
            return
        if self.spec.parity_max > 1 and not flight.is_applying and flight.places:
            flight.is_applying, flight.pending = True, set(flight.places)
        else:
            self.shards[source].end_flush()
            del self.flights[source]

    def land(self, source: int) -> None:
        while source in self.flights:
            self.deliver(source, min(self.flights[source].pending))

    def flush(self, source: int) -> None:
        self.land(source)
        self.begin_flush(source)
        self.land(source)

    # Servers that are lost, and those that take their place.

    def lose(self, lost: Sequence[int]) -> None:
        living = [server for server in range(self.spec.servers) if server not in lost]
        epoch = self.view.epoch + 1
        self.view = self.view.replacing({s: f"{s}.{epoch}" for s in lost}, epoch=epoch)
        for server in living:
            self.shards[server].enter(epoch)
        self.tickets.clear()
        for server in lost:
            self.flights.pop(server, None)
            number = choose_settlement(self.reports(server, living))
            for other in living:
                self.shards[other].settle(server, number)
            shard = self.make_shard(server, epoch)
            reports = self.reports(server, living)
            known = self.known[server] = remember(self.known.get(server, {}), reports)
            shard.adopt(known, self.last)
            self.shards[server] = shard
        for worker in self.workers:
            worker.behind |= set(lost)
        for server in lost:
            found = {
                (each.worker, each.number): each
                for witness in self.spec.witnesses[server]
                for each in self.shards[witness].copies(server)
            }
            for index in sorted({worker for worker, _ in found}):
                self.resolve(server, index, [e for (w, _), e in found.items() if w == index])
        self.entrust(lost, None)

    def reports(self, lost: int, living: Sequence[int]) -> dict[int, Report]:
        return {server: self.shards[server].report(lost) for server in living}

    def freeze(self, server: int, granules: list[int]) -> None:
        ticket = f"{server}.{self.view.version}"
        for source in range(self.spec.servers):
            self.land(source)
        marks = {
            other: shard.freeze(ticket, granules, epoch=self.view.epoch)
            for other, shard in enumerate(self.shards)
        }
        self.tickets[server] = (ticket, granules, marks)

    def thaw(self, server: int) -> None:
        ticket, _, _ = self.tickets.pop(server)
        for shard in self.shards:
            shard.thaw(ticket)

    def present(self, server: int, wants: list[tuple[int, np.ndarray]]) -> None:
        """Decode what is asked for and not there."""
        shard = self.shards[server]
        missing = shard.missing(wants)
        if not missing:
            return
        if server in self.tickets:
            self.thaw(server)
        granules = {int(g) for t, slots_N in missing for g in shard.arenas[t].granules(slots_N)}
        self.freeze(server, sorted(granules))
        for table, slots_N in missing:
            self.decode_rows(server, table, slots_N)
        self.thaw(server)

    def decode_rows(self, server: int, table: int, slots_N: np.ndarray) -> None:
        found = self.shards[server].arenas[table]
        view = self.view
        sources = decode.plan_rows(
            found, slots_N, lacks_rows=view.lacks_rows, lacks_parities=view.lacks_parities
        )
        records_NW = self.rebuild(server, table, len(slots_N), sources)
        new = len(self.shards[server].missing([(table, slots_N)]))
        installed = self.shards[server].install(table, slots_N, records_NW)
        assert (installed > 0) == (new > 0)

    def rebuild(self, server: int, index: int, rows: int, sources: Sources) -> np.ndarray:
        table = self.shards[server].arenas[index]
        assert table.code is not None
        out_NW = np.zeros((rows, table.spec.width), np.float32)
        for source in sources.servers:
            part = sources.of(source)
            is_parity_F = part.is_parity_F
            fetched = self.shards[source].fetch(
                self.tickets[server][0],
                index,
                part.slots_F[~is_parity_F],
                part.slots_F[is_parity_F],
            )
            records_FW = np.concatenate(fetched)
            fold_rows(table.code, out_NW, part.rows_F, records_FW, part.coefficients_F)
        return out_NW

    def missing_in(self, server: int, granules: Sequence[int]) -> list[tuple[int, np.ndarray]]:
        found = []
        for index, table in enumerate(self.shards[server].arenas):
            slots_N = np.flatnonzero(~table.is_here_M)
            slots_N = slots_N[np.isin(table.granules(slots_N), granules)]
            if len(slots_N):
                found.append((index, slots_N))
        return found

    def build_parities(self, server: int) -> None:
        """Of the ranges that are frozen; only when every row is where it belongs."""
        shard = self.shards[server]
        ticket, granules, marks = self.tickets[server]
        built = []
        for index, table in enumerate(shard.arenas):
            slots_Q = np.arange(len(table.stripes_Q))
            slots_N = slots_Q[np.isin(table.parity_granules(slots_Q), granules)]
            sources = decode.plan_parities(table, slots_N)
            built.append((index, slots_N, self.rebuild(server, index, len(slots_N), sources)))
        shard.install_parities(ticket, granules, built, marks)

    @property
    def is_coded_exactly(self) -> bool:
        return all(arena.code != "sum" for arena in self.spec.arenas)

    def sweep_slabs(self, server: int) -> None:
        """Rows and parities of the ranges that are frozen, at once, from slabs of all others."""
        shard = self.shards[server]
        ticket, granules, marks = self.tickets[server]
        for granule in granules:
            if shard.ready_G[granule]:
                continue
            for arena in shard.arenas:
                stripes = granule_stripes(
                    granule, stripes=arena.spec.stripes, locks=self.spec.locks
                )
                for block in slab.plan_blocks(arena, stripes, block_bytes=64):
                    slabs = {}
                    for giver, other in enumerate(self.shards):
                        if giver != server:
                            shape = other.slab_shape(arena.index, server, block.stripes)
                            slabs[giver] = np.empty(shape, np.float32)
                            other.pack_slab(
                                ticket, arena.index, server, block.stripes, slabs[giver]
                            )
                    shard.install_block(block, slabs)
            at = granules.index(granule)
            found = {source: marks_GW[[at]] for source, marks_GW in marks.items()}
            shard.install_parities(ticket, [granule], (), found)
        assert shard.rows_missing == 0 and shard.ready_G.all()

    def tell(self) -> None:
        """Those that are whole again are said to be."""
        for server in sorted(self.view.lacks_rows):
            if self.shards[server].rows_missing == 0:
                self.view = self.view.with_rows(server)
        for server in sorted(self.view.lacks_parities - self.view.lacks_rows):
            if self.shards[server].ready_G.all():
                self.view = self.view.with_parities(server)

    def recover(self) -> None:
        """Everything that is lacking comes back."""
        for server in list(self.tickets):
            self.thaw(server)
        everything = list(range(self.spec.locks))
        for server in sorted(self.view.lacks_rows):
            self.freeze(server, everything)
            is_alone = self.view.lacking == {server} and self.is_coded_exactly
            if is_alone and self.view.epoch % 2 == 0:
                self.sweep_slabs(server)
            for table, slots_N in self.missing_in(server, everything):
                self.decode_rows(server, table, slots_N)
            self.thaw(server)
        self.tell()
        for server in sorted(self.view.lacks_parities):
            self.freeze(server, [g for g in everything if not self.shards[server].ready_G[g]])
            self.build_parities(server)
            self.thaw(server)
        self.tell()
        assert not self.view.lacking

    def drain(self) -> None:
        for server in list(self.tickets):
            self.thaw(server)
        for source, shard in enumerate(self.shards):
            self.land(source)
            while shard.waiting() or (shard.applied_W > shard.durable_W()).any():
                self.flush(source)

    # What must hold.

    def check_parities(self) -> None:
        """Every parity is the code of its rows as they were told to it."""
        for index, arena in enumerate(self.spec.arenas):
            known_NW = np.empty((arena.rows, arena.width), np.float32)
            for shard in self.shards:
                found = shard.arenas[index]
                slots_M = np.arange(len(found.ids_M))
                known_NW[found.ids_M] = found.as_parity_knows(slots_M)
            for server, shard in enumerate(self.shards):
                expected_QW = audit.encode(arena, server, known_NW)
                check_same(arena, shard.arenas[index].parities_QW, expected_QW)

    def check_rows(self) -> None:
        """Every push of workers that live, and of lost ones all that happened, once."""
        for (worker, number), push in sorted(self.pushes.items()):
            if worker not in self.last or number <= self.last[worker]:
                self.oracle.push(push.gradients)
        for index, arena in enumerate(self.spec.arenas):
            expected_NW = np.zeros((arena.rows, arena.width), np.float32)
            for placed in arena.tables:
                rows_NW = self.oracle.records[placed.table.name]
                expected_NW[placed.start : placed.start + len(rows_NW)] = rows_NW
            for shard in self.shards:
                found = shard.arenas[index]
                check_same(arena, found.records_MW, expected_NW[found.ids_M])


def check_same(arena: Arena, found_NW: np.ndarray, expected_NW: np.ndarray) -> None:
    """The same bits; a float sum does not keep the sign of zero."""
    if arena.code != "sum":
        found_NW, expected_NW = found_NW.view(np.uint32), expected_NW.view(np.uint32)
    np.testing.assert_array_equal(found_NW, expected_NW)


class ShardMachine(RuleBasedStateMachine):
    world: World

    @initialize(
        coded=st.sampled_from(CODED),
        optimizer=st.sampled_from((EXACT, EXACT, EXACT, *ALONE)),
        locks=st.sampled_from((1, 3)),
        waiting_rows=st.sampled_from((1, 4, 1 << 15)),
        propagation=st.sampled_from(("difference", "gradient")),
    )
    def start(
        self,
        coded: tuple[Placement, str],
        optimizer: Optimizer,
        locks: int,
        waiting_rows: int,
        propagation: str,
    ) -> None:
        placement, code = coded
        if code == "sum":
            optimizer = EXACT  # else it is right only nearly
            propagation = "difference"  # else nothing that is lost comes back
        spec = make_spec(
            placement,
            code,
            optimizer,
            locks=locks,
            waiting_rows=waiting_rows,
            propagation=propagation,
        )
        is_exact = optimizer == EXACT
        self.world = World(spec, workers=3 if is_exact else 1, is_exact=is_exact)

    def _worker(self, pick: int) -> Worker:
        return self.world.workers[pick % len(self.world.workers)]

    @rule(pick=PICKS, seed=PICKS, servers=st.lists(PICKS, max_size=8))
    def push(self, pick: int, seed: int, servers: list[int]) -> None:
        """Begin a push, or go on with one: a message to each of some servers."""
        worker = self._worker(pick)
        if worker.current is None:
            self.world.begin_push(worker, seed)
        for server in servers:
            self.world.send(worker, server % self.world.spec.servers)

    @rule(pick=PICKS, seed=PICKS)
    def push_everywhere(self, pick: int, seed: int) -> None:
        worker = self._worker(pick)
        if worker.current is None:
            self.world.begin_push(worker, seed)
        while worker.current is not None:
            self.world.send(worker, min(worker.current.pending))

    @rule(source=PICKS, is_whole=st.booleans())
    def flush(self, source: int, is_whole: bool) -> None:
        source %= self.world.spec.servers
        if source not in self.world.flights:
            self.world.begin_flush(source)
        if is_whole:
            self.world.land(source)

    @precondition(lambda self: self.world.flights)
    @rule(source=PICKS, receiver=PICKS, is_heard=st.booleans())
    def deliver(self, source: int, receiver: int, is_heard: bool) -> None:
        flights = sorted(self.world.flights)
        source = flights[source % len(flights)]
        pending = sorted(self.world.flights[source].pending)
        self.world.deliver(source, pending[receiver % len(pending)], is_heard=is_heard)

    @rule(first=PICKS, more=PICKS)
    def lose_servers(self, first: int, more: int) -> None:
        """One server, or as many at once as parities can make up for."""
        view, servers = self.world.view, self.world.spec.servers
        lost = {first % servers}
        if more % 3 == 0:
            lost.add(more // 3 % servers)
        if self.world.spec.can_decode(view.lacking | lost):
            self.world.lose(sorted(lost))

    @precondition(lambda self: not self.world.view.lacking)
    @rule(source=PICKS, messages=st.integers(0, 4), receiver=PICKS)
    def lose_sender(self, source: int, messages: int, receiver: int) -> None:
        """A server is lost when some have what it sent, and some have folded it."""
        world = self.world
        source %= world.spec.servers
        if source not in world.flights:
            world.begin_flush(source)
        for _ in range(messages):
            if source in world.flights:
                pending = sorted(world.flights[source].pending)
                world.deliver(source, pending[receiver % len(pending)])
        world.lose([source])

    @precondition(lambda self: self.world.view.lacking)
    @rule(server=PICKS, granule=PICKS)
    def freeze(self, server: int, granule: int) -> None:
        lacking = sorted(self.world.view.lacking)
        server = lacking[server % len(lacking)]
        if server not in self.world.tickets:
            self.world.freeze(server, [granule % self.world.spec.locks])

    @precondition(lambda self: self.world.tickets)
    @rule(server=PICKS, table=PICKS, thaws=st.booleans())
    def rebuild(self, server: int, table: int, thaws: bool) -> None:
        """Decode rows of a range that is frozen, or parities; some of it, or all."""
        world = self.world
        servers = sorted(world.tickets)
        server = servers[server % len(servers)]
        missing = world.missing_in(server, world.tickets[server][1])
        for index, slots_N in missing[table % 2 :]:
            world.decode_rows(server, index, slots_N)
        is_ready = world.shards[server].ready_G[world.tickets[server][1]].all()
        if not world.view.lacks_rows and not is_ready:
            world.build_parities(server)
        if thaws:
            world.thaw(server)

    @rule()
    def tell(self) -> None:
        self.world.tell()

    @rule()
    def recover(self) -> None:
        self.world.recover()

    @rule(pick=PICKS)
    def settle(self, pick: int) -> None:
        """A worker waits, between two pushes, until what it pushed is at parity."""
        worker = self._worker(pick)
        if not self.world.tickets and worker.current is None:
            for server in range(self.world.spec.servers):
                if server in worker.behind:
                    self.world.send_again(worker, server)
                self.world.flush(server)
                self.world.forget(worker, server)

    @rule(pick=PICKS)
    def lose_worker(self, pick: int) -> None:
        """At any moment, also right after or before a server."""
        worker = self._worker(pick)
        if self.world.names < 20:
            self.world.lose_worker(worker)

    @invariant()
    def parities_are_the_code_of_rows_as_told(self) -> None:
        if not self.world.flights and not self.world.view.lacking:
            self.world.check_parities()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.recover()
        for worker in world.workers:
            for server in sorted(worker.behind):
                world.send_again(worker, server)
            while worker.current is not None:
                world.send(worker, min(worker.current.pending))
        world.drain()
        world.check_parities()
        world.check_rows()
        for worker in world.workers:
            for server in range(world.spec.servers):
                world.forget(worker, server)
            assert not worker.kept
        for server in range(world.spec.servers):
            world.flush(server)  # witnesses hear that they may forget
        for shard in world.shards:  # of workers that live the next push clears up what is left
            assert not shard.owed(world.last)
            assert not any(shard.copies(o, world.last) for o in range(world.spec.servers))


TestEveryPushHappensOnceWhoeverIsLostWhen = ShardMachine.TestCase
TestEveryPushHappensOnceWhoeverIsLostWhen.settings = settings(
    max_examples=12, stateful_step_count=40, deadline=None, derandomize=True
)


@pytest.mark.parametrize("messages", range(9))
@pytest.mark.parametrize("is_with_receiver", [False, True])
@pytest.mark.parametrize("propagation", ["difference", "gradient"])
def test_a_sender_lost_at_any_message_of_a_flush_comes_back(
    messages: int, is_with_receiver: bool, propagation: str
) -> None:
    placement = Placement(5, data=2, parity=2)
    spec = make_spec(placement, "rs", EXACT, locks=3, waiting_rows=99, propagation=propagation)
    for source in range(spec.servers):
        world = World(spec, workers=1, is_exact=True)
        worker = world.workers[0]
        for seed in range(4):
            world.begin_push(worker, seed)
            while worker.current is not None:
                world.send(worker, min(worker.current.pending))
        world.begin_flush(source)
        receivers = sorted(world.flights[source].places)
        for _ in range(messages):
            if source in world.flights:
                world.deliver(source, max(world.flights[source].pending))
        world.lose(sorted({source, receivers[-1]} if is_with_receiver else {source}))
        world.recover()
        for server in sorted(worker.behind):
            world.send_again(worker, server)
        world.drain()
        world.check_parities()
        world.check_rows()
