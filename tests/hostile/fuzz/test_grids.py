"""Lying grids: deaths and deletion vectors that no extraction wrote do no harm, and are found."""

from __future__ import annotations

import atexit
import json
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.checkpoint.format import deletion_vectors
from holdfast.checkpoint.format.checksum import as_hex, checksum
from holdfast.checkpoint.format.segment import CHUNK, header_bytes
from holdfast.checkpoint.store import catalogs
from holdfast.storage import open_storage
from tests.golden.make_format2 import TABLES, write_grid_store
from tests.hostile.fuzz.lies import (
    Store,
    as_catalog,
    framed,
    look_at,
    repaired,
    restore_guarded,
    use,
)

GRID_LIES: dict[str, Callable[[list[Any]], None]] = {
    "worked off far ahead": lambda grid: grid.__setitem__(2, 2**55),
    "worked off before its base": lambda grid: grid.__setitem__(2, 0),
    "ends before it begins": lambda grid: grid.__setitem__(1, 1),
    "ends where it is worked off": lambda grid: grid.__setitem__(1, grid[2]),
    "never ends": lambda grid: grid.__setitem__(1, None),
    "of another base": lambda grid: grid.__setitem__(0, 7),
    "without its vectors": lambda grid: grid.__setitem__(3, None),
    "vectors outside": lambda grid: grid[3].__setitem__(1, 2**40),
    "vectors of another length": lambda grid: grid[3].__setitem__(2, 8),
    "vectors in a segment's place": lambda grid: grid[3].__setitem__(0, 0),
    "vectors of no object": lambda grid: grid[3].__setitem__(0, 10**6),
}


@pytest.mark.parametrize("what", GRID_LIES)
def test_known_lies_about_grids_are_refused_or_harmless(grid: Store, what: str) -> None:
    body = grid.body()
    assert body["grids"][0][3] is not None
    GRID_LIES[what](body["grids"][0])
    use(grid, body)


def test_a_grid_told_twice_is_refused(grid: Store) -> None:
    body = grid.body()
    body["grids"].append(list(body["grids"][-1]))
    with pytest.raises(hf.CorruptDataError, match="ascending"):
        catalogs.from_bytes(as_catalog(body))


@pytest.mark.parametrize("value", [0, 3, 4, 8, 9, 10, 2**55])
def test_deaths_that_are_void_or_not_do_not_write_outside_a_table(grid: Store, value: int) -> None:
    body = grid.body()
    for segment in body["segments"]:
        segment[10:] = [value]
    use(grid, body)


def with_kills(store: Store, data: bytes) -> None:
    """The store with other deletion vectors, every checksum around them right."""
    body = store.body()
    place, offset, _, _ = body["grids"][0][3]
    name = body["objects"][place][0]
    index = [["kills", "kills", offset, len(data), as_hex(checksum(data))]]
    footer = json.dumps({"format": 1, "segments": index}).encode()
    whole = framed(footer, data)
    (store.path / name).write_bytes(whole)
    body["objects"][place][1] = len(whole)
    body["grids"][0][3] = [place, offset, len(data), as_hex(checksum(data))]
    store.catalog.write_bytes(as_catalog(body))


EDGES = (0, 1, 2, 38, 39, 40, 41, 2**31, 2**32 - 1, 2**32, 2**40, 2**55)
LYING_KILLS = st.dictionaries(
    st.tuples(st.sampled_from(["exact", "coded", "nobody"]), st.integers(0, 16)),
    st.dictionaries(st.sampled_from(EDGES), st.integers(17, 20), min_size=1, max_size=8),
    max_size=8,
)


@given(LYING_KILLS, st.integers(-16, 0))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_lying_deletion_vectors_write_nothing_outside_a_table(
    kills: dict[tuple[str, int], dict[int, int]], shift: int
) -> None:
    vectors = {
        (table, born): deletion_vectors.make_vector(
            np.array(list(rows), np.int64), np.array(list(rows.values()), np.int64) + shift
        )
        for (table, born), rows in kills.items()
    }
    store = SHARED.store()
    with_kills(store, deletion_vectors.to_bytes(vectors))
    look_at(store)


@given(st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_damaged_deletion_vectors_are_refused_or_harmless(data: st.DataObject) -> None:
    store = SHARED.store()
    changed = bytearray(SHARED.kills)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at] = data.draw(st.sampled_from([*b"0919[]{},-", 0, 1, 0x7F, 0x80, 0xFF]))
    cut = data.draw(st.sampled_from([0, 0, 0, 1, 8]))
    with_kills(store, bytes(changed[cut:]))
    run = hf.open(store.path)
    for step in run.steps:
        for schema in run.tables(step):
            restore_guarded(run, step, schema)


class Shared:
    """One grid for many examples; each replaces the same object and the catalog."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self.kills = b""

    def store(self) -> Store:
        if self._store is None:
            path = Path(tempfile.mkdtemp())
            atexit.register(shutil.rmtree, path, ignore_errors=True)
            write_grid_store(open_storage(str(path)), TABLES[:2])
            self._store = Store(path)
            extent = hf.open(path).catalog.grids[0].deletion_vectors
            assert extent is not None
            data = (path / extent.object).read_bytes()
            self.kills = data[extent.offset : extent.offset + extent.bytes]
        return self._store


SHARED = Shared()


@pytest.mark.parametrize("data", [b"", b"nonsense", bytes(100)])
def test_verify_finds_vectors_that_cannot_be_read(grid: Store, data: bytes) -> None:
    with_kills(grid, data)
    report = hf.verify(open_storage(str(grid.path)))
    assert {step for damage in report.damages for step in damage.steps} >= {7, 9, 10, 12}


def test_verify_finds_deaths_that_cannot_be_read(grid: Store) -> None:
    entry, segment = next(
        (s, segment)
        for s in hf.open(grid.path).catalog.segments
        for segment in [grid.segment(s.extent)]
        if segment.header.deaths.bytes
    )
    path = grid.path / entry.extent.object
    whole = bytearray(path.read_bytes())
    at, size = entry.extent.offset, entry.extent.bytes
    part = whole[at : at + size]
    deaths = segment.header.deaths
    part[deaths.offset + deaths.bytes - 1] = 99  # a number of a step that is not listed
    own = checksum(memoryview(part)[deaths.offset : deaths.offset + deaths.bytes])
    struct.pack_into("<Q", part, header_bytes(2, format_=CHUNK) - 16, own)
    whole[at : at + size] = repaired(part)
    old, new = (as_hex(sum_).encode() for sum_ in (entry.extent.checksum, checksum(
        memoryview(whole)[at : at + size]
    )))  # fmt: skip
    footer_bytes = int.from_bytes(whole[-24:-16], "little")
    footer = bytes(whole[-24 - footer_bytes : -24]).replace(old, new)
    path.write_bytes(framed(footer, bytes(whole[16 : -24 - footer_bytes])))
    body = json.loads(grid.good.split(b"\n")[1].replace(old, new))
    grid.catalog.write_bytes(as_catalog(body))
    readers = [step for step in hf.open(grid.path).steps if entry.is_alive(step)]
    report = hf.verify(open_storage(str(grid.path)))
    assert {step for damage in report.damages for step in damage.steps} >= set(readers)
    look_at(grid)


def test_the_shared_grid_is_accepted() -> None:
    store = SHARED.store()
    with_kills(store, SHARED.kills)
    report = hf.verify(open_storage(str(store.path)))
    assert report.is_sound, report.damages
    look_at(store)
