"""Restore: from a catalog to rows in the caller's arrays, decoded and scattered in one pass.

    catalog -> segments alive at the step -> read -> checksum -> decode + scatter

Invariants:
- No byte is used before its checksum is confirmed; damage raises and names the object.
- Later born wins: segments of one birth are read at once, births follow each other.

Not here: what is alive (catalog.py), where rows of a live model are (tables.py).

# N rows, D floats of one column
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.checkpoint import tree
from holdfast.checkpoint.catalog import Catalog, SegmentEntry
from holdfast.checkpoint.checksum import as_hex, checksum
from holdfast.checkpoint.object import Extent, read_index
from holdfast.checkpoint.segment import Segment, header_bytes, parse_header, parse_ids
from holdfast.errors import CorruptDataError, DataLossError
from holdfast.kernels import bitmap
from holdfast.storage.base import Storage
from holdfast.tables import TableSchema

Targets = Mapping[str, Sequence[np.ndarray]]


@dataclass(frozen=True, slots=True)
class RestoreStats:
    """What a restore read."""

    rows: int
    bytes: int


def default_threads() -> int:
    """How many segments are read and decoded at a time."""
    return max(1, min(8, os.cpu_count() or 1))


def read_dense(storage: Storage, extent: Extent) -> Any:
    """A checkpoint's dense state.

    Raises:
        CorruptDataError: names the object.
    """
    data = storage.get(extent.object, offset=extent.offset, length=extent.bytes)
    check_sum(data, extent)
    return tree.from_bytes(data)


def check_sum(data: Any, extent: Extent) -> None:
    """Compare bytes with the checksum of their extent.

    Raises:
        CorruptDataError: names the object.
    """
    found = checksum(data)
    if found != extent.checksum:
        raise CorruptDataError(
            "checksum mismatch in segment",
            where=extent.describe(),
            expected=as_hex(extent.checksum),
            found=as_hex(found),
            todo="run 'holdfast verify', and restore an older step",
        )


def check_objects(storage: Storage, catalog: Catalog, extents: Iterable[Extent]) -> None:
    """Check the frame of every object the extents lie in, and that it agrees with the catalog.

    Raises:
        CorruptDataError: names the object.
        NotFoundError: an object is gone.
    """
    sizes = dict(catalog.objects)
    wanted: dict[str, list[Extent]] = {}
    for extent in extents:
        wanted.setdefault(extent.object, []).append(extent)
    for name, parts in wanted.items():
        index = read_index(storage, name, sizes[name])
        for extent in parts:
            if index.get(extent.offset) != extent:
                raise CorruptDataError(
                    "catalog and object disagree",
                    where=extent.describe(),
                    todo="run 'holdfast verify', and restore an older step",
                )


def check_complete(catalog: Catalog, step: int) -> None:
    """Make sure that the tables are as the segments say and a base stands behind every row.

    Raises:
        CorruptDataError: a segment belongs to no table.
        DataLossError: names the table whose rows are not all there.
    """
    entry = catalog.checkpoint(step)
    rows = {schema.name: schema.rows for schema in catalog.schema_of(entry)}
    found: dict[str, int] = {}
    for segment in catalog.alive(step):
        if segment.last >= rows.get(segment.table, 0):
            raise CorruptDataError(
                "segment does not fit its table",
                where=segment.extent.describe(),
                table=segment.table,
                last=segment.last,
                rows=rows.get(segment.table),
            )
        if segment.born == entry.base:
            found[segment.table] = found.get(segment.table, 0) + segment.rows
    for schema in catalog.schema_of(entry):
        if found.get(schema.name, 0) != schema.rows:
            raise DataLossError(
                "the catalog does not hold every row",
                step=step,
                table=schema.name,
                rows=schema.rows,
                found=found.get(schema.name, 0),
                todo="restore another step",
            )


class SegmentReader:
    """Reads whole segments, one reused buffer a thread."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._local = threading.local()

    def read(self, entry: SegmentEntry, schema: TableSchema) -> Segment:
        """A segment, checked; valid until this thread reads the next."""
        extent = entry.extent
        buffer = getattr(self._local, "buffer", None)
        if buffer is None or buffer.nbytes < extent.bytes:
            buffer = self._local.buffer = np.empty(extent.bytes, np.uint8)
        view = buffer[: extent.bytes].data
        self._storage.get_into(extent.object, view, offset=extent.offset)
        check_sum(view, extent)
        segment = Segment(view, where=extent.describe())
        segment.check_schema(schema)
        header = segment.header
        if (header.rows, header.first, header.last) != (entry.rows, entry.first, entry.last):
            raise CorruptDataError("catalog and segment disagree", where=extent.describe())
        return segment


