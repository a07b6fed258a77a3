"""Messages over Arrow Flight: the listening side and the asking side. The data plane, alone here.

    Stream.ask --(one long-lived DoExchange)--> Listener --> handle(caller, message) -> reply

A listener is known by host and port. Processes of the same user and machine reach it at a local
socket (localsocket.py); everybody else comes through the gate at its port (gate.py).

Every message is one record batch of one uint8 column (the payload); its metadata is a sequence
number and the header. A stream's messages are handled one by one, in order, in a thread of their
own; different streams at once.

Invariants:
- Of a connection that does not bring the token nothing but its first headers is read, whatever it
  calls; a later call on it without the token is refused too.
- Replies carry the number of what they answer; a wrong number raises and ends the stream.
- A stream that failed or stayed silent past a deadline is closed and never used again, since a late
  reply may still come. ``Stream.is_open`` tells such a failure from an error that the other side
  answered, after which the stream goes on.
- A stream of an epoch older than the listener's is refused, at its hello and at its next message.
- Nothing listens beyond this machine unless told to.

Not here: what messages mean (server.py), who is alive (pulse.py), processes (engine.py).
"""

from __future__ import annotations

import ctypes
import hmac
import itertools
import math
import os
import queue
import struct
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.cluster.cutoff import OPENINGS, WATCH, Accepted, Place, cut_connection
from holdfast.cluster.gate import Gate
from holdfast.cluster.kinds import Kinds, check_size
from holdfast.cluster.localsocket import choose_socket, find_socket, remove_socket
from holdfast.cluster.message import (
    ERROR,
    Array,
    Message,
    as_error,
    decode,
    decode_hello,
    encode,
    encode_hello,
    error_message,
)
from holdfast.cluster.message import Caller as Caller
from holdfast.errors import (
    ConflictError,
    CorruptDataError,
    HoldfastError,
    InvalidRequestError,
    UnavailableError,
)

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read once, when the library is loaded
try:
    import pyarrow as pa
    from pyarrow import flight
except ImportError as error:
    raise InvalidRequestError(
        "a cluster needs Arrow Flight", todo="pip install 'holdfast[cluster]'"
    ) from error

STALE_EPOCH = "stale epoch"
PULSE = "pulse"
STREAMS_MAX = 1024  # that a listener serves at once, each in a thread of its own
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SCHEMA = pa.schema([("payload", pa.uint8())])
_TOKEN_HEADER = "holdfast-token"
_CLOSE_S = 5.0
_ALIGN_BYTES = 16
_WRAPPING_BYTES = 14  # modulo 16, of what the library puts around metadata and payload
_LARGE_BYTES = 16 << 20
_REFUSED_MAX = 64  # messages that are read and thrown away of a stream that was refused
_CLIENT_OPTIONS = [("grpc.enable_retries", 0)]
_FAILURES = (pa.ArrowException, OSError, StopIteration)


Handle = Callable[[Caller, Message], Message]


