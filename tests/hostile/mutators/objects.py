"""Lies in what frames an object: head, footer, tail, and which segments lie where."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.hostile.mutators.hostile_values import change_any, number
from tests.hostile.mutators.registry import FRAMES, PARTS, mutator
from tests.hostile.mutators.stored_run import (
    HEAD,
    TAIL,
    TAIL_MAGIC,
    Laid,
    Part,
    StoredRun,
    json_bytes,
    sum_of,
    with_footer,
)


def _resized(laid: Laid, name: str, data: bytes) -> None:
    """An object of other bytes; the catalog says how many."""
    laid.objects[name] = data
    for item in laid.body["objects"]:
        if item[0] == name:
            item[1] = len(data)


@mutator(FRAMES, 3)
def footer_of_an_object(laid: Laid, rng: random.Random) -> str | None:
    if not laid.objects:
        return None
    name = rng.choice(sorted(laid.objects))
    data = laid.objects[name]
    size, _, _ = TAIL.unpack(data[-TAIL.size :])
    body, text = data[len(HEAD) : -TAIL.size - size], data[-TAIL.size - size : -TAIL.size]
    footer: Any = json.loads(text)
    entries = footer["segments"]
    one = rng.choice(entries) if entries else ["rows", "x", 16, 0, "0" * 16]
    match rng.randrange(8):
        case 0:
            told = change_any(rng, footer)
        case 1:
            at = rng.choice((2, 3))
            one[at] = number(rng, one[at])
            told = f"[{at}] is {one[at]}"
        case 2:
            one[0] = rng.choice(("rows", "dense", "kills", "x"))
            told = f"kind {one[0]}"
        case 3:
            entries.insert(0, [one[0], one[1], one[2], 0, one[4]])
            told = "an empty segment"
        case 4:
            entries.reverse()
            told = "reversed"
        case 5:
            one[4] = rng.choice(("0" * 16, "X" * 16, one[4].upper(), ""))
            told = f"checksum {one[4]}"
        case 6:
            footer = [footer]
            told = "in a list"
        case _:
            at = rng.randrange(len(text))
            footer = text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :]
            told = f"byte {at}"
    _resized(laid, name, with_footer(body, footer))
    return f"{name}: {told}"


@mutator(FRAMES, 1)
def frame_of_an_object(laid: Laid, rng: random.Random) -> str | None:
    if not laid.objects:
        return None
    name = rng.choice(sorted(laid.objects))
    data = laid.objects[name]
    size, _, _ = TAIL.unpack(data[-TAIL.size :])
    text = data[-TAIL.size - size : -TAIL.size]
    match rng.randrange(5):
        case 0:
            length = number(rng, size) & (1 << 64) - 1
            made = data[: -TAIL.size] + TAIL.pack(length, sum_of(text), TAIL_MAGIC)
            told = f"footer of {length} bytes"
        case 1:
            made = data[:8] + rng.choice((0, 2, 1 << 31)).to_bytes(4, "little") + data[12:]
            told = "another format"
        case 2:
            cut = rng.choice((1, 8, len(data) // 2, len(data)))
            made = data[:-cut]
            told = f"cut by {cut}"
        case 3:
            made = data + bytes(rng.choice((1, 8)))
            told = "longer"
        case _:
            at = rng.randrange(len(data))
            made = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            told = f"a bit of byte {at}"
    if rng.random() < 0.7:
        _resized(laid, name, made)
    else:
        laid.objects[name] = made
    return f"{name}: {told}"


@mutator(PARTS, 2)
def where_segments_lie(run: StoredRun, rng: random.Random) -> str | None:
    """Segments in another order or object, and some that nobody reads: good, if nothing is lost."""
    holders = [o for o in run.objects if o.parts]
    if not holders:
        return None
    one, other = rng.choice(holders), rng.choice(holders)
    match rng.randrange(4):
        case 0:
            rng.shuffle(one.parts)
            return "in another order"
        case 1:
            part = rng.choice(one.parts)
            one.parts.remove(part)
            other.parts.append(part)
            place = run.objects.index(other)
            for values, at in _extents_of(run, part):
                values[at] = place
            return f"one moved to object {place}"
        case 2:
            kind = rng.choice(("rows", "dense", "kills"))
            one.parts.insert(rng.randrange(len(one.parts) + 1), Part(kind, "x", b"nobody reads it"))
            return "one that nobody reads"
        case _:
            part = rng.choice(one.parts)
            part.kind = rng.choice(("rows", "dense", "kills"))
            part.label = rng.choice((part.label, "", "[/red]", "\x1b[31m", "\ud800"))
            return f"labelled {part.kind} {part.label!a}"


def _extents_of(run: StoredRun, part: Part) -> list[tuple[list[Any], int]]:
    from tests.hostile.mutators.stored_run import extents_of

    return [(values, at) for values, at in extents_of(run.body) if values[at + 1] == part.key]


__all__ = ["footer_of_an_object", "frame_of_an_object", "json_bytes", "where_segments_lie"]
