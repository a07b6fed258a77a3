"""Write runs that lie, with every checksum right: segments, deletion vectors and a catalog at will.

Nothing is checked here: a test says what the run claims, and the claims are written down.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from holdfast.checkpoint.format import deletion_vectors, tree
from holdfast.checkpoint.format.catalog import (
    BASE,
    DELTA,
    Catalog,
    CheckpointEntry,
    GridEntry,
    SegmentEntry,
    Sharding,
)
from holdfast.checkpoint.format.checksum import checksum
from holdfast.checkpoint.format.codec import parse_codec
from holdfast.checkpoint.format.object import (
    DELETION_VECTORS,
    DENSE,
    ROWS,
    Extent,
    ObjectBuilder,
    object_name,
)
from holdfast.checkpoint.format.segment import Segment, encode_segment
from holdfast.checkpoint.store import catalogs
from holdfast.model.schema import Column, TableSchema
from holdfast.storage import open_storage

TABLE, WIDTH = "items.weight", 4
Kills = Mapping[tuple[str, int], tuple[Sequence[int], Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Held:
    """A segment: born, died, its row ids, and the step each row died at, if it says so itself."""

    born: int
    died: int | None
    ids: Sequence[int]
    deaths: Sequence[int] | None = None


def value(row: int, born: int) -> float:
    """What every float of a row says that was born at a step."""
    return row + born / 64


def rows_at(ids: Sequence[int], born: int) -> np.ndarray:
    """Rows of one birth."""
    return np.array([[value(row, born)] * WIDTH for row in ids], np.float32)


def forge(
    path: Path,
    rows: int,
    segments: Sequence[Held],
    steps: Mapping[int, int],
    *,
    grid: tuple[int, int] | None = None,
    kills: Kills | None = None,
    older_grids: Mapping[tuple[int, int, int], Kills] | None = None,
    sharding: Sharding | None = None,
) -> Catalog:
    """Write a run of one table; ``steps``: the base of each checkpoint; ``grid``: rollup, through.

    ``kills``: by table and birth, row ids and deaths; ``older_grids``: those of grids that ended,
    by rollup, end and through. The catalog that was written is returned.
    """
    storage = open_storage(str(path))
    schema = TableSchema(TABLE, rows, (Column("weight", WIDTH),))
    objects: list[tuple[str, int]] = []
    entries: list[SegmentEntry] = []
    grids: list[GridEntry] = []
    with storage.create(object_name(1, ROWS, "aa")) as out:
        builder = ObjectBuilder(object_name(1, ROWS, "aa"), out)
        for held in segments:
            ids_N = np.array(held.ids, np.int64)
            columns = [rows_at(held.ids, held.born)]
            encoded = encode_segment(ids_N, columns, [parse_codec("fp32")])
            if held.deaths is not None:
                data = b"".join(bytes(memoryview(part)) for part in encoded.buffers)
                encoded = Segment(memoryview(data), where="here").take(
                    np.arange(len(ids_N)), deaths_K=np.array(held.deaths, np.int64)
                )
            extent = builder.append(ROWS, TABLE, encoded.buffers, encoded.checksum)
            bounds = (encoded.rows, encoded.first, encoded.last)
            entries.append(SegmentEntry(TABLE, held.born, held.died, *bounds, extent))
        for bounds, found in (older_grids or {}).items():
            grids.append(GridEntry(*bounds, _append_kills(builder, found)))
        if grid is not None:
            extent_ = None if kills is None else _append_kills(builder, kills)
            grids.append(GridEntry(grid[0], None, grid[1], extent_))
        objects.append((builder.name, builder.close()))
    checkpoints = []
    for ordinal, (step, base) in enumerate(steps.items()):
        name = object_name(1, DENSE, f"d{step}")
        with storage.create(name) as out:
            builder = ObjectBuilder(name, out)
            state = {
                "model": {"bias": torch.full((3,), float(step))},
                "optimizers": {}, "parameters": {}, "row_state_shapes": {TABLE: {}},
                "table_state": {}, "aliases": {}, "rng": None, "extras": None,
            }  # fmt: skip
            data = tree.to_bytes(*tree.flatten(state))
            dense = builder.append(DENSE, "dense", (data,), checksum(data))
            objects.append((name, builder.close()))
        checkpoints.append(
            CheckpointEntry(
                step=step, ordinal=ordinal, kind=BASE if step == base else DELTA, base=base,
                schema=0, time=1e9, codec="fp32", state_codec="fp32", rows=rows, row_bytes=16,
                bytes=64, full_bytes=64, stall_s=0.0, reason="forged", dense=dense,
            )
        )  # fmt: skip
    catalog = Catalog(
        run="forged", number=1, writer="forger", schemas=((schema,),),
        checkpoints=tuple(checkpoints), segments=tuple(entries), objects=tuple(objects),
        grids=tuple(grids), sharding=sharding,
    )  # fmt: skip
    write_catalog(path, catalog)
    return catalog


def _append_kills(builder: ObjectBuilder, kills: Kills) -> Extent:
    vectors = {
        key: deletion_vectors.make_vector(np.array(ids), np.array(deaths))
        for key, (ids, deaths) in kills.items()
    }
    data = deletion_vectors.to_bytes(vectors)
    return builder.append(DELETION_VECTORS, "kills", (data,), checksum(data))


def write_catalog(path: Path, catalog: Catalog) -> None:
    """Make a catalog the run's only one."""
    file = path / catalogs.name_of(1)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(catalogs.to_bytes(dataclasses.replace(catalog, number=1)))


def newest(segments: Sequence[Held], rows: int, step: int) -> np.ndarray:
    """The rows of a step as the segments have them: of those alive the newest birth wins."""
    found = np.full((rows, WIDTH), math.nan, np.float32)
    for held in sorted(segments, key=lambda held: held.born):
        if held.born <= step and (held.died is None or step < held.died):
            found[list(held.ids)] = rows_at(held.ids, held.born)
    return found
