from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cluster import audit
from holdfast.cluster.arena import Arena, plan_arenas
from holdfast.cluster.arenashard import ArenaShard, Differences, fold_rows
from holdfast.cluster.code import make_code
from holdfast.cluster.spec import (
    DIFFERENCE,
    GRADIENT,
    PROPAGATIONS,
    Optimizer,
    TableSpec,
    granules_of,
)
from holdfast.errors import InvalidRequestError
from holdfast.kernels.servers import initial
from holdfast.model.placement import Placement

LOCKS = 3
READY_G = np.ones(LOCKS, bool)
PLACED = (
    (Placement(4, data=3, parity=1), "xor"),
    (Placement(5, data=2, parity=2), "rs"),
    (Placement(6, data=2, parity=1, groups=2), "rs"),
    (Placement(3, data=1, parity=1), "xor"),
    (Placement(4, data=1, parity=2), "rs"),
)
OPTIMIZERS = ("sgd", "adagrad", "adam", "momentum", "rowwise-adagrad")


def alone(table: TableSpec) -> Arena:
    """An arena of one table."""
    (arena,) = plan_arenas([table])
    return arena


@st.composite
def tables(draw: st.DrawFn) -> TableSpec:
    placement, code = draw(st.sampled_from(PLACED))
    decay = draw(st.sampled_from((0.0, 0.125)))
    optimizer = Optimizer(draw(st.sampled_from(OPTIMIZERS)), lr=0.25, weight_decay=decay)
    rows = draw(st.integers(1, 50))
    told = draw(st.sampled_from(PROPAGATIONS)) if placement.data == 1 else DIFFERENCE
    return TableSpec(
        "users", rows, 2, placement, code, optimizer, seed=3, bound=0.5, propagation=told
    )


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


def deliver(shards: list[ArenaShard], taken: dict[int, list[Differences]]) -> None:
    for receiver, found in taken.items():
        for part in found:
            shards[receiver].check_differences(part)
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
    changes = 0
    for _ in range(5):
        slots_N = change(shard, rng)
        changed |= set(slots_N.tolist())
        changes += len(slots_N)
        assert shard.waiting == len(changed)
    rows = sum(len(part.slots_K) for found in shard.take(()).values() for part in found)
    told = changes if table.propagation == GRADIENT else len(changed)  # gradients do not add up
    assert rows == told * table.placement.parity
    assert shard.take(()) == {}


@settings(deadline=None, max_examples=40)
@given(tables(), st.sets(st.integers(0, LOCKS - 1)), st.integers(0, 1 << 30))
def test_differences_of_frozen_ranges_stay(table: TableSpec, frozen: set[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    shards = make_shards(table)
    shard = shards[0]
    slots_N = change(shard, rng)
    taken = shard.take(frozen)
    for receiver, (part,) in taken.items():
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


def test_a_decoded_row_that_comes_twice_counts_once() -> None:
    """Else rows that are still missing would be taken for here."""
    shard = ArenaShard(0, alone(TABLE), 1, locks=LOCKS, room=8)
    records_NW = np.array([[4.0] * 4, [1.0] * 4, [4.0] * 4], np.float32)
    assert shard.install(np.array([4, 1, 4]), records_NW) == 2
    assert shard.rows_missing == 8 == (~shard.is_here_M).sum()
    assert shard.pull(np.array([1, 4])).tolist() == [[1, 1], [4, 4]]


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
    for receiver, (part,) in shards[0].take(()).items():
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


# Gradients instead of differences.

COPIES = TableSpec(
    "users", 40, 2, Placement(4, data=1, parity=2), "rs", Optimizer("adam"), propagation=GRADIENT
)


def sums(optimizer: str) -> TableSpec:
    return TableSpec(
        "users", 40, 2, Placement(4, data=3, parity=1), "sum", Optimizer(optimizer, lr=0.25),
        seed=3, bound=0.5, propagation=GRADIENT,
    )  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 30), st.integers(0, 1 << 30))
