"""The container of a file of ``torch.save``: a zip of records that are stored, not compressed.

A record is not unpacked: where its bytes begin in the file is known, and they are read from there.
So every header is believed only where all that describe a record agree.

Invariants:
- Records follow each other from the first byte of the archive to its directory: no two share a
  byte, none is shifted, nothing is between them.
- A record that is compressed or encrypted is refused, wherever it is.
- Names are unique, and all begin with the one folder that torch writes.

Not here: what a record holds (structure.py).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NoReturn

from holdfast.boundary.budget import Account
from holdfast.errors import CorruptDataError, InvalidRequestError
from holdfast.interchange.archive.files import Extent, shown

LOCAL_MAGIC = b"PK\x03\x04"
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4s4B4HIIIHHHHHII")
_IS_FOLDER = 0x10  # of an entry's attributes, as MS-DOS has them
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_U16, _U32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED = 0x1 | 0x40 | 0x2000
_HAS_DESCRIPTOR, _IS_UTF8 = 0x8, 0x800
_FLAGS_KNOWN = 0x6 | _HAS_DESCRIPTOR | _IS_UTF8
_ENTRY_BYTES = 600  # of memory that a record of the directory takes here, with its name
_NAME_BYTES_MAX = 4096
_TAIL_MAGIC, _TAIL_BYTES_MAX = b"PK\x07\x08", 24
_NO_TAIL = frozenset([b""])
_EXTRA_BYTES_LIKELY = 128  # torch pads headers so that records begin at multiples of 64


@dataclass(frozen=True, slots=True)
class _Entry:
    """A record as the directory describes it."""

    name: bytes
    flags: int
    crc: int
    bytes: int
    header: int


def is_zip(file: Extent) -> bool:
    """Whether bytes end as a zip without a comment does; torch writes none."""
    if file.bytes < _END.size:
        return False
    end = file.part(file.bytes - _END.size, _END.size).read()
    return end.startswith(b"PK\x05\x06") and end.endswith(b"\0\0")


def begins_as_zip(file: Extent) -> bool:
    """Whether bytes begin as a zip does: one that does not end so is cut off."""
    return file.bytes >= 4 and file.part(0, 4).read() == LOCAL_MAGIC


def read_records(archive: Extent, account: Account) -> dict[str, Extent]:
    """Where each record's bytes lie, by its name without the folder that all are in.

    Raises:
        CorruptDataError: it is no such archive, or its parts contradict each other.
        InvalidRequestError: a record is compressed or encrypted, or there are too many.
    """
    start, size, count = _find_directory(archive)
    account.budget.check_memory(
        account.memory_bytes + 2 * size + count * _ENTRY_BYTES,
        claim=f"{count} records of an archive",
    )
    entries = _read_directory(archive, start, size, count)
    records: dict[str, Extent] = {}
    roots: set[str] = set()
    end, tails = 0, _NO_TAIL
    for entry in sorted(entries, key=lambda each: each.header):
        at = _find_data(archive, entry, end, tails)
        end, tails = at + entry.bytes, _tails(entry)
        if end > start:
            _refuse(archive, "a record reaches beyond its archive")
        root, slash, rest = _text(archive, entry).partition("/")
        roots.add(root)
        if not slash or len(roots) > 1 or rest in records:
            _refuse(archive, "an archive has names that torch does not write")
        records[rest] = archive.part(at, entry.bytes)
    if start - end > _TAIL_BYTES_MAX or archive.part(end, start - end).read() not in tails:
        _refuse(archive, "a record's header and the directory disagree")
    return records


def _refuse(archive: Extent, message: str) -> NoReturn:
    raise CorruptDataError(message, path=shown(archive.path), at=archive.offset)


def _find_directory(archive: Extent) -> tuple[int, int, int]:
    """Where the directory begins, its bytes and how many records it has."""
    if not is_zip(archive):
        _refuse(archive, "not an archive of torch, or one that is cut off")
    at = archive.bytes - _END.size
    _, disk, first_disk, here, count, size, start, _ = _END.unpack(
        archive.part(at, _END.size).read()
    )
    if at >= _LOCATOR64.size:
        locator = archive.part(at - _LOCATOR64.size, _LOCATOR64.size).read()
        if locator.startswith(b"PK\x06\x07"):
            narrow = (here, count, size, start)
            at -= _LOCATOR64.size + _END64.size
            _, _, wide_at, disks = _LOCATOR64.unpack(locator)
            if at < 0 or wide_at != at or disks > 1:
                _refuse(archive, "an archive's end is not what it says")
            magic, length, _, _, disk, first_disk, here, count, size, start = _END64.unpack(
                archive.part(at, _END64.size).read()
            )
            widths = (_U16, _U16, _U32, _U32)
            is_same = all(
                a == min(b, width)
                for a, b, width in zip(narrow, (here, count, size, start), widths, strict=True)
                if a != width
            )
            if magic != b"PK\x06\x06" or length != _END64.size - 12 or not is_same:
                _refuse(archive, "an archive's end is not what it says")
    if disk or first_disk or here != count or start + size != at or count * _CENTRAL.size > size:
        _refuse(archive, "an archive's directory is not where it should be")
    return start, size, count


def _read_directory(archive: Extent, start: int, size: int, count: int) -> list[_Entry]:
    data = archive.part(start, size).read()
    entries: list[_Entry] = []
    at = 0
    for _ in range(count):
        if at + _CENTRAL.size > size:
            _refuse(archive, "an archive's directory is cut off")
        (magic, _, _, _, _, flags, method, _, _, crc, packed, unpacked, name_bytes, extra_bytes,
         comment_bytes, disk, _, attributes, header) = _CENTRAL.unpack_from(data, at)  # fmt: skip
        names = at + _CENTRAL.size
        at = names + name_bytes + extra_bytes + comment_bytes
        if magic != b"PK\x01\x02" or at > size or name_bytes > _NAME_BYTES_MAX:
            _refuse(archive, "an archive's directory is damaged")
        _check_method(archive, flags, method)
        if attributes & _IS_FOLDER:  # torch would not read its bytes, and return any memory
            _refuse(archive, "a record is marked as a folder")
        extra = data[names + name_bytes : names + name_bytes + extra_bytes]
        unpacked, packed, header, disk = _widen(archive, extra, unpacked, packed, header, disk)
        if packed != unpacked or disk:
            _refuse(archive, "an archive's directory is damaged")
        entries.append(
            _Entry(data[names : names + name_bytes], flags, crc, unpacked, header)
        )  # fmt: skip
    if at != size:
        _refuse(archive, "an archive's directory is damaged")
    return entries


def _check_method(archive: Extent, flags: int, method: int) -> None:
    if flags & _ENCRYPTED or method:
        raise InvalidRequestError(
            "a record of the file is encrypted" if flags & _ENCRYPTED
            else "a record of the file is compressed, which torch.save never does",
            path=shown(archive.path),
            todo="torch.load it where you trust it, and torch.save it again",
        )  # fmt: skip
    if flags & ~_FLAGS_KNOWN:
        _refuse(archive, "a record is stored in an unknown way")


def _widen(
    archive: Extent, extra: bytes, unpacked: int, packed: int, header: int, disk: int
) -> tuple[int, int, int, int]:
    """Numbers of a directory's entry, from its 64-bit field where they do not fit."""
    wide = _fields(archive, extra).get(1)
    narrow = [(unpacked, _U32, 8), (packed, _U32, 8), (header, _U32, 8), (disk, _U16, 4)]
    found: list[int] = []
    for value, most, width in narrow:
        if value == most and wide is not None:
            if len(wide) < width:
                _refuse(archive, "a record's size is damaged")
            value, wide = int.from_bytes(wide[:width], "little"), wide[width:]
        found.append(value)
    if wide:
        _refuse(archive, "a record's size is damaged")
    unpacked, packed, header, disk = found
    return unpacked, packed, header, disk


