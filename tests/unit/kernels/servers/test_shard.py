"""A shard's records and its waiting list, against plain dictionaries of bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.kernels.servers import optimizers, shard
from holdfast.kernels.servers.optimizers import ADAGRAD, ADAM, MOMENTUM, ROWWISE_ADAGRAD, SGD

HYPER = np.array([0.05, 0.9, 0.999, 1e-8, 0.0], np.float32)
KINDS = (SGD, MOMENTUM, ADAGRAD, ROWWISE_ADAGRAD, ADAM)


def noise(count: int, width: int, *, seed: int = 1) -> np.ndarray:
    """Rows of arbitrary bits: NaN payloads and denormals included."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2**32, (count, width), np.uint32).view(np.float32)


def normal(count: int, width: int, *, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint32)


class Held:
    """Records, their waiting list, and beside it what parity would have been told."""

    def __init__(self, records: np.ndarray, room: int) -> None:
        self.records = records
        self.list = shard.new_waiting(*records.shape, room)
        self.count = 0
        self.known = bits(records).copy()

    def overwrite(self, slots: np.ndarray, values: np.ndarray) -> None:
        self.count = shard.overwrite(self.records, slots, values, *self.list, self.count)

    def update(self, slots: np.ndarray, grads: np.ndarray, kind: int) -> None:
        self.count = shard.update(
            self.records, slots, grads, kind, HYPER, *self.list, self.count
        )  # fmt: skip

    def take(self, picked: np.ndarray | None = None) -> np.ndarray:
        slots, diffs, self.count = shard.take_differences(
            self.records, *self.list, self.count, picked
        )
        self.known[slots] ^= diffs
        return slots

    def check(self) -> None:
        """The list is consistent, and before is what parity knows."""
        at, slots, before = self.list
        waiting = slots[: self.count]
        assert np.array_equal(np.sort(waiting), np.flatnonzero(at >= 0))
        assert np.array_equal(at[waiting], np.arange(self.count))
        assert np.array_equal(bits(before[: self.count]), self.known[waiting])
        everything = np.arange(len(self.records))
        known = shard.as_parity_knows(self.records, everything, at, before)
        assert np.array_equal(bits(known), self.known)
        quiet = at < 0
        assert np.array_equal(bits(self.records)[quiet], self.known[quiet])


