"""The bytes of a segment, as a storage would hold them."""

from __future__ import annotations

from holdfast.checkpoint.format.segment import EncodedSegment


def bytes_of(encoded: EncodedSegment) -> bytes:
    """All of its buffers in a row."""
    return b"".join(bytes(memoryview(part)) for part in encoded.buffers)
