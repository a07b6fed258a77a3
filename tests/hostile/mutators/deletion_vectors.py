"""Lies in deletion vectors: rows killed that live, kills forgotten, deaths that cannot be.

# N killed rows of one table and birth
"""

from __future__ import annotations

import json
import random
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.hostile.mutators.catalogs import steps_of
from tests.hostile.mutators.hostile_values import change_any, number, text
from tests.hostile.mutators.registry import PARTS, mutator
from tests.hostile.mutators.segment_bytes import ids_of, read_segment
from tests.hostile.mutators.stored_run import Part, StoredRun, json_bytes

HEAD = struct.Struct("<8sQ")
DeletionVectors = dict[
    tuple[str, int], dict[int, int]
]  # by table and birth: the step each row died at


@dataclass(slots=True)
class Vectors:
    """A segment of kills as the format has it."""

    head: dict[str, Any]
    ids: bytes
    index: bytes

    def write(self) -> bytes:
        """Its bytes."""
        text_ = json_bytes(self.head)
        return HEAD.pack(b"HFKILLS1", len(text_)) + text_ + self.ids + self.index


def read_vectors(data: bytes) -> Vectors:
    """A segment of kills, apart."""
    _, size = HEAD.unpack_from(data)
    head = json.loads(data[HEAD.size : HEAD.size + size])
    rest = data[HEAD.size + size :]
    ids_bytes = head["id_bytes"] * sum(count for _, _, count in head["vectors"])
    return Vectors(head, rest[:ids_bytes], rest[ids_bytes:])


def kills_in(data: bytes) -> DeletionVectors:
    """What a segment of kills says."""
    found = read_vectors(data)
    ids = np.frombuffer(found.ids, f"<u{found.head['id_bytes']}").tolist()
    steps = found.head["steps"]
    index = np.frombuffer(found.index, "<u2" if len(steps) <= 65536 else "<u4").tolist()
    kills: DeletionVectors = {}
    at = 0
    for table, born, count in found.head["vectors"]:
        rows = zip(ids[at : at + count], index[at : at + count], strict=True)
        kills[found.head["tables"][table], born] = {row: steps[i] for row, i in rows}
        at += count
    return kills


def write_kills(kills: DeletionVectors, *, id_bytes: int = 4) -> bytes:
    """DeletionVectors as the format has them."""
    kept = {key: rows for key, rows in sorted(kills.items()) if rows}
    tables = sorted({table for table, _ in kept})
    steps = sorted({step for rows in kept.values() for step in rows.values()})
    most = max((row for rows in kept.values() for row in rows), default=0)
    id_bytes = 8 if most >> 32 else id_bytes
    ids = [row for rows in kept.values() for row in sorted(rows)]
    index = [steps.index(rows[row]) for rows in kept.values() for row in sorted(rows)]
    head = {
        "tables": tables,
        "steps": steps,
        "id_bytes": id_bytes,
        "vectors": [[tables.index(t), born, len(rows)] for (t, born), rows in kept.items()],
    }
    return Vectors(
        head, np.array(ids, f"<u{id_bytes}").tobytes(), np.array(index, "<u2").tobytes()
    ).write()


def _choose(run: StoredRun, rng: random.Random) -> tuple[list[Any], Part, DeletionVectors] | None:
    """A grid with its vectors; empty ones where it had none."""
    grids = run.body.get("grids", [])
    if not grids:
        return None
    grid = rng.choice(grids)
    if grid[3] is None:
        part = Part("kills", "kills", write_kills({}))
        grid[3] = run.add(rng.randrange(len(run.objects)), part)
        return grid, part, {}
    part = run.part(grid[3][1])
    if part is None:
        return None
    try:
        return grid, part, kills_in(part.data)
    except (ValueError, KeyError, TypeError, IndexError, struct.error):
        return None


