"""Shards: local rows and global ids, cuts by columns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holdfast.errors import InvalidRequestError
from holdfast.model.model_state import ModelState
from holdfast.model.schema import Column, cuts_of, whole_schema
from holdfast.model.shard import Shard


@given(st.sets(st.integers(0, 60)), st.lists(st.integers(0, 60), max_size=40, unique=True))
def test_local_rows_and_global_ids_undo_each_other(held: set[int], asked: list[int]) -> None:
    ids_N = np.array(sorted(held), np.int64)
    shard = Shard(61, 4, ids_N)
    assert np.array_equal(shard.local_of(shard.global_ids(np.arange(len(held)))),
                          np.arange(len(held)))  # fmt: skip
    local_N = shard.local_of(np.array(asked, np.int64))
    for row, local in zip(asked, local_N.tolist(), strict=True):
        assert (local >= 0) == (row in held)
        assert local < 0 or ids_N[local] == row
    for row in range(61):
        assert shard.may_hold(row, row) == (row in held)


def test_ids_that_follow_each_other_are_a_range() -> None:
    assert Shard(9, 4, np.array([3, 4, 5])).ids == range(3, 6)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Shard(9, 4, np.array([4, 3])),
        lambda: Shard(9, 4, np.array([3, 3])),
        lambda: Shard(9, 4, range(5, 10)),
        lambda: Shard(9, 4, range(0, 8, 2)),
        lambda: Shard(9, 4, columns=range(2, 5)),
        lambda: Shard(9, 4, columns=range(2, 2)),
    ],
)
def test_impossible_shards_are_refused(wrong: object) -> None:
    with pytest.raises(InvalidRequestError):
        wrong()  # type: ignore[operator]


def test_cuts_make_up_a_table_or_are_refused() -> None:
    state = (Column("exp_avg", 2), Column("sum", 1))
    left = Shard(9, 6, columns=range(2)).schema("t", state)
    right = Shard(9, 6, columns=range(2, 6)).schema("t", (Column("exp_avg", 4), Column("sum", 1)))
    whole = whole_schema(cuts_of([right, left])["t"])
    assert [(c.name, c.width) for c in whole.columns] == [("weight", 6), ("exp_avg", 6), ("sum", 1)]
    with pytest.raises(InvalidRequestError, match="do not make it up"):
        cuts_of([left])
    with pytest.raises(InvalidRequestError, match="do not make it up"):
        cuts_of([left, Shard(9, 6, columns=range(1, 6)).schema("t", state)])


def test_a_model_declares_which_parameters_are_shards() -> None:
    model = nn.Sequential(nn.Embedding(3, 2), nn.Embedding(5, 2))
    shards = {"0.weight": Shard(9, 4, range(3, 6), range(2, 4), table="users")}
    state = ModelState(model, torch.optim.Adagrad(model.parameters()), shards=shards)
    assert [t.name for t in state.tables] == ["users[2:4]", "1.weight"]
    assert state.tables[0].schema().rows == 9
    assert state.tables[0].rows == 3
    with pytest.raises(InvalidRequestError, match="another shape"):
        ModelState(model, shards={"0.weight": Shard(9, 4, range(3, 7), range(2, 4))})
    with pytest.raises(InvalidRequestError, match="no such parameter"):
        ModelState(model, shards={"2.weight": Shard(9, 4)})
