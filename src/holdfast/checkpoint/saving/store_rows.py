"""Encode and store the rows of a snapshot, part by part; one process's share of a checkpoint.

    Staged -> codec (threads) -> segments -> one object -> StoredRows

Encoding a part overlaps with storing the one before.

Invariants:
- Nothing that existed before is touched.
- After an error nothing is left of what was written.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from holdfast import events
from holdfast.checkpoint.format.catalog import SegmentEntry
from holdfast.checkpoint.format.object import ROWS, ObjectBuilder
from holdfast.checkpoint.format.segment import EncodedSegment, encode_segment
from holdfast.checkpoint.format.stored_rows import StoredRows
from holdfast.checkpoint.planning.codecs import column_codecs
from holdfast.checkpoint.planning.save_plan import SavePlan
from holdfast.checkpoint.saving.cancellation import Cancellation
from holdfast.checkpoint.saving.snapshot import StagedPart
from holdfast.checkpoint.saving.staged import Staged
from holdfast.checkpoint.saving.workbench import Workbench
from holdfast.checkpoint.store.writer import FollowingWriter, RunWriter, store_segment

_Encoding = Future[tuple[EncodedSegment, float]]


@dataclass(slots=True)
class StoreSeconds:
    """Where the time of storing went; encoding runs on several threads."""

    encode_s: float = 0.0
    store_s: float = 0.0


def store_rows(
    plan: SavePlan,
    staged: Staged,
    *,
    writer: RunWriter | FollowingWriter,
    bench: Workbench,
    name: str | None,
    cancellation: Cancellation,
    on_staged: Callable[[StagedPart], None] | None = None,
) -> tuple[StoredRows, StoreSeconds]:
    """Store everything that the snapshot puts out, durable when this returns; and the time it took.

    ``name``: of the object, where ranks agreed on it. ``on_staged`` sees each part in the threads
    that encode.

    Raises:
        SaveCancelledError: a newer save took its place.
        UnavailableError: storage failed.
    """
    spent = StoreSeconds()
    staged.wait_until_begin()
    cancellation.check()
    if staged.rows == 0:
        staged.wait_until_over()  # no object for nothing
        cancellation.check()
        return StoredRows((), (), staged.stall_s), spent
    with writer.new_object(ROWS, name) as builder:
        parts = _Parts(plan, staged, builder, writer.log, bench, on_staged, spent)
        segments = parts.store(cancellation)
        cancellation.check()
        started = time.perf_counter()
        size = builder.close()
        spent.store_s += time.perf_counter() - started
    return StoredRows(tuple(segments), ((builder.name, size),), staged.stall_s), spent


class _Parts:
    """The parts of one snapshot, on their way into one object."""

    def __init__(
        self,
        plan: SavePlan,
        staged: Staged,
        builder: ObjectBuilder,
        log: events.EventLog,
        bench: Workbench,
        on_staged: Callable[[StagedPart], None] | None,
        spent: StoreSeconds,
    ) -> None:
        self._plan = plan
        self._staged = staged
        self._builder = builder
        self._log = log
        self._bench = bench
        self._on_staged = on_staged
        self._spent = spent
        self._waiting: deque[tuple[Future[StagedPart], _Encoding]] = deque()
        self._rows = self._bytes = 0

    def store(self, cancellation: Cancellation) -> list[SegmentEntry]:
        """Encode and append all of them, in their order."""
        segments: list[SegmentEntry] = []
        waiting = self._waiting
        try:
            is_open = True
            while is_open or waiting:
                if is_open and len(waiting) < self._bench.parts_max:
                    # Wait for more only with nothing in hand: the snapshot may be waiting for the
                    # very buffers that are.
                    try:
                        item = self._staged.parts.get(block=not waiting)
                    except queue.Empty:
                        pass
                    else:
                        if item is None:
                            is_open = False
                        else:
                            waiting.append((item, self._start_encoding(item)))
                        continue
                cancellation.check()
                segments.append(self._append_first())
        finally:
            for copy, encoding in waiting:
                encoding.exception()
                self._staged.give_back(copy)
        return segments

    def _append_first(self) -> SegmentEntry:
        copy, encoding = self._waiting[0]
        encoded, seconds = encoding.result()
        started = time.perf_counter()
        entry = store_segment(
            self._builder,
            encoded,
            table=copy.result().schema.name,
            born=self._plan.step,
            died=None,
        )
        self._spent.store_s += time.perf_counter() - started
        self._waiting.popleft()
        self._staged.give_back(copy)
        self._spent.encode_s += seconds
        self._rows += encoded.rows
        self._bytes += encoded.bytes
        self._log.emit(
            events.SaveProgress(
                step=self._plan.step,
                rows=self._rows,
                rows_total=self._staged.rows,
                bytes=self._bytes,
            )
        )
        return entry

    def _start_encoding(self, copy: Future[StagedPart]) -> _Encoding:
        try:
            return self._bench.encoders.submit(self._encode, copy)
        except RuntimeError:
            # The interpreter is ending and its pools take no more work: do it here.
            done: _Encoding = Future()
            done.set_result(self._encode(copy))
            return done

    def _encode(self, copy: Future[StagedPart]) -> tuple[EncodedSegment, float]:
        part = copy.result()
        if self._on_staged is not None:
            self._on_staged(part)
        started = time.perf_counter()
        encoded = encode_segment(
            part.ids(),
            part.columns,
            column_codecs(part.schema, self._plan.codecs),
            has_filter=self._plan.rules.has_grid,
        )
        return encoded, time.perf_counter() - started