class Listener:
    """Answers the messages of all streams opened to it, until closed.

    An exception in ``handle`` is answered as an error; the stream goes on.
    """

    def __init__(
        self,
        handle: Handle,
        *,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        on_closed: Callable[[Caller], None] | None = None,
        allow_remote: bool = False,
        kinds: Kinds | None = None,
    ) -> None:
        """``kinds`` say how long messages may be; None: as long as any."""
        if host not in _LOOPBACK and not allow_remote:
            raise InvalidRequestError(
                "this host can be reached from outside",
                host=host,
                todo="listen on 127.0.0.1, or allow remote peers",
            )
        self._handle, self._on_closed, self._epoch, self._kinds = handle, on_closed, 0, kinds
        self._streams = threading.BoundedSemaphore(STREAMS_MAX)
        place = f"[{host}]" if ":" in host else host
        guard = _TokenGuard(_token_bytes(token))
        try:
            gate = Gate(host, port, header=_TOKEN_HEADER.encode(), token=guard.token)
        except OSError as error:
            raise UnavailableError(
                "cannot listen here", host=host, port=port, found=_first_line(error)
            ) from error
        self.address = f"{place}:{gate.port}"
        try:
            path = choose_socket(self.address, token)
            self._accepted = Accepted(str(path))
            server = _FlightServer(f"grpc+unix://{path}", guard, self._serve_stream)
        except _FAILURES as error:
            gate.close()
            raise UnavailableError("cannot listen here", found=_first_line(error)) from error
        gate.open(path)
        # Pending calls would keep the library's own exit hook waiting for ever; ours runs first.
        self._close = weakref.finalize(self, _end_server, server, gate, path, self._accepted)

    @property
    def epoch(self) -> int:
        """Streams of an older epoch are refused; it only rises."""
        return self._epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        if value < self._epoch:
            raise InvalidRequestError("an epoch never falls", epoch=self._epoch, asked=value)
        self._epoch = value

    def close(self) -> None:
        """End all streams and stop listening; waits for running handlers, but not for ever."""
        self._close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve_stream(self, hello: bytes, reader: Any, writer: Any) -> None:
        if not self._streams.acquire(blocking=False):
            raise flight.FlightUnavailableError("too many streams")
        try:
            self._serve(hello, reader, writer)
        finally:
            self._streams.release()

    def _serve(self, hello: bytes, reader: Any, writer: Any) -> None:
        self._accepted.widen()
        writer.begin(_SCHEMA)
        try:
            caller = decode_hello(hello)
            if reader.schema != _SCHEMA:
                raise CorruptDataError("not a stream of messages")
            self._check_epoch(caller)
        except HoldfastError as error:
            refusal = error_message(error)
        else:
            refusal = self._converse(caller, reader, writer)
        _refuse(reader, writer, refusal)

    def _converse(self, caller: Caller, reader: Any, writer: Any) -> Message:
        """Answer messages until one is none of ours: what is said to that. Raises at the end."""
        try:
            _write(writer, 0, *encode(Message("welcome")))
            for expected in itertools.count(1):
                self._take(caller, expected, reader, writer)
        except CorruptDataError as error:
            return error_message(error)
        finally:
            if self._on_closed is not None:
                self._on_closed(caller)
        raise AssertionError

    def _take(self, caller: Caller, expected: int, reader: Any, writer: Any) -> None:
        """One message; when this returns, nothing of it or of its answer is held any more."""
        number, message = _unpack(reader.read_chunk(), self._kinds)
        if number != expected:
            raise CorruptDataError("a message is missing", expected=expected, found=number)
        _write(writer, number, *self._answer(caller, message))

    def _answer(self, caller: Caller, message: Message) -> tuple[bytes, Array]:
        try:
            self._check_epoch(caller)
            if message.kind == PULSE:
                return encode(Message(PULSE))
            return encode(self._handle(caller, message))
        except HoldfastError as error:
            return encode(error_message(error))
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            return encode(error_message(error))

    def _check_epoch(self, caller: Caller) -> None:
        if caller.epoch is not None and caller.epoch < self._epoch:
            raise ConflictError(
                "the cluster has changed since this stream was opened",
                kind=STALE_EPOCH,
                epoch=caller.epoch,
                now=self._epoch,
                todo="learn the new members and open a new stream",
            )


