from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cluster import message, parts
from holdfast.cluster.arenashard import Differences
from holdfast.cluster.flush import Flush
from holdfast.cluster.message import Message
from holdfast.cluster.pushes import Entrusted, Gradients
from holdfast.cluster.shard import WORKERS_MAX
from holdfast.errors import InvalidRequestError

DIMS = (3, 1, 4)
SIZES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), max_size=4)


def travelled(sent: Message) -> Message:
    """As the other side sees it: read-only memory of one buffer."""
    return message.decode(*message.encode(sent))


def slots(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 1 << 31, count)


@settings(deadline=None)
@given(SIZES, st.integers(0, 1 << 30))
def test_requests_for_rows_come_back_as_packed(sizes: list[tuple[int, int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    wants = [(arena, slots(rng, count).astype(np.int32)) for arena, count in sizes]
    found = parts.unpack_slots(travelled(parts.pack_slots("pull", wants)))
    assert [arena for arena, _ in found] == [arena for arena, _ in wants]
    for (_, found_N), (_, wanted_N) in zip(found, wants, strict=True):
        assert found_N.dtype == np.int64
        np.testing.assert_array_equal(found_N, wanted_N)


@settings(deadline=None)
@given(SIZES, st.integers(0, 1 << 30))
def test_gradients_come_back_to_the_bit(sizes: list[tuple[int, int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    packed = [
        Gradients(
            arena,
            slots(rng, count),
            rng.integers(0, 1 << 32, (count, DIMS[arena]), dtype=np.uint32).view(np.float32),
        )
        for arena, count in sizes
    ]
    sent = parts.pack_gradients("push", {"worker": 1, "number": 2}, packed)
    assert {"worker": 1, "number": 2}.items() <= sent.meta.items()
    found = parts.unpack_gradients(travelled(sent), DIMS)
    for part, expected in zip(found, packed, strict=True):
        assert part.arena == expected.arena
        np.testing.assert_array_equal(part.slots_N, expected.slots_N)
        np.testing.assert_array_equal(
            part.grads_ND.view(np.uint32), expected.grads_ND.view(np.uint32)
        )


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=3),
    st.dictionaries(st.integers(0, WORKERS_MAX - 1), st.integers(0, 1 << 60), max_size=4),
    st.integers(0, 1 << 30),
)
def test_flushes_come_back_to_the_bit(
    sizes: list[tuple[int, int]], marks: dict[int, int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    found = tuple(
        Differences(
            arena,
            slots(rng, count).astype(np.int32),
            rng.integers(0, 256, count).astype(np.uint8),
            rng.integers(0, 1 << 32, (count, DIMS[arena]), dtype=np.uint32),
        )
        for arena, count in sizes
    )
    marks_W = np.full(WORKERS_MAX, -1, np.int64)
    marks_W[list(marks)] = list(marks.values())
    durable_W = np.maximum(marks_W - 2, -1)
    flush = Flush(9, marks_W, (0, 3), (2, 4), {2: found, 4: found[:1]}, durable_W)
    assert flush.rows == sum(count for _, count in sizes) + sizes[0][1]
    back = parts.unpack_flush(travelled(parts.pack_flush(flush, 2)), 2)
    assert (back.number, back.frozen, back.receivers) == (9, (0, 3), (2, 4))
    np.testing.assert_array_equal(back.marks_W, marks_W)
    np.testing.assert_array_equal(back.durable_W, durable_W)
    assert list(back.parts) == [2]
    for part, expected in zip(back.parts[2], found, strict=True):
        assert part.arena == expected.arena
        np.testing.assert_array_equal(part.slots_K, expected.slots_K)
        np.testing.assert_array_equal(part.positions_K, expected.positions_K)
        np.testing.assert_array_equal(part.diffs_KW, expected.diffs_KW)


def test_differences_and_gradients_travel_together_to_the_bit() -> None:
    """One is words, the other numbers; their bits are never rounded into each other."""
    rng = np.random.default_rng(0)
    words_KW = rng.integers(0, 1 << 32, (3, 7), dtype=np.uint32)
    grads_KD = rng.integers(0, 1 << 32, (5, 2), dtype=np.uint32).view(np.float32)
    found = (
        Differences(0, slots(rng, 5), np.zeros(5, np.uint8), grads_KD, "gradient"),
        Differences(0, slots(rng, 3), np.zeros(3, np.uint8), words_KW),
    )
    marks_W = np.full(WORKERS_MAX, -1, np.int64)
    flush = Flush(1, marks_W, (), (0,), {0: found}, marks_W)
    assert flush.bytes_of("gradient") == found[0].bytes == 5 * (8 + 1 + 8)
    assert flush.bytes_of("difference") == found[1].bytes == 3 * (8 + 1 + 28)
    back = parts.unpack_flush(travelled(parts.pack_flush(flush, 0)), 0).parts[0]
    assert [part.kind for part in back] == ["gradient", "difference"]
    for part, expected in zip(back, found, strict=True):
        np.testing.assert_array_equal(
            part.diffs_KW.view(np.uint32), expected.diffs_KW.view(np.uint32)
        )


@pytest.mark.parametrize("kind", ["", "record", None, 1, ["gradient"], {}])
def test_parts_of_an_unknown_kind_are_refused(kind: Any) -> None:
    meta = {"number": 1, "frozen": [], "receivers": [0], "arenas": [[0, 4, 2, kind]]}
    arrays = (np.zeros((2, 1), np.int64), ROWS, ROWS.astype(np.uint8), np.ones(8, np.uint32))
    with pytest.raises(InvalidRequestError):
        parts.unpack_flush(Message("fold", meta, arrays), 0)


# Counts that lie.

ROWS = np.arange(4)


@pytest.mark.parametrize(
    "arenas", [[], [[0, 3]], [[0, 5]], [[0, 2], [1, 3]], [[0, 5], [1, -1]], [[0, 1 << 62]]]
)
def test_counts_that_disagree_with_slots_are_refused(arenas: list[list[int]]) -> None:
    with pytest.raises(InvalidRequestError):
        parts.unpack_slots(Message("pull", {"arenas": arenas}, (ROWS,)))
    gradients = np.ones(12, np.float32)
    with pytest.raises(InvalidRequestError):
        parts.unpack_gradients(Message("push", {"arenas": arenas}, (ROWS, gradients)), DIMS)


@pytest.mark.parametrize("floats", [0, 11, 13])
def test_gradients_that_do_not_fit_their_rows_are_refused(floats: int) -> None:
    sent = Message("push", {"arenas": [[0, 4]]}, (ROWS, np.ones(floats, np.float32)))
    with pytest.raises((InvalidRequestError, ValueError)):
        parts.unpack_gradients(sent, DIMS)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, np.uint32])
def test_gradients_are_float32(dtype: Any) -> None:
    sent = Message("push", {"arenas": [[0, 4]]}, (ROWS, np.ones(12, dtype)))
    with pytest.raises(InvalidRequestError, match="gradients are float32"):
        parts.unpack_gradients(sent, DIMS)


@pytest.mark.parametrize(
    "arenas",
    [
        [],
        [[0, 3, 2, "difference"]],
        [[0, 5, 2, "difference"]],
        [[0, 4, 3, "difference"]],
        [[0, 4, 1, "difference"]],
        [[0, 4, 0, "difference"]],
        [[0, -1, 2, "difference"], [0, 5, 2, "difference"]],
        [[0, 2, 2, "difference"], [1, 3, 2, "difference"]],
        [[0, 1 << 62, 2, "difference"]],
        [[0, 4, 1 << 62, "difference"]],
    ],
)
def test_counts_that_disagree_with_differences_are_refused(arenas: list[list[int]]) -> None:
    meta = {"number": 1, "frozen": [], "receivers": [0], "arenas": arenas}
    arrays = (np.zeros((2, 1), np.int64), ROWS, ROWS.astype(np.uint8), np.ones(8, np.uint32))
    with pytest.raises(InvalidRequestError):
        parts.unpack_flush(Message("fold", meta, arrays), 0)


def test_parts_of_pushes_travel_to_the_bit() -> None:
    rng = np.random.default_rng(1)
    given = [
        Entrusted(worker, number, [
            Gradients(arena, slots(rng, count), rng.standard_normal((count, DIMS[arena]), "f4"))
            for arena, count in sizes
        ])
        for worker, number, sizes in ((3, 7, ((0, 4), (1, 2))), (3, 8, ()), (0, 0, ((1, 0),)))
    ]  # fmt: skip
    sent = travelled(parts.pack_entrusted("resolve", {"worker": 3}, given))
    back = parts.unpack_entrusted(sent, DIMS)
    staged = parts.unpack_stage(
        travelled(parts.pack_stage(3, 7, {at: each.part for at, each in enumerate(given)})), DIMS
    )
    assert sent.meta["worker"] == 3 and list(staged) == [0, 1, 2]
    for each, expected, part in zip(back, given, staged.values(), strict=True):
        assert (each.worker, each.number) == (expected.worker, expected.number)
        for found in (each.part, part):
            for some, other in zip(found, expected.part, strict=True):
                assert some.arena == other.arena
                np.testing.assert_array_equal(some.slots_N, other.slots_N)
                np.testing.assert_array_equal(some.grads_ND, other.grads_ND)


def test_arrays_of_no_request_flatten_to_nothing() -> None:
    assert parts.flatten([]).shape == (0,)
    assert parts.flatten([np.ones((2, 3))]).shape == (6,)
    assert parts.flatten([np.ones((2, 3)), np.ones(1)]).shape == (7,)
