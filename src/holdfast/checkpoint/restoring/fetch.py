"""Read what a catalog names: segments whole, parts of them, deletion vectors, dense state.

Invariants:
- No byte is used before its checksum is confirmed; damage raises and names the object.
- A buffer grows only to what the catalog says a segment takes.

Not here: which segments (restore.py, checkpoint/grid/round_plan.py), what their bytes mean
(checkpoint/format/segment.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.boundary.dense import check_dense
from holdfast.checkpoint.format import deletion_vectors
from holdfast.checkpoint.format.catalog import Catalog, GridEntry, SegmentEntry
from holdfast.checkpoint.format.checksum import as_hex, checksum
from holdfast.checkpoint.format.deletion_vectors import StoredDeletionVectors
from holdfast.checkpoint.format.object import Extent, Index, read_footer, read_index
from holdfast.checkpoint.format.segment import (
    HEADER_BYTES_MAX,
    Segment,
    SegmentHeader,
    parse_deaths,
    parse_filter,
    parse_header,
    parse_ids,
)
from holdfast.errors import CorruptDataError
from holdfast.model.names import plain_dense
from holdfast.model.schema import TableSchema
from holdfast.storage.base import Storage

GROUP_BYTES_MAX = 4 << 20  # what was read is still in the caches when it is decoded
GAP_BYTES_MAX = 64 << 10  # costs less to read than another request
REQUESTS_AT_ONCE = 8  # of those that wait for a storage rather than for a processor


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
            check_listed(index, extent)


def check_listed(index: Index, extent: Extent) -> None:
    """Check that an object's own index has exactly this extent.

    Raises:
        CorruptDataError: names the extent.
    """
    if not index.has(extent):
        raise CorruptDataError(
            "catalog and object disagree",
            where=extent.describe(),
            todo="run 'holdfast verify', and restore an older step",
        )


def check_frames(storage: Storage, catalog: Catalog, extents: Iterable[Extent]) -> None:
    """Check head, footer and tail of every object the extents lie in.

    The extents themselves are checked by their checksums when they are read.

    Raises:
        CorruptDataError: names the object.
        NotFoundError: an object is gone.
    """
    sizes = dict(catalog.objects)
    names = list(dict.fromkeys(extent.object for extent in extents))
    if len(names) < 2:
        for name in names:
            read_footer(storage, name, sizes[name])
        return
    # Several requests for each object: one object after the other would add up their latencies.
    with ThreadPoolExecutor(REQUESTS_AT_ONCE, "holdfast-frames") as pool:
        try:
            for _ in pool.map(lambda name: read_footer(storage, name, sizes[name]), names):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def read_checked(storage: Storage, extent: Extent) -> bytes:
    """The bytes of an extent.

    Raises:
        CorruptDataError: names the object.
    """
    data = storage.get(extent.object, offset=extent.offset, length=extent.bytes)
    check_sum(data, extent)
    return data


def read_dense(storage: Storage, extent: Extent) -> Any:
    """A checkpoint's dense state, with names as the plain model has them; its structure checked.

    Raises:
        CorruptDataError: names the object.
    """
    from holdfast.checkpoint.format import tree

    dense = plain_dense(tree.from_bytes(read_checked(storage, extent)))
    check_dense(dense)
    return dense


def read_deletion_vectors(storage: Storage, grid: GridEntry | None) -> StoredDeletionVectors:
    """A grid's deletion vectors, as far as they are valid.

    Raises:
        CorruptDataError: names the object.
    """
    if grid is None or grid.deletion_vectors is None:
        return StoredDeletionVectors()
    data = read_checked(storage, grid.deletion_vectors)
    return deletion_vectors.from_bytes(
        data, through=grid.through, where=grid.deletion_vectors.describe()
    )


class SegmentReader:
    """Reads whole segments, one reused buffer a thread."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._local = threading.local()

    def _buffer(self, size: int) -> memoryview:
        buffer = getattr(self._local, "buffer", None)
        if buffer is None or buffer.nbytes < size:
            buffer = self._local.buffer = np.empty(size, np.uint8)
        view: memoryview = buffer[:size].data
        return view

    def read_bytes(self, entry: SegmentEntry) -> memoryview:
        """A segment's bytes, their checksum confirmed; valid until this thread reads again."""
        extent = entry.extent
        view = self._buffer(extent.bytes)
        self._storage.get_into(extent.object, view, offset=extent.offset)
        check_sum(view, extent)
        return view

    def read(self, entry: SegmentEntry, schema: TableSchema) -> Segment:
        """A segment, checked; valid until this thread reads again."""
        return checked_segment(self.read_bytes(entry), entry, schema)

    def read_group(self, group: Group) -> Read:
        """The bytes of a group, unchecked; valid until this thread reads again."""
        sizes = [_span(stretch) for stretch in group]
        view = self._buffer(sum(sizes))
        at = 0
        places: list[tuple[SegmentEntry, int]] = []
        for stretch, size in zip(group, sizes, strict=True):
            first = stretch[0].extent
            self._storage.get_into(first.object, view[at : at + size], offset=first.offset)
            places += [(entry, at + entry.extent.offset - first.offset) for entry in stretch]
            at += size
        return Read(view, tuple(places))

    def read_stretch(
        self, stretch: Sequence[SegmentEntry], schema: TableSchema
    ) -> list[tuple[SegmentEntry, Segment]]:
        """Segments of one table by one request, checked; valid until this thread reads again."""
        read = self.read_group([list(stretch)])
        found = []
        for entry, at in read.places:
            data = read.data[at : at + entry.extent.bytes]
            check_sum(data, entry.extent)
            found.append((entry, checked_segment(data, entry, schema)))
        return found