@mutator(PARTS, 8)
def kills(run: StoredRun, rng: random.Random) -> str | None:
    chosen = _choose(run, rng)
    if chosen is None:
        return None
    grid, part, found = chosen
    steps = steps_of(run.body)
    known = (*steps, grid[2], grid[2] + 1, 1 << 40)
    key = rng.choice(list(found)) if found else None
    told = "a row that lives is killed"
    match rng.randrange(9):
        case 0 | 1 | 2:
            target = _a_row(run, rng)
            if target is None:
                return None
            table, born, row = target
            died = rng.choice([s for s in known if s > born] or [born + 1])
            found.setdefault((table, born), {})[row] = died
            told += f": {table!a} {row} born {born} dies {died}"
        case 3 if key is not None:
            row = rng.choice(list(found[key]))
            del found[key][row]
            told = f"forgets {key} {row}"
        case 4 if key is not None:
            del found[key]
            told = f"forgets {key}"
        case 5 if key is not None:
            row = rng.choice(list(found[key]))
            found[key][row] = rng.choice((*known, key[1], max(0, key[1] - 1)))
            told = f"{key} {row} dies at {found[key][row]}"
        case 6:
            table = rng.choice((text(rng), "nobody", *run.body["tables"]))
            found[table, rng.choice((*steps, 0, 999))] = {rng.choice((0, 5, 1 << 33)): 1 << 50}
            told = f"of {table!a:.20}"
        case 7:
            found.clear()
            told = "all forgotten"
        case _:
            part.data = write_kills(found, id_bytes=8)
            return "ids of 8 bytes"
    part.data = write_kills(found)
    return told


@mutator(PARTS, 3)
def the_wrong_version_is_killed(run: StoredRun, rng: random.Random) -> str | None:
    """The newer of two versions dies and the older lives on: each row is still there once."""
    chosen = _choose(run, rng)
    if chosen is None:
        return None
    grid, part, found = chosen
    born_at: dict[tuple[str, int], list[int]] = {}
    for entry in run.body["segments"]:
        stored = run.part(entry[7])
        if stored is None:
            continue
        table = run.body["tables"][entry[0]]
        for row in ids_of(read_segment(stored.data)).tolist():
            born_at.setdefault((table, row), []).append(entry[1])
    pairs = [
        (table, born, row, died)
        for (table, born), rows in found.items()
        for row, died in rows.items()
        if died in born_at.get((table, row), ()) and died < grid[2]
    ]
    if not pairs:
        return None
    for table, born, row, died in rng.sample(pairs, min(len(pairs), rng.choice((1, 1, 5)))):
        found[table, born].pop(row, None)
        found.setdefault((table, died), {})[row] = rng.choice((died + 1, grid[2]))
    part.data = write_kills(found)
    return f"{pairs[0]}"


def _a_row(run: StoredRun, rng: random.Random) -> tuple[str, int, int] | None:
    """Some version of some row that is really there."""
    segments = run.body["segments"]
    if not segments:
        return None
    entry = rng.choice(segments)
    part = run.part(entry[7])
    if part is None:
        return None
    try:
        ids_N = ids_of(read_segment(part.data))
    except ValueError:
        return None
    return run.body["tables"][entry[0]], entry[1], int(rng.choice(ids_N.tolist()))


@mutator(PARTS, 2)
def how_kills_are_written(run: StoredRun, rng: random.Random) -> str | None:
    chosen = _choose(run, rng)
    if chosen is None:
        return None
    part = chosen[1]
    found = read_vectors(part.data)
    match rng.randrange(5):
        case 0:
            told = change_any(rng, found.head)
        case 1:
            vectors = found.head["vectors"] or [[0, 0, 0]]
            one = rng.choice(vectors)
            at = rng.randrange(3)
            one[at] = number(rng, one[at])
            told = f"vector {one}"
        case 2:
            found.ids = found.ids[::-1]
            told = "ids reversed"
        case 3:
            found.index = bytes(rng.choice((0, 1, 255)) for _ in found.index)
            told = "other steps"
        case _:
            found.ids += bytes(rng.choice((1, 4, 8)))
            told = "longer"
    part.data = found.write()
    return told
