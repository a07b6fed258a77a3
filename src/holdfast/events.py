"""What happened, as typed events: one frozen class each, one JSON line each.

Everything observable goes through here once; logs, progress bars and reports read events and
nothing else. An event never carries a tensor, only numbers and words.

Invariants:
- ``to_json`` followed by ``from_json`` returns an equal event.
- A sink that fails never stops training: its error is reported once on stderr, then it is dropped.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from holdfast.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A fact and the moment it was observed (seconds since the epoch)."""

    kind: ClassVar[str] = "event"
    time: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsCompiled(Event):
    """The Numba kernels are ready; the first time on a machine this takes a while."""

    kind: ClassVar[str] = "kernels_compiled"
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOpened(Event):
    """A checkpointer found the run at a url, or none yet."""

    kind: ClassVar[str] = "run_opened"
    url: str
    strategy: str
    tables: int
    rows: int
    row_bytes: int
    last_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecChosen(Event):
    """How rows will be stored from now on, and why."""

    kind: ClassVar[str] = "codec_chosen"
    codec: str
    state_codec: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingMethod(Event):
    """How a table's changed rows are found from now on, and why; what a user can change, if
    anything. ``is_escape``: rows had changed unseen, and are in the next checkpoint."""

    kind: ClassVar[str] = "tracking_method"
    table: str
    method: str
    reason: str
    todo: str
    is_escape: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStarted(Event):
    """A checkpoint was decided: its kind, and why."""

    kind: ClassVar[str] = "save_started"
    step: int
    checkpoint: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStaged(Event):
    """The snapshot is in memory; training goes on."""

    kind: ClassVar[str] = "save_staged"
    step: int
    rows: int
    bytes: int
    stall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveProgress(Event):
    """Part of a snapshot is encoded and handed to storage: rows and bytes so far."""

    kind: ClassVar[str] = "save_progress"
    step: int
    rows: int
    rows_total: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveDurable(Event):
    """The checkpoint is committed: it exists."""

    kind: ClassVar[str] = "save_durable"
    step: int
    checkpoint: str
    codec: str
    rows: int
    bytes: int
    full_bytes: int
    stall_s: float
    durable_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCancelled(Event):
    """A running save gave way to a newer one; its rows go into the next."""

    kind: ClassVar[str] = "save_cancelled"
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed(Event):
    """A background save failed; the previous checkpoint stays the last."""

    kind: ClassVar[str] = "save_failed"
    step: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted(Event):
    """A notice that the process will end was answered: the step that training was at, whether it is
    durable, and the seconds since the notice. ``reason`` says who gave it, and what went wrong."""

    kind: ClassVar[str] = "preempted"
    step: int
    is_saved: bool
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(Event):
    """A checkpoint was loaded into the model."""

    kind: ClassVar[str] = "restored"
    step: int
    rows: int
    bytes: int
    seconds: float
    restores: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered(Event):
    """The rows of servers that failed came back from a checkpoint; all others went on."""

    kind: ClassVar[str] = "recovered"
    step: int
    checkpoint_step: int
    servers: tuple[int, ...]
    rows: int
    bytes: int
    seconds: float
    pls: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsDropped(Event):
    """Retention, a rewind to an older step, or a user let checkpoints go."""

    kind: ClassVar[str] = "checkpoints_dropped"
    steps: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectsDeleted(Event):
    """Garbage collection removed objects that no checkpoint needs."""

    kind: ClassVar[str] = "objects_deleted"
    objects: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionFailed(Event):
    """Garbage collection could not remove something; it is tried again after the next commit."""

    kind: ClassVar[str] = "collection_failed"
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Extracted(Event):
    """A round of extraction was committed: chunks looked at, passed over by stage, moved; bytes."""

    kind: ClassVar[str] = "extracted"
    step: int
    chunks: int
    by_range: int
    by_filter: int
    by_ratio: int
    extracted: int
    closed: int
    moved: int
    rows: int
    read_bytes: int
    written_bytes: int
    deleted_rows: int
    garbage_bytes: int
    seconds: float
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractionFailed(Event):
    """A round of extraction failed; nothing is lost, and the next save tries again."""

    kind: ClassVar[str] = "extraction_failed"
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAhead(Event):
    """Something between the loader and training reads ahead: how many batches, how many of them a
    step trains, and what told (given, thread, pattern)."""

    kind: ClassVar[str] = "read_ahead"
    batches: int
    per_step: int
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderReplayed(Event):
    """Batches of an epoch that were trained before a resume were read again, and dropped."""

    kind: ClassVar[str] = "reader_replayed"
    epoch: int
    batches: int
    batches_total: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderNotice(Event):
    """A resumed run may not go on where it stopped; what to change."""

    kind: ClassVar[str] = "reader_notice"
    reason: str
    todo: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainProgress(Event):
    """A training loop's own report: where it is and how well the model does."""

    kind: ClassVar[str] = "train_progress"
    step: int
    steps_total: int
    samples: int
    loss: float
    seconds: float
    auc: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStarted(Event):
    """A server process holds a shard, or waits as a spare (server -1)."""

    kind: ClassVar[str] = "server_started"
    server: int
    name: str
    pid: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLost(Event):
    """A server process died, or was silent for too long."""

    kind: ClassVar[str] = "server_lost"
    server: int
    pid: int
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReplaced(Event):
    """Another process answers in a lost server's place; ``seconds`` since the loss was seen."""

    kind: ClassVar[str] = "server_replaced"
    server: int
    pid: int
    epoch: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRecovered(Event):
    """A replacement decoded one range of rows; ``left`` are missing still."""

    kind: ClassVar[str] = "range_recovered"
    server: int
    granule: int
    rows: int
    left: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRecovered(Event):
    """A replacement has all rows (``what`` is "rows") or all parities too ("parities")."""

    kind: ClassVar[str] = "server_recovered"
    server: int
    what: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsLost(Event):
    """More was lost than parities make up for."""

    kind: ClassVar[str] = "rows_lost"
    servers: tuple[int, ...]
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarted(Event):
    """A worker process takes part."""

    kind: ClassVar[str] = "worker_started"
    worker: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost(Event):
    """A worker died; its last push happened or not, and ``batches`` are given to others."""

    kind: ClassVar[str] = "worker_lost"
    worker: int
    pid: int
    how: str
    batches: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterProgress(Event):
    """How far training on a cluster is."""

    kind: ClassVar[str] = "cluster_progress"
    batches: int
    batches_total: int
    samples: int
    seconds: float
    samples_per_s: float
    loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStarted(Event):
    """A training on a cluster begins: what is trained, where its rows lie, what survives a loss.

    ``rows_of`` are each server's rows. ``row_bytes`` and ``parity_bytes`` are of all servers, with
    optimizer state. ``second_layer`` names the strategy of checkpoints, ``every`` the batches
    between two; None: there are none.
    """

    kind: ClassVar[str] = "cluster_started"
    strategy: str
    second_layer: str | None
    every: int | None
    engine: str
    servers: int
    workers: int
    data: int
    parity: int
    code: str
    two_phase: bool
    rows: int
    batches: int
    batch_size: int
    seed: int
    rows_of: tuple[int, ...]
    row_bytes: int
    parity_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStruck(Event):
    """A signal is sent to a server's process, to see what becomes of it; batches done so far."""

    kind: ClassVar[str] = "server_struck"
    server: int
    pid: int
    signal: str
    batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTrained(Event):
    """A worker trained a batch, ``at`` by its clock; what its process used, sent and lost so far.

    ``bytes_sent`` counts ids and gradients; ``pushes_lost`` what a lost server had and nobody has.
    """

    kind: ClassVar[str] = "batch_trained"
    worker: int
    batch: int
    loss: float
    at: float
    cpu_s: float
    pushes_lost: int
    bytes_sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCounted(Event):
    """What a server's process did so far; the last count of a process holds. None: not known.

    ``rows_updated`` by workers' pushes, ``rows_folded`` parities updated by others' differences,
    ``differences`` rows sent to others' parities, in so many bytes of differences and, where copies
    are told them, of gradients. Other bytes are of messages' arrays, by who sent them.
    """

    kind: ClassVar[str] = "server_counted"
    server: int
    address: str
    rows_updated: int
    rows_folded: int
    differences: int
    cpu_s: float
    resident_bytes: int | None = None
    queue_bytes: int | None = None
    worker_bytes: int | None = None
    server_bytes: int | None = None
    difference_bytes: int = 0
    gradient_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAudited(Event):
    """Every stripe was recomputed from its rows, and compared with the parities that are held."""

    kind: ClassVar[str] = "cluster_audited"
    stripes: int
    parities: int
    wrong: int
    deviation_max: float = 0.0

    @property
    def is_sound(self) -> bool:
        """Whether every parity is what its rows say."""
        return self.wrong == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterEnded(Event):
    """A training on a cluster is over: all batches are done, or ``error`` says why not.

    ``train_cpu_s`` is what all processes used between the first batch and the last, ``cpu_s`` what
    they used in all.
    """

    kind: ClassVar[str] = "cluster_ended"
    auc: float | None
    train_cpu_s: float | None
    cpu_s: float | None
    error: str | None = None


