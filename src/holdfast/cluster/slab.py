"""Slabs: what each server gives, of a range of stripes, to the one that rebuilds a lost shard.

    a range of stripes -> every other server: its rows and parities of them, packed -> a block

Places repeat (``Placement.period_rows``), so which rows of one server a lost one is made of, where
each belongs there, and times what, is a short list for one period. Both sides compute it: a range
of stripes is all that travels with a question, and the answer is rows alone.

The lost server alone lacks anything here. In each stripe it has a data row, or a parity, or
nothing. A data row is decoded from the other data rows and one parity, a parity is encoded from
the data rows, which are all elsewhere: both at once, from the same answers.

Invariants:
- A slab is packed: first the wanted data rows, then the wanted parities, each by stripes.
- Nothing of a stripe is in a slab that its receiver does not need (but for rows of the last
  stripes: those of the lost server may be behind the end).
- Rows behind an arena's end are zero and in no slab.

Not here: other losses at the same time (decode.py), consistency (sweep.py), memory (handover.py).

# T slots of a server in a period, U of them that are wanted, N rows, K data rows of a stripe, X all
# its members, F rows that are given in a period, W floats of a record
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from holdfast.cluster.arena import Arena
from holdfast.cluster.arenashard import ArenaShard
from holdfast.cluster.code import Code
from holdfast.errors import CorruptDataError
from holdfast.kernels.servers import slab as kernels
from holdfast.model.placement import Placement


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Which of a server's data rows, or parities, a lost server needs, in one period of places."""

    slots: int
    """Of the giver in a period, wanted or not."""
    stripes: int
    """Of a period."""
    at_U: np.ndarray
    """Slots of the giver, ascending."""
    stripes_U: np.ndarray
    into_U: np.ndarray
    """Slots of the lost server: of data rows or of parities."""
    is_parity_U: np.ndarray
    """Whether it is a parity there."""
    factors_U: np.ndarray

    def ranks(self, stripes: range, held: int) -> range:
        """The ranks of wanted rows in a range of stripes, of a giver that holds so many."""
        end = _count(self.at_U, held, self.slots)
        return range(
            min(end, _count(self.stripes_U, stripes.start, self.stripes)),
            min(end, _count(self.stripes_U, stripes.stop, self.stripes)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class SlabPlan:
    """What one server gives to another."""

    rows: Wanted
    parities: Wanted

    def ranks(self, arena: Arena, giver: int, stripes: range) -> tuple[range, range]:
        """The ranks of the rows, and of the parities, that a slab holds."""
        rows, parities = _held(arena.placement, giver, arena.rows)
        return self.rows.ranks(stripes, rows), self.parities.ranks(stripes, parities)


@lru_cache(maxsize=4096)
def _held(placement: Placement, server: int, rows: int) -> tuple[int, int]:
    """How many rows and parities a server holds of an arena."""
    return placement.data_rows(server, rows), placement.parity_rows(server, rows)


@lru_cache(maxsize=4096)
def plan_slab(placement: Placement, code: Code, *, giver: int, lost: int) -> SlabPlan:
    """What ``giver`` gives to the one in the place of ``lost``, who alone lacks anything."""
    assert code.is_exact and giver != lost
    period = placement.period_rows
    ids_T = placement.rows_of(giver, period)
    stripes_T = placement.stripes_of(ids_T)
    rows = _wanted(placement, code, lost, stripes_T, placement.positions_of(ids_T))
    stripes_T, index_T = placement.parity_rows_of(giver, period)
    parities = _wanted(placement, code, lost, stripes_T, placement.data + index_T)
    return SlabPlan(rows, parities)


def _wanted(
    placement: Placement, code: Code, lost: int, stripes_T: np.ndarray, members_T: np.ndarray
) -> Wanted:
    """Of members of stripes, those that the lost server's member there is made of."""
    ids_TK = placement.members_of(stripes_T)
    servers_TK = placement.servers_of(ids_TK.ravel()).reshape(ids_TK.shape)
    is_lost_TX = np.concatenate(
        [servers_TK == lost, placement.parity_servers_of(stripes_T) == lost], axis=1
    )
    lost_T = is_lost_TX.argmax(axis=1)
    factors_T = _factors(code)[lost_T, members_T]
    at_U = np.flatnonzero(is_lost_TX.any(axis=1) & (factors_T != 0))
    slots_UX = np.concatenate(
        [
            placement.slots_of(ids_TK[at_U]),
            placement.parity_slots_of(stripes_T[at_U]),
        ],
        axis=1,
    )
    return Wanted(
        slots=len(stripes_T),
        stripes=placement.stripes(placement.period_rows),
        at_U=at_U,
        stripes_U=stripes_T[at_U],
        into_U=slots_UX[np.arange(len(at_U)), lost_T[at_U]],
        is_parity_U=lost_T[at_U] >= placement.data,
        factors_U=factors_T[at_U],
    )


@dataclass(frozen=True, slots=True, eq=False)
class MadeOf:
    """What each of a lost server's data rows, or parities, in a period is made of: K rows each."""

    parts_TK: np.ndarray
    """Of which part of which slab: 2 * giver for data rows, 2 * giver + 1 for parities."""
    at_TK: np.ndarray
    """Its rank there, in the period."""
    factors_TK: np.ndarray


@lru_cache(maxsize=256)
def plan_block(placement: Placement, code: Code, *, lost: int) -> tuple[MadeOf, MadeOf]:
    """What a lost server's data rows, and its parities, are made of."""
    found = []
    for giver in range(placement.servers):
        if giver == lost:
            continue
        plan = plan_slab(placement, code, giver=giver, lost=lost)
        for part, wanted in enumerate((plan.rows, plan.parities)):
            ranks_U = np.arange(len(wanted.at_U))
            parts_U = np.full(len(ranks_U), 2 * giver + part)
            found.append((wanted.is_parity_U, wanted.into_U, parts_U, ranks_U, wanted.factors_U))
    is_parity_F, into_F, parts_F, ranks_F, factors_F = map(np.concatenate, zip(*found, strict=True))
    order_F = np.lexsort((parts_F, into_F, is_parity_F))  # those of one row or parity together
    rows = int((~is_parity_F).sum())

    def made_of(order_F: np.ndarray) -> MadeOf:
        order_TK = order_F.reshape(-1, code.data)
        return MadeOf(parts_F[order_TK], ranks_F[order_TK], factors_F[order_TK])

    return made_of(order_F[:rows]), made_of(order_F[rows:])


@lru_cache(maxsize=64)
def _factors(code: Code) -> np.ndarray:
    """[X, X]: by what each member of a stripe (column) counts in each lost one (line)."""
    members = code.data + code.parity
    factors = np.zeros((members, members), np.uint8)
    for lost in range(members):
        known = [member for member in range(members) if member != lost]
        plan = code.plan_decode((lost,), known)
        factors[lost, list(plan.sources)] = plan.matrix[0]
    return factors


def _count(offsets_U: np.ndarray, before: int, every: int) -> int:
    """How many of what repeats at these offsets come before a place."""
    if every == 0:
        return 0
    periods, rest = divmod(before, every)
    return periods * len(offsets_U) + int(np.searchsorted(offsets_U, rest))


# The giver's side.


def slab_rows(arena: ArenaShard, *, giver: int, lost: int, stripes: range) -> int:
    """How many rows a slab holds."""
    assert arena.code is not None
    plan = plan_slab(arena.spec.placement, arena.code, giver=giver, lost=lost)
    return sum(map(len, plan.ranks(arena.spec, giver, stripes)))


def has_all(arena: ArenaShard, stripes: range) -> bool:
    """Whether all data rows of these stripes are here."""
    if arena.rows_missing == 0:
        return True
    lo, hi = arena.slot_before(stripes.start), arena.slot_before(stripes.stop)
    return bool(arena.is_here_M[lo:hi].all())


def pack_slab(
    arena: ArenaShard, out_NW: np.ndarray, *, giver: int, lost: int, stripes: range
) -> None:
    """Copy what a lost server needs of these stripes: rows as parity knows them, then parities."""
    assert arena.code is not None
    plan = plan_slab(arena.spec.placement, arena.code, giver=giver, lost=lost)
    rows, parities = plan.ranks(arena.spec, giver, stripes)
    wanted = plan.rows
    arena.copy_known(rows.start, wanted.slots, wanted.at_U, out_NW[: len(rows)])
    wanted = plan.parities
    kernels.copy(arena.parities_QW, parities.start, wanted.slots, wanted.at_U, out_NW[len(rows) :])


# The lost server's side.


@dataclass(frozen=True, slots=True)
class Block:
    """A range of stripes that is rebuilt at once, and the slots of what it has here."""

    arena: int
    stripes: range
    rows: range
    parities: range

    @property
    def size(self) -> int:
        """Rows and parities."""
        return len(self.rows) + len(self.parities)


def plan_blocks(arena: ArenaShard, stripes: range, *, block_bytes: int) -> list[Block]:
    """A range of stripes in blocks of about so many bytes each."""
    placement = arena.spec.placement
    members = placement.data + placement.parity
    rows = max(1, block_bytes // (4 * arena.spec.width))
    step = max(1, rows * placement.servers // members)
    bounds = [*range(stripes.start, stripes.stop, step), stripes.stop]
    rows_before = [arena.slot_before(stripe) for stripe in bounds]
    parities_before = np.searchsorted(arena.stripes_Q, bounds).tolist()
    return [
        Block(
            arena.index,
            range(bounds[at], bounds[at + 1]),
            range(rows_before[at], rows_before[at + 1]),
            range(parities_before[at], parities_before[at + 1]),
        )
        for at in range(len(bounds) - 1)
    ]


def build_block(
    arena: ArenaShard, block: Block, slabs: Mapping[int, np.ndarray], rows_NW: np.ndarray,
    parities_NW: np.ndarray, *, lost: int,
) -> None:  # fmt: skip
    """Make a block's rows and its parities of the slabs that others gave.

    Raises:
        CorruptDataError: a slab is not what was to be given.
    """
    placement, code, width = arena.spec.placement, arena.code, arena.spec.width
    assert code is not None
    none_NW = np.empty((0, width), np.float32)
    given, starts = [none_NW] * (2 * placement.servers), [(0, 0)] * (2 * placement.servers)
    for giver, slab_NW in slabs.items():
        plan = plan_slab(placement, code, giver=giver, lost=lost)
        ranks = plan.ranks(arena.spec, giver, block.stripes)
        if slab_NW.shape != (sum(map(len, ranks)), width) or slab_NW.dtype != np.float32:
            raise CorruptDataError("not the slab that was asked for", shape=slab_NW.shape)
        given[2 * giver : 2 * giver + 2] = np.split(slab_NW, [len(ranks[0])])
        for part, wanted in enumerate((plan.rows, plan.parities)):
            starts[2 * giver + part] = (ranks[part].start, len(wanted.at_U))
    made_of = plan_block(placement, code, lost=lost)
    for out_NW, slots, made in zip(
        (rows_NW, parities_NW), (block.rows, block.parities), made_of, strict=True
    ):
        kernels.combine(
            out_NW, slots.start, made.parts_TK, made.at_TK, made.factors_TK, given, starts
        )


def install_block(
    arena: ArenaShard, block: Block, slabs: Mapping[int, np.ndarray], *, lost: int
) -> int:
    """Make a block where it belongs; rows that are here already stay as they are. How many are new.

    Raises:
        CorruptDataError: a slab is not what was to be given; nothing more is here than before.
    """
    rows = slice(block.rows.start, block.rows.stop)
    is_here_N = arena.is_here_M[rows].copy()
    rows_NW = arena.records_MW[rows]
    kept_NW = rows_NW[is_here_N]
    parities_NW = arena.parities_QW[block.parities.start : block.parities.stop]
    try:
        build_block(arena, block, slabs, rows_NW, parities_NW, lost=lost)
    finally:
        rows_NW[is_here_N] = kept_NW
    new_N = rows.start + np.flatnonzero(~is_here_N)
    arena.is_here_M[rows] = True
    arena.rows_missing -= len(new_N)
    arena.changes.mark(new_N)
    return len(new_N)
