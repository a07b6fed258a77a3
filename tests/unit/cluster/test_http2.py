from __future__ import annotations

import random
import struct

import pytest

from holdfast.cluster import http2
from holdfast.cluster.http2 import FirstRequest, huffman
from holdfast.errors import CorruptDataError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
NAME, TOKEN = b"holdfast-token", b"7f3aQz09"
DATA, HEADERS, PRIORITY, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = (
    0, 1, 2, 4, 5, 6, 7, 8, 9
)  # fmt: skip
END, PADDED, HAS_PRIORITY = 0x4, 0x8, 0x20


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    size = len(payload)
    return struct.pack(">BHBBI", size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def text(value: bytes, *, is_coded: bool = False) -> bytes:
    value = huffman(value) if is_coded else value
    assert len(value) < 127
    return bytes([len(value) | (0x80 if is_coded else 0)]) + value


def field(name: bytes, value: bytes, *, how: int = 0x40, is_coded: bool = False) -> bytes:
    return bytes([how]) + text(name, is_coded=is_coded) + text(value, is_coded=is_coded)


OTHERS = bytes([0x83, 0x86]) + field(b"te", b"trailers") + bytes([0x3F, 0xE1, 0x1F])
BLOCK = OTHERS + field(NAME, TOKEN) + bytes([0x5F]) + text(b"application/grpc")


def begun(block: bytes, *, flags: int = END) -> bytes:
    return (
        PREFACE
        + frame(SETTINGS, bytes(6))
        + frame(WINDOW, bytes(4))
        + frame(HEADERS, block, flags=flags, stream=1)
    )


def read(data: bytes) -> FirstRequest:
    request = FirstRequest()
    assert request.feed(data)
    return request


# RFC 7541, appendices C.4 and C.6.
@pytest.mark.parametrize(
    ("plain", "coded"),
    [
        (b"www.example.com", "f1e3c2e5f23a6ba0ab90f4ff"),
        (b"no-cache", "a8eb10649cbf"),
        (b"custom-key", "25a849e95ba97d7f"),
        (b"custom-value", "25a849e95bb8e8b4bf"),
        (b"Mon, 21 Oct 2013 20:13:21 GMT", "d07abe941054d444a8200595040b8166e082a62d1bff"),
        (b"", ""),
    ],
)
def test_texts_are_coded_as_the_standard_says(plain: bytes, coded: str) -> None:
    assert huffman(plain).hex() == coded


@pytest.mark.parametrize("is_coded", [False, True])
@pytest.mark.parametrize("how", [0x40, 0x00, 0x10], ids=["indexed", "not indexed", "never"])
def test_a_token_is_found_however_it_is_encoded(how: int, is_coded: bool) -> None:
    request = read(begun(OTHERS + field(NAME, TOKEN, how=how, is_coded=is_coded)))
    assert request.stream == 1
    assert request.brings(NAME, TOKEN)
    for other in (TOKEN[:-1], TOKEN + b"0", TOKEN.swapcase(), b"0"):
        assert not request.brings(NAME, other)


@pytest.mark.parametrize(
    "block",
    [
        OTHERS,
        b"",
        field(b"holdfast-tokens", TOKEN),
        field(TOKEN, NAME),
        field(b"x", NAME + TOKEN),
        field(NAME, b""),
        bytes([0x41]) + text(TOKEN),  # the name is of a table
    ],
)
def test_a_request_without_the_token_does_not_bring_it(block: bytes) -> None:
    assert not read(begun(block)).brings(NAME, TOKEN)


def test_bytes_may_come_one_by_one() -> None:
    request, data = FirstRequest(), begun(BLOCK)
    whole = [request.feed(data[at : at + 1]) for at in range(len(data))]
    assert whole == [False] * (len(data) - 1) + [True]
    assert request.brings(NAME, TOKEN)
    assert bytes(request.received) == data


def test_headers_go_on_in_continuations_and_may_be_padded() -> None:
    padded = bytes([3]) + bytes(5) + BLOCK[:10] + bytes(3)
    data = (
        PREFACE
        + frame(PRIORITY, bytes(5), stream=3)
        + frame(PING, bytes(8))
        + frame(HEADERS, padded, flags=PADDED | HAS_PRIORITY, stream=5)
        + frame(CONTINUATION, BLOCK[10:20], stream=5)
        + frame(CONTINUATION, BLOCK[20:], flags=END, stream=5)
        + frame(DATA, b"and so on", stream=5)
    )
    request = read(data)
    assert (request.stream, request.brings(NAME, TOKEN)) == (5, True)
    assert bytes(request.received) == data  # whoever serves it gets everything


WRONG = {
    "nothing of HTTP/2": b"GET / HTTP/1.1\r\n\r\n",
    "half a preface, then else": PREFACE[:10] + b"x",
    "TLS": bytes.fromhex("16030100f8010000f4"),
    "data first": PREFACE + frame(DATA, b"x", stream=1),
    "a push": PREFACE + frame(PUSH, b"x", stream=1),
    "a goodbye": PREFACE + frame(GOAWAY, bytes(8)),
    "an unknown frame": PREFACE + frame(77, b"x"),
    "a continuation of nothing": PREFACE + frame(CONTINUATION, b"x", stream=1),
    "a stream of servers": PREFACE + frame(HEADERS, b"", stream=2),
    "no stream": PREFACE + frame(HEADERS, b""),
    "a long frame": PREFACE + frame(SETTINGS, bytes((1 << 14) + 1)),
    "a frame of 16 MB": PREFACE + bytes.fromhex("ffffff040000000000"),
    "another stream goes on": (
        PREFACE + frame(HEADERS, b"", stream=1) + frame(CONTINUATION, b"", stream=3)
    ),
    "something between headers": PREFACE + frame(HEADERS, b"", stream=1) + frame(PING, bytes(8)),
    "more padding than headers": PREFACE + frame(HEADERS, bytes([9, 1]), flags=PADDED, stream=1),
    "padding of nothing": PREFACE + frame(HEADERS, b"", flags=PADDED, stream=1),
    "headers too long": PREFACE + frame(HEADERS, bytes(1 << 14), stream=1)
    + frame(CONTINUATION, bytes(1), flags=END, stream=1),
    "endless settings": PREFACE + frame(SETTINGS, bytes(16380)) * 5,
    "endless empty frames": PREFACE + frame(SETTINGS) * 8000,
    "endless empty continuations": PREFACE + frame(HEADERS, b"", stream=1)
    + frame(CONTINUATION, b"", stream=1) * 8000,
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("step", [1 << 14, 1000])
def test_what_no_client_sends_first_is_refused(what: str, step: int) -> None:
    request = FirstRequest()
    with pytest.raises(CorruptDataError):
        for at in range(0, len(WRONG[what]), step):
            request.feed(WRONG[what][at : at + min(step, request.room)])
    assert len(request.received) <= http2.REQUEST_BYTES_MAX


@pytest.mark.parametrize(
    "block",
    [b"\x40", b"\x40\x05ab", b"\x7f\xff\xff\xff\xff\xff", b"\xff", b"\x00\x01a", b"\x40\xff"],
)
def test_unreadable_headers_are_refused(block: bytes) -> None:
    with pytest.raises(CorruptDataError):
        read(begun(block)).brings(NAME, TOKEN)


@pytest.mark.parametrize("seed", range(8))
def test_random_changes_raise_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        data = bytearray(begun(BLOCK))
        for _ in range(rng.randint(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        request = FirstRequest()
        try:
            if request.feed(bytes(data[: rng.randint(1, len(data))])):
                request.brings(NAME, TOKEN)
        except CorruptDataError:
            pass
        assert len(request.received) <= http2.REQUEST_BYTES_MAX
