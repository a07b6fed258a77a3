"""Lies in segments of rows: other ids, codecs, numbers, deaths and filters, all checksums right.

Where a segment's ids change, the catalog says the new ones too: such a run is refused only by a
reader that looks at what segments hold together.

# N rows of a segment
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from holdfast.checkpoint.format import codec as codecs
from holdfast.errors import HoldfastError
from tests.hostile.mutators.catalogs import steps_of
from tests.hostile.mutators.hostile_values import number
from tests.hostile.mutators.registry import PARTS, mutator
from tests.hostile.mutators.segment_bytes import (
    BITMAP,
    DTYPES,
    GAPS,
    RANGE,
    SegmentBytes,
    decode_deaths,
    encode_ids,
    ids_of,
    read_segment,
)
from tests.hostile.mutators.stored_run import Part, StoredRun

CODECS = ("fp32", "fp16", "bf16", "sym8", "asym4", "adaptive2", "log4", "kmeans2", "kmeans4-block",
          "kmeans3-cluster")  # fmt: skip


def _choose(run: StoredRun, rng: random.Random) -> tuple[Part, SegmentBytes] | None:
    found = run.parts("rows")
    if not found:
        return None
    part = rng.choice(found)[1]
    try:
        return part, read_segment(part.data)
    except ValueError:
        return None  # another mutation was here


def _store(run: StoredRun, part: Part, segment: SegmentBytes, *, tells: bool = True) -> None:
    """Put a changed segment in its place; the catalog says the same of it where it ``tells``."""
    part.data = segment.write()
    if tells:
        for entry in run.entries_of(part):
            entry[3:6] = [segment.rows, segment.first, segment.last]


def _neighbours(run: StoredRun, part: Part) -> list[Part]:
    """Other segments of the same table."""
    return [p for _, p in run.parts("rows") if p.label == part.label and p is not part]


@mutator(PARTS, 8)
def ids_of_a_segment(run: StoredRun, rng: random.Random) -> str | None:
    chosen = _choose(run, rng)
    if chosen is None:
        return None
    part, segment = chosen
    try:
        ids_N = ids_of(segment)
    except ValueError:
        return None
    at = rng.randrange(len(ids_N))
    match rng.randrange(10):
        case 0:
            shift = rng.choice((-1, 1, 2, 64, 1 << 20, 1 << 40))
            ids_N = np.maximum(ids_N + shift, np.arange(len(ids_N)))
            told = f"shifted by {shift}"
        case 1:
            ids_N = ids_N.copy()
            ids_N[at] = max(0, ids_N[at] + rng.choice((-1, 1, 7)))
            ids_N = np.maximum.accumulate(ids_N)
            told = f"one of them is {ids_N[at]}"
        case 2:
            others = _neighbours(run, part)
            same = [s for p in others if (s := _as_long(p, segment.rows)) is not None]
            if not same:
                return None
            ids_N = ids_of(rng.choice(same))
            told = "as another segment has them"
        case 3:
            ids_N = np.arange(len(ids_N))
            told = "the first rows"
        case 4:
            ids_N = ids_N[::-1].copy()
            told = "descending"
        case 5:
            ids_N = ids_N.copy()
            ids_N[at:] += rng.choice((1, 3, 1 << 33))
            told = f"with a gap at {at}"
        case 6:
            others_N = np.delete(np.arange(len(ids_N)), at)
            if not len(others_N) or not segment.take(others_N, ids_N):
                return None
            _store(run, part, segment)
            return f"one row less, {ids_N[at]}"
        case 7:
            encoding = rng.choice((RANGE, BITMAP, GAPS))
            segment.set_ids(ids_N, encoding)
            _store(run, part, segment)
            return f"encoded as {encoding}"
        case 8:
            segment.ids = encode_ids(ids_N, GAPS) + b"\0" * rng.choice((0, 1, 8))
            segment.encoding = rng.choice((RANGE, GAPS, 3, 255))
            _store(run, part, segment)
            return f"bytes of gaps under encoding {segment.encoding}"
        case _:
            ids_N = np.sort(np.random.default_rng(rng.getrandbits(32)).permutation(
                int(ids_N[-1]) + 1 + rng.choice((0, 1, 9)))[: len(ids_N)])  # fmt: skip
            told = "drawn anew"
    segment.set_ids(ids_N)
    _store(run, part, segment, tells=rng.random() < 0.9)
    return f"{part.label!a:.20} {told}"


def _as_long(part: Part, rows: int) -> SegmentBytes | None:
    try:
        found = read_segment(part.data)
        ids_of(found)
    except ValueError:
        return None
    return found if found.rows == rows else None


@mutator(PARTS, 4)
def two_segments(run: StoredRun, rng: random.Random) -> str | None:
    """One segment becomes two, or two hold the same rows; the catalog agrees."""
    chosen = _choose(run, rng)
    if chosen is None or chosen[1].rows < 2:
        return None
    part, segment = chosen
    entries = run.entries_of(part)
    if not entries:
        return None
    try:
        ids_N = ids_of(segment)
        rest = read_segment(part.data)
    except ValueError:
        return None
    half = len(ids_N) // 2
    overlap = rng.choice((0, 0, 1, half))
    if not segment.take(np.arange(half), ids_N):
        return None
    start = half - min(overlap, half)
    count = len(ids_N) - start - (overlap if rng.random() < 0.5 else 0)
    rest.take(np.arange(start, start + max(1, count)), ids_N)
    entry = entries[0]
    place = rng.choice([entry[6], entry[6], rng.randrange(len(run.objects))])
    extent = run.add(place, Part("rows", part.label, rest.write()))
    _store(run, part, segment)
    run.body["segments"].append(
        [*entry[:3], rest.rows, rest.first, rest.last, *extent, *entry[10:]]
    )
    return f"{part.label!a:.20} in two, {overlap} rows in both, {count} of {len(ids_N) - half}"


@mutator(PARTS, 5)
def header_of_a_segment(run: StoredRun, rng: random.Random) -> str | None:
    chosen = _choose(run, rng)
    if chosen is None:
        return None
    part, segment = chosen
    column = rng.randrange(len(segment.columns))
    fields: dict[str, Callable[[int], object]] = {
        "format": lambda n: setattr(segment, "format", n),
        "encoding": lambda n: setattr(segment, "encoding", n),
        "rows": lambda n: setattr(segment, "rows", n),
        "first": lambda n: setattr(segment, "first", n),
        "last": lambda n: setattr(segment, "last", n),
        "zero": lambda n: setattr(segment, "zero", n),
        "width": lambda n: setattr(segment.columns[column], "width", n),
        "type": lambda n: setattr(segment.columns[column], "type", n),
        **{
            f"length of {name}": lambda n, name=name: segment.lengths.update({name: n})
            for name in ("ids", "filter", "deaths", "columns", f"column {column}")
        },
    }
    name = rng.choice(list(fields))
    old = getattr(segment, name, None)
    new = number(rng, 4 if old is None else old)
    fields[name](new)
    _store(run, part, segment, tells=name in ("rows", "first", "last") and rng.random() < 0.7)
    return f"{part.label!a:.20} {name} is {new}"


@mutator(PARTS, 5)
def numbers_of_a_segment(run: StoredRun, rng: random.Random) -> str | None:
    chosen = _choose(run, rng)
    if chosen is None:
        return None
    part, segment = chosen
    column = rng.choice(segment.columns)
    data = bytearray(column.section)
    at = rng.randrange(len(data))
    told = f"{part.label!a:.20} "
    match rng.randrange(7):
        case 0:
            kind, bits = rng.choice((*range(14), 255)), rng.choice((2, 3, 4, 8, 16, 32, 64))
            column.wire = bytes([kind, bits, *column.wire[2:]])
            told += f"wire {column.wire.hex()}"
        case 1:
            wire = bytearray(column.wire)
            wire[rng.randrange(8)] = rng.choice((0, 1, 2, 255))
            column.wire = bytes(wire)
            told += f"wire {column.wire.hex()}"
        case 2:
            pattern = rng.choice((b"\xff\xff\xff\xff", b"\x00\x00\x80\x7f", b"\x00\x00\xc0\x7f"))
            data[at : at + 4] = pattern[: len(data[at : at + 4])]
            told += "not finite"
        case 3:
            data[at] = rng.randrange(256)
            told += f"byte {at}"
        case 4:
            size = rng.choice((1, 4, 8, len(data) // 2))
            data = data[:-size] if rng.random() < 0.5 else data + bytes(size)
            told += f"section of {len(data)} bytes"
        case 5:
            column.width = max(1, column.width + rng.choice((-1, 1)))
            data = data + bytes(4 * segment.rows)
            told += f"wider, {column.width}"
        case _:
            return _recode(run, rng, part, segment)
    column.section = bytes(data)
    _store(run, part, segment)
    return told


def _recode(run: StoredRun, rng: random.Random, part: Part, segment: SegmentBytes) -> str | None:
    """The same rows by another codec: good, and nothing but other numbers."""
    column = rng.choice(segment.columns)
    dtype = DTYPES[column.type]
    name = rng.choice(CODECS)
    try:
        rows_ND = codecs.decode(
            column.wire, column.section, rows=segment.rows, width=column.width, dtype=dtype
        )
        fitted = codecs.fit_codec(codecs.parse_codec(name), dtype)
        column.wire, column.section = fitted.wire(), codecs.encode(fitted, rows_ND).tobytes()
    except HoldfastError:
        return None
    _store(run, part, segment)
    return f"{part.label!a:.20} a column by {name}"


@mutator(PARTS, 5)
def deaths_of_a_segment(run: StoredRun, rng: random.Random) -> str | None:
    chosen = _choose(run, rng)
    if chosen is None:
        return None
    part, segment = chosen
    steps = steps_of(run.body)
    known = (0, 1, *steps, *(step + 1 for step in steps), 1 << 40, (1 << 63) - 1, 1 << 63)
    rows = segment.rows
    try:
        old_N = decode_deaths(segment.deaths, rows) if segment.deaths else None
    except ValueError:
        return None
    match rng.randrange(5):
        case 0:
            segment.set_deaths(np.full(rows, rng.choice(known), np.uint64))
            told = "all at one step"
        case 1:
            new_N = np.full(rows, 1 << 40) if old_N is None else old_N.copy()
            new_N[rng.randrange(rows)] = rng.choice(steps)
            segment.set_deaths(new_N)
            told = "one of another step"
        case 2:
            segment.set_deaths(None)
            told = "forgotten"
        case 3:
            drawn = [rng.choice(known) for _ in range(rows)]
            segment.set_deaths(np.array(drawn, np.uint64))
            told = "drawn anew"
        case _:
            data = bytearray(segment.deaths or b"\1\0\0\0\0\0\0\0" + bytes(8 + rows))
            data[rng.randrange(len(data))] = rng.choice((0, 1, 2, 255))
            segment.deaths = bytes(data)
            told = "a byte"
    _store(run, part, segment)
    for entry in run.entries_of(part):
        if rng.random() < 0.3:
            entry[10:] = [rng.choice(steps)]
    return f"{part.label!a:.20} {told}"


@mutator(PARTS, 3)
def filter_of_a_segment(run: StoredRun, rng: random.Random) -> str | None:
    chosen = _choose(run, rng)
    if chosen is None:
        return None
    part, segment = chosen
    data = bytearray(segment.filter)
    match rng.randrange(5):
        case 0:
            segment.set_filter(bytes(32 * rng.choice((1, 2, 8))))
            told = "knows nothing"
        case 1:
            segment.set_filter(b"")
            told = "gone"
        case 2:
            segment.set_filter(b"\xff" * 32 * rng.choice((1, 2, 64)))
            told = "knows everything"
        case 3 if data:
            for _ in range(rng.choice((1, 8))):
                data[rng.randrange(len(data))] &= rng.randrange(256)
            segment.set_filter(bytes(data))
            told = "forgets some"
        case _:
            segment.set_filter(bytes(rng.choice((1, 8, 31, 33, 40))))
            told = f"of {len(segment.filter)} bytes"
    _store(run, part, segment)
    return f"{part.label!a:.20} {told}"


@mutator(PARTS, 2)
def bytes_of_a_segment(run: StoredRun, rng: random.Random) -> str | None:
    """Noise in a part of any kind; only the checksum of the whole is made right."""
    parts = [p for o in run.objects for p in o.parts if p.data]
    if not parts:
        return None
    part = rng.choice(parts)
    data = bytearray(part.data)
    at = rng.randrange(min(len(data), rng.choice((64, 512, 1 << 20))))
    match rng.randrange(4):
        case 0:
            data[at] = rng.randrange(256)
        case 1:
            data[at : at + 8] = rng.choice((0, 1, 1 << 20, 1 << 40, (1 << 64) - 1)).to_bytes(
                8, "little"
            )
        case 2:
            del data[at:]
        case _:
            data[at:at] = bytes(rng.choice((1, 8, 64)))
    part.data = bytes(data)
    return f"{part.kind} {part.label!a:.20} at {at}"
