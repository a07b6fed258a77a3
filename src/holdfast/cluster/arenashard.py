"""The rows and parities of one arena on one server: memory, and the kernels that change it.

A row that changes first leaves a copy of its record behind, as parity knows it; there it waits
until its difference is taken. So differences of one row add up while they wait, and what parity
knows can be read at any time.

Invariants:
- A row waits at most once.
- ``is_here_M``: rows not here yet hold no value; nothing reads or changes them.

Not here: locks, numbers of pushes and flushes (shard.py), decoding (recovery.py), which rows
changed since a checkpoint (changes.py).

# N rows of a request, M data rows here, Q parity rows here, C rows that can wait, K differences,
# P parities of a stripe, F = K x P, W floats of a record, G ranges
"""

from __future__ import annotations

import bisect
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from holdfast.cluster.arena import Arena, PlacedTable
from holdfast.cluster.changes import Changes, SnapshotOrder
from holdfast.cluster.code import Code, make_code
from holdfast.cluster.spec import granules_of
from holdfast.errors import InvalidRequestError
from holdfast.kernels import galois, initial, optimizers
from holdfast.kernels import shard as kernels

_FIRST_ROWS = 1 << 16  # that first values are computed for at a time


@dataclass(frozen=True, slots=True)
class Differences:
    """What changed in rows of one arena, for the parities of one server."""

    arena: int
    slots_K: np.ndarray
    """Of the parity rows there."""
    positions_K: np.ndarray
    """Of the changed rows in their stripes."""
    diffs_KW: np.ndarray


