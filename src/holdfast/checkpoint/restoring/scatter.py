"""From the bytes of a read to rows in tables: many segments at once, dead rows left out.

Segments that were read together are scattered with one kernel call where their columns are stored
as they are in memory and go whole to rows that follow each other, so that a small segment costs a
few microseconds. A segment of another codec, one whose rows or floats go elsewhere, or one that
looks damaged, is taken by itself.

Invariant: a segment is checked against its bytes, the catalog, its table and the targets before
anything of it is written.

Not here: reading (fetch.py), which segments in which order (restore.py).

# S segments of a read, F facts of each, T tables, C columns, N rows of a segment
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np

from holdfast.checkpoint.format import deletion_vectors
from holdfast.checkpoint.format.catalog import SegmentEntry
from holdfast.checkpoint.format.codec import fit_codec, parse_codec
from holdfast.checkpoint.format.deletion_vectors import DeletionVectors, StoredDeletionVectors
from holdfast.checkpoint.format.segment import DTYPE_NUMBERS, Segment
from holdfast.checkpoint.restoring import fetch
from holdfast.checkpoint.restoring.destination import Destination, Destinations
from holdfast.checkpoint.restoring.fetch import Read
from holdfast.checkpoint.restoring.row_check import RowCheck
from holdfast.kernels.rows import bitmap
from holdfast.kernels.segments import scatter
from holdfast.model.dtypes import array_dtype
from holdfast.model.schema import TableSchema

_LOSSLESS = parse_codec("fp32")
_EVER, _NEVER = 1 << 62, -1
_NOWHERE = (0, 0)


def _counting_deaths(entry: SegmentEntry) -> int:
    """Until which step the deaths count that a segment names of its rows."""
    if fetch.lives_whole(entry):
        return _NEVER  # it must name none
    return _EVER if entry.deaths_through is None else entry.deaths_through


class Scatter:
    """Puts segments into tables as they were at one step."""

    def __init__(
        self,
        destinations: Destinations,
        schemas: Mapping[str, TableSchema],
        vectors: StoredDeletionVectors,
        step: int,
        *,
        has_marks: bool = False,
    ) -> None:
        """With ``has_marks`` the rows of every segment are marked where destinations ask for it."""
        self._destinations = destinations
        self._schemas = schemas
        self._vectors = vectors
        self._step = step
        self._has_marks = has_marks
        self._marking = threading.Lock()
        self._table_at = {name: index for index, name in enumerate(destinations)}
        self._tables = _describe(destinations, schemas)
        words = [_only(found) for found in destinations.values()]
        self._words_T = np.array(
            [0 if d is None or d.words_W is None else d.words_W.ctypes.data for d in words],
            np.int64,
        )

    def put(self, read: Read, check: RowCheck, *, is_masked: bool) -> int:
        """Scatter segments that were read together; how many of their rows were dead.

        Which rows they hold is noted in ``check``.

        Raises:
            CorruptDataError: names the object.
        """
        data = read.data
        # Table by table: rows of many chunks then go to the same pages one after the other.
        places = sorted(read.places, key=lambda place: (place[0].table, place[0].born))
        for entry, at in places:
            fetch.check_sum(data[at : at + entry.extent.bytes], entry.extent)
        vectors_of = self._vectors.places if is_masked else {}
        facts_SF = np.array(
            [
                (at, e.extent.bytes, e.rows, e.first, e.last, self._table_at[e.table],
                 _counting_deaths(e),
                 *vectors_of.get((e.table, e.born), _NOWHERE), check.birth_of(e))
                for e, at in places
            ],
            np.int64,
        )  # fmt: skip
        placed = scatter.place(
            np.frombuffer(data, np.uint8),
            facts_SF,
            self._tables,
            self._vectors.all.ids_N,
            self._vectors.all.deaths_N,
            self._step,
            is_masked=is_masked,
            births_T=check.addresses(),
        )
        check.add([entry for entry, _ in places], placed)
        if self._has_marks:
            even_S = np.flatnonzero(~placed.is_odd_S)
            with self._marking:  # threads would undo each other's bits
                scatter.mark(
                    np.frombuffer(data, np.uint8), facts_SF[even_S], self._words_T, self._tables
                )
        masked = placed.masked
        for index in np.flatnonzero(placed.is_odd_S):
            entry, at = places[int(index)]
            masked += self._put_one(entry, data, at, check, is_masked=is_masked)
        return masked

    def _put_one(
        self, entry: SegmentEntry, data: memoryview, at: int, check: RowCheck, *, is_masked: bool
    ) -> int:
        part = data[at : at + entry.extent.bytes]
        segment = fetch.checked_segment(part, entry, self._schemas[entry.table])
        ids_N = segment.ids()
        dead_N = None
        if is_masked:
            dead_N = dead_at(self._step, entry, ids_N, segment.deaths(), self._vectors)
        for index, destination in enumerate(self._destinations[entry.table]):
            local_N = destination.shard.local_of(ids_N)
            self._mark(destination, local_N)
            check.note(entry, index, local_N, dead_N)
            if dead_N is not None:
                local_N[dead_N] = -1
            if (local_N >= 0).any():
                _put_rows(segment, destination, local_N)
        return 0 if dead_N is None else int(dead_N.sum())

    def _mark(self, destination: Destination, local_N: np.ndarray) -> None:
        if self._has_marks and destination.words_W is not None:
            rows = destination.shard.local_rows
            with self._marking:
                bitmap.mark(destination.words_W, local_N[local_N >= 0], rows)


def _put_rows(segment: Segment, destination: Destination, local_N: np.ndarray) -> None:
    widths = [part.width for part in segment.header.columns]
    for into in destination.columns:
        whole = slice(0, widths[into.column])
        if into.floats == whole and into.array_MD.flags.c_contiguous:
            segment.decode_into(into.column, into.array_MD, local_N)
        else:
            at_K = np.flatnonzero(local_N >= 0)
            rows_KD = segment.decode_some(into.column, at_K)
            into.array_MD[local_N[at_K]] = rows_KD[:, into.floats]


def _only(found: Sequence[Destination]) -> Destination | None:
    """The one destination of a table that the kernel can serve: whole columns, rows in a row."""
    if len(found) != 1 or not isinstance(found[0].shard.ids, range):
        return None
    is_whole = all(
        into.array_MD.flags.c_contiguous and into.floats == slice(0, into.array_MD.shape[1])
        for into in found[0].columns
    )
    return found[0] if is_whole else None


def _describe(destinations: Destinations, schemas: Mapping[str, TableSchema]) -> scatter.Tables:
    """The destinations as the kernel takes them; a table it cannot serve has no rows for it."""
    columns = max((len(schemas[name].columns) for name in destinations), default=1)
    widths_TC, types_TC, wires_TC, address_TC = np.zeros((4, len(destinations), columns), np.int64)
    rows_T, held_T, first_T = np.zeros((3, len(destinations)), np.int64)
    for index, (name, found) in enumerate(destinations.items()):
        schema = schemas[name]
        one = _only(found)
        if one is None or any(
            into.array_MD.shape[1] != schema.columns[into.column].width for into in one.columns
        ):
            continue
        ids = one.shard.ids
        assert isinstance(ids, range)
        rows_T[index], held_T[index], first_T[index] = schema.rows, len(ids), ids.start
        for c, column in enumerate(schema.columns):
            widths_TC[index, c] = column.width
            types_TC[index, c] = DTYPE_NUMBERS[column.dtype]
            wire = fit_codec(_LOSSLESS, column.dtype).wire()
            wires_TC[index, c] = int.from_bytes(wire, "little")
        for into in one.columns:
            assert into.array_MD.dtype == array_dtype(schema.columns[into.column].dtype)
            assert len(into.array_MD) == len(ids)
            address_TC[index, into.column] = into.array_MD.ctypes.data
    return scatter.Tables(rows_T, held_T, first_T, widths_TC, types_TC, wires_TC, address_TC)


def dead_at(
    step: int,
    entry: SegmentEntry,
    ids_N: np.ndarray,
    deaths_N: np.ndarray | None,
    vectors: DeletionVectors,
) -> np.ndarray:
    """Which rows of a segment that a grid has worked off are dead at a step.

    ``deaths_N`` is what the segment itself says of them.
    """
    dead_N = np.zeros(len(ids_N), bool)
    inner_N = fetch.deaths_of(entry, deaths_N)
    if inner_N is not None:
        dead_N |= (inner_N >= 0) & (inner_N <= step)
    vector = vectors.get((entry.table, entry.born))
    if vector is not None:
        outer_N = deletion_vectors.look_up(vector, ids_N)
        dead_N |= (outer_N >= 0) & (outer_N <= step)
    return dead_N
