"""Changes that a whole run agrees with: names, steps and rows are others in every part of it.

Most leave a good run, which every reader must take, and which the other mutators then lie in.

# N rows of a segment
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.hostile.mutators.deletion_vectors import DeletionVectors, kills_in, write_kills
from tests.hostile.mutators.dense_trees import read_dense
from tests.hostile.mutators.hostile_values import text
from tests.hostile.mutators.registry import PARTS, mutator
from tests.hostile.mutators.segment_bytes import decode_deaths, ids_of, read_segment
from tests.hostile.mutators.stored_run import Part, StoredObject, StoredRun


def _change_kills(run: StoredRun, change: Callable[[DeletionVectors], DeletionVectors]) -> None:
    for _, part in run.parts("kills"):
        part.data = write_kills(change(kills_in(part.data)))


@mutator(PARTS, 2)
def a_table_has_another_name(run: StoredRun, rng: random.Random) -> str | None:
    old = rng.choice(run.body["tables"])
    new = text(rng)
    if "_orig_mod" in old + new:
        return None

    def named(name: Any) -> Any:
        return new if name == old else name

    run.body["tables"] = [named(name) for name in run.body["tables"]]
    for schema in run.body["schemas"]:
        for table in schema:
            table[0] = named(table[0])
            for cut in table[3:]:
                cut[0] = named(cut[0])
    for _, part in run.parts("rows"):
        part.label = named(part.label)
    _change_kills(run, lambda kills: {(named(t), born): rows for (t, born), rows in kills.items()})
    for _, part in run.parts("dense"):
        dense = read_dense(part.data)
        dense.tree = _renamed(dense.tree, old, new)
        part.data = dense.write()
    return f"{old!a} is {new!a:.40}"


def _renamed(node: Any, old: str, new: str) -> Any:
    if isinstance(node, dict):
        return {key: _renamed(value, old, new) for key, value in node.items()}
    if isinstance(node, list):
        return [_renamed(value, old, new) for value in node]
    return new if node == old else node


@mutator(PARTS, 2)
def steps_are_others(run: StoredRun, rng: random.Random) -> str | None:
    """Every step further by as many, or so many times as large; the order stays."""
    add = rng.choice((0, 1, 1000, 1 << 31, (1 << 55) - 64))
    times = rng.choice((1, 2, 1000))
    body = run.body

    def moved(step: Any) -> Any:
        return None if step is None else step * times + add

    if any(isinstance(entry, dict) for entry in body["checkpoints"]):
        return None
    for entry in body["checkpoints"]:
        entry[0], entry[3] = moved(entry[0]), moved(entry[3])
    for segment in body["segments"]:
        segment[1], segment[2] = moved(segment[1]), moved(segment[2])
        segment[10:] = map(moved, segment[10:])
    body["grids"] = [[*map(moved, grid[:3]), grid[3]] for grid in body["grids"]]
    body["rewinds"] = [list(map(moved, rewind)) for rewind in body["rewinds"]]
    body["growth"] = [[moved(step), *rest] for step, *rest in body["growth"]]
    if "shards" in body:
        body["shards"][3] = moved(body["shards"][3])
    if "ranks" in body:
        body["ranks"] = [[moved(step), extents] for step, extents in body["ranks"]]
    _change_kills(
        run,
        lambda kills: {
            (table, moved(born)): {row: moved(died) for row, died in rows.items()}
            for (table, born), rows in kills.items()
        },
    )
    for _, part in run.parts("rows"):
        segment = read_segment(part.data)
        if segment.deaths:
            segment.set_deaths(decode_deaths(segment.deaths, segment.rows) * times + add)
            part.data = segment.write()
    return f"* {times} + {add}"


@mutator(PARTS, 2)
def rows_change_places(run: StoredRun, rng: random.Random) -> str | None:
    """Two segments of one table and birth exchange an id: each row is still there once."""
    found = [
        (one, other)
        for one in run.body["segments"]
        for other in run.body["segments"]
        if one is not other and one[:3] == other[:3]
    ]
    if not found:
        return None
    pair = rng.choice(found)
    parts = [run.part(entry[7]) for entry in pair]
    if parts[0] is None or parts[1] is None or parts[0] is parts[1]:
        return None
    segments = [read_segment(part.data) for part in parts if part is not None]
    ids = [ids_of(segment) for segment in segments]
    a, b = (rng.choice(each.tolist()) for each in ids)
    told = f"{run.body['tables'][pair[0][0]]!a:.20} {a} and {b}"
    for entry, part, segment, ids_N, gone, new in zip(
        pair, parts, segments, ids, (a, b), (b, a), strict=True
    ):
        assert part is not None
        segment.set_ids(np.sort(np.where(ids_N == gone, new, ids_N)))
        if segment.filter:
            segment.set_filter(b"\xff" * len(segment.filter))
        part.data = segment.write()
        entry[3:6] = [segment.rows, segment.first, segment.last]
    return told


@mutator(PARTS, 1)
def a_table_has_another_length(run: StoredRun, rng: random.Random) -> str | None:
    """One row more that no segment holds, or one less than a segment holds, in all schemas."""
    name = rng.choice(run.body["tables"])
    by = rng.choice((-1, 1))
    for schema in run.body["schemas"]:
        for table in schema:
            if table[0] == name:
                table[1] += by
    return f"{name!a:.20} by {by}"


@mutator(PARTS, 1)
def one_more_row(run: StoredRun, rng: random.Random) -> str | None:
    """A table grows by a row that a segment of the base holds: good, and of another model."""
    entries = [e for e in run.body["segments"] if e[3] >= 1]
    entry = rng.choice(entries)
    name = run.body["tables"][entry[0]]
    part = run.part(entry[7])
    lengths = {t[1] for schema in run.body["schemas"] for t in schema if t[0] == name}
    if part is None or len(lengths) != 1:
        return None
    segment = read_segment(part.data)
    if not segment.take(np.array([0]), ids_of(segment)):
        return None
    segment.set_deaths(None)
    segment.set_filter(b"")
    length = lengths.pop()
    segment.set_ids(np.array([length]))
    bases = {e[3] for e in run.body["checkpoints"] if isinstance(e, list)}
    for base in sorted(bases):
        died = min((other for other in bases if other > base), default=None)
        extent = run.add(entry[6], Part("rows", name, segment.write()))
        run.body["segments"].append([entry[0], base, died, 1, length, length, *extent])
    for schema in run.body["schemas"]:
        for table in schema:
            if table[0] == name:
                table[1] += 1
    return f"{name!a:.20} has {length + 1}"


@mutator(PARTS, 1)
def an_object_more(run: StoredRun, rng: random.Random) -> str | None:
    """An object that nothing needs, or a copy of one that something does."""
    name = rng.choice(("objects/c00000001/more.hf", "objects/more.hf", "more", "objects/é.hf"))
    parts = [] if rng.random() < 0.3 else [
        Part(part.kind, part.label, part.data) for part in rng.choice(run.objects).parts
    ]  # fmt: skip
    run.objects.append(StoredObject(name, parts))
    run.body["objects"].append([name, 0])
    if parts and rng.random() < 0.5:
        place = len(run.objects) - 1
        data = parts[0].data
        for entry in run.body["segments"]:
            old = run.part(entry[7])
            if old is not None and old.data == data:
                entry[6:8] = [place, parts[0].key]
    return f"{name!a} of {len(parts)} segments"


@mutator(PARTS, 1.5)
def inner_deaths_of_the_wrong_version(run: StoredRun, rng: random.Random) -> str | None:
    """A row that died in an extracted cell lives on, and the version that replaced it dies."""
    holders = []
    for _, part in run.parts("rows"):
        try:
            segment = read_segment(part.data)
        except (ValueError, struct.error):
            continue
        if segment.deaths:
            holders.append((part, segment))
    if not holders:
        return None
    part, segment = rng.choice(holders)
    deaths_N = decode_deaths(segment.deaths, segment.rows)
    at = rng.randrange(segment.rows)
    row, died = int(ids_of(segment)[at]), int(deaths_N[at])
    deaths_N[at] = 1 << 40
    segment.set_deaths(deaths_N)
    part.data = segment.write()
    told = f"{part.label!a:.20} {row} lives after {died}"
    for grid in run.body.get("grids", []):
        vectors = None if grid[3] is None else run.part(grid[3][1])
        if vectors is not None and grid[0] <= died <= grid[2]:
            kills = kills_in(vectors.data)
            kills.setdefault((part.label, died), {})[row] = max(died + 1, grid[2])
            vectors.data = write_kills(kills)
            told += f", killed as born {died}"
    return told
