"""From the bytes of a read to rows in tables: many segments at once, dead rows left out.

A run of segments that was read with one request is scattered with one kernel call where its columns
are fp32; a segment of another codec is decoded by itself.

Invariant: a segment's header is checked against its bytes, its table and the targets before
anything of it is handed to a kernel.

Not here: reading (fetch.py), which segments in which order (restore.py).

# N rows of a segment, D floats of one column
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from holdfast.checkpoint import fetch
from holdfast.checkpoint import kills as killing
from holdfast.checkpoint.catalog import SegmentEntry
from holdfast.checkpoint.codec import parse_codec
from holdfast.checkpoint.kills import Kills
from holdfast.checkpoint.segment import Segment
from holdfast.errors import CorruptDataError
from holdfast.kernels import place
from holdfast.tables import TableSchema

Targets = Mapping[str, Sequence[np.ndarray]]

_FP32 = parse_codec("fp32").wire()
_EVER = 1 << 62
_DEATHS = struct.Struct("<II")


class Scatter:
    """Puts segments into tables as they were at one step."""

    def __init__(
        self,
        targets: Targets,
        schemas: Mapping[str, TableSchema],
        kills: Kills,
        step: int,
        *,
        on_ids: Callable[[SegmentEntry, np.ndarray], None] | None = None,
    ) -> None:
        """``on_ids`` hears the ids of every segment; that takes a Python call for each."""
        for columns in targets.values():
            for dst_MD in columns:
                assert dst_MD.dtype == np.float32 and dst_MD.flags.c_contiguous
        self._targets = targets
        self._schemas = schemas
        self._kills = kills
        self._step = step
        self._on_ids = on_ids
        self._columns_max = max((len(columns) for columns in targets.values()), default=1)
        self._addresses = {
            name: [(dst_MD.shape[0], dst_MD.ctypes.data) for dst_MD in columns]
            for name, columns in targets.items()
        }
        # All vectors in a row, so that a kernel can be told where each begins and ends.
        self._place_of: dict[tuple[str, int], tuple[int, int]] = {}
        end = 0
        for key, vector in kills.items():
            self._place_of[key] = (end, end + len(vector))
            end += len(vector)
        vectors = list(kills.values()) or [killing.NO_KILLS]
        self._kills_K = np.concatenate([vector.ids_N for vector in vectors])
        self._deaths_K = np.concatenate([vector.deaths_N for vector in vectors])

    def put(self, run: Sequence[SegmentEntry], data: memoryview, *, is_masked: bool) -> int:
        """Scatter segments that lie in ``data`` as in their object; how many rows were dead.

        Raises:
            CorruptDataError: names the object.
        """
        start = run[0].extent.offset
        masked = 0
        jobs: list[tuple[int, ...]] = []
        columns: list[list[tuple[int, int, int]]] = []
        batched: list[SegmentEntry] = []
        for entry in run:
            at = entry.extent.offset - start
            part = data[at : at + entry.extent.bytes]
            fetch.check_sum(part, entry.extent)
            segment = fetch.checked_segment(part, entry, self._schemas[entry.table])
            is_raw = all(column.wire == _FP32 for column in segment.header.columns)
            if self._on_ids is not None or not is_raw:
                masked += self._put_one(entry, segment, is_masked=is_masked)
                continue
            jobs.append(self._job(entry, segment, part, at, is_masked=is_masked))
            columns.append(self._column_jobs(entry, segment, at))
            batched.append(entry)
        if jobs:
            found = place.place(
                np.frombuffer(data, np.uint8),
                np.array(jobs, np.int64),
                np.array(columns, np.int64),
                self._kills_K,
                self._deaths_K,
                self._step,
            )
            if found < 0:
                damaged = batched[-1 - found].extent.describe()
                raise CorruptDataError("segment ids or deaths are damaged", where=damaged)
            masked += found
        return masked

    def _put_one(self, entry: SegmentEntry, segment: Segment, *, is_masked: bool) -> int:
        ids_N = segment.ids()
        if self._on_ids is not None:
            self._on_ids(entry, ids_N)
        masked = 0
        if is_masked:
            dead_N = dead_at(self._step, entry, ids_N, segment.deaths(), self._kills)
            masked = int(dead_N.sum())
            ids_N[dead_N] = -1
        for column, dst_MD in enumerate(self._targets[entry.table]):
            segment.decode_into(column, dst_MD, ids_N)
        return masked

    def _job(
        self, entry: SegmentEntry, segment: Segment, part: memoryview, at: int, *, is_masked: bool
    ) -> tuple[int, ...]:
        header = segment.header
        lo = hi = steps = deaths_at = item = 0
        steps_at = -1
        if is_masked:
            lo, hi = self._place_of.get((entry.table, entry.born), (0, 0))
            if header.deaths.bytes:
                offset = header.deaths.offset
                steps, _ = _DEATHS.unpack_from(part, offset)
                item = 1 if steps <= 1 << 8 else 2 if steps <= 1 << 16 else 4
                if header.deaths.bytes != _DEATHS.size + 8 * steps + item * header.rows:
                    where = entry.extent.describe()
                    raise CorruptDataError("segment deaths are damaged", where=where)
                steps_at = at + offset + _DEATHS.size
                deaths_at = steps_at + 8 * steps
        through = _EVER if entry.deaths_through is None else entry.deaths_through
        table_rows = self._addresses[entry.table][0][0]
        return (
            header.rows,
            header.first,
            header.last,
            header.ids_encoding,
            at + header.ids.offset,
            header.ids.bytes,
            steps_at,
            steps,
            deaths_at,
            item,
            through,
            lo,
            hi,
            table_rows,
        )

    def _column_jobs(
        self, entry: SegmentEntry, segment: Segment, at: int
    ) -> list[tuple[int, int, int]]:
        header = segment.header
        jobs = []  # the targets may be the first columns alone: weights without row state
        for part, (rows, address) in zip(
            header.columns, self._addresses[entry.table], strict=False
        ):
            if part.bytes != 4 * header.rows * part.width:
                where = entry.extent.describe()
                raise CorruptDataError("section has the wrong length", where=where)
            assert header.last < rows
            jobs.append((at + part.offset, part.width, address))
        return jobs + [(0, 0, 0)] * (self._columns_max - len(jobs))


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
