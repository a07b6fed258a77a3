"""The background half of a save: encode and store rows, then have them committed.

    SaveOrder + staged parts -> codec (threads) -> segments -> object -> Committer -> over

Encoding starts when the snapshot is complete, so that it does not take processor time from the
stall, or at once where the staging buffer is too small for the snapshot. Encoding one part overlaps
with storing the one before. The committer comes last; only after the commit is anything deleted.

Invariants:
- Until the commit nothing that existed before is touched; after it nothing can undo it.
- Whatever happens, every staging buffer goes back to the pool.
- A failure is kept for the training thread; it is never swallowed.

Not here: what is to be done (order.py), the commit of one process (alone.py) and of many ranks
(joint.py), what a failure means for training (succession.py).
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from holdfast import events
from holdfast.checkpoint.catalog import CheckpointEntry, SegmentEntry
from holdfast.checkpoint.object import ROWS, ObjectBuilder
from holdfast.checkpoint.order import SaveOrder
from holdfast.checkpoint.part import StoredPart
from holdfast.checkpoint.segment import EncodedSegment, encode_segment
from holdfast.checkpoint.snapshot import DenseState, PartQueue, StagedPart
from holdfast.checkpoint.strategy import column_codecs
from holdfast.checkpoint.workbench import Workbench
from holdfast.checkpoint.writer import FollowingWriter, RunWriter, store_segment
from holdfast.errors import HoldfastError
from holdfast.schema import TableSchema


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


class Committer(Protocol):
    """What becomes of a process's rows once they are stored: alone, or together with others'."""

    @property
    def rows_object(self) -> str | None:
        """What the object of rows is called; None: as the writer likes."""
        ...

    def taking_part(self) -> AbstractContextManager[None]:
        """For as long as the save lasts."""
        ...

    def finish(self, save: Save, part: StoredPart, dense: DenseState) -> None:
        """Commit, or see it committed.

        Raises:
            HoldfastError: it is not committed, or that is not known.
        """
        ...

    def give_up(self, error: BaseException) -> None:
        """This process's part will not come."""
        ...


