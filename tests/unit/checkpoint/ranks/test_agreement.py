"""What ranks agree on: shards that make up tables, decisions that travel."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.ranks.agreement import REPLICA_SPLIT_BYTES, merge, rows_to_save
from holdfast.errors import InvalidRequestError
from holdfast.model.shard import Shard


def held(name: str = "t", rows: int = 9, span: tuple[int, int] | None = None, **more: Any) -> Any:
    span = span or (0, rows)
    return {
        "name": name,
        "rows": rows,
        "columns": [["weight", 4, "float32"]],
        "cut": None,
        "held": span[1] - span[0],
        "range": list(span),
        "is_replicated": False,
        **more,
    }


def test_tables_of_all_ranks_are_merged_by_name() -> None:
    merged = merge([[held("b", span=(0, 5)), held("c")], [held("b", span=(5, 9)), held("a")]])
    assert [(t.name, t.rows) for t in merged] == [("a", 9), ("b", 9), ("c", 9)]


def test_row_state_that_one_rank_has_counts_for_all() -> None:
    late = held(
        span=(5, 9),
        columns=[
            ["weight", 4, "float32"],
            ["sum", 1, "float64"],
            ["exp_avg", 4, "float32"],
        ],
    )
    (merged,) = merge([[held(span=(0, 5))], [late]])
    assert merged.columns[-1].dtype == "float64"
    found = [(c.name, c.width) for c in merged.columns]
    assert found == [("weight", 4), ("exp_avg", 4), ("sum", 1)]


def test_cuts_of_different_ranks_make_up_a_table() -> None:
    left = held("t[0:4]", cut=["t", 0, 8])
    right = held("t[4:8]", cut=["t", 4, 8])
    assert [t.start for t in merge([[left], [right]])] == [0, 4]
    with pytest.raises(InvalidRequestError, match="do not make it up"):
        merge([[left], []])


@pytest.mark.parametrize(
    "ranks",
    [
        [[held(span=(0, 4))], [held(span=(5, 9))]],  # a hole
        [[held(span=(0, 5))], [held(span=(4, 9))]],  # an overlap
        [[held(span=(0, 6))], [held(span=(0, 3))]],  # both, as many rows as there are
        [[held(is_replicated=True)], []],  # not on all
        [[held(rows=9, span=(0, 5))], [held(rows=8, span=(5, 8))]],  # of different tables
        [[held(span=(0, 5))], [held(span=(5, 9), columns=[["weight", 3, "float32"]])]],
        [[held(span=(0, 5))], [held(span=(5, 9), columns=[["weight", 4, "float16"]])]],
    ],
)
def test_shards_that_make_up_no_table_are_refused(ranks: Any) -> None:
    with pytest.raises(InvalidRequestError):
        merge(ranks)


@given(st.integers(0, 5000), st.sampled_from([1, 64, 1024]), st.integers(1, 9))
def test_every_row_has_one_writer(rows: int, width: int, ranks: int) -> None:
    shard = Shard(rows, width, is_replicated=True)
    parts = [rows_to_save(shard, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert [row for part in parts for row in part] == list(range(rows))
    if 4 * rows * width >= REPLICA_SPLIT_BYTES:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_shard_that_one_rank_holds_is_its_own() -> None:
    assert rows_to_save(Shard(100, 4, range(20, 50)), rank=3, ranks=4) == range(30)
