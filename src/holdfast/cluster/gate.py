"""The gate: the port of a listener. It lets a connection in once its first request had the token.

    TCP connection -> first headers (http2.py) -> token? -> relayed to the listener's own socket
                                               -> refused as a gRPC server would, and closed

The transport library takes in a whole request, however large, before it can be asked whether to
refuse it. So it listens where nobody else can reach it (localsocket.py), and hears of a connection
from elsewhere only when the gate has seen the token. Processes of the same user and machine do not
come this way.

A client sends its first request when it has the server's first frame. The gate knows that frame,
sends it in the server's place, and leaves out the server's own when the connection is let in; so
both sides see what they would have without a gate.

Invariants:
- Nothing that a stranger sends is passed on, and no more of it is kept than ``http2`` says.
- At most ``STRANGERS_MAX`` connections without a token are there at once; the oldest goes first.
  None stays longer than ``STRANGER_S``.
- At most ``GUESTS_MAX`` connections are relayed at once.
- Nothing of it is left after ``close``.

Not here: later requests on the same connection, whose tokens the listener checks (wire.py).
"""

from __future__ import annotations

import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from holdfast.cluster import http2
from holdfast.cluster.cutoff import BUFFER_BYTES
from holdfast.errors import CorruptDataError, UnavailableError

