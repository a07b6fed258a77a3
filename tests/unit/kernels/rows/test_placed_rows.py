"""Rows and parity rows sorted by server are where placement says they are."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.kernels.rows import placed_rows
from holdfast.model.placement import Placement


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    data, parity = draw(st.integers(1, 8)), draw(st.integers(0, 3))
    groups = draw(st.integers(1, 3))
    return Placement((data + parity + draw(st.integers(0, 4))) * groups, data, parity, groups)


@settings(deadline=None)
@given(placements(), st.lists(st.integers(0, 1 << 40), max_size=60), st.sampled_from(["i8", "i4"]))
def test_sorted_rows_are_all_rows_by_server_in_their_order(
    placement: Placement, ids: list[int], dtype: str
) -> None:
    ids_N = np.array([i % (1 << 30) for i in ids], dtype)
    at_N, slots_N, ends = placed_rows.sort_rows(ids_N, placement.numbers)
    assert ends[0] == 0 and ends[-1] == len(ids_N) and len(ends) == placement.servers + 1
    servers_N = placement.servers_of(ids_N)
    np.testing.assert_array_equal(at_N, np.argsort(servers_N, kind="stable"))
    np.testing.assert_array_equal(slots_N, placement.slots_of(ids_N)[at_N])
    np.testing.assert_array_equal(np.diff(ends), np.bincount(servers_N, minlength=len(ends) - 1))


@settings(deadline=None)
@given(placements(), st.lists(st.integers(0, 1 << 30), max_size=60))
def test_sorted_parity_rows_are_those_of_every_row_by_server(
    placement: Placement, ids: list[int]
) -> None:
    ids_N = np.array(ids, np.int64)
    at_F, slots_F, positions_F, ends = placed_rows.sort_parities(ids_N, placement.numbers)
    servers_F = np.repeat(np.arange(placement.servers), np.diff(ends))
    found = list(zip(at_F.tolist(), servers_F.tolist(), slots_F.tolist(), strict=True))
    stripes_N = placement.stripes_of(ids_N)
    servers_NP = placement.parity_servers_of(stripes_N)
    slots_NP = placement.parity_slots_of(stripes_N)
    assert sorted(found) == sorted(
        (row, int(servers_NP[row, p]), int(slots_NP[row, p]))
        for row in range(len(ids_N))
        for p in range(placement.parity)
    )
    np.testing.assert_array_equal(positions_F, placement.positions_of(ids_N)[at_F])


def test_a_group_counts_its_parity_rows_from_the_first_stripe_on() -> None:
    placement = Placement(5, data=4, parity=1)
    for server in range(5):
        stripes_Q, _ = placement.parity_rows_of(server, 400)
        for stripe in (0, 1, 7, 99):
            expected = int((stripes_Q < stripe).sum())
            assert placed_rows.parities_before(stripe, server, placement.numbers) == expected
