"""The little of HTTP/2 that the gate reads and writes: the headers of a connection's first request.

    preface, SETTINGS, ... HEADERS, CONTINUATION -> FirstRequest -> does it bring the token?

The gate (gate.py) reads no further than that. It needs no table of header names and decodes no
Huffman code: the token's name is in no static table, and a text has one encoding only, so that
comparing encoded bytes is enough (RFC 7541, sections 5.2 and 6).

Invariants:
- At most ``REQUEST_BYTES_MAX`` bytes of a connection are kept, whatever it sends.
- Bytes that no HTTP/2 client sends first raise ``CorruptDataError``, as soon as they are seen.

Not here: sockets (gate.py), everything after the first headers (the transport library).
"""

from __future__ import annotations

import hmac
import struct

from holdfast.errors import CorruptDataError

REQUEST_BYTES_MAX = 64 << 10
HEADERS_BYTES_MAX = 16 << 10
UNAUTHENTICATED, UNAVAILABLE = 16, 14  # gRPC's status codes

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME = struct.Struct(">BHBBI")  # length in three bytes, type, flags, stream
_FRAME_BYTES_MAX = 1 << 14  # what a client may send before it is told otherwise
_HEADERS, _PRIORITY, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = (
    1, 2, 3, 4, 6, 7, 8, 9
)  # fmt: skip
_BEFORE_HEADERS = {_PRIORITY, _SETTINGS, _PING, _WINDOW_UPDATE}
_END_STREAM, _END_HEADERS, _PADDED, _HAS_PRIORITY = 0x1, 0x4, 0x8, 0x20
# The code of RFC 7541 is canonical: texts of one length, in order, follow each other. By length:
_HUFFMAN = {
    5: "012aceiost",
    6: " %-./3456789=A_bdfghlmnpru",
    7: ":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz",
    8: "&*,;XZ",
}


class FirstRequest:
    """The bytes of a connection, up to the end of the headers of its first request."""

    def __init__(self) -> None:
        self.received = bytearray()
        """All bytes so far; whoever serves the connection is given them."""
        self.stream = 0
        """The number of the request's stream, once its headers have begun."""
        self.is_whole = False
        self._at = 0  # of the next frame; 0: the preface is not whole yet
        self._block = bytearray()

    @property
    def room(self) -> int:
        """How many more bytes are kept."""
        return REQUEST_BYTES_MAX - len(self.received)

    def feed(self, data: bytes) -> bool:
        """Take the next bytes; whether the headers are whole.

        Raises:
            CorruptDataError: no client of ours begins so, or headers are too long.
        """
        self.received += data
        if not self._at:
            if not _PREFACE.startswith(self.received[: len(_PREFACE)]):
                raise CorruptDataError("not an HTTP/2 connection")
            if len(self.received) < len(_PREFACE):
                return False
            self._at = len(_PREFACE)
        while not self.is_whole and self._take_frame():
            pass
        if not self.is_whole and self.room <= 0:
            raise CorruptDataError("a connection begins with too many bytes")
        return self.is_whole

    def brings(self, name: bytes, value: bytes) -> bool:
        """Whether the request has this header; takes the same time for any other value.

        Raises:
            CorruptDataError: unreadable headers.
        """
        names = (name, huffman(name))
        values = (value, huffman(value))
        at, block, is_found = 0, bytes(self._block), False
        while at < len(block):
            first = block[at]
            if first & 0x80:  # a field of a table
                _, at = _integer(block, at, 7)
                continue
            if first & 0x60 == 0x20:  # the size of the dynamic table
                _, at = _integer(block, at, 5)
                continue
            index, at = _integer(block, at, 6 if first & 0x40 else 4)
            is_named = False
            if index == 0:
                is_coded, found, at = _text(block, at)
                is_named = found == names[is_coded]
            is_coded, found, at = _text(block, at)
            is_found |= is_named and hmac.compare_digest(found, values[is_coded])
        return is_found

    def _take_frame(self) -> bool:
        """Read one frame if it is whole."""
        at = self._at
        if len(self.received) < at + _FRAME.size:
            return False
        high, low, kind, flags, stream = _FRAME.unpack_from(self.received, at)
        size, stream = high << 16 | low, stream & 0x7FFFFFFF
        if size > _FRAME_BYTES_MAX:
            raise CorruptDataError("a frame is too long", bytes=size)
        if self.stream:
            is_next = kind == _CONTINUATION and stream == self.stream
        else:
            is_next = (kind == _HEADERS and stream % 2 == 1) or kind in _BEFORE_HEADERS
        if not is_next:
            raise CorruptDataError("a connection begins with another frame", frame=kind)
        start = at + _FRAME.size
        if len(self.received) < start + size:
            return False
        self._at = start + size
        if kind in (_HEADERS, _CONTINUATION):
            self.stream = stream
            self._block += _headers(bytes(self.received[start : self._at]), kind, flags)
            if len(self._block) > HEADERS_BYTES_MAX:
                raise CorruptDataError("headers are too long")
            self.is_whole = bool(flags & _END_HEADERS)
        return True