STRANGERS_MAX = 64
STRANGER_S = 5.0
GUESTS_MAX = 512
_LEAVING_S = 1.0
_LEAVING_BYTES_MAX = 256 << 10  # of a refused request that is under way: more than its window
_READ_BYTES = 16 << 10
_ACCEPTS = 8  # at a time, so that a flood leaves time for others
_REST_S = 0.01  # after that, while strangers are many
_RELAY_BYTES = 128 << 10
_INNER_S = 5.0
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class _Stranger:
    """A connection that has not brought the token."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.request = http2.FirstRequest()
        self.ends_at = time.monotonic() + STRANGER_S
        self.left: int | None = None
        """Bytes that are still read of one that was refused, and thrown away."""


class Gate:
    """Listens on a port for a listener that has its own socket elsewhere."""

    def __init__(self, host: str, port: int, *, header: bytes, token: bytes) -> None:
        """Bind the port; nobody is let in before ``open``.

        Raises:
            OSError: the port is taken, or the host is not this machine's.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, port), family=family, backlog=128)
        self._listening.setblocking(False)
        self.port: int = self._listening.getsockname()[1]
        self._header, self._token = header, token
        self._greeting = b""
        self._strangers: dict[int, _Stranger] = {}
        self._guests: set[_Guest] = set()
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._thread: threading.Thread | None = None
        self._inner = Path()

    def open(self, inner: Path) -> None:
        """Let connections in, to the listener's own socket."""
        self._inner = inner
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="holdfast-gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and end every connection."""
        self._wake.close()  # ends the thread
        if self._thread is not None:
            self._thread.join()
        for stranger in list(self._strangers.values()):
            self._drop(stranger)
        with self._lock:
            guests = list(self._guests)
        for guest in guests:
            guest.end()
        for guest in guests:
            guest.join()
        self._selector.close()
        self._woken.close()
        self._listening.close()

    # The thread.

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select(self._timeout_s()):
                if key.fileobj is self._woken:
                    return
                if key.fileobj is self._listening:
                    self._accept()
                    continue
                stranger: _Stranger = key.data
                if self._strangers.get(key.fd) is stranger:  # else it was dropped meanwhile
                    self._read(stranger)
            self._drop_late()

    def _timeout_s(self) -> float | None:
        ends_at = min((each.ends_at for each in self._strangers.values()), default=None)
        return None if ends_at is None else max(0.0, ends_at - time.monotonic())

    def _drop_late(self) -> None:
        now = time.monotonic()
        for stranger in [each for each in self._strangers.values() if each.ends_at <= now]:
            self._drop(stranger)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                connection, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError:  # it is gone already, or there are too many open files
                time.sleep(_REST_S)
                return
            if len(self._strangers) >= STRANGERS_MAX:
                self._drop(next(iter(self._strangers.values())))
            connection.setblocking(False)
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._welcome(connection)
                continue
            connection.close()
        if len(self._strangers) >= STRANGERS_MAX:
            time.sleep(_REST_S)

    def _welcome(self, connection: socket.socket) -> None:
        """Say what the server would say first."""
        if not self._greeting:
            with socket.socket(socket.AF_UNIX) as asked:
                self._greeting = _connect(asked, self._inner)
        connection.send(self._greeting)  # it fits: nothing was sent before
        stranger = self._strangers[connection.fileno()] = _Stranger(connection)
        self._selector.register(connection, selectors.EVENT_READ, stranger)

    def _read(self, stranger: _Stranger) -> None:
        request = stranger.request
        try:
            if stranger.left is not None:
                found = len(stranger.connection.recv(_READ_BYTES))
                stranger.left -= found
                if not found or stranger.left <= 0:
                    self._drop(stranger)
                return
            found_bytes = stranger.connection.recv(min(_READ_BYTES, request.room))
            if not found_bytes:
                self._drop(stranger)
            elif request.feed(found_bytes):
                self._decide(stranger)
        except BlockingIOError:
            pass
        except (OSError, CorruptDataError):
            self._drop(stranger)
        except Exception:  # whatever one stranger brings about, the next is heard
            traceback.print_exc(file=sys.stderr)
            self._drop(stranger)

    def _decide(self, stranger: _Stranger) -> None:
        """Its first request is known: let it in, or refuse it."""
        if not stranger.request.brings(self._header, self._token):
            self._refuse(stranger, http2.UNAUTHENTICATED, "refused")
            return
        with self._lock:
            has_room = len(self._guests) < GUESTS_MAX
        if not has_room:
            self._refuse(stranger, http2.UNAVAILABLE, "too many connections")
            return
        self._forget(stranger)
        connection = stranger.connection
        connection.setblocking(True)
        _notice_loss(connection)
        guest = _Guest(
            connection, bytes(stranger.request.received), self._inner, self._greeting, self._left
        )
        with self._lock:
            self._guests.add(guest)
        try:
            guest.start()
        except RuntimeError:  # no more threads: it is dropped
            self._left(guest)
            raise

    def _refuse(self, stranger: _Stranger, status: int, message: str) -> None:
        """Say so; and read what is on its way, since closing before might destroy the answer."""
        stranger.connection.send(
            http2.refusal(stranger.request.stream, status=status, message=message)
        )
        stranger.connection.shutdown(socket.SHUT_WR)
        stranger.request = http2.FirstRequest()  # nothing of it is kept
        stranger.left = _LEAVING_BYTES_MAX
        stranger.ends_at = min(stranger.ends_at, time.monotonic() + _LEAVING_S)

    def _forget(self, stranger: _Stranger) -> None:
        self._strangers.pop(stranger.connection.fileno(), None)
        with suppress(KeyError, ValueError):
            self._selector.unregister(stranger.connection)

    def _drop(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.connection.close()

    def _left(self, guest: _Guest) -> None:
        with self._lock:
            self._guests.discard(guest)


class _Guest:
    """A connection that brought the token, relayed by two threads until either side ends it."""

    def __init__(
        self,
        connection: socket.socket,
        received: bytes,
        inner: Path,
        greeting: bytes,
        on_left: Callable[[_Guest], None],
    ) -> None:
        self._connection, self._received, self._path = connection, received, inner
        self._greeting, self._on_left = greeting, on_left
        self._inner = socket.socket(socket.AF_UNIX)
        self._inner.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self._threads = [
            threading.Thread(target=work, name="holdfast-guest", daemon=True)
            for work in (self._send, self._answer)
        ]

    def start(self) -> None:
        """Relay from now on."""
        self._threads[0].start()

    def end(self) -> None:
        """End both connections; the threads follow."""
        for each in (self._connection, self._inner):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait until nothing of it is left."""
        self._threads[0].join()

    def _send(self) -> None:
        try:
            if _connect(self._inner, self._path) != self._greeting:
                return  # another server than the one that was greeted for
            self._inner.sendall(self._received)
            self._received = b""
            self._threads[1].start()
            _relay(self._connection, self._inner)
            self._threads[1].join()
        except (OSError, UnavailableError):
            pass  # the listener is closing
        finally:
            self.end()
            self._connection.close()
            self._inner.close()
            self._on_left(self)

    def _answer(self) -> None:
        _relay(self._inner, self._connection)


def _relay(source: socket.socket, target: socket.socket) -> None:
    from holdfast.kernels.servers.relay import relay  # compiled or loaded when it is first needed

    relay(
        source.fileno(), target.fileno(), np.empty(_RELAY_BYTES, np.uint8),
        np.zeros(1, np.int64), _NO_SIGNAL,
    )  # fmt: skip
    for each in (source, target):  # a stream needs both ways: when one ends, so does the other
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _notice_loss(connection: socket.socket) -> None:
    """Have the kernel ask a silent peer whether it is there: its machine may be gone."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 20), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _connect(inner: socket.socket, path: Path) -> bytes:
    """Connect to a listener's own socket; the first frame that it sends."""
    inner.settimeout(_INNER_S)
    inner.connect(str(path))
    found = b""
    while (size := http2.frame_bytes(found)) is None or len(found) < size:
        more = inner.recv(9 - len(found) if size is None else size - len(found))
        if not more:
            raise UnavailableError("the listener is closing")
        found += more
    inner.settimeout(None)
    return found
