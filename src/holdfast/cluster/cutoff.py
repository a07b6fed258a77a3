"""Ends what the transport library cannot end: a connection in use, a send that nobody takes.

The library waits for ever in a send whose receiver has stopped, also after it was cancelled, and a
server of it waits for ever for streams that are still open. Both end at once when the connection
beneath is shut down, which any holder of its descriptor may do.

The library does not say which connection is a stream's. So streams to one place are opened one
after the other, and the connection that came with one is found among this process's descriptors.

Invariant: a connection is known by its inode, which no other has while it is open: what is cut is
that connection or none, whatever became of its descriptor.

Not here: which connection, and how long is too long (wire.py).
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

_TICK_S = 0.05
BUFFER_BYTES = 1 << 20

Place = int | str
"""Where a connection leads, or was accepted: a port, or the path of a local socket."""


class Opening:
    """A connection to a place that is being opened."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._before = _inodes()

    def find(self) -> int:
        """The inode of the connection that was opened since, which is given a wide buffer; or 0."""
        for inode, connection in _sockets(but=self._before):
            if _peer(connection) == self._place:
                _widen(connection)
                return inode
        return 0


class Openings:
    """Connections are opened one after the other, for each place."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: defaultdict[Place, threading.Lock] = defaultdict(threading.Lock)
        self._waiting: defaultdict[Place, int] = defaultdict(int)

    @contextmanager
    def take_turn(self, place: Place, timeout_s: float) -> Iterator[Opening]:
        """Open a connection in the block.

        Raises:
            TimeoutError: another one took too long.
        """
        with self._lock:
            turn = self._turns[place]
            self._waiting[place] += 1
        try:
            if not turn.acquire(timeout=timeout_s):
                raise TimeoutError("another connection to the same place is being opened")
            try:
                yield Opening(place)
            finally:
                turn.release()
        finally:
            with self._lock:
                self._waiting[place] -= 1
                if not self._waiting[place]:
                    del self._turns[place], self._waiting[place]


OPENINGS = Openings()


class Accepted:
    """The connections that were accepted at a place."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._known: set[int] = set()

    def widen(self) -> None:
        """Give a wide buffer to those that are new."""
        known, self._known = self._known, _inodes()
        for _, connection in _sockets(but=known):
            if _own(connection) == self._place:
                _widen(connection)

    def cut(self) -> None:
        """Shut all of them down."""
        for _, connection in _sockets():
            if _own(connection) == self._place:
                _shut_down(connection)


def cut_connection(inode: int) -> None:
    """Shut a connection down, if it is still there."""
    for found, connection in _sockets():
        if found == inode:
            _shut_down(connection)


def _inodes() -> set[int]:
    """Those of all sockets of this process."""
    found = set()
    for name in os.listdir("/dev/fd"):  # noqa: PTH208
        with suppress(OSError):  # closed meanwhile
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add(status.st_ino)
    return found


def _sockets(but: Collection[int] = ()) -> Iterator[tuple[int, socket.socket]]:
    """Sockets of this process and their inodes, but for some inodes; each through a descriptor of
    its own, which is closed after its turn."""
    for name in os.listdir("/dev/fd"):  # noqa: PTH208
        try:
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode) or status.st_ino in but:
                continue
            copy = os.dup(int(name))
        except OSError:  # closed meanwhile
            continue
        try:
            connection = socket.socket(fileno=copy)
        except OSError:  # another thing's descriptor by now
            os.close(copy)
            continue
        with connection:
            yield os.fstat(copy).st_ino, connection


def _peer(connection: socket.socket) -> Place | None:
    """Where a connection leads."""
    with suppress(OSError):  # it listens, or has ended
        return _place(connection, connection.getpeername())
    return None


def _own(connection: socket.socket) -> Place | None:
    """Where a connection was accepted."""
    with suppress(OSError):
        connection.getpeername()  # raises for one that listens
        return _place(connection, connection.getsockname())
    return None


def _place(connection: socket.socket, name: str | tuple[str, int]) -> Place | None:
    if connection.family == socket.AF_UNIX:
        return name if isinstance(name, str) else None
    return name[1] if isinstance(name, tuple) else None


def _widen(connection: socket.socket) -> None:
    """A local socket takes 200 kB at a time, and does not learn as TCP does: the sender of a large
    message would wait for its receiver again and again."""
    if connection.family == socket.AF_UNIX:
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class Watched(Protocol):
    """Something that may take too long."""

    def check(self, now: float) -> None:
        """End what is past its deadline."""


class Watch:
    """Cancels sends that take too long: the library has no deadline for one write.

    One thread for all streams of the process, there while any is open.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collected stream may end in the midst of any of this
        self._watched: set[Watched] = set()
        self._wake = threading.Event()

    def add(self, one: Watched) -> None:
        """Check it from now on."""
        with self._lock:
            self._watched.add(one)
            if len(self._watched) == 1:
                self._wake = threading.Event()
                threading.Thread(
                    target=self._run, args=(self._wake,), name="holdfast-deadlines", daemon=True
                ).start()

    def remove(self, one: Watched) -> None:
        """Check it no more."""
        with self._lock:
            self._watched.discard(one)
            if not self._watched:
                self._wake.set()

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(_TICK_S):
            with self._lock:
                watched = list(self._watched)
            for one in watched:
                one.check(time.monotonic())


WATCH = Watch()
