"""Verify: read every byte of a run and name what is damaged.

Invariant: any changed bit and any missing byte of a catalog or an object that a catalog names is
found; verification goes on after a damage, so one pass names them all.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.checkpoint import commit as catalogs
from holdfast.checkpoint import fetch, restore
from holdfast.checkpoint.catalog import Catalog, CheckpointEntry, GridEntry, SegmentEntry
from holdfast.checkpoint.object import Extent, Index, read_index
from holdfast.errors import CorruptDataError, HoldfastError, NotFoundError
from holdfast.kernels import bloom
from holdfast.storage import as_storage
from holdfast.storage.base import Storage


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
    damages: list[Damage] = []
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
            damages.append(Damage(name, str(error), ()))
    if newest is None:
        return VerifyReport(len(existing), 0, 0, read_bytes, tuple(damages))
    for step in newest.steps:
        try:
            restore.check_complete(newest, step)
        except HoldfastError as error:
            damages.append(Damage(catalogs.name_of(newest.number), str(error), (step,)))
    total = sum(size for _, size in newest.objects)
    done = 0
    segments = 0
    view = _View(newest)
    for name, size in newest.objects:
        damages.extend(_object_damages(storage, view, name))
        segments += len(view.segments.get(name, ()))
        done += size
        on_progress(done, total)
    return VerifyReport(
        len(existing), len(newest.objects), segments, read_bytes + done, tuple(damages)
    )


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
        self.grids = {g.kills.object: g for g in catalog.grids if g.kills is not None}
        self.schemas = {
            (entry.base, table.name): table
            for entry in catalog.checkpoints
            for table in catalog.schema_of(entry)
        }

    def readers(self, segment: SegmentEntry) -> tuple[int, ...]:
        """The steps whose restore reads a segment."""
        steps = self.catalog.steps
        lo = bisect.bisect_left(steps, segment.born)
        hi = len(steps) if segment.died is None else bisect.bisect_left(steps, segment.died)
        return steps[lo:hi]

    def steps_of(self, grid: GridEntry) -> tuple[int, ...]:
        """The steps that a grid is of."""
        return tuple(e.step for e in self.catalog.checkpoints if self.catalog.grid_of(e) == grid)

    def everyone(self, name: str) -> tuple[int, ...]:
        """The steps that need an object."""
        found = {step for s in self.segments.get(name, ()) for step in self.readers(s)}
        found |= {holder.step for holder, _ in self.holders.get(name, ())}
        if name in self.grids:
            found |= set(self.steps_of(self.grids[name]))
        return tuple(sorted(found))


def _object_damages(storage: Storage, view: _View, name: str) -> Iterator[Damage]:
    try:
        index = read_index(storage, name, view.sizes[name])
        extents = index.extents()
    except HoldfastError as error:
        yield Damage(name, str(error), view.everyone(name))
        return
    reader = fetch.SegmentReader(storage)
    named = set()
    for entry in view.segments.get(name, ()):
        named.add(entry.extent.offset)
        readers = view.readers(entry)
        try:
            _check_segment(reader, view, index, entry, readers)
        except HoldfastError as error:
            yield Damage(entry.extent.describe(), str(error), readers)
    for holder, extent in view.holders.get(name, ()):
        named.add(extent.offset)
        try:
            fetch.check_objects(storage, view.catalog, [extent])
            fetch.read_dense(storage, extent)
        except HoldfastError as error:
            yield Damage(extent.describe(), str(error), (holder.step,))
    grid = view.grids.get(name)
    if grid is not None and grid.kills is not None:
        named.add(grid.kills.offset)
        try:
            fetch.check_objects(storage, view.catalog, [grid.kills])
            fetch.read_kills(storage, grid)
        except HoldfastError as error:
            yield Damage(grid.kills.describe(), str(error), view.steps_of(grid))
    for extent in extents:
        if extent.offset in named:
            continue
        # No checkpoint reads it any more; its bytes are still checked.
        data = np.empty(extent.bytes, np.uint8)
        try:
            storage.get_into(name, data.data, offset=extent.offset)
            fetch.check_sum(data, extent)
        except HoldfastError as error:
            yield Damage(extent.describe(), str(error), ())


def _check_segment(
    reader: fetch.SegmentReader,
    view: _View,
    index: Index,
    entry: SegmentEntry,
    readers: tuple[int, ...],
) -> None:
    """Read all of a segment; raises what is wrong with it."""
    where = entry.extent.describe()
    if not index.has(entry.extent):
        raise CorruptDataError("catalog and object disagree", where=where)
    if not readers:
        raise CorruptDataError("no checkpoint reads it", where=where)
    schema = view.schemas.get((view.catalog.checkpoint(readers[0]).base, entry.table))
    if schema is None:
        raise CorruptDataError("segment of an unknown table", table=entry.table)
    segment = reader.read(entry, schema)
    ids_N = segment.ids()
    segment.deaths()
    words_W = segment.filter()
    if words_W is not None and not bloom.has(words_W, ids_N).all():
        raise CorruptDataError("segment's filter does not know its own ids", where=where)
    for column in range(len(schema.columns)):
        segment.decode(column)
