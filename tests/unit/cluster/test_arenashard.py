from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cluster import audit
from holdfast.cluster.arena import Arena, plan_arenas
from holdfast.cluster.arenashard import ArenaShard, Differences, by_server, fold_rows
from holdfast.cluster.code import make_code
from holdfast.cluster.spec import Optimizer, TableSpec, granules_of
from holdfast.errors import InvalidRequestError
from holdfast.kernels import initial
from holdfast.placement import Placement

LOCKS = 3
READY_G = np.ones(LOCKS, bool)
PLACED = (
    (Placement(4, data=3, parity=1), "xor"),
    (Placement(5, data=2, parity=2), "rs"),
    (Placement(6, data=2, parity=1, groups=2), "rs"),
    (Placement(3, data=1, parity=1), "xor"),
)


def alone(table: TableSpec) -> Arena:
    """An arena of one table."""
    (arena,) = plan_arenas([table])
    return arena


@st.composite
def tables(draw: st.DrawFn) -> TableSpec:
    placement, code = draw(st.sampled_from(PLACED))
    optimizer = Optimizer(draw(st.sampled_from(("sgd", "adagrad", "adam"))), lr=0.25)
    rows = draw(st.integers(1, 50))
    return TableSpec("users", rows, 2, placement, code, optimizer, seed=3, bound=0.5)


def make_shards(table: TableSpec, *, room: int = 1 << 15) -> list[ArenaShard]:
    servers = range(table.placement.servers)
    shards = [ArenaShard(0, alone(table), server, locks=LOCKS, room=room) for server in servers]
    for shard in shards:
        shard.fill()
    return shards


def all_rows(shards: list[ArenaShard], *, as_parity_knows: bool = False) -> np.ndarray:
    spec = shards[0].spec
    records_NW = np.empty((spec.rows, spec.width), np.float32)
    for shard in shards:
        slots_M = np.arange(len(shard.ids_M))
        known_MW = shard.as_parity_knows(slots_M) if as_parity_knows else shard.records_MW
        records_NW[shard.ids_M] = known_MW
    return records_NW


def check_parities(shards: list[ArenaShard]) -> None:
    known_NW = all_rows(shards, as_parity_knows=True)
    for server, shard in enumerate(shards):
        expected_QW = audit.encode(shard.spec, server, known_NW)
        np.testing.assert_array_equal(
            shard.parities_QW.view(np.uint32), expected_QW.view(np.uint32)
        )


def deliver(shards: list[ArenaShard], taken: dict[int, Differences]) -> None:
    for receiver, part in taken.items():
        shards[receiver].fold(part, READY_G)


def change(shard: ArenaShard, rng: np.random.Generator) -> np.ndarray:
    """Update some rows with any gradients; which."""
    count = int(rng.integers(0, len(shard.ids_M) + 1))
    slots_N = rng.permutation(len(shard.ids_M))[:count]
    if shard.room() < count:
        shard.grow(count)
    shard.update(slots_N, rng.standard_normal((count, shard.spec.dim)).astype(np.float32))
    return slots_N


@settings(deadline=None, max_examples=40)
@given(tables())
def test_first_values_are_the_same_wherever_rows_lie_and_parities_are_their_code(
    table: TableSpec,
) -> None:
    shards = make_shards(table)
    expected_NW = np.empty((table.rows, table.width), np.float32)
    initial.fill(expected_NW, np.arange(table.rows), table.dim, table.seed, table.bound)
    np.testing.assert_array_equal(all_rows(shards), expected_NW)
    assert all(shard.is_here_M.all() and shard.rows_missing == 0 for shard in shards)
    check_parities(shards)


