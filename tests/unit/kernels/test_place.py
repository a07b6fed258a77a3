"""Many segments into tables with one call: what taking each by itself gives."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.codec import parse_codec
from holdfast.checkpoint.segment import Segment, encode_segment
from holdfast.kernels import place
from tests.unit.kernels.encoded import bytes_of

WIRE = int.from_bytes(parse_codec("fp32").wire(), "little")
NOTHING = np.empty(0, np.int64)
ROWS, WIDTHS = 60, (4, 1)


def a_segment(rng: np.random.Generator, ids: list[int], *, codec: str = "fp32") -> bytes:
    columns = [rng.random((len(ids), width), dtype=np.float32) for width in WIDTHS]
    codecs = [parse_codec(codec), parse_codec("fp32")]
    return bytes_of(encode_segment(np.array(ids), columns, codecs, has_filter=True))


def tables(targets: list[np.ndarray]) -> place.Tables:
    address = [[target.ctypes.data for target in targets]]
    rows_T = np.array([ROWS])
    return place.Tables(rows_T, rows_T, np.array([0]), np.array([WIDTHS]), np.array(address))


def facts(data: bytes, at: int, *, kills: tuple[int, int] = (0, 0)) -> list[int]:
    header = Segment(memoryview(data), where="here").header
    return [at, len(data), header.rows, header.first, header.last, 0, 1 << 62, *kills]


@given(
    parts=st.lists(st.sets(st.integers(0, ROWS - 1), min_size=1), min_size=1, max_size=5),
    killed=st.dictionaries(st.integers(0, ROWS - 1), st.integers(1, 9)),
    seed=st.integers(0, 99),
)
def test_rows_are_where_one_by_one_would_put_them(
    parts: list[set[int]], killed: dict[int, int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    data = [a_segment(rng, sorted(ids)) for ids in parts]
    starts = np.cumsum([0, *map(len, data)])
    kills_K = np.array(sorted(killed), np.int64)
    deaths_K = np.array([killed[row] for row in sorted(killed)], np.int64)
    facts_SF = np.array(
        [
            facts(part, int(at), kills=(0, len(kills_K)))
            for part, at in zip(data, starts, strict=False)
        ]
    )
    targets = [np.zeros((ROWS, width), np.float32) for width in WIDTHS]
    buffer_B = np.frombuffer(b"".join(data), np.uint8)
    masked, is_odd_S = place.place(
        buffer_B, facts_SF, tables(targets), WIRE, kills_K, deaths_K, 5, is_masked=True
    )
    assert not is_odd_S.any()
    expected = [np.zeros((ROWS, width), np.float32) for width in WIDTHS]
    dead = {row for row, died in killed.items() if died <= 5}
    for part in data:
        segment = Segment(memoryview(part), where="here")
        ids_N = segment.ids()
        ids_N[np.isin(ids_N, list(dead))] = -1
        for column, table_MD in enumerate(expected):
            segment.decode_into(column, table_MD, ids_N)
    assert all(np.array_equal(*pair) for pair in zip(targets, expected, strict=True))
    assert masked == sum(len(ids & dead) for ids in parts)


@pytest.mark.parametrize("spoilt", ["codec", "rows", "first", "last", "table"])
def test_odd_segment_is_left_alone_between_good_ones(spoilt: str) -> None:
    rng = np.random.default_rng(1)
    middle = a_segment(rng, [5, 6, 9], codec="asym8" if spoilt == "codec" else "fp32")
    data = [a_segment(rng, [1, 2]), middle, a_segment(rng, [20, 59])]
    starts = np.cumsum([0, *map(len, data)])
    facts_SF = np.array([facts(part, int(at)) for part, at in zip(data, starts, strict=False)])
    column = {"rows": place.ROWS, "first": place.FIRST, "last": place.LAST}.get(spoilt)
    if column is not None:
        facts_SF[1, column] += 1
    targets = [np.zeros((ROWS, width), np.float32) for width in WIDTHS]
    into = tables(targets)
    if spoilt == "table":  # it has fewer rows than the segment's last id
        into = dataclasses.replace(into, rows_T=np.array([9]), held_T=np.array([9]))
    buffer_B = np.frombuffer(b"".join(data), np.uint8)
    _, is_odd_S = place.place(buffer_B, facts_SF, into, WIRE, NOTHING, NOTHING, 5, is_masked=False)
    assert is_odd_S.tolist() == [False, True, spoilt == "table"]
    written = np.flatnonzero(targets[0].any(axis=1)).tolist()
    assert written == ([1, 2] if spoilt == "table" else [1, 2, 20, 59])


def test_column_that_is_not_wanted_is_not_written() -> None:
    rng = np.random.default_rng(1)
    data = a_segment(rng, [1, 2])
    targets = [np.zeros((ROWS, width), np.float32) for width in WIDTHS]
    into = tables(targets)
    into.address_TC[0, 1] = 0
    _, is_odd_S = place.place(
        np.frombuffer(data, np.uint8), np.array([facts(data, 0)]), into, WIRE, NOTHING, NOTHING, 5,
        is_masked=True,
    )  # fmt: skip
    assert not is_odd_S.any()
    assert targets[0].any() and not targets[1].any()


def test_rows_that_are_not_held_are_left_out() -> None:
    rng = np.random.default_rng(1)
    data = a_segment(rng, [3, 10, 11, 29, 30, 59])
    targets = [np.zeros((20, width), np.float32) for width in WIDTHS]
    into = dataclasses.replace(tables(targets), held_T=np.array([20]), first_T=np.array([10]))
    buffer_B, facts_SF = np.frombuffer(data, np.uint8), np.array([facts(data, 0)])
    place.place(buffer_B, facts_SF, into, WIRE, NOTHING, NOTHING, 5, is_masked=False)
    assert np.flatnonzero(targets[0].any(axis=1)).tolist() == [0, 1, 19]
    segment = Segment(memoryview(data), where="here")
    assert np.array_equal(targets[0][[0, 1, 19]], segment.decode(0)[1:4])
    words_W = np.zeros(1, np.uint64)
    place.mark(buffer_B, facts_SF, np.array([words_W.ctypes.data]), into)
    assert words_W[0] == (1 << 0) | (1 << 1) | (1 << 19)
