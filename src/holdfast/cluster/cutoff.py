"""Ends what the transport library cannot end: a connection in use, a send that nobody takes.

The library waits for ever in a send whose receiver has stopped, also after it was cancelled, and a
server of it waits for ever for streams that are still open. Both end at once when the connection
beneath is shut down, which any holder of its descriptor may do.

Not here: which connection, and how long is too long (wire.py).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

_INTERNET = (socket.AF_INET, socket.AF_INET6)
_TICK_S = 0.05


def cut_connections(port: int, *, peer_port: int | None = None) -> None:
    """Shut down every connection of this process with its own end at a port, the other at any."""
    for entry in Path("/dev/fd").iterdir():
        try:
            copy = os.dup(int(entry.name))
        except OSError:  # closed meanwhile
            continue
        try:
            connection = socket.socket(fileno=copy)
        except OSError:  # no socket
            os.close(copy)
            continue
        with connection, suppress(OSError):
            if connection.family not in _INTERNET:
                continue
            peer = connection.getpeername()[1]  # raises for one that listens
            if connection.getsockname()[1] == port and peer_port in (None, peer):
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
