"""From the bytes of a read to rows in tables: many segments at once, dead rows left out.

Segments that were read together are scattered with one kernel call where their columns are fp32,
so that a small segment costs a few microseconds. A segment of another codec, or one that looks
damaged, is taken by itself.

Invariant: a segment is checked against its bytes, the catalog, its table and the targets before
anything of it is written.

Not here: reading (fetch.py), which segments in which order (restore.py).

# S segments of a read, F facts of each, T tables, C columns, N rows of a segment
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np

from holdfast.checkpoint import fetch
from holdfast.checkpoint import kills as killing
from holdfast.checkpoint.catalog import SegmentEntry
from holdfast.checkpoint.codec import parse_codec
from holdfast.checkpoint.fetch import Read
from holdfast.checkpoint.kills import Kills, StoredKills
from holdfast.kernels import bitmap, place
from holdfast.schema import TableSchema

Targets = Mapping[str, Sequence[np.ndarray]]

_FP32 = int.from_bytes(parse_codec("fp32").wire(), "little")
_EVER = 1 << 62
_NOWHERE = (0, 0)


class Scatter:
    """Puts segments into tables as they were at one step."""

    def __init__(
        self,
        targets: Targets,
        schemas: Mapping[str, TableSchema],
        kills: StoredKills,
        step: int,
        *,
        changed: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """In ``changed``, bitmaps by table, the rows of every segment are marked.

        The targets of a table may be its first columns alone: weights without row state.
        """
        self._targets = targets
        self._schemas = schemas
        self._kills = kills
        self._step = step
        self._changed = changed
        self._marking = threading.Lock()
        self._table_at = {name: index for index, name in enumerate(targets)}
        self._tables = _describe(targets, schemas)
        self._words_T = np.array(
            [0 if changed is None else changed[name].ctypes.data for name in targets], np.int64
        )

    def put(self, read: Read, *, is_masked: bool) -> int:
        """Scatter segments that were read together; how many of their rows were dead.

        Raises:
            CorruptDataError: names the object.
        """
        data = read.data
        # Table by table: rows of many chunks then go to the same pages one after the other.
        places = sorted(read.places, key=lambda place: (place[0].table, place[0].born))
        for entry, at in places:
            fetch.check_sum(data[at : at + entry.extent.bytes], entry.extent)
        kills_of = self._kills.places if is_masked else {}
        facts_SF = np.array(
            [
                (at, e.extent.bytes, e.rows, e.first, e.last, self._table_at[e.table],
                 _EVER if e.deaths_through is None else e.deaths_through,
                 *kills_of.get((e.table, e.born), _NOWHERE))
                for e, at in places
            ],
            np.int64,
        )  # fmt: skip
        masked, is_odd_S = place.place(
            np.frombuffer(data, np.uint8),
            facts_SF,
            self._tables,
            _FP32,
            self._kills.all.ids_N,
            self._kills.all.deaths_N,
            self._step,
            is_masked=is_masked,
        )
        if self._changed is not None:
            even_S = np.flatnonzero(~is_odd_S)
            with self._marking:  # threads would undo each other's bits
                place.mark(
                    np.frombuffer(data, np.uint8),
                    facts_SF[even_S],
                    self._words_T,
                    self._tables.widths_TC.shape[1],
                )
        for index in np.flatnonzero(is_odd_S):
            entry, at = places[int(index)]
            masked += self._put_one(entry, data, at, is_masked=is_masked)
        return masked

    def _mark(self, table: str, ids_N: np.ndarray) -> None:
        if self._changed is not None:
            words_W = self._changed[table]
            with self._marking:
                bitmap.mark(words_W, ids_N, words_W.size * 64)

    def _put_one(self, entry: SegmentEntry, data: memoryview, at: int, *, is_masked: bool) -> int:
        part = data[at : at + entry.extent.bytes]
        segment = fetch.checked_segment(part, entry, self._schemas[entry.table])
        ids_N = segment.ids()
        self._mark(entry.table, ids_N)
        masked = 0
        if is_masked:
            dead_N = dead_at(self._step, entry, ids_N, segment.deaths(), self._kills)
            masked = int(dead_N.sum())
            ids_N[dead_N] = -1
        for column, dst_MD in enumerate(self._targets[entry.table]):
            segment.decode_into(column, dst_MD, ids_N)
        return masked


def _describe(targets: Targets, schemas: Mapping[str, TableSchema]) -> place.Tables:
    """The targets as the kernel takes them."""
    columns = max((len(schemas[name].columns) for name in targets), default=1)
    widths_TC, address_TC = np.zeros((2, len(targets), columns), np.int64)
    for index, (name, arrays) in enumerate(targets.items()):
        schema = schemas[name]
        for c, column in enumerate(schema.columns):
            widths_TC[index, c] = column.width
        for c, dst_MD in enumerate(arrays):
            assert dst_MD.dtype == np.float32 and dst_MD.flags.c_contiguous
            assert dst_MD.shape == (schema.rows, schema.columns[c].width)
            address_TC[index, c] = dst_MD.ctypes.data
    rows_T = np.array([schemas[name].rows for name in targets], np.int64)
    return place.Tables(rows_T, widths_TC, address_TC)


def dead_at(
    step: int, entry: SegmentEntry, ids_N: np.ndarray, deaths_N: np.ndarray | None, kills: Kills
) -> np.ndarray:
    """Which rows of a segment that a grid has worked off are dead at a step.

    ``deaths_N`` is what the segment itself says of them.
    """
    dead_N = np.zeros(len(ids_N), bool)
    inner_N = fetch.deaths_of(entry, deaths_N)
    if inner_N is not None:
        dead_N |= (inner_N >= 0) & (inner_N <= step)
    vector = kills.get((entry.table, entry.born))
    if vector is not None:
        outer_N = killing.look_up(vector, ids_N)
        dead_N |= (outer_N >= 0) & (outer_N <= step)
    return dead_N
