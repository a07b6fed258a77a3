"""Restore: from a catalog to rows in the caller's arrays, decoded and scattered in one pass.

    catalog -> segments alive at the step -> read -> checksum -> decode + scatter

Segments are read in layers. The base comes first, then the rollup, if there is one between it and
the step: all that changed since the base until then, sorted, one run of segments a table. Above it
lie the chunks of the grid as far as it is worked off: there every row that is dead at the step is
known and masked, so no row comes twice and no order is needed. Increments that extraction has not
seen yet follow in the order they were born, later over earlier; so does everything where there is
no grid.

Invariants:
- No byte is used before its checksum is confirmed; damage raises and names the object.
- Layers follow each other; inside a layer segments are read in any order, several at a time.
- Notes of rows are held for one layer at a time, however many there are.
- Every row that is handed out was read: no row of a layer comes twice, none is missing from the
  base (row_check.py).

Not here: some rows of a table (read_rows.py), what is alive (checkpoint/format/catalog.py), reading
and scattering bytes (fetch.py, scatter.py), where rows of a live model are (model/tables.py).

# N rows, D floats of one column
"""

from __future__ import annotations

import itertools
import operator
import os
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from holdfast.checkpoint.format.catalog import Catalog, SegmentEntry
from holdfast.checkpoint.format.deletion_vectors import StoredDeletionVectors
from holdfast.checkpoint.restoring import fetch
from holdfast.checkpoint.restoring.destination import Destinations, Targets, whole
from holdfast.checkpoint.restoring.fetch import Group, PartReader, SegmentReader
from holdfast.checkpoint.restoring.row_check import RowCheck, unproven_tables
from holdfast.checkpoint.restoring.scatter import Scatter
from holdfast.errors import CorruptDataError, DataLossError, InvalidRequestError
from holdfast.kernels.rows import bitmap
from holdfast.model.schema import TableSchema
from holdfast.storage.base import Storage

_BORN = operator.attrgetter("born")
_GROUP_BYTES_MAX = 32 << 20
_GROUPS_A_THREAD = 3  # so that none is idle for long in the end


@dataclass(frozen=True, slots=True)
class RestoreStats:
    """What a restore read, and how long the base and the rest of it took."""

    rows: int
    bytes: int
    masked_rows: int
    base_bytes: int
    base_s: float
    delta_s: float
    missing: tuple[str, ...] = ()
    """Names in the model that the checkpoint lacks: they stay as they are (``strict=False``)."""
    unexpected: tuple[str, ...] = ()
    """Names in the checkpoint that the model lacks."""

    @property
    def delta_bytes(self) -> int:
        """Bytes of what changed since the base."""
        return self.bytes - self.base_bytes


def default_threads() -> int:
    """How many segments are read and decoded at a time."""
    return max(1, min(8, os.cpu_count() or 1))


def check_complete(
    catalog: Catalog, step: int, servers: Collection[int] | None = None
) -> list[SegmentEntry]:
    """Make sure that the tables are as the segments say and a base stands behind every row.

    Returns what is alive at the step, oldest born first; only what these servers hold, if given.

    Raises:
        CorruptDataError: a segment belongs to no table.
        DataLossError: names the table whose rows are not all there.
        InvalidRequestError: the rows of servers are not stored apart at this step.
    """
    entry = catalog.checkpoint(step)
    schemas = catalog.schema_of(entry)
    rows = {schema.name: schema.rows for schema in schemas}
    wanted = rows
    alive = catalog.alive(step)
    if servers is not None:
        sharding = catalog.sharding
        if sharding is None or sharding.since > entry.base:
            raise InvalidRequestError(
                "the rows of servers are not stored apart at this step",
                step=step,
                todo="save with servers= first, or restore the whole model",
            )
        placement = sharding.placement
        wanted = {
            name: sum(len(placement.rows_of(server, count)) for server in servers)
            for name, count in rows.items()
        }
        alive = sharding.held_by(alive, servers)
    found: dict[str, int] = {}
    for segment in alive:
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
    for name, count in wanted.items():
        if found.get(name, 0) != count:
            raise lacks_rows(step, name, rows=count, found=found.get(name, 0))
    return alive


def lacks_rows(step: int, table: str, *, rows: int, found: int) -> DataLossError:
    """The error for a base of which the catalog does not count as many rows as its table has."""
    return DataLossError(
        "the catalog does not hold every row",
        step=step,
        table=table,
        rows=rows,
        found=found,
        todo="restore another step",
    )


@dataclass(frozen=True, slots=True)
class Layer:
    """Segments that may be read in any order: nothing in them that counts is there twice."""

    segments: tuple[SegmentEntry, ...]
    is_base: bool = False
    is_masked: bool = False

    def unproven(self) -> frozenset[str]:
        """The tables whose rows are noted one by one while the layer is read (row_check.py)."""
        if self.is_masked:
            return frozenset(segment.table for segment in self.segments)
        return unproven_tables(self.segments)