def by_birth(segments: Sequence[SegmentEntry]) -> Iterator[list[SegmentEntry]]:
    """Segments grouped by the checkpoint they were born at, oldest first."""
    for _, group in itertools.groupby(segments, key=lambda segment: segment.born):
        yield list(group)


def restore_rows(
    storage: Storage,
    catalog: Catalog,
    step: int,
    targets: Targets,
    *,
    on_ids: Callable[[SegmentEntry, np.ndarray], None] | None = None,
    threads: int | None = None,
) -> RestoreStats:
    """Fill whole tables with their rows as of a step; ``on_ids`` hears which rows came from where.

    Raises:
        CorruptDataError: the targets are then partly overwritten.
    """
    check_complete(catalog, step)
    schemas = {t.name: t for t in catalog.schema_of(catalog.checkpoint(step))}
    segments = [s for s in catalog.alive(step) if s.table in targets]
    check_objects(storage, catalog, (s.extent for s in segments))
    reader = SegmentReader(storage)

    def load(entry: SegmentEntry) -> None:
        segment = reader.read(entry, schemas[entry.table])
        ids_N = segment.ids()
        for column, dst_ND in enumerate(targets[entry.table]):
            segment.decode_into(column, dst_ND, ids_N)
        if on_ids is not None:
            on_ids(entry, ids_N)

    with ThreadPoolExecutor(threads or default_threads(), "holdfast-restore") as pool:
        for group in by_birth(segments):
            for _ in pool.map(load, group):
                pass
    return RestoreStats(
        rows=sum(s.rows for s in segments),
        bytes=sum(s.extent.bytes for s in segments),
    )


def read_rows(
    storage: Storage, catalog: Catalog, step: int, schema: TableSchema, ids_N: np.ndarray
) -> list[np.ndarray]:
    """Some rows of one table, every column, in the order of ``ids_N`` (ascending, unique).

    Reads only segments whose range of ids can hold one of them.
    """
    check_complete(catalog, step)
    segments = [s for s in catalog.alive(step, schema.name) if _overlaps(ids_N, s)]
    check_objects(storage, catalog, (s.extent for s in segments))
    reader = SegmentReader(storage)
    columns: list[np.ndarray] = []
    for entry in segments:
        segment = reader.read(entry, schema)
        if not columns:  # only now is the schema's width confirmed
            columns = [np.empty((len(ids_N), c.width), np.float32) for c in schema.columns]
        _, in_wanted, in_segment = np.intersect1d(
            ids_N, segment.ids(), assume_unique=True, return_indices=True
        )
        if len(in_wanted):
            for index, column_ND in enumerate(columns):
                column_ND[in_wanted] = segment.decode(index)[in_segment]
    return columns or [np.empty((0, c.width), np.float32) for c in schema.columns]


def _overlaps(ids_N: np.ndarray, entry: SegmentEntry) -> bool:
    at = int(np.searchsorted(ids_N, entry.first))
    return at < len(ids_N) and int(ids_N[at]) <= entry.last


def read_ids(storage: Storage, entry: SegmentEntry) -> np.ndarray:
    """The row ids of a segment, without reading its rows.

    Raises:
        CorruptDataError: names the object.
    """
    extent = entry.extent
    where = extent.describe()
    head = storage.get(
        extent.object, offset=extent.offset, length=min(extent.bytes, header_bytes(255))
    )
    header = parse_header(memoryview(head), total_bytes=extent.bytes, where=where)
    data = storage.get(
        extent.object, offset=extent.offset + header.ids_offset, length=header.ids_bytes
    )
    return parse_ids(header, memoryview(data), where=where)


def count_dead_rows(storage: Storage, catalog: Catalog, step: int) -> dict[SegmentEntry, int]:
    """For every segment alive at a step: how many of its rows a later birth replaces."""
    check_complete(catalog, step)
    dead: dict[SegmentEntry, int] = {}
    replaced: dict[str, np.ndarray] = {}
    rows = {t.name: t.rows for t in catalog.schema_of(catalog.checkpoint(step))}
    for entry in reversed(catalog.alive(step)):
        newer = replaced.setdefault(entry.table, bitmap.new(rows[entry.table]))
        ids_N = read_ids(storage, entry)
        dead[entry] = int(bitmap.is_set(newer, ids_N).sum())
        bitmap.mark(newer, ids_N, rows[entry.table])
    return dead
