"""A run taken apart and put together again: every offset, length and checksum is made right.

    files -> StoredRun (parts of objects, a catalog that names parts) -> Laid (bytes of objects, a
    catalog that names extents) -> files

Mutators change a ``StoredRun`` where a liar would have the objects agree with the catalog, and a
``Laid`` where they are to disagree. Written from docs/format.md; nothing of the project is used but
its checksum.

Invariant: a run that is taken apart and put together unchanged has the same objects byte for byte.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import xxhash

HEAD = struct.pack("<8sII", b"HOLDFAST", 1, 0)
TAIL = struct.Struct("<QQ8s")
TAIL_MAGIC = b"TSAFDLOH"
_KEYS = itertools.count(1 << 60)  # what stands for an offset while a run is apart


def sum_of(data: Any) -> int:
    """The checksum of everything stored."""
    return int(xxhash.xxh3_64_intdigest(data))


def hex_of(data: Any) -> str:
    """A checksum as JSON has it."""
    return f"{sum_of(data):016x}"


@dataclass(slots=True)
class Part:
    """One segment of an object; ``key`` is what extents name while the run is apart."""

    kind: str
    label: str
    data: bytes
    key: int = field(default_factory=lambda: next(_KEYS))


@dataclass(slots=True)
class StoredObject:
    """An object's segments in order."""

    name: str
    parts: list[Part]


@dataclass(slots=True)
class StoredRun:
    """A run apart: ``body`` is the newest catalog, whose extents are ``[object, key, 0, ""]``."""

    catalog: str
    format: int
    body: dict[str, Any]
    objects: list[StoredObject]
    others: dict[str, bytes]

    def copy(self) -> StoredRun:
        """As it is; what is changed in the one is not in the other."""
        objects = [
            StoredObject(o.name, [dataclasses.replace(p) for p in o.parts]) for o in self.objects
        ]
        body = json.loads(json.dumps(self.body))
        return StoredRun(self.catalog, self.format, body, objects, dict(self.others))

    def parts(self, kind: str) -> list[tuple[StoredObject, Part]]:
        """All segments of a kind."""
        return [(o, p) for o in self.objects for p in o.parts if p.kind == kind]

    def part(self, key: int) -> Part | None:
        """The segment that an extent names."""
        return next((p for o in self.objects for p in o.parts if p.key == key), None)

    def entries_of(self, part: Part) -> list[list[Any]]:
        """What the catalog has of a segment of rows."""
        return [s for s in self.body["segments"] if s[7] == part.key]

    def add(self, place: int, part: Part) -> list[Any]:
        """Put one more segment at the end of an object; its extent."""
        self.objects[place].parts.append(part)
        return [place, part.key, 0, ""]


@dataclass(slots=True)
class Laid:
    """A run as bytes, but for its newest catalog: ``body`` is still to be written."""

    catalog: str
    format: int | str
    body: Any
    objects: dict[str, bytes]
    others: dict[str, bytes]
    text: bytes | None = None
    """The catalog's JSON where it is to be other than ``body`` written plainly."""

    def files(self) -> dict[str, bytes]:
        """Everything, the catalog with its checksum."""
        text = self.text if self.text is not None else json_bytes(self.body)
        line = f"holdfast-catalog {self.format} {hex_of(text)}\n".encode()
        return {**self.others, **self.objects, self.catalog: line + text + b"\n"}


def json_bytes(value: Any) -> bytes:
    """JSON as catalogs have it; also of what no catalog has, like NaN and lone surrogates."""
    return json.dumps(value, separators=(",", ":")).encode()


def extents_of(body: dict[str, Any]) -> Iterator[tuple[list[Any], int]]:
    """Every extent in a catalog: the list it is in, and where in it it begins."""
    for segment in body["segments"]:
        yield segment, 6
    for entry in body["checkpoints"]:
        yield (entry["dense"], 0) if isinstance(entry, dict) else (entry, len(entry) - 4)
    for grid in body.get("grids", ()):
        if grid[3] is not None:
            yield grid[3], 0
    for _, extents in body.get("ranks", ()):
        for extent in extents:
            yield extent, 0


def take_apart(files: dict[str, bytes]) -> StoredRun:
    """A good run, apart."""
    name = max(n for n in files if n.startswith("catalog/"))
    line, text, _ = files[name].split(b"\n")
    body = json.loads(text)
    objects = [StoredObject(n, list(parts_in(files[n]))) for n, _ in body["objects"]]
    keys = {}
    for place, one in enumerate(objects):
        at = len(HEAD)
        for part in one.parts:
            keys[place, at] = part.key
            at += len(part.data)
    for values, at in extents_of(body):
        values[at : at + 4] = [values[at], keys[values[at], values[at + 1]], 0, ""]
    named = {one.name for one in objects} | {name}
    others = {n: data for n, data in files.items() if n not in named}
    return StoredRun(name, int(line.split()[1]), body, objects, others)


def parts_in(data: bytes) -> Iterator[Part]:
    """The segments of an object, by its footer."""
    footer_bytes, _, _ = TAIL.unpack(data[-TAIL.size :])
    footer = json.loads(data[-TAIL.size - footer_bytes : -TAIL.size])
    for kind, label, offset, size, _ in footer["segments"]:
        yield Part(kind, label, data[offset : offset + size])


def framed(parts: list[Part]) -> tuple[bytes, dict[int, list[Any]]]:
    """An object of some segments, and the offset, length and checksum of each by its key."""
    index: list[list[Any]] = []
    places: dict[int, list[Any]] = {}
    at = len(HEAD)
    for part in parts:
        places[part.key] = [at, len(part.data), hex_of(part.data)]
        index.append([part.kind, part.label, *places[part.key]])
        at += len(part.data)
    return with_footer(b"".join(p.data for p in parts), {"format": 1, "segments": index}), places


def with_footer(body: bytes, footer: Any) -> bytes:
    """An object of these bytes with this footer; its checksum is right."""
    text = footer if isinstance(footer, bytes) else json_bytes(footer)
    return HEAD + body + text + TAIL.pack(len(text), sum_of(text), TAIL_MAGIC)


def lay_out(run: StoredRun) -> Laid:
    """A run's bytes; what extents name by key they name by place."""
    objects: dict[str, bytes] = {}
    found: dict[int, list[Any]] = {}
    body = run.body
    for place, one in enumerate(run.objects):
        data, places = framed(one.parts)
        objects[one.name] = data
        found |= places
        body["objects"][place] = [one.name, len(data)]
    for values, at in extents_of(body):
        if values[at + 1] in found:
            values[at + 1 : at + 4] = found[values[at + 1]]
    return Laid(run.catalog, run.format, body, objects, dict(run.others))
