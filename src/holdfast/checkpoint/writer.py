"""The background half of a save: encode, store, commit, then let old checkpoints go.

    staged parts -> codec (threads) -> segments -> one object -> catalog -> retention -> deletion

Encoding starts when the snapshot is complete, so that it does not take processor time from the
stall, or at once where the staging buffer is too small for the snapshot. Encoding one part overlaps
with storing the one before. The catalog is committed last; only after
that is anything deleted.

Invariants:
- Until the commit nothing that existed before is touched; after it nothing can undo it.
- Whatever happens, every staging buffer goes back to the pool.
- A failure is kept for the training thread; it is never swallowed.

Not here: when to save and what a failure means for training (checkpointer.py).
"""

from __future__ import annotations

import dataclasses
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from holdfast import events
from holdfast.checkpoint import catalog as catalogs
from holdfast.checkpoint import tree
from holdfast.checkpoint.catalog import Catalog, CheckpointEntry, SegmentEntry
from holdfast.checkpoint.checksum import checksum
from holdfast.checkpoint.codec import Codec
from holdfast.checkpoint.object import DENSE, ROWS, Extent, ObjectBuilder, number_of, object_name
from holdfast.checkpoint.retention import Keep, choose_kept
from holdfast.checkpoint.segment import EncodedSegment, encode_segment
from holdfast.checkpoint.snapshot import DenseState, PartQueue, Staging
from holdfast.checkpoint.staging import StagingPool
from holdfast.checkpoint.strategy import CodecPlan
from holdfast.errors import ConflictError, HoldfastError, UnavailableError
from holdfast.storage.base import Storage
from holdfast.tables import TableSchema