class Save:
    """A save under way: its snapshot is taken, the rest happens in the background."""

    def __init__(
        self,
        order: SaveOrder,
        writer: RunWriter | FollowingWriter,
        *,
        committer: Committer,
        bench: Workbench,
        on_staged: Callable[[StagedPart], None] = lambda staged: None,
        on_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self.stats = SaveStats(step=order.step, kind=order.kind, is_floor=order.entering.is_floor,
                               rows=order.rows, staged_bytes=order.staged_bytes)  # fmt: skip
        self.order = order
        self.parts: PartQueue = queue.SimpleQueue()
        self.error: BaseException | None = None
        self.entry: CheckpointEntry | None = None
        self.is_committed = False
        self.is_reported = False
        self._writer = writer
        self._committer = committer
        self._pool = bench.pool
        self._encoders = bench.encoders
        self._parts_max = bench.parts_max
        self._on_staged = on_staged
        self.on_commit = on_commit
        self._dense: DenseState | None = None
        self._cancelled = threading.Event()
        self._staged = threading.Event()
        self._snapshot_over = threading.Event()
        self._may_encode = threading.Event()
        self._done = threading.Event()
        self._started = time.perf_counter()
        self._encode_s = 0.0
        self._store_s = 0.0
        self._pool.begin(on_starved=self._may_encode.set)
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

    @property
    def has_failed(self) -> bool:
        """Whether the save is over and, as far as is known, not committed."""
        return self.is_done and self.error is not None

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
            with self._committer.taking_part():
                try:
                    self._write()
                except BaseException as error:
                    self._committer.give_up(error)
                    raise
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
            self._give_back(item)

    def _give_back(self, copy: Future[StagedPart]) -> None:
        """Return the buffer of a part, once it is copied; one that failed has none."""
        if copy.exception() is None:
            self._pool.release(copy.result().buffer)

    def _write(self) -> None:
        self._may_encode.wait()
        self.check_cancelled()
        objects: list[tuple[str, int]] = []
        try:
            segments = self._store_rows(objects)
            assert self._dense is not None
            part = StoredPart(tuple(segments), tuple(objects), self.stats.stall_s)
            self._committer.finish(self, part, self._dense)
        except BaseException:
            self._writer.forget(name for name, _ in objects)
            raise

    def _store_rows(self, objects: list[tuple[str, int]]) -> list[SegmentEntry]:
        if self.order.rows == 0:
            self._snapshot_over.wait()  # no object for nothing
            self.check_cancelled()
            return []
        with self.new_object(ROWS, objects, self._committer.rows_object) as builder:
            segments = self._store_parts(builder)
            self.check_cancelled()
        return segments

    @contextmanager
    def new_object(
        self, kind: str, objects: list[tuple[str, int]], name: str | None = None
    ) -> Iterator[ObjectBuilder]:
        """Write an object, durable at the end of the block or gone after an error."""
        with self._writer.new_object(kind, name) as builder:
            yield builder
            started = time.perf_counter()
            objects.append((builder.name, builder.close()))
            self._store_s += time.perf_counter() - started

    def _store_parts(self, builder: ObjectBuilder) -> list[SegmentEntry]:
        segments: list[SegmentEntry] = []
        rows = size = 0
        waiting: deque[tuple[Future[StagedPart], Future[tuple[EncodedSegment, float]]]] = deque()
        try:
            is_open = True
            while is_open or waiting:
                if is_open and len(waiting) < self._parts_max:
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
                self.check_cancelled()
                copy, encoding = waiting[0]
                encoded, seconds = encoding.result()
                segments.append(self._append(builder, copy.result().schema, encoded))
                waiting.popleft()
                self._give_back(copy)
                self._encode_s += seconds
                rows += encoded.rows
                size += encoded.bytes
                self._writer.log.emit(
                    events.SaveProgress(
                        step=self.step, rows=rows, rows_total=self.order.rows, bytes=size
                    )
                )
        finally:
            for copy, encoding in waiting:
                encoding.exception()
                self._give_back(copy)
        return segments

    def _start_encoding(self, copy: Future[StagedPart]) -> Future[tuple[EncodedSegment, float]]:
        try:
            return self._encoders.submit(self._encode, copy)
        except RuntimeError:
            # The interpreter is ending and its pools take no more work: do it here.
            done: Future[tuple[EncodedSegment, float]] = Future()
            done.set_result(self._encode(copy))
            return done

    def _encode(self, copy: Future[StagedPart]) -> tuple[EncodedSegment, float]:
        staged = copy.result()
        self._on_staged(staged)
        started = time.perf_counter()
        encoded = encode_segment(
            staged.ids(),
            staged.columns,
            column_codecs(staged.schema, self.order.codecs),
            has_filter=self.order.entering.has_grid,
        )
        return encoded, time.perf_counter() - started

    def _append(
        self, builder: ObjectBuilder, schema: TableSchema, encoded: EncodedSegment
    ) -> SegmentEntry:
        started = time.perf_counter()
        entry = store_segment(builder, encoded, table=schema.name, born=self.step, died=None)
        self._store_s += time.perf_counter() - started
        return entry

    def check_cancelled(self) -> None:
        """Raise if a newer save took its place."""
        if self._cancelled.is_set():
            raise SaveCancelledError("a newer save took its place", step=self.step)

    # What a committer calls.

    @property
    def is_cancelled(self) -> bool:
        """Whether it is to give up."""
        return self._cancelled.is_set()

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return time.perf_counter() - self._started

    def expect(self, entry: CheckpointEntry) -> None:
        """This is what is being committed; the answer may be lost."""
        self.entry = entry

    def committed(self, *, bytes_: int, full_bytes: int) -> None:
        """It is committed."""
        self.is_committed = True
        self.stats = dataclasses.replace(
            self.stats,
            bytes=bytes_,
            full_bytes=full_bytes,
            encode_s=self._encode_s,
            store_s=self._store_s,
            durable_s=self.seconds,
        )
