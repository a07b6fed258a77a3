"""Deletion vectors: what goes in comes out, the future is cut off, lies are refused."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.format import deletion_vectors
from holdfast.checkpoint.format.deletion_vectors import (
    NO_DELETIONS,
    DeletionVector,
    from_bytes,
    join,
    look_up,
    make_vector,
)
from holdfast.errors import CorruptDataError

pure = settings(max_examples=200, deadline=None, derandomize=True)
Plain = dict[tuple[str, int], dict[int, int]]

PLAIN: st.SearchStrategy[Plain] = st.dictionaries(
    st.tuples(st.sampled_from(["a", "b", "é\n"]), st.integers(0, 30)),
    st.dictionaries(st.integers(0, 2**55), st.integers(31, 60), max_size=20),
    max_size=6,
)


def as_kills(plain: Plain) -> dict[tuple[str, int], DeletionVector]:
    return {
        key: make_vector(np.array(list(rows), np.int64), np.array(list(rows.values()), np.int64))
        for key, rows in plain.items()
    }


def as_plain(kills: deletion_vectors.DeletionVectors) -> Plain:
    return {
        key: dict(zip(v.ids_N.tolist(), v.deaths_N.tolist(), strict=True))
        for key, v in kills.items()
    }


def one(ids: list[int], deaths: list[int]) -> DeletionVector:
    return DeletionVector(np.array(ids, np.int64), np.array(deaths, np.int64))


@given(PLAIN, st.integers(30, 61))
@pure
def test_kills_return_from_bytes_without_deaths_after_through(plain: Plain, through: int) -> None:
    data = deletion_vectors.to_bytes(as_kills(plain))
    found = from_bytes(data, through=through, where="here")
    expected = {
        key: {row: died for row, died in rows.items() if died <= through}
        for key, rows in plain.items()
    }
    assert as_plain(found) == {key: rows for key, rows in expected.items() if rows}
    for vector in found.values():
        assert (np.diff(vector.ids_N) > 0).all()


@given(PLAIN)
@pure
def test_bytes_do_not_depend_on_the_order_of_vectors(plain: Plain) -> None:
    forth = deletion_vectors.to_bytes(as_kills(plain))
    back = deletion_vectors.to_bytes(as_kills(dict(reversed(plain.items()))))
    assert forth == back


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=40))
@pure
def test_of_a_row_killed_twice_the_first_death_counts(kills: list[tuple[int, int]]) -> None:
    first: dict[int, int] = {}
    for row, died in kills:
        first[row] = min(died, first.get(row, died))
    vector = one([row for row, _ in kills], [died for _, died in kills])
    made = make_vector(vector.ids_N, vector.deaths_N)
    assert list(zip(made.ids_N.tolist(), made.deaths_N.tolist(), strict=True)) == sorted(
        first.items()
    )
    halves = [
        make_vector(vector.ids_N[part], vector.deaths_N[part])
        for part in (slice(None, 7), slice(7, None))
    ]
    assert as_plain({("t", 0): join(halves)}) == {("t", 0): first}
    assert join([]) is NO_DELETIONS and join([made]) is made


@given(st.dictionaries(st.integers(0, 40), st.integers(1, 9)), st.sets(st.integers(0, 40)))
@pure
def test_look_up_tells_each_rows_death_or_none(rows: dict[int, int], ids: set[int]) -> None:
    vector = make_vector(np.array(list(rows), np.int64), np.array(list(rows.values()), np.int64))
    found = look_up(vector, np.array(sorted(ids), np.int64))
    assert found.tolist() == [rows.get(row, -1) for row in sorted(ids)]


def test_more_steps_than_two_bytes_can_count() -> None:
    ids_N = np.arange(70_000) * 3
    kills = {("t", 0): DeletionVector(ids_N, np.arange(1, 70_001))}
    found = from_bytes(deletion_vectors.to_bytes(kills), through=1 << 40, where="here")
    assert np.array_equal(found["t", 0].deaths_N, kills["t", 0].deaths_N)


GOOD = {("a", 3): one([1, 5, 9], [4, 6, 4]), ("b", 0): one([0, 1, 2], [6, 6, 6])}


def packed(head: Any, tail: bytes, *, magic: bytes = b"HFKILLS1") -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<8sQ", magic, len(text)) + text + tail


def unpacked(data: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(data[8:16], "little")
    return json.loads(data[16 : 16 + size]), data[16 + size :]


def refused(data: bytes) -> None:
    with pytest.raises(CorruptDataError, match=r"deletion vectors are damaged.*here"):
        from_bytes(data, through=100, where="here")


def test_every_length_but_the_right_one_is_refused() -> None:
    data = deletion_vectors.to_bytes(GOOD)
    assert as_plain(from_bytes(data, through=100, where="here")) == as_plain(GOOD)
    for length in range(len(data)):
        refused(data[:length])
    refused(data + b"\0")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("steps", 0), 7), (("steps", 0), 6), (("steps", 0), -1), (("steps", 0), 2**63),
        (("steps", 0), None), (("steps", 0), 3), (("steps",), []), (("steps",), 5),
        (("tables", 0), 5), (("tables",), []), (("tables",), {"a": 1}),
        (("vectors", 0, 0), 2), (("vectors", 0, 0), -1), (("vectors", 1, 0), 0.0),
        (("vectors", 0, 1), 4), (("vectors", 0, 1), 10**6), (("vectors", 0, 2), 0),
        (("vectors", 0, 2), 2), (("vectors", 0, 2), 4), (("vectors", 0, 2), 2**55),
        (("vectors", 0, 2), 2**62), (("vectors", 0, 2), -1), (("vectors", 0, 2), 3.0),
        (("id_bytes",), 8), (("id_bytes",), 2), (("id_bytes",), 0), (("id_bytes",), None),
        (("id_bytes",), 2**55), (("id_bytes",), 4.0),
        (("vectors", 0), []), (("vectors", 0), None), (("vectors", 0), [0] * 4),
        (("vectors",), {"x": 1}), (("vectors",), []), (("vectors",), 1e999),
    ],
    ids=repr,
)  # fmt: skip
def test_one_lie_in_the_head_is_refused(path: tuple[Any, ...], value: Any) -> None:
    head, tail = unpacked(deletion_vectors.to_bytes(GOOD))
    node: Any = head
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    refused(packed(head, tail))


def test_two_vectors_of_one_birth_are_refused() -> None:
    head, tail = unpacked(deletion_vectors.to_bytes({("a", 3): GOOD["a", 3]}))
    head["vectors"].append(list(head["vectors"][0]))
    ids, numbers = tail[:12], tail[12:]
    refused(packed(head, ids * 2 + numbers * 2))
    head["vectors"][1][1] = 2
    assert len(from_bytes(packed(head, ids * 2 + numbers * 2), through=9, where="")) == 2


@pytest.mark.parametrize("ids", [(5, 1, 9), (1, 1, 9), (1, 9, 9)])
def test_ids_that_do_not_ascend_are_refused(ids: tuple[int, ...]) -> None:
    head, tail = unpacked(deletion_vectors.to_bytes({("a", 3): GOOD["a", 3]}))
    refused(packed(head, struct.pack("<3I", *ids) + tail[12:]))


def test_ids_beyond_any_row_are_refused_or_name_none() -> None:
    far = {("a", 3): one([1, 2**33], [4, 4])}
    head, tail = unpacked(deletion_vectors.to_bytes(far))
    assert head["id_bytes"] == 8
    assert as_plain(from_bytes(packed(head, tail), through=9, where="")) == as_plain(far)
    refused(packed(head, struct.pack("<2Q", 1, 2**63) + tail[16:]))
    refused(packed(head, struct.pack("<2Q", 2**64 - 1, 1) + tail[16:]))


@pytest.mark.parametrize(
    "head", [b"", b"[]", b"null", b"7", b"{}", b"{" * 100_000, b"[" * 100_000, b"\xff", b'"x"']
)
def test_head_that_is_no_head_is_refused(head: bytes) -> None:
    refused(packed(head, b""))


def test_other_magic_and_endless_head_are_refused() -> None:
    data = deletion_vectors.to_bytes(GOOD)
    refused(b"HFKILLS2" + data[8:])
    for size in (2**64 - 1, 2**63, len(data), len(data) - 15):
        refused(data[:8] + size.to_bytes(8, "little") + data[16:])


def test_number_of_a_step_that_is_not_listed_is_refused() -> None:
    data = bytearray(deletion_vectors.to_bytes(GOOD))
    data[-1] = 1
    refused(bytes(data))


@given(st.binary(max_size=200))
@pure
def test_random_bytes_are_no_kills(data: bytes) -> None:
    refused(data)
    refused(packed(data, data))
