from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight

from holdfast.cluster import message, wire
from holdfast.cluster.engine import LocalEngine
from holdfast.cluster.message import Message
from holdfast.cluster.wire import Caller, Listener, Stream
from holdfast.errors import (
    ConflictError,
    CorruptDataError,
    DataLossError,
    HoldfastError,
    InvalidRequestError,
    UnavailableError,
)
from tests.cluster.roles import TOKEN


def answer(caller: Caller, message: Message) -> Message:
    if message.kind == "lose":
        raise DataLossError("rows are gone", table="users", rows=[3], todo="stop")
    if message.kind == "divide":
        return Message("never", {"x": 1 // message.meta["by"]})
    if message.kind == "unsendable":
        return Message("x", {}, (np.zeros(2, complex),))
    if message.kind == "large":
        return Message("x", {}, (np.zeros(1000),))
    return Message(message.kind, {**message.meta, "caller": caller.name}, message.arrays)


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener(answer, token=TOKEN) as listener:
        yield listener


@pytest.fixture
def stream(listener: Listener) -> Iterator[Stream]:
    with Stream(listener.address, token=TOKEN, name="w0") as stream:
        yield stream


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until, "never happened"
        time.sleep(0.01)


OTHERS: set[int | None] = (
    set()
)  # threads that other tests of this process left to end by themselves


@pytest.fixture(autouse=True)
def _note_others() -> None:
    OTHERS.clear()
    OTHERS.update(thread.ident for thread in threading.enumerate())


def our_threads() -> list[str]:
    return [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith("holdfast") and thread.ident not in OTHERS
    ]


def test_an_answer_brings_meta_and_arrays_to_the_bit(stream: Stream) -> None:
    ids_N = np.arange(8000)
    rows_ND = np.random.default_rng(1).normal(size=(8000, 16)).astype(np.float32)
    found = stream.ask(Message("push", {"table": "users"}, (ids_N, rows_ND)))
    assert (found.kind, found.meta) == ("push", {"table": "users", "caller": "w0"})
    assert found.arrays[0].tobytes() == ids_N.tobytes()
    assert found.arrays[1].tobytes() == rows_ND.tobytes()
    assert found.arrays[1].shape == (8000, 16)
    assert not found.arrays[1].flags.writeable


def test_messages_without_arrays_and_with_empty_arrays_travel(stream: Stream) -> None:
    assert stream.ask(Message("ping")).arrays == ()
    (found,) = stream.ask(Message("ping", {}, (np.zeros((0, 16), np.float32),))).arrays
    assert found.shape == (0, 16)


def test_many_messages_under_way_are_answered_in_order(stream: Stream) -> None:
    # Far more than any buffer between the two holds, in both directions.
    for step in range(40):
        stream.send(Message("x", {"step": step}, (np.full(300_000, step),)))
    for step in range(40):
        found = stream.receive()
        assert found.meta["step"] == step
        assert (found.arrays[0] == step).all()


def test_receiving_what_was_never_asked_is_refused(stream: Stream) -> None:
    with pytest.raises(InvalidRequestError, match="nothing was asked"):
        stream.receive()
    assert stream.ask(Message("x")).kind == "x"


def test_an_error_of_ours_is_raised_here_as_it_was_there(stream: Stream) -> None:
    with pytest.raises(DataLossError, match="rows are gone") as caught:
        stream.ask(Message("lose"))
    assert caught.value.facts == {"table": "users", "rows": [3]}
    assert caught.value.todo == "stop"
    assert stream.is_open
    assert stream.ask(Message("x")).kind == "x"


def test_any_other_error_is_named_here_and_traced_there(
    stream: Stream, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(HoldfastError, match="ZeroDivisionError"):
        stream.ask(Message("divide", {"by": 0}))
    with pytest.raises(InvalidRequestError, match="do not travel"):
        stream.ask(Message("unsendable"))
    assert stream.ask(Message("x")).kind == "x"
    assert "Traceback" in capfd.readouterr().err


def test_a_message_that_cannot_travel_leaves_the_stream_usable(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message, "MESSAGE_BYTES_MAX", 1000)
    with pytest.raises(InvalidRequestError, match="too large"):
        stream.send(Message("x", {}, (np.zeros(1000),)))
    with pytest.raises(InvalidRequestError, match="do not travel"):
        stream.send(Message("x", {}, (np.zeros(3, object),)))
    assert stream.ask(Message("x")).kind == "x"


def test_a_reply_that_is_too_large_is_an_error_not_a_hang(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message, "MESSAGE_BYTES_MAX", 1000)
    with pytest.raises(InvalidRequestError, match="too large"):
        stream.ask(Message("large"))
    assert stream.ask(Message("x")).kind == "x"


@pytest.mark.parametrize("token", ["7f3b", "7f3", "7f3a7f3a", "0"])
def test_a_wrong_token_is_refused(listener: Listener, token: str) -> None:
    with pytest.raises(InvalidRequestError, match="token was refused"):
        Stream(listener.address, token=token, name="w0")


@pytest.mark.parametrize("token", ["", "with space", "né", "a\nb"])
def test_a_token_that_cannot_travel_is_refused(token: str) -> None:
    with pytest.raises(InvalidRequestError, match="letters and digits"):
        Listener(answer, token=token)


def test_a_call_without_a_token_reaches_nothing(listener: Listener) -> None:
    with flight.FlightClient(f"grpc://{listener.address}") as client:
        with pytest.raises(flight.FlightUnauthenticatedError):
            list(client.do_action(flight.Action("hello", b"")))
        with pytest.raises(flight.FlightUnauthenticatedError):
            list(client.list_flights())
        with pytest.raises(flight.FlightUnauthenticatedError):
            writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b"{}"))
            writer.begin(wire._SCHEMA)
            reader.read_chunk()


def test_a_stream_of_an_older_epoch_is_refused_at_its_next_message(
    listener: Listener, stream: Stream
) -> None:
    assert stream.ask(Message("x")).kind == "x"
    listener.epoch = 3
    with pytest.raises(ConflictError) as caught:
        stream.ask(Message("x"))
    assert caught.value.facts == {"kind": wire.STALE_EPOCH, "epoch": 0, "now": 3}


def test_a_stream_of_an_older_epoch_is_refused_at_its_hello(listener: Listener) -> None:
    listener.epoch = 3
    with pytest.raises(ConflictError):
        Stream(listener.address, token=TOKEN, name="w0", epoch=2)
    for epoch in (3, 4, None):
        with Stream(listener.address, token=TOKEN, name="w0", epoch=epoch) as stream:
            assert stream.ask(Message("x")).kind == "x"


def test_an_epoch_never_falls(listener: Listener) -> None:
    listener.epoch = 3
    with pytest.raises(InvalidRequestError):
        listener.epoch = 2
    assert listener.epoch == 3


def test_only_this_machine_is_listened_to_unless_told() -> None:
    with pytest.raises(InvalidRequestError, match="from outside"):
        Listener(answer, token=TOKEN, host="0.0.0.0")
    with Listener(answer, token=TOKEN, host="0.0.0.0", allow_remote=True):
        pass


def test_a_port_in_use_is_a_clear_error(listener: Listener) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UnavailableError, match="cannot listen"):
            Listener(answer, token=TOKEN, port=taken.getsockname()[1])


