"""Lying segments: refused with our errors, or read without touching anything outside a table."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from holdfast.checkpoint.format import deletion_vectors
from holdfast.checkpoint.format.catalog import SegmentEntry
from holdfast.checkpoint.format.checksum import as_hex, checksum
from holdfast.checkpoint.format.codec import parse_codec
from holdfast.checkpoint.format.deletion_vectors import DeletionVector
from holdfast.checkpoint.format.object import Extent
from holdfast.checkpoint.format.segment import Segment, encode_segment, header_bytes
from holdfast.checkpoint.restoring.destination import whole
from holdfast.checkpoint.restoring.fetch import Read
from holdfast.checkpoint.restoring.restore import restore_rows
from holdfast.checkpoint.restoring.row_check import RowCheck
from holdfast.checkpoint.restoring.scatter import Scatter
from holdfast.model.dtypes import array_dtype
from holdfast.model.schema import Column, TableSchema
from holdfast.storage import open_storage
from tests.golden.make_format1 import BASE_STEP, TABLE_ROWS, StoredTable, make_rows, write_store
from tests.hostile.fuzz.lies import NUMBERS, Store, as_catalog, format_of, framed, fuzz, repaired


def good_segment(codec: str, ids_N: np.ndarray) -> bytes:
    weight, state = make_rows(3, len(ids_N))
    encoded = encode_segment(ids_N, [weight, state], [parse_codec(codec), parse_codec("log8")])
    return joined(encoded.buffers)


def joined(buffers: Sequence[Any]) -> bytes:
    return b"".join(memoryview(b).cast("B") for b in buffers)


def good_chunk(codec: str, ids_N: np.ndarray, deaths: int) -> bytes:
    """A segment of a grid: with a filter, and with deaths at so many different steps."""
    state = "fp32" if codec == "fp32" else "log8"
    weight = make_rows(3, len(ids_N))
    whole = encode_segment(ids_N, weight, [parse_codec(codec), parse_codec(state)])
    segment = Segment(memoryview(joined(whole.buffers)), where="here")
    deaths_N = 20 + np.arange(len(ids_N)) % deaths if deaths else None
    taken = segment.take(np.arange(len(ids_N)), has_filter=True, deaths_K=deaths_N)
    return joined(taken.buffers)


IDS = (np.arange(8, 20), np.array([0, 5, 6, 31]), np.flatnonzero(np.arange(40) % 3))
CODECS = ("fp32", "fp16", "sym3", "asym4", "adaptive2", "log4", "kmeans2", "kmeans4-block")
CODECS += ("kmeans3-cluster", "bf16", "asym8")
SEGMENTS = [good_segment(codec, ids.astype(np.int64)) for codec in CODECS for ids in IDS]
SEGMENTS += [
    good_chunk(codec, ids.astype(np.int64), deaths)
    for codec in ("fp32", "asym4", "kmeans4-block")
    for ids in IDS
    for deaths in (0, 1, 3)
]
SCHEMA = TableSchema("t", TABLE_ROWS, (Column("weight", 5), Column("sum", 1)))
# offset and struct code of every number of a header with two columns
FIELDS = [(4, "H"), (6, "B"), (7, "B"), (8, "I"), (12, "I"), (16, "Q"), (24, "Q"), (32, "Q")]
FIELDS += [(48, "B"), (49, "B"), (50, "H"), (52, "I"), (56, "I"), (60, "I"), (64, "Q")]
FIELDS += [(72, "B"), (73, "B"), (80, "I"), (88, "Q")]
CHUNK_FIELDS = [(96, "Q"), (112, "Q")]  # bytes of filter and deaths, where the format is 2


def read_segment(
    data: bytes, schema: TableSchema = SCHEMA, good: Sequence[bytes] = SEGMENTS
) -> None:
    """Read all of a segment into a guarded table: refused, or nothing outside is touched."""
    guarded = [np.full((TABLE_ROWS + 2, c.width), 7, array_dtype(c.dtype)) for c in schema.columns]
    with contextlib.suppress(hf.HoldfastError):
        segment = Segment(memoryview(data), where="here")
        segment.check_schema(schema)
        ids_N = segment.ids()
        assert ids_N.min() >= 0 and ids_N.max() < TABLE_ROWS
        for index, whole in enumerate(guarded):
            segment.decode_into(index, whole[1:-1], ids_N)
            assert segment.decode(index).shape == (len(ids_N), schema.columns[index].width)
        deaths_N = segment.deaths()
        assert deaths_N is None or (len(deaths_N) == len(ids_N) and deaths_N.min() >= 0)
        for column in range(2):
            segment.decode_some(column, np.arange(0, len(ids_N), 2))
        again = segment.take(np.arange(0, len(ids_N), 2), has_filter=True, deaths_K=None)
        Segment(memoryview(joined(again.buffers)), where="again").decode(0)
    for masks in (DELETION_VECTORS, {}):
        scatter(data, [whole[1:-1] for whole in guarded], masks, schema, good)
    for whole in guarded:
        assert (whole[[0, -1]] == 7).all()


# Rows that the table does not have, and that the segment does not.
DELETION_VECTORS = {
    ("t", 5): DeletionVector(np.array([0, 6, 7, 31, 10**9]), np.array([9, 30, 21, 21, 22]))
}


def scatter(
    data: bytes,
    targets: list[np.ndarray],
    kills: deletion_vectors.DeletionVectors,
    schema: TableSchema,
    good: Sequence[bytes],
) -> None:
    """The way a restore goes: rows of chunks that are alive at a step, into a table.

    The lying segment is taken alone, and between two good ones.
    """
    stored = deletion_vectors.from_bytes(deletion_vectors.to_bytes(kills), through=99, where="here")
    schemas = {"t": schema}
    destinations = whole({"t": targets}, schemas)
    table = Scatter(destinations, schemas, stored, 21)
    for parts in ([data], [good[0], data, good[-1]]):
        places, at = [], 0
        for part in parts:
            rows, _, first, last = struct.unpack_from("<IIQQ", part.ljust(32, b"\0"), 8)
            extent = Extent("o.hf", at, len(part), checksum(part))
            first, last = min(first, 1 << 55), min(last, 1 << 55)  # as a catalog can have them
            places.append((SegmentEntry("t", 5, None, rows, first, last, extent), at))
            at += len(part)
        with contextlib.suppress(hf.HoldfastError):
            check = RowCheck(destinations, [entry for entry, _ in places], ["t"])
            table.put(Read(memoryview(b"".join(parts)), tuple(places)), check, is_masked=True)


def test_the_corpus_is_accepted() -> None:
    for data in SEGMENTS:
        segment = Segment(memoryview(data), where="here")
        segment.check_schema(SCHEMA)
        segment.decode(0)
        assert repaired(bytearray(data)) == data


@given(
    st.sampled_from(SEGMENTS),
    st.lists(
        st.tuples(st.sampled_from(FIELDS + CHUNK_FIELDS), st.sampled_from(NUMBERS)),
        min_size=1,
        max_size=3,
    ),
)
@fuzz
def test_lying_segment_headers_are_refused_or_harmless(
    good: bytes, lies: list[tuple[tuple[int, str], int]]
) -> None:
    data = bytearray(good)
    for (offset, code), value in lies:
        struct.pack_into(f"<{code}", data, offset, value % (1 << 8 * struct.calcsize(code)))
    read_segment(repaired(data))


@pytest.mark.parametrize("shift", [1, 20, 21, 28, 2**20, 2**55, 2**56 - 32, 2**61, 2**63])
def test_segments_moved_past_the_table_are_refused(shift: int) -> None:
    for good in SEGMENTS:
        data = bytearray(good)
        first, last = struct.unpack_from("<QQ", data, 16)
        struct.pack_into("<QQ", data, 16, first + shift, last + shift)
        read_segment(repaired(data))
        if last + shift >= TABLE_ROWS:
            with pytest.raises(hf.CorruptDataError, match="here"):
                Segment(memoryview(repaired(data)), where="here").check_schema(SCHEMA)


@given(st.sampled_from(SEGMENTS), st.data())
@fuzz
def test_lying_segment_contents_are_refused_or_harmless(good: bytes, data: st.DataObject) -> None:
    changed = bytearray(good)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(header_bytes(2, format_=format_of(good)), len(good) - 1))
        changed[at] = data.draw(st.sampled_from([0, 1, 0x7C, 0x7F, 0x80, 0xFF]))
    read_segment(repaired(changed))


@given(st.binary(max_size=400))
@fuzz
def test_random_bytes_are_no_segment(data: bytes) -> None:
    read_segment(data)
    for format_ in (b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x04\x00"):
        read_segment(repaired(bytearray(b"HFSG" + format_ + data)))


@pytest.mark.parametrize("size", [1, 8, 40, 47, 48, 60])
def test_segments_too_short_for_a_header_are_refused(tmp_path: Path, size: int) -> None:
    """A whole table of one row, of which a catalog and an object say that it is so short."""
    tables = [StoredTable("t", parse_codec("fp32"), parse_codec("fp32"))]
    write_store(open_storage(str(tmp_path)), tables)
    store = Store(tmp_path)
    body = store.body()
    body["schemas"] = [[["t", 1, [["weight", 1]]]]]
    data = bytes(size)
    name = body["objects"][0][0]
    dense = b"not looked at"
    index = [
        ["rows", "t", 16, size, as_hex(checksum(data))],
        ["dense", "", 16 + size, len(dense), as_hex(checksum(dense))],
    ]
    whole = framed(json.dumps({"format": 1, "segments": index}).encode(), data + dense)
    (tmp_path / name).write_bytes(whole)
    body["objects"][0][1] = len(whole)
    body["segments"] = [[0, BASE_STEP, None, 1, 0, 0, 0, 16, size, as_hex(checksum(data))]]
    body["checkpoints"] = body["checkpoints"][:1]
    body["checkpoints"][0][-4:] = [0, *index[1][2:]]
    store.catalog.write_bytes(as_catalog(body))
    run = hf.open(tmp_path)
    target = np.zeros((1, 1), np.float32)
    with pytest.raises(hf.CorruptDataError, match=name):
        restore_rows(run.storage, run.catalog, BASE_STEP, {"t": [target]}, threads=1)
