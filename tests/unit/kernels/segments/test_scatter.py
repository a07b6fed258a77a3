"""Many segments into tables with one call: what taking each by itself gives."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.codec import fit_codec, parse_codec
from holdfast.checkpoint.format.segment import DTYPE_NUMBERS, Segment, encode_segment
from holdfast.kernels.segments import scatter
from holdfast.model.dtypes import array_dtype, as_bits, name_of
from holdfast.model.schema import DTYPE_BYTES, FLOAT32
from tests.unit.kernels.codecs.encoded import bytes_of

NOTHING = np.empty(0, np.int64)
ROWS, WIDTHS = 60, (4, 1)
EXACT = parse_codec("fp32")
SINGLE = (FLOAT32, FLOAT32)


def room(dtypes: tuple[str, str], rows: int = ROWS) -> list[np.ndarray]:
    return [np.zeros((rows, w), array_dtype(d)) for w, d in zip(WIDTHS, dtypes, strict=True)]


def a_segment(
    rng: np.random.Generator,
    ids: list[int],
    *,
    codec: str = "fp32",
    dtypes: tuple[str, str] = SINGLE,
) -> bytes:
    columns = room(dtypes, len(ids))
    for rows_ND in columns:  # any bits, NaN and infinity among them
        bits_ND = as_bits(rows_ND)
        bits_ND[:] = rng.integers(0, np.iinfo(bits_ND.dtype).max, bits_ND.shape, bits_ND.dtype)
    codecs = [fit_codec(parse_codec(codec), dtypes[0]), fit_codec(EXACT, dtypes[1])]
    return bytes_of(encode_segment(np.array(ids), columns, codecs, has_filter=True))


def tables(targets: list[np.ndarray]) -> scatter.Tables:
    dtypes = [name_of(target) or "" for target in targets]
    wires = [int.from_bytes(fit_codec(EXACT, d).wire(), "little") for d in dtypes]
    return scatter.Tables(
        rows_T=np.array([ROWS]),
        held_T=np.array([ROWS]),
        first_T=np.array([0]),
        widths_TC=np.array([WIDTHS]),
        types_TC=np.array([[DTYPE_NUMBERS[d] for d in dtypes]]),
        wires_TC=np.array([wires]),
        address_TC=np.array([[target.ctypes.data for target in targets]]),
    )


def facts(data: bytes, at: int, *, deleted: tuple[int, int] = (0, 0)) -> list[int]:
    header = Segment(memoryview(data), where="here").header
    return [at, len(data), header.rows, header.first, header.last, 0, 1 << 62, *deleted, 1]


@given(
    parts=st.lists(st.sets(st.integers(0, ROWS - 1), min_size=1), min_size=1, max_size=5),
    deleted=st.dictionaries(st.integers(0, ROWS - 1), st.integers(1, 9)),
    seed=st.integers(0, 99),
    dtypes=st.tuples(*[st.sampled_from(sorted(DTYPE_BYTES))] * 2),
)
def test_rows_are_where_one_by_one_would_put_them(
    parts: list[set[int]], deleted: dict[int, int], seed: int, dtypes: tuple[str, str]
) -> None:
    rng = np.random.default_rng(seed)
    data = [a_segment(rng, sorted(ids), dtypes=dtypes) for ids in parts]
    starts = np.cumsum([0, *map(len, data)])
    dead_K = np.array(sorted(deleted), np.int64)
    deaths_K = np.array([deleted[row] for row in sorted(deleted)], np.int64)
    facts_SF = np.array(
        [
            facts(part, int(at), deleted=(0, len(dead_K)))
            for part, at in zip(data, starts, strict=False)
        ]
    )
    targets = room(dtypes)
    buffer_B = np.frombuffer(b"".join(data), np.uint8)
    placed = scatter.place(buffer_B, facts_SF, tables(targets), dead_K, deaths_K, 5, is_masked=True)
    assert not placed.is_odd_S.any()
    expected = room(dtypes)
    dead = {row for row, died in deleted.items() if died <= 5}
    for part in data:
        segment = Segment(memoryview(part), where="here")
        ids_N = segment.ids()
        ids_N[np.isin(ids_N, list(dead))] = -1
        for column, table_MD in enumerate(expected):
            segment.decode_into(column, table_MD, ids_N)
    assert [t.tobytes() for t in targets] == [e.tobytes() for e in expected]
    assert placed.masked == sum(len(ids & dead) for ids in parts)


@pytest.mark.parametrize("spoilt", ["codec", "rows", "first", "last", "table"])
def test_odd_segment_is_left_alone_between_good_ones(spoilt: str) -> None:
    rng = np.random.default_rng(1)
    middle = a_segment(rng, [5, 6, 9], codec="asym8" if spoilt == "codec" else "fp32")
    data = [a_segment(rng, [1, 2]), middle, a_segment(rng, [20, 59])]
    starts = np.cumsum([0, *map(len, data)])
    facts_SF = np.array([facts(part, int(at)) for part, at in zip(data, starts, strict=False)])
    column = {"rows": scatter.ROWS, "first": scatter.FIRST, "last": scatter.LAST}.get(spoilt)
    if column is not None:
        facts_SF[1, column] += 1
    targets = room(SINGLE)
    into = tables(targets)
    if spoilt == "table":  # it has fewer rows than the segment's last id
        into = dataclasses.replace(into, rows_T=np.array([9]), held_T=np.array([9]))
    buffer_B = np.frombuffer(b"".join(data), np.uint8)
    placed = scatter.place(buffer_B, facts_SF, into, NOTHING, NOTHING, 5, is_masked=False)
    assert placed.is_odd_S.tolist() == [False, True, spoilt == "table"]
    written = np.flatnonzero(targets[0].any(axis=1)).tolist()
    assert written == ([1, 2] if spoilt == "table" else [1, 2, 20, 59])


def test_births_of_rows_and_rows_left_out_are_noted() -> None:
    rng = np.random.default_rng(1)
    data = [a_segment(rng, [3, 10, 11]), a_segment(rng, [11, 29, 59])]
    starts = np.cumsum([0, *map(len, data)])
    facts_SF = np.array(
        [facts(part, int(at), deleted=(0, 2)) for part, at in zip(data, starts, strict=False)]
    )
    targets = room(SINGLE, 20)
    into = dataclasses.replace(tables(targets), held_T=np.array([20]), first_T=np.array([10]))
    facts_SF[1, scatter.BIRTH] = 2
    births_M = np.zeros(20, np.int32)
    dead_K, deaths_K = np.array([10, 29]), np.array([5, 6])  # at step 5 the second still lives
    placed = scatter.place(
        np.frombuffer(b"".join(data), np.uint8), facts_SF, into, dead_K, deaths_K, 5,
        is_masked=True, births_T=np.array([births_M.ctypes.data]),
    )  # fmt: skip
    assert (placed.placed_S.tolist(), placed.dead_S.tolist()) == ([1, 2], [1, 0])
    assert placed.dead_K.tolist() == [0]
    assert {row: births_M[row] for row in np.flatnonzero(births_M)} == {1: 2, 19: 2}


def test_column_that_is_not_wanted_is_not_written() -> None:
    rng = np.random.default_rng(1)
    data = a_segment(rng, [1, 2])
    targets = room(SINGLE)
    into = tables(targets)
    into.address_TC[0, 1] = 0
    placed = scatter.place(
        np.frombuffer(data, np.uint8), np.array([facts(data, 0)]), into, NOTHING, NOTHING, 5,
        is_masked=True,
    )  # fmt: skip
    assert not placed.is_odd_S.any()
    assert targets[0].any() and not targets[1].any()


def test_rows_that_are_not_held_are_left_out() -> None:
    rng = np.random.default_rng(1)
    data = a_segment(rng, [3, 10, 11, 29, 30, 59])
    targets = room(SINGLE, 20)
    into = dataclasses.replace(tables(targets), held_T=np.array([20]), first_T=np.array([10]))
    buffer_B, facts_SF = np.frombuffer(data, np.uint8), np.array([facts(data, 0)])
    scatter.place(buffer_B, facts_SF, into, NOTHING, NOTHING, 5, is_masked=False)
    assert np.flatnonzero(targets[0].any(axis=1)).tolist() == [0, 1, 19]
    segment = Segment(memoryview(data), where="here")
    assert targets[0][[0, 1, 19]].tobytes() == segment.decode(0)[1:4].tobytes()
    words_W = np.zeros(1, np.uint64)
    scatter.mark(buffer_B, facts_SF, np.array([words_W.ctypes.data]), into)
    assert words_W[0] == (1 << 0) | (1 << 1) | (1 << 19)


@pytest.mark.parametrize("offset", [2, 4, 6])
def test_targets_at_any_address_that_holds_their_numbers_are_filled(offset: int) -> None:
    dtypes = ("bfloat16", "float16")
    data = a_segment(np.random.default_rng(1), [1, 2, 30], dtypes=dtypes)
    targets = []
    for even in room(dtypes):
        bytes_B = np.zeros(even.nbytes + 8, np.uint8)
        targets.append(bytes_B[offset : offset + even.nbytes].view(even.dtype).reshape(even.shape))
    scatter.place(
        np.frombuffer(data, np.uint8), np.array([facts(data, 0)]), tables(targets), NOTHING,
        NOTHING, 5, is_masked=False,
    )  # fmt: skip
    segment = Segment(memoryview(data), where="here")
    for column, target in enumerate(targets):
        assert target[[1, 2, 30]].tobytes() == segment.decode(column).tobytes()


def test_segment_of_another_type_than_its_table_is_left_to_the_caller() -> None:
    data = a_segment(np.random.default_rng(1), [1, 2], dtypes=("float16", "float32"))
    targets = room(("bfloat16", "float32"))
    placed = scatter.place(
        np.frombuffer(data, np.uint8), np.array([facts(data, 0)]), tables(targets), NOTHING,
        NOTHING, 5, is_masked=False,
    )  # fmt: skip
    assert placed.is_odd_S.all()
    assert not targets[0].any()
