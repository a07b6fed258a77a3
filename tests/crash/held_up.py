"""A storage whose writes can be held up, or fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from holdfast.errors import UnavailableError
from holdfast.storage.base import ObjectWriter, Storage, StoredObjects


class HeldUpStorage:
    """Writes go through, wait until they are let go, or fail; ``on_write`` comes before each."""

    def __init__(self, inner: Storage, on_write: Callable[[str], object] = lambda name: None):
        self._inner = inner
        self._on_write = on_write
        self._open = threading.Event()
        self._open.set()
        self._is_failing = False

    def hold(self) -> None:
        """From now on writes wait."""
        self._open.clear()

    def let_go(self) -> None:
        """Writes go through again."""
        self._open.set()

    def is_held(self) -> bool:
        """Whether writes wait."""
        return not self._open.is_set()

    def fail_next(self) -> None:
        """The next write fails."""
        self._is_failing = True

    def _write(self, name: str) -> None:
        self._on_write(name)
        self._open.wait()
        if self._is_failing:
            self._is_failing = False
            raise UnavailableError("there is no room", object=name)

    @property
    def url(self) -> str:
        return self._inner.url

    def create(self, name: str) -> ObjectWriter:
        self._write(name)
        return self._inner.create(name)

    def put_if_absent(self, name: str, data: bytes) -> None:
        self._write(name)
        self._inner.put_if_absent(name, data)

    def get(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        return self._inner.get(name, offset=offset, length=length)

    def get_into(self, name: str, buffer: Any, *, offset: int = 0) -> None:
        self._inner.get_into(name, buffer, offset=offset)

    def size(self, name: str) -> int:
        return self._inner.size(name)

    def list(self, prefix: str) -> StoredObjects:
        return self._inner.list(prefix)

    def delete(self, name: str) -> None:
        self._inner.delete(name)

    def clean(self) -> None:
        self._inner.clean()
