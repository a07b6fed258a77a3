"""Recovery: a replacement decodes the rows of the server it stands for, while training goes on.

    freeze -> in-flight differences arrive -> fetch rows as parity knows them -> decode -> thaw

Rows that somebody asks for are decoded at once; the sweep takes the rest range by range, and builds
the parities anew: with the rows where nobody else lacks anything (sweep.py), else after all rows
are back everywhere. While a range is frozen its differences wait at the servers that made them;
pulls and pushes do not.

Invariants:
- What is fetched between freeze and thaw belongs to one state of every stripe in the range.
- A change of members voids every freeze; what was under way is tried again in the new epoch.
- A row is decoded at most once; one that is here already is never overwritten.

Not here: which members are sources (decode.py), freezes (freezer.py), when a server is replaced
(coordinator.py).

# N rows to rebuild, F fetches, W floats of a record, G ranges
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from holdfast.cluster import decode
from holdfast.cluster.arenashard import ArenaShard, fold_rows
from holdfast.cluster.decode import Sources
from holdfast.cluster.freezer import Freezer
from holdfast.cluster.hold import Hold
from holdfast.cluster.message import Message
from holdfast.cluster.pace import Pace
from holdfast.cluster.peers import Peers, PipedPeers
from holdfast.cluster.shard import Shard
from holdfast.cluster.spec import granule_stripes
from holdfast.cluster.sweep import SlabSweep
from holdfast.cluster.view import View
from holdfast.errors import ConflictError

_BLOCK_BYTES = 4 << 20  # of rows decoded at a time
_RETRY_S = 0.005  # until everybody has heard of a change


class StoppedError(Exception):
    """The server is closing."""


class Recovery:
    """Brings one server's lost rows and parities back."""

    def __init__(
        self,
        shard: Shard,
        peers: Peers,
        *,
        sweep_peers: PipedPeers,
        share: float,
        wait_for_view: Callable[[int | None], View],
        tell: Callable[[str, dict[str, object]], None],
    ) -> None:
        """The sweep has peers of its own, so that nobody who asks for rows waits behind it, and
        while workers pull or push here it takes ``share`` of the time.

        ``wait_for_view`` gives the view, newer than a version if one is given, or raises
        StoppedError; ``tell`` reports progress.
        """
        self._shard = shard
        self._freezer = Freezer(shard, peers, name="rows")
        self._hold = Hold(self._freezer, shard.spec.locks)
        self._slabs = SlabSweep(shard, sweep_peers, Pace(share, shard.traffic))
        self._wait_for_view = wait_for_view
        self._tell = tell
        self._teller: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """Hold nothing any more."""
        self._hold.close()

    # On demand.

    def ensure(self, missing: Sequence[tuple[int, np.ndarray]]) -> None:
        """Decode rows that somebody waits for.

        Raises:
            DataLossError: names rows that cannot be decoded.
        """

        def attempt(view: View) -> None:
            if not self._shard.missing(missing):
                return
            with self._hold.using(view) as ticket:
                wanted = self._shard.missing(missing)  # others may have been quicker
                for arena, slots_N in wanted:
                    self._decode_rows(view, ticket, arena, slots_N)
            self._shard.counts["rows_on_demand"] += sum(len(slots_N) for _, slots_N in wanted)

        self._in_view(attempt)

    # The sweep.

    def sweep(self) -> None:
        """Decode all rows, and build all parities."""
        with ThreadPoolExecutor(1, "holdfast-tell") as teller:  # the sweep does not wait for it
            self._teller = teller
            started = time.perf_counter()
            try:
                self._sweep_all(started)
            finally:
                self._slabs.close()
            self._tell_later("parities", {"seconds": time.perf_counter() - started}).result()

    def _sweep_all(self, started: float) -> None:
        granules = range(self._shard.spec.locks)
        self._in_view(functools.partial(self._sweep_slabs, granules))
        for granule in granules:  # where others lack something too
            self._in_view(functools.partial(self._sweep_rows, granule))
        assert self._shard.rows_missing == 0
        self._tell_later("rows", {"seconds": time.perf_counter() - started})
        if not self._shard.ready_G.all():
            self._wait_until(lambda view: not view.lacks_rows)
        for granule in granules:
            self._in_view(functools.partial(self._sweep_parities, granule))

    def _tell_later(self, what: str, facts: dict[str, object]) -> Future[None]:
        """Tell, in the order of such calls."""
        assert self._teller is not None
        return self._teller.submit(self._tell, what, facts)

    def _sweep_slabs(self, granules: Sequence[int], view: View) -> bool:
        """Rebuild ranges that are not ready, rows and parities at once, if nobody else lacks
        anything; whether that is so."""
        if not self._slabs.can_sweep(view):
            return False
        is_ready_G = self._shard.ready_G
        started = time.perf_counter()
        for granule, rows in self._slabs.sweep([g for g in granules if not is_ready_G[g]], view):
            ended = time.perf_counter()
            self._tell_range(granule, rows, ended - started)
            started = ended
        return True

    def _tell_range(self, granule: int, rows: int, seconds: float) -> None:
        left = self._shard.rows_missing
        self._tell_later(
            "range", {"granule": granule, "rows": rows, "seconds": seconds, "left": left}
        )

    def _sweep_rows(self, granule: int, view: View) -> None:
        """Decode what a range still lacks."""
        shard = self._shard
        if not shard.ready_G[granule] and self._sweep_slabs([granule], view):
            return
        started = time.perf_counter()
        wanted = []
        for index, arena in enumerate(shard.arenas):
            if arena.spec.is_held:
                continue  # comes from workers
            stripes = granule_stripes(granule, stripes=arena.spec.stripes, locks=shard.spec.locks)
            lo, hi = (arena.slot_before(stripe) for stripe in (stripes.start, stripes.stop))
            slots_N = lo + np.flatnonzero(~arena.is_here_M[lo:hi])
            if len(slots_N):
                wanted.append((index, slots_N))
        if not wanted:
            return
        rows = 0
        with self._freezer.frozen(view, [granule]) as (ticket, _):
            for index, slots_N in wanted:
                for block_N in _blocks(shard.arenas[index], slots_N):
                    rows += self._decode_rows(view, ticket, index, block_N)
        self._tell_range(granule, rows, time.perf_counter() - started)

    def _sweep_parities(self, granule: int, view: View) -> None:
        shard = self._shard
        if shard.ready_G[granule] or self._sweep_slabs([granule], view):
            return
        if view.lacks_rows:  # somebody was lost since: parities are made of all rows
            raise ConflictError("rows are missing", servers=sorted(view.lacks_rows))
        built = []
        with self._freezer.frozen(view, [granule]) as (ticket, marks):
            for index, arena in enumerate(shard.arenas):
                if arena.code is None:
                    continue
                stripes = granule_stripes(
                    granule, stripes=arena.spec.stripes, locks=shard.spec.locks
                )
                lo, hi = np.searchsorted(arena.stripes_Q, (stripes.start, stripes.stop))
                for block_N in _blocks(arena, np.arange(lo, hi)):
                    sources = decode.plan_parities(arena, block_N)
                    parities_NW = self._rebuild(ticket, index, len(block_N), sources)
                    built.append((index, block_N, parities_NW))
            shard.install_parities(ticket, [granule], built, marks)

    # One consistent read.

    def _decode_rows(self, view: View, ticket: str, index: int, slots_N: np.ndarray) -> int:
        arena = self._shard.arenas[index]
        if arena.spec.is_held:
            raise ConflictError("no worker has supplied these rows yet", tables=arena.spec.name)
        sources = decode.plan_rows(
            arena, slots_N, lacks_rows=view.lacks_rows, lacks_parities=view.lacks_parities
        )
        records_NW = self._rebuild(ticket, index, len(slots_N), sources)
        return self._shard.install(index, slots_N, records_NW)

    def _rebuild(self, ticket: str, index: int, rows: int, sources: Sources) -> np.ndarray:
        arena = self._shard.arenas[index]
        assert arena.code is not None
        out_NW = np.zeros((rows, arena.spec.width), np.float32)
        parts = {server: sources.of(server) for server in sources.servers}
        messages = {
            server: Message(
                "fetch",
                {"ticket": ticket, "arena": index},
                (part.slots_F[~part.is_parity_F], part.slots_F[part.is_parity_F]),
            )
            for server, part in parts.items()
        }
        for server, answer in self._freezer.ask(messages).items():
            part = parts[server]
            at = 0
            for records_FW in answer.arrays:  # data rows, then parities
                these = slice(at, at + len(records_FW))
                fold_rows(
                    arena.code, out_NW, part.rows_F[these], records_FW, part.coefficients_F[these]
                )
                at += len(records_FW)
        return out_NW

    def _in_view(self, attempt: Callable[[View], object]) -> None:
        """Try until it is done in one epoch."""
        while True:
            view = self._wait_for_view(None)
            self._freezer.enter(view)
            try:
                attempt(view)
                return
            except ConflictError:
                time.sleep(_RETRY_S)

    def _wait_until(self, is_true: Callable[[View], bool]) -> None:
        view = self._wait_for_view(None)
        while not is_true(view):
            view = self._wait_for_view(view.version)


def _blocks(arena: ArenaShard, slots_N: np.ndarray) -> list[np.ndarray]:
    rows = max(1, _BLOCK_BYTES // (4 * arena.spec.width))
    return [slots_N[start : start + rows] for start in range(0, len(slots_N), rows)]
