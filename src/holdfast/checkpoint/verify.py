"""Verify: read every byte of a run and name what is damaged.

Invariants:
- Any changed bit and any missing byte of a catalog or an object that a catalog names is found;
  verification goes on after a damage, so one pass names them all.
- What is called sound every way of reading returns alike: each version of a row is stored once,
  lifetimes follow each other (checkpoint/restoring/lifetimes.py), no row of a base is missing,
  filters know their ids.
- It takes memory for the ids of a grid and for one segment at a time, not for tables; and for
  ``_STEPS_LISTED_MAX`` steps of damages, however many are damaged.

# K steps that are kept; a place is an index of one
"""

from __future__ import annotations

import bisect
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.boundary.dense import check_aliases, check_row_state
from holdfast.checkpoint.format.catalog import Catalog, CheckpointEntry, GridEntry, SegmentEntry
from holdfast.checkpoint.format.deletion_vectors import StoredDeletionVectors
from holdfast.checkpoint.format.object import Extent, Index, read_index
from holdfast.checkpoint.restoring import fetch, restore
from holdfast.checkpoint.restoring.lifetimes import Contradiction, Lifetimes
from holdfast.checkpoint.store import catalogs
from holdfast.errors import CorruptDataError, DataLossError, HoldfastError, NotFoundError
from holdfast.kernels.rows import bloom
from holdfast.model.schema import TableSchema
from holdfast.storage import as_storage
from holdfast.storage.base import Storage

