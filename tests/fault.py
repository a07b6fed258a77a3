"""A storage that fails on purpose, at the call a test chooses.

Wraps any storage. Every primitive counts as one call, each ``write`` and ``close`` of a writer
included, so a test can run a scenario once to learn the number of calls, and then once for every
call and way to fail.

Invariants:
- Calls are numbered from 1 in the order in which they start, over all threads.
- After a simulated crash nothing reaches the wrapped storage any more: what is there is what a
  process killed at that moment would have left.

Not here: slowness; and killing real processes, which tests do themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from holdfast.errors import UnavailableError
from holdfast.storage.base import ObjectWriter, Storage, StoredObjects, as_view

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

T = TypeVar("T")


class SimulatedCrash(BaseException):
    """The process is gone: no handler of ordinary errors may survive it."""


class When(Enum):
    """Where in a call it fails."""

    BEFORE = "before"
    """Nothing was done."""
    TORN = "torn"
    """A ``write`` wrote the first half; any other call, which is all or nothing, did nothing."""
    AFTER = "after"
    """Everything was done, but the answer was lost."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong at one call; without an error the process crashes there."""

    at: int
    when: When = When.BEFORE
    error: Exception | None = None
    is_lasting: bool = False
    """Whether every later call fails too, with the same error and with nothing done."""

    @classmethod
    def outage(cls, at: int, when: When = When.BEFORE, *, is_lasting: bool = False) -> Fault:
        """Storage that does not answer, once or from then on."""
        error = UnavailableError("injected outage", call=at, todo="retry")
        return cls(at, when, error, is_lasting)


class FaultyStorage:
    """A storage with planned faults; without any it only counts.

    ``calls`` names every call so far, in order: ``"write objects/a"``.
    """

    def __init__(self, inner: Storage, *plan: Fault) -> None:
        self._inner = inner
        self._plan = plan
        self._lock = threading.Lock()
        self.calls: list[str] = []
        self.has_crashed = False

    @property
    def url(self) -> str:
        """The wrapped storage's."""
        return self._inner.url

    def create(self, name: str) -> ObjectWriter:
        """As the wrapped storage."""
        return self.call(f"create {name}", lambda: FaultyWriter(self, name, self._inner))

    def put_if_absent(self, name: str, data: bytes) -> None:
        """As the wrapped storage."""
        self.call(f"put_if_absent {name}", lambda: self._inner.put_if_absent(name, data))

    def get(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """As the wrapped storage."""
        return self.call(f"get {name}", lambda: self._inner.get(name, offset=offset, length=length))

    def get_into(self, name: str, buffer: WriteableBuffer, *, offset: int = 0) -> None:
        """As the wrapped storage."""
        self.call(f"get_into {name}", lambda: self._inner.get_into(name, buffer, offset=offset))

    def size(self, name: str) -> int:
        """As the wrapped storage."""
        return self.call(f"size {name}", lambda: self._inner.size(name))

    def list(self, prefix: str) -> StoredObjects:
        """As the wrapped storage."""
        return self.call(f"list {prefix}", lambda: self._inner.list(prefix))

    def delete(self, name: str) -> None:
        """As the wrapped storage."""
        self.call(f"delete {name}", lambda: self._inner.delete(name))

    def clean(self) -> None:
        """As the wrapped storage."""
        self.call("clean", self._inner.clean)

    def call(
        self, label: str, act: Callable[[], T], *, tear: Callable[[], object] | None = None
    ) -> T:
        """Count a call and carry it out as far as the plan allows."""
        fault = self._next(label)
        if fault is None:
            return act()
        if fault.when is When.AFTER:
            act()
        if fault.when is When.TORN and tear is not None:
            tear()
        raise self._failure(fault)

    def _next(self, label: str) -> Fault | None:
        """The fault that hits the call that starts now."""
        with self._lock:
            if self.has_crashed:
                raise SimulatedCrash("the process crashed before", label)
            self.calls.append(label)
            number = len(self.calls)
        for fault in self._plan:
            if fault.at == number:
                return fault
            if fault.is_lasting and fault.at < number:
                return Fault(number, When.BEFORE, fault.error)
        return None

    def _failure(self, fault: Fault) -> BaseException:
        if fault.error is not None:
            return fault.error
        with self._lock:
            self.has_crashed = True
            return SimulatedCrash(f"at call {fault.at}", self.calls[fault.at - 1])


class FaultyWriter:
    """A writer whose calls are counted and fail as planned."""

    def __init__(self, storage: FaultyStorage, name: str, inner: Storage) -> None:
        self._storage = storage
        self._name = name
        self._inner = inner.create(name)
        self._is_done = False

    @property
    def bytes(self) -> int:
        """How many bytes the wrapped writer took."""
        return self._inner.bytes

    def write(self, data: ReadableBuffer) -> None:
        """As the wrapped writer; torn, the first half of the buffer is written."""
        view = as_view(data)
        self._ending(
            lambda: self._storage.call(
                f"write {self._name}",
                lambda: self._inner.write(view),
                tear=lambda: self._inner.write(view[: view.nbytes // 2]),
            )
        )

    def close(self) -> None:
        """As the wrapped writer."""
        self._ending(lambda: self._storage.call(f"close {self._name}", self._inner.close))
        self._is_done = True

    def abort(self) -> None:
        """As the wrapped writer."""
        self._is_done = True
        self._storage.call(f"abort {self._name}", self._inner.abort)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A dead process aborts nothing, and a finished writer has nothing to abort.
        if not self._is_done and not self._storage.has_crashed:
            self.abort()

    def _ending(self, act: Callable[[], None]) -> None:
        """A failed call ends a writer: as promised, it aborts, unless the process is gone."""
        try:
            act()
        except Exception:
            self._is_done = True
            self._inner.abort()
            raise
