from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from holdfast.cluster.message import (
    DIMENSIONS_MAX,
    Array,
    Message,
    as_error,
    decode,
    encode,
    error_message,
)
from holdfast.errors import (
    CorruptDataError,
    DataLossError,
    HoldfastError,
    InvalidRequestError,
    UnavailableError,
)

DTYPES = ("<i1", "<i2", "<i4", "<i8", "<u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8")
META = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False,
    allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
ARRAYS = st.lists(
    hnp.arrays(st.sampled_from(DTYPES), hnp.array_shapes(min_dims=0, max_side=5, min_side=0)),
    max_size=4,
)


@given(kind=st.text(), meta=st.dictionaries(st.text(), META, max_size=4), arrays=ARRAYS)
@settings(max_examples=200, deadline=None)
def test_a_message_comes_back_as_it_was(
    kind: str, meta: dict[str, object], arrays: list[Array]
) -> None:
    found = decode(*encode(Message(kind, meta, tuple(arrays))))
    assert (found.kind, found.meta) == (kind, meta)
    assert len(found.arrays) == len(arrays)
    for got, sent in zip(found.arrays, arrays, strict=True):
        assert (got.dtype, got.shape, got.tobytes()) == (sent.dtype, sent.shape, sent.tobytes())
        assert not got.flags.writeable


def test_a_single_array_is_never_copied() -> None:
    rows_ND = np.ones((100, 16), np.float32)
    header, payload = encode(Message("rows", {}, (rows_ND,)))
    assert np.shares_memory(payload, rows_ND)
    assert np.shares_memory(decode(header, payload).arrays[0], rows_ND)


def test_several_arrays_are_views_of_one_payload() -> None:
    header, payload = encode(Message("push", {}, (np.arange(5), np.ones(3, np.float32))))
    for array in decode(header, payload).arrays:
        assert np.shares_memory(array, payload)


def test_arrays_that_lie_unaligned_come_out_aligned() -> None:
    header, payload = encode(Message("rows", {}, (np.arange(9),)))
    moved = np.zeros(payload.nbytes + 1, np.uint8)
    moved[1:] = payload
    (found,) = decode(header, moved[1:]).arrays
    assert found.flags.aligned
    assert not found.flags.writeable
    assert found.tolist() == list(range(9))


def test_strided_arrays_travel_as_their_values() -> None:
    strided = np.arange(24).reshape(4, 6)[::2, ::3]
    (found,) = decode(*encode(Message("x", {}, (strided,)))).arrays
    assert found.tolist() == strided.tolist()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(3, ">i4"),
        np.zeros(3, bool),
        np.zeros(3, object),
        np.zeros(3, "U4"),
        np.zeros(3, complex),
        np.zeros(3, [("a", "i4")]),
        np.zeros((1,) * (DIMENSIONS_MAX + 1)),
    ],
    ids=lambda array: str(array.dtype),
)
def test_other_arrays_are_refused(array: Array) -> None:
    with pytest.raises(InvalidRequestError):
        encode(Message("x", {}, (array,)))


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, b"x", object(), np.int64(3)])
def test_meta_that_is_no_json_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="JSON"):
        encode(Message("x", {"value": value}))


LIES = {
    "empty": b"",
    "no json": b"\xff\xfe",
    "no list": b"{}",
    "too short": b'["a", {}]',
    "kind is no text": b'[1, {}, [["<u1", [8]]]]',
    "meta is a list": b'["a", [], [["<u1", [8]]]]',
    "arrays are an object": b'["a", {}, {}]',
    "an object's type": b'["a", {}, [["|O", [1]]]]',
    "another byte order": b'["a", {}, [[">i8", [1]]]]',
    "a type that is a list": b'["a", {}, [[["<i8"], [1]]]]',
    "negative": b'["a", {}, [["<i8", [-1]]]]',
    "two negatives": b'["a", {}, [["<u1", [-2, -4]]]]',
    "a fraction": b'["a", {}, [["<i8", [1.0]]]]',
    "a truth": b'["a", {}, [["<i8", [true]]]]',
    "larger than what came": b'["a", {}, [["<i8", [2]]]]',
    "smaller than what came": b'["a", {}, [["<u1", [7]]]]',
    "huge": b'["a", {}, [["<f8", [72057594037927935, 72057594037927935]]]]',
    "nothing times huge": b'["a", {}, [["|u1", [8]], ["<f8", [0, 72057594037927935, 99999999]]]]',
    "too many dimensions": b'["a", {}, [["|u1", [8, 1, 1, 1, 1, 1, 1, 1, 1]]]]',
    "a key twice": b'["a", {"x": 1, "x": 2}, [["|u1", [8]]]]',
    "not a number": b'["a", {"x": NaN}, [["|u1", [8]]]]',
    "deep": b"[" * 100_000,
    "many digits": b'["a", {"x": ' + b"9" * 10_000 + b'}, [["|u1", [8]]]]',
}


@pytest.mark.parametrize("header", LIES.values(), ids=LIES.keys())
def test_headers_that_lie_are_found_out(header: bytes) -> None:
    with pytest.raises(CorruptDataError):
        decode(header, np.zeros(8, np.uint8))


@given(cut=st.integers(0, 200), at=st.integers(0, 200), bit=st.integers(0, 7))
@settings(max_examples=300, deadline=None)
def test_damaged_headers_raise_corrupt_data_and_nothing_else(cut: int, at: int, bit: int) -> None:
    header, payload = encode(Message("push", {"n": 1}, (np.arange(4), np.ones(3, np.float32))))
    damaged = bytearray(header)
    damaged[at % len(damaged)] ^= 1 << bit
    with contextlib.suppress(CorruptDataError):
        decode(bytes(damaged[: max(1, len(damaged) - cut // 20)]), payload)


@pytest.mark.parametrize(
    "error",
    [
        DataLossError("rows are gone", table="users", rows=[1, 2], todo="stop"),
        UnavailableError("no room", bytes=np.int64(7)),
        HoldfastError("plain"),
        InvalidRequestError("with a todo alone", todo="fix it"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_comes_back_as_it_was(error: HoldfastError) -> None:
    found = as_error(decode(*encode(error_message(error))))
    assert type(found) is type(error)
    assert found.facts == error.facts
    assert found.todo == error.todo
    assert str(found) == str(error).replace("np.int64(7)", "7")


def test_facts_that_are_no_json_travel_as_text() -> None:
    found = as_error(decode(*encode(error_message(HoldfastError("x", at={1: 2}, nan=np.nan)))))
    assert found.facts == {"at": "{1: 2}", "nan": "nan"}


def test_an_error_that_is_not_ours_is_named() -> None:
    found = as_error(decode(*encode(error_message(ZeroDivisionError("division by zero")))))
    assert type(found) is HoldfastError
    assert found.facts == {"error": "ZeroDivisionError", "said": "division by zero"}


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"class": "SystemExit", "message": "", "facts": {}, "todo": ""},
        {"class": [], "message": "", "facts": {}, "todo": ""},
        {"class": "HoldfastError", "message": "", "facts": {"message": 1}, "todo": ""},
        {"class": "HoldfastError", "message": "", "facts": [], "todo": ""},
        {"class": "HoldfastError", "message": 3, "facts": {}, "todo": ""},
    ],
    ids=json.dumps,
)
def test_errors_made_to_deceive_are_corrupt_data(meta: dict[str, object]) -> None:
    assert isinstance(as_error(Message("error", meta)), CorruptDataError)
