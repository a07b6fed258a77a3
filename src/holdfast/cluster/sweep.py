"""The sweep of a range by slabs: a lost server's rows and parities at once, at memory's speed.

    freeze -> ask all for slabs of the next blocks -> make one of those that came -> install it
    ... -> parities of the range count -> thaw

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
import time
from collections import deque
from collections.abc import Iterator

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

_BLOCK_BYTES = 8 << 20
_AHEAD = 2  # blocks that are on their way while one is made
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

    def sweep(self, granule: int, view: View) -> int:
        """Rebuild the rows that a range lacks, and its parities; how many rows.

        Raises:
            ConflictError: members have changed; to be tried again.
        """
        shard = self._shard
        blocks = self._blocks(granule)
        rows = 0
        self._freezer.enter(view)
        try:
            offers = self._share(blocks)
            with self._freezer.frozen(view, [granule]) as (ticket, marks):
                with self._voided_by_failure():
                    rested_s, worked_s = 0.0, time.thread_time()  # waiting is no work
                    for block, slabs in self._gather(ticket, blocks, offers):
                        rows += shard.install_block(block, slabs)
                        since_s, worked_s = worked_s, time.thread_time()
                        self._pace.work(_GIVING * (worked_s - since_s))
                        rested_s += self._pace.rest(_FROZEN_REST_S - rested_s)
                shard.install_parities(ticket, [granule], (), marks)
        except BaseException:
            self._forget()
            raise
        self._pace.rest()
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
        self._peers.send_all(
            {
                server: Message(
                    "slab",
                    {**meta, "at": _start(offers[server], turn) if server in offers else None},
                )
                for server in rows
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
            answers = self._freezer.ask(
                {server: Message("handover", offer.to_json()) for server, offer in offered.items()}
            )
            for server, offer in offered.items():
                offer.withdraw()
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


def _start(offer: Offer, turn: int) -> int:
    """Where in shared memory the slab of a block lies: blocks take turns."""
    return turn * (offer.size // (_AHEAD + 1))


def _room(offer: Offer, turn: int, rows: int, width: int) -> np.ndarray:
    slab_NW = offer.rows(_start(offer, turn), rows, width)
    if slab_NW is None:
        raise CorruptDataError("a slab that is nowhere", rows=rows, width=width)
    return slab_NW


def _pages(size: int) -> int:
    return -(-size // 4096) * 4096