Group = list[list[SegmentEntry]]  # stretches: segments that lie close together in one object


@dataclass(frozen=True, slots=True)
class Read:
    """Segments that were read together, and where in the bytes each begins."""

    data: memoryview
    places: tuple[tuple[SegmentEntry, int], ...]


def _span(stretch: Sequence[SegmentEntry]) -> int:
    first, last = stretch[0].extent, stretch[-1].extent
    return last.offset + last.bytes - first.offset


def checked_segment(data: memoryview, entry: SegmentEntry, schema: TableSchema) -> Segment:
    """A segment of bytes whose checksum is confirmed, if it is what the catalog says.

    Raises:
        CorruptDataError: names the object.
    """
    segment = Segment(data, where=entry.extent.describe())
    segment.check_schema(schema)
    _check_header(segment.header, entry)
    return segment


def lives_whole(entry: SegmentEntry) -> bool:
    """Whether all versions in a segment are alive: then it says nothing of their deaths."""
    return entry.died is None and entry.deaths_through is None


def _check_header(header: SegmentHeader, entry: SegmentEntry) -> None:
    where = entry.extent.describe()
    if (header.rows, header.first, header.last) != (entry.rows, entry.first, entry.last):
        raise CorruptDataError("catalog and segment disagree", where=where)
    if header.deaths.bytes and lives_whole(entry):
        raise CorruptDataError("a segment that is alive says when its rows died", where=where)


def groups(
    segments: Iterable[SegmentEntry],
    *,
    bytes_max: int = GROUP_BYTES_MAX,
    gap_max: int = GAP_BYTES_MAX,
) -> list[Group]:
    """Segments in groups to be read and decoded together.

    Neighbours in an object are read with one request, small gaps included; small requests are put
    together, since decoding many segments at a time costs little more than decoding one.
    """
    found: list[Group] = []
    size = bytes_max
    for stretch in stretches(segments, bytes_max, gap_max):
        if size + _span(stretch) > bytes_max:
            found.append([])
            size = 0
        found[-1].append(stretch)
        size += _span(stretch)
    return found


def stretches(
    segments: Iterable[SegmentEntry],
    bytes_max: int = GROUP_BYTES_MAX,
    gap_max: int = GAP_BYTES_MAX,
) -> list[list[SegmentEntry]]:
    """Segments by what one request reads: neighbours in an object, small gaps included."""
    found: list[list[SegmentEntry]] = []
    for entry in sorted(segments, key=lambda s: (s.extent.object, s.extent.offset)):
        extent = entry.extent
        if found:
            first, last = found[-1][0].extent, found[-1][-1].extent
            gap = extent.offset - (last.offset + last.bytes)
            is_near = extent.object == last.object and 0 <= gap <= gap_max
            if is_near and extent.offset + extent.bytes - first.offset <= bytes_max:
                found[-1].append(entry)
                continue
        found.append([entry])
    return found


def deaths_of(entry: SegmentEntry, deaths_N: np.ndarray | None) -> np.ndarray | None:
    """What a segment says of its own rows' deaths, as far as it still counts (-1: alive)."""
    if deaths_N is None or entry.deaths_through is None:
        return deaths_N
    return np.where(deaths_N <= entry.deaths_through, deaths_N, -1)


class PartReader:
    """Reads parts of segments: ids, deaths and filters, without the rows."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def _header(self, entry: SegmentEntry) -> tuple[SegmentHeader, memoryview]:
        extent = entry.extent
        size = min(extent.bytes, HEADER_BYTES_MAX)
        head = memoryview(self._storage.get(extent.object, offset=extent.offset, length=size))
        where = extent.describe()
        header = parse_header(head, total_bytes=extent.bytes, where=where)
        _check_header(header, entry)
        return header, head

    def _part(self, entry: SegmentEntry, head: memoryview, offset: int, length: int) -> memoryview:
        """Bytes of a segment, of which the first ones are read already."""
        if offset + length <= len(head):
            return head[offset : offset + length]
        extent = entry.extent
        return memoryview(
            self._storage.get(extent.object, offset=extent.offset + offset, length=length)
        )

    def filter(self, entry: SegmentEntry) -> np.ndarray | None:
        """The words of a segment's Bloom filter; None where it has none."""
        header, head = self._header(entry)
        part = header.filter
        if part.bytes == 0:
            return None
        data = self._part(entry, head, part.offset, part.bytes)
        return parse_filter(header, data, where=entry.extent.describe())

    def ids(self, entry: SegmentEntry) -> np.ndarray:
        """The row ids of a segment."""
        header, head = self._header(entry)
        data = self._part(entry, head, header.ids.offset, header.ids.bytes)
        return parse_ids(header, data, where=entry.extent.describe())

    def ids_and_deaths(self, entry: SegmentEntry) -> tuple[np.ndarray, np.ndarray | None]:
        """The row ids of a segment, and what it says of their deaths."""
        header, head = self._header(entry)
        where = entry.extent.describe()
        ids, deaths = header.ids, header.deaths
        size = deaths.offset + deaths.bytes - ids.offset
        data = self._part(entry, head, ids.offset, size)
        ids_N = parse_ids(header, data[: ids.bytes], where=where)
        if deaths.bytes == 0:
            return ids_N, None
        found = parse_deaths(header, data[deaths.offset - ids.offset :], where=where)
        return ids_N, deaths_of(entry, found)
