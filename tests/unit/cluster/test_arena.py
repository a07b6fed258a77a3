"""Tables in an arena lie as they would alone."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cluster.arena import plan_arenas
from holdfast.cluster.arenashard import ArenaShard
from holdfast.cluster.spec import ClusterSpec, Optimizer, TableSpec
from holdfast.model.placement import Placement


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    data, parity = draw(st.integers(1, 6)), draw(st.integers(0, 3))
    groups = draw(st.integers(1, 3))
    servers = (data + parity + draw(st.integers(0, 3))) * groups
    return Placement(servers, data=data, parity=parity, groups=groups)


def tables_of(placement: Placement, rows: list[int]) -> list[TableSpec]:
    code = "none" if placement.parity == 0 else "xor" if placement.parity == 1 else "rs"
    return [
        TableSpec(f"t{at}", count, 2, placement, code, seed=at, bound=0.5)
        for at, count in enumerate(rows)
    ]


@settings(deadline=None)
@given(placements(), st.lists(st.integers(1, 70), min_size=1, max_size=5))
def test_rows_lie_on_servers_and_in_stripes_as_if_their_table_were_alone(
    placement: Placement, rows: list[int]
) -> None:
    (arena,) = plan_arenas(tables_of(placement, rows))
    for placed in arena.tables:
        ids_N = np.arange(placed.table.rows)
        inside_N = placed.start + ids_N
        assert (placement.servers_of(inside_N) == placement.servers_of(ids_N)).all()
        assert (placement.positions_of(inside_N) == placement.positions_of(ids_N)).all()
        assert (placement.slots_of(inside_N) == placed.slot + placement.slots_of(ids_N)).all()
        stripes_N = placement.stripes_of(ids_N)
        inside_N = placement.stripes_of(inside_N)
        assert (inside_N == placed.stripe + stripes_N).all()
        servers_NP = placement.parity_servers_of(stripes_N)
        assert (placement.parity_servers_of(inside_N) == servers_NP).all()
        further = placement.parity_slots_of(inside_N) - placement.parity_slots_of(stripes_N)
        assert len(np.unique(further)) <= 1


@settings(deadline=None, max_examples=30)
@given(placements(), st.lists(st.integers(1, 40), min_size=2, max_size=4))
def test_first_values_and_parities_are_those_of_tables_alone(
    placement: Placement, rows: list[int]
) -> None:
    tables = tables_of(placement, rows)
    (arena,) = plan_arenas(tables)
    for server in range(placement.servers):
        together = ArenaShard(0, arena, server, locks=2, room=8)
        together.fill()
        seen = 0
        for placed in arena.tables:
            alone = ArenaShard(0, *plan_arenas([placed.table]), server, locks=2, room=8)
            alone.fill()
            lo, hi = placed.slot, placed.slot + len(alone.ids_M)
            np.testing.assert_array_equal(together.records_MW[lo:hi], alone.records_MW)
            lo = int(np.searchsorted(together.stripes_Q, placed.stripe))
            hi = lo + len(alone.stripes_Q)
            np.testing.assert_array_equal(together.parities_QW[lo:hi], alone.parities_QW)
            seen += np.count_nonzero(alone.records_MW)
        assert np.count_nonzero(together.records_MW) == seen  # between tables all is zero


def test_only_tables_that_are_alike_share_an_arena() -> None:
    placed = Placement(5, data=4, parity=1)
    users = TableSpec("users", 9, 4, placed)
    others = [
        dataclasses.replace(users, name="wider", dim=5),
        dataclasses.replace(users, name="trained", optimizer=Optimizer("sgd")),
        dataclasses.replace(users, name="placed", placement=Placement(5, data=3, parity=1)),
        dataclasses.replace(users, name="coded", code="rs"),
        dataclasses.replace(users, name="held", is_held=True),
        dataclasses.replace(users, name="summed", code="sum"),
        dataclasses.replace(users, name="told", code="sum", propagation="gradient"),
    ]
    alike = dataclasses.replace(users, name="items", rows=1, seed=7, bound=0.5)
    spec = ClusterSpec((users, *others, alike))
    assert [len(arena.tables) for arena in spec.arenas] == [2, 1, 1, 1, 1, 1, 1, 1]
    assert spec.places["items"] == (0, placed.period_rows)
    assert spec.places["wider"] == (1, 0)
