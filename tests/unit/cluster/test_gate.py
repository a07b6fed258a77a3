from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from pyarrow import flight

from holdfast.cluster import gate as gates
from holdfast.cluster import wire
from holdfast.cluster.engine import LocalEngine
from holdfast.cluster.gate import Gate
from holdfast.cluster.message import Message
from holdfast.cluster.wire import Caller, Listener, Stream
from holdfast.errors import InvalidRequestError, UnavailableError
from tests.cluster.roles import TOKEN
from tests.unit.cluster.test_http2 import END, HEADERS, PREFACE, SETTINGS, field, frame

GREETING = frame(SETTINGS, bytes(12))


def answer(caller: Caller, message: Message) -> Message:
    return Message(message.kind, {**message.meta, "caller": caller.name}, message.arrays)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until, "never happened"
        time.sleep(0.01)


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener(answer, token=TOKEN) as listener:
        yield listener


@pytest.fixture
def _from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams find no local socket, as on another machine."""
    monkeypatch.setattr(wire, "find_socket", lambda address, token: None)


def options(token: str = TOKEN) -> flight.FlightCallOptions:
    return flight.FlightCallOptions(headers=[(b"holdfast-token", token.encode())])


# From elsewhere, with the token.


@pytest.mark.usefixtures("_from_elsewhere")
def test_a_stream_from_elsewhere_is_like_one_from_here(listener: Listener) -> None:
    rows_ND = np.random.default_rng(1).normal(size=(80_000, 16)).astype(np.float32)
    streams = [Stream(listener.address, token=TOKEN, name=f"w{n}") for n in range(4)]
    for stream in streams:
        for step in range(5):
            stream.send(Message("x", {"step": step}, (rows_ND,)))
    for at, stream in enumerate(streams):
        for step in range(5):
            found = stream.receive(20)
            assert (found.meta["step"], found.meta["caller"]) == (step, f"w{at}")
            assert found.arrays[0].tobytes() == rows_ND.tobytes()
        stream.close()


@pytest.mark.usefixtures("_from_elsewhere")
def test_a_wrong_token_from_elsewhere_is_refused(listener: Listener) -> None:
    with pytest.raises(InvalidRequestError, match="token was refused"):
        Stream(listener.address, token="wrong", name="w0")


@pytest.mark.usefixtures("_from_elsewhere")
def test_a_killed_process_is_seen_from_elsewhere(engine: LocalEngine) -> None:
    process = engine.start("echo", "e0", {"token": TOKEN})
    with Stream(process.address, token=TOKEN, name="w0", deadline_s=60) as stream:
        stream.ask(Message("x"))
        stream.send(Message("sleep", {"s": 600}))
        threading.Timer(0.2, os.kill, (process.pid, signal.SIGKILL)).start()
        with pytest.raises(UnavailableError, match="does not answer"):
            stream.receive()


@pytest.mark.usefixtures("_from_elsewhere")
def test_a_stopped_process_blocks_no_send_from_elsewhere(engine: LocalEngine) -> None:
    process = engine.start("echo", "e0", {"token": TOKEN})
    with Stream(process.address, token=TOKEN, name="w0", deadline_s=3.0) as stream:
        stream.ask(Message("x"))
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(UnavailableError, match="takes no messages"):
            for _ in range(100):
                stream.send(Message("x", {}, (np.zeros(1 << 20),)))
    engine.kill(process)


@pytest.mark.usefixtures("_from_elsewhere")
def test_closing_the_listener_ends_streams_from_elsewhere(listener: Listener) -> None:
    streams = [Stream(listener.address, token=TOKEN, name=f"w{n}") for n in range(3)]
    listener.close()
    for stream in streams:
        with pytest.raises(UnavailableError):
            stream.ask(Message("x"))
    assert "holdfast-guest" not in {thread.name for thread in threading.enumerate()}


def test_any_client_with_the_token_is_let_in(listener: Listener) -> None:
    with flight.FlightClient(f"grpc://{listener.address}") as client:
        assert list(client.do_action(flight.Action("hello", b""), options())) == []
        writer, reader = client.do_exchange(
            flight.FlightDescriptor.for_command(b'{"name": "h", "epoch": 0}'), options()
        )
        writer.begin(wire._SCHEMA)
        assert wire._unpack(reader.read_chunk())[1].kind == "welcome"
        # On a connection that was let in each call needs the token too.
        with pytest.raises(flight.FlightUnauthenticatedError):
            list(client.do_action(flight.Action("hello", b"")))
        writer.close()


def test_only_so_many_are_let_in(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "GUESTS_MAX", 1)
    clients = [flight.FlightClient(f"grpc://{listener.address}") for _ in range(2)]
    hello = flight.Action("hello", b"")
    list(clients[0].do_action(hello, options()))
    with pytest.raises(flight.FlightUnavailableError, match="too many connections"):
        list(clients[1].do_action(hello, options()))
    clients[0].close()

    def is_let_in() -> bool:
        with flight.FlightClient(f"grpc://{listener.address}") as client:
            try:
                return not list(client.do_action(hello, options()))
            except flight.FlightUnavailableError:
                return False

    wait_until(is_let_in)
    clients[1].close()


# The gate by itself, in front of a server that counts who comes.


class Counting:
    """A server that greets, and keeps what it receives."""

    def __init__(self, path: Path) -> None:
        self.received: list[bytearray] = []
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(ConnectionError):
            connection.sendall(GREETING + b"hello")
            found = bytearray()
            while data := connection.recv(1 << 16):
                if not found:
                    self.received.append(found)
                found += data

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture
def inner(tmp_path: Path) -> Iterator[Counting]:
    counting = Counting(tmp_path / "inner")
    yield counting
    counting.close()


@pytest.fixture
def gate(inner: Counting, tmp_path: Path) -> Iterator[Gate]:
    gate = Gate("127.0.0.1", 0, header=b"holdfast-token", token=b"7f3a")
    gate.open(tmp_path / "inner")
    yield gate
    gate.close()


def connect(gate: Gate) -> socket.socket:
    return socket.create_connection(("127.0.0.1", gate.port), timeout=20)


def receive(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size and (more := connection.recv(size - len(found))):
        found += more
    return found


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(20)
    with suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


GOOD = PREFACE + frame(SETTINGS) + frame(HEADERS, field(b"holdfast-token", b"7f3a"), flags=END,
                                         stream=1)  # fmt: skip
BAD = GOOD.replace(b"7f3a", b"7f3b")


def test_a_client_is_greeted_as_by_the_server_once(gate: Gate, inner: Counting) -> None:
    with connect(gate) as connection:
        assert receive(connection, len(GREETING)) == GREETING
        assert inner.received == []
        connection.sendall(GOOD + b"and more")
        assert receive(connection, 5) == b"hello"  # what follows the server's own greeting
        wait_until(lambda: inner.received == [GOOD + b"and more"])
        connection.sendall(b", then else")
        wait_until(lambda: inner.received == [GOOD + b"and more, then else"])


@pytest.mark.parametrize(
    "sent",
    [b"", b"x", PREFACE, BAD, BAD[:-1], BAD + bytes(200_000), b"GET / HTTP/1.1\r\n\r\n", bytes(99)],
    ids=["nothing", "x", "a preface", "refused", "half", "and a body", "http/1", "zeros"],
)
def test_nothing_that_a_stranger_sends_is_passed_on(
    gate: Gate, inner: Counting, sent: bytes
) -> None:
    with connect(gate) as connection:
        with suppress(OSError):  # it may be closed by then
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        assert is_closed(connection)
    assert inner.received == []
    wait_until(lambda: not gate._strangers)


def test_strangers_do_not_stay(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "STRANGER_S", 0.2)
    silent, slow, refused = (connect(gate) for _ in range(3))
    refused.sendall(BAD)
    until = time.monotonic() + 20
    with pytest.raises(OSError):
        while time.monotonic() < until:  # a byte now and then does not help
            slow.sendall(PREFACE[:1])
            time.sleep(0.05)
    assert is_closed(silent)
    assert is_closed(refused)
    for each in (silent, slow, refused):
        each.close()


def test_the_oldest_stranger_goes_first_and_a_client_comes_in_among_many(
    gate: Gate, inner: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "STRANGERS_MAX", 8)
    strangers = [connect(gate) for _ in range(30)]
    with connect(gate) as client:
        client.sendall(GOOD)
        wait_until(lambda: inner.received == [GOOD])
    assert all(is_closed(each) for each in strangers[:20])
    assert len(gate._strangers) <= 8
    for each in strangers:
        each.close()
    wait_until(lambda: not gate._strangers)


def test_a_server_that_greets_otherwise_is_not_connected_to(gate: Gate, inner: Counting) -> None:
    with connect(gate) as connection:
        assert receive(connection, len(GREETING)) == GREETING
        gate._greeting = b"other"
        connection.sendall(GOOD)
        assert is_closed(connection)
    assert inner.received == []


def test_a_gate_whose_server_is_gone_closes_what_comes(gate: Gate, inner: Counting) -> None:
    inner.close()
    with connect(gate) as connection:
        assert is_closed(connection)
    wait_until(lambda: not gate._strangers)


def test_nothing_is_left_of_a_closed_gate(inner: Counting, tmp_path: Path) -> None:
    gate = Gate("127.0.0.1", 0, header=b"holdfast-token", token=b"7f3a")
    gate.open(tmp_path / "inner")
    stranger, client = connect(gate), connect(gate)
    client.sendall(GOOD)
    wait_until(lambda: len(gate._guests) == 1)
    gate.close()
    assert is_closed(stranger)
    assert is_closed(client)
    assert not gate._guests
    names = {thread.name for thread in threading.enumerate()}
    assert not {"holdfast-gate", "holdfast-guest"} & names
    stranger.close()
    client.close()
