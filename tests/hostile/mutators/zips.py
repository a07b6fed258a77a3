"""Lies in a zip as torch writes it: every field of every header can be another number.

    split_zip -> members -> build_zip, with lies -> bytes

Without a lie ``build_zip`` gives an archive that torch loads. Checksums are right unless they are
what is lied about.
"""

from __future__ import annotations

import dataclasses
import io
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

Fields = dict[str, int]
Lie = Callable[[str, int, Fields], None]  # where, the member's number, its header's fields

_LOCAL = ("version", "flags", "method", "time", "date", "crc", "packed", "unpacked", "name",
          "extra")  # fmt: skip
_CENTRAL = ("made", "version", "flags", "method", "time", "date", "crc", "packed", "unpacked",
            "name", "extra", "comment", "disk", "internal", "external", "header")  # fmt: skip
_END = ("disk", "first_disk", "here", "count", "size", "start", "comment")
_END64 = ("length", "made", "version", "disk", "first_disk", "here", "count", "size", "start")
_LOCATOR = ("disk", "at", "disks")
_FORMATS = {
    "local": ("<4sHHHHHIIIHH", b"PK\x03\x04", _LOCAL),
    "central": ("<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", _CENTRAL),
    "end": ("<4sHHHHIIH", b"PK\x05\x06", _END),
    "end64": ("<4sQHHIIQQQQ", b"PK\x06\x06", _END64),
    "locator": ("<4sIQI", b"PK\x06\x07", _LOCATOR),
}
_WIDTHS = {"H": 16, "I": 32, "Q": 64}


@dataclass(frozen=True)
class Member:
    """A record: its name, its bytes, and how they are packed."""

    name: bytes
    data: bytes
    is_deflated: bool = False
    is_described: bool = True
    """Sizes come after the data, as torch has it."""
    extra: bytes = field(default=b"")