class Stream:
    """A conversation with one listener: several messages may be under way, answers come in order.

    One thread at a time sends and receives; ``close`` may come from any thread, and wakes them.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str,
        name: str,
        epoch: int | None = 0,
        deadline_s: float = 5.0,
    ) -> None:
        self.address, self.deadline_s = address, deadline_s
        self._sent = self._received = 0
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wire = self._open(token, encode_hello(Caller(name, epoch)))
        self._finish = weakref.finalize(self, self._wire.finish)
        with self._closing_on_failure(), self._wire.sending(deadline_s) as writer:
            writer.begin(_SCHEMA)
        self._sent = 1
        self.receive()  # a welcome, or why there is none

    def _open(self, token: str, hello: bytes) -> _Wire:
        """Connect to the listener's local socket, if it is on this machine, or to its port."""
        headers = [(_TOKEN_HEADER.encode(), _token_bytes(token))]
        host, _, port = self.address.rpartition(":")
        path = find_socket(self.address, token)
        try:
            if path is not None:
                try:
                    return self._connect(f"grpc+unix://{path}", str(path), headers, hello)
                except flight.FlightUnavailableError:
                    if host.strip("[]") in _LOOPBACK:
                        raise  # it is gone: whoever has its port now must not see the token
            return self._connect(f"grpc://{self.address}", int(port), headers, hello)
        except _FAILURES as error:
            raise self._failed(error) from error

    def _connect(
        self, location: str, place: Place, headers: list[tuple[bytes, bytes]], hello: bytes
    ) -> _Wire:
        client = flight.FlightClient(location, generic_options=_CLIENT_OPTIONS)
        try:
            with OPENINGS.take_turn(place, self.deadline_s) as opening:
                # The first call alone can have a deadline of its own, and may have to connect.
                call = flight.FlightCallOptions(timeout=self.deadline_s, headers=headers)
                list(client.do_action(flight.Action("hello", b""), call))
                connection = opening.find()
            writer, reader = client.do_exchange(
                flight.FlightDescriptor.for_command(hello),
                flight.FlightCallOptions(headers=headers),
            )
        except BaseException:
            client.close()
            raise
        return _Wire(client, writer, reader, self._replies, connection)

    @property
    def is_open(self) -> bool:
        """Whether the stream can still be used."""
        return self._finish.alive

    def send(self, message: Message) -> None:
        """Send a message; its arrays must stay as they are until the reply has come.

        Raises:
            InvalidRequestError: too large, or nothing that travels; the stream goes on.
            UnavailableError: the other side is gone or takes nothing; the stream is closed.
        """
        self._check_open()
        encoded = encode(message)
        with self._closing_on_failure(), self._wire.sending(self.deadline_s) as writer:
            _write(writer, self._sent, *encoded)
        self._sent += 1

    def receive(self, deadline_s: float | None = None) -> Message:
        """The reply to the oldest message that has none yet.

        Raises:
            UnavailableError: the other side is gone or silent; the stream is closed.
            HoldfastError: what the other side raised; the stream goes on.
        """
        if self._received == self._sent:
            raise InvalidRequestError("nothing was asked", address=self.address)
        self._check_open()
        with self._closing_on_failure():
            number, message = _unpack(self._next(deadline_s))
            if number != self._received:
                error = as_error(message) if message.kind == ERROR else None
                raise error or CorruptDataError(
                    "a reply to another message", expected=self._received, found=number
                )
        self._received += 1
        if message.kind != ERROR:
            return message
        if number == 0:
            self.close()
        raise as_error(message)

    def ask(self, message: Message, deadline_s: float | None = None) -> Message:
        """Send a message and wait for its reply."""
        self.send(message)
        return self.receive(deadline_s)

    def close(self) -> None:
        """End the stream; what is under way may or may not be handled by the other side."""
        self._replies.put(_closed(self.address))
        self._finish()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self, deadline_s: float | None) -> Any:
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        try:
            found = self._replies.get(timeout=deadline_s)
        except queue.Empty:
            raise UnavailableError(
                "no answer in time", address=self.address, deadline_s=deadline_s
            ) from None
        if isinstance(found, BaseException):
            raise found
        return found

    def _check_open(self) -> None:
        if not self.is_open:
            raise _closed(self.address)

    @contextmanager
    def _closing_on_failure(self) -> Iterator[None]:
        """Close the stream when anything is raised, and say the library's errors in our words."""
        try:
            yield
        except BaseException as error:
            self.close()
            if isinstance(error, HoldfastError) or not isinstance(error, _FAILURES):
                raise
            raise self._failed(error, is_late=self._wire.is_late) from error

    def _failed(self, error: BaseException, *, is_late: bool = False) -> HoldfastError:
        if isinstance(error, flight.FlightUnauthenticatedError):
            return InvalidRequestError("the token was refused", address=self.address)
        what = "takes no messages" if is_late else "does not answer"
        return UnavailableError(
            f"the other process {what}", address=self.address, found=_first_line(error)
        )


class _Wire:
    """The library's half of a stream, and the thread that waits for replies.

    Holds no stream, so that a stream nobody holds any more is closed.
    """

    def __init__(
        self, client: Any, writer: Any, reader: Any, replies: Any, connection: int
    ) -> None:
        self._client, self._writer, self._reader = client, writer, reader
        self._lock = threading.Lock()
        self._late_at = math.inf
        self.is_late = False
        self._connection = connection
        self._thread = threading.Thread(
            target=_drain, args=(reader, replies), name="holdfast-replies", daemon=True
        )
        self._thread.start()
        WATCH.add(self)

    @contextmanager
    def sending(self, deadline_s: float) -> Iterator[Any]:
        """The writer, for one thread; what takes longer than the deadline is cancelled."""
        with self._lock:
            self._late_at = time.monotonic() + deadline_s
            try:
                yield self._writer
            finally:
                self._late_at = math.inf

    def check(self, now: float) -> None:
        """Cancel a send that is past its deadline."""
        if self._late_at < now:
            self.is_late = True
            self._cut()

    def finish(self) -> None:
        """End the stream and its thread; a send or a wait in another thread fails at once."""
        WATCH.remove(self)
        self._cut()
        if self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock, suppress(*_FAILURES):
            self._writer.close()  # else the library complains on stderr
        with suppress(*_FAILURES):
            self._client.close()

    def _cut(self) -> None:
        """Cancelling ends what waits for a reply, but no send that the other side does not take."""
        self._reader.cancel()
        cut_connection(self._connection)


