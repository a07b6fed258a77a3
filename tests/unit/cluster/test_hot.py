from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cluster.arenashard import ArenaShard
from holdfast.cluster.hot import HOT_ROWS_MAX
from holdfast.cluster.spec import ClusterSpec, Optimizer, TableSpec
from holdfast.errors import InvalidRequestError
from holdfast.model.placement import Placement

PLACED = Placement(5, data=3, parity=2)
USERS = TableSpec("users", 40, 4, PLACED, "rs", Optimizer("adam"), seed=3, bound=0.5)
ITEMS = TableSpec("items", 9, 4, PLACED, "rs", Optimizer("adam"), seed=4, bound=0.5)
ADS = TableSpec("ads", 9, 2, Placement(5, data=1, parity=1), "xor")
SUMS = TableSpec("sums", 9, 2, Placement(5, data=2, parity=1), "sum")
ALONE = TableSpec("alone", 9, 2, Placement(5), "none")
TABLES = (USERS, ITEMS, ADS, SUMS, ALONE)


def test_hot_rows_are_copies_as_many_as_their_stripes_had_parities() -> None:
    spec = ClusterSpec(TABLES, hot={"users": [1, 7, 39], "items": np.array([0])})
    table = spec.hot_tables["users"].table
    assert (table.rows, table.placement) == (3, Placement(5, data=1, parity=2))
    assert (table.code, table.propagation, table.optimizer) == ("rs", "gradient", USERS.optimizer)
    plain = ClusterSpec(TABLES)
    assert spec.parity == plain.parity and spec.parity_max == plain.parity_max
    # Tables lie where they do without; all hot rows are alike and lie in one arena behind.
    assert {name: spec.places[name] for name in plain.places} == plain.places
    assert [len(arena.tables) for arena in spec.arenas] == [2, 1, 1, 1, 2]
    (hot_users, hot_items) = spec.arenas[-1].tables
    ids_N = np.array([hot_users.start + 2, hot_items.start])
    assert spec.arenas[-1].describe(ids_N) == "users: 1 row (39); items: 1 row (0)"


def test_hot_rows_begin_as_they_do_in_their_table_and_so_do_their_copies() -> None:
    spec = ClusterSpec(TABLES, hot={"users": [1, 7, 8, 39], "items": [0, 5]})
    plain = ClusterSpec(TABLES)
    rows_NW = np.empty((plain.arenas[0].rows, USERS.width), np.float32)
    for server in range(5):
        shard = ArenaShard(0, plain.arenas[0], server, locks=2, room=8)
        shard.fill()
        rows_NW[shard.ids_M] = shard.records_MW
    expected = {
        placed.start + rank: rows_NW[plain.places[placed.hot.base.name][1] + row]
        for placed in spec.arenas[-1].tables
        if placed.hot is not None
        for rank, row in enumerate(placed.hot.ids)
    }
    assert len(expected) == 6
    copies = 0
    for server in range(5):
        shard = ArenaShard(0, spec.arenas[-1], server, locks=2, room=8)
        shard.fill()
        stripes_M = shard.spec.placement.stripes_of(shard.ids_M)
        held = [(shard.ids_M, shard.records_MW), (shard.stripes_Q, shard.parities_QW)]
        assert (stripes_M == shard.ids_M).all()  # one row a stripe
        for ids, found in held:
            for row, record_W in zip(ids.tolist(), found, strict=True):
                assert (record_W == expected.get(row, 0)).all()
                copies += row in expected
    assert copies == 6 * 3


@settings(deadline=None)
@given(st.sets(st.integers(0, 39), min_size=1), st.lists(st.integers(0, 39)))
def test_ids_are_found_among_hot_ones(hot: set[int], ids: list[int]) -> None:
    table = ClusterSpec(TABLES, hot={"users": sorted(hot)}).hot_tables["users"]
    is_hot_N, ranks_N = table.find(np.array(ids, np.int64))
    assert is_hot_N.tolist() == [row in hot for row in ids]
    assert table.ids_H[ranks_N].tolist() == [row for row in ids if row in hot]


@given(st.sets(st.integers(0, 39)), st.sets(st.integers(0, 8)))
def test_hot_rows_travel_as_json_and_come_back_the_same(users: set[int], items: set[int]) -> None:
    spec = ClusterSpec(TABLES, hot={"users": sorted(users), "items": np.array(sorted(items), int)})
    assert ClusterSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert set(spec.hot) == {n for n, ids in (("users", users), ("items", items)) if ids}


@pytest.mark.parametrize(
    ("hot", "says"),
    [
        ({"nobody": [1]}, "no such table"),
        ({"ads": [1]}, r"coded exactly can be copied.*data=1"),
        ({"sums": [1]}, r"coded exactly can be copied.*code='sum'"),
        ({"alone": [1]}, r"coded exactly can be copied.*code='none'"),
        ({"users": [40]}, "ids of their table"),
        ({"users": [-1, 3]}, "ids of their table"),
        ({"users": [3, 3]}, "ascend"),
        ({"users": [4, 3]}, "ascend"),
        ({"users": [1.0]}, "hot rows are ids"),
        ({"users": [True]}, "hot rows are ids"),
        ({"users": ["1"]}, "hot rows are ids"),
        ({"users": [[1], [2]]}, "hot rows are ids"),
        ({"users": [[1], [2, 3]]}, "hot rows are ids"),
        ({"users": 3}, "hot rows are ids"),
        ({"users": [1 << 70]}, "hot rows are ids"),
        ({"users": list(range(HOT_ROWS_MAX + 1))}, "a few thousand"),
        ([1], "ids by table"),
        (None, "ids by table"),
    ],
)
def test_hot_rows_that_cannot_be_are_refused(hot: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        ClusterSpec(TABLES, hot=hot)
    with pytest.raises(InvalidRequestError, match=says):
        ClusterSpec.from_json({**ClusterSpec(TABLES).to_json(), "hot": hot})


def test_a_table_that_is_named_as_hot_rows_are_is_refused() -> None:
    named = TableSpec("users (hot)", 9, 2, PLACED, "rs")
    with pytest.raises(InvalidRequestError, match="has the name of hot rows"):
        ClusterSpec((*TABLES, named), hot={"users": [1]})
    assert ClusterSpec((*TABLES, named)).hot == {}
