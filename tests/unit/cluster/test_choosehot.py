from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cluster.choosehot import choose_hot
from holdfast.cluster.pushes import Gradients
from holdfast.cluster.shard import Shard
from holdfast.cluster.spec import ClusterSpec, Optimizer, TableSpec
from holdfast.errors import InvalidRequestError
from holdfast.model.placement import Placement

SERVERS = 3
COUNTS = st.lists(st.integers(0, 50), min_size=1, max_size=30)


@given(COUNTS, st.integers(0, 30), st.floats(1, 100), st.integers(1, 64), st.integers(0, 128))
def test_only_rows_that_save_are_chosen_and_those_that_save_most(
    counts: list[int], budget: int, pushes_per_flush: float, dim: int, state: int
) -> None:
    def cost(row: int) -> tuple[float, float]:
        share = counts[row] / 50
        changed = (1 - (1 - share) ** pushes_per_flush) / pushes_per_flush
        return changed * (4 * (dim + state) + 5), share * (4 * dim + 5)

    choice = choose_hot(
        np.array(counts), pushes=50, budget_rows=budget, width=dim + state, dim=dim,
        pushes_per_flush=pushes_per_flush,
    )  # fmt: skip
    ids = choice.ids_H.tolist()
    assert ids == sorted(set(ids)) and len(ids) <= budget
    saved = [coded - hot for coded, hot in map(cost, range(len(counts)))]
    assert all(saved[row] > 0 for row in ids)
    left = [saved[row] for row in range(len(counts)) if row not in ids]
    if len(ids) < budget:
        assert max(left, default=0) <= 1e-9
    elif ids and left:
        assert min(saved[row] for row in ids) >= max(left) - 1e-9
    assert choice.coded_bytes == pytest.approx(sum(cost(row)[0] for row in range(len(counts))))
    assert choice.coded_bytes - choice.hot_bytes == pytest.approx(sum(saved[r] for r in ids))


def test_without_optimizer_state_nothing_pays_but_what_no_flush_adds_up() -> None:
    counts = np.array([90, 50, 10, 0])
    for pushes_per_flush in (1, 4):
        choice = choose_hot(counts, pushes=100, budget_rows=4, width=8, dim=8,
                            pushes_per_flush=pushes_per_flush)  # fmt: skip
        assert choice.ids_H.size == 0 and choice.saved == 0
        assert choice.reason.startswith("0 of 3 touched rows pay")


@pytest.mark.parametrize(
    "changes",
    [
        {"pushes": 0},
        {"pushes": 9},
        {"budget_rows": -1},
        {"width": 3},
        {"dim": 0},
        {"pushes_per_flush": 0.5},
        {"pushes_per_flush": float("inf")},
        {"pushes_per_flush": float("nan")},
        {"counts_R": np.array([-1])},
        {"counts_R": np.array([0.5])},
        {"counts_R": np.zeros((2, 2), int)},
    ],
)
def test_numbers_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    chosen: dict[str, Any] = {"counts_R": np.array([10]), "pushes": 20, "budget_rows": 1,
                              "width": 8, "dim": 4, "pushes_per_flush": 2}  # fmt: skip
    with pytest.raises(InvalidRequestError):
        choose_hot(**{**chosen, **changes})


def measure(spec: ClusterSpec, touched: list[np.ndarray], pushes_per_flush: int) -> float:
    """Bytes a push that shards really told parity."""
    shards = [Shard(spec, server, epoch=1) for server in range(SERVERS)]
    for shard in shards:
        shard.begin()
    hot = spec.hot_tables.get("users")
    for number, ids_N in enumerate(touched):
        pieces = [("users", ids_N)]
        if hot is not None:
            is_hot_N, ranks_N = hot.find(ids_N)
            pieces = [("users", ids_N[~is_hot_N]), (hot.table.name, ranks_N)]
        for shard in shards:
            parts = []
            for name, found_N in pieces:
                index, start = spec.places[name]
                placement = spec.arenas[index].placement
                own_N = start + found_N[placement.servers_of(start + found_N) == shard.server]
                grads_ND = np.ones((len(own_N), 8), np.float32)
                parts.append(Gradients(index, placement.slots_of(own_N), grads_ND))
            shard.push(0, number, parts)
            if (number + 1) % pushes_per_flush == 0:
                assert shard.begin_flush() is not None
                shard.end_flush()
    counts = [shard.counts for shard in shards]
    return sum(c["difference_bytes"] + c["gradient_bytes"] for c in counts) / len(touched)


@pytest.mark.parametrize("pushes_per_flush", [1, 4])
def test_what_is_promised_is_what_shards_tell_parity(pushes_per_flush: int) -> None:
    rng = np.random.default_rng(1)
    shares_R = np.minimum(1, 1.5 / np.arange(1, 61))
    touched = [np.flatnonzero(rng.random(60) < shares_R) for _ in range(400)]
    counts_R = np.bincount(np.concatenate(touched), minlength=60)
    placed = Placement(SERVERS, data=2, parity=1)
    table = TableSpec("users", 60, 8, placed, "xor", Optimizer("adam"))
    choice = choose_hot(counts_R, pushes=400, budget_rows=20, width=table.width, dim=8,
                        pushes_per_flush=pushes_per_flush)  # fmt: skip
    assert len(choice.ids_H) == 20
    coded = measure(ClusterSpec((table,)), touched, pushes_per_flush)
    hot = measure(ClusterSpec((table,), hot={"users": choice.ids_H}), touched, pushes_per_flush)
    assert hot < coded
    assert coded == pytest.approx(choice.coded_bytes, rel=0.03)
    assert hot == pytest.approx(choice.hot_bytes, rel=0.03)
