"""Write the golden store of format 1: every codec, every id encoding, a base and a delta.

    python -m tests.golden.make_format1

Run once per format, by hand: the committed bytes are what later versions must still read.
``write_store`` also serves other tests that need a small store without a model.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from holdfast.checkpoint.format import tree
from holdfast.checkpoint.format.catalog import BASE, DELTA, Catalog, CheckpointEntry, SegmentEntry
from holdfast.checkpoint.format.checksum import checksum
from holdfast.checkpoint.format.codec import CODEC_NAMES, Codec, parse_codec
from holdfast.checkpoint.format.object import DENSE, ROWS, ObjectBuilder, object_name
from holdfast.checkpoint.format.segment import encode_segment
from holdfast.checkpoint.store import catalogs
from holdfast.model.schema import Column, TableSchema
from holdfast.storage import Storage, open_storage

HERE = Path(__file__).parent
BASE_STEP, DELTA_STEP = 3, 5
SPLIT = 13  # a base is stored in two segments: rows below, and from here on
TABLE_ROWS = 40
WIDTH = 5
STATE = "sum"

# N rows, D floats of one column
Rows = Mapping[tuple[int, str], Sequence[np.ndarray]]


@dataclass(frozen=True, slots=True)
class StoredTable:
    """A table of the store: the codecs of its weights and of its row state."""

    name: str
    weights: Codec
    state: Codec


def every_codec() -> list[StoredTable]:
    """A table per codec, with row state coded as weights of that width usually have it."""
    found = []
    for name in CODEC_NAMES:
        codec = parse_codec(name)
        if codec.block_rows:
            codec = Codec(codec.kind, codec.bits, block_rows=4, iterations=codec.iterations)
        state = "fp32" if codec.is_lossless else (f"log{min(8, codec.bits)}")
        found.append(StoredTable(name, codec, parse_codec(state)))
    return found


def make_rows(seed: int, count: int) -> list[np.ndarray]:
    """Weights of many sizes, some that no lossy codec can hold; and state, never negative."""
    rng = np.random.default_rng(seed)
    weight_ND = rng.normal(0, 1, (count, WIDTH)) * np.exp(rng.normal(-2, 1, (count, 1)))
    state_N1 = rng.exponential(1, (count, 1)) * np.exp(rng.normal(-4, 3, (count, 1)))
    columns = [weight_ND.astype(np.float32), state_N1.astype(np.float32)]
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-30, 3e38]
    columns[0][1, :] = 0.0
    columns[0][2, 0] = edges[seed % len(edges)]
    columns[0][3, :] = 0.25
    columns[1][0, 0] = 0.0
    return columns


def delta_ids(index: int) -> np.ndarray:
    """Which rows a table's delta holds: a range, a sparse set or a dense one."""
    shapes = (np.arange(6, 15), np.array([0, 1, 7, 39]), np.flatnonzero(np.arange(40) % 3 != 1))
    return shapes[index % 3].astype(np.int64)


def write_store(storage: Storage, tables: Sequence[StoredTable], *, run: str = "golden") -> Rows:
    """Commit a base and a delta; the rows that went in, by step and table, as of that step."""
    schemas = tuple(
        TableSchema(table.name, TABLE_ROWS, (Column("weight", WIDTH), Column(STATE, 1)))
        for table in tables
    )
    catalog = Catalog(run=run, number=0, writer=run, schemas=(schemas,))
    rows: dict[tuple[int, str], Sequence[np.ndarray]] = {}
    for number, step in ((1, BASE_STEP), (2, DELTA_STEP)):
        name = object_name(number, ROWS, f"{step:08x}")
        builder = ObjectBuilder(name, storage.create(name))
        segments = []
        for index, table in enumerate(tables):
            if step == BASE_STEP:
                whole = make_rows(index, TABLE_ROWS)
                parts = [np.arange(SPLIT), np.arange(SPLIT, TABLE_ROWS)]
            else:
                parts = [delta_ids(index)]
                whole = [column.copy() for column in rows[BASE_STEP, table.name]]
                for column, news in zip(whole, make_rows(index + 100, len(parts[0])), strict=True):
                    column[parts[0]] = news
            rows[step, table.name] = whole
            for ids_N in parts:
                encoded = encode_segment(
                    ids_N, [column[ids_N] for column in whole], [table.weights, table.state]
                )
                extent = builder.append(ROWS, table.name, encoded.buffers, encoded.checksum)
                segments.append(
                    SegmentEntry(
                        table.name, step, None, encoded.rows, encoded.first, encoded.last, extent
                    )
                )
        structure, tensors = tree.flatten(
            {"model": {"w": torch.arange(3.0) + step}, "extras": {"step": step, "name": "é"}}
        )
        data = tree.to_bytes(structure, tensors)
        dense = builder.append(DENSE, "dense", (data,), checksum(data))
        size = builder.close()
        entry = CheckpointEntry(
            step=step,
            ordinal=number - 1,
            kind=BASE if step == BASE_STEP else DELTA,
            base=BASE_STEP,
            schema=0,
            time=1.5e9 + step,
            codec="fp32",
            state_codec="auto",
            rows=sum(s.rows for s in segments),
            row_bytes=sum(s.extent.bytes for s in segments),
            bytes=size,
            full_bytes=len(tables) * TABLE_ROWS * (WIDTH + 1) * 4,
            stall_s=0.0,
            reason="golden",
            dense=dense,
        )
        catalog = catalog.with_checkpoint(
            entry, tuple(segments), ((name, size),), replaces_since=BASE_STEP
        )
        catalog = Catalog(**{f: getattr(catalog, f) for f in catalog.__dataclass_fields__}
                          | {"number": number})  # fmt: skip
        catalogs.commit(storage, catalog)
    return rows


def main() -> None:
    """Write the store and, as read back now, what it holds."""
    from tests.golden.test_format1 import read_everything

    target = HERE / "format1"
    if target.exists():
        sys.exit(f"{target} exists: golden bytes are never rewritten")
    storage = open_storage(str(target))
    write_store(storage, every_codec())
    (target / ".tmp").rmdir()
    np.savez_compressed(HERE / "format1.npz", **read_everything(storage))


if __name__ == "__main__":
    main()
