"""A storage that counts what is read through it, so that a command can say what it took."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from holdfast.storage.base import ObjectWriter, Storage, StoredObjects, as_view

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class CountingStorage:
    """Wraps any storage; ``reads`` are (object, offset, bytes) in the order they ended."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self.reads: list[tuple[str, int, int]] = []

    @property
    def url(self) -> str:
        """The wrapped storage's."""
        return self._inner.url

    @property
    def read_bytes(self) -> int:
        """Bytes read so far."""
        return sum(length for _, _, length in self.reads)

    def create(self, name: str) -> ObjectWriter:
        """As the wrapped storage."""
        return self._inner.create(name)

    def put_if_absent(self, name: str, data: bytes) -> None:
        """As the wrapped storage."""
        self._inner.put_if_absent(name, data)

    def get(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """As the wrapped storage; counted."""
        data = self._inner.get(name, offset=offset, length=length)
        self._count(name, offset, len(data))
        return data

    def get_into(self, name: str, buffer: WriteableBuffer, *, offset: int = 0) -> None:
        """As the wrapped storage; counted."""
        self._inner.get_into(name, buffer, offset=offset)
        self._count(name, offset, as_view(buffer).nbytes)

    def size(self, name: str) -> int:
        """As the wrapped storage."""
        return self._inner.size(name)

    def list(self, prefix: str) -> StoredObjects:
        """As the wrapped storage."""
        return self._inner.list(prefix)

    def delete(self, name: str) -> None:
        """As the wrapped storage."""
        self._inner.delete(name)

    def clean(self) -> None:
        """As the wrapped storage."""
        self._inner.clean()

    def _count(self, name: str, offset: int, length: int) -> None:
        with self._lock:
            self.reads.append((name, offset, length))

    def touched(self, extents: Iterable[tuple[str, int, int]], sizes: Mapping[str, int]) -> int:
        """How many of these extents (object, offset, bytes) were read, or parts of them; ``sizes``
        are the objects'.

        A read up to the very end of an object is of its footer, whatever lies before that.
        """
        spans: dict[str, list[tuple[int, int]]] = {}
        for name, offset, length in self.reads:
            if offset + length != sizes.get(name):
                spans.setdefault(name, []).append((offset, offset + length))
        return sum(
            any(start < offset + size and offset < stop for start, stop in spans.get(name, ()))
            for name, offset, size in extents
        )
