"""Lying number types: in catalogs refused by name, in segments refused or harmless."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from holdfast.checkpoint.format.codec import parse_codec
from holdfast.checkpoint.format.segment import Segment, encode_segment
from holdfast.checkpoint.planning.codecs import CodecPlan, column_codecs
from holdfast.model.dtypes import from_float32
from holdfast.model.schema import Column, TableSchema
from holdfast.storage import open_storage
from tests.golden import make_format4
from tests.golden.make_format1 import TABLE_ROWS, make_rows
from tests.hostile.fuzz.lies import NUMBERS, Store, as_catalog, fuzz, repaired
from tests.hostile.fuzz.test_segments import CHUNK_FIELDS, FIELDS, IDS, joined, read_segment

SCHEMA = TableSchema(
    "t", TABLE_ROWS, (Column("weight", 5, "bfloat16"), Column("sum", 1, "float64"))
)


def a_segment(codec: str, ids_N: np.ndarray, *, deaths: int) -> bytes:
    rows = [
        from_float32(values, column.dtype)
        for values, column in zip(make_rows(3, len(ids_N)), SCHEMA.columns, strict=True)
    ]
    codecs = column_codecs(SCHEMA, CodecPlan(parse_codec(codec), None, "test"))
    data = joined(encode_segment(ids_N, rows, codecs).buffers)
    if not deaths:
        return data
    segment = Segment(memoryview(data), where="here")
    deaths_N = 20 + np.arange(len(ids_N)) % deaths
    return joined(segment.take(np.arange(len(ids_N)), has_filter=True, deaths_K=deaths_N).buffers)


SEGMENTS = [
    a_segment(codec, ids.astype(np.int64), deaths=deaths)
    for codec in ("fp32", "asym4", "kmeans4-block")
    for ids in IDS
    for deaths in (0, 3)
]


def test_the_corpus_is_accepted() -> None:
    for data in SEGMENTS:
        segment = Segment(memoryview(data), where="here")
        segment.check_schema(SCHEMA)
        segment.decode(0)
        assert repaired(bytearray(data)) == data


@given(
    st.sampled_from(SEGMENTS),
    st.lists(
        st.tuples(
            st.sampled_from([*FIELDS, *CHUNK_FIELDS, (84, "I")]), st.sampled_from([*NUMBERS, 4, 11])
        ),
        min_size=1,
        max_size=3,
    ),
)
@fuzz
def test_lying_headers_are_refused_or_harmless(
    good: bytes, lies: list[tuple[tuple[int, str], int]]
) -> None:
    data = bytearray(good)
    for (offset, code), value in lies:
        struct.pack_into(f"<{code}", data, offset, value % (1 << 8 * struct.calcsize(code)))
    read_segment(repaired(data), SCHEMA, SEGMENTS)


@given(st.sampled_from(SEGMENTS), st.data())
@fuzz
def test_lying_contents_are_refused_or_harmless(good: bytes, data: st.DataObject) -> None:
    changed = bytearray(good)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(48, len(good) - 1))
        changed[at] = data.draw(st.sampled_from([0, 1, 0x7C, 0x7F, 0x80, 0xFF]))
    read_segment(repaired(changed), SCHEMA, SEGMENTS)


@pytest.mark.parametrize("number", [4, 255, 2**31])
def test_a_type_that_there_is_not_is_refused_in_a_segment(number: int) -> None:
    for good in SEGMENTS:
        data = bytearray(good)
        struct.pack_into("<I", data, 60, number)
        with pytest.raises(hf.CorruptDataError, match="impossible column"):
            Segment(memoryview(repaired(data)), where="here")


@pytest.mark.parametrize("format_", [1, 2])
def test_types_in_a_format_without_them_are_refused(format_: int) -> None:
    for good in SEGMENTS:
        if good[4] == format_ + 2:
            data = bytearray(good)
            data[4] = format_
            with pytest.raises(hf.CorruptDataError, match="types of columns"):
                Segment(memoryview(repaired(data)), where="here")


@pytest.mark.parametrize(
    "column",
    [
        ["weight", 3, "float8"], ["weight", 3, "float32"], ["weight", 3, "bfloat16", 1],
        ["weight", 3, None], ["weight", 3, ["float16"]], ["weight", 3, 2], ["weight"],
    ],
)  # fmt: skip
def test_a_type_that_there_is_not_is_refused_in_a_catalog(
    tmp_path: Path, column: list[Any]
) -> None:
    make_format4.write_store(open_storage(str(tmp_path)))
    store = Store(tmp_path)
    body = store.body()
    body["schemas"][0][0][2][0] = column
    store.catalog.write_bytes(as_catalog(body))
    with pytest.raises(hf.CorruptDataError, match="catalog is damaged"):
        hf.open(tmp_path)


def test_another_type_than_the_segments_have_is_refused(tmp_path: Path) -> None:
    make_format4.write_store(open_storage(str(tmp_path)))
    store = Store(tmp_path)
    body = store.body()
    assert body["schemas"][0][0][2][0] == ["weight", 3, "float16"]
    body["schemas"][0][0][2][0][2] = "bfloat16"  # of the same size
    store.catalog.write_bytes(as_catalog(body))
    assert not hf.verify(tmp_path).is_sound
    with pytest.raises(hf.CorruptDataError, match="does not fit"):
        hf.open(tmp_path).read(make_format4.BASE_STEP, "half")
