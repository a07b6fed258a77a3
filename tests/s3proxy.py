"""A proxy before an S3 server: counts what passes over the wire, delays it, breaks it.

A rule is asked for every request and answers with what happens to it; requests are written down
before they are passed on, as ``"PUT bucket/run/catalog/00000001.json"``, with the part of the query
that tells what kind of request it is.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit


class Fate(Enum):
    """What becomes of a request."""

    PASS = "pass"
    REFUSE = "the connection is closed before anything is passed on"
    TEAR = "the server gets half of the body, and then nothing more"
    DEAF = "the server carries it out, and the answer is lost"
    BUSY = "503 SlowDown, nothing is passed on"
    DENY = "403 AccessDenied, nothing is passed on"


_KINDS = ("list-type", "uploads", "uploadId", "partNumber", "delete", "location")


@dataclass
class Proxy:
    """What passed so far, and what is to happen."""

    endpoint: str = ""
    requests: list[str] = field(default_factory=list)
    rule: Callable[[str], Fate] = lambda request: Fate.PASS
    delay_s: float = 0.0
    bytes_per_s: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def judge(self, request: str) -> Fate:
        """Write a request down; what becomes of it."""
        with self._lock:
            self.requests.append(request)
            return self.rule(request)

    def take(self) -> list[str]:
        """What passed since this was last asked."""
        with self._lock:
            taken, self.requests = self.requests, []
            return taken

    def fail_next(self, fate: Fate, *, start: str, times: int = 1) -> None:
        """The next requests that start like this meet a fate; later ones pass."""
        left = times

        def rule(request: str) -> Fate:
            nonlocal left
            if not request.startswith(start) or left == 0:
                return Fate.PASS
            left -= 1
            return fate

        self.rule = rule


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy
    upstream: int

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        query = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
        kinds = [name for name in _KINDS if name in query]
        label = f"{self.command} {unquote(parts.path)[1:]}" + (f" ?{'&'.join(kinds)}" * bool(kinds))
        fate = self.proxy.judge(label)
        if fate is Fate.REFUSE:
            self._hang_up()
            return
        body = self._body()
        if self.proxy.bytes_per_s is not None:
            time.sleep(len(body) / self.proxy.bytes_per_s)
        time.sleep(self.proxy.delay_s)
        if fate in (Fate.BUSY, Fate.DENY):
            status, code = (503, "SlowDown") if fate is Fate.BUSY else (403, "AccessDenied")
            self._answer(status, [], f"<Error><Code>{code}</Code></Error>".encode())
            return
        if fate is Fate.TEAR:
            self._tear(body)
            self._hang_up()
            return
        try:
            status, headers, answer = self._pass_on(body)
        except (OSError, http.client.HTTPException):
            self._hang_up()
            return
        if fate is Fate.DEAF:
            self._hang_up()
            return
        self._answer(status, headers, answer)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _head(self, connection: http.client.HTTPConnection, length: int) -> None:
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("connection", "expect", "transfer-encoding", "content-length"):
                connection.putheader(name, value)
        if length or self.command in ("PUT", "POST"):
            connection.putheader("Content-Length", str(length))
        connection.endheaders()

    def _pass_on(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=60)
        try:
            self._head(connection, len(body))
            connection.send(body)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _tear(self, body: bytes) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=60)
        with suppress(OSError):
            self._head(connection, len(body))
            connection.send(body[: len(body) // 2])
        connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        length = str(len(body))
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            elif name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _hang_up(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class _Listener(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that went away in the middle: the tests do that


@contextmanager
def proxy_before(port: int) -> Iterator[Proxy]:
    """A proxy before a server on this machine."""
    proxy = Proxy()
    handler = type("Handler", (_Handler,), {"proxy": proxy, "upstream": port})
    listener = _Listener(("127.0.0.1", 0), handler)
    proxy.endpoint = f"http://127.0.0.1:{listener.server_address[1]}"
    thread = threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()
