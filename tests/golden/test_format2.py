"""The bytes of format 2 as released: a grid that every later version reads to the same numbers.

The last tests read the committed files with ``struct`` and ``json`` alone, by the numbers of
docs/format.md: chunks with their filters and deaths, deletion vectors, and which of all these
versions a step is made of.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.storage import Storage, open_storage
from tests.golden.make_format1 import STATE, TABLE_ROWS, WIDTH
from tests.golden.make_format2 import (
    BASES,
    INCREMENTS,
    MEASURED,
    STEPS,
    TABLES,
    write_grid_store,
)
from tests.golden.test_format1 import (
    column_by_the_page,
    footer_of,
    ids_by_the_page,
    read_everything,
    xxh3,
)

HERE = Path(__file__).parent
STORE = HERE / "format2"


@pytest.fixture
def golden() -> Storage:
    return open_storage(str(STORE))


def test_no_golden_file_is_missing(golden: Storage) -> None:
    body = body_now()
    number = body["number"]
    catalogs = {f"catalog/{at:08d}.json" for at in (number - 1, number)}
    assert {item.name for item in golden.list("")} == catalogs | {n for n, _ in body["objects"]}
    kinds = {name.split("/")[2].split("-")[0] for name, _ in body["objects"]}
    assert kinds == {"rows", "dense", "live", "extracted", "kills"}
    assert (HERE / "format2.npz").exists()


def test_golden_grid_is_sound(golden: Storage) -> None:
    report = hf.verify(golden)
    assert report.is_sound, report.damages
    assert hf.open(golden.url).steps == STEPS


def test_golden_rows_read_to_the_same_bits(golden: Storage) -> None:
    found = read_everything(golden)
    with np.load(HERE / "format2.npz", allow_pickle=False) as expected:
        assert set(found) == set(expected.files)
        for name in expected.files:
            assert found[name].tobytes() == expected[name].tobytes(), name


def test_some_rows_are_found_among_all_chunks(golden: Storage) -> None:
    run = hf.open(golden.url)
    with np.load(HERE / "format2.npz", allow_pickle=False) as expected:
        for step in STEPS:
            for table in TABLES:
                for ids in ([0, 2, 4], [39, 1, 20], [13]):
                    found = run.read(step, table.name, ids).weight
                    wanted = expected[f"{step}/{table.name}/weight"][ids]
                    assert found.tobytes() == wanted.tobytes(), (step, table.name, ids)


def test_rows_stored_as_they_are_equal_those_that_were_saved(tmp_path: Path) -> None:
    rows, _ = write_grid_store(open_storage(str(tmp_path)))
    with np.load(HERE / "format2.npz", allow_pickle=False) as expected:
        for step in STEPS:
            weight, state = rows[step]["exact"]
            assert expected[f"{step}/exact/weight"].tobytes() == weight.tobytes()
            assert expected[f"{step}/exact/{STATE}"].tobytes() == state.tobytes()


# By the page


def body_now() -> dict[str, Any]:
    """The newest catalog: a line of three words, a line of JSON."""
    path = max((STORE / "catalog").iterdir())
    line, text, rest = path.read_bytes().split(b"\n")
    assert rest == b""
    word, number, digest = line.split(b" ")
    assert (word, number) == (b"holdfast-catalog", b"2")
    assert digest == f"{xxh3(text):016x}".encode()
    body: dict[str, Any] = json.loads(text)
    assert body["format"] == 2
    return body


def bytes_at(body: dict[str, Any], extent: list[Any]) -> bytes:
    """The bytes of (number of the object, offset, length, checksum)."""
    place, offset, length, sum_ = extent
    data = (STORE / body["objects"][place][0]).read_bytes()[offset : offset + length]
    assert len(data) == length
    assert f"{xxh3(data):016x}" == sum_
    return data


@dataclass(frozen=True)
class Chunk:
    """A segment as its bytes tell it."""

    format: int
    ids: list[int]
    filter: bytes
    deaths: list[int] | None
    columns: list[np.ndarray]


def chunk_by_the_page(data: bytes) -> Chunk:
    magic, format_, encoding, columns, rows, zero = struct.unpack("<4sHBBII", data[:16])
    assert (magic, zero) == (b"HFSG", 0) and format_ in (1, 2)
    first, last, ids_bytes, ids_sum = struct.unpack("<QQQQ", data[16:48])
    heads = [struct.unpack("<8sIIQ", data[48 + 24 * i : 72 + 24 * i]) for i in range(columns)]
    at = 48 + 24 * columns
    filter_bytes = deaths_bytes = filter_sum = deaths_sum = 0
    if format_ == 2:
        filter_bytes, filter_sum, deaths_bytes, deaths_sum = struct.unpack(
            "<QQQQ", data[at : at + 32]
        )
        assert filter_bytes or deaths_bytes
        at += 32
    assert struct.unpack("<Q", data[at : at + 8]) == (xxh3(data[:at]),)
    at += 8

    def part(size: int) -> bytes:
        nonlocal at
        start, at = at, at + -(-size // 8) * 8
        assert not any(data[start + size : at])
        return data[start : start + size]

    filter_ = part(filter_bytes)
    id_data = part(ids_bytes)
    death_data = part(deaths_bytes)
    assert xxh3(id_data) == ids_sum
    if format_ == 2:
        assert (xxh3(filter_), xxh3(death_data)) == (filter_sum, deaths_sum)
    values = []
    for wire, width, zero, size in heads:
        assert zero == 0
        values.append(column_by_the_page(wire, part(size), rows, width))
    assert at == len(data)
    deaths = deaths_by_the_page(death_data, rows) if death_data else None
    ids = ids_by_the_page(encoding, id_data, rows, first, last)
    return Chunk(format_, ids, filter_, deaths, values)


def deaths_by_the_page(data: bytes, rows: int) -> list[int]:
    """Different steps, ascending, then for each row the number of its step."""
    count, zero = struct.unpack("<II", data[:8])
    assert zero == 0 and 0 < count <= rows
    steps = struct.unpack(f"<{count}Q", data[8 : 8 + 8 * count])
    assert list(steps) == sorted(set(steps))
    item = "B" if count <= 256 else "H" if count <= 65536 else "I"
    return [steps[at] for at in struct.unpack(f"<{rows}{item}", data[8 + 8 * count :])]


SALTS = (0x47B6137B, 0x44974D91, 0x8824AD5B, 0xA2B7289D, 0x705495C7, 0x2DF1424B, 0x9EFC4947,
         0x5C6BFB31)  # fmt: skip


def filter_by_the_page(data: bytes, row: int) -> bool:
    """Whether a Bloom filter may hold a row."""
    words = struct.unpack(f"<{len(data) // 4}I", data)
    blocks, mask = len(words) // 8, (1 << 64) - 1
    h = (row + 0x9E3779B97F4A7C15) & mask
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & mask
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & mask
    h ^= h >> 31
    block, key = ((h >> 32) * blocks) >> 32, h & 0xFFFFFFFF
    return all(
        words[8 * block + j] >> (((key * salt) & 0xFFFFFFFF) >> 27) & 1
        for j, salt in enumerate(SALTS)
    )


Killed = dict[tuple[str, int], dict[int, int]]


def kills_by_the_page(data: bytes) -> Killed:
    """Deletion vectors: by table and birth, the step at which each row died."""
    assert data[:8] == b"HFKILLS1"
    size = int.from_bytes(data[8:16], "little")
    head = json.loads(data[16 : 16 + size])
    assert set(head) == {"tables", "steps", "id_bytes", "vectors"}
    count = sum(rows for _, _, rows in head["vectors"])
    id_item = {4: "I", 8: "Q"}[head["id_bytes"]]
    item = "H" if len(head["steps"]) <= 65536 else "I"
    at = 16 + size
    middle = at + count * head["id_bytes"]
    ids = struct.unpack(f"<{count}{id_item}", data[at:middle])
    numbers = struct.unpack(f"<{count}{item}", data[middle:])
    found: Killed = {}
    start = 0
    for table, born, rows in head["vectors"]:
        part = slice(start, start + rows)
        start += rows
        assert list(ids[part]) == sorted(set(ids[part]))
        deaths = [head["steps"][at] for at in numbers[part]]
        found[head["tables"][table], born] = dict(zip(ids[part], deaths, strict=True))
    return found


def test_every_object_is_framed_as_before() -> None:
    body = body_now()
    named = {(place, offset, length, sum_) for *_, place, offset, length, sum_ in (
        entry[:10] for entry in body["segments"]
    )}  # fmt: skip
    for place, (name, size) in enumerate(body["objects"]):
        data = (STORE / name).read_bytes()
        assert len(data) == size
        for kind, label, offset, length, sum_ in footer_of(data):
            word = name.split("/")[2].split("-")[0]
            assert kind == ("rows" if word in ("live", "extracted") else word)
            if (place, offset, length, sum_) in named:
                assert label in body["tables"]
                named.remove((place, offset, length, sum_))
    assert not named


def test_chunks_read_by_the_numbers_of_the_page() -> None:
    body = body_now()
    seen = set()
    for table, born, died, rows, first, last, *extent in body["segments"]:
        label = body["tables"][table]
        chunk = chunk_by_the_page(bytes_at(body, extent[:4]))
        assert (len(chunk.ids), chunk.ids[0], chunk.ids[-1]) == (rows, first, last)
        assert [column.shape for column in chunk.columns] == [(rows, WIDTH), (rows, 1)]
        name = body["objects"][extent[0]][0]
        seen.add((chunk.format, bool(chunk.filter), chunk.deaths is not None))
        if chunk.filter:
            assert all(filter_by_the_page(chunk.filter, row) for row in chunk.ids)
            others = range(10**6, 10**6 + 500)
            assert sum(filter_by_the_page(chunk.filter, row) for row in others) < 50
        if chunk.deaths is not None:
            assert "/extracted-" in name
            assert all(step > born for step in chunk.deaths)
        if born in BASES:
            assert len(extent) == 4 or extent[4] >= born
        else:
            index = [t.name for t in TABLES].index(label)
            assert set(chunk.ids) <= set(INCREMENTS[born][index].tolist())
        assert died is None or died > born
    assert seen == {(1, False, False), (2, True, False), (2, False, True)}


def test_grids_and_measurements_read_by_the_page() -> None:
    body = body_now()
    (first, second) = body["grids"]
    assert first[:3] == [3, 13, 12]
    assert second == [13, None, 15, None]
    kills = kills_by_the_page(bytes_at(body, first[3]))
    assert kills
    for (table, born), rows in kills.items():
        index = [t.name for t in TABLES].index(table)
        for row, died in rows.items():
            assert row in INCREMENTS[died][index]
            assert died > born
    assert body["recoveries"] == [[r.base_bytes, r.base_s, r.delta_bytes, r.delta_s]
                                  for r in MEASURED]  # fmt: skip
    assert [entry[0] for entry in body["checkpoints"]] == list(STEPS)
    assert [item[0] for item in body["growth"]] == [13, 15, 17]
    assert body["rewinds"] == [[9, 11]]


def step_by_the_page(body: dict[str, Any], step: int) -> dict[tuple[str, int], np.ndarray]:
    """A whole step: (table, column) -> rows; base, then chunks masked, then what waits."""
    entry = next(item for item in body["checkpoints"] if item[0] == step)
    base = entry[3]
    through, kills = base, Killed()
    for grid_base, _, grid_through, extent in body["grids"]:
        if grid_base == base:
            through = grid_through
            kills = {} if extent is None else kills_by_the_page(bytes_at(body, extent))
    tables = {}
    for name, rows, columns in body["schemas"][entry[4]]:
        for at, (_, width) in enumerate(columns):
            tables[name, at] = np.full((rows, width), np.nan, np.float32)
    written: dict[tuple[str, int], int] = {}  # row of the masked layer -> birth
    alive = [s for s in body["segments"] if s[1] <= step and (s[2] is None or step < s[2])]
    for table, born, _, _, _, _, *extent in sorted(alive, key=lambda s: s[1]):
        name = body["tables"][table]
        chunk = chunk_by_the_page(bytes_at(body, extent[:4]))
        valid = extent[4] if len(extent) > 4 else 1 << 62
        for at, row in enumerate(chunk.ids):
            if base < born <= through:
                own = None if chunk.deaths is None else chunk.deaths[at]
                killed = kills.get((name, born), {}).get(row)
                is_dead = own is not None and own <= min(step, valid)
                is_dead |= killed is not None and killed <= min(step, through)
                if is_dead:
                    continue
                # Masked, every row is there once: no order is needed.
                assert written.setdefault((name, row), born) == born
            for column, values in enumerate(chunk.columns):
                tables[name, column][row] = values[at]
    return tables


@pytest.mark.parametrize("step", STEPS)
def test_every_step_restores_by_the_numbers_of_the_page(step: int) -> None:
    found = step_by_the_page(body_now(), step)
    with np.load(HERE / "format2.npz", allow_pickle=False) as expected:
        for table in TABLES:
            for column, name in enumerate(("weight", STATE)):
                wanted = expected[f"{step}/{table.name}/{name}"]
                assert len(wanted) == TABLE_ROWS
                assert found[table.name, column].tobytes() == wanted.tobytes(), table.name


def test_the_masks_are_needed() -> None:
    """Otherwise the golden grid would not tell whether a reader applies them."""
    body = body_now()
    without_vectors = json.loads(json.dumps(body))
    without_vectors["grids"][0][3] = None
    with pytest.raises(AssertionError):
        for step in STEPS:
            step_by_the_page(without_vectors, step)
    without_limits = json.loads(json.dumps(body))
    for segment in without_limits["segments"]:
        del segment[10:]
    good, bad = step_by_the_page(body, 12), step_by_the_page(without_limits, 12)
    assert any(good[key].tobytes() != bad[key].tobytes() for key in good)
