"""Metrics over HTTP, for Prometheus: ``GET /metrics`` and nothing else.

Off unless started; only this machine reaches it unless another host is named.

Invariants:
- A request changes nothing and reads no file; whatever it holds, the next one is answered.
- At most ``CONNECTIONS_MAX`` are served at a time, each for ``TIMEOUT_S`` of silence at most, and
  for ``TOTAL_S`` however slowly it speaks.
- Nothing of it outlives ``serve``'s block, and it never keeps a process alive.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from holdfast.errors import InvalidRequestError, UnavailableError
from holdfast.metrics.counts import CONTENT_TYPE, Metrics

LOOPBACK = "127.0.0.1"
PATH = "/metrics"
CONNECTIONS_MAX = 8
TIMEOUT_S = 5.0
TOTAL_S = 15.0


class _Handler(BaseHTTPRequestHandler):
    timeout = TIMEOUT_S
    server: _Server

    def do_GET(self) -> None:
        """The metrics' text."""
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        """The same without the text."""
        self._answer(has_body=False)

    def _answer(self, *, has_body: bool) -> None:
        if self.path.split("?", 1)[0] != PATH:
            self.send_error(HTTPStatus.NOT_FOUND, explain=f"metrics are at {PATH}")
            return
        body = self.server.metrics.text().encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def version_string(self) -> str:
        """Who answers; not which Python."""
        return "holdfast"

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are no news."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], metrics: Metrics) -> None:
        self.metrics = metrics
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve it in a thread of its own, or not at all where too many are served."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """As the class above; makes room before the client can see that it was served."""
        ending = threading.Timer(TOTAL_S, _end, (request,))
        ending.daemon = True
        ending.start()
        try:
            self.finish_request(request, client_address)
        except Exception:
            self.handle_error(request, client_address)
        finally:
            ending.cancel()
            self._room.release()
            self.shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or stayed silent, is no news."""


def _end(request: socket.socket) -> None:
    with suppress(OSError):  # it has ended
        request.shutdown(socket.SHUT_RDWR)


@contextmanager
def serve(metrics: Metrics, *, port: int, host: str = LOOPBACK) -> Iterator[str]:
    """Answer requests while the block runs; yields the url. Port 0: any that is free.

    Raises:
        InvalidRequestError: not a port.
        UnavailableError: the port is taken, or the host is not this machine's.
    """
    if not 0 <= port < 65536:
        raise InvalidRequestError("not a port", port=port)
    try:
        server = _Server((host, port), metrics)
    except OSError as error:
        raise UnavailableError(
            "cannot serve metrics there", host=host, port=port, reason=error.strerror or str(error),
            todo="choose another port; 0 is any",
        ) from error  # fmt: skip
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="holdfast-metrics",
        daemon=True,
    )  # fmt: skip
    thread.start()
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{server.server_address[1]}{PATH}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