class ArenaShard:
    """The rows and the parities of one arena on one server."""

    def __init__(self, index: int, spec: Arena, server: int, *, locks: int, room: int) -> None:
        """All zeros, and nothing is here yet; ``room`` is for waiting differences."""
        placement = spec.placement
        self.index = index
        self.spec = spec
        self.locks = locks
        self.code = None if spec.code == "none" else make_code(
            spec.code, placement.data, placement.parity
        )  # fmt: skip
        self.ids_M = placement.rows_of(server, spec.rows)
        self.records_MW = np.zeros((len(self.ids_M), spec.width), np.float32)
        self.is_here_M = np.zeros(len(self.ids_M), bool)
        self.rows_missing = len(self.ids_M)
        if self.code is None:
            self.stripes_Q, self.index_Q = np.empty((2, 0), np.int64)
        else:
            self.stripes_Q, self.index_Q = placement.parity_rows_of(server, spec.rows)
        self.parities_QW = np.zeros((len(self.stripes_Q), spec.width), np.float32)
        rows = max(1, min(room, 2 * len(self.ids_M)))
        self._waiting_at_M = np.full(len(self.ids_M), -1, np.int32)
        self._waiting_slots_C = np.zeros(rows, np.int64)
        self._before_CW = np.zeros((rows, spec.width), np.float32)
        self.waiting = 0
        self.changes = Changes(len(self.ids_M))

    def fill(self) -> None:
        """Set rows and parities to their first values."""
        for placed in self.spec.tables:
            table = placed.table
            lo, hi = np.searchsorted(self.ids_M, (placed.start, placed.start + table.rows))
            ids_N = self.ids_M[lo:hi] - placed.start
            initial.fill(self.records_MW[lo:hi], ids_N, table.dim, table.seed, table.bound)
            lo, hi = np.searchsorted(self.stripes_Q, (placed.stripe, placed.stripe + table.stripes))
            for start in range(int(lo), int(hi), _FIRST_ROWS):
                self._fill_parities(placed, start, min(int(hi), start + _FIRST_ROWS))
        self.is_here_M[:] = True
        self.rows_missing = 0

    def _fill_parities(self, placed: PlacedTable, start: int, stop: int) -> None:
        table, index_N = placed.table, self.index_Q[start:stop]
        stripes_N = self.stripes_Q[start:stop] - placed.stripe
        for position, ids_N in enumerate(table.placement.members_of(stripes_N).T):
            inside_N = np.flatnonzero(ids_N < table.rows)
            values_NW = np.empty((len(inside_N), table.width), np.float32)
            initial.fill(values_NW, ids_N[inside_N], table.dim, table.seed, table.bound)
            positions_N = np.full(len(inside_N), position)
            self._fold(start + inside_N, index_N[inside_N], positions_N, values_NW)

    # Rows.

    def check_slots(self, slots_N: np.ndarray) -> None:
        """Refuse slots that are not this server's.

        Raises:
            InvalidRequestError: names the arena.
        """
        if len(slots_N) and not (slots_N.min() >= 0 and slots_N.max() < len(self.ids_M)):
            raise InvalidRequestError("no such row on this server", tables=self.spec.name)

    def missing(self, slots_N: np.ndarray) -> np.ndarray:
        """Those of some rows that are not here yet."""
        self.check_slots(slots_N)
        if self.rows_missing == 0:
            return slots_N[:0]
        found: np.ndarray = slots_N[~self.is_here_M[slots_N]]
        return found

    def pull(self, slots_N: np.ndarray) -> np.ndarray:
        """The weights of rows."""
        return kernels.gather(self.records_MW, slots_N, self.spec.dim)

    def granules(self, slots_N: np.ndarray) -> np.ndarray:
        """The ranges in which rows lie."""
        stripes_N = self.spec.placement.stripes_of(self.ids_M[slots_N])
        return granules_of(stripes_N, stripes=self.spec.stripes, locks=self.locks)

    def slot_before(self, stripe: int) -> int:
        """The first slot whose row lies in this stripe or a later one: stripes rise with slots."""
        placement = self.spec.placement
        return bisect.bisect_left(
            range(len(self.ids_M)),
            stripe,
            key=lambda slot: int(placement.stripes_of(self.ids_M[slot : slot + 1])[0]),
        )

    def room(self) -> int:
        """How many more rows' differences can wait."""
        return len(self._waiting_slots_C) - self.waiting

    def grow(self, rows: int) -> None:
        """Make room for the differences of so many more rows."""
        size = max(2 * len(self._waiting_slots_C), self.waiting + rows)
        size = min(size, 2 * len(self.ids_M))  # a row waits once, and a push names it once
        slots_C = np.zeros(size, np.int64)
        before_CW = np.zeros((size, self.spec.width), np.float32)
        slots_C[: self.waiting] = self._waiting_slots_C[: self.waiting]
        before_CW[: self.waiting] = self._before_CW[: self.waiting]
        self._waiting_slots_C, self._before_CW = slots_C, before_CW

    def update(self, slots_N: np.ndarray, grads_ND: np.ndarray) -> None:
        """Apply gradients to rows, each named once; there must be room."""
        self.changes.mark(slots_N)
        optimizer = self.spec.optimizer
        if self.code is None:
            optimizers.apply(self.records_MW, slots_N, grads_ND, optimizer.kind, optimizer.hyper_H)
            return
        self.waiting = kernels.update(
            self.records_MW, slots_N, grads_ND, optimizer.kind, optimizer.hyper_H,
            self._waiting_at_M, self._waiting_slots_C, self._before_CW, self.waiting,
        )  # fmt: skip

    def assign(self, slots_N: np.ndarray, weights_ND: np.ndarray) -> None:
        """Set the weights of rows, and their state to zero; there must be room."""
        self.changes.mark(slots_N)
        values_NW = np.zeros((len(slots_N), self.spec.width), np.float32)
        values_NW[:, : self.spec.dim] = weights_ND
        if self.code is None:
            self.records_MW[slots_N] = values_NW
            return
        self.waiting = kernels.overwrite(
            self.records_MW,
            slots_N,
            values_NW,
            self._waiting_at_M,
            self._waiting_slots_C,
            self._before_CW,
            self.waiting,
        )

    def as_parity_knows(self, slots_N: np.ndarray) -> np.ndarray:
        """Whole records without differences that still wait."""
        return kernels.as_parity_knows(
            self.records_MW, slots_N, self._waiting_at_M, self._before_CW
        )

    def install(self, slots_N: np.ndarray, records_NW: np.ndarray) -> int:
        """Put decoded rows in place; rows that are here already stay as they are."""
        is_new_N = ~self.is_here_M[slots_N]
        slots_N = slots_N[is_new_N]
        self.records_MW[slots_N] = records_NW[is_new_N]
        self.is_here_M[slots_N] = True
        self.rows_missing -= len(slots_N)
        self.changes.mark(slots_N)
        return len(slots_N)

    def copy(self, order: SnapshotOrder) -> tuple[np.ndarray, np.ndarray]:
        """Ids and whole records of the rows that a checkpoint must hold."""
        slots_N = self.changes.claim(order)
        if slots_N is None:
            return self.ids_M, self.records_MW.copy()
        return self.ids_M[slots_N], kernels.gather(self.records_MW, slots_N, self.spec.width)

    # Differences out.

    def take(self, frozen: Collection[int]) -> dict[int, Differences]:
        """Differences that waited, by the servers they go to; those of frozen ranges stay."""
        if self.waiting == 0:
            return {}
        placement = self.spec.placement
        slots_C = self._waiting_slots_C[: self.waiting]
        picked_K = None
        if frozen:
            picked_K = np.flatnonzero(~np.isin(self.granules(slots_C), list(frozen)))
        take = kernels.take_changes if self.spec.code == "sum" else kernels.take_differences
        taken_K, diffs_KW, self.waiting = take(
            self.records_MW,
            self._waiting_at_M,
            self._waiting_slots_C,
            self._before_CW,
            self.waiting,
            picked_K,
        )
        if len(taken_K) == 0:
            return {}
        stripes_K = placement.stripes_of(self.ids_M[taken_K])
        positions_K = placement.positions_of(self.ids_M[taken_K])
        servers_KP = placement.parity_servers_of(stripes_K)
        slots_KP = placement.parity_slots_of(stripes_K)
        return by_server(self.index, servers_KP, slots_KP, positions_K, diffs_KW)

    # Differences in.

    def parity_granules(self, slots_K: np.ndarray) -> np.ndarray:
        """The ranges in which parity rows lie."""
        return granules_of(self.stripes_Q[slots_K], stripes=self.spec.stripes, locks=self.locks)

    def parities(self, slots_N: np.ndarray) -> np.ndarray:
        """Parity rows."""
        if len(slots_N) and not (slots_N.min() >= 0 and slots_N.max() < len(self.stripes_Q)):
            raise InvalidRequestError("no such parity on this server", tables=self.spec.name)
        return kernels.gather(self.parities_QW, slots_N, self.spec.width)

    def check_differences(self, part: Differences) -> None:
        """Refuse differences that are not of parities here.

        Raises:
            InvalidRequestError: names the arena.
        """
        slots_K, positions_K = part.slots_K, part.positions_K
        is_known = self.code is not None and part.diffs_KW.shape == (
            len(slots_K),
            self.spec.width,
        )
        if is_known and len(slots_K):
            is_known = bool(
                slots_K.min() >= 0
                and slots_K.max() < len(self.stripes_Q)
                and positions_K.min() >= 0
                and positions_K.max() < self.spec.placement.data
            )
        if not is_known:
            raise InvalidRequestError("no such parities on this server", tables=self.spec.name)

    def fold(self, part: Differences, is_ready_G: np.ndarray) -> int:
        """Fold differences into parities of ranges that are ready; the others are built later."""
        slots_K = part.slots_K
        positions_K, diffs_KW = part.positions_K, part.diffs_KW
        if not is_ready_G.all():
            is_ready_K = is_ready_G[self.parity_granules(slots_K)]
            slots_K, positions_K = slots_K[is_ready_K], positions_K[is_ready_K]
            diffs_KW = diffs_KW[is_ready_K]
        self._fold(slots_K, self.index_Q[slots_K], positions_K, diffs_KW)
        return len(slots_K)

    def _fold(
        self,
        slots_K: np.ndarray,
        index_K: np.ndarray,
        positions_K: np.ndarray,
        diffs_KW: np.ndarray,
    ) -> None:
        assert self.code is not None
        coefficients_K = self.code.coefficients[index_K, positions_K]
        fold_rows(self.code, self.parities_QW, slots_K, diffs_KW, coefficients_K)


