"""Some rows of a section: taken as bytes, they decode to the bits they had; others are skipped."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.format.codec import (
    CODEC_NAMES,
    Codec,
    decode,
    decode_into,
    encode,
    parse_codec,
    take,
)
from holdfast.errors import CorruptDataError

SEED = 20240612
CODECS = tuple(
    dataclasses.replace(codec, block_rows=3 if codec.block_rows else 0)
    for codec in map(parse_codec, CODEC_NAMES)
)
each_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def some_rows(count: int, width: int, seed: int = SEED) -> np.ndarray:
    """Positive rows, some of which every lossy codec must keep raw, NaN payloads among them."""
    rng = np.random.default_rng(seed)
    rows = np.abs(rng.standard_t(5, (count, width)) * np.exp(rng.normal(-3, 0.7, (count, 1))))
    rows = rows.astype(np.float32)
    for i in np.flatnonzero(rng.random(count) < 0.2):
        rows.view(np.uint32)[i, rng.integers(width)] = rng.choice(
            np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFA12345, 0x7F812345], np.uint32)
        )
    return rows


def bits(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).view(np.uint32)


def assert_taken(codec: Codec, rows: np.ndarray, positions: np.ndarray) -> None:
    count, width = rows.shape
    section = encode(codec, rows)
    before = section.copy()
    expected = decode(codec.wire(), section, rows=count, width=width)[positions]
    wire, taken = take(codec.wire(), section, positions, rows=count, width=width)
    found = decode(wire, taken, rows=len(positions), width=width)
    np.testing.assert_array_equal(bits(found), bits(expected))
    np.testing.assert_array_equal(section, before)


@each_codec
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_taken_rows_decode_to_the_bits_they_had(codec: Codec, data: st.DataObject) -> None:
    count, width = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 12))
    rows = some_rows(count, width, data.draw(st.integers(0, 99)))
    positions = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    if codec.block_rows:
        codec = dataclasses.replace(codec, block_rows=data.draw(st.integers(1, 9)))
    assert_taken(codec, rows, np.array(sorted(positions)))


@each_codec
def test_first_last_all_and_every_other_row_can_be_taken(codec: Codec) -> None:
    rows = some_rows(50, 7)
    for positions in ([0], [49], [0, 49], range(50), range(0, 50, 2), range(1, 50, 2)):
        assert_taken(codec, rows, np.array(positions))


@each_codec
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_taking_twice_gives_the_bytes_of_taking_once(codec: Codec, data: st.DataObject) -> None:
    rows = some_rows(30, 5, data.draw(st.integers(0, 99)))
    section = encode(codec, rows)
    first = np.array(sorted(data.draw(st.sets(st.integers(0, 29), min_size=1))))
    second = np.array(sorted(data.draw(st.sets(st.integers(0, len(first) - 1), min_size=1))))
    middle_wire, middle = take(codec.wire(), section, first, rows=30, width=5)
    wire, found = take(middle_wire, middle, second, rows=len(first), width=5)
    once_wire, once = take(codec.wire(), section, first[second], rows=30, width=5)
    assert wire == once_wire
    np.testing.assert_array_equal(found, once)
    expected = decode(codec.wire(), section, rows=30, width=5)[first[second]]
    np.testing.assert_array_equal(
        bits(decode(wire, found, rows=len(second), width=5)), bits(expected)
    )


@each_codec
def test_a_section_without_shared_books_keeps_its_codec_and_is_what_encode_writes(
    codec: Codec,
) -> None:
    rows = some_rows(40, 9)
    positions = np.arange(3, 40, 4)
    wire, taken = take(codec.wire(), encode(codec, rows), positions, rows=40, width=9)
    if codec.block_rows:
        assert Codec.from_wire(wire).kind == "kmeans-cluster"
        assert Codec.from_wire(wire).bits == codec.bits
    else:
        assert wire == codec.wire()
        np.testing.assert_array_equal(taken, encode(codec, rows[positions]))


@pytest.mark.parametrize("kind", ["kmeans-block", "kmeans-cluster"])
@pytest.mark.parametrize("count", [1, 2, 5, 10, 17, 60])
def test_only_the_books_in_use_are_taken_along(kind: str, count: int) -> None:
    codec = Codec(kind, 4, block_rows=5, iterations=3)
    rows = np.abs(some_rows(300, 6))
    rows[~np.isfinite(rows)] = 1
    section = encode(codec, rows)
    positions = np.sort(np.random.default_rng(SEED).permutation(300)[:count])
    wire, taken = take(codec.wire(), section, positions, rows=300, width=6)
    if kind == "kmeans-block":
        used = np.unique(positions // 5).size
    else:
        block_at = 60 * 16 * 2
        used = np.unique(section[block_at : block_at + 600].view(np.uint16)[positions]).size
    books = -(-count // Codec.from_wire(wire).block_rows)
    assert used <= books <= max(1, 2 * used - 1)
    assert taken.nbytes == -(-(books * 32 + count * (2 + 3)) // 4) * 4 + 4
    assert taken[: books * 32].view(np.uint16).reshape(books, 16)[:used].any(axis=1).all()
    assert not taken[used * 32 : books * 32].any()


def test_more_books_than_two_bytes_can_number_keep_their_rows_apart() -> None:
    codec = Codec("kmeans-block", 2, block_rows=1, iterations=1)
    rows = np.random.default_rng(SEED).standard_normal((70_000, 2)).astype(np.float32)
    assert_taken(codec, rows, np.arange(1, 70_000))
    assert_taken(codec, rows, np.arange(69_000, 70_000, 3))


@each_codec
def test_rows_are_taken_from_any_address_and_from_read_only_positions(codec: Codec) -> None:
    section = encode(codec, some_rows(21, 5))
    positions = np.array([0, 4, 5, 20])
    expected = take(codec.wire(), section, positions, rows=21, width=5)
    positions.flags.writeable = False
    for shift in (0, 1, 2, 3):
        buffer = memoryview(b"x" * shift + section.tobytes())[shift:]
        wire, found = take(codec.wire(), buffer, positions, rows=21, width=5)
        assert wire == expected[0]
        np.testing.assert_array_equal(found, expected[1])


@each_codec
def test_nothing_is_taken_from_a_section_cut_or_grown(codec: Codec) -> None:
    section = encode(codec, some_rows(9, 5)).tobytes()
    for damaged in (*(section[:size] for size in range(len(section))), section + b"\0"):
        with pytest.raises(CorruptDataError):
            take(codec.wire(), damaged, np.array([2]), rows=9, width=5)


@each_codec
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_sections_raise_as_in_decode_or_their_rows_keep_what_they_say(
    codec: Codec, data: st.DataObject
) -> None:
    section = bytearray(encode(codec, some_rows(9, 5)).tobytes())
    for _ in range(data.draw(st.integers(1, 8))):
        section[data.draw(st.integers(0, len(section) - 1))] = data.draw(st.integers(0, 255))
    positions = np.array(sorted(data.draw(st.sets(st.integers(0, 8), min_size=1))))
    try:
        expected = decode(codec.wire(), section, rows=9, width=5)[positions]
    except CorruptDataError:
        with pytest.raises(CorruptDataError):
            take(codec.wire(), section, positions, rows=9, width=5)
        return
    wire, taken = take(codec.wire(), section, positions, rows=9, width=5)
    found = decode(wire, taken, rows=len(positions), width=5)
    np.testing.assert_array_equal(bits(found), bits(expected))


@each_codec
@settings(max_examples=60, deadline=None)
@given(section=st.binary(max_size=300), rows=st.integers(-1, 40), width=st.integers(-1, 20))
def test_garbage_raises_or_can_be_taken_from(
    codec: Codec, section: bytes, rows: int, width: int
) -> None:
    with contextlib.suppress(CorruptDataError):
        # No rows, no position: a sound section of none is nothing to take from.
        if rows != 0:
            wire, taken = take(codec.wire(), section, np.array([0]), rows=rows, width=width)
            assert decode(wire, taken, rows=1, width=width).shape == (1, width)


@pytest.mark.parametrize("positions", [[], [3, 3], [4, 1], [-1, 2], [0, 9], [[1]]])
def test_bad_positions_are_the_callers_bug(positions: list[int]) -> None:
    codec = parse_codec("asym4")
    section = encode(codec, some_rows(9, 5))
    with pytest.raises(AssertionError):
        take(codec.wire(), section, np.array(positions, np.int64), rows=9, width=5)


@each_codec
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_an_id_of_minus_one_skips_its_row_and_only_that(codec: Codec, data: st.DataObject) -> None:
    rows = some_rows(30, 5, data.draw(st.integers(0, 99)))
    is_kept = np.array(data.draw(st.lists(st.booleans(), min_size=30, max_size=30)))
    ids = np.where(is_kept, np.random.default_rng(SEED).permutation(60)[:30], -1)
    section = encode(codec, rows)
    table = np.full((60, 5), 42.0, np.float32)
    decode_into(codec.wire(), section, table, ids, rows=30, width=5)
    expected = np.full((60, 5), 42.0, np.float32)
    expected[ids[is_kept]] = decode(codec.wire(), section, rows=30, width=5)[is_kept]
    np.testing.assert_array_equal(bits(table), bits(expected))


@each_codec
def test_a_table_stays_as_it_was_when_every_row_is_skipped(codec: Codec) -> None:
    # More rows than a tile of any kernel, and no row in the table: nothing could be written.
    section = encode(codec, some_rows(600, 8))
    table = np.full((1, 8), 42.0, np.float32)
    decode_into(codec.wire(), section, table, np.full(600, -1), rows=600, width=8)
    assert (table == 42).all()
