"""Read some rows of one table: find the segment that holds each row, then read those segments.

    segments alive at the step, newest first -> which of the wanted ids each holds (in parallel)
      -> plan_sources: each row from the newest that holds it -> read and decode (in parallel)

Invariants:
- A row comes from the newest segment that holds it. Filters are not asked: one that forgets a row
  would bring an older version back.
- A segment is read whole only if a wanted row comes from it, and only once.
- The newest birth is looked at alone, since rows that are asked for are often hot. Beyond it the
  ids of several births are read at a time, twice as many in each round: so many may be in vain.
- Every row that is handed out was read; one that is nowhere raises.

Not here: whole tables (restore.py).

# N wanted rows, K of them in one segment
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from holdfast.checkpoint.format.catalog import Catalog, SegmentEntry
from holdfast.checkpoint.format.segment import Segment
from holdfast.checkpoint.restoring import fetch
from holdfast.checkpoint.restoring.fetch import PartReader, SegmentReader
from holdfast.checkpoint.restoring.restore import check_complete, restore_rows
from holdfast.errors import CorruptDataError, DataLossError
from holdfast.model.dtypes import array_dtype
from holdfast.model.schema import TableSchema
from holdfast.storage.base import Storage

_BORN = operator.attrgetter("born")
_WHOLE_BYTES_MAX = 32 << 10  # a segment up to this is read whole rather than asked for its parts
_SECOND_ROUND = 2 * fetch.REQUESTS_AT_ONCE  # segments that are looked at after the newest birth


@dataclass(frozen=True, slots=True)
class Holding:
    """The wanted rows that a segment holds: positions among the wanted, and in the segment."""

    entry: SegmentEntry
    wanted_K: np.ndarray
    stored_K: np.ndarray


def read_rows(
    storage: Storage, catalog: Catalog, step: int, schema: TableSchema, ids_N: np.ndarray
) -> list[np.ndarray]:
    """Some rows of one table, every column, in the order of ``ids_N`` (ascending, unique).

    Raises:
        CorruptDataError: names the object.
        DataLossError: a row is nowhere.
    """
    check_complete(catalog, step)
    if 4 * len(ids_N) > schema.rows:
        whole = _room(schema, schema.rows)
        restore_rows(storage, catalog, step, {schema.name: whole})
        return [column_MD[ids_N] for column_MD in whole]
    with ThreadPoolExecutor(fetch.REQUESTS_AT_ONCE, "holdfast-read") as pool:
        try:
            reading = _Reading(storage, catalog, schema, ids_N, pool)
            sources = reading.find(catalog.alive(step, schema.name))
            found = sum(len(source.wanted_K) for source in sources)
            if found < len(ids_N):
                raise _lacks(sources, step, schema, ids_N)
            return reading.read(sources)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def plan_sources(holdings: Sequence[Holding], is_open_N: np.ndarray) -> list[Holding]:
    """Which rows to take from which segment: each from the newest that holds it.

    ``holdings`` come newest birth first. ``is_open_N`` tells which rows are still looked for; those
    that are found are closed.

    >>> from types import SimpleNamespace
    >>> old, new = SimpleNamespace(born=1), SimpleNamespace(born=2)
    >>> is_open_N = np.array([True, True, True])
    >>> found = plan_sources(
    ...     [Holding(new, np.array([1]), np.array([7])),
    ...      Holding(old, np.array([0, 1]), np.array([4, 5]))], is_open_N)
    >>> [(source.entry.born, source.wanted_K.tolist()) for source in found], is_open_N.tolist()
    ([(2, [1]), (1, [0])], [False, False, True])

    Raises:
        CorruptDataError: two segments of one birth hold the same row.
    """
    sources = []
    for _, same_birth in itertools.groupby(holdings, key=lambda holding: holding.entry.born):
        taken = []
        for holding in same_birth:
            is_sought_K = is_open_N[holding.wanted_K]
            if is_sought_K.any():
                taken.append(
                    Holding(
                        holding.entry,
                        holding.wanted_K[is_sought_K],
                        holding.stored_K[is_sought_K],
                    )
                )
        for source in taken:
            if not is_open_N[source.wanted_K].all():
                raise CorruptDataError(
                    "a row is stored twice",
                    where=source.entry.extent.describe(),
                    table=source.entry.table,
                    todo="run 'holdfast verify', and restore another step",
                )
            is_open_N[source.wanted_K] = False
        sources += taken
    return sources


class _Reading:
    """One read: its requests, several at a time."""

    def __init__(
        self,
        storage: Storage,
        catalog: Catalog,
        schema: TableSchema,
        ids_N: np.ndarray,
        pool: Executor,
    ) -> None:
        self._storage = storage
        self._catalog = catalog
        self._schema = schema
        self._ids_N = ids_N
        self._pool = pool
        self._segments = SegmentReader(storage)
        self._parts = PartReader(storage)

    def find(self, alive: Sequence[SegmentEntry]) -> list[Holding]:
        """Where each wanted row is, as far as segments hold it."""
        is_open_N = np.ones(len(self._ids_N), bool)
        sources: list[Holding] = []
        for entries in _rounds([s for s in reversed(alive) if self._is_near(s)]):
            if not is_open_N.any():
                break
            sources += plan_sources(self._look(entries), is_open_N)
        return sources

    def _is_near(self, entry: SegmentEntry) -> bool:
        lo, hi = np.searchsorted(self._ids_N, (entry.first, entry.last + 1))
        return bool(lo < hi)

    def _look(self, entries: Sequence[SegmentEntry]) -> list[Holding]:
        """Which wanted rows these segments hold, in the order of the segments."""
        small = [s for s in entries if s.extent.bytes <= _WHOLE_BYTES_MAX and not _is_run(s)]
        large = [s for s in entries if s.extent.bytes > _WHOLE_BYTES_MAX and not _is_run(s)]
        wholes = self._pool.map(self._look_into, fetch.stretches(small))
        ids = self._pool.map(lambda entry: self._match(entry, self._parts.ids(entry)), large)
        runs = [self._match_run(entry) for entry in entries if _is_run(entry)]
        found = {h.entry.extent: h for h in (*itertools.chain.from_iterable(wholes), *ids, *runs)}
        return [found[entry.extent] for entry in entries]

    def _look_into(self, stretch: Sequence[SegmentEntry]) -> list[Holding]:
        return [
            self._match(entry, segment.ids())
            for entry, segment in self._segments.read_stretch(stretch, self._schema)
        ]

    def _match(self, entry: SegmentEntry, stored_ids: np.ndarray) -> Holding:
        lo, hi = np.searchsorted(self._ids_N, (entry.first, entry.last + 1))
        _, wanted_K, stored_K = np.intersect1d(
            self._ids_N[lo:hi], stored_ids, assume_unique=True, return_indices=True
        )
        return Holding(entry, wanted_K + lo, stored_K)

    def _match_run(self, entry: SegmentEntry) -> Holding:
        """The same where ids leave nothing out: they need not be read."""
        lo, hi = np.searchsorted(self._ids_N, (entry.first, entry.last + 1))
        return Holding(entry, np.arange(lo, hi), self._ids_N[lo:hi] - entry.first)

    def read(self, sources: Sequence[Holding]) -> list[np.ndarray]:
        """The rows that were found, every column."""
        source_of = {source.entry.extent: source for source in sources}
        entries = [source.entry for source in sources]
        fetch.check_frames(self._storage, self._catalog, [s.extent for s in entries])

        def decode(stretch: Sequence[SegmentEntry]) -> list[tuple[Holding, list[np.ndarray]]]:
            segments = self._segments.read_stretch(stretch, self._schema)
            pairs = [(source_of[entry.extent], segment) for entry, segment in segments]
            return [(source, self._decode(source, segment)) for source, segment in pairs]

        columns: list[np.ndarray] = []
        for decoded in self._pool.map(decode, fetch.stretches(entries, gap_max=0)):
            # Only now is the schema's width confirmed.
            columns = columns or _room(self._schema, len(self._ids_N))
            for source, rows in decoded:
                for column_ND, rows_KD in zip(columns, rows, strict=True):
                    column_ND[source.wanted_K] = rows_KD
        return columns or _room(self._schema, 0)

    def _decode(self, source: Holding, segment: Segment) -> list[np.ndarray]:
        if not np.array_equal(segment.ids()[source.stored_K], self._ids_N[source.wanted_K]):
            raise CorruptDataError(
                "a segment changed while it was read", where=source.entry.extent.describe()
            )
        return [segment.decode_some(i, source.stored_K) for i in range(len(self._schema.columns))]


def _rounds(newest_first: Sequence[SegmentEntry]) -> Iterator[list[SegmentEntry]]:
    """Segments that are looked at together: whole births, the newest one alone."""
    room, entries = 1, list[SegmentEntry]()
    for _, same_birth in itertools.groupby(newest_first, key=_BORN):
        entries += same_birth
        if len(entries) >= room:
            yield entries
            room, entries = max(_SECOND_ROUND, 2 * room), []
    if entries:
        yield entries


def _is_run(entry: SegmentEntry) -> bool:
    """Whether a segment holds every row between its first and its last."""
    return entry.rows == entry.last - entry.first + 1


def _lacks(
    sources: Sequence[Holding], step: int, schema: TableSchema, ids_N: np.ndarray
) -> DataLossError:
    is_open_N = np.ones(len(ids_N), bool)
    for source in sources:
        is_open_N[source.wanted_K] = False
    return DataLossError(
        "rows are nowhere in the checkpoint",
        step=step,
        table=schema.name,
        rows=int(is_open_N.sum()),
        first=int(ids_N[np.flatnonzero(is_open_N)[0]]),
        todo="run 'holdfast verify', and restore another step",
    )


def _room(schema: TableSchema, rows: int) -> list[np.ndarray]:
    return [np.empty((rows, c.width), array_dtype(c.dtype)) for c in schema.columns]
