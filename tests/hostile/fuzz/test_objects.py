"""Lying footers of objects: refused, or an index that lies within the object."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from holdfast.checkpoint.format.object import read_index
from tests.hostile.fuzz.lies import COUNTS, framed, fuzz


class OneObject:
    """A storage of one object."""

    url = "memory"

    def __init__(self, data: bytes) -> None:
        self._data = data

    def size(self, name: str) -> int:
        return len(self._data)

    def get(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        assert offset >= 0 and (length is None or offset + length <= len(self._data))
        return self._data[offset:] if length is None else self._data[offset : offset + length]


def index_of(data: bytes) -> dict[int, Any]:
    index = read_index(OneObject(data), "o.hf", len(data))  # type: ignore[arg-type]
    return {extent.offset: extent for extent in index.extents()}


def test_the_frame_is_accepted() -> None:
    segments = [["rows", "t", 16, 40, f"{255:016x}"], ["dense", "d", 56, 24, f"{1:016x}"]]
    footer = json.dumps({"format": 1, "segments": segments}).encode()
    assert set(index_of(framed(footer))) == {16, 56}


@pytest.mark.parametrize("field", range(5))
@pytest.mark.parametrize("value", COUNTS, ids=repr)
def test_lying_footers_are_refused_or_consistent(field: int, value: Any) -> None:
    entry: list[Any] = ["rows", "t", 16, 64, f"{255:016x}"]
    entry[field] = value
    try:
        index = index_of(framed(json.dumps({"format": 1, "segments": [entry]}).encode()))
    except hf.CorruptDataError:
        return
    (extent,) = index.values()
    assert (extent.offset, extent.bytes) == (16, 64)


@pytest.mark.parametrize(
    "footer",
    [
        b"", b"{", b"[]", b"1", b"null", b'"x"', b"{}", b'{"format":1}', b"\xff\xfe",
        b'{"format":2,"segments":[]}', b'{"format":1,"segments":7}', b'{"format":1,"segments":{}}',
        b'{"format":1,"segments":[7]}', b'{"format":1,"segments":[[]]}',
        b'{"format":1,"segments":[["rows","t",16,40,"0"],["rows","t",55,25,"0"]]}',
        b'{"format":1,"segments":[["rows","t",16,40,"0"],["rows","t",57,23,"0"]]}',
        b'{"format":1,"segments":[["rows","t",16,100,"0"],["rows","t",116,-36,"0"]]}',
        b'{"format":1,"segments":[["rows","t",16,1e999,"0"]]}',
        b'{"format":1,"segments":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"format":1,"segments":[["rows","t",' + b"9" * 5000 + b',1,"0"]]}',
    ],
    ids=lambda footer: footer[:40].decode("latin1"),
)  # fmt: skip
def test_impossible_footers_are_refused(footer: bytes) -> None:
    with pytest.raises(hf.CorruptDataError, match=r"o\.hf"):
        index_of(framed(footer))


@given(st.binary(max_size=200))
@fuzz
def test_random_bytes_are_no_object(data: bytes) -> None:
    for candidate in (data, framed(data), framed(b"")[: len(data)]):
        with pytest.raises(hf.CorruptDataError):
            index_of(candidate)