def plan_layers(
    catalog: Catalog, step: int, tables: Sequence[str], alive: Sequence[SegmentEntry]
) -> list[Layer]:
    """What a restore of some tables reads of what is alive, in the order in which it is written."""
    entry = catalog.checkpoint(step)
    grid = catalog.grid_of(entry)
    rollup, through = (entry.base,) * 2 if grid is None else (grid.rollup, grid.through)
    wanted = set(tables)
    segments = [s for s in alive if s.table in wanted]
    base = [s for s in segments if s.born <= entry.base]
    below = [s for s in segments if entry.base < s.born <= rollup]
    worked_off = [s for s in segments if rollup < s.born <= through]
    waiting = [s for s in segments if s.born > through]
    layers = [
        Layer(tuple(base), is_base=True),
        *_by_birth(below),
        Layer(tuple(worked_off), is_masked=True),
        *_by_birth(waiting),
    ]
    return [layer for layer in layers if layer.segments]


def _by_birth(segments: Sequence[SegmentEntry]) -> list[Layer]:
    """Segments that replace each other, oldest first: a layer for each birth."""
    return [Layer(tuple(group)) for _, group in itertools.groupby(segments, key=_BORN)]


def restore_rows(
    storage: Storage,
    catalog: Catalog,
    step: int,
    targets: Targets,
    *,
    changed: Mapping[str, np.ndarray] | None = None,
    servers: Collection[int] | None = None,
    threads: int | None = None,
) -> RestoreStats:
    """Fill whole stored tables with their rows as of a step, or only the rows of some servers.

    In ``changed``, bitmaps by table, every row is marked that was stored since the base. Of other
    servers' rows nothing is read or written.

    Raises:
        CorruptDataError: the targets are then partly overwritten.
    """
    schemas = {t.name: t for t in catalog.schema_of(catalog.checkpoint(step))}
    destinations = whole(targets, schemas, changed)
    return restore_to(storage, catalog, step, destinations, servers=servers, threads=threads)


def restore_to(
    storage: Storage,
    catalog: Catalog,
    step: int,
    destinations: Destinations,
    *,
    servers: Collection[int] | None = None,
    threads: int | None = None,
) -> RestoreStats:
    """Bring the rows of a step to their destinations; segments that hold none are not read.

    Where destinations have a bitmap, every row is marked that was stored since the base.

    Raises:
        CorruptDataError: the destinations are then partly overwritten.
    """
    alive = check_complete(catalog, step, servers)
    entry = catalog.checkpoint(step)
    schemas = {t.name: t for t in catalog.schema_of(entry)}
    only = None if servers is None else _rows_of_servers(catalog, schemas, destinations, servers)
    base, *later = _plan_reads(catalog, step, destinations, alive, only)
    is_part = servers is not None or _is_part(destinations)
    grid = catalog.grid_of(entry)
    reader = SegmentReader(storage)
    threads = threads or default_threads()
    # What lies between the segments of a server or a process is others'.
    gap_max = 0 if is_part else fetch.GAP_BYTES_MAX
    with ThreadPoolExecutor(threads, "holdfast-restore") as pool:

        def load(
            groups: list[Group], scatter: Scatter, check: RowCheck, *, is_masked: bool = False
        ) -> list[Future[int]]:
            return [
                pool.submit(_load, reader, scatter, group, check, is_masked=is_masked)
                for group in groups
            ]

        def read_layer(groups: list[Group], layer: _Reading, scatter: Scatter) -> int:
            check = layer.open_check(destinations, only)
            tasks = load(groups, scatter, check, is_masked=layer.is_masked)
            masked = sum(task.result() for task in tasks)
            check.check(is_base=False)
            return masked

        try:
            started = time.perf_counter()
            fetch.check_frames(storage, catalog, [s.extent for s in base.segments])
            scatter = Scatter(destinations, schemas, StoredDeletionVectors(), step)
            check = base.open_check(destinations, only)
            tasks = load(fetch.groups(base.segments, gap_max=gap_max), scatter, check)
            # While the base is read: what must be known before the rest of it is.
            extents = [s.extent for layer in later for s in layer.segments]
            vectors = StoredDeletionVectors()
            if grid is not None and any(layer.is_masked for layer in later):
                extents += [] if grid.deletion_vectors is None else [grid.deletion_vectors]
                vectors = fetch.read_deletion_vectors(storage, grid)
            scatter = Scatter(destinations, schemas, vectors, step, has_marks=True)
            fetch.check_frames(storage, catalog, extents)
            planned = [(_groups(layer.segments, threads, gap_max), layer) for layer in later]
            masked = sum(task.result() for task in tasks)
            check.check(is_base=True)
            del check  # notes of one layer at a time: they take memory for every row
            base_s = time.perf_counter() - started
            for groups, layer in planned:
                masked += read_layer(groups, layer, scatter)
            delta_s = time.perf_counter() - started - base_s
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    segments = [s for layer in (base, *later) for s in layer.segments]
    return RestoreStats(
        rows=sum(s.rows for s in segments),
        bytes=sum(s.extent.bytes for s in segments),
        masked_rows=masked,
        base_bytes=sum(s.extent.bytes for s in base.segments),
        base_s=base_s,
        delta_s=delta_s,
    )