def frame_bytes(head: bytes) -> int | None:
    """How many bytes a frame has that begins so; None: too few are known.

    >>> frame_bytes(bytes.fromhex("000006040000000000"))
    15
    """
    if len(head) < _FRAME.size:
        return None
    high, low, *_ = _FRAME.unpack_from(head)
    return int(_FRAME.size + (high << 16 | low))


def refusal(stream: int, *, status: int, message: str) -> bytes:
    """The answer to a request, as a gRPC server refuses it, and the end of the connection."""
    fields = (
        (b":status", b"200"),
        (b"content-type", b"application/grpc"),
        (b"grpc-status", str(status).encode()),
        (b"grpc-message", message.encode()),
    )
    block = b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in fields
    )
    return b"".join((
        _frame(_HEADERS, _END_STREAM | _END_HEADERS, stream, block),
        _frame(_RST_STREAM, 0, stream, struct.pack(">I", 0)),
        _frame(_GOAWAY, 0, 0, struct.pack(">II", stream, 0)),
    ))  # fmt: skip


def huffman(text: bytes) -> bytes:
    """A text in the code of RFC 7541; of letters, digits and a few signs.

    >>> huffman(b"no-cache").hex()
    'a8eb10649cbf'
    """
    bits = "".join(_CODES[sign] for sign in text.decode("ascii"))
    bits += "1" * (-len(bits) % 8)
    return int(bits or "0", 2).to_bytes(len(bits) // 8, "big")


def _codes() -> dict[str, str]:
    found, code = {}, 0
    for length, signs in _HUFFMAN.items():
        for sign in signs:
            found[sign] = format(code, f"0{length}b")
            code += 1
        code <<= 1
    return found


_CODES = _codes()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return _FRAME.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


def _headers(payload: bytes, kind: int, flags: int) -> bytes:
    """What a frame holds of the headers."""
    if kind == _CONTINUATION:
        return payload
    start, stop = 0, len(payload)
    if flags & _PADDED:
        start, stop = 1, stop - (payload[0] if payload else stop + 1)
    if flags & _HAS_PRIORITY:
        start += 5
    if start > stop:
        raise CorruptDataError("unreadable headers of a request")
    return payload[start:stop]


def _integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    """A number of headers, and where the next byte is."""
    most = (1 << bits) - 1
    value = block[at] & most
    at += 1
    if value < most:
        return value, at
    for shift in range(0, 28, 7):
        if at >= len(block):
            break
        value += (block[at] & 0x7F) << shift
        at += 1
        if not block[at - 1] & 0x80:
            return value, at
    raise CorruptDataError("unreadable headers of a request")


def _text(block: bytes, at: int) -> tuple[bool, bytes, int]:
    """Whether a text of headers is Huffman-coded, its bytes, and where the next byte is."""
    if at >= len(block):
        raise CorruptDataError("unreadable headers of a request")
    is_coded = bool(block[at] & 0x80)
    size, at = _integer(block, at, 7)
    if at + size > len(block):
        raise CorruptDataError("unreadable headers of a request")
    return is_coded, block[at : at + size], at + size
