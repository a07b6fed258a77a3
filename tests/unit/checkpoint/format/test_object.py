"""Objects: an index that agrees with the bytes, names that say what they were written for."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.checkpoint.format.checksum import checksum
from holdfast.checkpoint.format.object import (
    DENSE,
    HEAD,
    ROWS,
    ObjectBuilder,
    number_of,
    object_name,
    read_index,
)
from holdfast.errors import CorruptDataError, NotFoundError
from holdfast.storage import Storage, open_storage

NAME = object_name(7, ROWS, "aa")


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


def write(storage: Storage, *parts: bytes) -> tuple[int, list[object]]:
    builder = ObjectBuilder(NAME, storage.create(NAME))
    extents = [builder.append("rows", "t", (p[:3], p[3:]), checksum(p)) for p in parts]
    return builder.close(), list(extents)


def test_index_lists_what_was_appended(storage: Storage) -> None:
    size, extents = write(storage, b"first part", b"x", b"the last")
    assert storage.size(NAME) == size
    index = read_index(storage, NAME, size)
    assert index.extents() == extents
    assert all(index.has(extent) for extent in extents)
    for extent in index.extents():
        data = storage.get(NAME, offset=extent.offset, length=extent.bytes)
        assert checksum(data) == extent.checksum
    assert [extent.offset for extent in index.extents()] == [16, 26, 27]


def test_object_without_segments_has_an_empty_index(storage: Storage) -> None:
    size, _ = write(storage)
    assert read_index(storage, NAME, size).extents() == []


def test_object_does_not_exist_before_close(storage: Storage) -> None:
    out = storage.create(NAME)
    ObjectBuilder(NAME, out).append("rows", "t", (b"abc",), checksum(b"abc"))
    assert storage.list("objects/") == []
    out.abort()
    with pytest.raises(NotFoundError):
        read_index(storage, NAME, 100)


def test_frame_is_checked_byte_by_byte(storage: Storage, tmp_path: Path) -> None:
    size, extents = write(storage, b"0123456789")
    good = (tmp_path / NAME).read_bytes()
    for at in [*range(len(HEAD)), *range(26, size)]:
        bad = bytearray(good)
        bad[at] ^= 16
        (tmp_path / NAME).write_bytes(bad)
        with pytest.raises(CorruptDataError, match="rows-aa"):
            read_index(storage, NAME, size)
    (tmp_path / NAME).write_bytes(good)
    assert read_index(storage, NAME, size).extents() == extents
    for wrong in (0, 39, size - 1, size + 1):
        with pytest.raises(CorruptDataError, match="rows-aa"):
            read_index(storage, NAME, wrong)


def test_names_tell_their_catalog_number_and_foreign_names_none() -> None:
    assert number_of(object_name(123456789, DENSE, "ff")) == 123456789
    for name in ("objects/x1/r0.hf", "objects/c1", "other/c1/r0.hf", "objects/cx/r0.hf", "a/b/c/d"):
        assert number_of(name) is None