def test_copies_follow_gradients_and_assigned_weights_in_any_order(room: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shards = make_shards(COPIES, room=room)
    for _ in range(20):
        shard = shards[int(rng.integers(len(shards)))]
        what = rng.random()
        if what < 0.5:
            change(shard, rng)
        elif what < 0.65:
            slots_N = rng.permutation(len(shard.ids_M))[:4]
            if shard.room() < len(slots_N):
                shard.grow(len(slots_N))
            shard.assign(slots_N, rng.standard_normal((len(slots_N), 2)).astype(np.float32))
        else:
            frozen = set(rng.permutation(LOCKS)[: int(rng.integers(0, LOCKS + 1))].tolist())
            deliver(shards, shard.take(frozen))
        check_parities(shards)
    for shard in shards:
        deliver(shards, shard.take(()))
        assert shard.waiting == 0
        assert shard.take(()) == {}
    np.testing.assert_array_equal(all_rows(shards), all_rows(shards, as_parity_knows=True))
    check_parities(shards)


def test_numbers_that_are_none_reach_copies_to_the_bit() -> None:
    shards = make_shards(COPIES)
    rng = np.random.default_rng(4)
    for shard in shards:
        slots_N = np.arange(len(shard.ids_M))
        for _ in range(3):
            words_ND = rng.integers(0, 1 << 32, (len(slots_N), 2), dtype=np.uint32)
            shard.update(slots_N, words_ND.view(np.float32))
        deliver(shards, shard.take(()))
    assert np.isnan(all_rows(shards)).any()
    check_parities(shards)


def test_gradients_are_told_and_records_only_where_weights_were_assigned() -> None:
    shards = make_shards(COPIES)
    shard = shards[0]
    ones_ND = np.ones((4, 2), np.float32)
    shard.update(np.arange(4), ones_ND)
    shard.assign(np.array([2]), 3 * ones_ND[:1])
    shard.update(np.arange(4), ones_ND)
    taken = shard.take(())
    told = [(part.kind, len(part.slots_K)) for found in taken.values() for part in found]
    # Two copies of each row: three rows have two steps each, one has a difference.
    assert sum(rows for kind, rows in told if kind == GRADIENT) == 2 * 3 * 2
    assert sum(rows for kind, rows in told if kind == DIFFERENCE) == 2
    for found in taken.values():
        for part in found:
            assert part.diffs_KW.shape[1] == (2 if part.kind == GRADIENT else 7)
            assert part.bytes == len(part.slots_K) * (4 + 1 + 4 * part.diffs_KW.shape[1])
    deliver(shards, taken)
    check_parities(shards)
    shard.update(np.array([2]), ones_ND[:1])  # from now on by gradients again
    assert {part.kind for found in shard.take(()).values() for part in found} == {GRADIENT}


def test_gradients_that_cannot_leave_are_bounded_by_one_difference_a_row() -> None:
    shards = make_shards(COPIES, room=25)
    shard = shards[0]
    rng = np.random.default_rng(0)
    slots_N = np.arange(len(shard.ids_M))
    for _ in range(20):
        if shard.room() < len(slots_N):
            shard.grow(len(slots_N))
        shard.update(slots_N, rng.standard_normal((len(slots_N), 2)).astype(np.float32))
        assert shard.take(range(LOCKS)) == {}
        assert shard._queue is not None and shard._queue.rows <= 25
        check_parities(shards)
    assert shard.waiting == len(slots_N)
    taken = shard.take(())
    assert {part.kind for found in taken.values() for part in found} == {DIFFERENCE}
    deliver(shards, taken)
    np.testing.assert_array_equal(all_rows(shards), all_rows(shards, as_parity_knows=True))
    check_parities(shards)


def test_a_push_waits_for_room_among_gradients_though_its_rows_wait_already() -> None:
    shard = make_shards(COPIES, room=12)[0]
    slots_N = np.arange(5)
    shard.update(slots_N, np.ones((5, 2), np.float32))
    assert (shard.waiting, shard.room()) == (5, 7)
    shard.update(slots_N, np.ones((5, 2), np.float32))
    assert (shard.waiting, shard.room()) == (5, 2)
    shard.take(())
    assert (shard.waiting, shard.room()) == (0, 12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_float_sums_follow_gradients_nearly_and_states_of_rows_exactly(optimizer: str) -> None:
    table = sums(optimizer)
    shards = make_shards(table)
    rng = np.random.default_rng(5)
    for _ in range(30):
        shard = shards[int(rng.integers(len(shards)))]
        change(shard, rng)
        frozen = set(rng.permutation(LOCKS)[: int(rng.integers(0, LOCKS))].tolist())
        deliver(shards, shard.take(frozen))
    for shard in shards:
        deliver(shards, shard.take(()))
    records_NW = all_rows(shards)
    for server, shard in enumerate(shards):
        expected_QW = audit.encode(shard.spec, server, records_NW)
        np.testing.assert_allclose(shard.parities_QW, expected_QW, atol=1e-4)
        states_QKS = shard._states_RS.reshape(len(shard.stripes_Q), 3, -1)
        members_QK = table.placement.members_of(shard.stripes_Q)
        is_row_QK = members_QK < table.rows
        np.testing.assert_array_equal(
            states_QKS[is_row_QK], records_NW[members_QK[is_row_QK], 2:]
        )  # fmt: skip
        assert shard.state_bytes == len(shard.stripes_Q) * 3 * 4 * (table.width - 2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_float_sums_follow_assigned_weights_and_steps_after_them(optimizer: str) -> None:
    shards = make_shards(sums(optimizer), room=30)
    rng = np.random.default_rng(6)
    for _ in range(15):
        for shard in shards:
            change(shard, rng)
            slots_N = rng.permutation(len(shard.ids_M))[:2]
            shard.grow(2)
            shard.assign(slots_N, rng.standard_normal((2, 2)).astype(np.float32))
            change(shard, rng)
            deliver(shards, shard.take(()))
    records_NW = all_rows(shards)
    for server, shard in enumerate(shards):
        expected_QW = audit.encode(shard.spec, server, records_NW)
        np.testing.assert_allclose(shard.parities_QW, expected_QW, atol=1e-3)


def test_only_sums_keep_states_of_others_rows() -> None:
    assert all(shard.state_bytes == 0 for shard in make_shards(COPIES))
    assert all(shard.state_bytes == 0 for shard in make_shards(sums("sgd")))
    assert all(shard.state_bytes == 0 for shard in make_shards(TABLE))


@pytest.mark.parametrize(
    ("kind", "width"), [(GRADIENT, 1), (GRADIENT, 7), (DIFFERENCE, 2), ("record", 2), ("", 7)]
)
def test_parts_of_another_width_or_kind_are_refused(kind: str, width: int) -> None:
    shard = make_shards(COPIES)[0]
    part = Differences(0, np.zeros(1, int), np.zeros(1, int), np.zeros((1, width), np.uint32), kind)
    with pytest.raises(InvalidRequestError, match="no such parities"):
        shard.check_differences(part)


def test_gradients_for_parities_of_differences_are_refused() -> None:
    shard = make_shards(TABLE)[0]
    values_KW = np.zeros((1, 2), np.float32)
    part = Differences(0, np.zeros(1, int), np.zeros(1, int), values_KW, GRADIENT)
    with pytest.raises(InvalidRequestError, match="no such parities"):
        shard.check_differences(part)
