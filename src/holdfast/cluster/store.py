"""A server's part of the second layer: its rows stored as segments, and loaded again. No torch.

    snapshot (in the shard's lock) -> Copied -> segments -> one object, written by the server itself
    catalog -> segments that hold rows of this server -> records in a new shard

Segments hold rows by their global ids, columns as a table's schema has them: weights, then one
column for each kind of optimizer state. So a cluster's checkpoints are an ordinary run.

Invariants:
- A segment holds rows of one table and one server: of hot rows (hot.py) the one that would hold
  them were they not, so that runs are the same whichever rows are hot.
- A shard is loaded whole or not at all: every row comes from a base, then from what came after it,
  each version once.
- Segments of other servers are left unread only if their ids, or the catalog, which ``verify``
  checks, say that no row of this server is in them.
- No byte is used before its checksum is confirmed.

Not here: messages (keeper.py), which rows changed (changes.py), when to save and the commit
(checkpoints.py), when to load (coordinator.py).

# N rows of a segment, M rows of a table on this server, W floats of a record, D of a column
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.checkpoint.format.catalog import Catalog, SegmentEntry
from holdfast.checkpoint.format.codec import Codec
from holdfast.checkpoint.format.object import ObjectBuilder
from holdfast.checkpoint.format.segment import Segment, encode_segment
from holdfast.checkpoint.restoring.fetch import PartReader, SegmentReader, check_frames
from holdfast.checkpoint.store import catalogs
from holdfast.checkpoint.store.writer import store_segment
from holdfast.cluster.arena import PlacedTable
from holdfast.cluster.arenashard import ArenaShard
from holdfast.cluster.hot import HotTable
from holdfast.cluster.numbers import text, whole
from holdfast.cluster.shard import Copied, Shard
from holdfast.cluster.spec import ClusterSpec, TableSpec
from holdfast.errors import CorruptDataError, DataLossError, HoldfastError, InvalidRequestError
from holdfast.kernels.rows import bitmap
from holdfast.model.placement import Placement
from holdfast.model.schema import WEIGHT, Column, TableSchema
from holdfast.storage import open_storage
from holdfast.storage.base import Storage

STEP = "step"  # Adam's, of each row: a count, always stored whole
_SEGMENT_BYTES = 8 << 20

# As torch.optim names them, in the order of a record (kernels/servers/optimizers.py).
_STATE: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "adagrad": ("sum",),
    "rowwise-adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq", STEP),
}
_ONE_WIDE = frozenset({("rowwise-adagrad", "sum"), ("adam", STEP)})

Codecs = Mapping[str, Sequence[Codec]]  # of each column, by table


def schema_of(table: TableSpec) -> TableSchema:
    """A cluster's table as checkpoints describe it.

    >>> from holdfast.model.placement import Placement
    >>> from holdfast.cluster.spec import Optimizer
    >>> table = TableSpec("users", 9, 4, Placement(3), "none", Optimizer("adam"))
    >>> [(column.name, column.width) for column in schema_of(table).columns]
    [('weight', 4), ('exp_avg', 4), ('exp_avg_sq', 4), ('step', 1)]
    """
    name = table.optimizer.name
    state = (Column(kind, 1 if (name, kind) in _ONE_WIDE else table.dim) for kind in _STATE[name])
    schema = TableSchema(table.name, table.rows, (Column(WEIGHT, table.dim), *state))
    assert schema.row_bytes == 4 * table.width
    return schema


def _columns(schema: TableSchema, records_NW: np.ndarray) -> list[np.ndarray]:
    found, start = [], 0
    for column in schema.columns:
        found.append(np.ascontiguousarray(records_NW[:, start : start + column.width]))
        start += column.width
    return found


# What goes through messages.


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run is stored, and how it is reached."""

    url: str
    options: Mapping[str, Any]

    def open(self) -> Storage:
        """The storage."""
        return open_storage(self.url, **self.options)

    def to_json(self) -> dict[str, Any]:
        """Plain values for a message."""
        return {"url": self.url, "options": dict(self.options)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Place:
        """What ``to_json`` wrote."""
        return cls(text(value["url"]), dict(value["options"]))


def codecs_to_json(codecs: Codecs) -> dict[str, Any]:
    """Codecs as plain values for a message."""
    return {name: [dataclasses.asdict(codec) for codec in each] for name, each in codecs.items()}


def codecs_from_json(value: Mapping[str, Any]) -> Codecs:
    """What ``codecs_to_json`` wrote."""
    return {name: [Codec(**codec) for codec in each] for name, each in value.items()}


# Rows out.


@dataclass(frozen=True, slots=True)
class Stored:
    """What a server wrote: its segments, and the length of the object they are in."""

    segments: tuple[SegmentEntry, ...]
    bytes: int


def store(
    copied: Sequence[Copied],
    spec: ClusterSpec,
    *,
    storage: Storage,
    name: str,
    step: int,
    codecs: Codecs,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> Stored:
    """Write copied rows as one object; durable when this returns, or not there, as where there is
    nothing to write.

    Raises:
        HoldfastError: storage failed, or it was cancelled.
    """
    segments: list[SegmentEntry] = []
    if not any(len(part.ids_N) for part in copied):
        return Stored((), 0)
    with storage.create(name) as out:
        builder = ObjectBuilder(name, out)
        for schema, ids_N, records_NW in _by_table(copied, spec):
            rows_max = max(1, _SEGMENT_BYTES // schema.row_bytes)
            for start in range(0, len(ids_N), rows_max):
                if is_cancelled():
                    raise HoldfastError("the checkpoint was given up", step=step)
                these = slice(start, start + rows_max)
                encoded = encode_segment(
                    ids_N[these], _columns(schema, records_NW[these]), codecs[schema.name]
                )
                segments.append(
                    store_segment(builder, encoded, table=schema.name, born=step, died=None)
                )
        return Stored(tuple(segments), builder.close())


def _by_table(
    copied: Sequence[Copied], spec: ClusterSpec
) -> Iterator[tuple[TableSchema, np.ndarray, np.ndarray]]:
    """Copied rows of arenas, table by table, with the ids they have there."""
    for part in copied:
        for placed in spec.arenas[part.arena].tables:
            stop = placed.start + placed.table.rows
            lo, hi = np.searchsorted(part.ids_N, (placed.start, stop))
            ids_N, records_NW = part.ids_N[lo:hi] - placed.start, part.records_NW[lo:hi]
            if placed.hot is not None:
                yield from _apart(placed.hot, placed.hot.ids_H[ids_N], records_NW)
                continue
            hot = spec.hot_tables.get(placed.table.name)
            if hot is not None:
                is_hot_N, _ = hot.find(ids_N)
                ids_N, records_NW = ids_N[~is_hot_N], records_NW[~is_hot_N]
            yield schema_of(placed.table), ids_N, records_NW


def _apart(
    hot: HotTable, ids_N: np.ndarray, records_NW: np.ndarray
) -> Iterator[tuple[TableSchema, np.ndarray, np.ndarray]]:
    """Hot rows as rows of their base table, apart by the servers that would hold them there: then
    nobody who reads the run need know which rows were hot."""
    servers_N = hot.base.placement.servers_of(ids_N)
    for server in np.unique(servers_N):
        is_there_N = servers_N == server
        yield schema_of(hot.base), ids_N[is_there_N], records_NW[is_there_N]


# Rows in.


@dataclass(frozen=True, slots=True)
class Loading:
    """Which checkpoint a server loads its rows from."""

    place: Place
    catalog: int
    step: int
    is_apart: bool
    """Whether rows were saved by servers that held the same: then others' are not read."""
    wants_held: bool
    """Whether rows that workers hold are loaded too; else workers supply them."""

    def to_json(self) -> dict[str, Any]:
        """Plain values for a message."""
        return {
            "place": self.place.to_json(),
            "catalog": self.catalog,
            "step": self.step,
            "is_apart": self.is_apart,
            "wants_held": self.wants_held,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Loading:
        """What ``to_json`` wrote."""
        return cls(
            Place.from_json(value["place"]),
            whole(value["catalog"]),
            whole(value["step"]),
            bool(value["is_apart"]),
            bool(value["wants_held"]),
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """How many rows came back, and what was read for them."""

    rows: int
    bytes: int


def load(
    shard: Shard, loading: Loading, *, is_cancelled: Callable[[], bool] = lambda: False
) -> Loaded:
    """Fill a new shard with its rows as a checkpoint has them.

    Raises:
        DataLossError: the checkpoint does not hold every row.
        CorruptDataError: names what is damaged.
        InvalidRequestError: it is of other tables.
    """
    storage = loading.place.open()
    catalog = catalogs.load(storage, loading.catalog)
    rows = size = 0
    for arena in shard.arenas:
        if arena.spec.is_held and not loading.wants_held:
            continue
        arena.changes.begin()
        for placed in arena.spec.tables:
            segments = _segments_of(placed, shard.server, catalog, loading, storage)
            check_frames(storage, catalog, [segment.extent for segment in segments])
            target = _Target(arena, placed, shard.server, loading)
            rows += _load_table(target, storage, catalog, segments, is_cancelled)
            rows -= _hot_among(placed.table, shard)
            size += sum(segment.extent.bytes for segment in segments)
        arena.is_here_M[:] = True
        arena.rows_missing = 0
    return Loaded(rows, size)


def _hot_among(table: TableSpec, shard: Shard) -> int:
    """How many rows of a server are hot: they count where they are read, in their own table."""
    hot = shard.spec.hot_tables.get(table.name)
    if hot is None:
        return 0
    return int((table.placement.servers_of(hot.ids_H) == shard.server).sum())


def _segments_of(
    placed: PlacedTable, server: int, catalog: Catalog, loading: Loading, storage: Storage
) -> list[SegmentEntry]:
    """What holds rows of this server, oldest born first.

    Raises:
        CorruptDataError: rows of servers that should be apart are not.
        InvalidRequestError: the checkpoint is of other tables.
    """
    schema = _stored_as(placed)
    if schema not in catalog.schema_of(catalog.checkpoint(loading.step)):
        raise InvalidRequestError(
            "the checkpoint is of other tables", table=schema.name, step=loading.step
        )
    segments = catalog.alive(loading.step, schema.name)
    if placed.hot is not None:
        # Other rows may have been hot when it was saved: any segment may hold those of now.
        ids_N = placed.hot.ids_H[placed.table.placement.rows_of(server, placed.table.rows)]
        return [
            segment
            for segment in segments
            if ((ids_N >= segment.first) & (ids_N <= segment.last)).any()
        ]
    if not loading.is_apart or not segments:
        return segments
    placement = placed.table.placement
    firsts_S = np.array([segment.first for segment in segments])
    is_held_S = placement.servers_of(firsts_S) == server
    if not _is_known_apart(catalog, placement, loading.step):
        parts = PartReader(storage)
        for at in np.flatnonzero(~is_held_S):
            if (placement.servers_of(parts.ids(segments[at])) == server).any():
                raise _not_apart(segments[at], server)
    return [segments[at] for at in np.flatnonzero(is_held_S)]


def sharding_of(placement: Placement) -> Placement:
    """What of a placement decides which server holds a row: where none is coded, servers alone."""
    is_plain = placement.parity == 0 and placement.groups == 1
    return Placement(placement.servers) if is_plain else placement


def _is_known_apart(catalog: Catalog, placement: Placement, step: int) -> bool:
    """Whether the catalog says that rows of servers are apart, so that ``verify`` has checked it.

    Where tables are placed differently it cannot say so (clustersave.py).
    """
    sharding = catalog.sharding
    is_since = sharding is not None and sharding.since <= catalog.checkpoint(step).base
    return is_since and sharding is not None and sharding.placement == sharding_of(placement)


def _not_apart(entry: SegmentEntry, server: int) -> CorruptDataError:
    return CorruptDataError(
        "a segment holds rows of two servers",
        where=entry.extent.describe(),
        table=entry.table,
        server=server,
    )


def _stored_as(placed: PlacedTable) -> TableSchema:
    """The table whose rows they are in checkpoints: hot rows are their base table's."""
    return schema_of(placed.table if placed.hot is None else placed.hot.base)


@dataclass(frozen=True, slots=True)
class _Target:
    """A table of an arena on one server, to be filled."""

    arena: ArenaShard
    placed: PlacedTable
    server: int
    loading: Loading


def _load_table(
    target: _Target,
    storage: Storage,
    catalog: Catalog,
    segments: Sequence[SegmentEntry],
    is_cancelled: Callable[[], bool],
) -> int:
    """Fill a table's rows; how many."""
    arena, table, loading = target.arena, target.placed.table, target.loading
    schema, base = _stored_as(target.placed), catalog.checkpoint(loading.step).base
    reader = SegmentReader(storage)
    rows = table.placement.data_rows(target.server, table.rows)
    based = 0
    births_M = np.full(rows, -1, np.int64)  # by slot: counts would not tell a row that comes twice
    for entry in segments:
        if is_cancelled():
            raise HoldfastError("another checkpoint is to be loaded", step=loading.step)
        segment = reader.read(entry, schema)
        slots_N, at_N = _own(target, segment, entry)
        if (births_M[slots_N - target.placed.slot] == entry.born).any():
            raise CorruptDataError(
                "a row is stored twice", where=entry.extent.describe(), table=schema.name,
                todo="run 'holdfast verify', and restore another step",
            )  # fmt: skip
        start = 0
        for index, column in enumerate(schema.columns):
            values_ND = segment.decode(index)
            if at_N is not None:
                values_ND = values_ND[at_N]
            arena.records_MW[slots_N, start : start + column.width] = values_ND
            start += column.width
        if entry.born > base:
            arena.changes.mark_saved(slots_N)
        else:
            based += len(slots_N)
        births_M[slots_N - target.placed.slot] = entry.born
    if based != rows:
        raise DataLossError(
            "the checkpoint does not hold every row",
            step=loading.step,
            table=schema.name,
            server=target.server,
            rows=rows,
            found=based,
            todo="restore another step",
        )
    return rows


def _own(
    target: _Target, segment: Segment, entry: SegmentEntry
) -> tuple[np.ndarray, np.ndarray | None]:
    """The slots of a segment's rows that are this server's, and which they are (None: all)."""
    placed, server = target.placed, target.server
    placement = placed.table.placement
    ids_N = segment.ids()
    if placed.hot is not None:
        is_hot_N, ranks_N = placed.hot.find(ids_N)
        is_own_N = placement.servers_of(ranks_N) == server
        slots_N = placed.slot + placement.slots_of(ranks_N[is_own_N])
        return slots_N, np.flatnonzero(is_hot_N)[is_own_N]
    is_own_N = placement.servers_of(ids_N) == server
    if is_own_N.all():
        return placed.slot + placement.slots_of(ids_N), None
    if target.loading.is_apart:
        raise _not_apart(entry, server)
    at_N = np.flatnonzero(is_own_N)
    return placed.slot + placement.slots_of(ids_N[at_N]), at_N


def warm(codecs: Codecs) -> None:
    """Compile or load the kernels of saving and loading, so that none is while training waits."""
    ids_N = np.array([1, 2, 5], np.int64)
    words_W = bitmap.new(64)
    bitmap.mark(words_W, ids_N, 64)
    bitmap.union_into(words_W, words_W)
    bitmap.ids(words_W, 0, 64)
    for codec in {codec for each in codecs.values() for codec in each}:
        encoded = encode_segment(ids_N, [np.ones((3, 4), np.float32)], [codec])
        data = b"".join(memoryview(part).cast("B") for part in encoded.buffers if len(part))
        Segment(memoryview(data), where="memory").decode(0)
