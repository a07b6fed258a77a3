"""Slabs of all others make a lost server's rows and parities, to the bit, wherever rows lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cluster import audit, slab
from holdfast.cluster.arena import Arena, plan_arenas
from holdfast.cluster.arenashard import ArenaShard
from holdfast.cluster.spec import Optimizer, TableSpec, granule_stripes
from holdfast.errors import CorruptDataError
from holdfast.model.placement import Placement

SGD = Optimizer("sgd")


@st.composite
def arenas(draw: st.DrawFn) -> Arena:
    """One to three tables behind each other; stripes may leave servers out."""
    parity = draw(st.integers(1, 3))
    data = draw(st.integers(1, 6))
    groups = draw(st.integers(1, 2))
    servers = (data + parity + draw(st.integers(0, 2))) * groups
    placement = Placement(servers, data=data, parity=parity, groups=groups)
    code = draw(st.sampled_from(("xor", "rs"))) if parity == 1 else "rs"
    (arena,) = plan_arenas(
        TableSpec(f"table-{at}", rows, 3, placement, code, SGD)
        for at, rows in enumerate(draw(st.lists(st.integers(1, 90), min_size=1, max_size=3)))
    )
    return arena


def make_records(arena: Arena, rng: np.random.Generator) -> np.ndarray:
    """Any bits, NaNs too; zeros between tables."""
    bits_NW = np.zeros((arena.rows, arena.width), np.uint32)
    for placed in arena.tables:
        shape = (placed.table.rows, arena.width)
        bits_NW[placed.start : placed.start + placed.table.rows] = rng.integers(
            0, 1 << 32, shape, dtype=np.uint32
        )
    return bits_NW.view(np.float32)


def make_shards(arena: Arena, records_NW: np.ndarray) -> list[ArenaShard]:
    shards = []
    for server in range(arena.placement.servers):
        shard = ArenaShard(0, arena, server, locks=2, room=1000)
        shard.install(np.arange(len(shard.ids_M)), records_NW[shard.ids_M])
        shard.parities_QW[:] = audit.encode(arena, server, records_NW)
        shards.append(shard)
    return shards


def some_slots(shard: ArenaShard, rng: np.random.Generator) -> np.ndarray:
    return np.flatnonzero(rng.random(len(shard.ids_M)) < 0.3)


def change(shard: ArenaShard, slots_N: np.ndarray, rng: np.random.Generator) -> None:
    shard.assign(slots_N, rng.standard_normal((len(slots_N), shard.spec.dim)).astype(np.float32))


def give(shards: Sequence[ArenaShard], block: slab.Block, lost: int) -> dict[int, np.ndarray]:
    slabs = {}
    for giver, shard in enumerate(shards):
        if giver == lost:
            continue
        rows = slab.slab_rows(shard, giver=giver, lost=lost, stripes=block.stripes)
        if rows:
            slabs[giver] = np.full((rows, shard.spec.width), np.nan, np.float32)
            slab.pack_slab(shard, slabs[giver], giver=giver, lost=lost, stripes=block.stripes)
    return slabs


def rebuild(shards: Sequence[ArenaShard], fresh: ArenaShard, lost: int, block_bytes: int) -> int:
    installed = 0
    for granule in range(2):
        stripes = granule_stripes(granule, stripes=fresh.spec.stripes, locks=2)
        for block in slab.plan_blocks(fresh, stripes, block_bytes=block_bytes):
            fresh.parities_QW[block.parities.start : block.parities.stop] = np.nan
            installed += slab.install_block(fresh, block, give(shards, block, lost), lost=lost)
    return installed


def check_same(found_NW: np.ndarray, expected_NW: np.ndarray) -> None:
    np.testing.assert_array_equal(found_NW.view(np.uint32), expected_NW.view(np.uint32))


@settings(max_examples=60, deadline=None)
@given(arenas(), st.integers(0, 1 << 20), st.integers(0, 40), st.data())
def test_slabs_make_rows_and_parities_to_the_bit(
    arena: Arena, seed: int, block_rows: int, data: st.DataObject
) -> None:
    """Also where differences wait at those who give, and where rows are here and changed."""
    rng = np.random.default_rng(seed)
    records_NW = make_records(arena, rng)
    shards = make_shards(arena, records_NW)
    lost = data.draw(st.integers(0, len(shards) - 1))
    for shard in shards:
        change(shard, some_slots(shard, rng), rng)  # parity has not heard of it
    fresh = ArenaShard(0, arena, lost, locks=2, room=1000)
    early_N = some_slots(fresh, rng)
    fresh.install(early_N, records_NW[fresh.ids_M[early_N]])
    change(fresh, early_N, rng)
    changed_NW = fresh.records_MW[early_N].copy()
    installed = rebuild(shards, fresh, lost, block_bytes=block_rows * 4 * arena.width)
    assert installed == len(fresh.ids_M) - len(early_N)
    assert fresh.rows_missing == 0 and fresh.is_here_M.all()
    check_same(fresh.records_MW[early_N], changed_NW)
    check_same(fresh.as_parity_knows(np.arange(len(fresh.ids_M))), records_NW[fresh.ids_M])
    check_same(fresh.parities_QW, shards[lost].parities_QW)


@settings(max_examples=40, deadline=None)
@given(arenas(), st.data())
def test_a_slab_holds_what_its_receiver_needs_and_no_more(
    arena: Arena, data: st.DataObject
) -> None:
    placement = arena.placement
    lost = data.draw(st.integers(0, placement.servers - 1))
    own = ArenaShard(0, arena, lost, locks=1, room=1)
    block = slab.plan_blocks(own, range(arena.stripes), block_bytes=1 << 30)[0]
    needed = 0
    for stripe in range(arena.stripes):
        ids_K = placement.members_of(np.array([stripe]))[0]
        is_lost_K = placement.servers_of(ids_K) == lost
        if is_lost_K.any():  # of a row behind the end too: the last stripes are as all others
            needed += int((~is_lost_K & (ids_K < arena.rows)).sum()) + 1
        elif stripe in own.stripes_Q:
            needed += int((ids_K < arena.rows).sum())
    shards = make_shards(arena, np.zeros((arena.rows, arena.width), np.float32))
    assert sum(map(len, give(shards, block, lost).values())) == needed


@settings(max_examples=40, deadline=None)
@given(arenas(), st.integers(1, 1 << 12), st.data())
def test_blocks_are_all_of_a_range_once(
    arena: Arena, block_bytes: int, data: st.DataObject
) -> None:
    server = data.draw(st.integers(0, arena.placement.servers - 1))
    first = data.draw(st.integers(0, arena.stripes))
    last = data.draw(st.integers(first, arena.stripes))
    own = ArenaShard(0, arena, server, locks=1, room=1)
    blocks = slab.plan_blocks(own, range(first, last), block_bytes=block_bytes)
    assert [s for block in blocks for s in block.stripes] == list(range(first, last))
    stripes_M = arena.placement.stripes_of(own.ids_M)
    slots = [slot for block in blocks for slot in block.rows]
    assert slots == np.flatnonzero((stripes_M >= first) & (stripes_M < last)).tolist()
    slots = [slot for block in blocks for slot in block.parities]
    is_inside_Q = (own.stripes_Q >= first) & (own.stripes_Q < last)
    assert slots == np.flatnonzero(is_inside_Q).tolist()


def test_a_slab_of_another_shape_is_refused() -> None:
    (arena,) = plan_arenas([TableSpec("t", 60, 3, Placement(4, data=3, parity=1), "xor", SGD)])
    shards = make_shards(arena, np.ones((60, 3), np.float32))
    block = slab.plan_blocks(shards[0], range(arena.stripes), block_bytes=1 << 20)[0]
    slabs = give(shards, block, 0)
    fresh = ArenaShard(0, arena, 0, locks=1, room=8)
    fresh.install(np.arange(5), np.full((5, 3), 7, np.float32))
    for wrong_NW in (slabs[2][:-1], slabs[2][:, :2], slabs[2].astype(np.float64)):
        with pytest.raises(CorruptDataError, match="not the slab"):
            slab.install_block(fresh, block, {**slabs, 2: wrong_NW}, lost=0)
        assert np.flatnonzero(fresh.is_here_M).tolist() == [0, 1, 2, 3, 4]
        assert (fresh.records_MW[:5] == 7).all()