@dataclass(frozen=True, slots=True)
class _Reading:
    """What is read of a layer, and of which tables it is noted which rows it held."""

    segments: tuple[SegmentEntry, ...]
    layer: Layer
    noted: frozenset[str]

    @property
    def is_masked(self) -> bool:
        """Whether rows that are dead at the step are left out."""
        return self.layer.is_masked

    def open_check(
        self, destinations: Destinations, only: Mapping[str, np.ndarray] | None
    ) -> RowCheck:
        """Notes of this layer, which are empty; they take memory for every row of its tables."""
        return RowCheck(destinations, self.layer.segments, self.noted, only)


def _plan_reads(
    catalog: Catalog,
    step: int,
    destinations: Destinations,
    alive: Sequence[SegmentEntry],
    only: Mapping[str, np.ndarray] | None,
) -> list[_Reading]:
    """What a restore reads, layer by layer, the base first, which may be empty.

    ``only``: by table the rows that may be touched; then all are noted, whatever is proven.
    """
    layers = plan_layers(catalog, step, list(destinations), alive)
    if not layers or not layers[0].is_base:
        layers = [Layer((), is_base=True), *layers]
    is_part = _is_part(destinations)
    found = []
    for layer in layers:
        noted = layer.unproven() if only is None else frozenset(destinations)
        segments = layer.segments
        if is_part:
            segments = tuple(s for s in segments if _is_held(s, destinations))
        if segments or layer.is_base:
            found.append(_Reading(segments, layer, noted))
    return found


def _is_part(destinations: Destinations) -> bool:
    """Whether somebody else holds some of the rows."""
    return any(d.shard.local_rows < d.shard.rows for found in destinations.values() for d in found)


def _is_held(segment: SegmentEntry, destinations: Destinations) -> bool:
    """Whether some destination may want rows of a segment."""
    wanted = destinations.get(segment.table, ())
    return any(d.shard.may_hold(segment.first, segment.last) for d in wanted)


def _rows_of_servers(
    catalog: Catalog,
    schemas: Mapping[str, TableSchema],
    destinations: Destinations,
    servers: Collection[int],
) -> dict[str, np.ndarray]:
    """The rows of some servers, by table."""
    assert catalog.sharding is not None
    placement = catalog.sharding.placement
    return {
        table: np.concatenate(
            [placement.rows_of(server, schemas[table].rows) for server in sorted(servers)]
        )
        for table in destinations
    }


def _groups(segments: Sequence[SegmentEntry], threads: int, gap_max: int) -> list[Group]:
    """A layer over the base in large groups: the more chunks are scattered together, the more of
    their rows go to the same part of a table one after the other."""
    total = sum(s.extent.bytes for s in segments)
    share = total // (_GROUPS_A_THREAD * threads)
    bytes_max = min(_GROUP_BYTES_MAX, max(fetch.GROUP_BYTES_MAX, share))
    return fetch.groups(segments, bytes_max=bytes_max, gap_max=gap_max)


def _load(
    reader: SegmentReader, scatter: Scatter, group: Group, check: RowCheck, *, is_masked: bool
) -> int:
    return scatter.put(reader.read_group(group), check, is_masked=is_masked)


def read_ids(storage: Storage, entry: SegmentEntry) -> np.ndarray:
    """The row ids of a segment, without reading its rows.

    Raises:
        CorruptDataError: names the object.
    """
    return PartReader(storage).ids(entry)


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


def check_going_on(storage: Storage, catalog: Catalog, since: int, last: int) -> None:
    """Make sure that no row goes back to an older version between two steps over one base.

    Whoever brings a copy of the first step to the second reads only what was born in between.

    Raises:
        CorruptDataError: names the table.
    """
    entry = catalog.checkpoint(last)
    gone = [
        s
        for s in catalog.segments
        if entry.base < s.born and s.is_alive(since) and not s.is_alive(last)
    ]
    rows = {t.name: t.rows for t in catalog.schema_of(entry)}
    # What no kept step reads may claim any row of any table.
    gone = [s for s in gone if s.last < rows.get(s.table, 0)]
    if not gone or entry.base > since:
        return
    parts = PartReader(storage)
    for table in {s.table for s in gone}:
        newest_M = np.zeros(rows[table], np.int64)
        for segment in catalog.alive(last, table):  # oldest first
            newest_M[parts.ids(segment)] = segment.born
        if any((newest_M[parts.ids(s)] <= s.born).any() for s in gone if s.table == table):
            raise CorruptDataError(
                "rows go back to an older version",
                table=table,
                since=since,
                last=last,
                todo="run 'holdfast verify', and load the last step whole",
            )
