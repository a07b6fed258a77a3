"""A run as a reader sees it: its checkpoints, their rows, what changed; no model needed.
Deleting checkpoints is all that can be changed here.

Invariant: a ``Run`` shows one catalog; ``reload`` moves it to the newest, and so does a read that
finds objects swapped away.

# N rows of a segment, D floats of a weight row
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from holdfast.checkpoint.format.catalog import Catalog, SegmentEntry
from holdfast.checkpoint.planning.best import Mode, rank_by_metric
from holdfast.checkpoint.restoring import fetch, restore
from holdfast.checkpoint.restoring.destination import Held, Targets, join_columns, plan_destinations
from holdfast.checkpoint.restoring.read_rows import read_rows
from holdfast.checkpoint.store import catalogs
from holdfast.checkpoint.store.delete import delete_from_run
from holdfast.errors import CorruptDataError, InvalidRequestError, NotFoundError
from holdfast.kernels.rows import bitmap
from holdfast.model.dtypes import for_users
from holdfast.model.names import plain_name
from holdfast.model.schema import TableSchema, cuts_of, whole_schema
from holdfast.model.shard import Shard
from holdfast.storage import as_storage
from holdfast.storage.base import Storage

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What is known of a checkpoint without reading it."""

    step: int
    kind: str
    base: int
    time: float
    codec: str
    state_codec: str
    rows: int
    bytes: int
    restore_bytes: int
    full_bytes: int
    stall_s: float
    reason: str
    tables: tuple[TableSchema, ...]
    metrics: dict[str, float] = field(default_factory=dict)
    """What ``save(metrics=)`` said of it."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What ``save(metadata=)`` said of it, as JSON has it."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one table: their ids, weights, and optimizer state by name, aligned."""

    ids: np.ndarray
    weight: np.ndarray
    state: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class _StoredAs:
    """Tables by name as what they are stored as, and as they are whole."""

    cuts: dict[str, tuple[TableSchema, ...]]
    tables: tuple[TableSchema, ...]