def split_zip(data: bytes) -> list[Member]:
    """The members of an honest archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [Member(i.filename.encode(), archive.read(i)) for i in archive.infolist()]


def pack(where: str, fields: Fields) -> bytes:
    """A header; numbers that do not fit are cut."""
    shape, magic, names = _FORMATS[where]
    widths = [_WIDTHS[letter] for letter in shape[3:]]
    values = [fields[name] & ((1 << w) - 1) for name, w in zip(names, widths, strict=True)]
    return struct.pack(shape, magic, *values)


def build_zip(
    members: list[Member],
    *,
    lie: Lie = lambda where, index, fields: None,
    is_wide: bool = False,
    comment: bytes = b"",
    prefix: bytes = b"",
    gap: bytes = b"",
) -> bytes:
    """An archive of members, whose headers say what ``lie`` leaves of the truth."""
    out = bytearray(prefix)
    directory: list[tuple[Fields, Member]] = []
    for index, member in enumerate(members):
        body = member.data
        if member.is_deflated:
            packer = zlib.compressobj(9, zlib.DEFLATED, -15)
            body = packer.compress(body) + packer.flush()
        header = len(out)
        crc = zlib.crc32(member.data)
        truth: Fields = {
            "version": 0, "made": 0, "flags": 0x800 | (8 if member.is_described else 0),
            "method": 8 if member.is_deflated else 0, "time": 0, "date": 0, "crc": crc,
            "packed": len(body), "unpacked": len(member.data), "name": len(member.name),
            "extra": 0, "comment": 0, "disk": 0, "internal": 0, "external": 0, "header": header,
        }  # fmt: skip
        start = header + 30 + len(member.name) + 4
        padding = b"FB" + struct.pack("<H", -start % 64) + b"Z" * (-start % 64)
        local = {**truth, "extra": len(padding)}
        if member.is_described:
            local |= {"crc": 0, "packed": 0, "unpacked": 0}
        lie("local", index, local)
        out += pack("local", local) + member.name + padding + body
        if member.is_described:
            out += struct.pack("<4sIII", b"PK\x07\x08", crc, len(body), len(member.data))
        out += gap
        directory.append((truth, member))
    start = len(out)
    for index, (truth, member) in enumerate(directory):
        central = {**truth, "extra": len(member.extra)}
        lie("central", index, central)
        out += pack("central", central) + member.name + member.extra
    end: Fields = {
        "disk": 0, "first_disk": 0, "here": len(members), "count": len(members),
        "size": len(out) - start, "start": start, "comment": len(comment),
    }  # fmt: skip
    if is_wide:
        at = len(out)
        wide = {**end, "length": 44, "made": 0, "version": 45}
        lie("end64", 0, wide)
        locator = {"disk": 0, "at": at, "disks": 1}
        lie("locator", 0, locator)
        out += pack("end64", wide) + pack("locator", locator)
        end |= {"here": 0xFFFF, "count": 0xFFFF, "size": 0xFFFFFFFF, "start": 0xFFFFFFFF}
    lie("end", 0, end)
    return bytes(out + pack("end", end) + comment)


def mutate_zip(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """An archive with one lie, and what it is."""
    members = split_zip(data)
    at = rng.randrange(len(members))
    member = members[at]
    shown = member.name.decode()
    match rng.choice(("field", "field", "field", "deflate", "twice", "drop", "name", "order",
                      "content", "frame", "extra", "cut", "flip", "wide")):  # fmt: skip
        case "field":
            return _lie_about_field(members, rng, is_wide=rng.random() < 0.2)
        case "wide":
            return build_zip(members, is_wide=True), "zip: 64-bit end"
        case "deflate":
            members[at] = dataclasses.replace(member, is_deflated=True)
            return build_zip(members), f"zip: {shown} deflated"
        case "twice":
            other = dataclasses.replace(member, data=member.data[::-1])
            members.insert(rng.randrange(len(members) + 1), other)
            return build_zip(members), f"zip: {shown} twice"
        case "drop":
            del members[at]
            return build_zip(members), f"zip: no {shown}"
        case "name":
            root, _, rest = shown.partition("/")
            name = rng.choice((f"other/{rest}", rest, f"/{shown}", f"../{shown}", f"{shown}/", "",
                               f"{root}/../{rest}", shown.replace("/", "\\"), f"{root}/data/1",
                               f"{root}/{rest}\0", f"{root}/constants.pkl"))  # fmt: skip
            members[at] = dataclasses.replace(member, name=name.encode())
            return build_zip(members), f"zip: {shown} called {name!r}"
        case "order":
            rng.shuffle(members)
            return build_zip(members), "zip: other order"
        case "content":
            changed = rng.choice((b"", member.data[:-1], member.data + b"\0" * 4, b"big", b"little",
                                  member.data[: len(member.data) // 2], b"\0" * 1000))  # fmt: skip
            members[at] = dataclasses.replace(member, data=changed)
            return build_zip(members), f"zip: {shown} holds {changed[:12]!r}"
        case "frame":
            kind = rng.choice(("comment", "prefix", "gap", "tail", "plain"))
            junk = rng.choice((b"x", b"PK\x05\x06" + b"\0" * 18, b"PK\x03\x04", b"\0" * 70_000))
            if kind == "plain":
                plain = [dataclasses.replace(m, is_described=False) for m in members]
                return build_zip(plain), "zip: sizes in local headers"
            if kind == "tail":
                return build_zip(members) + junk, "zip: a tail"
            made = build_zip(members, **{kind: junk})  # type: ignore[arg-type]
            return made, f"zip: {kind} of {len(junk)}"
        case "extra":
            extra = rng.choice((b"\1\0\0\0", b"\1\0\x08\0" + b"\xff" * 8, b"\1\0\xff\xff", b"x",
                                b"\1\0\x18\0" + b"\0" * 24))  # fmt: skip
            members[at] = dataclasses.replace(member, extra=extra)
            return build_zip(members), f"zip: {shown} with extra {extra[:8]!r}"
        case "cut":
            made = build_zip(members)
            end = rng.randrange(len(made))
            return made[:end], f"zip: cut at {end}"
    made = build_zip(members)
    flipped = bytearray(made)
    for _ in range(rng.randrange(1, 4)):
        flipped[rng.randrange(len(flipped))] = rng.randrange(256)
    return bytes(flipped), "zip: flipped bytes"


def _lie_about_field(
    members: list[Member], rng: random.Random, *, is_wide: bool
) -> tuple[bytes, str]:
    places = ["local", "central", "end", *(("end64", "locator") if is_wide else ())]
    where = rng.choice(places)
    _, _, names = _FORMATS[where]
    name = rng.choice(names)
    victim = rng.randrange(len(members)) if where in ("local", "central") else 0
    told = ""

    def lie(place: str, index: int, fields: Fields) -> None:
        nonlocal told
        if (place, index) != (where, victim):
            return
        old = fields[name]
        fields[name] = rng.choice(
            (0, 1, 8, old + 1, old - 1, old + 4, old - 4, old + 64, 2 * old, old ^ 1, old ^ 0x800,
             0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**63, 2**64 - 1, rng.randrange(2**16))
        )  # fmt: skip
        told = f"zip: {where}[{index}].{name} {old} -> {fields[name]}"

    made = build_zip(members, lie=lie, is_wide=is_wide)
    return made, told