class _FlightServer(flight.FlightServerBase):  # type: ignore[misc]
    """What the library calls, in threads of its own."""

    def __init__(
        self, location: str, guard: _TokenGuard, serve: Callable[[bytes, Any, Any], None]
    ) -> None:
        self._serve = serve  # first: calls may come as soon as the library is set up
        super().__init__(location, middleware={"token": guard})

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Serve one stream until it ends, however it ends."""
        try:
            self._serve(descriptor.command or b"", reader, writer)
        except flight.FlightUnavailableError:
            raise
        except _FAILURES:
            pass  # the caller is gone
        except Exception:  # the edge of a thread
            traceback.print_exc(file=sys.stderr)

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        """Answer a caller that only wants to know whether anyone is here."""
        return []


class _TokenGuard(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses every call that does not bring the token."""

    def __init__(self, token: bytes) -> None:
        self.token = token

    def start_call(self, info: Any, headers: dict[str, list[Any]]) -> None:
        """Called when the library has taken in a call's first message."""
        for value in headers.get(_TOKEN_HEADER, []):
            shown = value if isinstance(value, bytes) else value.encode("utf-8", "replace")
            if hmac.compare_digest(shown, self.token):
                return
        raise flight.FlightUnauthenticatedError("refused")


def _drain(reader: Any, replies: queue.SimpleQueue[Any]) -> None:
    """Take replies as they come, so that the other side never waits for us to read."""
    try:
        while True:
            replies.put(reader.read_chunk())
    except BaseException as error:  # the edge of a thread: whoever receives next raises it
        replies.put(error)


def _end_server(server: Any, gate: Gate, path: Path, accepted: Accepted) -> None:
    """Stop a server although streams are open: the library cannot end them, so they are cut off."""
    gate.close()
    ending = threading.Thread(target=server.shutdown, name="holdfast-closing", daemon=True)
    ending.start()
    ends_at = time.monotonic() + _CLOSE_S
    while ending.is_alive() and time.monotonic() < ends_at:
        accepted.cut()
        ending.join(0.01)
    remove_socket(path)
    if ending.is_alive():  # a handler that never returns must not keep the process from its end
        for finalizer in list(getattr(weakref.finalize, "_registry", ())):
            if (found := finalizer.peek()) is not None and found[0] is server:
                finalizer.atexit = False


def _refuse(reader: Any, writer: Any, refusal: Message) -> None:
    """Say why, and wait until the caller hangs up: if we did so first, it might never read it."""
    _write(writer, 0, *encode(refusal))
    if refusal.meta["facts"].get("payload_bytes", 0) > _LARGE_BYTES:
        _give_back_memory()
    for _ in range(_REFUSED_MAX):
        reader.read_chunk()  # raises at the end


def _give_back_memory() -> None:
    """Give memory that is free back to the machine: the C library keeps what many threads freed."""
    pa.default_memory_pool().release_unused()
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _write(writer: Any, number: int, header: bytes, payload: Array) -> None:
    column = pa.Array.from_buffers(pa.uint8(), payload.nbytes, [None, pa.py_buffer(payload)])
    batch = pa.RecordBatch.from_arrays([column], schema=_SCHEMA)
    metadata = struct.pack("<Q", number) + header
    writer.write_with_metadata(batch, metadata + b" " * _padding(len(metadata), payload.nbytes))


def _padding(metadata_bytes: int, payload_bytes: int) -> int:
    """How many blanks after the metadata let the payload arrive aligned, so that none is copied.

    The library hands a received message over as it came: what precedes the payload decides where
    it lies. Where this is wrong (another release may wrap messages otherwise), the arrays are
    copied, and no more than that.
    """
    before = _WRAPPING_BYTES + metadata_bytes + _varint_bytes(metadata_bytes + _ALIGN_BYTES)
    return -(before + _varint_bytes(payload_bytes)) % _ALIGN_BYTES


def _varint_bytes(value: int) -> int:
    return max(1, -(-value.bit_length() // 7))


def _unpack(chunk: Any, kinds: Kinds | None = None) -> tuple[int, Message]:
    """The number and the message of what was read; the arrays keep the received buffer alive."""
    if chunk.data is None or chunk.app_metadata is None or len(chunk.app_metadata) < 8:
        raise CorruptDataError("not a message")
    try:
        chunk.data.validate()
        column = chunk.data.column(0)
    except _FAILURES as error:
        raise CorruptDataError("unreadable message", found=_first_line(error)) from error
    payload = np.zeros(0, np.uint8)
    if len(column):
        bytes_N = np.frombuffer(column.buffers()[1], np.uint8)
        payload = bytes_N[column.offset : column.offset + len(column)]
    if kinds is not None:
        check_size(kinds, memoryview(chunk.app_metadata)[8:], payload.nbytes)
    found = chunk.app_metadata.to_pybytes()
    return struct.unpack_from("<Q", found)[0], decode(found[8:], payload)


def _token_bytes(token: str) -> bytes:
    if not token or not token.isascii() or not token.isalnum():
        raise InvalidRequestError("a token is letters and digits", length=len(token))
    return token.encode()


def _closed(address: str) -> UnavailableError:
    return UnavailableError("the stream is closed", address=address)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
