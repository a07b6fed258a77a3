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

from holdfast.checkpoint.format import stored_json
from holdfast.checkpoint.format.checksum import as_hex, checksum
from holdfast.errors import CorruptDataError
from holdfast.storage.base import ObjectWriter, Storage

FORMAT = 1
HEAD = struct.pack("<8sII", b"HOLDFAST", FORMAT, 0)
_TAIL = struct.Struct("<QQ8s")  # footer bytes, footer checksum, magic
_TAIL_MAGIC = b"TSAFDLOH"
FRAME_BYTES = len(HEAD) + _TAIL.size  # around the segments and the footer
_END_BYTES = 16 << 10
_SMALL_BYTES = 64 << 10
_WAITING_BYTES_MAX = 256 << 10
ROWS, DENSE, DELETION_VECTORS = "rows", "dense", "kills"


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
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self.is_closed = False
        self._write(HEAD)

    def _write(self, data: Any) -> None:
        """Pass bytes on; small pieces together, since each write is a system call."""
        size = memoryview(data).nbytes
        self._offset += size
        if size <= _SMALL_BYTES:
            self._waiting.append(bytes(data))
            self._waiting_bytes += size
            if self._waiting_bytes >= _WAITING_BYTES_MAX:
                self._flush()
        else:
            self._flush()
            self._out.write(data)

    def _flush(self) -> None:
        if self._waiting:
            self._out.write(b"".join(self._waiting))
            self._waiting.clear()
            self._waiting_bytes = 0

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
        self._flush()
        self._out.close()
        self.is_closed = True
        return self._offset


@dataclass(frozen=True, slots=True)
class Index:
    """What an object says of itself: (bytes, checksum in hex) of its segments by offset."""

    object: str
    segments: dict[int, tuple[int, str]]

    def has(self, extent: Extent) -> bool:
        """Whether there is exactly this segment."""
        return self.segments.get(extent.offset) == (extent.bytes, as_hex(extent.checksum))

    def extents(self) -> list[Extent]:
        """All segments, in order.

        Raises:
            CorruptDataError: a checksum is none.
        """
        try:
            return [
                Extent(self.object, offset, size, stored_json.checksum(sum_))
                for offset, (size, sum_) in self.segments.items()
            ]
        except ValueError as error:
            raise CorruptDataError("footer is not an index", object=self.object) from error


def _damaged(name: str, why: str, **facts: object) -> CorruptDataError:
    return CorruptDataError(
        f"object is damaged: {why}",
        object=name,
        **facts,
        todo="run 'holdfast verify', and restore an older step",
    )


def read_footer(storage: Storage, name: str, total_bytes: int) -> bytes:
    """An object's footer, after checking head, tail and the footer's checksum.

    With the segments' own checksums that covers every byte; what the footer says is not looked at.

    Raises:
        CorruptDataError: names the object and what is wrong.
    """

    def damaged(why: str, **facts: object) -> CorruptDataError:
        return _damaged(name, why, **facts)

    if total_bytes < FRAME_BYTES:
        raise damaged("too short", bytes=total_bytes)
    found_bytes = storage.size(name)
    if found_bytes != total_bytes:
        raise damaged("wrong length", expected=total_bytes, found=found_bytes)
    if storage.get(name, length=len(HEAD)) != HEAD:
        raise damaged("wrong head")
    # Most footers lie within the last bytes: one request for footer and tail.
    end_at = max(0, total_bytes - _END_BYTES)
    end = storage.get(name, offset=end_at, length=total_bytes - end_at)
    footer_bytes, footer_sum, magic = _TAIL.unpack(end[-_TAIL.size :])
    footer_at = total_bytes - _TAIL.size - footer_bytes
    if magic != _TAIL_MAGIC or footer_at < len(HEAD):
        raise damaged("wrong tail")
    if footer_at >= end_at:
        footer = end[footer_at - end_at : -_TAIL.size]
    else:
        footer = storage.get(name, offset=footer_at, length=footer_bytes)
    if checksum(footer) != footer_sum:
        raise damaged("checksum mismatch in footer")
    return footer


def read_index(storage: Storage, name: str, total_bytes: int) -> Index:
    """An object's own index, after checking head, footer and tail.

    Raises:
        CorruptDataError: names the object and what is wrong.
    """

    def damaged(why: str, **facts: object) -> CorruptDataError:
        return _damaged(name, why, **facts)

    footer = read_footer(storage, name, total_bytes)
    footer_at = total_bytes - _TAIL.size - len(footer)
    try:
        parsed = stored_json.parse(footer)
        if stored_json.count(parsed["format"]) != FORMAT:
            raise damaged("unknown format", format=parsed["format"], known=FORMAT)
        segments = _check_entries(parsed["segments"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged("footer is not an index") from error
    at = len(HEAD)
    for offset, (size, _) in segments.items():
        if offset != at:
            raise damaged("segments overlap or leave a gap", offset=offset, expected=at)
        at += size
    if at != footer_at:
        raise damaged("segments overlap or leave a gap", offset=at, expected=footer_at)
    return Index(name, segments)


def _check_entries(entries: Any) -> dict[int, tuple[int, str]]:
    """The entries of a footer; raises ValueError or TypeError on what no writer writes."""
    found: dict[int, tuple[int, str]] = {}
    for kind, label, offset, size, sum_ in entries:
        is_sound = (
            kind in (ROWS, DENSE, DELETION_VECTORS)
            and type(label) is str
            and type(offset) is int
            and type(size) is int
            and size >= 0
            and type(sum_) is str
            and len(sum_) == 16
        )
        # An empty segment would share its offset with the next.
        if not is_sound or offset in found:
            raise ValueError(f"not an entry: {kind!r:.40} {offset!r:.40} {size!r:.40}")
        found[offset] = (size, sum_)
    return found
