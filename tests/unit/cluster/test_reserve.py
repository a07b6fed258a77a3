"""Memory that spares hold: enough for any server, all zeros, given out once."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cluster import reserve
from holdfast.cluster.reserve import Reserve, reserve_for
from holdfast.cluster.shard import Shard
from holdfast.cluster.spec import ClusterSpec, Optimizer, TableSpec
from holdfast.model.placement import Placement


def make_spec(rows: int, servers: int, code: str = "xor") -> ClusterSpec:
    placement = Placement(servers, data=2, parity=1) if code == "xor" else Placement(servers)
    return ClusterSpec(
        (
            TableSpec("wide", rows, 5, placement, code, Optimizer("adagrad"), bound=0.1),
            TableSpec("narrow", 3 * rows, 1, placement, code, Optimizer("sgd"), bound=0.1),
        )
    )


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=12), st.integers(0, 2000))
def test_pieces_are_zeros_of_the_wanted_shape_that_do_not_overlap(
    shapes: list[tuple[int, int]], size: int
) -> None:
    memory = Reserve(size)
    pieces = [memory.zeros(*shape) for shape in shapes]
    for number, (piece, shape) in enumerate(zip(pieces, shapes, strict=True)):
        assert piece.shape == shape and piece.dtype == np.float32
        assert not piece.any()
        piece[:] = number + 1
    for number, piece in enumerate(pieces):
        assert (piece == number + 1).all()


@pytest.mark.parametrize("code", ["xor", "none"])
@pytest.mark.parametrize("rows", [1, 7, 100])
def test_any_server_s_rows_and_parities_and_what_waits_have_room(rows: int, code: str) -> None:
    spec = make_spec(rows, 4, code)
    for server in range(spec.servers):
        memory = reserve_for(spec)
        held = memory._bytes_N
        shard = Shard(spec, server, epoch=1, memory=memory)
        for arena in shard.arenas:
            for rows_MW in (arena.records_MW, arena.parities_QW, arena._before_CW):
                assert rows_MW.size == 0 or np.shares_memory(rows_MW, held)


def test_nothing_is_reserved_where_memory_is_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(100, 4)
    size = reserve_for(spec).left
    monkeypatch.setattr(reserve, "free_bytes", lambda: 2 * size)
    assert reserve_for(spec).left == size
    monkeypatch.setattr(reserve, "free_bytes", lambda: 2 * size - 1)
    assert reserve_for(spec).left == 0


def test_what_was_taken_is_touched_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve, "_PIECE", 4096)
    memory = Reserve(1 << 22)
    toucher = threading.Thread(target=memory.touch)
    toucher.start()
    taken = memory.zeros(1 << 14, 64)
    taken[:] = 1
    toucher.join()
    assert (taken == 1).all()
