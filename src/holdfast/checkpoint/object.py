"""An object: one immutable file of many segments, with a footer that indexes them.

    head | segment | segment | ... | footer (JSON) | tail

A checkpoint has two, its rows and its dense state, since they die at different times; a round of
extraction writes bundles of chunks, and one object of deletion vectors. Segments lie back to back,
so that with head, footer and tail every byte of an object is covered by a checksum or has one legal
value. ``docs/format.md`` is normative.

Invariants:
- An object is never changed after it is closed, and its name is never used again.
- The footer's list covers the bytes between head and footer without a gap or an overlap.

Not here: what a segment holds (segment.py), which objects exist (catalog.py).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint import stored_json
from holdfast.checkpoint.checksum import as_hex, checksum
from holdfast.errors import CorruptDataError
from holdfast.storage.base import ObjectWriter, Storage

FORMAT = 1
HEAD = struct.pack("<8sII", b"HOLDFAST", FORMAT, 0)
_TAIL = struct.Struct("<QQ8s")  # footer bytes, footer checksum, magic
_TAIL_MAGIC = b"TSAFDLOH"
ROWS, DENSE, KILLS = "rows", "dense", "kills"


@dataclass(frozen=True, slots=True)
class Extent:
    """A segment's place: which object, where in it, how long, and its checksum."""

    object: str
    offset: int
    bytes: int
    checksum: int

    def describe(self) -> str:
        """For messages.

        >>> Extent("c000001/r0-ab.hf", 16, 8, 0).describe()
        'c000001/r0-ab.hf[16:24]'
        """
        return f"{self.object}[{self.offset}:{self.offset + self.bytes}]"


def object_name(number: int, kind: str, token: str) -> str:
    """The name of an object for catalog ``number``; the token keeps it from being used again.

    >>> object_name(12, ROWS, "5f0c11aa")
    'objects/c00000012/rows-5f0c11aa.hf'
    """
    return f"objects/c{number:08d}/{kind}-{token}.hf"


def number_of(name: str) -> int | None:
    """The catalog number an object was written for; None for a foreign name.

    >>> number_of("objects/c00000012/rows-5f0c11aa.hf")
    12
    """
    parts = name.split("/")
    if len(parts) != 3 or parts[0] != "objects" or not parts[1].startswith("c"):
        return None
    digits = parts[1][1:]
    return int(digits) if digits.isdecimal() else None


class ObjectBuilder:
    """Writes an object front to back; it exists when ``close`` returns, or never."""

    def __init__(self, name: str, out: ObjectWriter) -> None:
        self.name = name
        self._out = out
        self._offset = 0
        self._index: list[list[object]] = []
        self.is_closed = False
        self._write(HEAD)

    def _write(self, data: Any) -> None:
        self._out.write(data)
        self._offset += memoryview(data).nbytes

    def append(self, kind: str, label: str, buffers: Iterable[Any], sum_: int) -> Extent:
        """Add a segment of which the checksum is known; ``label`` is its table, or what it is."""
        start = self._offset
        for buffer in buffers:
            self._write(buffer)
        self._index.append([kind, label, start, self._offset - start, as_hex(sum_)])
        return Extent(self.name, start, self._offset - start, sum_)

    def close(self) -> int:
        """Write footer and tail and make the object durable; its length in bytes."""
        footer = json.dumps(
            {"format": FORMAT, "segments": self._index}, separators=(",", ":")
        ).encode()
        self._write(footer)
        self._write(_TAIL.pack(len(footer), checksum(footer), _TAIL_MAGIC))
        self._out.close()
        self.is_closed = True
        return self._offset


def read_index(storage: Storage, name: str, total_bytes: int) -> dict[int, Extent]:
    """An object's own index, offset -> extent, after checking head, footer and tail.

    Raises:
        CorruptDataError: names the object and what is wrong.
    """

    def damaged(why: str, **facts: object) -> CorruptDataError:
        return CorruptDataError(
            f"object is damaged: {why}",
            object=name,
            **facts,
            todo="run 'holdfast verify', and restore an older step",
        )

    if total_bytes < len(HEAD) + _TAIL.size:
        raise damaged("too short", bytes=total_bytes)
    found_bytes = storage.size(name)
    if found_bytes != total_bytes:
        raise damaged("wrong length", expected=total_bytes, found=found_bytes)
    if storage.get(name, length=len(HEAD)) != HEAD:
        raise damaged("wrong head")
    tail = storage.get(name, offset=total_bytes - _TAIL.size, length=_TAIL.size)
    footer_bytes, footer_sum, magic = _TAIL.unpack(tail)
    footer_at = total_bytes - _TAIL.size - footer_bytes
    if magic != _TAIL_MAGIC or footer_at < len(HEAD):
        raise damaged("wrong tail")
    footer = storage.get(name, offset=footer_at, length=footer_bytes)
    if checksum(footer) != footer_sum:
        raise damaged("checksum mismatch in footer")
    try:
        parsed = stored_json.parse(footer)
        if stored_json.count(parsed["format"]) != FORMAT:
            raise damaged("unknown format", format=parsed["format"], known=FORMAT)
        extents = []
        for kind, label, offset, length, sum_ in parsed["segments"]:
            if kind not in (ROWS, DENSE, KILLS):
                raise ValueError(f"unknown kind of segment {kind!r:.40}")
            stored_json.text(label)
            place = stored_json.count(offset), stored_json.count(length)
            extents.append(Extent(name, *place, stored_json.checksum(sum_)))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged("footer is not an index") from error
    end = len(HEAD)
    for extent in extents:
        if extent.offset != end or extent.bytes < 0:
            raise damaged("segments overlap or leave a gap", offset=extent.offset, expected=end)
        end += extent.bytes
    if end != footer_at:
        raise damaged("segments overlap or leave a gap", offset=end, expected=footer_at)
    return {extent.offset: extent for extent in extents}
