"""From the bytes of a read to rows in tables: many segments at once, dead rows left out.

Segments that were read together are scattered with one kernel call where their columns are fp32:
headers are checked as arrays, so that a small segment costs a few microseconds. A segment
of another codec, or one that looks damaged, is taken by itself.

Invariant: a segment's header is checked against its bytes, the catalog, its table and the targets
before anything of it is handed to a kernel.

Not here: reading (fetch.py), which segments in which order (restore.py).

# S segments of a read, C columns, N rows of a segment
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from holdfast.checkpoint import fetch
from holdfast.checkpoint import kills as killing
from holdfast.checkpoint.catalog import SegmentEntry
from holdfast.checkpoint.codec import parse_codec
from holdfast.checkpoint.fetch import Read
from holdfast.checkpoint.kills import Kills
from holdfast.checkpoint.segment import (
    DEATHS_HEAD_BYTES,
    HEADER_BYTES_MIN,
    HeaderArrays,
    death_layout,
    parse_headers,
    wire_number,
)
from holdfast.errors import CorruptDataError
from holdfast.kernels import place
from holdfast.tables import TableSchema

Targets = Mapping[str, Sequence[np.ndarray]]

_FP32 = wire_number(parse_codec("fp32").wire())
_EVER = 1 << 62


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
        """``on_ids`` hears the ids of every segment; that takes a Python call for each.

        The targets of a table may be its first columns alone: weights without row state.
        """
        self._targets = targets
        self._schemas = schemas
        self._kills = kills
        self._step = step
        self._on_ids = on_ids
        names = list(targets)
        self._table_at = {name: index for index, name in enumerate(names)}
        self._columns_max = max((len(schemas[name].columns) for name in names), default=1)
        shape = (len(names), self._columns_max)
        self._widths_TC = np.zeros(shape, np.int64)
        self._wanted_TC = np.zeros(shape, np.int64)
        self._address_TC = np.zeros(shape, np.int64)
        self._rows_T = np.zeros(len(names), np.int64)
        for index, name in enumerate(names):
            schema = schemas[name]
            self._rows_T[index] = schema.rows
            for c, column in enumerate(schema.columns):
                self._widths_TC[index, c] = column.width
            for c, dst_MD in enumerate(targets[name]):
                assert dst_MD.dtype == np.float32 and dst_MD.flags.c_contiguous
                assert dst_MD.shape == (schema.rows, schema.columns[c].width)
                self._wanted_TC[index, c] = dst_MD.shape[1]
                self._address_TC[index, c] = dst_MD.ctypes.data
        # All vectors in a row, so that a kernel can be told where each begins and ends.
        self._place_of: dict[tuple[str, int], tuple[int, int]] = {}
        end = 0
        for key, vector in kills.items():
            self._place_of[key] = (end, end + len(vector))
            end += len(vector)
        vectors = list(kills.values()) or [killing.NO_KILLS]
        self._kills_K = np.concatenate([vector.ids_N for vector in vectors])
        self._deaths_K = np.concatenate([vector.deaths_N for vector in vectors])

    def put(self, read: Read, *, is_masked: bool) -> int:
        """Scatter segments that were read together; how many of their rows were dead.

        Raises:
            CorruptDataError: names the object.
        """
        data = read.data
        for entry, at in read.places:
            fetch.check_sum(data[at : at + entry.extent.bytes], entry.extent)
        if self._on_ids is not None or len(data) < HEADER_BYTES_MIN:
            places = read.places
            return sum(self._put_one(entry, data, at, is_masked=is_masked) for entry, at in places)
        buffer_B = np.frombuffer(data, np.uint8)
        facts_SF = np.array(
            [
                (at, e.extent.bytes, e.rows, e.first, e.last, self._table_at[e.table],
                 _EVER if e.deaths_through is None else e.deaths_through,
                 *(self._place_of.get((e.table, e.born), (0, 0)) if is_masked else (0, 0)))
                for e, at in read.places
            ],
            np.int64,
        )  # fmt: skip
        at_S, bytes_S = facts_SF[:, 0], facts_SF[:, 1]
        heads = parse_headers(buffer_B, at_S, bytes_S, columns_max=self._columns_max)
        is_plain_S = self._is_plain(facts_SF, heads)
        jobs_SJ, is_plain_S = _jobs(buffer_B, facts_SF, heads, is_plain_S, is_masked=is_masked)
        jobs_SJ[:, place.TABLE_ROWS] = self._rows_T[facts_SF[:, 5]]
        masked = 0
        if is_plain_S.any():
            columns_SCK = np.stack(
                [heads.sections_at_SC, self._wanted_TC[facts_SF[:, 5]],
                 self._address_TC[facts_SF[:, 5]]], axis=2
            )  # fmt: skip
            found = place.place(
                buffer_B,
                jobs_SJ[is_plain_S],
                columns_SCK[is_plain_S],
                self._kills_K,
                self._deaths_K,
                self._step,
            )
            if found < 0:
                entry, _ = read.places[int(np.flatnonzero(is_plain_S)[-1 - found])]
                raise CorruptDataError(
                    "segment ids or deaths are damaged", where=entry.extent.describe()
                )
            masked += found
        for index in np.flatnonzero(~is_plain_S):
            entry, at = read.places[int(index)]
            masked += self._put_one(entry, data, at, is_masked=is_masked)
        return masked

    def _is_plain(self, facts_SF: np.ndarray, heads: HeaderArrays) -> np.ndarray:
        """Which segments are sound, as the catalog and the schema say, and fp32 in every column."""
        table_S = facts_SF[:, 5]
        widths_SC = self._widths_TC[table_S]
        wires_SC = np.where(widths_SC > 0, _FP32, 0)
        is_plain_S: np.ndarray = (
            heads.is_sound_S
            & (heads.rows_S == facts_SF[:, 2])
            & (heads.first_S == facts_SF[:, 3])
            & (heads.last_S == facts_SF[:, 4])
            & (heads.last_S < self._rows_T[table_S])
            & (heads.widths_SC == widths_SC).all(axis=1)
            & (heads.wires_SC == wires_SC).all(axis=1)
            & (heads.sections_bytes_SC == 4 * heads.rows_S[:, None] * widths_SC).all(axis=1)
        )
        return is_plain_S

    def _put_one(self, entry: SegmentEntry, data: memoryview, at: int, *, is_masked: bool) -> int:
        part = data[at : at + entry.extent.bytes]
        segment = fetch.checked_segment(part, entry, self._schemas[entry.table])
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


def _jobs(
    buffer_B: np.ndarray,
    facts_SF: np.ndarray,
    heads: HeaderArrays,
    is_plain_S: np.ndarray,
    *,
    is_masked: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel is told of each segment, and for which of them that is sound."""
    jobs_SJ = np.zeros((len(facts_SF), place.JOB_NUMBERS), np.int64)
    jobs_SJ[:, place.ROWS] = heads.rows_S
    jobs_SJ[:, place.FIRST] = heads.first_S
    jobs_SJ[:, place.LAST] = heads.last_S
    jobs_SJ[:, place.ID_ENCODING] = heads.ids_encoding_S
    jobs_SJ[:, place.IDS_AT] = heads.ids_at_S
    jobs_SJ[:, place.IDS_BYTES] = heads.ids_bytes_S
    jobs_SJ[:, place.DEATH_STEPS_AT] = -1
    jobs_SJ[:, place.DEATHS_THROUGH] = facts_SF[:, 6]
    jobs_SJ[:, place.KILLS_LO] = facts_SF[:, 7]
    jobs_SJ[:, place.KILLS_HI] = facts_SF[:, 8]
    if is_masked:
        own_D = np.flatnonzero(is_plain_S & (heads.deaths_bytes_S >= DEATHS_HEAD_BYTES))
        is_plain_S = is_plain_S & (
            (heads.deaths_bytes_S == 0) | (heads.deaths_bytes_S >= DEATHS_HEAD_BYTES)
        )
        at_D = heads.deaths_at_S[own_D]
        count_D = (
            buffer_B[at_D[:, None] + np.arange(4)].view("<u4")[:, 0].astype(np.int64)
            if len(own_D)
            else np.empty(0, np.int64)
        )
        steps_bytes_D, item_D = death_layout(count_D)
        expected_D = DEATHS_HEAD_BYTES + steps_bytes_D + item_D * heads.rows_S[own_D]
        is_plain_S[own_D] &= (heads.deaths_bytes_S[own_D] == expected_D) & (count_D > 0)
        jobs_SJ[own_D, place.DEATH_STEPS_AT] = at_D + DEATHS_HEAD_BYTES
        jobs_SJ[own_D, place.DEATH_STEPS] = count_D
        jobs_SJ[own_D, place.DEATHS_AT] = at_D + DEATHS_HEAD_BYTES + steps_bytes_D
        jobs_SJ[own_D, place.DEATH_ITEM] = item_D
    return jobs_SJ, is_plain_S


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
