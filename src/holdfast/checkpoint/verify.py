"""Verify: read every byte of a run and name what is damaged.

Invariant: any changed bit and any missing byte of a catalog or an object that a catalog names is
found; verification goes on after a damage, so one pass names them all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from holdfast.checkpoint import catalog as catalogs
from holdfast.checkpoint import fetch, restore
from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.object import read_index
from holdfast.errors import CorruptDataError, HoldfastError, NotFoundError
from holdfast.storage import open_storage
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
) -> VerifyReport:
    """Check every catalog, object, segment and row of a run.

    Raises:
        NotFoundError: there is no run.
    """
    storage = open_storage(os.fspath(run)) if isinstance(run, str | os.PathLike) else run
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
    for name, size in newest.objects:
        damages.extend(_object_damages(storage, newest, name))
        segments += sum(1 for s in newest.segments if s.extent.object == name)
        done += size
        on_progress(done, total)
    return VerifyReport(
        len(existing), len(newest.objects), segments, read_bytes + done, tuple(damages)
    )


def _object_damages(storage: Storage, catalog: Catalog, name: str) -> Iterator[Damage]:
    entries = [s for s in catalog.segments if s.extent.object == name]
    holders = [e for e in catalog.checkpoints if e.dense.object == name]
    steps = catalog.steps
    everyone = tuple(
        step
        for step in steps
        if any(s.is_alive(step) for s in entries) or any(e.step == step for e in holders)
    )
    try:
        index = read_index(storage, name, dict(catalog.objects)[name])
    except HoldfastError as error:
        yield Damage(name, str(error), everyone)
        return
    reader = fetch.SegmentReader(storage)
    schemas = {
        (entry.base, table.name): table
        for entry in catalog.checkpoints
        for table in catalog.schema_of(entry)
    }
    named = set()
    for entry in entries:
        named.add(entry.extent.offset)
        readers = tuple(step for step in steps if entry.is_alive(step))
        try:
            if not index.has(entry.extent):
                raise CorruptDataError("catalog and object disagree", where=entry.extent.describe())
            if not readers:
                raise CorruptDataError("no checkpoint reads it", where=entry.extent.describe())
            found = schemas.get((catalog.checkpoint(readers[0]).base, entry.table))
            if found is None:
                raise CorruptDataError("segment of an unknown table", table=entry.table)
            schema = found
            segment = reader.read(entry, schema)
            segment.ids()
            for column in range(len(schema.columns)):
                segment.decode(column)
        except HoldfastError as error:
            yield Damage(entry.extent.describe(), str(error), readers)
    for holder in holders:
        named.add(holder.dense.offset)
        try:
            fetch.check_objects(storage, catalog, [holder.dense])
            fetch.read_dense(storage, holder.dense)
        except HoldfastError as error:
            yield Damage(holder.dense.describe(), str(error), (holder.step,))
    for extent in index.extents():
        if (
            extent.offset not in named
        ):  # no checkpoint reads it any more; its bytes are still checked
            data = np.empty(extent.bytes, np.uint8)
            try:
                storage.get_into(name, data.data, offset=extent.offset)
                fetch.check_sum(data, extent)
            except HoldfastError as error:
                yield Damage(extent.describe(), str(error), ())
