"""The checksum of everything stored: xxh3, 64 bits, written as 16 hex digits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import xxhash


def checksum(*buffers: Any) -> int:
    """The checksum of some buffers as if they were one.

    >>> checksum(b"hold", b"fast") == checksum(b"holdfast")
    True
    """
    return checksum_all(buffers)


def checksum_all(buffers: Iterable[Any]) -> int:
    """``checksum`` over an iterable."""
    state = xxhash.xxh3_64()
    for buffer in buffers:
        state.update(buffer)
    return int(state.intdigest())


def as_hex(value: int) -> str:
    """How a checksum is written in catalogs, footers and messages.

    >>> as_hex(255)
    '00000000000000ff'
    """
    return f"{value:016x}"