_STEPS_LISTED_MAX = 1 << 20  # of all damages together


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong: where, what, and which steps can no longer be restored."""

    where: str
    error: str
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was read and what is wrong."""

    catalogs: int
    objects: int
    segments: int
    bytes: int
    damages: tuple[Damage, ...]

    @property
    def is_sound(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damages


def verify(
    run: str | os.PathLike[str] | Storage,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    storage_options: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Check every catalog, object, segment and row of a run.

    Raises:
        NotFoundError: there is no run.
    """
    storage = as_storage(run, storage_options)
    damages = _Damages()
    existing = catalogs.numbers(storage)
    if not existing:
        raise NotFoundError("no run here", url=storage.url)
    newest: Catalog | None = None
    read_bytes = 0
    for number in existing:
        name = catalogs.name_of(number)
        try:
            read_bytes += storage.size(name)
            newest = catalogs.load(storage, number)
        except HoldfastError as error:
            damages.add(name, str(error))
    if newest is None:
        return VerifyReport(len(existing), 0, 0, read_bytes, damages.found())
    damages.steps = newest.steps
    catalog_name = catalogs.name_of(newest.number)
    for lacking, places in _lacking_rows(newest):
        damages.add(catalog_name, str(lacking), places)
    total = sum(size for _, size in newest.objects)
    done = 0
    segments = 0
    view = _View(newest)
    for name, size in newest.objects:
        for found in _object_damages(storage, view, name):
            damages.add(*found)
        segments += len(view.segments.get(name, ()))
        done += size
        on_progress(done, total)
    steps_K = np.array(newest.steps, np.int64)
    for contradiction in view.contradictions():
        places = np.searchsorted(steps_K, contradiction.steps)
        damages.add(f"table {contradiction.table!r}", contradiction.error, places)
    return VerifyReport(
        len(existing), len(newest.objects), segments, read_bytes + done, damages.found()
    )


_NO_STEPS = np.empty(0, np.int64)
_Places = np.ndarray | range
_Found = tuple[str, str, _Places]  # where, what, and the places of the steps it costs


class _Damages:
    """Damages as they are found. Many segments of many steps may all be damaged: beyond a limit
    they are counted together, with all the steps that they cost."""

    def __init__(self) -> None:
        self.steps: tuple[int, ...] = ()
        self._found: list[Damage] = []
        self._listed = 0
        self._more = 0
        self._is_lost_K: np.ndarray | None = None

    def add(self, where: str, error: str, places: _Places = _NO_STEPS) -> None:
        if self._listed + len(places) <= _STEPS_LISTED_MAX:
            self._listed += len(places)
            listed = places if isinstance(places, range) else places.tolist()
            lost = tuple(self.steps[place] for place in listed)
            self._found.append(Damage(where, error, lost))
            return
        self._more += 1
        if self._is_lost_K is None:
            self._is_lost_K = np.zeros(len(self.steps), bool)
        if isinstance(places, range):
            self._is_lost_K[places.start : places.stop] = True
        else:
            self._is_lost_K[places] = True

    def found(self) -> tuple[Damage, ...]:
        if self._is_lost_K is None:
            return tuple(self._found)
        lost = tuple(self.steps[place] for place in np.flatnonzero(self._is_lost_K).tolist())
        error = f"{self._more} more damages, of too many steps to be listed one by one"
        return (*self._found, Damage("run", error, lost))


def _lacking_rows(catalog: Catalog) -> Iterator[tuple[DataLossError, np.ndarray]]:
    """Bases that do not hold as many rows as their tables have, at some of the steps over them.

    What the catalog counts; that each row is there once its ids must show.
    """
    steps = catalog.steps
    held: dict[int, list[SegmentEntry]] = {entry.base: [] for entry in catalog.checkpoints}
    for segment in catalog.segments:
        if segment.born in held:
            held[segment.born].append(segment)
    sizes = [{table.name: table.rows for table in schema if table.rows} for schema in
             catalog.schemas]  # fmt: skip
    bases = [entry.base for entry in catalog.checkpoints]  # ascending
    lo = 0
    while lo < len(bases):
        hi = bisect.bisect_right(bases, bases[lo])
        wanted = sizes[catalog.checkpoints[lo].schema]
        found: Counter[str] = Counter()
        ends: dict[int, list[SegmentEntry]] = {}
        for segment in held[bases[lo]]:
            end = hi if segment.died is None else bisect.bisect_left(steps, segment.died)
            if end > lo:
                found[segment.table] += segment.rows
                ends.setdefault(min(end, hi), []).append(segment)
        right = sum(wanted.get(table) == rows for table, rows in found.items())
        lacking, at, error = [], lo, None
        for end in [*sorted(end for end in ends if end < hi), hi]:
            if right != len(wanted):
                lacking.append(np.arange(at, end))
                error = error or _lack_of(steps[at], wanted, found)
            for segment in ends.get(end, ()):
                right -= wanted.get(segment.table) == found[segment.table]
                found[segment.table] -= segment.rows
                right += wanted.get(segment.table) == found[segment.table]
            at = end
        if error is not None:
            yield error, np.concatenate(lacking)
        lo = hi


def _lack_of(step: int, wanted: Mapping[str, int], found: Counter[str]) -> DataLossError:
    table = next(name for name, rows in wanted.items() if found[name] != rows)
    return restore.lacks_rows(step, table, rows=wanted[table], found=found[table])


class _View:
    """A catalog by object: what lies in each, and who reads it."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.sizes = dict(catalog.objects)
        self.segments: dict[str, list[SegmentEntry]] = {}
        for segment in catalog.segments:
            self.segments.setdefault(segment.extent.object, []).append(segment)
        self.holders: dict[str, list[tuple[CheckpointEntry, Extent]]] = {}
        for entry in catalog.checkpoints:
            for extent in (entry.dense, *entry.ranks):
                self.holders.setdefault(extent.object, []).append((entry, extent))
        self.grids: dict[str, list[tuple[GridEntry, Extent]]] = {}
        for grid in catalog.grids:
            if grid.deletion_vectors is not None:
                found = self.grids.setdefault(grid.deletion_vectors.object, [])
                found.append((grid, grid.deletion_vectors))
        self._steps = catalog.steps
        self._schemas: dict[int, dict[str, TableSchema]] = {}
        self._places: dict[GridEntry, list[int]] | None = None  # of the steps that it is of
        self.lifetimes = Lifetimes(catalog)
        self._vectors: dict[GridEntry, StoredDeletionVectors] = {}

    def note_vectors(self, grid: GridEntry, vectors: StoredDeletionVectors) -> None:
        """These are the deletion vectors of a grid."""
        self._vectors[grid] = vectors

    def contradictions(self) -> Iterator[Contradiction]:
        """What the ids of all segments say together, once all are read."""
        yield from self.lifetimes.stored_twice()
        yield from self.lifetimes.gone_back()
        for grid in self.catalog.grids:
            if (
                grid.deletion_vectors is None or grid in self._vectors
            ):  # else its damage was reported
                yield from self.lifetimes.broken(
                    grid, self._vectors.get(grid, StoredDeletionVectors())
                )

    def schema_at(self, place: int, table: str) -> TableSchema | None:
        """A table as the checkpoint at a place has it."""
        index = self.catalog.checkpoints[place].schema
        if index not in self._schemas:
            self._schemas[index] = {each.name: each for each in self.catalog.schemas[index]}
        return self._schemas[index].get(table)

    def readers(self, segment: SegmentEntry) -> range:
        """The places of the steps whose restore reads a segment."""
        lo = bisect.bisect_left(self._steps, segment.born)
        died = segment.died
        hi = len(self._steps) if died is None else bisect.bisect_left(self._steps, died)
        return range(lo, max(lo, hi))

    def place_of(self, step: int) -> np.ndarray:
        """The place of a kept step."""
        return np.array([bisect.bisect_left(self._steps, step)])

    def steps_of(self, grid: GridEntry) -> np.ndarray:
        """The places of the steps that a grid is of."""
        if self._places is None:
            self._places = {}
            for place, entry in enumerate(self.catalog.checkpoints):
                if (of := self.catalog.grid_of(entry)) is not None:
                    self._places.setdefault(of, []).append(place)
        return np.array(self._places.get(grid, []), np.int64)

    def everyone(self, name: str) -> np.ndarray:
        """The places of the steps that need an object."""
        is_needed_K = np.zeros(len(self._steps), bool)
        for segment in self.segments.get(name, ()):
            places = self.readers(segment)
            is_needed_K[places.start : places.stop] = True
        for holder, _ in self.holders.get(name, ()):
            is_needed_K[self.place_of(holder.step)] = True
        for grid, _ in self.grids.get(name, ()):
            is_needed_K[self.steps_of(grid)] = True
        return np.flatnonzero(is_needed_K)


def _object_damages(storage: Storage, view: _View, name: str) -> Iterator[_Found]:
    try:
        index = read_index(storage, name, view.sizes[name])
        extents = index.extents()
    except HoldfastError as error:
        for entry in view.segments.get(name, ()):
            view.lifetimes.leave_out(entry.table)
        yield name, str(error), view.everyone(name)
        return
    reader = fetch.SegmentReader(storage)
    named = set()
    for entry in view.segments.get(name, ()):
        named.add(entry.extent.offset)
        readers = view.readers(entry)
        try:
            _check_segment(reader, view, index, entry, readers)
        except HoldfastError as error:
            view.lifetimes.leave_out(entry.table)
            yield entry.extent.describe(), str(error), readers
    for holder, extent in view.holders.get(name, ()):
        named.add(extent.offset)
        try:
            fetch.check_listed(index, extent)
            dense = fetch.read_dense(storage, extent)
            if extent == holder.dense:  # else a rank's own state, which knows no tables
                check_aliases(dense, view.catalog.schema_of(holder))
                check_row_state(dense, view.catalog.schema_of(holder))
        except HoldfastError as error:
            yield extent.describe(), str(error), view.place_of(holder.step)
    for grid, extent in view.grids.get(name, ()):
        named.add(extent.offset)
        try:
            fetch.check_listed(index, extent)
            view.note_vectors(grid, fetch.read_deletion_vectors(storage, grid))
        except HoldfastError as error:
            yield extent.describe(), str(error), view.steps_of(grid)
    for extent in extents:
        if extent.offset in named:
            continue
        # No checkpoint reads it any more; its bytes are still checked.
        data = np.empty(extent.bytes, np.uint8)
        try:
            storage.get_into(name, data.data, offset=extent.offset)
            fetch.check_sum(data, extent)
        except HoldfastError as error:
            yield extent.describe(), str(error), _NO_STEPS


def _check_segment(
    reader: fetch.SegmentReader,
    view: _View,
    index: Index,
    entry: SegmentEntry,
    readers: range,
) -> None:
    """Read all of a segment; raises what is wrong with it."""
    where = entry.extent.describe()
    fetch.check_listed(index, entry.extent)
    if not readers:
        raise CorruptDataError("no checkpoint reads it", where=where)
    schema = view.schema_at(readers[0], entry.table)
    if schema is None:
        raise CorruptDataError("segment of an unknown table", table=entry.table)
    segment = reader.read(entry, schema)
    if not segment.has_zero_padding():
        raise CorruptDataError("a segment has bytes between its parts", where=where)
    ids_N = segment.ids()
    _check_server(view.catalog, entry, ids_N)
    words_W = segment.filter()
    if words_W is not None and not bloom.has(words_W, ids_N).all():
        raise CorruptDataError("segment's filter does not know its own ids", where=where)
    for column in range(len(schema.columns)):
        segment.decode(column)
    view.lifetimes.add(entry, ids_N, segment.deaths())


def _check_server(catalog: Catalog, entry: SegmentEntry, ids_N: np.ndarray) -> None:
    """Where the rows of servers are stored apart, a segment holds rows of one."""
    if catalog.sharding is None or entry.born < catalog.sharding.since:
        return
    servers_N = catalog.sharding.placement.servers_of(ids_N)
    if (servers_N != servers_N[0]).any():
        raise CorruptDataError(
            "a segment of one server holds rows of another", where=entry.extent.describe()
        )
