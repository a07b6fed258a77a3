"""Write the golden store of format 2: a small grid, as extraction leaves it.

    python -m tests.golden.make_format2

Two grids; chunks with filters and with deaths of their own, deletion vectors, bundles, a step that
was dropped, training that went back, increments that wait. Run once per format, by hand: the
committed bytes are what later versions must still read. ``write_grid_store`` also serves other
tests that need a small grid without a model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from holdfast import events
from holdfast.checkpoint.format import tree
from holdfast.checkpoint.format.catalog import (
    BASE,
    DELTA,
    Catalog,
    CheckpointEntry,
    GridEntry,
    RestoreTiming,
    SegmentEntry,
)
from holdfast.checkpoint.format.checksum import checksum
from holdfast.checkpoint.format.codec import Codec, parse_codec
from holdfast.checkpoint.format.object import DENSE, ROWS
from holdfast.checkpoint.format.segment import encode_segment
from holdfast.checkpoint.grid.chunk_cache import PartCache
from holdfast.checkpoint.grid.decide import Extract
from holdfast.checkpoint.grid.extract import Round, RoundStats
from holdfast.checkpoint.grid.round_plan import plan_round
from holdfast.checkpoint.store.writer import RunWriter
from holdfast.model.schema import Column, TableSchema
from holdfast.storage import Storage, open_storage
from tests.golden.make_format1 import STATE, TABLE_ROWS, WIDTH, StoredTable, make_rows

HERE = Path(__file__).parent
EVEN, ODD = np.arange(0, 40, 2), np.arange(1, 40, 2)
BOOKS = Codec(parse_codec("kmeans2-block").kind, 2, block_rows=4, iterations=4)
TABLES = (
    StoredTable("exact", parse_codec("fp32"), parse_codec("fp32")),
    StoredTable("coded", parse_codec("asym4"), parse_codec("log8")),
    StoredTable("books", BOOKS, parse_codec("bf16")),
)
BASES = (3, 13)
ROUNDS_AFTER = (7, 11, 10, 12, 15)  # training went back from 11 to 9, and on to 10
DROPPED = 5
# Which rows of each table the increments hold, in the order in which they were saved.
INCREMENTS: dict[int, tuple[np.ndarray, ...]] = {
    5: (EVEN, ODD, np.arange(4, 30)),
    7: (EVEN[:2], ODD[:15], np.array([4, 6, 8])),
    9: (EVEN[2:4], ODD[10:18], np.array([9, 11, 38])),
    11: (EVEN[4:], ODD[17:], np.arange(4, 30, 3)),
    10: (np.array([1, 2, 39]), ODD[:4], np.array([], np.int64)),
    12: (np.array([3]), ODD[18:], np.array([30, 31])),
    15: (EVEN, ODD[::2], np.arange(10, 20)),
    17: (EVEN[::3], ODD[::3], np.arange(12, 15)),
}
STEPS = (3, 7, 9, 10, 12, 13, 15, 17)
MEASURED = (RestoreTiming(5000, 0.5, 2000, 0.25),)

# N rows, D floats of one column
Tables = Mapping[str, Sequence[np.ndarray]]


class _Tokens:
    """Names in a row instead of random ones."""

    def __init__(self) -> None:
        self._next = itertools.count(1)

    def token_hex(self, size: int) -> str:
        return f"{next(self._next):0{2 * size}x}"


@contextlib.contextmanager
def fixed_names() -> Iterator[None]:
    """Objects written inside have the same names every time."""
    with mock.patch("holdfast.checkpoint.store.writer.secrets", _Tokens()):
        yield


class _GridStore:
    """Writes checkpoints as a ``Save`` does, and rounds as an ``Extractor`` does."""

    def __init__(self, storage: Storage, tables: Sequence[StoredTable]) -> None:
        self._tables = tables
        self._schemas = tuple(
            TableSchema(table.name, TABLE_ROWS, (Column("weight", WIDTH), Column(STATE, 1)))
            for table in tables
        )
        self.writer = RunWriter(storage, None, log=events.EventLog(), clock=lambda: 0.0)
        self.rows: dict[int, Tables] = {}
        self.rounds: list[RoundStats] = []

    def save(self, step: int, before: int | None, ids: Sequence[np.ndarray] | None) -> None:
        """One checkpoint: a base, or an increment on what ``before`` was."""
        if ids is None:
            whole = {t.name: make_rows(step + i, TABLE_ROWS) for i, t in enumerate(self._tables)}
        else:
            assert before is not None
            whole = {name: [c.copy() for c in rows] for name, rows in self.rows[before].items()}
            for index, (table, ids_N) in enumerate(zip(self._tables, ids, strict=True)):
                news = make_rows(step + index, TABLE_ROWS)
                for column, values in zip(whole[table.name], news, strict=True):
                    column[ids_N] = values[ids_N]
        self.rows[step] = whole
        parts: dict[str, list[np.ndarray]] = {}
        for index, table in enumerate(self._tables):
            all_ids = np.array_split(np.arange(TABLE_ROWS), 2) if ids is None else [ids[index]]
            parts[table.name] = [ids_N for ids_N in all_ids if len(ids_N)]
        objects: list[tuple[str, int]] = []
        segments = []
        with self.writer.new_object(ROWS) as builder:
            for table in self._tables:
                for ids_N in parts[table.name]:
                    columns = [column[ids_N] for column in whole[table.name]]
                    codecs = [table.weights, table.state]
                    encoded = encode_segment(ids_N, columns, codecs, has_filter=True)
                    extent = builder.append(ROWS, table.name, encoded.buffers, encoded.checksum)
                    bounds = (encoded.rows, encoded.first, encoded.last)
                    segments.append(SegmentEntry(table.name, step, None, *bounds, extent))
            objects.append((builder.name, builder.close()))
        with self.writer.new_object(DENSE) as builder:
            structure, tensors = tree.flatten({"model": {"w": torch.arange(3.0) + step}})
            data = tree.to_bytes(structure, tensors)
            dense = builder.append(DENSE, "dense", (data,), checksum(data))
            objects.append((builder.name, builder.close()))

        def change(now: Catalog) -> Catalog:
            catalog = now if before is None else now.rewound(before)
            last = catalog.last
            base = step if ids is None or last is None else last.base
            entry = CheckpointEntry(
                step=step,
                ordinal=0 if last is None else last.ordinal + 1,
                kind=BASE if ids is None else DELTA,
                base=base,
                schema=0,
                time=1.5e9 + step,
                codec="fp32",
                state_codec="auto",
                rows=sum(s.rows for s in segments),
                row_bytes=sum(s.extent.bytes for s in segments),
                bytes=sum(size for _, size in objects),
                full_bytes=len(self._tables) * TABLE_ROWS * (WIDTH + 1) * 4,
                stall_s=0.25,
                reason="golden",
                dense=dense,
                build_s=0.5,
            )
            catalog = dataclasses.replace(catalog, schemas=(self._schemas,))
            catalog = catalog.with_checkpoint(
                entry, tuple(segments), tuple(objects), replaces_since=None
            )
            if catalog.grid_of(entry) is None:
                catalog = catalog.with_grid(GridEntry(base, None, base, None))
            return catalog.keeping(frozenset(catalog.steps) - ({DROPPED} if step > 7 else set()))

        self.writer.update(change)

    def extract(self, rules: Extract) -> None:
        """One round."""
        plan = plan_round(self.writer.catalog)
        assert plan is not None
        found = Round(self.writer, plan, rules, cache=PartCache(0), pause=lambda: None).run()
        assert found is not None
        self.rounds.append(found)


def write_grid_store(
    storage: Storage,
    tables: Sequence[StoredTable] = TABLES,
    *,
    rules: Extract = Extract(threshold=1.0),  # noqa: B008 - frozen
    until: int = 17,
) -> tuple[dict[int, Tables], list[RoundStats]]:
    """Write the story until a step; the rows that went in by step, and what the rounds did."""
    with fixed_names():
        store = _GridStore(storage, tables)
        order = [3, 5, 7, 9, 11, 10, 12, 13, 15, 17]
        before: int | None = None
        for step in order[: order.index(until) + 1]:
            if step == 10:
                before = 9
            ids = None if step in BASES else INCREMENTS[step][: len(tables)]
            store.save(step, before, ids)
            before = step
            if step in ROUNDS_AFTER:
                store.extract(rules)
            if step == 9:
                store.writer.note(lambda now: dataclasses.replace(now, restore_timings=MEASURED))
    return store.rows, store.rounds


def main() -> None:
    """Write the store and, as read back now, what it holds."""
    from tests.golden.test_format1 import read_everything

    target = HERE / "format2"
    if target.exists():
        sys.exit(f"{target} exists: golden bytes are never rewritten")
    storage = open_storage(str(target))
    write_grid_store(storage)
    (target / ".tmp").rmdir()
    np.savez_compressed(HERE / "format2.npz", **read_everything(storage))


if __name__ == "__main__":
    main()