def test_nobody_listening_is_unavailable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(UnavailableError, match="does not answer"):
        Stream(address, token=TOKEN, name="w0")
    assert not our_threads()


def test_a_listener_is_told_when_a_stream_ends() -> None:
    ended: list[Caller] = []
    with Listener(answer, token=TOKEN, on_closed=ended.append) as listener:
        with Stream(listener.address, token=TOKEN, name="w7", epoch=2) as stream:
            stream.ask(Message("x"))
            assert ended == []
        wait_until(lambda: ended == [Caller("w7", 2)])


def test_closing_the_listener_ends_its_streams(listener: Listener) -> None:
    streams = [Stream(listener.address, token=TOKEN, name=f"w{n}") for n in range(3)]
    listener.close()
    for stream in streams:
        with pytest.raises(UnavailableError):
            stream.ask(Message("x"))
        assert not stream.is_open
    with pytest.raises(UnavailableError):
        Stream(listener.address, token=TOKEN, name="w3")


def test_nothing_is_left_of_a_closed_listener_and_stream() -> None:
    before = sockets()
    with (
        Listener(answer, token=TOKEN) as listener,
        Stream(listener.address, token=TOKEN, name="w0") as stream,
    ):
        stream.ask(Message("x"))
        assert sockets() > before
        assert our_threads()
    wait_until(lambda: sockets() <= before)
    wait_until(lambda: not our_threads())


