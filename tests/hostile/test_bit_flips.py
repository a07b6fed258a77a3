"""Damaged files: verify names them, and a restore raises or is exact; wrong rows never."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from holdfast.checkpoint.format.codec import parse_codec
from holdfast.checkpoint.restoring.restore import restore_rows
from holdfast.checkpoint.store import catalogs
from holdfast.storage import open_storage
from tests.golden.make_format1 import DELTA_STEP, StoredTable, write_store
from tests.golden.make_format2 import TABLES as GRID_TABLES
from tests.golden.make_format2 import write_grid_store

SEED = 20240612
STEPS = (3, 7, 9, 10, 12)  # of the grid
TABLES = [
    StoredTable("exact", parse_codec("fp32"), parse_codec("fp32")),
    StoredTable("coded", parse_codec("adaptive4"), parse_codec("log8")),
]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write_store(open_storage(str(tmp_path / "run")), TABLES)
    return tmp_path / "run"


def read_last(store: Path) -> dict[str, bytes]:
    """Everything a restore of the last step reads."""
    run = hf.open(store)
    found = {"dense": repr(run.dense(DELTA_STEP)).encode()}
    targets = {
        schema.name: [np.full((schema.rows, c.width), 7, np.float32) for c in schema.columns]
        for schema in run.tables(DELTA_STEP)
    }
    restore_rows(run.storage, run.catalog, DELTA_STEP, targets, threads=1)
    for name, columns in targets.items():
        found[name] = b"".join(column.tobytes() for column in columns)
    return found


def files(store: Path) -> dict[str, bytes]:
    """The files the last catalog stands for, itself included: name -> bytes."""
    storage = open_storage(str(store))
    names = [name for name, _ in catalogs.load(storage, 2).objects]
    return {name: storage.get(name) for name in [catalogs.name_of(2), *names]}


def assert_found(store: Path, name: str, expected: dict[str, bytes], context: str) -> None:
    report = hf.verify(open_storage(str(store)))
    assert not report.is_sound, context
    assert any(damage.where.startswith(name) for damage in report.damages), context
    try:
        found = read_last(store)
    except (hf.CorruptDataError, hf.NotFoundError) as error:
        damaged = {damage.where.partition("[")[0] for damage in report.damages}
        assert any(name in str(error) for name in damaged), f"{context}: {error} names no file"
    else:
        assert found == expected, context


def each_damage(store: Path, damages: Callable[[bytes], list[tuple[str, bytes]]]) -> int:
    expected = read_last(store)
    assert hf.verify(open_storage(str(store))).is_sound
    tried = 0
    for name, good in files(store).items():
        for what, bad in damages(good):
            (store / name).write_bytes(bad)
            assert_found(store, name, expected, f"seed {SEED}: {name} {what}")
            tried += 1
        (store / name).write_bytes(good)
    assert hf.verify(open_storage(str(store))).is_sound
    return tried


def test_any_flipped_bit_is_found_and_never_restored(store: Path) -> None:
    chance = random.Random(SEED)

    def flips(good: bytes) -> list[tuple[str, bytes]]:
        found = []
        for at in range(len(good)):
            bit = chance.randrange(8)
            bad = bytearray(good)
            bad[at] ^= 1 << bit
            found.append((f"byte {at} bit {bit}", bytes(bad)))
        return found

    assert each_damage(store, flips) == sum(map(len, files(store).values()))


def test_any_lost_or_added_end_is_found_and_never_restored(store: Path) -> None:
    def cuts(good: bytes) -> list[tuple[str, bytes]]:
        lengths = sorted({0, 1, 8, 15, 16, 17, len(good) - 1, *range(0, len(good), 41)})
        shorter = [(f"cut to {length}", good[:length]) for length in lengths]
        longer = [(f"with {end!r} added", good + end) for end in (b"\0", b"\n", good[-24:], good)]
        middle = len(good) // 2
        holes = [("without a middle byte", good[:middle] + good[middle + 1 :])]
        zeros = [("with a zeroed sector", good[:middle] + bytes(64) + good[middle + 64 :])]
        return shorter + longer + holes + zeros

    each_damage(store, cuts)


def test_swapped_missing_and_foreign_objects_are_found(store: Path, tmp_path: Path) -> None:
    expected = read_last(store)
    names = [name for name in files(store) if name.startswith("objects/")]
    good = {name: (store / name).read_bytes() for name in names}
    for name, other in zip(names, reversed(names), strict=True):
        (store / name).write_bytes(good[other])
    for name in names:
        assert_found(store, name, expected, "swapped")
        (store / name).write_bytes(good[name])
    for name in names:
        (store / name).unlink()
        assert_found(store, name, expected, "missing")
        (store / name).mkdir()
        assert_found(store, name, expected, "a folder in its place")
        (store / name).rmdir()
        (store / name).symlink_to("/dev/zero")
        assert_found(store, name, expected, "a link to an endless file in its place")
        (store / name).unlink()
        (store / name).write_bytes(good[name])
    other_tables = [StoredTable("exact", TABLES[0].weights, TABLES[0].state), TABLES[1]]
    write_store(open_storage(str(tmp_path / "other")), other_tables[::-1], run="other")
    for name in names:
        shutil.copy(tmp_path / "other" / name, store / name)
        assert_found(store, name, expected, "another run's")
        (store / name).write_bytes(good[name])
    assert read_last(store) == expected


def test_verify_names_every_damage_in_one_pass(store: Path) -> None:
    names = [name for name in files(store) if name.startswith("objects/")]
    for name in names:
        with (store / name).open("r+b") as out:
            out.seek(40)
            out.write(b"\xff\xff\xff\xff")
    (store / "catalog/00000001.json").write_bytes(b"")
    report = hf.verify(open_storage(str(store)))
    for name in [*names, "catalog/00000001.json"]:
        assert any(damage.where.startswith(name) for damage in report.damages), name
    hurt = {step for damage in report.damages for step in damage.steps}
    assert hurt == {3, 5}


# A grid


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    write_grid_store(open_storage(str(tmp_path / "grid")), GRID_TABLES[:2], until=12)
    return tmp_path / "grid"


def read_step(store: Path, step: int) -> dict[str, bytes]:
    """The rows a restore of a step gives."""
    run = hf.open(store)
    targets = {
        schema.name: [np.full((schema.rows, c.width), 7, np.float32) for c in schema.columns]
        for schema in run.tables(step)
    }
    restore_rows(run.storage, run.catalog, step, targets, threads=1)
    return {name: b"".join(c.tobytes() for c in columns) for name, columns in targets.items()}


def grid_files(store: Path) -> dict[str, bytes]:
    """The newest catalog, and the objects that only a run with a grid has."""
    catalog = hf.open(store).catalog
    names = [name for name, _ in catalog.objects]
    kinds = {
        kind: [n for n in names if f"/{kind}-" in n] for kind in ("live", "extracted", "kills")
    }
    assert all(kinds.values()), kinds
    wanted = [
        catalogs.name_of(catalog.number),
        *(name for found in kinds.values() for name in found),
    ]
    return {name: (store / name).read_bytes() for name in wanted}


def test_any_flipped_bit_of_a_grid_is_found_and_never_restored(grid: Path) -> None:
    chance = random.Random(SEED)
    expected = {step: read_step(grid, step) for step in STEPS}
    storage = open_storage(str(grid))
    assert hf.verify(storage).is_sound
    for name, good in grid_files(grid).items():
        # A catalog is one checksummed text: some bytes of it, but every byte of an object.
        for at in range(0, len(good), 11 if name.startswith("catalog/") else 1):
            bad = bytearray(good)
            bad[at] ^= 1 << chance.randrange(8)
            (grid / name).write_bytes(bad)
            context = f"seed {SEED}: {name} byte {at}"
            damages = hf.verify(storage).damages
            assert any(damage.where.startswith(name) for damage in damages), context
            if chance.random() < 0.7:  # every damage is found; whether it is restored, often enough
                continue
            step = chance.choice(STEPS)
            try:
                found = read_step(grid, step)
            except hf.CorruptDataError as error:
                assert name in str(error), context
            else:
                assert found == expected[step], context
        (grid / name).write_bytes(good)
    assert hf.verify(storage).is_sound


def test_verify_tells_which_steps_a_damaged_object_of_a_grid_costs(grid: Path) -> None:
    for name, good in grid_files(grid).items():
        if not name.startswith("objects/"):
            continue
        bad = bytearray(good)
        bad[20] ^= 1
        (grid / name).write_bytes(bad)
        lost = set()
        for step in STEPS:
            try:
                read_step(grid, step)
            except hf.CorruptDataError:
                lost.add(step)
        assert lost, name
        told = {step for d in hf.verify(open_storage(str(grid))).damages for step in d.steps}
        assert told >= lost, name
        (grid / name).write_bytes(good)
