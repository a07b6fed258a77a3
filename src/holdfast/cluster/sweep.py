"""The sweep of a range by slabs: a lost server's rows and parities at once, at memory's speed.

    freeze -> ask all for slabs of the next blocks -> make one of those that came, in place
    ... -> parities of the range count -> (the next range) -> thaw

This is how a server comes back that alone lacks anything. All others answer with what they hold of
a block's stripes, as parity knows it; each stripe gives this server's row or its parity of it.

Why it is right. From the freeze on, no difference of the range leaves any server, and none is on
its way: rows as parity knows them, and parities, are one state of every stripe, and stay it until
the thaw. A server answers only under the same ticket, so all slabs of a block are of that state.
Rows decoded from it are rows as parity knows them, wherever this server's differences are; a row
that was asked for before and has changed since is here already, and stays. Parities encoded from
it count (``Shard.install_parities``) only if the range is still frozen here when they do: then no
difference has passed by. Until then nothing is folded into them, and nobody asks for them.

Invariants:
- Anything that fails voids the range (ConflictError): it is frozen and built again, on new streams
  and in new memory, so that no late answer is taken for another.
- A block is made in place while nobody else reads or changes this shard: rows that somebody asked
  for are here already, have changed since, and stay as they are.

Not here: others that lack something too (recovery.py), what a slab is (slab.py).

# N rows of a slab, W floats of a record
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from holdfast.cluster import slab
from holdfast.cluster.freezer import Freezer
from holdfast.cluster.handover import Offer
from holdfast.cluster.message import Message
from holdfast.cluster.pace import Pace
from holdfast.cluster.peers import PipedPeers
from holdfast.cluster.shard import Shard
from holdfast.cluster.slab import Block
from holdfast.cluster.spec import granule_stripes
from holdfast.cluster.view import View
from holdfast.errors import CorruptDataError, HoldfastError, UnavailableError

_BLOCK_BYTES = 16 << 20
_AHEAD = 1  # blocks that are on their way while one is made
_FROZEN_REST_S = 0.2  # in a range: its differences wait
_GIVING = 2  # those who give slabs work about as much, altogether


class SlabSweep:
    """Rebuilds ranges of one server; used by one thread."""

    def __init__(self, shard: Shard, peers: PipedPeers, pace: Pace) -> None:
        self._shard, self._peers, self._pace = shard, peers, pace
        self._freezer = Freezer(shard, peers, name="sweep")
        self._offers: dict[int, Offer] | None = None
        self._is_coded = all(
            arena.code is not None and arena.code.is_exact
            for arena in shard.arenas
            if not arena.spec.is_held
        )

    def can_sweep(self, view: View) -> bool:
        """Whether nobody else lacks anything, and codes are exact."""
        return self._is_coded and view.lacking <= {self._shard.server}

    def sweep(self, granules: Sequence[int], view: View) -> Iterator[tuple[int, int]]:
        """Rebuild the rows that ranges lack, and their parities; each range with how many rows.

        As long as nobody pulls or pushes here they are frozen and rebuilt in one go; else one
        after the other, as far as the caller goes on, with rests in between.

        Raises:
            ConflictError: members have changed; to be tried again with those that are left.
        """
        left = list(granules)
        while left:
            together = left[:1] if self._pace.has_traffic() else left
            done = 0
            for granule, rows in self._sweep_frozen(together, view):
                done += 1
                yield granule, rows
            left = left[done:]
            self._pace.rest()

    def _sweep_frozen(self, granules: Sequence[int], view: View) -> Iterator[tuple[int, int]]:
        """The same under one freeze; ends early, after a range, when somebody works here."""
        shard = self._shard
        blocks = {granule: self._blocks(granule) for granule in granules}
        every = [block for each in blocks.values() for block in each]
        self._freezer.enter(view)
        try:
            offers = self._share(every)
            with self._freezer.frozen(view, granules) as (ticket, marks), self._voided_by_failure():
                given = self._gather(ticket, every, offers)
                for at, granule in enumerate(granules):
                    rows = self._rebuild(itertools.islice(given, len(blocks[granule])))
                    found = {server: marks_GW[[at]] for server, marks_GW in marks.items()}
                    shard.install_parities(ticket, [granule], (), found)
                    yield granule, rows
                    if at + 1 < len(granules) and self._pace.has_traffic():
                        self._peers.close()  # slabs of the next range are on their way
                        self._forget()
                        return
        except BaseException:
            self._forget()
            raise

    def _rebuild(self, given: Iterable[tuple[Block, dict[int, np.ndarray]]]) -> int:
        """Make a range's blocks, with short rests; how many rows were new."""
        rows = 0
        rested_s, worked_s = 0.0, time.thread_time()  # waiting is no work
        for block, slabs in given:
            rows += self._shard.install_block(block, slabs)
            since_s, worked_s = worked_s, time.thread_time()
            self._pace.work(_GIVING * (worked_s - since_s))
            rested_s += self._pace.rest(_FROZEN_REST_S - rested_s)
        return rows

    def close(self) -> None:
        """Give up memory that is shared."""
        if self._offers:
            with contextlib.suppress(HoldfastError):
                self._freezer.ask({server: Message("handover") for server in self._offers})
        self._forget()
        self._peers.close()

    def _blocks(self, granule: int) -> list[Block]:
        found = []
        for arena in self._shard.arenas:
            if arena.code is None:
                continue
            stripes = granule_stripes(
                granule, stripes=arena.spec.stripes, locks=self._shard.spec.locks
            )
            found += slab.plan_blocks(arena, stripes, block_bytes=_BLOCK_BYTES)
        return [block for block in found if block.size]

    # One range.

    def _gather(
        self, ticket: str, blocks: list[Block], offers: dict[int, Offer]
    ) -> Iterator[tuple[Block, dict[int, np.ndarray]]]:
        """Blocks with their slabs; while one is made the next are on their way."""
        asked: deque[dict[int, int]] = deque()
        for number, block in enumerate(blocks):
            while len(asked) <= _AHEAD and number + len(asked) < len(blocks):
                after = number + len(asked)
                asked.append(self._ask(ticket, blocks[after], after % (_AHEAD + 1), offers))
            arena = self._shard.arenas[block.arena]
            now = asked.popleft()
            slabs = {}
            for server, answer in self._peers.receive_all(now):
                if answer.arrays:
                    slabs[server] = answer.arrays[0]
                else:
                    slabs[server] = _room(
                        offers[server], number % (_AHEAD + 1), now[server], arena.spec.width
                    )
            yield block, slabs

    def _ask(
        self, ticket: str, block: Block, turn: int, offers: dict[int, Offer]
    ) -> dict[int, int]:
        """Ask everybody who has something of a block's stripes; how many rows each has."""
        shard = self._shard
        arena = shard.arenas[block.arena]
        rows = {
            server: slab.slab_rows(arena, giver=server, lost=shard.server, stripes=block.stripes)
            for server in range(shard.spec.servers)
            if server != shard.server
        }
        rows = {server: count for server, count in rows.items() if count}
        meta = {
            "ticket": ticket,
            "arena": block.arena,
            "lost": shard.server,
            "first": block.stripes.start,
            "last": block.stripes.stop,
        }
        width = arena.spec.width
        self._peers.send_all(
            {
                server: Message(
                    "slab", {**meta, "at": _start(offers.get(server), turn, 4 * count * width)}
                )
                for server, count in rows.items()
            }
        )
        return rows

    # Memory and failures.

    def _share(self, blocks: list[Block]) -> dict[int, Offer]:
        """Memory shared with each peer that can open it, made once for a sweep."""
        if self._offers is None:
            self._offers = {}
            offered = {}
            shard = self._shard
            for server in range(shard.spec.servers):
                if server == shard.server:
                    continue
                size = max(
                    (
                        4 * shard.arenas[block.arena].spec.width * slab.slab_rows(
                            shard.arenas[block.arena], giver=server, lost=shard.server,
                            stripes=block.stripes,
                        )
                        for block in blocks
                    ),
                    default=0,
                )  # fmt: skip
                if size:
                    with contextlib.suppress(UnavailableError):
                        offered[server] = Offer((_AHEAD + 1) * _pages(size + size // 16))
            try:
                answers = self._freezer.ask(
                    {s: Message("handover", offer.to_json()) for s, offer in offered.items()}
                )
            finally:  # who has opened it has it; else nobody is to, and it must not stay open
                for offer in offered.values():
                    offer.withdraw()
            for server, offer in offered.items():
                if answers[server].meta["is_here"]:
                    self._offers[server] = offer
        return self._offers

    @contextlib.contextmanager
    def _voided_by_failure(self) -> Iterator[None]:
        """Streams with answers that nobody waits for any more are not used again."""
        try:
            yield
        except BaseException:
            self._peers.close()
            raise

    def _forget(self) -> None:
        for offer in (self._offers or {}).values():
            offer.withdraw()
        self._offers = None


def _start(offer: Offer | None, turn: int, size: int) -> int | None:
    """Where in shared memory the slab of a block lies: blocks take turns. None: it has no room."""
    if offer is None or size > offer.size // (_AHEAD + 1):
        return None
    return turn * (offer.size // (_AHEAD + 1))


def _room(offer: Offer, turn: int, rows: int, width: int) -> np.ndarray:
    at = _start(offer, turn, 4 * rows * width)
    slab_NW = None if at is None else offer.rows(at, rows, width)
    if slab_NW is None:
        raise CorruptDataError("a slab that is nowhere", rows=rows, width=width)
    return slab_NW


def _pages(size: int) -> int:
    return -(-size // 4096) * 4096