def sockets() -> int:
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found += str(entry.readlink()).startswith("socket")
    return found


def test_a_stream_nobody_holds_is_closed(listener: Listener) -> None:
    stream = Stream(listener.address, token=TOKEN, name="w0")
    stream.ask(Message("x"))
    assert "holdfast-replies" in our_threads()
    del stream
    wait_until(lambda: our_threads() == ["holdfast-gate"])


def test_a_killed_process_is_seen_by_a_waiting_ask(engine: LocalEngine) -> None:
    process = engine.start("echo", "e0", {"token": TOKEN})
    with Stream(process.address, token=TOKEN, name="w0", deadline_s=60) as stream:
        stream.ask(Message("x"))
        stream.send(Message("sleep", {"s": 600}))
        threading.Timer(0.2, os.kill, (process.pid, signal.SIGKILL)).start()
        with pytest.raises(UnavailableError, match="does not answer"):
            stream.receive()
        assert not stream.is_open
        with pytest.raises(UnavailableError, match="closed"):
            stream.send(Message("x"))


def test_silence_past_the_deadline_ends_the_stream(engine: LocalEngine) -> None:
    process = engine.start("echo", "e0", {"token": TOKEN})
    with Stream(process.address, token=TOKEN, name="w0") as stream:
        with pytest.raises(UnavailableError, match="no answer in time"):
            stream.ask(Message("sleep", {"s": 1.0}), deadline_s=0.2)
        with pytest.raises(UnavailableError, match="closed"):
            stream.receive()


def test_a_stopped_process_blocks_neither_sending_nor_connecting_for_ever(
    engine: LocalEngine,
) -> None:
    process = engine.start("echo", "e0", {"token": TOKEN})
    with Stream(process.address, token=TOKEN, name="w0", deadline_s=3.0) as stream:
        stream.ask(Message("x"))
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(UnavailableError, match="takes no messages"):
            for _ in range(100):
                stream.send(Message("x", {}, (np.zeros(1 << 20),)))
        assert not stream.is_open
    with pytest.raises(UnavailableError, match="does not answer"):
        Stream(process.address, token=TOKEN, name="w0", deadline_s=0.5)
    engine.kill(process)


def test_closing_from_another_thread_wakes_a_waiting_receive(engine: LocalEngine) -> None:
    process = engine.start("echo", "e0", {"token": TOKEN})
    with Stream(process.address, token=TOKEN, name="w0", deadline_s=60) as stream:
        threading.Timer(0.2, stream.close).start()
        with pytest.raises(UnavailableError, match="closed"):
            stream.ask(Message("sleep", {"s": 600}))
    engine.kill(process)


def test_closing_from_another_thread_wakes_a_blocked_send(engine: LocalEngine) -> None:
    process = engine.start("echo", "e0", {"token": TOKEN})
    with Stream(process.address, token=TOKEN, name="w0", deadline_s=60) as stream:
        os.kill(process.pid, signal.SIGSTOP)
        threading.Timer(0.2, stream.close).start()
        with pytest.raises(UnavailableError):
            for _ in range(100):
                stream.send(Message("x", {}, (np.zeros(1 << 20),)))
    engine.kill(process)


def test_streams_are_served_at_once(listener: Listener) -> None:
    meet = threading.Barrier(3, timeout=20)

    def wait_for_others(caller: Caller, message: Message) -> Message:
        meet.wait()
        return message

    with Listener(wait_for_others, token=TOKEN) as busy:
        streams = [Stream(busy.address, token=TOKEN, name=f"w{n}") for n in range(3)]
        for stream in streams:
            stream.send(Message("x"))
        for stream in streams:
            assert stream.receive(20).kind == "x"
            stream.close()