class Run:
    """The checkpoints at one url."""

    def __init__(self, storage: Storage, catalog: Catalog, *, is_pinned: bool = False) -> None:
        """``is_pinned``: the run stays at this catalog, also when a writer has deleted from it."""
        self.storage = storage
        self.catalog = catalog
        self._is_pinned = is_pinned
        self._restore_bytes: tuple[Catalog, dict[int, int]] | None = None
        self._known: tuple[Catalog, dict[int, _StoredAs]] = (catalog, {})

    @property
    def url(self) -> str:
        """Where the run is stored."""
        return self.storage.url

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that can be restored, ascending."""
        return self.catalog.steps

    @property
    def bytes(self) -> int:
        """Size of all objects."""
        return sum(size for _, size in self.catalog.objects)

    def reload(self) -> None:
        """Look for newer checkpoints."""
        self.catalog = self._newest()

    def info(self, step: int) -> CheckpointInfo:
        """What is known of a checkpoint.

        Raises:
            NotFoundError: lists the steps that exist.
        """
        entry = self.catalog.checkpoint(step)
        if self._restore_bytes is None or self._restore_bytes[0] is not self.catalog:
            self._restore_bytes = (self.catalog, self.catalog.restore_bytes())
        return CheckpointInfo(
            step=entry.step,
            kind=entry.kind,
            base=entry.base,
            time=entry.time,
            codec=entry.codec,
            state_codec=entry.state_codec,
            rows=entry.rows,
            bytes=entry.bytes,
            restore_bytes=self._restore_bytes[1][step] + entry.dense.bytes,
            full_bytes=entry.full_bytes,
            stall_s=entry.stall_s,
            reason=entry.reason,
            tables=self._stored_as(step).tables,
            metrics=dict(entry.annotations.metrics),
            metadata=entry.annotations.metadata_dict(),
        )

    @property
    def checkpoints(self) -> tuple[CheckpointInfo, ...]:
        """What is known of every checkpoint, by ascending step."""
        return tuple(self.info(step) for step in self.steps)

    def latest_step(self) -> int | None:
        """The last step that is saved; None where none is."""
        return max(self.steps, default=None)

    def best(self, metric: str, *, mode: Mode = "max") -> CheckpointInfo:
        """The checkpoint with the best metric; of equal ones the newer.

        Raises:
            NotFoundError: no checkpoint has it; lists the metrics there are.
        """
        ranked = rank_by_metric(self.catalog.checkpoints, metric, mode)
        if not ranked:
            known = {name for e in self.catalog.checkpoints for name, _ in e.annotations.metrics}
            raise NotFoundError("no checkpoint has this metric", metric=metric,
                                metrics=sorted(known))  # fmt: skip
        return self.info(ranked[0].step)

    def delete(self, *steps: int) -> None:
        """Delete checkpoints; what others read of them stays. No training may be running here: the
        run is taken over, and the next save of another process fails.

        Raises:
            NotFoundError: no such step; lists those that exist.
            InvalidRequestError: no step would be left; or the run was opened at an older catalog.
        """
        if self._is_pinned:
            raise InvalidRequestError("an older catalog cannot be changed", url=self.url,
                                      todo="open the run without catalog=")  # fmt: skip
        self.catalog = delete_from_run(self.storage, steps)

    def tables(self, step: int) -> tuple[TableSchema, ...]:
        """The tables as they were at a step; one that is stored in cuts is shown whole."""
        return self.info(step).tables

    def stored(self, step: int, table: str) -> tuple[TableSchema, ...]:
        """What a table is stored as at a step: itself, or its cuts.

        Raises:
            NotFoundError: no such step or table.
        """
        cuts = self._stored_as(step).cuts
        table = plain_name(table)
        if table not in cuts:
            raise NotFoundError("no such table", table=table, tables=list(cuts))
        return cuts[table]

    def _stored_as(self, step: int) -> _StoredAs:
        """The tables as of a step; found out once for all steps that have the same."""
        catalog = self.catalog
        index = catalog.checkpoint(step).schema
        if self._known[0] is not catalog:
            self._known = (catalog, {})
        known = self._known[1]
        if index not in known:
            try:
                cuts = cuts_of(catalog.schemas[index])
            except InvalidRequestError as error:
                raise CorruptDataError(
                    "catalog is damaged: impossible cuts", url=self.url
                ) from error
            known[index] = _StoredAs(cuts, tuple(map(whole_schema, cuts.values())))
        return known[index]

    def read(
        self, step: int, table: str, rows: slice | range | np.ndarray | list[int] | None = None
    ) -> Rows:
        """Rows of one table as of a step: all, a range, or these ids in this order.

        Arrays have the types that the columns had in the model; NumPy has no bfloat16, whose
        numbers come as float32, exactly.

        Raises:
            NotFoundError: no such step or table.
            InvalidRequestError: ids outside the table.
        """
        schema = self._schema(step, table)
        restore.check_complete(self.catalog, step)  # before a lying row count costs memory
        wanted = as_ids(rows, schema)
        columns = [for_users(column) for column in self.columns(step, table, wanted)]
        state = {c.name: v for c, v in zip(schema.columns[1:], columns[1:], strict=True)}
        return Rows(wanted, columns[0], state)

    def columns(self, step: int, table: str, wanted: np.ndarray) -> list[np.ndarray]:
        """The columns of rows of one table, in this order, as arrays of model/dtypes.py: the very
        bits.

        Raises:
            NotFoundError: no such step or table.
        """
        ids_N, back = np.unique(wanted, return_inverse=True)
        parts = self.stored(step, table)
        read = [
            self.settled(
                lambda catalog, part=part: read_rows(  # type: ignore[misc]
                    self.storage, catalog, step, part, ids_N
                )
            )
            for part in parts
        ]
        columns = join_columns(parts, read)
        if not np.array_equal(ids_N, wanted):
            columns = [column[back] for column in columns]
        return columns

    def dense(self, step: int) -> Any:
        """Everything but rows as of a step: a dict with model, optimizers, rng and extras."""

        def read(catalog: Catalog) -> Any:
            extent = catalog.checkpoint(step).dense
            fetch.check_objects(self.storage, catalog, [extent])
            return fetch.read_dense(self.storage, extent)

        return self.settled(read)

    def ranks(self, step: int) -> list[Any]:
        """What each of many ranks had of its own at a step, by rank: a dict with rng and extras.

        Empty where one process saved.
        """

        def read(catalog: Catalog) -> list[Any]:
            extents = catalog.checkpoint(step).ranks
            fetch.check_objects(self.storage, catalog, extents)
            return [fetch.read_dense(self.storage, extent) for extent in extents]

        return self.settled(read)

    def restore_into(self, step: int, targets: Targets) -> restore.RestoreStats:
        """Fill arrays with whole tables as of a step; the first columns of a table are enough.

        Arrays have the types of the columns; of a bfloat16 column uint16, its bit patterns.

        Raises:
            NotFoundError: no such step.
            InvalidRequestError: an array is of another type.
        """

        def read(catalog: Catalog) -> restore.RestoreStats:
            schemas = catalog.schema_of(catalog.checkpoint(step))
            whole = {t.name: t for t in map(whole_schema, cuts_of(schemas).values())}
            held = [
                Held(
                    name,
                    Shard(whole[name].rows, whole[name].width),
                    dict(zip((c.name for c in whole[name].columns), arrays, strict=False)),
                )
                for name, arrays in targets.items()
            ]
            destinations, joins = plan_destinations(held, schemas)
            stats = restore.restore_to(self.storage, catalog, step, destinations)
            for join in joins:
                join.run()
            return stats

        return self.settled(read)

    def settled(self, read: Callable[[Catalog], T]) -> T:
        """What ``read`` makes of the run's catalog.

        A writer may swap objects away while they are read; the rows of a step stay the same, so the
        read is repeated on the newest catalog.

        Raises:
            NotFoundError: an object is gone although the catalog still names it.
        """
        while True:
            try:
                return read(self.catalog)
            except NotFoundError:
                number = self.catalog.number
                if self._is_pinned:
                    raise
                self.reload()
                if self.catalog.number == number:
                    raise

    def updates(self, since: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """What to apply, in order, to a copy of the tables as of ``since`` to reach the last step.

        Yields (table, ids, weight rows); of a table that is stored in cuts each under its stored
        name, with the floats it holds (``stored`` tells which). With consecutive increments this is
        exactly what changed; across a rollup it is every row changed since the base, after a new
        base every row. The last
        step is that of the catalog the run shows when the first rows are asked for, also where a
        writer adds steps and swaps objects away meanwhile. Where it drops that very step, the run
        moves to its newest catalog, and what follows leads to the last step of that.

        Raises:
            InvalidRequestError: ``since`` is not on the way to the last step; or training went
                back behind the last step meanwhile, and what was yielded leads nowhere.
        """
        catalog, given = self.catalog, _Given(since)
        last = _last_step(catalog, since)
        rest = self._rest(catalog, last, given)
        while True:
            try:
                found = next(rest, None)
            except NotFoundError as error:
                if self._is_pinned:
                    raise
                newest = self._newest()
                if newest.number == catalog.number:
                    raise
                is_rewound = any(r.to < last for r in newest.rewinds[len(catalog.rewinds) :])
                if is_rewound and given.born > since:
                    raise InvalidRequestError(
                        "training went back behind the last step while updates to it were read",
                        since=since,
                        last=last,
                        todo="load the last step whole",
                    ) from error
                if is_rewound or last not in newest.steps:
                    last = _last_step(newest, since)
                    self.catalog = newest
                catalog = newest
                rest = self._rest(catalog, last, given)
                continue
            if found is None:
                return
            yield found

    def _rest(
        self, catalog: Catalog, last: int, given: _Given
    ) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """What leads from what was given to the last step.

        A version that was given and that the last step still reads need not come again, whatever
        chunk it lies in by now. One that was not given because it was dead stays dead: only going
        back in time would revive it.
        """
        alive = restore.check_complete(catalog, last)
        restore.check_going_on(self.storage, catalog, given.since, last)
        schemas = {t.name: t for t in catalog.schema_of(catalog.checkpoint(last))}
        segments = [s for s in alive if given.may_lack(s)]
        fetch.check_objects(self.storage, catalog, (s.extent for s in segments))
        reader = fetch.SegmentReader(self.storage)
        for entry in segments:
            schema = schemas[entry.table]
            segment = reader.read(entry, schema)
            ids_N, rows_ND = segment.ids(), for_users(segment.decode(0))
            is_new_N = given.add(entry, ids_N, schema.rows)
            if is_new_N.all():
                yield entry.table, ids_N, rows_ND
            elif is_new_N.any():
                yield entry.table, ids_N[is_new_N], rows_ND[is_new_N]

    def dead_rows(self, step: int) -> dict[SegmentEntry, int]:
        """For every segment a restore of ``step`` reads: rows in it that a newer one replaces."""
        return self.settled(lambda now: restore.count_dead_rows(self.storage, now, step))

    def _newest(self) -> Catalog:
        newest = catalogs.load_last(self.storage)
        if newest is None:
            raise NotFoundError("the run is gone", url=self.url)
        return newest

    def _schema(self, step: int, table: str) -> TableSchema:
        return whole_schema(self.stored(step, table))


class _Given:
    """The versions given out so far: all that were born before a step, and some of that step's."""

    def __init__(self, since: int) -> None:
        self.born = self.since = since
        self._rows: dict[str, bitmap.Words] = {}  # of those born at ``born``, by table

    def may_lack(self, entry: SegmentEntry) -> bool:
        """Whether a segment may hold versions that were not given."""
        return entry.born > self.since and entry.born >= self.born

    def add(self, entry: SegmentEntry, ids_N: np.ndarray, rows: int) -> np.ndarray:
        """Note a segment's versions as given; which of them are so only now."""
        if entry.born != self.born:
            self.born, self._rows = entry.born, {}
        if entry.table not in self._rows:
            self._rows[entry.table] = bitmap.new(rows)
        known = self._rows[entry.table]
        is_new_N: np.ndarray = ~bitmap.is_set(known, ids_N)
        bitmap.mark(known, ids_N, rows)
        return is_new_N


