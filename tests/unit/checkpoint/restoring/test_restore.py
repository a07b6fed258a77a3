"""Restore: exactly the rows of a step, into the caller's arrays, by any path that reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from holdfast.checkpoint.format.codec import parse_codec
from holdfast.checkpoint.restoring import fetch, restore
from holdfast.kernels.rows import bitmap
from holdfast.storage import Storage, open_storage
from tests.golden.make_format1 import (
    BASE_STEP,
    DELTA_STEP,
    STATE,
    TABLE_ROWS,
    StoredTable,
    delta_ids,
    write_store,
)

FP32 = parse_codec("fp32")
TABLES = [StoredTable(name, FP32, FP32) for name in ("a", "b", "c")]


@pytest.fixture
def made(tmp_path: Path) -> tuple[Storage, dict[tuple[int, str], list[np.ndarray]]]:
    storage = open_storage(str(tmp_path))
    return storage, dict(write_store(storage, TABLES))  # type: ignore[arg-type]


Made = tuple[Storage, dict[tuple[int, str], list[np.ndarray]]]


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("step", [BASE_STEP, DELTA_STEP])
def test_every_row_lands_where_it_belongs(made: Made, step: int, threads: int) -> None:
    storage, rows = made
    catalog = hf.open(storage.url).catalog
    targets = {
        t.name: [np.full((TABLE_ROWS, c.width), 9, np.float32) for c in t.columns]
        for t in catalog.schemas[0]
    }
    changed = {name: bitmap.new(TABLE_ROWS) for name in targets}
    stats = restore.restore_rows(
        storage, catalog, step, targets, threads=threads, changed=changed
    )  # fmt: skip
    for name, columns in targets.items():
        for column, expected in zip(columns, rows[step, name], strict=True):
            assert column.tobytes() == expected.tobytes()
    rows_changed = 0
    for index, table in enumerate(TABLES):
        expected_ids = delta_ids(index).tolist() if step == DELTA_STEP else []
        found = bitmap.ids(changed[table.name], 0, changed[table.name].size * 64)
        assert found.tolist() == expected_ids
        rows_changed += len(expected_ids)
    assert stats.rows == len(TABLES) * TABLE_ROWS + rows_changed


def test_only_the_tables_asked_for_are_read(made: Made) -> None:
    storage, rows = made
    catalog = hf.open(storage.url).catalog
    target = [np.zeros((TABLE_ROWS, 5), np.float32), np.zeros((TABLE_ROWS, 1), np.float32)]
    restore.restore_rows(storage, catalog, DELTA_STEP, {"b": target})
    assert target[0].tobytes() == rows[DELTA_STEP, "b"][0].tobytes()


@pytest.mark.parametrize(
    "chosen", [None, slice(3, 20, 4), range(39, 30, -3), [5, 5, 0, 39], np.array([7], np.uint8), []]
)
def test_some_rows_in_any_order(made: Made, chosen: object) -> None:
    storage, rows = made
    run = hf.open(storage.url)
    for (step, name), columns in rows.items():
        found = run.read(step, name, chosen)  # type: ignore[arg-type]
        ids = np.arange(TABLE_ROWS)[chosen] if isinstance(chosen, slice) else chosen
        ids = np.arange(TABLE_ROWS) if ids is None else np.asarray(list(ids), np.int64)  # type: ignore[call-overload]
        assert np.array_equal(found.ids, ids)
        assert found.weight.tobytes() == columns[0][ids].tobytes()
        assert found.state[STATE].tobytes() == columns[1][ids].tobytes()


def test_ids_alone_are_those_of_the_segment(made: Made) -> None:
    storage, _ = made
    catalog = hf.open(storage.url).catalog
    for entry in catalog.segments:
        ids = restore.read_ids(storage, entry)
        assert (len(ids), ids[0], ids[-1]) == (entry.rows, entry.first, entry.last)


def test_dead_rows_are_those_that_a_later_birth_replaced(made: Made) -> None:
    storage, _ = made
    dead = hf.open(storage.url).dead_rows(DELTA_STEP)
    for index, table in enumerate(TABLES):
        mine = {entry: count for entry, count in dead.items() if entry.table == table.name}
        assert sum(mine.values()) == len(delta_ids(index))
        assert all(count == 0 for entry, count in mine.items() if entry.born == DELTA_STEP)
    assert not any(hf.open(storage.url).dead_rows(BASE_STEP).values())


def test_disagreement_of_catalog_and_object_is_refused(made: Made) -> None:
    import dataclasses

    storage, _ = made
    catalog = hf.open(storage.url).catalog
    for change in ({"offset": 24}, {"bytes": 8}, {"checksum": 1}):
        extent = dataclasses.replace(catalog.segments[0].extent, **change)
        with pytest.raises(hf.CorruptDataError, match="catalog and object disagree"):
            fetch.check_objects(storage, catalog, [extent])