def exchange(listener: Listener, hello: bytes, schema: pa.Schema = wire._SCHEMA):  # type: ignore[no-untyped-def]
    client = flight.FlightClient(f"grpc://{listener.address}")
    options = flight.FlightCallOptions(headers=[(b"holdfast-token", TOKEN.encode())])
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(hello), options)
    writer.begin(schema)
    return client, writer, reader


def hang_up(client: flight.FlightClient, writer: flight.FlightStreamWriter) -> None:
    with suppress(OSError, pa.ArrowException):
        writer.close()
    client.close()


HELLO = b'{"name": "h", "epoch": 0}'


@pytest.mark.parametrize(
    "hello",
    [
        b"",
        b"{}",
        b"[",
        b"[]",
        b'{"name": 3, "epoch": 0}',
        b'{"name": "h", "epoch": -1}',
        b"[" * 99999,
    ],
    ids=lambda hello: repr(hello[:20]),
)
def test_a_hello_made_to_deceive_is_refused(listener: Listener, hello: bytes) -> None:
    client, writer, reader = exchange(listener, hello)
    number, message = wire._unpack(reader.read_chunk())
    assert (number, message.meta["class"]) == (0, "CorruptDataError")
    hang_up(client, writer)


def test_a_stream_of_other_columns_is_refused(listener: Listener) -> None:
    client, writer, reader = exchange(listener, HELLO, pa.schema([("payload", pa.string())]))
    assert wire._unpack(reader.read_chunk())[1].meta["class"] == "CorruptDataError"
    hang_up(client, writer)


@pytest.mark.parametrize(
    "metadata",
    [b"", b"1234", b"\x01\0\0\0\0\0\0\0{", b'\x02\0\0\0\0\0\0\0["x", {}, [["|u1", [8]]]]'],
    ids=["none", "short", "no header", "a number too far"],
)
def test_messages_made_to_deceive_end_their_stream_alone(
    listener: Listener, stream: Stream, metadata: bytes
) -> None:
    client, writer, reader = exchange(listener, HELLO)
    assert wire._unpack(reader.read_chunk())[1].kind == "welcome"
    batch = pa.RecordBatch.from_arrays([pa.array(np.zeros(8, np.uint8))], schema=wire._SCHEMA)
    writer.write_with_metadata(batch, metadata)
    assert wire._unpack(reader.read_chunk())[1].meta["class"] == "CorruptDataError"
    writer.write_with_metadata(batch, b'\x01\0\0\0\0\0\0\0["x", {}, [["|u1", [8]]]]')
    writer.done_writing()
    with pytest.raises(StopIteration):
        reader.read_chunk()  # nothing is answered any more
    hang_up(client, writer)
    assert stream.ask(Message("x")).kind == "x"


def test_a_reply_with_another_number_ends_the_stream(
    listener: Listener, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.ask(Message("x"))
    stream._received -= 1  # as if a reply had come twice
    with pytest.raises(CorruptDataError, match="another message"):
        stream.ask(Message("x"))
    assert not stream.is_open


STUCK = """
import threading
from holdfast.cluster import wire
from holdfast.cluster.message import Message
wire._CLOSE_S = 0.2
listener = wire.Listener(lambda caller, message: threading.Event().wait(), token="a")
stream = wire.Stream(listener.address, token="a", name="w")
stream.send(Message("x"))
print("bye")
"""
FORGETFUL = """
from holdfast.cluster.message import Message
from holdfast.cluster.wire import Listener, Stream
listener = Listener(lambda caller, message: message, token="a")
streams = [Stream(listener.address, token="a", name="w") for _ in range(3)]
streams[0].ask(Message("x"))
streams[1].send(Message("x"))
print("bye")
"""


@pytest.mark.parametrize("script", [FORGETFUL, STUCK], ids=["forgetful", "stuck"])
def test_a_process_that_closes_nothing_ends_quietly(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "bye\n", "")
