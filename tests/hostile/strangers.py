"""Connections without a token, made to cost their listener as much as they can."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
from pyarrow import flight

from tests.unit.cluster.test_http2 import (
    CONTINUATION,
    DATA,
    END,
    HEADERS,
    PING,
    PREFACE,
    SETTINGS,
    WINDOW,
    field,
    frame,
)

PAGE = os.sysconf("SC_PAGE_SIZE")
TIMEOUT_S = 20.0


class Memory:
    """What a process holds, and the most it held while somebody looked."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/statm")
        self._files = Path(f"/proc/{pid}/fd")
        self.peak = 0

    def now(self) -> int:
        """Resident bytes."""
        return int(self._status.read_text().split()[1]) * PAGE

    def files(self) -> int:
        """Open descriptors."""
        return sum(1 for _ in self._files.iterdir())

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note the most while the block runs."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.002):
                self.peak = max(self.peak, self.now())

        self.peak = self.now()
        watching = threading.Thread(target=watch)
        watching.start()
        try:
            yield
        finally:
            ended.set()
            watching.join()


# Every method of Flight, with a body.

Call = Callable[[flight.FlightClient, bytes, flight.FlightCallOptions], object]


def _put(client: flight.FlightClient, body: bytes, options: flight.FlightCallOptions) -> None:
    schema = pa.schema([("payload", pa.large_binary())])
    writer, _ = client.do_put(flight.FlightDescriptor.for_command(body), schema, options)
    with suppress(pa.ArrowException, OSError):
        writer.write_table(pa.table({"payload": [body]}, schema=schema))
    writer.close()


def _exchange(client: flight.FlightClient, body: bytes, options: flight.FlightCallOptions) -> None:
    schema = pa.schema([("payload", pa.large_binary())])
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(body), options)
    with suppress(pa.ArrowException, OSError):
        writer.begin(schema)
        writer.write_table(pa.table({"payload": [body]}, schema=schema))
    reader.read_chunk()


METHODS: dict[str, Call] = {
    "DoAction": lambda c, body, o: list(c.do_action(flight.Action("hello", body), o)),
    "ListActions": lambda c, body, o: c.list_actions(o),
    "ListFlights": lambda c, body, o: list(c.list_flights(body, o)),
    "GetFlightInfo": lambda c, body, o: c.get_flight_info(
        flight.FlightDescriptor.for_command(body), o
    ),
    "GetSchema": lambda c, body, o: c.get_schema(flight.FlightDescriptor.for_command(body), o),
    "DoGet": lambda c, body, o: c.do_get(flight.Ticket(body), o).read_all(),
    "DoPut": _put,
    "DoExchange": _exchange,
    "Handshake": lambda c, body, o: c.authenticate(_Shaking(body), o),
}
PATHS = (*METHODS, "PollFlightInfo", "NoSuchMethod")


class _Shaking(flight.ClientAuthHandler):  # type: ignore[misc]
    def __init__(self, body: bytes) -> None:
        super().__init__()
        self._body = body

    def authenticate(self, outgoing: flight.ClientAuthSender, incoming: object) -> None:
        outgoing.write(self._body)
        incoming.read()  # type: ignore[attr-defined]

    def get_token(self) -> bytes:
        return b""


def call(address: str, method: str, body: bytes, *, token: bytes | None = None) -> BaseException:
    """Call a method; what it raised.

    Raises:
        AssertionError: it was not refused.
    """
    headers = [] if token is None else [(b"holdfast-token", token)]
    options = flight.FlightCallOptions(headers=headers, timeout=60)
    with flight.FlightClient(f"grpc://{address}") as client:
        try:
            METHODS[method](client, body, options)
        except (pa.ArrowException, OSError) as error:
            return error
    raise AssertionError(f"{method} was not refused")


# Raw connections.


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=TIMEOUT_S)


def pour(address: str, *pieces: bytes, most: int = 64 << 20) -> int:
    """Send pieces, the last one over and over, until nobody takes them or it is much; how much was
    taken."""
    taken = 0
    with connect(address) as connection, suppress(OSError):
        connection.settimeout(TIMEOUT_S)
        for piece in pieces:
            connection.sendall(piece)
            taken += len(piece)
        while taken < most:
            connection.sendall(pieces[-1])
            taken += len(pieces[-1])
    return taken


def ended(connection: socket.socket) -> bool:
    """Whether the other side has closed it."""
    connection.settimeout(TIMEOUT_S)
    with suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


def headers(path: str = "DoAction", *, token: bytes | None = None) -> bytes:
    """The first headers of a call."""
    block = (
        bytes([0x83, 0x86])
        + field(b":path", f"/arrow.flight.protocol.FlightService/{path}".encode())
        + field(b":authority", b"here")
        + field(b"te", b"trailers")
        + field(b"content-type", b"application/grpc")
    )
    return block if token is None else block + field(b"holdfast-token", token)


def request(path: str = "DoAction", *, token: bytes | None = None) -> bytes:
    """A connection's first bytes, with a call."""
    return (
        PREFACE
        + frame(SETTINGS)
        + frame(WINDOW, bytes([0, 0, 255, 255]))
        + frame(HEADERS, headers(path, token=token), flags=END, stream=1)
    )


FLOODS: dict[str, tuple[bytes, ...]] = {
    "zeros": (bytes(1 << 16),),
    "http/1": (b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", bytes(1 << 16)),
    "tls": (bytes.fromhex("16030100f8010000f4"), bytes(1 << 16)),
    "settings": (PREFACE, frame(SETTINGS, bytes(16380))),
    "pings": (PREFACE, frame(PING, bytes(8)) * 900),
    "windows": (PREFACE, frame(WINDOW, bytes([0, 0, 0, 1])) * 1200),
    "headers without end": (
        PREFACE + frame(SETTINGS),
        frame(HEADERS, headers(), stream=1),
        frame(CONTINUATION, field(b"x" * 100, b"y" * 100) * 70, stream=1),
    ),
    "empty continuations": (
        PREFACE + frame(SETTINGS) + frame(HEADERS, headers(), stream=1),
        frame(CONTINUATION, b"", stream=1) * 1500,
    ),
    "a table of headers": (
        PREFACE + frame(SETTINGS),
        frame(HEADERS, b"\x3f\xff\xff\xff\x7f" + headers(), flags=END, stream=1),
        frame(DATA, bytes(16384), stream=1),
    ),
    "a body": (request(), frame(DATA, bytes(16384), stream=1)),
    "a body with a wrong token": (request(token=b"0" * 32), frame(DATA, bytes(16384), stream=1)),
    "many calls": (
        request(),
        b"".join(frame(HEADERS, headers(), flags=END, stream=n) for n in range(3, 999, 2)),
    ),
    "frames too long": (PREFACE, bytes.fromhex("ffffff040000000000"), bytes(1 << 16)),
}


def changed(rng: random.Random, sent: bytes) -> bytes:
    """Bytes, a little different."""
    data = bytearray(sent)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(data))
        match rng.randrange(5):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                del data[at : at + rng.randint(1, 20)]
            case 3:
                data[at:at] = rng.randbytes(rng.randint(1, 20))
            case 4:
                data[at:at] = data[at : at + rng.randint(1, 60)]
        if not data:
            data += b"\0"
    return bytes(data)


def knock(address: str, sent: bytes) -> bytes:
    """Send bytes and hang up; what came back."""
    found = b""
    with connect(address) as connection, suppress(OSError):
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        while more := connection.recv(1 << 16):
            found += more
    return found


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.02)