# Row state that is never negative, by the names torch.optim gives it.
_NON_NEGATIVE = frozenset({"sum", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_inf"})


class SaveCancelledError(HoldfastError):
    """The save gave way to a newer one."""


@dataclass(frozen=True, slots=True)
class SaveStats:
    """What a save cost; a field is zero until its phase is over."""

    step: int
    kind: str
    rows: int = 0
    staged_bytes: int = 0
    bytes: int = 0
    full_bytes: int = 0
    stall_s: float = 0.0
    encode_s: float = 0.0
    store_s: float = 0.0
    durable_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Everything the background half needs to know of a save, fixed when it starts."""

    step: int
    kind: str
    base: int
    replaces_since: int | None
    reason: str
    schemas: tuple[TableSchema, ...]
    codecs: CodecPlan
    rows: int
    staged_bytes: int
    keep: Keep


class RunWriter:
    """Owns a run's catalog for one training process."""

    def __init__(
        self,
        storage: Storage,
        catalog: Catalog | None,
        *,
        log: events.EventLog,
        clock: Callable[[], float],
    ) -> None:
        self.storage = storage
        self.log = log
        self.clock = clock
        self.token = secrets.token_hex(8)
        self.catalog = catalog or Catalog(run=secrets.token_hex(8), number=0, writer=self.token)
        """What the next commit builds on; ``_committed`` and what is to change with it."""
        self._committed = self.catalog
        self._has_committed = False
        self._is_unsure = False

    def commit(self, catalog: Catalog) -> None:
        """Commit the next catalog, then delete what it no longer names.

        Raises:
            ConflictError: another writer owns the run.
            UnavailableError: the commit failed, or whether it did is unknown.
        """
        next_ = dataclasses.replace(catalog, number=self.next_number, writer=self.token)
        try:
            catalogs.commit(self.storage, next_)
        except UnavailableError:
            self._is_unsure = True
            raise
        previous, self._committed, self.catalog = self._committed, next_, next_
        self._collect(previous)

    @property
    def next_number(self) -> int:
        """The number of the catalog to be committed next."""
        return self._committed.number + 1

    def settle(self) -> bool:
        """After a commit whose outcome is unknown: find out; True if it was carried out after all.

        Raises:
            ConflictError: another writer committed meanwhile.
        """
        if not self._is_unsure:
            return False
        found = catalogs.load_last(self.storage)
        is_ours = found is not None and found.number != self._committed.number
        if found is not None and is_ours:
            if found.writer != self.token:
                raise ConflictError(
                    "another writer committed to this run",
                    catalog=catalogs.name_of(found.number),
                    url=self.storage.url,
                    todo="stop one of the two trainings, or give each its own url",
                )
            self._committed = self.catalog = found
        self._is_unsure = False
        return is_ours

    def _collect(self, previous: Catalog) -> None:
        """Delete what no checkpoint needs; a failure here costs space, never data."""
        try:
            if self._has_committed:
                kept = {name for name, _ in self.catalog.objects}
                dead = [(name, size) for name, size in previous.objects if name not in kept]
                old = [catalogs.name_of(self.catalog.number - 2)]
            else:
                dead, old = self._leftovers()
                self.storage.clean()
                self._has_committed = True
            for name, _ in dead:
                self.storage.delete(name)
            for name in old:
                self.storage.delete(name)
        except (HoldfastError, OSError) as error:
            self._has_committed = False  # list everything again after the next commit
            self.log.emit(events.CollectionFailed(error=str(error)))
            return
        if dead:
            total = sum(size for _, size in dead)
            self.log.emit(events.ObjectsDeleted(objects=len(dead), bytes=total))

    def _leftovers(self) -> tuple[list[tuple[str, int]], list[str]]:
        """What earlier writers left behind: objects of commits that never came, old catalogs.

        An object written for a number that is now taken can never be committed.
        """
        kept = {name for name, _ in self.catalog.objects}
        dead = []
        for item in self.storage.list("objects/"):
            number = number_of(item.name)
            if item.name not in kept and number is not None and number <= self.catalog.number:
                dead.append((item.name, item.bytes))
        old = [
            catalogs.name_of(number)
            for number in catalogs.numbers(self.storage)
            if number < self.catalog.number - 1
        ]
        return dead, old


class Save:
    """A save under way: its snapshot is taken, the rest happens in the background."""

    def __init__(
        self,
        order: SaveOrder,
        writer: RunWriter,
        *,
        pool: StagingPool,
        encoders: ThreadPoolExecutor,
    ) -> None:
        self.stats = SaveStats(step=order.step, kind=order.kind, rows=order.rows,
                               staged_bytes=order.staged_bytes)  # fmt: skip
        self.order = order
        self.parts: PartQueue = queue.SimpleQueue()
        self.error: BaseException | None = None
        self.is_reported = False
        self._writer = writer
        self._pool = pool
        self._encoders = encoders
        self._dense: DenseState | None = None
        self._cancelled = threading.Event()
        self._staged = threading.Event()
        self._snapshot_over = threading.Event()
        self._done = threading.Event()
        self._started = time.perf_counter()
        self._encode_s = 0.0
        self._store_s = 0.0
        self._thread = threading.Thread(
            target=self._run, name=f"holdfast-save-{order.step}", daemon=True
        )
        self._thread.start()

    # The training thread's side.

    @property
    def step(self) -> int:
        """The step this save is of."""
        return self.order.step

    @property
    def is_done(self) -> bool:
        """Whether the save is over: committed, cancelled or failed."""
        return self._done.is_set()

    def finish_staging(self, dense: DenseState, stall_s: float) -> None:
        """The snapshot is complete: nothing more will be put into ``parts``."""
        self._dense = dense
        self.stats = dataclasses.replace(self.stats, stall_s=stall_s)
        self._staged.set()
        self._snapshot_over.set()
        self.parts.put(None)

    def abandon(self, error: BaseException) -> None:
        """The snapshot failed: end the background half too."""
        self.error = error
        self._cancelled.set()
        self._snapshot_over.set()
        self.parts.put(None)
        self._done.wait()

    def cancel(self) -> None:
        """Give up unless the commit has begun; returns when that is settled."""
        self._cancelled.set()
        self._done.wait()

    def wait(self) -> None:
        """Wait until the save is over, well or not."""
        self._done.wait()

    def staged(self) -> None:
        """Wait until the snapshot is in memory (``save()`` returns after that anyway)."""
        self._staged.wait()

    def durable(self, timeout: float | None = None) -> SaveStats:
        """Wait until the checkpoint is committed.

        Raises:
            TimeoutError: not within ``timeout`` seconds; the save goes on.
            HoldfastError: what made the save fail.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"checkpoint of step {self.step} is not durable yet")
        if self.error is not None:
            self.is_reported = True
            raise self.error
        return self.stats

    # The background thread's side.

    def _run(self) -> None:
        log = self._writer.log
        try:
            self._write()
        except SaveCancelledError as error:
            self.error = self.error or error
            self.is_reported = True
            log.emit(events.SaveCancelled(step=self.step, reason=str(error)))
        except BaseException as error:
            self.error = error
            log.emit(events.SaveFailed(step=self.step, error=str(error) or repr(error)))
        finally:
            if self.error is not None:
                self._pool.fail(self.error)
                self._drain()
            self._pool.trim()
            self._done.set()

    def _drain(self) -> None:
        """Return the buffers of parts that nobody will store."""
        while True:
            try:
                item = self.parts.get(block=not self._snapshot_over.is_set())
            except queue.Empty:
                return
            if item is None:
                return
            item.copy.exception()  # the copy is over, well or not
            self._pool.release(item.buffer)

    def _write(self) -> None:
        if self.order.staged_bytes <= self._pool.bytes_max:
            self._snapshot_over.wait()
        self._check_cancelled()
        writer = self._writer
        name = object_name(writer.next_number, 0, secrets.token_hex(4))
        out = writer.storage.create(name)
        try:
            builder = ObjectBuilder(name, out)
            segments = self._store_parts(builder)
            self._check_cancelled()
            assert self._dense is not None
            data = tree.to_bytes(self._dense.structure, self._dense.tensors)
            sum_ = checksum(data)
            dense = builder.append(DENSE, "dense", (data,), sum_)
            self._check_cancelled()
            started = time.perf_counter()
            size = builder.close()
            self._store_s += time.perf_counter() - started
        except BaseException:
            out.abort()
            raise
        full_bytes = sum(t.rows * t.row_bytes for t in self.order.schemas) + self._dense.bytes
        entry = self._entry(dense=dense, size=size, full_bytes=full_bytes, segments=segments)
        self._commit(entry, tuple(segments), (name, size))

    def _store_parts(self, builder: ObjectBuilder) -> list[SegmentEntry]:
        segments: list[SegmentEntry] = []
        rows = 0
        waiting: deque[tuple[Staging, Future[tuple[EncodedSegment, float]]]] = deque()
        depth = self._encoders._max_workers + 1
        try:
            is_open = True
            while is_open or waiting:
                if is_open and len(waiting) < depth:
                    # Wait for more only with nothing in hand: the snapshot may be waiting for the
                    # very buffers that are.
                    try:
                        item = self.parts.get(block=not waiting)
                    except queue.Empty:
                        pass
                    else:
                        if item is None:
                            is_open = False
                        else:
                            waiting.append((item, self._encoders.submit(self._encode, item)))
                        continue
                self._check_cancelled()
                staging, encoding = waiting[0]
                encoded, seconds = encoding.result()
                segments.append(self._append(builder, staging.copy.result().schema, encoded))
                waiting.popleft()
                self._pool.release(staging.buffer)
                self._encode_s += seconds
                rows += encoded.rows
                self._writer.log.emit(
                    events.SaveProgress(
                        step=self.step, rows=rows, rows_total=self.order.rows, bytes=encoded.bytes
                    )
                )
        finally:
            for staging, encoding in waiting:
                encoding.exception()
                self._pool.release(staging.buffer)
        return segments

    def _encode(self, staging: Staging) -> tuple[EncodedSegment, float]:
        staged = staging.copy.result()
        started = time.perf_counter()
        encoded = encode_segment(
            staged.part.ids(), staged.columns, column_codecs(staged.schema, self.order.codecs)
        )
        return encoded, time.perf_counter() - started

    def _append(
        self, builder: ObjectBuilder, schema: TableSchema, encoded: EncodedSegment
    ) -> SegmentEntry:
        started = time.perf_counter()
        extent = builder.append(ROWS, schema.name, encoded.buffers, encoded.checksum)
        self._store_s += time.perf_counter() - started
        return SegmentEntry(
            table=schema.name,
            born=self.step,
            died=None,
            rows=encoded.rows,
            first=encoded.first,
            last=encoded.last,
            extent=extent,
        )

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise SaveCancelledError("a newer save took its place", step=self.step)

    def _entry(
        self, *, dense: Extent, size: int, full_bytes: int, segments: list[SegmentEntry]
    ) -> CheckpointEntry:
        order = self.order
        last = self._writer.catalog.last
        return CheckpointEntry(
            step=order.step,
            ordinal=last.ordinal + 1 if last is not None else 0,
            kind=order.kind,
            base=order.base,
            schema=0,
            time=self._writer.clock(),
            codec=order.codecs.weights.name,
            state_codec=order.codecs.state_name,
            rows=sum(segment.rows for segment in segments),
            row_bytes=sum(segment.extent.bytes for segment in segments),
            bytes=size,
            full_bytes=full_bytes,
            stall_s=self.stats.stall_s,
            reason=order.reason,
            dense=dense,
        )

    def _commit(
        self,
        entry: CheckpointEntry,
        segments: tuple[SegmentEntry, ...],
        object_: tuple[str, int],
    ) -> None:
        writer, order = self._writer, self.order
        catalog = _with_schema(writer.catalog, order.schemas)
        entry = dataclasses.replace(entry, schema=catalog.schemas.index(order.schemas))
        catalog = catalog.with_checkpoint(
            entry, segments, object_, replaces_since=order.replaces_since
        )
        kept = choose_kept(catalog.checkpoints, order.keep, now=writer.clock())
        dropped = tuple(step for step in catalog.steps if step not in kept)
        writer.commit(catalog.keeping(kept))
        self.stats = dataclasses.replace(
            self.stats,
            bytes=entry.bytes,
            full_bytes=entry.full_bytes,
            encode_s=self._encode_s,
            store_s=self._store_s,
            durable_s=time.perf_counter() - self._started,
        )
        writer.log.emit(
            events.SaveDurable(
                step=self.step,
                checkpoint=order.kind,
                codec=entry.codec,
                rows=entry.rows,
                bytes=entry.bytes,
                full_bytes=entry.full_bytes,
                stall_s=self.stats.stall_s,
                durable_s=self.stats.durable_s,
            )
        )
        if dropped:
            writer.log.emit(events.CheckpointsDropped(steps=dropped, reason="retention"))


def column_codecs(schema: TableSchema, plan: CodecPlan) -> list[Codec]:
    """The codec of each column of a table."""
    return [
        plan.for_column(index, is_non_negative=column.name in _NON_NEGATIVE)
        for index, column in enumerate(schema.columns)
    ]


def _with_schema(catalog: Catalog, schemas: tuple[TableSchema, ...]) -> Catalog:
    if schemas in catalog.schemas:
        return catalog
    return dataclasses.replace(catalog, schemas=(*catalog.schemas, schemas))
