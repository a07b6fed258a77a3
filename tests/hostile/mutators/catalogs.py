"""Lies in a catalog: any number, name or list of it, and those that a reader would believe."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

from tests.hostile.mutators.hostile_values import (
    NUMBERS,
    change_any,
    changed_list,
    number,
    places,
    text,
    value,
)
from tests.hostile.mutators.registry import CATALOG, TEXT, mutator
from tests.hostile.mutators.stored_run import Laid, extents_of, hex_of, json_bytes

DTYPES = ("float32", "float16", "bfloat16", "float64", "int8", "")


def steps_of(body: dict[str, Any]) -> tuple[int, ...]:
    """The steps of a catalog."""
    return tuple(e["step"] if isinstance(e, dict) else e[0] for e in body["checkpoints"])


def _pick(rng: random.Random, items: list[Any]) -> Any:
    return rng.choice(items) if items else None


def _is_whole(laid: Laid) -> bool:
    """Whether an earlier mutation left the catalog in its shape."""
    body = laid.body
    try:
        return (
            all(len(s) >= 10 for s in body["segments"])
            and all(isinstance(e, dict) or len(e) == 19 for e in body["checkpoints"])
            and all(len(g) == 4 for g in body.get("grids", ()))
            and all(len(t) >= 3 for schema in body["schemas"] for t in schema)
        )
    except (TypeError, KeyError):
        return False


@mutator(CATALOG, 6)
def any_number_of_the_catalog(laid: Laid, rng: random.Random) -> str | None:
    found = [p for p in places(laid.body) if type(p[0][p[1]]) in (int, float)]
    if not found:
        return None
    within, key = rng.choice(found)
    old = within[key]
    within[key] = number(rng, old)
    return f"[{key!r}] {old} -> {within[key]}"


@mutator(CATALOG, 4)
def any_place_of_the_catalog(laid: Laid, rng: random.Random) -> str | None:
    return change_any(rng, laid.body) if isinstance(laid.body, dict | list) else None


@mutator(CATALOG, 2)
def any_text_of_the_catalog(laid: Laid, rng: random.Random) -> str | None:
    found = [p for p in places(laid.body) if type(p[0][p[1]]) is str]
    if not found:
        return None
    within, key = rng.choice(found)
    old, within[key] = within[key], text(rng)
    return f"{old[:40]!r} -> {within[key][:40]!a}"


@mutator(CATALOG, 3)
def any_list_of_the_catalog(laid: Laid, rng: random.Random) -> str | None:
    found = [p for p in places(laid.body) if isinstance(p[0][p[1]], list) and p[0][p[1]]]
    if not found:
        return None
    within, key = rng.choice(found)
    old = within[key]
    within[key] = changed_list(rng, old)
    return f"[{key!r}] of {len(old)}"


@mutator(CATALOG, 8)
def a_segment_of_the_catalog(laid: Laid, rng: random.Random) -> str | None:
    if not _is_whole(laid) or not laid.body["segments"]:
        return None
    body = laid.body
    segments, steps = body["segments"], steps_of(body)
    one, other = rng.choice(segments), rng.choice(segments)
    known = (*steps, *(step + 1 for step in steps), 0)
    match rng.randrange(14):
        case 0:
            one[1] = rng.choice(known)
            return f"born at {one[1]}"
        case 1:
            one[2] = rng.choice((None, *known))
            return f"died at {one[2]}"
        case 2:
            one[10:] = rng.choice(([], [rng.choice(known)], [0], [1 << 55], [1, 2]))
            return f"deaths through {one[10:]}"
        case 3:
            at = rng.choice((3, 4, 5))
            one[at] = number(rng, one[at])
            return f"[{at}] is {one[at]}"
        case 4:
            one[6:10] = other[6:10]
            return "extent of another"
        case 5:
            one[3:10] = other[3:10]
            return "ids and extent of another"
        case 6:
            segments.append(list(one))
            return "twice"
        case 7:
            segments.append([one[0], rng.choice(known), rng.choice((None, *known)), *one[3:]])
            return f"once more, born {segments[-1][1]} died {segments[-1][2]}"
        case 8:
            segments.remove(one)
            return "gone"
        case 9:
            one[0] = rng.randrange(len(body["tables"]) + 1)
            return f"of table {one[0]}"
        case 10:
            rng.shuffle(segments)
            return "in another order"
        case 11:
            return _inner_extent(laid, rng, one)
        case 12:
            one[2], other[2] = other[2], one[2]
            one[1], other[1] = other[1], one[1]
            return "lives exchanged"
        case _:
            for segment in segments:
                if segment[2] is not None and rng.random() < 0.5:
                    segment[2] = None
            return "some that died live for ever"


def _inner_extent(laid: Laid, rng: random.Random, entry: list[Any]) -> str:
    """Another range of the same object, with the checksum of what lies there."""
    name = laid.body["objects"][entry[6]][0]
    data = laid.objects.get(name, b"")
    start = max(0, entry[7] + rng.choice((-16, -8, 0, 8, 16)))
    size = max(0, entry[8] + rng.choice((-8, 0, 8, 64)))
    entry[7:10] = [start, size, hex_of(data[start : start + size])]
    return f"extent {start}+{size}"


@mutator(CATALOG, 5)
def a_schema(laid: Laid, rng: random.Random) -> str | None:
    if not _is_whole(laid) or not any(laid.body["schemas"]):
        return None
    body = laid.body
    schema = rng.choice([schema for schema in body["schemas"] if schema])
    table = rng.choice(schema)
    columns = table[2]
    column = rng.choice(columns) if columns else ["weight", 4]
    match rng.randrange(12):
        case 0:
            table[1] = number(rng, table[1])
            return f"{table[0]!a} of {table[1]} rows"
        case 1:
            column[1] = number(rng, column[1])
            return f"{table[0]!a} width {column[1]}"
        case 2:
            column[2:] = [rng.choice(DTYPES)]
            return f"{table[0]!a} type {column[2]}"
        case 3:
            decoy = copy.deepcopy(schema)
            for each in decoy:
                each[2] = [[c[0], 1, *c[2:]] for c in each[2][: rng.choice((1, 9))]]
            body["schemas"].append(decoy)
            column[1] = rng.choice((1 << 18, 1 << 20, 1 << 40))
            return f"narrow decoy, {table[0]!a} of width {column[1]}"
        case 4:
            body["schemas"].insert(rng.randrange(2), copy.deepcopy(schema))
            return "a schema twice"
        case 5:
            schema.append(copy.deepcopy(table))
            return f"{table[0]!a} twice in a schema"
        case 6:
            schema.remove(table)
            return f"{table[0]!a} gone from a schema"
        case 7:
            table[3:] = [[table[0], rng.choice((0, 1, 4)), number(rng, column[1])]]
            return f"{table[0]!a} is a cut {table[3]}"
        case 8:
            columns.append([rng.choice((column[0], "sum", "weight", text(rng))), column[1]])
            return f"{table[0]!a} has one more column"
        case 9:
            del columns[-1]
            return f"{table[0]!a} has one column less"
        case 10:
            entry = rng.choice(body["checkpoints"])
            where = "schema" if isinstance(entry, dict) else 4
            entry[where] = rng.randrange(len(body["schemas"]) + 1)
            return f"a checkpoint of schema {entry[where]}"
        case _:
            copied = copy.deepcopy(table)
            copied[0] = text(rng)
            schema.append(copied)
            return f"one more table {copied[0]!a:.40}"


@mutator(CATALOG, 5)
def a_checkpoint(laid: Laid, rng: random.Random) -> str | None:
    entries = laid.body["checkpoints"] if _is_whole(laid) else []
    one, other = _pick(rng, entries), _pick(rng, entries)
    if not isinstance(one, list):
        return None
    steps = steps_of(laid.body)
    match rng.randrange(9):
        case 0:
            one[3] = rng.choice((*steps, 0, one[0] - 1))
            return f"step {one[0]} stands on {one[3]}"
        case 1:
            one[2] = "delta" if one[2] == "base" else "base"
            return f"step {one[0]} is a {one[2]}"
        case 2:
            one[-4:], other[-4:] = other[-4:], one[-4:]
            return f"dense state of {one[0]} and {other[0]} exchanged"
        case 3:
            entries.remove(one)
            return f"step {one[0]} gone"
        case 4:
            one[0] = rng.choice((number(rng, one[0]), 1 << 55, one[0] + 1))
            entries.sort(key=lambda entry: entry[0])
            return f"step {one[0]}"
        case 5:
            again = [one[0] + rng.choice((1, 1000)), *one[1:]]
            entries.append(again)
            entries.sort(key=lambda entry: entry[0])
            return f"step {one[0]} once more as {again[0]}"
        case 6:
            segment = _pick(rng, laid.body["segments"])
            if segment is None:
                return None
            one[-4:] = segment[6:10]
            return "a segment of rows as dense state"
        case 7:
            at = rng.choice((5, 12, 14))
            one[at] = rng.choice((0, -1, -1e300, 1e300, 1e18, 253402300800, 1 << 62, 5e-324))
            return f"[{at}] is {one[at]}"
        case _:
            at = rng.randrange(15)
            one[at] = value(rng, one[at])
            return f"[{at}] is {str(one[at])[:40]!a}"


@mutator(CATALOG, 5)
def a_grid(laid: Laid, rng: random.Random) -> str | None:
    body = laid.body
    if not _is_whole(laid) or "grids" not in body:
        return None
    grids, steps = body["grids"], steps_of(body)
    known = (*steps, *(step + 1 for step in steps), 0, 1 << 55)
    if not grids or rng.random() < 0.1:
        grids.append([rng.choice(known), None, rng.choice(known), None])
        grids.sort(key=lambda grid: grid[0])
        return f"one more: {grids}"[:80]
    one = rng.choice(grids)
    at = rng.randrange(6)
    if at < 3:
        one[at] = rng.choice((None, *known) if at == 1 else known)
        grids.sort(key=lambda grid: grid[0])
        return f"[{at}] is {one[at]}"
    if at == 3:
        one[3] = rng.choice([None, *(g[3] for g in grids)])
        return f"vectors {one[3]}"
    if at == 4:
        grids.remove(one)
        return f"of rollup {one[0]} gone"
    one[2] = rng.choice(steps)
    one[1] = rng.choice((None, one[2] + 1))
    return f"{one[:3]}"


@mutator(CATALOG, 2)
def what_else_a_catalog_says(laid: Laid, rng: random.Random) -> str | None:
    body = laid.body
    key = rng.choice(("rewinds", "growth", "recoveries", "shards", "ranks", "restores", "number"))
    steps = steps_of(body) if _is_whole(laid) else ()
    numbers = (*steps, *NUMBERS)
    match key:
        case "rewinds":
            body[key] = [
                [rng.choice(numbers), rng.choice(numbers)] for _ in range(rng.randrange(4))
            ]
        case "growth":
            body[key] = [[rng.choice(numbers), rng.choice(numbers), rng.choice((0.0, -1.0, 1e300))]
                         for _ in range(rng.randrange(4))]  # fmt: skip
        case "recoveries":
            body[key] = [[rng.choice(numbers), 1.0, rng.choice(numbers), -1e300]
                         for _ in range(rng.randrange(4))]  # fmt: skip
        case "shards":
            few = (0, 1, 2, 3, 4, 5, 7, 1 << 15, 1 << 16)
            body[key] = [rng.choice(few), rng.choice(few), rng.choice((0, 1, 2)),
                         rng.choice(numbers), *rng.choice(([], [2], [3]))]  # fmt: skip
        case "ranks":
            extents = [list(v[at : at + 4]) for v, at in extents_of(body)] if steps else []
            body[key] = [[rng.choice(numbers), rng.choices(extents, k=2) if extents else []]]
        case _:
            body[key] = number(rng, body.get(key))
    return f"{key} is {str(body[key])[:60]}"


@mutator(CATALOG, 2)
def an_object_of_the_catalog(laid: Laid, rng: random.Random) -> str | None:
    objects = laid.body["objects"]
    one, other = _pick(rng, objects), _pick(rng, objects)
    if one is None or not isinstance(one, list) or len(one) != 2:
        return None
    match rng.randrange(6):
        case 0:
            one[1] = number(rng, one[1])
            return f"of {one[1]} bytes"
        case 1:
            one[0] = text(rng)
            return f"called {one[0]!a:.40}"
        case 2:
            one[0] = other[0]
            return "has another's name"
        case 3:
            objects.append(list(one))
            return "twice"
        case 4:
            objects.append([rng.choice(("objects/c00000001/no.hf", laid.catalog, text(rng))), 99])
            return f"one more: {objects[-1]!a:.60}"
        case _:
            laid.objects.pop(one[0], None)
            return f"{one[0]} is not there"


@mutator(CATALOG, 0.25)
def many(laid: Laid, rng: random.Random) -> str | None:
    """A small catalog that asks for much work."""
    if not _is_whole(laid) or not laid.body["segments"]:
        return None
    body = laid.body
    count = rng.choice((20, 300, 3000))
    match rng.randrange(5):
        case 0:
            one = rng.choice(body["segments"])
            body["segments"] += [list(one) for _ in range(count)]
            return f"{count} segments share an extent"
        case 1:
            one = rng.choice(body["segments"])
            last = steps_of(body)[-1]
            body["segments"] += [[one[0], last, None, *one[3:]] for _ in range(count)]
            return f"{count} segments of the last step share an extent"
        case 2:
            entry = body["checkpoints"][-1]
            if isinstance(entry, list):
                body["checkpoints"] += [[entry[0] + i, *entry[1:]] for i in range(1, count)]
            return f"{count} checkpoints share their dense state"
        case 3:
            body["schemas"] += copy.deepcopy(body["schemas"][-1:]) * min(count, 300)
            return f"{count} schemas"
        case _:
            body["grids"] = [[i, i + 1, i, None] for i in range(count)]
            return f"{count} grids"


@mutator(TEXT, 1)
def how_the_catalog_is_written(laid: Laid, rng: random.Random) -> str | None:
    data = laid.text or json_bytes(laid.body)
    match rng.randrange(7):
        case 0:
            laid.format = rng.choice((0, 1, 2, 3, 4, 5, 6, "02", "x", 1 << 40))
            return f"format {laid.format}"
        case 1:
            laid.format = rng.choice((1, 2, 3, 4, 5))
            if isinstance(laid.body, dict):
                laid.body["format"] = laid.format
                laid.text = json_bytes(laid.body)
            return f"format {laid.format} throughout"
        case 2:
            at = rng.randrange(len(data))
            laid.text = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
            return f"byte {at}"
        case 3:
            at = rng.randrange(len(data))
            laid.text = data[:at]
            return f"cut at {at}"
        case 4:
            laid.text = data[:-1] + b',"restores":1}'
            return "a key twice"
        case 5:
            laid.text = json.dumps(laid.body, indent=1, ensure_ascii=False).encode(
                "utf-8", "surrogatepass"
            ).replace(b"\n", b" ")  # fmt: skip
            return "with spaces and raw characters"
        case _:
            number_ = rng.choice((b"1e999", b"-1e5", b"1" + b"0" * 500, b"00", b"0x1", b"1.0"))
            found = [i for i in range(len(data)) if data[i : i + 1] == b","]
            at = rng.choice(found)
            end = data.find(b",", at + 1)
            laid.text = data[: at + 1] + number_ + data[end:]
            return f"{number_[:12]!r} at {at}"


@mutator(TEXT, 0.5)
def other_catalogs(laid: Laid, rng: random.Random) -> str | None:
    old = laid.catalog
    match rng.randrange(4):
        case 0:
            laid.others["catalog/00000000.json"] = b"nonsense"
            return "an older one is damaged"
        case 1:
            laid.others[rng.choice(("catalog/x.json", "catalog/1.json", "catalog/.json",
                                    "catalog/00000099.json.bak"))] = b"nonsense"  # fmt: skip
            return "a foreign file"
        case 2:
            laid.catalog = rng.choice(("catalog/00000001.json", "catalog/99999999.json",
                                       "catalog/100000000.json",
                                       "catalog/00000000000000000000000000009.json"))  # fmt: skip
            return f"{old} is called {laid.catalog}"
        case _:
            laid.others["catalog/99999999.json"] = b"holdfast-catalog 2 0\n{}\n"
            return "a newer one is damaged"