def _fields(archive: Extent, extra: bytes) -> dict[int, bytes]:
    """The extra fields of a header, by their kind."""
    found: dict[int, bytes] = {}
    while extra:
        kind, length = int.from_bytes(extra[:2], "little"), int.from_bytes(extra[2:4], "little")
        if len(extra) < 4 + length or kind in found:
            _refuse(archive, "a header of a record is damaged")
        found[kind], extra = extra[4 : 4 + length], extra[4 + length :]
    return found


def _tails(entry: _Entry) -> frozenset[bytes]:
    """What may follow a record: its sizes, where its own header does not say them."""
    if not entry.flags & _HAS_DESCRIPTOR:
        return _NO_TAIL
    sizes = (entry.bytes, entry.bytes)
    wide = struct.pack("<IQQ", entry.crc, *sizes)
    narrow = struct.pack("<III", entry.crc, *(size & _U32 for size in sizes))
    found = {_TAIL_MAGIC + wide, _TAIL_MAGIC + narrow}  # without the magic it could be shifted
    return frozenset(found | {b""} if entry.bytes == 0 else found)


def _find_data(archive: Extent, entry: _Entry, end: int, tails: frozenset[bytes]) -> int:
    """Where a record's bytes begin, if its own header says the same as the directory.

    The record before ended at ``end``; one of ``tails`` follows it, and nothing else. So no record
    can be shifted, or longer than it is.
    """
    gap = entry.header - end
    if not 0 <= gap <= _TAIL_BYTES_MAX:
        _refuse(archive, "two records of an archive overlap, or something is between them")
    likely = gap + _LOCAL.size + len(entry.name) + _EXTRA_BYTES_LIKELY
    data = archive.part(end, min(likely, archive.bytes - end)).read()
    if data[:gap] not in tails or len(data) < gap + _LOCAL.size:
        _refuse(archive, "a record's header and the directory disagree")
    name_bytes: int
    extra_bytes: int
    magic, _, flags, method, _, _, crc, packed, unpacked, name_bytes, extra_bytes = (
        _LOCAL.unpack_from(data, gap)
    )
    _check_method(archive, flags, method)
    if magic != LOCAL_MAGIC or name_bytes != len(entry.name):
        _refuse(archive, "a record's header and the directory disagree")
    name = gap + _LOCAL.size
    extra, after = name + name_bytes, name + name_bytes + extra_bytes
    if after > len(data):
        data = archive.part(end, after).read()
    _fields(archive, data[extra:after])
    is_same = data[name:extra] == entry.name and flags == entry.flags
    if not flags & _HAS_DESCRIPTOR:
        is_wide = _U32 in (packed, unpacked)
        is_same &= crc == entry.crc and (is_wide or (packed, unpacked) == (entry.bytes,) * 2)
    if not is_same:
        _refuse(archive, "a record's header and the directory disagree")
    return end + after


def _text(archive: Extent, entry: _Entry) -> str:
    try:
        return entry.name.decode("utf-8" if entry.flags & _IS_UTF8 else "cp437")
    except UnicodeDecodeError:
        _refuse(archive, "an archive has names that torch does not write")
