"""The background half of a save: encode, store, commit, then let old checkpoints go.

    staged parts -> codec (threads) -> segments -> objects -> catalog -> retention -> deletion

Encoding starts when the snapshot is complete, so that it does not take processor time from the
stall, or at once where the staging buffer is too small for the snapshot. Encoding one part overlaps
with storing the one before. The catalog is committed last; only after that is anything deleted.

Invariants:
- Until the commit nothing that existed before is touched; after it nothing can undo it.
- Whatever happens, every staging buffer goes back to the pool.
- A failure is kept for the training thread; it is never swallowed.

Not here: when to save and what a failure means for training (checkpointer.py).
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from holdfast import events
from holdfast.checkpoint import tree
from holdfast.checkpoint.baseline import SINCE_BASE, CheckpointPlan
from holdfast.checkpoint.catalog import (
    BASE,
    Catalog,
    CheckpointEntry,
    GridEntry,
    SegmentEntry,
)
from holdfast.checkpoint.checksum import checksum
from holdfast.checkpoint.codec import Codec
from holdfast.checkpoint.object import DENSE, ROWS, Extent, ObjectBuilder
from holdfast.checkpoint.retention import Keep, choose_kept
from holdfast.checkpoint.segment import EncodedSegment, encode_segment
from holdfast.checkpoint.selection import Selection
from holdfast.checkpoint.snapshot import DenseState, PartQueue, Staging
from holdfast.checkpoint.staging import StagingPool
from holdfast.checkpoint.strategy import CodecPlan
from holdfast.checkpoint.writer import RunWriter, store_segment
from holdfast.errors import HoldfastError
from holdfast.placement import Placement
from holdfast.schema import TableSchema

# Row state that is never negative, by the names torch.optim gives it.
_NON_NEGATIVE = frozenset({"sum", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_inf"})


class SaveCancelledError(HoldfastError):
    """The save gave way to a newer one."""


@dataclass(frozen=True, slots=True)
class SaveStats:
    """What a save cost; a field is zero until its phase is over."""

    step: int
    kind: str
    is_floor: bool = False
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
    """Everything the background half needs to know of a save, fixed when it starts.

    ``rewind_to`` is the step after which everything is let go, because training went on from there.
    """

    rewind_to: int | None
    step: int
    kind: str
    base: int
    replaces_since: int | None
    is_floor: bool
    reason: str
    schemas: tuple[TableSchema, ...]
    codecs: CodecPlan
    rows: int
    staged_bytes: int
    keep: Keep
    has_grid: bool
    placement: Placement | None


def make_order(
    plan: CheckpointPlan,
    *,
    history: Catalog,
    rewind_to: int | None,
    schemas: tuple[TableSchema, ...],
    codecs: CodecPlan,
    selections: Sequence[Selection],
    step: int,
    keep: Keep,
    has_grid: bool,
    placement: Placement | None = None,
) -> SaveOrder:
    """What the background half is to do, from what was decided on the run's ``history``."""
    counts = [selection.rows for selection in selections]
    base = history.last.base if history.last is not None else step
    return SaveOrder(
        rewind_to=rewind_to,
        step=step,
        kind=plan.kind,
        base=step if plan.kind == BASE else base,
        replaces_since=base if plan.since == SINCE_BASE else None,
        is_floor=plan.is_floor,
        reason=plan.reason,
        schemas=schemas,
        codecs=codecs,
        rows=sum(counts),
        staged_bytes=sum(n * t.row_bytes for n, t in zip(counts, schemas, strict=True)),
        keep=keep,
        has_grid=has_grid,
        placement=placement,
    )


