"""What a server does when it is told to save or to load: one copy in memory, one job at a time.

    prepare -> snapshot (rows are copied in the shard's lock) -> store (a job) -> job: is it over?
    load (a job) -> job: is it over? -> the server holds the loaded shard

Long work runs in a thread of its own, so that whoever asks is answered at once, and a server that
is lost meanwhile is noticed.

Invariants:
- A copy is stored at most once, for the checkpoint it was made for.
- ``prepare`` ends what an earlier attempt left: after it nothing is written for that any more.

Not here: segments (store.py), which rows (changes.py, uses.py), the checkpoint itself
(checkpoints.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.format.stored_rows import entry_to_json
from holdfast.checkpoint.selecting import priority
from holdfast.cluster import numbers, store
from holdfast.cluster.changes import SnapshotOrder
from holdfast.cluster.message import Caller, Message
from holdfast.cluster.shard import Copied, Shard
from holdfast.errors import ConflictError, InvalidRequestError

_WAIT_S = 0.5  # how long a question about a job is kept waiting


class Job:
    """Something that takes long, in a thread of its own."""

    def __init__(self, work: Callable[[Job], dict[str, Any]], name: str) -> None:
        self._work = work
        self._is_over = threading.Event()
        self._cancelled = threading.Event()
        self._found: dict[str, Any] = {}
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._found = self._work(self)
        except Exception as error:  # a thread's edge: told to whoever asks
            self._found = {"error": str(error) or repr(error)}
        finally:
            self._is_over.set()

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody wants it any more."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """End it; returns when it is over."""
        self._cancelled.set()
        self._is_over.wait()

    def ask(self, wait_s: float) -> dict[str, Any]:
        """What came of it: "is_over", and if so what it found, or "error"."""
        if not self._is_over.wait(wait_s):
            return {"is_over": False}
        return {"is_over": True, **self._found}


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """A checkpoint to load rows from, and which pushes are in it."""

    loading: store.Loading
    applied: tuple[int, ...]
    """The last push of each worker."""
    barred: tuple[int, ...]

    @classmethod
    def from_json(cls, meta: Mapping[str, Any]) -> LoadOrder:
        """What the coordinator says of it."""
        applied = tuple(numbers.number_of(number) for number in meta["applied"])
        if len(applied) > numbers.WORKERS_MAX:
            raise InvalidRequestError("no such workers", workers=len(applied))
        barred = tuple(numbers.worker_of(worker) for worker in meta["barred"])
        return cls(store.Loading.from_json(meta["loading"]), applied, barred)


class Keeper:
    """One server's copies and jobs."""

    def __init__(self, get_shard: Callable[[], Shard]) -> None:
        self._get_shard = get_shard
        self._lock = threading.Lock()
        self._copied: tuple[int, list[Copied]] | None = None
        self._job: Job | None = None

    def close(self) -> None:
        """End what is under way."""
        self._end_job()

    def _end_job(self) -> None:
        with self._lock:
            job, self._job, self._copied = self._job, None, None
        if job is not None:
            job.cancel()

    def prepare(self, _: Caller, message: Message) -> Message:
        """Make ready for a snapshot: kernels, and nothing of an earlier one under way."""
        codecs = store.codecs_from_json(message.meta["codecs"])
        self._end_job()
        store.warm(codecs)
        if message.meta.get("priority") is not None:
            priority.warm()
        return Message("prepared")

    def snapshot(self, _: Caller, message: Message) -> Message:
        """Copy the rows that a checkpoint must hold."""
        order = SnapshotOrder.from_json(message.meta)
        copied, applied_W = self._get_shard().snapshot(order)
        with self._lock:
            self._copied = (order.step, copied)
        rows = sum(len(part.ids_N) for part in copied)
        size = sum(part.records_NW.nbytes for part in copied)
        return Message("copied", {"rows": rows, "bytes": size}, (applied_W,))

    def store(self, _: Caller, message: Message) -> Message:
        """Begin to store what was copied; answers at once.

        Raises:
            ConflictError: nothing is copied for this checkpoint.
        """
        meta, spec = message.meta, self._get_shard().spec
        step, name = numbers.whole(meta["step"]), numbers.text(meta["name"])
        place = store.Place.from_json(meta["place"])
        codecs = store.codecs_from_json(meta["codecs"])
        with self._lock:
            copied, self._copied = self._copied, None
        if copied is None or copied[0] != step:
            raise ConflictError("nothing is copied for this checkpoint", step=step)

        def work(job: Job) -> dict[str, Any]:
            stored = store.store(
                copied[1],
                spec,
                storage=place.open(),
                name=name,
                step=step,
                codecs=codecs,
                is_cancelled=lambda: job.is_cancelled,
            )
            segments = [entry_to_json(entry) for entry in stored.segments]
            return {"segments": segments, "bytes": stored.bytes}

        self._start(work, "holdfast-store")
        return Message("storing")

    def load(self, shard: Shard, order: LoadOrder, hold: Callable[[], None]) -> Message:
        """Begin to fill a new shard from a checkpoint, then ``hold`` it; answers at once."""
        self._end_job()

        def work(job: Job) -> dict[str, Any]:
            loaded = store.load(shard, order.loading, is_cancelled=lambda: job.is_cancelled)
            shard.resume(order.applied, order.barred)
            hold()
            return {"rows": loaded.rows, "bytes": loaded.bytes}

        self._start(work, "holdfast-load")
        return Message("loading")

    def _start(self, work: Callable[[Job], dict[str, Any]], name: str) -> None:
        with self._lock:
            self._job = Job(work, name)

    def ask_job(self, _: Caller, message: Message) -> Message:
        """How far the job is; waits a while for its end."""
        job = self._job
        if job is None:
            raise ConflictError("there is no job here")
        return Message("job", job.ask(_WAIT_S))