@pytest.mark.parametrize("width", [1, 3, 8, 17, 64])
@pytest.mark.parametrize("count", [0, 1, 8, 9, 300])
def test_gather_copies_the_bits_of_weights_or_of_whole_records(width: int, count: int) -> None:
    records = noise(200, width)
    slots = np.random.default_rng(2).integers(0, 200, count)
    for dim in {1, (width + 1) // 2, width}:
        out = shard.gather(records, slots, dim)
        assert np.array_equal(bits(out), bits(records)[slots, :dim].reshape(count, dim))
        into = np.zeros((count, dim), np.float32)
        shard.gather_into(records, slots, into)
        assert np.array_equal(bits(into), bits(out))


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_is_what_the_optimizer_does_and_notes_what_was_before(kind: int) -> None:
    width = 8 + optimizers.state_floats(kind, 8)
    records = np.zeros((60, width), np.float32)
    records[:, :8] = normal(60, 8)
    alone, first = records.copy(), records.copy()
    held = Held(records, 100)
    rng = np.random.default_rng(3)
    for step in range(5):
        slots = rng.permutation(60)[: rng.integers(1, 20)]
        grads = normal(slots.size, 8, seed=step)
        held.update(slots, grads, kind)
        optimizers.apply(alone, slots, grads, kind, HYPER)
        assert np.array_equal(bits(held.records), bits(alone))
        held.check()
    assert 0 < held.count < 60
    slots = held.take()
    assert np.array_equal(np.sort(slots), np.flatnonzero((alone != first).any(axis=1)))
    assert held.count == 0
    assert np.array_equal(held.known, bits(alone))


actions = st.lists(
    st.one_of(
        st.tuples(st.just("overwrite"), st.lists(st.integers(0, 29), unique=True)),
        st.tuples(st.just("take"), st.lists(st.integers(0, 59), unique=True)),
        st.tuples(st.just("take all"), st.just([])),
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(actions=actions, width=st.sampled_from([1, 5, 16]), seed=st.integers(0, 99))
def test_parity_and_waiting_differences_always_add_up_to_the_records(
    actions: list[tuple[str, list[int]]], width: int, seed: int
) -> None:
    held = Held(noise(30, width, seed=seed), 60)
    for step, (action, numbers) in enumerate(actions):
        if action == "overwrite":
            values = noise(len(numbers), width, seed=seed * 100 + step)
            held.overwrite(np.array(numbers, np.int64), values)
            assert np.array_equal(bits(held.records)[numbers], bits(values))
        else:
            picked = None
            if action == "take":
                picked = np.array(sorted(n for n in numbers if n < held.count), np.int64)
            places = np.arange(held.count) if picked is None else picked
            expected, waiting = held.list[1][places].copy(), held.count
            assert np.array_equal(held.take(picked), expected)
            assert held.count == waiting - len(places)
        held.check()
    held.take()
    assert np.array_equal(held.known, bits(held.records))


def test_many_changes_of_a_record_are_one_difference() -> None:
    held = Held(noise(10, 4), 30)
    for seed in range(2, 7):
        held.overwrite(np.array([3, 8]), noise(2, 4, seed=seed))
    assert held.count == 2
    slots, diffs, left = shard.take_differences(held.records, *held.list, held.count)
    assert (sorted(slots.tolist()), left) == ([3, 8], 0)
    assert np.array_equal(diffs, bits(noise(10, 4))[slots] ^ bits(held.records)[slots])


def test_changes_of_numbers_are_now_minus_before() -> None:
    held = Held(normal(10, 4), 20)
    before = held.records.copy()
    held.overwrite(np.array([1, 5, 7]), normal(3, 4, seed=9))
    slots, changes, left = shard.take_changes(
        held.records, *held.list, held.count, np.array([0, 2])
    )
    assert (slots.tolist(), left) == ([1, 7], 1)
    assert np.array_equal(changes, held.records[slots] - before[slots])
    slots, _, left = shard.take_changes(held.records, *held.list, left)
    assert (slots.tolist(), left) == ([5], 0)


def test_memory_of_a_message_cannot_be_written_and_is_taken_as_it_is() -> None:
    held, copied = Held(normal(10, 4), 20), Held(normal(10, 4), 20)
    slots, grads = np.array([2, 4]), normal(2, 4, seed=5)
    copied.update(slots, grads, SGD)
    sent_slots = np.frombuffer(slots.tobytes(), np.int64)
    held.update(sent_slots, np.frombuffer(grads.tobytes(), np.float32).reshape(2, 4), SGD)
    assert np.array_equal(bits(held.records), bits(copied.records))
    assert np.array_equal(shard.gather(held.records, sent_slots, 4), held.records[slots])
    assert slots.flags.writeable and grads.flags.writeable


@pytest.mark.parametrize("bad", [-1, 10, 2**40, -(2**63)])
def test_a_slot_outside_the_records_is_refused_before_anything_changes(bad: int) -> None:
    held = Held(noise(10, 4), 20)
    slots, rows = np.array([1, bad]), np.zeros((2, 4), np.float32)
    for act in (
        lambda: held.update(slots, rows, SGD),
        lambda: held.overwrite(slots, rows),
        lambda: shard.gather(held.records, slots, 4),
        lambda: shard.as_parity_knows(held.records, slots, held.list[0], held.list[2]),
    ):
        with pytest.raises(IndexError, match="outside"):
            act()
    assert np.array_equal(bits(held.records), bits(noise(10, 4)))
    held.check()


@pytest.mark.parametrize(
    ("picked", "error"),
    [([0, 0], ValueError), ([1, 0], ValueError), ([-1], ValueError), ([0, 2], IndexError)],
)
def test_positions_that_are_none_or_come_twice_are_refused(picked: list[int], error: Any) -> None:
    held = Held(noise(10, 4), 20)
    held.overwrite(np.array([3, 8]), noise(2, 4, seed=2))
    for take in (shard.take_differences, shard.take_changes):
        with pytest.raises(error):
            take(held.records, *held.list, held.count, np.array(picked))
    held.check()
    assert held.count == 2


def test_a_list_without_room_or_of_another_shape_is_refused_before_anything_changes() -> None:
    held = Held(noise(10, 4), 3)
    rows = np.zeros((2, 4), np.float32)
    held.overwrite(np.array([3, 8]), noise(2, 4, seed=2))
    kept = bits(held.records).copy()
    with pytest.raises(ValueError, match="room"):
        held.overwrite(np.array([1, 2]), rows)
    with pytest.raises(ValueError, match="room"):
        held.update(np.array([1, 2]), rows, SGD)
    for wrong in (
        shard.new_waiting(9, 4, 20),
        shard.new_waiting(10, 3, 20),
        (*shard.new_waiting(10, 4, 20)[:2], np.zeros((19, 4), np.float32)),
    ):
        with pytest.raises(ValueError, match="waiting list"):
            shard.overwrite(held.records, np.array([1, 2]), rows, *wrong, 0)
    for shape in ((3, 4), (2, 5)):
        with pytest.raises(ValueError, match="shape"):
            held.overwrite(np.array([1, 2]), np.zeros(shape, np.float32))
    with pytest.raises(ValueError, match="shape"):
        shard.gather(held.records, np.array([1]), 5)
    assert np.array_equal(bits(held.records), kept)
    held.check()


@pytest.mark.parametrize("kind", KINDS)
def test_noted_records_wait_as_updated_ones_do(kind: int) -> None:
    width = 8 + optimizers.state_floats(kind, 8)
    records = np.zeros((60, width), np.float32)
    records[:, :8] = normal(60, 8)
    held, noted = Held(records.copy(), 100), Held(records.copy(), 100)
    rng = np.random.default_rng(3)
    for step in range(5):
        slots = rng.permutation(60)[: rng.integers(1, 20)].astype(np.int32)
        grads = normal(slots.size, 8, seed=step)
        held.update(slots, grads, kind)
        noted.count = shard.note(noted.records, slots, *noted.list, noted.count)
        optimizers.apply(noted.records, slots, grads, kind, HYPER)
        noted.check()
        assert np.array_equal(bits(noted.records), bits(held.records))
        assert np.array_equal(noted.list[1][: noted.count], held.list[1][: held.count])


@pytest.mark.parametrize("picked", [None, [], [0], [0, 3, 7], [9], list(range(10))])
def test_released_records_stop_to_wait_and_the_others_stay(picked: list[int] | None) -> None:
    held = Held(noise(30, 3), 40)
    slots = np.random.default_rng(2).permutation(30)[:10]
    held.overwrite(slots, noise(10, 3, seed=5))
    chosen = None if picked is None else np.array(picked, int)
    gone = slots if picked is None else slots[chosen]
    held.count = shard.release(held.records, *held.list, held.count, chosen)
    held.known[gone] = bits(held.records)[gone]
    assert held.count == 10 - len(gone)
    held.check()


def test_a_bad_note_or_release_changes_nothing() -> None:
    held = Held(noise(30, 3), 4)
    with pytest.raises(IndexError):
        shard.note(held.records, np.array([1, 30]), *held.list, 0)
    with pytest.raises(ValueError, match="no room"):
        shard.note(held.records, np.arange(5), *held.list, 0)
    with pytest.raises(IndexError):
        shard.release(held.records, *held.list, 0, np.array([0]))
    held.check()