class Save:
    """A save under way: its snapshot is taken, the rest happens in the background."""

    def __init__(
        self,
        order: SaveOrder,
        writer: RunWriter,
        *,
        pool: StagingPool,
        encoders: ThreadPoolExecutor,
        depth: int,
        on_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self.stats = SaveStats(step=order.step, kind=order.kind, is_floor=order.is_floor,
                               rows=order.rows, staged_bytes=order.staged_bytes)  # fmt: skip
        self.order = order
        self.parts: PartQueue = queue.SimpleQueue()
        self.error: BaseException | None = None
        self.entry: CheckpointEntry | None = None
        self.is_committed = False
        self.is_reported = False
        self._writer = writer
        self._pool = pool
        self._encoders = encoders
        self._depth = depth
        self._on_commit = on_commit
        self._dense: DenseState | None = None
        self._cancelled = threading.Event()
        self._staged = threading.Event()
        self._snapshot_over = threading.Event()
        self._may_encode = threading.Event()
        self._done = threading.Event()
        self._started = time.perf_counter()
        self._encode_s = 0.0
        self._store_s = 0.0
        pool.begin(on_starved=self._may_encode.set)
        # Not a daemon: a process that ends waits for its last checkpoint.
        threading.Thread(target=self._run, name=f"holdfast-save-{order.step}").start()

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
        self._end_of_parts()

    def abandon(self, error: BaseException) -> None:
        """The snapshot failed: end the background half too."""
        self.error = error
        self.is_reported = True
        self._cancelled.set()
        self._end_of_parts()
        self._done.wait()

    def _end_of_parts(self) -> None:
        self._snapshot_over.set()
        self._may_encode.set()
        self.parts.put(None)

    def cancel(self) -> None:
        """Give up unless the commit has begun; returns when that is settled."""
        self._cancelled.set()
        self._done.wait()

    def confirm(self) -> None:
        """The commit, reported as failed, was carried out after all."""
        self.error = None
        self.is_committed = True

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
        try:
            self._write()
        except BaseException as error:  # a thread's edge: kept for the training thread
            if isinstance(error, SaveCancelledError):
                self.is_reported = True
            self.error = self.error or error
            self._tell_failure(self.error)
            self._pool.fail(self.error)
            self._drain()
        finally:
            self._dense = None
            self._pool.trim()
            self._done.set()

    def _tell_failure(self, error: BaseException) -> None:
        text = str(error) or repr(error)
        if isinstance(error, SaveCancelledError):
            self._writer.log.emit(events.SaveCancelled(step=self.step, reason=text))
        else:
            self._writer.log.emit(events.SaveFailed(step=self.step, error=text))

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
        self._may_encode.wait()
        self._check_cancelled()
        objects: list[tuple[str, int]] = []
        try:
            self._store(objects)
        except BaseException:
            self._writer.forget(name for name, _ in objects)
            raise

    def _store(self, objects: list[tuple[str, int]]) -> None:
        with self._new_object(ROWS, objects) as builder:
            segments = self._store_parts(builder)
            self._check_cancelled()
        assert self._dense is not None
        # Dense state has an object of its own: it dies with its checkpoint, while the rows of a
        # base are needed as long as its deltas are.
        with self._new_object(DENSE, objects) as builder:
            data = tree.to_bytes(self._dense.structure, self._dense.tensors)
            dense = builder.append(DENSE, "dense", (data,), checksum(data))
            self._check_cancelled()
        full_bytes = sum(t.rows * t.row_bytes for t in self.order.schemas) + self._dense.bytes
        size = sum(bytes_ for _, bytes_ in objects)
        entry = self._entry(dense=dense, size=size, full_bytes=full_bytes, segments=segments)
        self._commit(entry, tuple(segments), tuple(objects))

    @contextmanager
    def _new_object(self, kind: str, objects: list[tuple[str, int]]) -> Iterator[ObjectBuilder]:
        """Write an object, durable at the end of the block or gone after an error."""
        with self._writer.new_object(kind) as builder:
            yield builder
            started = time.perf_counter()
            objects.append((builder.name, builder.close()))
            self._store_s += time.perf_counter() - started

    def _store_parts(self, builder: ObjectBuilder) -> list[SegmentEntry]:
        segments: list[SegmentEntry] = []
        rows = size = 0
        waiting: deque[tuple[Staging, Future[tuple[EncodedSegment, float]]]] = deque()
        try:
            is_open = True
            while is_open or waiting:
                if is_open and len(waiting) < self._depth:
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
                            waiting.append((item, self._start_encoding(item)))
                        continue
                self._check_cancelled()
                staging, encoding = waiting[0]
                encoded, seconds = encoding.result()
                segments.append(self._append(builder, staging.copy.result().schema, encoded))
                waiting.popleft()
                self._pool.release(staging.buffer)
                self._encode_s += seconds
                rows += encoded.rows
                size += encoded.bytes
                self._writer.log.emit(
                    events.SaveProgress(
                        step=self.step, rows=rows, rows_total=self.order.rows, bytes=size
                    )
                )
        finally:
            for staging, encoding in waiting:
                encoding.exception()
                self._pool.release(staging.buffer)
        return segments

    def _start_encoding(self, staging: Staging) -> Future[tuple[EncodedSegment, float]]:
        try:
            return self._encoders.submit(self._encode, staging)
        except RuntimeError:
            # The interpreter is ending and its pools take no more work: do it here.
            done: Future[tuple[EncodedSegment, float]] = Future()
            done.set_result(self._encode(staging))
            return done

    def _encode(self, staging: Staging) -> tuple[EncodedSegment, float]:
        staged = staging.copy.result()
        started = time.perf_counter()
        encoded = encode_segment(
            staged.part.ids(),
            staged.columns,
            column_codecs(staged.schema, self.order.codecs),
            has_filter=self.order.has_grid,
        )
        return encoded, time.perf_counter() - started

    def _append(
        self, builder: ObjectBuilder, schema: TableSchema, encoded: EncodedSegment
    ) -> SegmentEntry:
        started = time.perf_counter()
        entry = store_segment(builder, encoded, table=schema.name, born=self.step, died=None)
        self._store_s += time.perf_counter() - started
        return entry

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise SaveCancelledError("a newer save took its place", step=self.step)

    def _entry(
        self, *, dense: Extent, size: int, full_bytes: int, segments: list[SegmentEntry]
    ) -> CheckpointEntry:
        order = self.order
        return CheckpointEntry(
            step=order.step,
            ordinal=0,
            kind=order.kind,
            base=order.base,
            schema=0,
            time=self._writer.clock(),
            codec=order.codecs.weights.name,
            state_codec=state_codec_name(order.schemas, order.codecs),
            rows=sum(segment.rows for segment in segments),
            row_bytes=sum(segment.extent.bytes for segment in segments),
            bytes=size,
            full_bytes=full_bytes,
            stall_s=self.stats.stall_s,
            reason=order.reason,
            dense=dense,
            build_s=time.perf_counter() - self._started,
        )

    def _commit(
        self,
        entry: CheckpointEntry,
        segments: tuple[SegmentEntry, ...],
        objects: tuple[tuple[str, int], ...],
    ) -> None:
        writer, order = self._writer, self.order
        before: tuple[int, ...] = ()
        taken: tuple[int, ...] = ()
        kept: frozenset[int] = frozenset()

        def change(current: Catalog) -> Catalog:
            nonlocal before, taken, kept
            before = current.steps
            catalog = current if order.rewind_to is None else current.rewound(order.rewind_to)
            catalog = _with_schema(catalog, order.schemas)
            self.entry = dataclasses.replace(
                entry,
                schema=catalog.schemas.index(order.schemas),
                ordinal=catalog.last.ordinal + 1 if catalog.last is not None else 0,
            )
            catalog = catalog.with_checkpoint(
                self.entry,
                segments,
                objects,
                replaces_since=order.replaces_since,
                is_floor=order.is_floor,
                placement=order.placement,
            )
            if order.has_grid and catalog.grid_of(self.entry) is None:
                catalog = catalog.with_grid(GridEntry(order.base, None, order.base, None))
            taken = catalog.steps
            kept = choose_kept(catalog.checkpoints, order.keep, now=writer.clock())
            return catalog.keeping(kept)

        writer.update(change)
        self.is_committed = True
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
        rewound = tuple(step for step in before if step not in taken)
        expired = tuple(step for step in taken if step not in kept)
        for steps, reason in ((rewound, "rewind"), (expired, "retention")):
            if steps:
                writer.log.emit(events.CheckpointsDropped(steps=steps, reason=reason))
        self._on_commit()


def column_codecs(schema: TableSchema, plan: CodecPlan) -> list[Codec]:
    """The codec of each column of a table."""
    return [
        plan.for_column(index, is_non_negative=column.name in _NON_NEGATIVE)
        for index, column in enumerate(schema.columns)
    ]


def state_codec_name(schemas: Sequence[TableSchema], plan: CodecPlan) -> str:
    """How row state is stored, for people: every codec in use, or none where there is no state."""
    names = {codec.name for schema in schemas for codec in column_codecs(schema, plan)[1:]}
    return "+".join(sorted(names)) or "none"


def _with_schema(catalog: Catalog, schemas: tuple[TableSchema, ...]) -> Catalog:
    if schemas in catalog.schemas:
        return catalog
    return dataclasses.replace(catalog, schemas=(*catalog.schemas, schemas))