def fold_rows(
    code: Code,
    out_QW: np.ndarray,
    slots_N: np.ndarray,
    rows_NW: np.ndarray,
    factors_N: np.ndarray,
) -> None:
    """Add rows, times their factors in a code, to others: how parities are made and undone."""
    if code.is_exact:
        galois.fold(out_QW, slots_N, rows_NW, factors_N.astype(np.uint8, copy=False))
    else:
        signs_N1 = factors_N.astype(np.float32)[:, None]
        galois.add(out_QW, slots_N, rows_NW.view(np.float32) * signs_N1)


def by_server(
    arena: int,
    servers_KP: np.ndarray,
    slots_KP: np.ndarray,
    positions_K: np.ndarray,
    diffs_KW: np.ndarray,
) -> dict[int, Differences]:
    """Differences sorted by the servers that hold the parities."""
    parity = servers_KP.shape[1]
    servers_F = servers_KP.ravel()
    flat_F = np.argsort(servers_F, kind="stable")
    counts_S = np.bincount(servers_F)
    found = {}
    start = 0
    for server in np.flatnonzero(counts_S):
        part_F = flat_F[start : start + counts_S[server]]
        rows_F = part_F // parity
        found[int(server)] = Differences(
            arena,
            slots_KP.ravel()[part_F].astype(np.int32),
            positions_K[rows_F].astype(np.uint8),
            diffs_KW[rows_F],
        )
        start += counts_S[server]
    return found
