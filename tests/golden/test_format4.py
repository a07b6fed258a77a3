"""The bytes of format 4 as released: tables of float16, bfloat16 and float64."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from holdfast.storage import open_storage
from tests.golden.make_format4 import (
    ARRAYS,
    BASE_STEP,
    CHANGED,
    COUNT,
    DELTA_STEP,
    SCHEMAS,
    patterns,
    write_store,
)
from tests.golden.test_format1 import xxh3

STORE = Path(__file__).parent / "format4"
STEPS = (BASE_STEP, DELTA_STEP)
TYPES = ("float32", "float16", "bfloat16", "float64")
EXACT = [(table, schema) for table, schema in enumerate(SCHEMAS) if schema.name != "coded"]


def test_the_store_is_there_and_sound() -> None:
    run = hf.open(STORE)
    assert run.steps == STEPS
    assert set(run.tables(DELTA_STEP)) == set(SCHEMAS)
    assert hf.verify(STORE).is_sound


@pytest.mark.parametrize("step", STEPS)
def test_every_bit_is_read(step: int) -> None:
    run = hf.open(STORE)
    for table, schema in EXACT:
        arrays = [np.zeros((COUNT, c.width), ARRAYS[c.dtype]) for c in schema.columns]
        run.restore_into(step, {schema.name: arrays})
        for column, array in enumerate(arrays):
            assert array.tobytes() == patterns(table, column, step).tobytes()


@pytest.mark.parametrize("step", STEPS)
def test_numbers_are_read_in_types_that_numpy_has(step: int) -> None:
    run = hf.open(STORE)
    for table, schema in EXACT:
        read = run.read(step, schema.name)
        for column, kind in enumerate(schema.columns):
            found = read.weight if column == 0 else read.state[kind.name]
            bits = patterns(table, column, step)
            wanted = bits.view(ARRAYS[kind.dtype])
            if kind.dtype == "bfloat16":
                wanted = (bits.astype("<u4") << np.uint32(16)).view("<f4")
            assert found.dtype == wanted.dtype
            assert np.array_equal(found, wanted, equal_nan=True)


def test_few_bits_are_read_as_before() -> None:
    read = hf.open(STORE).read(DELTA_STEP, "coded")
    exact = (patterns(3, 0, DELTA_STEP).astype("<u4") << np.uint32(16)).view("<f4")
    sums = patterns(3, 1, DELTA_STEP).view("<f8")
    usual = np.arange(COUNT) != 11
    assert np.abs(read.weight - exact)[usual].max() < 0.02
    assert np.abs(read.state["sum"] / sums - 1)[usual].max() < 0.02
    assert np.isnan(read.weight[11]).all() and np.isnan(read.state["sum"][11]).all()


def test_the_page_describes_the_catalog() -> None:
    newest = max((STORE / "catalog").iterdir())
    line, text = newest.read_bytes().splitlines()
    assert line == b"holdfast-catalog 4 " + f"{xxh3(text):016x}".encode()
    body = json.loads(text)
    assert body["format"] == 4 and body["ranks"] == []
    assert body["schemas"][0] == [
        [t.name, COUNT, [[c.name, c.width, *([] if c.dtype == "float32" else [c.dtype])]
                         for c in t.columns]]
        for t in SCHEMAS
    ]  # fmt: skip


def test_the_page_describes_the_segments() -> None:
    body = json.loads(max((STORE / "catalog").iterdir()).read_bytes().splitlines()[1])
    schemas = {schema.name: (table, schema) for table, schema in enumerate(SCHEMAS)}
    seen = set()
    for table_at, born, _, rows, first, last, place, offset, size, _ in body["segments"]:
        data = (STORE / body["objects"][place][0]).read_bytes()[offset : offset + size]
        magic, format_, _, count, found, zero = struct.unpack_from("<4sHBBII", data)
        assert (magic, zero, found) == (b"HFSG", 0, rows)
        assert format_ == (4 if born == BASE_STEP else 3)
        seen.add(format_)
        table, schema = schemas[body["tables"][table_at]]
        assert count == len(schema.columns)
        ids_bytes = struct.unpack_from("<Q", data, 32)[0]
        at = 48 + 24 * count + 8
        if format_ == 4:
            filter_bytes, _, deaths_bytes, _ = struct.unpack_from("<QQQQ", data, at - 8)
            at += 32 + filter_bytes + deaths_bytes
        at += ids_bytes + -ids_bytes % 8
        ids = CHANGED if format_ == 3 else np.arange(first, last + 1, 2)
        for index, column in enumerate(schema.columns):
            kind, bits, _, _, width, type_, length = struct.unpack_from(
                "<BBHIIIQ", data, 48 + 24 * index
            )
            assert (TYPES[type_], width) == (column.dtype, column.width)
            if schema.name != "coded":
                wide = {"float64": 64, "float32": 32}.get(column.dtype, 16)
                assert (kind, bits) == ((1, 32) if column.dtype == "float32" else (11, wide))
                wanted = patterns(table, index, born)[ids]
                assert data[at : at + length] == wanted.tobytes()
            elif 11 in ids:  # the exception at the end, as it is in memory
                wanted = patterns(table, index, born)[11]
                assert data[at + length - wanted.nbytes : at + length] == wanted.tobytes()
            at += length + -length % 8
    assert seen == {3, 4}


def test_the_writer_still_writes_it(tmp_path: Path) -> None:
    write_store(open_storage(str(tmp_path)))
    for path in STORE.glob("objects/*/*"):
        assert (tmp_path / path.relative_to(STORE)).read_bytes() == path.read_bytes()