KINDS: dict[str, type[Event]] = {
    item.kind: item
    for item in list(globals().values())
    if isinstance(item, type) and issubclass(item, Event) and item is not Event
}
"""Every kind of event there is."""

_OLD_FIELDS = {"killed_rows": "deleted_rows"}
"""Names of fields in files that earlier versions wrote."""


def to_json(event: Event) -> str:
    """One line of JSON: the event's kind and its fields.

    >>> to_json(SaveFailed(step=3, error="disk full", time=1.5))
    '{"kind": "save_failed", "time": 1.5, "step": 3, "error": "disk full"}'
    """
    return json.dumps({"kind": event.kind, **dataclasses.asdict(event)})


def from_json(line: str) -> Event:
    """The event that ``to_json`` wrote.

    Raises:
        InvalidRequestError: the line is not one of our events.
    """
    try:
        fields: dict[str, Any] = json.loads(line)
        cls: Callable[..., Event] = KINDS[fields.pop("kind")]
        values = {
            _OLD_FIELDS.get(name, name): tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
        return cls(**values)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidRequestError("not an event line", line=line[:80]) from error


def read_events(path: str | Path) -> Iterator[Event]:
    """Every event of a JSON-lines file; lines torn by a killed writer are left out."""
    with Path(path).open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.endswith("}\n") and is_json(line):
                yield from_json(line)


def is_json(line: str) -> bool:
    """Whether a line is whole."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


Sink = Callable[[Event], None]


def _ends_torn(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def json_lines(path: str | Path) -> Sink:
    """A sink that appends to a file, a whole line at a time, so a kill tears at most the last."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if _ends_torn(target):
        with target.open("a", encoding="utf-8") as out:
            out.write("\n")  # what follows must not join a line that a killed writer left

    def write(event: Event) -> None:
        with target.open("a", encoding="utf-8") as out:
            out.write(to_json(event) + "\n")

    return write


class EventLog:
    """Stamps events with the time and hands them to every sink, from any thread."""

    def __init__(
        self, sinks: Iterable[Sink] = (), *, clock: Callable[[], float] = time.time
    ) -> None:
        self._sinks = list(sinks)
        self._clock = clock
        self._lock = threading.Lock()

    def add(self, sink: Sink) -> None:
        """Send what follows to one more sink."""
        with self._lock:
            self._sinks.append(sink)

    def emit(self, event: Event) -> None:
        """Report a fact; never raises."""
        stamped = dataclasses.replace(event, time=self._clock())
        with self._lock:
            sinks = tuple(self._sinks)
        # Called without the lock: a sink may emit, or wait for a thread that does.
        for sink in sinks:
            try:
                sink(stamped)
            except Exception as error:  # a sink is a foreign edge
                with self._lock:
                    self._sinks = [kept for kept in self._sinks if kept is not sink]
                print(f"holdfast: event sink dropped: {error!r}", file=sys.stderr)