def _last_step(catalog: Catalog, since: int) -> int:
    """The last step, if a copy of ``since`` can be brought there.

    Raises:
        InvalidRequestError: it cannot.
    """
    last = catalog.last
    if last is None or since > last.step:
        raise InvalidRequestError(
            "no such step on this run yet", since=since, last=last.step if last else None
        )
    for rewind in catalog.rewinds:
        if rewind.to < since <= rewind.last:
            raise InvalidRequestError(
                "training went back behind this step; a copy of it cannot be updated",
                since=since,
                went_back_to=rewind.to,
                todo="load the last step whole",
            )
    return last.step


def as_ids(
    rows: slice | range | Sequence[int] | np.ndarray | None, schema: TableSchema
) -> np.ndarray:
    """Row ids from what a user passes.

    Raises:
        InvalidRequestError: not integers, or outside the table.
    """
    if rows is None:
        return np.arange(schema.rows)
    if isinstance(rows, slice):
        return np.arange(*rows.indices(schema.rows))
    ids_N = np.asarray(rows)
    if ids_N.size == 0:
        return np.empty(0, np.int64)
    if ids_N.ndim != 1 or ids_N.dtype.kind not in "iu":
        raise InvalidRequestError("row ids must be a list of integers", rows=repr(rows)[:60])
    if int(ids_N.min()) < 0 or int(ids_N.max()) >= schema.rows:
        raise InvalidRequestError(
            "row ids outside the table",
            table=schema.name,
            rows=schema.rows,
            lowest=int(ids_N.min()),
            highest=int(ids_N.max()),
        )
    return ids_N.astype(np.int64)


def open(
    url: str | os.PathLike[str] | Storage,
    *,
    catalog: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Run:
    """Open a run for reading; ``catalog`` picks an older state of it by number.

    Raises:
        NotFoundError: there is no run at this url.
        CorruptDataError: its catalog is damaged.
    """
    storage = as_storage(url, storage_options)
    found = catalogs.load_last(storage) if catalog is None else catalogs.load(storage, catalog)
    if found is None:
        raise NotFoundError(
            "no run here", url=storage.url, todo="check the url, or train with a Checkpointer first"
        )
    return Run(storage, found, is_pinned=catalog is not None)
