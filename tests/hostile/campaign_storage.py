"""A run that lives in memory: a storage whose objects are a dict, as quick as a test needs.

It keeps the promises of every storage (names, ranges, put-if-absent) and raises the same errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from holdfast.errors import ConflictError
from holdfast.storage.base import (
    StoredObject,
    as_view,
    as_writable_view,
    check_name,
    check_prefix,
    check_range,
    no_such_object,
    object_too_short,
)


class MemoryStorage:
    """A storage over a dict of bytes by name."""

    url = "memory://campaign"

    def __init__(self, files: Mapping[str, bytes] | None = None) -> None:
        self.files: dict[str, bytes] = dict(files or {})

    def create(self, name: str) -> MemoryWriter:
        """Start an object; it appears with its ``close``."""
        return MemoryWriter(self, check_name(name))

    def put_if_absent(self, name: str, data: bytes) -> None:
        """Create an object unless its name exists."""
        if self.files.setdefault(check_name(name), data) is not data:
            raise ConflictError("the object exists", object=name, url=self.url)

    def get(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """A range of an object."""
        check_range(offset, length)
        data = self._whole(name)
        end = max(len(data), offset) if length is None else offset + length
        if end > len(data):
            raise object_too_short(name, url=self.url, expected=end, found=len(data))
        return data[offset:end]

    def get_into(self, name: str, buffer: Any, *, offset: int = 0) -> None:
        """A range of an object, into the caller's memory."""
        check_range(offset, None)
        view = as_writable_view(buffer)
        data = self._whole(name)
        end = offset + view.nbytes
        if end > len(data):
            raise object_too_short(name, url=self.url, expected=end, found=len(data))
        view[:] = data[offset:end]

    def size(self, name: str) -> int:
        """An object's length."""
        return len(self._whole(name))

    def list(self, prefix: str) -> list[StoredObject]:
        """The objects under a prefix."""
        check_prefix(prefix)
        found = [(name, len(data)) for name, data in self.files.items() if name.startswith(prefix)]
        return [StoredObject(name, size) for name, size in sorted(found)]

    def delete(self, name: str) -> None:
        """Remove an object."""
        self.files.pop(check_name(name), None)

    def clean(self) -> None:
        """Nothing is ever left unfinished."""

    def _whole(self, name: str) -> bytes:
        data = self.files.get(check_name(name))
        if data is None:
            raise no_such_object(name, url=self.url)
        return data


class MemoryWriter:
    """An object that is being written."""

    def __init__(self, storage: MemoryStorage, name: str) -> None:
        self._storage = storage
        self._name = name
        self._parts: list[bytes] = []

    @property
    def bytes(self) -> int:
        """How many bytes were written."""
        return sum(map(len, self._parts))

    def write(self, data: Any) -> None:
        """Append a buffer."""
        self._parts.append(bytes(as_view(data)))

    def close(self) -> None:
        """Make the object visible."""
        self._storage.put_if_absent(self._name, b"".join(self._parts))

    def abort(self) -> None:
        """Forget what was written."""
        self._parts = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()
