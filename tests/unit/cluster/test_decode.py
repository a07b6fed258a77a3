"""What is planned, fetched and folded is what was lost, to the bit, whoever is lost."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cluster import audit
from holdfast.cluster.arena import Arena, plan_arenas
from holdfast.cluster.arenashard import ArenaShard, fold_rows
from holdfast.cluster.decode import Sources, plan_parities, plan_rows
from holdfast.cluster.spec import Optimizer, TableSpec
from holdfast.errors import DataLossError
from holdfast.model.placement import Placement

SGD = Optimizer("sgd")


def alone(table: TableSpec) -> Arena:
    """An arena of one table."""
    (arena,) = plan_arenas([table])
    return arena


@st.composite
def tables(draw: st.DrawFn) -> TableSpec:
    code = draw(st.sampled_from(("xor", "rs", "rs", "sum")))
    parity = draw(st.integers(1, 3)) if code == "rs" else 1
    data = draw(st.integers(1, 6))
    groups = draw(st.integers(1, 2))
    servers = (data + parity + draw(st.integers(0, 2))) * groups
    placement = Placement(servers, data=data, parity=parity, groups=groups)
    return TableSpec("users", draw(st.integers(1, 90)), 3, placement, code, SGD)


def make_records(table: TableSpec, seed: int) -> np.ndarray:
    """Any bits, NaNs too; for the float sum whole numbers, whose sums are exact."""
    rng = np.random.default_rng(seed)
    if table.code == "sum":
        return rng.integers(-99, 99, (table.rows, table.width)).astype(np.float32)
    bits_NW = rng.integers(0, 1 << 32, (table.rows, table.width), dtype=np.uint32)
    return bits_NW.view(np.float32)


def make_shards(table: TableSpec, records_NW: np.ndarray) -> list[ArenaShard]:
    shards = []
    for server in range(table.placement.servers):
        shard = ArenaShard(0, alone(table), server, locks=2, room=8)
        shard.install(np.arange(len(shard.ids_M)), records_NW[shard.ids_M])
        shard.parities_QW[:] = audit.encode(alone(table), server, records_NW)
        shards.append(shard)
    return shards


def rebuild(shards: list[ArenaShard], rows: int, sources: Sources) -> np.ndarray:
    code = shards[0].code
    assert code is not None
    out_NW = np.zeros((rows, shards[0].spec.width), np.float32)
    fetches = 0
    for server in sources.servers:
        part = sources.of(server)
        assert (np.diff(part.is_parity_F.astype(int)) >= 0).all()  # data rows first
        rows_F, parities_F = part.slots_F[~part.is_parity_F], part.slots_F[part.is_parity_F]
        fetched_FW = np.concatenate(
            [shards[server].records_MW[rows_F], shards[server].parities_QW[parities_F]]
        )
        fold_rows(code, out_NW, part.rows_F, fetched_FW, part.coefficients_F)
        fetches += len(part.rows_F)
    assert fetches == len(sources.rows_F)
    return out_NW


def check_same(table: TableSpec, found_NW: np.ndarray, expected_NW: np.ndarray) -> None:
    if table.code != "sum":
        found_NW, expected_NW = found_NW.view(np.uint32), expected_NW.view(np.uint32)
    np.testing.assert_array_equal(found_NW, expected_NW)


@st.composite
def losses(draw: st.DrawFn, table: TableSpec) -> tuple[int, set[int], set[int]]:
    """A server that rebuilds, and who lacks rows and parities: no stripe lost more than it can."""
    placement = table.placement
    some = st.permutations(range(placement.servers))
    lost = draw(some)[: draw(st.integers(1, placement.parity))]
    lacks_rows = {lost[0], *draw(st.sets(st.sampled_from(lost)))}
    lacks_parities = draw(st.sets(st.sampled_from(lost)))
    return lost[0], lacks_rows, lacks_parities


@settings(deadline=None)
@given(tables(), st.data(), st.integers(0, 1 << 30))
def test_lost_rows_come_back_to_the_bit(table: TableSpec, data: st.DataObject, seed: int) -> None:
    server, lacks_rows, lacks_parities = data.draw(losses(table))
    records_NW = make_records(table, seed)
    shards = make_shards(table, records_NW)
    for lost in lacks_rows:
        shards[lost].records_MW[:] = 7.0  # wrong, should anybody ask
    for lost in lacks_parities:
        shards[lost].parities_QW[:] = 7.0
    shard = shards[server]
    slots_N = np.random.default_rng(seed).permutation(len(shard.ids_M))
    slots_N = slots_N[: data.draw(st.integers(0, len(slots_N)))]
    sources = plan_rows(shard, slots_N, lacks_rows=lacks_rows, lacks_parities=lacks_parities)
    found_NW = rebuild(shards, len(slots_N), sources)
    check_same(table, found_NW, records_NW[shard.ids_M[slots_N]])
    asked = sources.servers_F[~sources.is_parity_F], sources.servers_F[sources.is_parity_F]
    assert not set(asked[0].tolist()) & lacks_rows
    assert not set(asked[1].tolist()) & lacks_parities
    per_row = np.bincount(sources.rows_F, minlength=len(slots_N))
    assert (per_row <= table.placement.data).all()


@settings(deadline=None)
@given(tables(), st.data(), st.integers(0, 1 << 30))
def test_lost_parities_come_back_to_the_bit(
    table: TableSpec, data: st.DataObject, seed: int
) -> None:
    records_NW = make_records(table, seed)
    shards = make_shards(table, records_NW)
    server = data.draw(st.integers(0, table.placement.servers - 1))
    expected_QW = shards[server].parities_QW.copy()
    shards[server].parities_QW[:] = 7.0
    slots_N = np.random.default_rng(seed).permutation(len(expected_QW))
    sources = plan_parities(shards[server], slots_N)
    assert not sources.is_parity_F.any()
    assert server not in sources.servers
    check_same(table, rebuild(shards, len(slots_N), sources), expected_QW[slots_N])


@settings(deadline=None)
@given(tables(), st.integers(0, 1 << 30))
def test_one_loss_more_than_parities_is_data_loss_that_names_table_and_rows(
    table: TableSpec, seed: int
) -> None:
    placement = table.placement
    first = np.random.default_rng(seed).integers(table.rows)
    stripe_S = placement.stripes_of(np.array([first]))
    members = [int(i) for i in placement.members_of(stripe_S)[0] if i < table.rows]
    servers = [int(placement.servers_of(np.array([i]))[0]) for i in members]
    servers += placement.parity_servers_of(stripe_S)[0].tolist()
    if len(servers) <= placement.parity:
        return  # the stripe's other rows are behind the end: known
    server = int(placement.servers_of(np.array([first]))[0])
    others = [other for other in servers if other != server]
    lost = {server, *others[: placement.parity]}
    shard = ArenaShard(0, alone(table), server, locks=2, room=8)
    slots_N = placement.slots_of(np.array([first]))
    with pytest.raises(DataLossError) as raised:
        plan_rows(shard, slots_N, lacks_rows=lost, lacks_parities=lost)
    assert raised.value.facts == {"rows": 1, "tables": f"users: 1 row ({first})"}


def test_rows_of_a_table_without_a_code_are_data_loss() -> None:
    table = TableSpec("alone", 9, 2, Placement(3), "none", SGD)
    shard = ArenaShard(0, alone(table), 1, locks=1, room=8)
    with pytest.raises(DataLossError, match=r"rows=2 tables='alone: 2 rows \(1 to 7\)'"):
        plan_rows(shard, np.array([0, 2]), lacks_rows={1}, lacks_parities=set())


def test_all_lost_rows_are_named_by_their_ends() -> None:
    table = TableSpec("users", 40, 2, Placement(5, data=4, parity=1), "xor", SGD)
    shard = ArenaShard(0, alone(table), 1, locks=1, room=8)
    with pytest.raises(DataLossError) as raised:
        plan_rows(shard, np.arange(8), lacks_rows={0, 1, 2, 3, 4}, lacks_parities=set())
    found = re.fullmatch(r"users: \d rows \((\d+) to (\d+)\)", str(raised.value.facts["tables"]))
    assert found and {int(at) for at in found.groups()} <= set(shard.ids_M.tolist())


def test_a_single_row_at_the_end_is_rebuilt_from_its_parity_alone() -> None:
    table = TableSpec("users", 13, 2, Placement(6, data=4, parity=2), "rs", SGD)
    records_NW = make_records(table, 1)
    shards = make_shards(table, records_NW)
    server = int(table.placement.servers_of(np.array([12]))[0])
    slots_N = table.placement.slots_of(np.array([12]))
    everyone = set(range(6))
    for kept in table.placement.parity_servers_of(np.array([3]))[0].tolist():
        sources = plan_rows(
            shards[server], slots_N, lacks_rows=everyone, lacks_parities=everyone - {kept}
        )
        assert sources.servers == [kept]
        check_same(table, rebuild(shards, 1, sources), records_NW[[12]])


@pytest.mark.parametrize("data", [46, 47, 60])
def test_wide_stripes_are_decoded_too(data: int) -> None:
    placement = Placement(data + 2, data=data, parity=2)
    table = TableSpec("users", 3 * data - 5, 1, placement, "rs", SGD)
    records_NW = make_records(table, data)
    shards = make_shards(table, records_NW)
    slots_N = np.arange(len(shards[3].ids_M))
    for lost in ({3}, {3, 4}, {3, data + 1}):
        sources = plan_rows(shards[3], slots_N, lacks_rows=lost, lacks_parities=lost)
        found_NW = rebuild(shards, len(slots_N), sources)
        check_same(table, found_NW, records_NW[shards[3].ids_M])


def test_no_rows_need_no_sources() -> None:
    table = TableSpec("users", 20, 2, Placement(5, data=3, parity=2), "rs", SGD)
    shard = ArenaShard(0, alone(table), 0, locks=1, room=8)
    none_N = np.zeros(0, np.int64)
    for sources in (
        plan_rows(shard, none_N, lacks_rows={0}, lacks_parities={0}),
        plan_parities(shard, none_N),
    ):
        assert sources.servers == []
        assert all(len(getattr(sources, f.name)) == 0 for f in dataclasses.fields(sources))
