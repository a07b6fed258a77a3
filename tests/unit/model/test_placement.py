"""Which server holds which row, and where: checked by counting."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import InvalidRequestError
from holdfast.model.placement import Placement


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    group = draw(st.integers(1, 24))
    groups = draw(st.sampled_from([1, 1, 2, 3, 5]))
    data = draw(st.integers(0, group))
    parity = draw(st.integers(0, group - data)) if data else 0
    return Placement(group * groups, data, parity, groups)


def every_small_placement() -> list[Placement]:
    return [
        Placement(group * groups, data, parity, groups)
        for groups, group in itertools.product((1, 3), range(1, 7))
        for data in range(1, group + 1)
        for parity in range(group - data + 1)
    ]


@settings(deadline=None)
@given(placement=placements(), rows=st.integers(0, 2000))
def test_servers_hold_as_many_rows_give_or_take_one(placement: Placement, rows: int) -> None:
    servers_N = placement.servers_of(np.arange(rows))
    counts = np.bincount(servers_N, minlength=placement.servers)
    assert len(counts) == placement.servers
    assert counts.max() - counts.min() <= 1


@settings(deadline=None)
@given(placement=placements(), rows=st.integers(0, 500))
def test_rows_of_a_server_are_those_placed_on_it(placement: Placement, rows: int) -> None:
    servers_N = placement.servers_of(np.arange(rows))
    for server in range(placement.servers):
        ids_N = np.flatnonzero(servers_N == server)
        assert np.array_equal(placement.rows_of(server, rows), ids_N)
        assert placement.data_rows(server, rows) == len(ids_N)


@settings(deadline=None)
@given(placement=placements(), rows=st.integers(0, 500))
def test_slots_of_a_servers_rows_are_dense_and_in_the_order_of_ids(
    placement: Placement, rows: int
) -> None:
    servers_N = placement.servers_of(np.arange(rows))
    slots_N = placement.slots_of(np.arange(rows))
    for server in range(placement.servers):
        slots = slots_N[servers_N == server]
        assert np.array_equal(slots, np.arange(len(slots)))


@given(placement=placements(), first=st.integers(0, 10**6))
def test_rows_of_a_stripe_are_on_different_servers_of_one_group(
    placement: Placement, first: int
) -> None:
    stripes_S = np.arange(first, first + 100)
    members_SM = np.concatenate(
        [
            placement.servers_of(placement.members_of(stripes_S)),
            placement.parity_servers_of(stripes_S),
        ],
        axis=1,
    )
    assert all(len(set(stripe)) == len(stripe) for stripe in members_SM.tolist())
    assert members_SM.shape[1] == placement.data + placement.parity
    groups_SM = members_SM // (placement.servers // placement.groups)
    assert (groups_SM == groups_SM[:, :1]).all()
    assert 0 <= members_SM.min() <= members_SM.max() < placement.servers


@settings(deadline=None)
@given(placement=placements(), rows=st.integers(0, 500))
def test_every_row_is_in_one_stripe_at_one_position(placement: Placement, rows: int) -> None:
    ids_N = np.arange(rows)
    stripes_N, positions_N = placement.stripes_of(ids_N), placement.positions_of(ids_N)
    assert np.array_equal(placement.members_of(stripes_N)[ids_N, positions_N], ids_N)
    assert np.array_equal(np.unique(stripes_N), np.arange(placement.stripes(rows)))
    if placement.groups == 1:
        assert np.array_equal(stripes_N, ids_N // placement.data)
        assert np.array_equal(positions_N, ids_N % placement.data)


@given(placement=placements())
def test_parity_goes_round_all_servers(placement: Placement) -> None:
    for turns in (1, 3):
        stripes_S = np.arange(placement.servers * turns)
        counts = np.bincount(
            placement.parity_servers_of(stripes_S).ravel(), minlength=placement.servers
        )
        assert set(counts) == {placement.parity * turns}


def check_parity(placement: Placement, rows: int) -> None:
    stripes_S = np.arange(placement.stripes(rows))
    servers_SP = placement.parity_servers_of(stripes_S)
    slots_SP = placement.parity_slots_of(stripes_S)
    counts = []
    for server in range(placement.servers):
        # In the order of stripes: np.nonzero goes row by row.
        stripes_Q, index_Q = np.nonzero(servers_SP == server)
        assert np.array_equal(slots_SP[stripes_Q, index_Q], np.arange(len(stripes_Q)))
        found_Q, found_index_Q = placement.parity_rows_of(server, rows)
        assert np.array_equal(found_Q, stripes_Q)
        assert np.array_equal(found_index_Q, index_Q)
        assert placement.parity_rows(server, rows) == len(stripes_Q)
        counts.append(len(stripes_Q))
    assert max(counts) - min(counts) <= placement.parity


@settings(deadline=None)
@given(placement=placements(), rows=st.integers(0, 1000))
def test_slots_of_a_servers_parity_rows_are_dense_and_in_the_order_of_stripes(
    placement: Placement, rows: int
) -> None:
    check_parity(placement, rows)


def test_every_small_placement_at_every_small_length() -> None:
    for placement in every_small_placement():
        servers_N = placement.servers_of(np.arange(70))
        for rows in range(0, 70, 3):
            check_parity(placement, rows)
            counts = np.bincount(servers_N[:rows], minlength=placement.servers)
            assert counts.max() - counts.min() <= 1


@given(
    placement=placements(),
    ids=st.lists(st.integers(0, 1 << 44), min_size=1, max_size=30, unique=True),
)
def test_where_a_row_is_does_not_depend_on_other_rows_nor_on_small_numbers(
    placement: Placement, ids: list[int]
) -> None:
    """Of rows far out each has a place of its own, the same alone as among others."""
    ids_N = np.array(ids)
    servers_N, slots_N = placement.servers_of(ids_N), placement.slots_of(ids_N)
    assert len(set(zip(servers_N.tolist(), slots_N.tolist(), strict=True))) == len(ids)
    assert servers_N[0] == placement.servers_of(ids_N[:1])[0]
    assert placement.data_rows(int(servers_N[0]), ids[0]) == slots_N[0]
    stripes_S = np.unique(placement.stripes_of(ids_N))
    servers_SP = placement.parity_servers_of(stripes_S)
    slots_SP = placement.parity_slots_of(stripes_S)
    places = set(zip(servers_SP.ravel().tolist(), slots_SP.ravel().tolist(), strict=True))
    assert len(places) == servers_SP.size


def test_a_placement_of_one_group_is_what_it_always_was() -> None:
    """Stored checkpoints are laid out by it."""
    placement = Placement(5, data=3, parity=2)
    assert placement.servers_of(np.arange(17)).tolist() == [
        0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 1, 2,
    ]  # fmt: skip
    assert placement.parity_servers_of(np.arange(6)).tolist() == [
        [3, 4], [1, 2], [4, 0], [2, 3], [0, 1], [4, 0],
    ]  # fmt: skip
    assert Placement(6, data=4, parity=2).servers_of(np.arange(14)).tolist() == [
        0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 1, 2,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "given_", [
        {"servers": 0}, {"servers": -1}, {"servers": 2.0}, {"servers": True},
        {"servers": 4, "data": -1}, {"servers": 4, "data": 5},
        {"servers": 4, "data": 4, "parity": 1},
        {"servers": 4, "data": 2, "parity": -1}, {"servers": 1 << 17},
        {"servers": 4, "groups": 0}, {"servers": 4, "groups": 3}, {"servers": 4, "groups": 8},
        {"servers": 8, "data": 3, "parity": 2, "groups": 2}, {"servers": 4, "groups": 2.0},
    ],
)  # fmt: skip
def test_impossible_placements_are_refused(given_: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        Placement(**given_)


@pytest.mark.parametrize("server", [-1, 3, 1.5, True])
@pytest.mark.parametrize("ask", ["rows_of", "data_rows", "parity_rows_of", "parity_rows"])
def test_server_that_is_none_is_refused(ask: str, server: Any) -> None:
    with pytest.raises(InvalidRequestError, match="0 to 2"):
        getattr(Placement(3), ask)(server, 10)