@settings(deadline=None, max_examples=40)
@given(tables(), st.integers(1, 40), st.integers(0, 1 << 30))
def test_parity_is_the_code_of_rows_as_told_whatever_waits(
    table: TableSpec, room: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    shards = make_shards(table, room=room)
    for _ in range(12):
        shard = shards[int(rng.integers(len(shards)))]
        change(shard, rng)
        if rng.random() < 0.5:
            frozen = set(rng.permutation(LOCKS)[: int(rng.integers(0, LOCKS + 1))].tolist())
            deliver(shards, shard.take(frozen))
        check_parities(shards)
    for shard in shards:
        deliver(shards, shard.take(()))
        assert shard.waiting == 0
    np.testing.assert_array_equal(all_rows(shards), all_rows(shards, as_parity_knows=True))
    check_parities(shards)


@settings(deadline=None, max_examples=40)
@given(tables(), st.integers(0, 1 << 30))
def test_a_row_waits_once_however_often_it_changes(table: TableSpec, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shard = make_shards(table)[0]
    changed: set[int] = set()
    for _ in range(5):
        changed |= set(change(shard, rng).tolist())
        assert shard.waiting == len(changed)
    rows = sum(len(part.slots_K) for part in shard.take(()).values())
    assert rows == len(changed) * table.placement.parity
    assert shard.take(()) == {}


@settings(deadline=None, max_examples=40)
@given(tables(), st.sets(st.integers(0, LOCKS - 1)), st.integers(0, 1 << 30))
def test_differences_of_frozen_ranges_stay(table: TableSpec, frozen: set[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    shards = make_shards(table)
    shard = shards[0]
    slots_N = change(shard, rng)
    taken = shard.take(frozen)
    for receiver, part in taken.items():
        granules_K = shards[receiver].parity_granules(part.slots_K)
        assert not set(granules_K.tolist()) & frozen
    staying = np.isin(shard.granules(slots_N), list(frozen))
    assert shard.waiting == staying.sum()
    deliver(shards, taken)
    deliver(shards, shard.take(()))
    check_parities(shards)


@settings(deadline=None, max_examples=40)
@given(tables())
def test_ranges_of_rows_and_of_their_parities_agree(table: TableSpec) -> None:
    for shard in make_shards(table):
        slots_M = np.arange(len(shard.ids_M))
        stripes_M = table.placement.stripes_of(shard.ids_M)
        expected_M = granules_of(stripes_M, stripes=table.stripes, locks=LOCKS)
        np.testing.assert_array_equal(shard.granules(slots_M), expected_M)
        for stripe in range(table.stripes + 1):
            expected = int(np.searchsorted(stripes_M, stripe))
            assert shard.slot_before(stripe) == expected


@settings(deadline=None, max_examples=40)
@given(tables(), st.integers(0, 1 << 30))
def test_assigned_weights_start_anew_and_reach_parity(table: TableSpec, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shards = make_shards(table)
    for shard in shards:
        change(shard, rng)
        count = len(shard.ids_M) // 2
        slots_N = rng.permutation(len(shard.ids_M))[:count]
        shard.assign(slots_N, np.full((count, 2), 3.5, np.float32))
        assert (shard.pull(slots_N) == 3.5).all()
        assert (shard.records_MW[slots_N, 2:] == 0).all()
        check_parities(shards)
        deliver(shards, shard.take(()))
        check_parities(shards)


TABLE = TableSpec("users", 40, 2, *PLACED[0], Optimizer("momentum"), seed=3, bound=0.5)


def test_decoded_rows_are_put_in_place_once() -> None:
    shard = ArenaShard(0, alone(TABLE), 1, locks=LOCKS, room=8)
    assert shard.rows_missing == len(shard.ids_M) == 10
    slots_N = np.array([1, 4, 7])
    assert shard.missing(np.array([4, 1])).tolist() == [4, 1]
    assert shard.install(slots_N, np.full((3, 4), 1.0, np.float32)) == 3
    assert shard.missing(np.array([4, 5, 1])).tolist() == [5]
    # Those that are here already may have changed since: they stay.
    assert shard.install(np.array([4, 5]), np.full((2, 4), 2.0, np.float32)) == 1
    assert shard.rows_missing == 6
    assert shard.pull(np.array([1, 4, 5])).tolist() == [[1, 1], [1, 1], [2, 2]]


@pytest.mark.parametrize("slots", [[-1], [10], [0, 10], [1 << 62]])
def test_slots_of_no_row_are_refused(slots: list[int]) -> None:
    shard = make_shards(TABLE)[1]
    with pytest.raises(InvalidRequestError, match=r"no such row on this server\. tables='users'"):
        shard.missing(np.array(slots))


@pytest.mark.parametrize("slot", [-1, 4, 1 << 62])
def test_slots_of_no_parity_are_refused(slot: int) -> None:
    shard = make_shards(TABLE)[1]
    before_QW = shard.parities_QW.copy()
    slots_K = np.array([0, slot])
    part = Differences(0, slots_K, np.zeros(2, np.int64), np.ones((2, 4), np.uint32))
    with pytest.raises(InvalidRequestError, match="no such parities on this server"):
        shard.check_differences(part)
    with pytest.raises(InvalidRequestError, match="no such parity on this server"):
        shard.parities(slots_K)
    np.testing.assert_array_equal(shard.parities_QW, before_QW)


def test_differences_of_ranges_that_are_not_ready_are_left_out() -> None:
    shards = make_shards(TABLE)
    rng = np.random.default_rng(1)
    shards[0].update(np.arange(10), rng.standard_normal((10, 2)).astype(np.float32))
    is_ready_G = np.array([True, False, True])
    folded = 0
    for receiver, part in shards[0].take(()).items():
        shard = shards[receiver]
        before_QW = shard.parities_QW.copy()
        folded += shard.fold(part, is_ready_G)
        is_open_Q = is_ready_G[shard.parity_granules(np.arange(len(before_QW)))]
        np.testing.assert_array_equal(shard.parities_QW[~is_open_Q], before_QW[~is_open_Q])
    assert folded == is_ready_G[shards[0].granules(np.arange(10))].sum()


def test_room_grows_and_what_waits_is_kept() -> None:
    shards = make_shards(TABLE, room=2)
    shard = shards[0]
    ones_ND = np.ones((10, 2), np.float32)
    shard.update(np.array([3, 5]), ones_ND[:2])
    assert shard.room() == 0
    shard.grow(10)
    assert shard.room() >= 10
    shard.update(np.arange(10), ones_ND)
    assert shard.waiting == 10
    check_parities(shards)
    deliver(shards, shard.take(()))
    check_parities(shards)


def test_a_table_without_a_code_has_no_parities_and_nothing_waits() -> None:
    table = TableSpec("alone", 20, 2, Placement(4), "none", Optimizer("sgd", lr=1.0))
    shard = make_shards(table)[0]
    shard.update(np.array([2]), np.ones((1, 2), np.float32))
    shard.assign(np.array([3]), np.full((1, 2), 5.0, np.float32))
    assert shard.pull(np.array([2, 3])).tolist() == [[-1, -1], [5, 5]]
    assert shard.waiting == 0
    assert shard.take(()) == {}
    assert len(shard.parities_QW) == 0


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3), st.integers(0, 20), st.integers(0, 1 << 30))
def test_differences_go_to_each_parity_server_once(parity: int, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    servers_KP = rng.permuted(np.tile(np.arange(5), (rows, 1)), axis=1)[:, :parity]
    slots_KP = rng.integers(0, 100, (rows, parity))
    positions_K = rng.integers(0, 200, rows)
    diffs_KW = rng.integers(0, 1 << 32, (rows, 2), dtype=np.uint32)
    found = [
        (server, slot, position, *diff)
        for server, part in by_server(7, servers_KP, slots_KP, positions_K, diffs_KW).items()
        for slot, position, diff in zip(
            part.slots_K.tolist(), part.positions_K.tolist(), part.diffs_KW.tolist(), strict=True
        )
        if part.arena == 7
    ]
    assert sorted(found) == sorted(
        (int(servers_KP[k, p]), int(slots_KP[k, p]), int(positions_K[k]), *diffs_KW[k].tolist())
        for k in range(rows)
        for p in range(parity)
    )


@pytest.mark.parametrize("name", ["xor", "sum"])
def test_what_is_folded_twice_with_the_opposite_factor_is_gone(name: str) -> None:
    code = make_code(name, 3, 1)
    out_QW = np.zeros((2, 3), np.float32)
    rows_NW = np.arange(6, dtype=np.float32).reshape(2, 3)
    back = 1 if name == "xor" else -1
    fold_rows(code, out_QW, np.array([1, 0]), rows_NW, np.array([1, 1]))
    np.testing.assert_array_equal(out_QW, rows_NW[::-1])
    fold_rows(code, out_QW, np.array([1, 0]), rows_NW, np.array([back, back]))
    assert (out_QW == 0).all()
