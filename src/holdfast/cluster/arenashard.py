"""The rows and parities of one arena on one server: memory, and the kernels that change it.

A row that changes first leaves a copy of its record behind, as parity knows it; there it waits
until its difference is taken. So differences of one row add up while they wait, and what parity
knows can be read at any time.

Where parity is told gradients instead (``TableSpec.propagation``), they wait in their order beside
the copy, and parity repeats the same steps: on its copy of the row, or, for float sums, on the
row's state, which it keeps for that. A row whose weights are assigned is told as a difference
(``_is_whole_M``), which has all in it that came before and after. So are rows that wait while
ranges are frozen when there is no more room: gradients that wait are bounded.

Invariants:
- A row waits at most once; one that waits is told whole, or has gradients that wait.
- The kernel that changes a row by gradients is the one that changes its copy.
- ``is_here_M``: rows not here yet hold no value; nothing reads or changes them.

Not here: locks, numbers of pushes and flushes (shard.py), decoding (recovery.py), which rows
changed since a checkpoint (changes.py).

# N rows of a request, M data rows here, Q parity rows here, C rows that can wait, K differences or
# gradients, P parities of a stripe, F = K x P, W floats of a record, D weights, G ranges,
# R = Q x data rows of a stripe, S floats of state
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import numpy as np

from holdfast.cluster.arena import Arena, PlacedTable
from holdfast.cluster.changes import Changes, SnapshotOrder
from holdfast.cluster.code import Code, make_code
from holdfast.cluster.gradientqueue import GradientQueue, IsOpen
from holdfast.cluster.reserve import Reserve
from holdfast.cluster.spec import DIFFERENCE, GRADIENT, PROPAGATIONS, granules_of
from holdfast.cluster.uses import Span
from holdfast.errors import InvalidRequestError
from holdfast.kernels.compiling import as_slots, read_only
from holdfast.kernels.rows import placed_rows
from holdfast.kernels.servers import galois, initial, optimizers, replicas
from holdfast.kernels.servers import shard as kernels
from holdfast.kernels.servers import slab as slabs

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
    """Words; gradients are as wide as weights."""
    kind: str = DIFFERENCE
    """What they are: differences, or gradients in the order in which they were applied."""

    @property
    def bytes(self) -> int:
        """What it takes in a message."""
        return self.slots_K.nbytes + self.positions_K.nbytes + self.diffs_KW.nbytes


class ArenaShard:
    """The rows and the parities of one arena on one server."""

    def __init__(
        self,
        index: int,
        spec: Arena,
        server: int,
        *,
        locks: int,
        room: int,
        memory: Reserve | None = None,
    ) -> None:
        """All zeros, and nothing is here yet; ``room`` is for waiting differences."""
        memory = memory or Reserve()
        placement = spec.placement
        self.index = index
        self.spec = spec
        self.locks = locks
        self.code = None if spec.code == "none" else make_code(
            spec.code, placement.data, placement.parity
        )  # fmt: skip
        self.ids_M = placement.rows_of(server, spec.rows)
        self.records_MW = memory.zeros(len(self.ids_M), spec.width)
        self.is_here_M = np.zeros(len(self.ids_M), bool)
        self.rows_missing = len(self.ids_M)
        if self.code is None:
            self.stripes_Q, self.index_Q = np.empty((2, 0), np.int64)
        else:
            self.stripes_Q, self.index_Q = placement.parity_rows_of(server, spec.rows)
        self.parities_QW = memory.zeros(len(self.stripes_Q), spec.width)
        rows = spec.waiting_rows(len(self.ids_M), room)
        self._waiting_at_M = np.full(len(self.ids_M), -1, np.int32)
        self._waiting_slots_C = np.zeros(rows, np.int64)
        self._before_CW = memory.zeros(rows, spec.width)
        self.waiting = 0
        self._queue = GradientQueue(spec.dim, room) if spec.propagation == GRADIENT else None
        self._is_whole_M = np.zeros(0 if self._queue is None else len(self.ids_M), bool)
        states = len(self.stripes_Q) * placement.data if spec.keeps_states else 0
        self._states_RS = np.zeros((states, spec.width - spec.dim), np.float32)
        self.changes = Changes(len(self.ids_M))

    def fill(self) -> None:
        """Set rows and parities to their first values."""
        for placed in self.spec.tables:
            table = placed.table
            lo, hi = np.searchsorted(self.ids_M, (placed.start, placed.start + table.rows))
            ids_N = placed.first_ids(self.ids_M[lo:hi] - placed.start)
            initial.fill(self.records_MW[lo:hi], ids_N, table.dim, table.seed, table.bound)
            lo, hi = np.searchsorted(self.stripes_Q, (placed.stripe, placed.stripe + table.stripes))
            for start in range(int(lo), int(hi), _FIRST_ROWS):
                self._fill_parities(placed, start, min(int(hi), start + _FIRST_ROWS))
        self.is_here_M[:] = True
        self.rows_missing = 0
        # Touched now, and not for the first time while somebody trains.
        self._before_CW[:] = 0
        self._waiting_slots_C[:] = 0

    def _fill_parities(self, placed: PlacedTable, start: int, stop: int) -> None:
        table, index_N = placed.table, self.index_Q[start:stop]
        stripes_N = self.stripes_Q[start:stop] - placed.stripe
        for position, ids_N in enumerate(table.placement.members_of(stripes_N).T):
            inside_N = np.flatnonzero(ids_N < table.rows)
            values_NW = np.empty((len(inside_N), table.width), np.float32)
            first_N = placed.first_ids(ids_N[inside_N])
            initial.fill(values_NW, first_N, table.dim, table.seed, table.bound)
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

    @property
    def state_bytes(self) -> int:
        """Memory for the state of rows that lie elsewhere: the price of their gradients."""
        return self._states_RS.nbytes

    @property
    def waiting_bytes(self) -> int:
        """Memory for what waits."""
        return self._before_CW.nbytes + self._waiting_slots_C.nbytes + self._waiting_at_M.nbytes

    def room(self) -> int:
        """How many more rows' differences, or gradients, can wait."""
        rows = len(self._waiting_slots_C) - self.waiting
        return rows if self._queue is None else min(rows, self._queue.room)

    def grow(self, rows: int) -> None:
        """Make room for the differences, or gradients, of so many more rows."""
        if self._queue is not None and self._queue.room < rows:
            # Of each row there is one difference at most, however long nothing may leave.
            self._is_whole_M[self._waiting_slots_C[: self.waiting]] = True
            self._queue.clear()
        if len(self._waiting_slots_C) - self.waiting < rows:
            self._grow_list(rows)

    def _grow_list(self, rows: int) -> None:
        size = max(2 * len(self._waiting_slots_C), self.waiting + rows)
        size = min(size, 2 * len(self.ids_M))  # a row waits once, and a push names it once
        slots_C = np.zeros(size, np.int64)
        before_CW = np.zeros((size, self.spec.width), np.float32)
        slots_C[: self.waiting] = self._waiting_slots_C[: self.waiting]
        before_CW[: self.waiting] = self._before_CW[: self.waiting]
        self._waiting_slots_C, self._before_CW = slots_C, before_CW

    def update(self, slots_N: np.ndarray, grads_ND: np.ndarray) -> None:
        """Apply gradients to rows, each named once; there must be room."""
        self.changes.use(slots_N)
        optimizer = self.spec.optimizer
        if self.code is None:
            self._step(self.records_MW, slots_N, grads_ND)
            return
        if self._queue is None:
            self.waiting = kernels.update(
                self.records_MW, slots_N, grads_ND, optimizer.kind, optimizer.hyper_H,
                self._waiting_at_M, self._waiting_slots_C, self._before_CW, self.waiting,
            )  # fmt: skip
            return
        self.waiting = kernels.note(
            self.records_MW, slots_N,
            self._waiting_at_M, self._waiting_slots_C, self._before_CW, self.waiting,
        )  # fmt: skip
        self._step(self.records_MW, slots_N, grads_ND)
        is_whole_N = self._is_whole_M[slots_N]
        if is_whole_N.any():
            slots_N, grads_ND = slots_N[~is_whole_N], grads_ND[~is_whole_N]
        self._queue.add(slots_N, grads_ND)

    def _step(self, records_MW: np.ndarray, slots_N: np.ndarray, grads_ND: np.ndarray) -> None:
        """The optimizer's steps on records, or on copies of records: one kernel for both."""
        optimizer = self.spec.optimizer
        optimizers.apply(
            records_MW, as_slots(slots_N), read_only(grads_ND), optimizer.kind,
            optimizer.hyper_H,
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
        if self._queue is not None:
            self._is_whole_M[slots_N] = True
            self._queue.forget(self._is_whole_M)

    def as_parity_knows(self, slots_N: np.ndarray) -> np.ndarray:
        """Whole records without differences that still wait."""
        return kernels.as_parity_knows(
            self.records_MW, slots_N, self._waiting_at_M, self._before_CW
        )

    def copy_known(self, first: int, every: int, at_U: np.ndarray, out_NW: np.ndarray) -> None:
        """Copy whole records, as parity knows them, whose slots repeat; see
        kernels/servers/slab.py."""
        slabs.copy_known(
            self.records_MW, self._waiting_at_M, self._before_CW, first, every, at_U, out_NW
        )

    def install(self, slots_N: np.ndarray, records_NW: np.ndarray) -> int:
        """Put decoded rows in place; rows that are here already stay as they are. One that comes
        twice, since somebody asked for it twice, counts once."""
        slots_N, at_N = np.unique(slots_N, return_index=True)
        is_new_N = ~self.is_here_M[slots_N]
        slots_N = slots_N[is_new_N]
        self.records_MW[slots_N] = records_NW[at_N[is_new_N]]
        self.is_here_M[slots_N] = True
        self.rows_missing -= len(slots_N)
        self.changes.mark(slots_N)
        return len(slots_N)

    def copy(self, order: SnapshotOrder) -> tuple[np.ndarray, np.ndarray]:
        """Ids and whole records of the rows that a checkpoint must hold."""
        spans = () if order.priority is None else self._spans()
        slots_N = self.changes.claim(order, spans)
        if slots_N is None:
            return self.ids_M, self.records_MW.copy()
        return self.ids_M[slots_N], kernels.gather(self.records_MW, slots_N, self.spec.width)

    def _spans(self) -> list[Span]:
        """Where the rows of each table lie; replicated ones are none of their base table's."""
        found = []
        for placed in self.spec.tables:
            if placed.hot is None:
                ends = (placed.start, placed.start + placed.table.rows)
                lo, hi = np.searchsorted(self.ids_M, ends).tolist()
                found.append(Span(placed.table.name, lo, hi, partial(self._weights, lo, hi)))
        return found

    def _weights(self, start: int, stop: int) -> np.ndarray:
        return self.records_MW[start:stop, : self.spec.dim]

    # Differences out.

    def take(self, frozen: Collection[int]) -> dict[int, list[Differences]]:
        """What waited for parity, by the servers it goes to; that of frozen ranges stays."""
        if self.waiting == 0:
            return {}
        is_open = self._is_open(frozen) if frozen else None
        found: dict[int, list[Differences]] = {}
        if self._queue is None:
            picked_K = None if is_open is None else np.flatnonzero(is_open(self._waiting_slots))
            self._send(found, DIFFERENCE, *self._take_differences(picked_K))
            return found
        slots_K, grads_KD = self._queue.take(is_open)
        self._send(found, GRADIENT, slots_K, grads_KD)
        is_whole_C = self._is_whole_M[self._waiting_slots]
        if is_open is not None:
            is_whole_C &= is_open(self._waiting_slots)
        if is_whole_C.any():
            slots_K, diffs_KW = self._take_differences(np.flatnonzero(is_whole_C))
            self._is_whole_M[slots_K] = False
            self._send(found, DIFFERENCE, slots_K, diffs_KW)
        self.waiting = kernels.release(
            self.records_MW, self._waiting_at_M, self._waiting_slots_C, self._before_CW,
            self.waiting,
            None if is_open is None else np.flatnonzero(is_open(self._waiting_slots)),
        )  # fmt: skip
        return found

    @property
    def _waiting_slots(self) -> np.ndarray:
        return self._waiting_slots_C[: self.waiting]

    def _is_open(self, frozen: Collection[int]) -> IsOpen:
        return lambda slots_N: ~np.isin(self.granules(slots_N), list(frozen))

    def _take_differences(self, picked_K: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """The slots and differences of rows that stop to wait."""
        take = kernels.take_changes if self.spec.code == "sum" else kernels.take_differences
        taken_K, diffs_KW, self.waiting = take(
            self.records_MW,
            self._waiting_at_M,
            self._waiting_slots_C,
            self._before_CW,
            self.waiting,
            picked_K,
        )
        return taken_K, diffs_KW

    def _send(
        self,
        found: dict[int, list[Differences]],
        kind: str,
        slots_K: np.ndarray,
        values_KW: np.ndarray,
    ) -> None:
        """Add what is told of rows to the parts of the servers with their parities, in order."""
        if len(slots_K) == 0:
            return
        at_F, slots_F, positions_F, ends = placed_rows.sort_parities(
            self.ids_M[slots_K], self.spec.placement.numbers
        )
        values_FW = values_KW[at_F]
        for server, (start, stop) in enumerate(itertools.pairwise(ends)):
            if start < stop:
                found.setdefault(server, []).append(Differences(
                    self.index, slots_F[start:stop], positions_F[start:stop],
                    values_FW[start:stop], kind,
                ))  # fmt: skip

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
        """Refuse differences and gradients that are not for parities here.

        Raises:
            InvalidRequestError: names the arena.
        """
        slots_K, positions_K = part.slots_K, part.positions_K
        is_gradient = part.kind == GRADIENT
        width = self.spec.dim if is_gradient else self.spec.width
        is_known = self.code is not None and part.diffs_KW.shape == (len(slots_K), width)
        if part.kind not in PROPAGATIONS or (is_gradient and self._queue is None):
            is_known = False  # gradients say nothing to parities of differences
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
        """Fold differences, or what gradients change, into parities of ranges that are ready; the
        others are built later."""
        slots_K = part.slots_K
        positions_K, diffs_KW = part.positions_K, part.diffs_KW
        if not is_ready_G.all():
            is_ready_K = is_ready_G[self.parity_granules(slots_K)]
            slots_K, positions_K = slots_K[is_ready_K], positions_K[is_ready_K]
            diffs_KW = diffs_KW[is_ready_K]
        if part.kind == GRADIENT:
            self._fold_gradients(slots_K, positions_K, diffs_KW.view(np.float32))
            return len(slots_K)
        self._fold(slots_K, self.index_Q[slots_K], positions_K, diffs_KW)
        if self._states_RS.size:
            changes_KS = diffs_KW.view(np.float32)[:, self.spec.dim :]
            replicas.add_states(self.parities_QW, self._states_RS, slots_K, positions_K, changes_KS)
        return len(slots_K)

    def _fold_gradients(
        self, slots_K: np.ndarray, positions_K: np.ndarray, grads_KD: np.ndarray
    ) -> None:
        """Repeat the optimizer's steps on copies of rows; on sums of rows, by their states."""
        if not self.spec.keeps_states:
            self._step(self.parities_QW, slots_K, grads_KD)
        elif len(slots_K):
            optimizer = self.spec.optimizer
            replicas.fold_gradients(
                self.parities_QW, self._states_RS, slots_K, positions_K, grads_KD, optimizer.kind,
                optimizer.hyper_H,
            )  # fmt: skip

    def _fold(
        self,
        slots_K: np.ndarray,
        index_K: np.ndarray,
        positions_K: np.ndarray,
        diffs_KW: np.ndarray,
    ) -> None:
        assert self.code is not None
        if self.spec.code == "xor":
            coefficients_K = np.ones(len(slots_K), np.uint8)
        else:
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
