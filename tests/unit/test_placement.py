"""Which server holds which row: checked by counting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidRequestError
from holdfast.placement import Placement


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    servers = draw(st.integers(1, 24))
    data = draw(st.integers(0, servers))
    parity = draw(st.integers(0, servers - data)) if data else 0
    return Placement(servers, data, parity)


@given(placement=placements(), rows=st.integers(0, 2000))
def test_servers_hold_as_many_rows_give_or_take_one(placement: Placement, rows: int) -> None:
    servers_N = placement.servers_of(np.arange(rows))
    counts = np.bincount(servers_N, minlength=placement.servers)
    assert len(counts) == placement.servers
    assert counts.max() - counts.min() <= 1


@given(placement=placements(), rows=st.integers(0, 500))
def test_rows_of_a_server_are_those_placed_on_it(placement: Placement, rows: int) -> None:
    servers_N = placement.servers_of(np.arange(rows))
    for server in range(placement.servers):
        assert np.array_equal(placement.rows_of(server, rows), np.flatnonzero(servers_N == server))


@given(placement=placements(), first=st.integers(0, 10**6))
def test_rows_of_a_stripe_are_on_different_servers(placement: Placement, first: int) -> None:
    stripes_S = np.arange(first, first + 100)
    rows_SD = stripes_S[:, None] * placement.data + np.arange(placement.data)
    members = np.concatenate(
        [placement.servers_of(rows_SD), placement.parity_servers_of(stripes_S)], axis=1
    )
    assert all(len(set(stripe)) == len(stripe) for stripe in members.tolist())
    assert members.shape[1] == placement.data + placement.parity


@given(placement=placements())
def test_parity_goes_round_all_servers(placement: Placement) -> None:
    stripes_S = np.arange(placement.servers**2)
    counts = np.bincount(
        placement.parity_servers_of(stripes_S).ravel(), minlength=placement.servers
    )
    assert counts.max() == counts.min()


@pytest.mark.parametrize(
    "given_", [
        {"servers": 0}, {"servers": -1}, {"servers": 2.0}, {"servers": True},
        {"servers": 4, "data": -1}, {"servers": 4, "data": 5},
        {"servers": 4, "data": 4, "parity": 1},
        {"servers": 4, "data": 2, "parity": -1}, {"servers": 1 << 17},
    ],
)  # fmt: skip
def test_impossible_placements_are_refused(given_: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        Placement(**given_)


@pytest.mark.parametrize("server", [-1, 3, 1.5, True])
def test_server_that_is_none_is_refused(server: Any) -> None:
    with pytest.raises(InvalidRequestError, match="0 to 2"):
        Placement(3).rows_of(server, 10)
