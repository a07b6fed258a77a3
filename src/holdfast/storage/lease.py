"""A lease: who may commit, where the store itself cannot refuse the second of two writers.

One small object holds the name of the writer and a number that it raises again and again. Whoever
wants to write waits until that stops, writes its own name, waits until every request of others
that could have crossed has taken effect, and reads: the name that stands is the writer's.
(Fischer's mutual exclusion, with a sign of life.)

    read free -> write my name -> settle -> read: mine? -> held until (write begun + lease_s)
    every lease_s / 3: read mine -> write mine, raised by one

Rests on two bounds that no store can enforce: a request takes effect within ``settle_s`` or never,
and a process does not sleep between the last look at its clock and its request. Clocks of different
machines are never compared. Where a bound breaks, two writers may commit the same number.

Invariants:
- A lease is used only while the holder's own clock says that nobody can have taken it yet.
- A holder that lives is never overtaken; one that is known to be dead is overtaken at once, one
  that cannot be asked (another machine) after ``lease_s`` without a sign of life.
- A name whose writing was not answered in time is given back, and nobody's for ``lease_s``.
- An object that is missing is believed to be missing only when it is so twice, ``settle_s`` apart:
  some stores replace an object by removing it first.

Not here: what is put under a lease (storage/s3/objects.py, remote.py); the choice of it (probe.py).
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from holdfast.errors import ConflictError, HoldfastError, UnavailableError
from holdfast.storage.settings import RemoteSettings

# Beside the objects of a run, hidden by its dot.
NAME = ".lease"
# A record is a few hundred bytes; whatever else lies there is not read as one.
_RECORD_BYTES_MAX = 4096
# How often a claim is begun again that was too slow, or not answered.
_CLAIMS = 3
# How long a process that ends waits for a store that does not answer.
_EXIT_S = 5.0


class Cell(Protocol):
    """One object that can be replaced; every call is one request that is not repeated."""

    def read(self) -> bytes | None: ...
    def write(self, data: bytes) -> None: ...
    def remove(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lease, as far as the stored record tells."""

    token: str
    beat: int
    host: str
    process: str

    def to_bytes(self) -> bytes:
        """As stored."""
        return json.dumps(
            {"token": self.token, "beat": self.beat, "host": self.host, "process": self.process}
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Holder:
        """What ``to_bytes`` wrote; anything else is a holder of whom nothing is known.

        >>> Holder.from_bytes(b"?").token
        '?'
        """
        try:
            found = json.loads(data[:_RECORD_BYTES_MAX])
            return cls(
                str(found["token"]), int(found["beat"]), str(found["host"]), str(found["process"])
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            return cls(data[:64].decode(errors="replace"), len(data), "", "")


def this_process() -> str:
    """A name of this process that no other process ever has; empty where the system has none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        names = Path("/proc/self/ns/pid").readlink()
        return f"{boot}/{names}/{os.getpid()}/{_started(os.getpid())}"
    except (OSError, ValueError, IndexError):
        return ""


def is_dead(process: str) -> bool:
    """Whether a process is known to be gone: it ran on this machine, and runs no more.

    >>> is_dead(this_process()), is_dead("another/machine/1/2"), is_dead("")
    (False, False, False)
    """
    mine, theirs = this_process().split("/"), process.split("/")
    if len(mine) != 4 or len(theirs) != 4 or mine[:2] != theirs[:2] or not theirs[2].isdecimal():
        return False
    try:
        return _started(int(theirs[2])) != theirs[3]
    except FileNotFoundError:
        return True
    except (OSError, ValueError, IndexError):
        return False


def _started(pid: int) -> str:
    """When a process was started, in ticks; the name before it may hold spaces and brackets."""
    text = Path(f"/proc/{pid}/stat").read_text()
    fields = text.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        raise FileNotFoundError  # it ended; only its parent has not heard of it
    return fields[19]


class Lease:
    """The right of this process to commit to one run."""

    def __init__(
        self,
        cell: Cell,
        settings: RemoteSettings,
        *,
        url: str,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        is_dead: Callable[[str], bool] = is_dead,
        has_renewer: bool = True,
    ) -> None:
        self._cell = cell
        self._settings = settings
        self._url = url
        self._clock = clock
        self._sleep = sleep
        self._is_dead = is_dead
        self._has_renewer = has_renewer
        # What was put under it and not deleted: while it is held, that is still there.
        self.ours: dict[str, int] = {}
        self._turn = threading.RLock()
        self._token = secrets.token_hex(8)
        self._beat = 0
        self._until = float("-inf")
        self._renewer: _Renewer | None = None

    @property
    def is_held(self) -> bool:
        """Whether nobody else can have taken it, with time left for a request."""
        return self._clock() + self._settings.settle_s < self._until

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lease for a block, one thread at a time.

        Raises:
            ConflictError: another writer holds it.
            UnavailableError: the store failed, or is too slow to agree on a writer.
        """
        with self._turn:
            if not self.is_held:
                self._claim()
            yield
            if self._clock() >= self._until and not self._is_mine(self._read()):
                raise self._lost(None)

    def check(self) -> None:
        """Before each request inside the block: a request may have been waited for too long.

        Raises:
            UnavailableError: the lease ended; whether another has it now is not known.
        """
        if not self.is_held:
            raise UnavailableError(
                "the lease ended while the store did not answer", url=self._url, todo="save again"
            )

    def renew(self) -> bool:
        """Show a sign of life; whether the lease is still held."""
        if not self.is_held:
            return False
        begun = self._clock()
        if not self._is_mine(self._read()):
            self._until = float("-inf")
            return False
        self._write()
        self._until = begun + self._settings.lease_s
        return True

    def release(self) -> None:
        """Let others have it at once."""
        with self._turn:
            self._until = float("-inf")
            with suppress(HoldfastError):
                if self._is_mine(self._read()):
                    self._cell.remove()

    def _claim(self) -> None:
        for left in reversed(range(_CLAIMS)):
            try:
                self._claim_once()
                break
            except UnavailableError:
                if left == 0:
                    raise
                # A name written late may stand over that of a new holder, who finds out when it
                # shows its next sign of life: until then nobody knows, and nobody may begin.
                self._sleep(self._settings.lease_s)
        if self._has_renewer and (self._renewer is None or not self._renewer.is_alive()):
            self._renewer = _Renewer(self)
            self._renewer.start()

    def _claim_once(self) -> None:
        self.ours.clear()
        found = self._read()
        if found is not None and not self._is_mine(found):
            found = self._wait_for_end(found)
        if found is None:
            self._sleep(self._settings.settle_s)
        begun = self._clock()
        if (now := self._read()) != found:
            raise self._lost(now)
        try:
            self._write()
            if self._clock() - begun > self._settings.settle_s:
                raise UnavailableError(
                    "the store is too slow to agree on a writer",
                    url=self._url,
                    settle_s=self._settings.settle_s,
                    todo="retry, or raise settle_s and lease_s",
                )
        except UnavailableError:
            with suppress(HoldfastError):
                if self._is_mine(self._read()):
                    self._cell.remove()
            raise
        self._sleep(self._settings.settle_s)
        if not self._is_mine(now := self._read()):
            raise self._lost(now)
        self._until = begun + self._settings.lease_s

    def _wait_for_end(self, found: Holder) -> Holder | None:
        """Wait until a holder is dead, or silent for too long; None if it gave the lease back.

        Raises:
            ConflictError: it lives.
        """
        started = self._clock()
        # A holder that lives is heard three times in this time.
        while self._clock() - started < 1.25 * self._settings.lease_s:
            if self._is_dead(found.process):
                return found
            self._sleep(min(1.0, self._settings.lease_s / 10))
            now = self._read()
            if now is None:
                return None
            if now != found:
                raise self._lost(now)
        return found

    def _lost(self, holder: Holder | None) -> ConflictError:
        self._until = float("-inf")
        return ConflictError(
            "another writer holds the lease of this run",
            url=self._url,
            host=holder.host if holder else "unknown",
            todo="stop one of the two trainings, or give each its own url",
        )

    def _is_mine(self, holder: Holder | None) -> bool:
        return holder is not None and holder.token == self._token

    def _read(self) -> Holder | None:
        data = self._cell.read()
        return None if data is None else Holder.from_bytes(data)

    def _write(self) -> None:
        self._beat += 1
        me = Holder(self._token, self._beat, socket.gethostname(), this_process())
        self._cell.write(me.to_bytes())


class _Renewer(threading.Thread):
    """Shows signs of life until the lease is lost or forgotten, and then gives it back."""

    def __init__(self, lease: Lease) -> None:
        super().__init__(name="holdfast-lease", daemon=True)
        self._every_s = lease._settings.lease_s / 3
        self._lease = weakref.ref(lease)
        self._ended = threading.Event()
        self._heir = Lease(  # what gives it back when nobody can reach the lease itself any more
            lease._cell, lease._settings, url=lease._url, has_renewer=False
        )
        self._heir._token = lease._token
        weakref.finalize(lease, self._ended.set).atexit = False
        _renewers.add(self)

    def run(self) -> None:
        """Renew until told to stop."""
        pid = os.getpid()
        while not self._ended.wait(self._every_s):
            lease = self._lease()
            if lease is None:
                break
            # An outage passes, or outlasts the lease: the next commit will tell.
            with suppress(HoldfastError):
                if not lease.renew():
                    return
            del lease
        if os.getpid() == pid:
            self._heir.release()

    def end(self) -> None:
        """Stop, and give the lease back."""
        self._ended.set()


_renewers: weakref.WeakSet[_Renewer] = weakref.WeakSet()
_pid = os.getpid()
_shared: weakref.WeakValueDictionary[tuple[object, ...], Lease] = weakref.WeakValueDictionary()
_sharing = threading.Lock()


def shared_lease(key: tuple[object, ...], make: Callable[[], Lease]) -> Lease:
    """The one lease of a process for one place; a process that was forked off has its own."""
    with _sharing:
        lease = _shared.get((os.getpid(), *key))
        if lease is None:
            lease = _shared[os.getpid(), *key] = make()
        return lease


@atexit.register
def _release_all() -> None:
    """A process that ends as it should leaves no lease behind."""
    if os.getpid() != _pid:
        return  # forked off: these are another's
    renewers = list(_renewers)
    for renewer in renewers:
        renewer.end()
    until = time.monotonic() + _EXIT_S
    for renewer in renewers:
        renewer.join(max(0.0, until - time.monotonic()))
