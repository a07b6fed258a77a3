"""Objects behind any fsspec URL but S3's (storage/s3/objects.py): other object stores, and file
systems.

Two kinds of stores, told apart by their protocol:

- Object stores (gs, az, ...) show an upload only when it is complete. Objects are streamed straight
  to their names.
- All others may show a half-written file. Objects are written under ``.tmp/`` and moved to their
  names when complete.

Who commits: an object store that refuses to create a name that exists (probe.py finds out) decides
itself; memory belongs to one process, where a lock decides; everywhere else a lease (lease.py).

Invariants:
- A stream that was not closed never becomes an object, not even when the interpreter collects it.
- The length of an upload is checked before it counts as written.
- What may be repeated without harm (reads, deletions, listings) is repeated after failures that may
  pass; a stream that broke is not.
- Neither a URL nor a message carries user, password or query.

Not here: names and errors (base.py, failures.py), waiting (retry.py).
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Self, TypeVar

import fsspec

from holdfast.errors import (
    ConflictError,
    HoldfastError,
    InvalidRequestError,
    UnavailableError,
)
from holdfast.storage.base import (
    TEMPORARY,
    AbortingWriter,
    StoredObject,
    StoredObjects,
    as_view,
    check_name,
    check_prefix,
    check_range,
    is_name,
    no_such_object,
    object_too_short,
    read_pieces,
    shown,
)
from holdfast.storage.failures import as_ours, is_absent, is_transient, name_taken
from holdfast.storage.lease import NAME as LEASE
from holdfast.storage.lease import Lease, shared_lease
from holdfast.storage.opening import open_filesystem
from holdfast.storage.probe import has_conditional_put
from holdfast.storage.retry import CHANCE, Backoff, Retrier
from holdfast.storage.settings import RemoteSettings, take_settings

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

T = TypeVar("T")

_OBJECT_STORES = frozenset(("gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "obs", "tos"))
# Bounds what a backend copies at a time, whatever the size of the caller's buffer.
_IO_BYTES_MAX = 32 << 20

# Makes "is it there? then create it" one step for all threads, of all instances of a store.
_publishing = threading.Lock()


class RemoteStorage:
    """A folder-like prefix of an fsspec file system."""

    def __init__(
        self,
        fs: fsspec.AbstractFileSystem,
        root: str,
        *,
        url: str,
        settings: RemoteSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        chance: Callable[[], float] = CHANCE,
    ) -> None:
        settings = settings or RemoteSettings()
        self._fs = fs
        self._root = root.rstrip("/")
        self._url = shown(url)
        protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
        self._is_object_store = not _OBJECT_STORES.isdisjoint(protocols)
        self._is_memory = "memory" in protocols
        self._unfinished: set[str] = set()
        self._retrier = Retrier(
            Backoff.of(settings), is_transient=is_transient, clock=clock, sleep=sleep, chance=chance
        )
        cell = _Cell(fs, f"{self._root}/{LEASE}", url=self._url)
        self._lease = shared_lease(
            (fs._fs_token, self._root),
            lambda: Lease(cell, settings, url=self._url, clock=clock, sleep=sleep),
        )

    @classmethod
    def open(cls, url: str, options: Mapping[str, Any]) -> Self:
        """The storage at an fsspec URL.

        Raises:
            InvalidRequestError: fsspec does not know the scheme, or its package is missing.
        """
        settings, rest = take_settings(options)
        fs, root = open_filesystem(url, rest)
        return cls(fs, root, url=url, settings=settings)

    def __repr__(self) -> str:
        return f"RemoteStorage({self.url!r})"

    @property
    def url(self) -> str:
        """The URL, without credentials."""
        return self._url

    def create(self, name: str) -> RemoteWriter:
        """Start a new object."""
        path = self._path(name)
        if self._is_object_store:
            return RemoteWriter(self, name, path, path)
        return RemoteWriter(self, name, f"{self._root}/{TEMPORARY}/{uuid.uuid4().hex}.part", path)

    def put_if_absent(self, name: str, data: bytes) -> None:
        """Create an object at once unless its name exists."""
        path = self._path(name)
        with self.reporting("create", name):
            if self._is_object_store and self._is_conditional:
                with _publishing:
                    # Tells the usual loser without sending anything; the store settles a race.
                    self.check_absent(name, path)
                    self._put_new(path, data)
                    self._fs.invalidate_cache()
                return
            claim = nullcontext() if self._is_memory else self._lease.held()
            with claim, self.create(name) as writer:
                writer.write(data)
                if not self._is_memory:
                    self._lease.check()
                writer.close()

    @property
    def _is_conditional(self) -> bool:
        return has_conditional_put(
            (self._fs._fs_token, self._root),
            lambda name, data: self._put_new(f"{self._root}/{name}", data),
            lambda name: self.remove(name, f"{self._root}/{name}"),
        )

    def _put_new(self, path: str, data: bytes) -> None:
        self._fs.pipe_file(path, bytes(data), mode="create")

    def get(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """A range of an object."""
        check_range(offset, length)
        path = self._path(name)
        if length == 0 or (length is None and offset > 0) or (length or 0) > _IO_BYTES_MAX:
            # A range may be empty: only the object's length tells whether it should be. And one
            # that ends far behind it should not cost the memory.
            found = self.size(name)
            wanted = offset + (length or 0)
            if found < wanted:
                raise object_too_short(name, url=self.url, expected=wanted, found=found)
            if found == offset or length == 0:
                return b""
        end = None if length is None else offset + length
        try:
            with self.reporting("read", name):
                data: bytes = self._retrier.call(
                    lambda: self._fs.cat_file(path, start=offset or None, end=end)
                )
        except UnavailableError:
            # Some stores answer a range past the end with an error.
            if end is None or (found := self.size(name)) >= end:
                raise
            raise object_too_short(name, url=self.url, expected=end, found=found) from None
        if end is not None and len(data) != end - offset:
            found = offset + len(data)
            raise object_too_short(name, url=self.url, expected=end, found=found)
        return data

    def get_into(self, name: str, buffer: WriteableBuffer, *, offset: int = 0) -> None:
        """A range of an object, piece by piece into the caller's memory."""
        read_pieces(self.get, name, buffer, offset=offset, most=_IO_BYTES_MAX)

    def size(self, name: str) -> int:
        """An object's length."""
        return self.size_of(name, self._path(name))

    def list(self, prefix: str) -> StoredObjects:
        """The objects under a prefix."""
        folder = check_prefix(prefix)
        top = f"{self._root}/{folder}" if folder else self._root
        with self.reporting("list", prefix):
            self._fs.invalidate_cache()
            try:
                found: dict[str, Any] = self._retrier.call(lambda: self._find(top))
            except FileNotFoundError:
                return []
        objects = (
            StoredObject(self._name(path), int(info["size"] or 0))
            for path, info in found.items()
            if info["type"] == "file"
        )
        return sorted(
            item for item in objects if item.name.startswith(prefix) and is_name(item.name)
        )

    def _find(self, top: str) -> dict[str, Any]:
        """All files below a path. Where there are folders, fsspec leaves out those that it fails to
        list: nothing at all may be a failure, which asking for the path alone raises."""
        found: dict[str, Any] = self._fs.find(top, detail=True)
        if not found and not self._is_object_store:
            self._fs.ls(top, detail=False)
        return found

    def delete(self, name: str) -> None:
        """Remove an object."""
        self.remove(name, self._path(name))

    def clean(self) -> None:
        """Remove the unfinished objects of everyone else.

        Whose writer is dead cannot be told from afar; one that lives fails when it closes.
        Uploads that an object store never showed are left to the store's own expiry.
        """
        with self.reporting("clean", TEMPORARY):
            self._fs.invalidate_cache()
            try:
                leftovers = self._fs.find(f"{self._root}/{TEMPORARY}")
            except FileNotFoundError:
                return
            ours = self._unfinished.copy()
            for path in leftovers:
                if path not in ours:
                    self.remove(TEMPORARY, path)

    def size_of(self, name: str, path: str) -> int:
        """The length of the file at a path, asked anew."""
        with self.reporting("look", name):
            self._fs.invalidate_cache()
            info: dict[str, Any] = self._retrier.call(lambda: self._fs.info(path))
        if info["type"] != "file":
            raise no_such_object(name, url=self.url)
        return int(info["size"])

    def check_absent(self, name: str, path: str) -> None:
        """Raise ConflictError if something is at a path."""
        self._fs.invalidate_cache()
        if self._fs.exists(path):
            raise name_taken(name, url=self.url)

    def publish(self, name: str, temporary: str, path: str) -> None:
        """Move a finished file to its name, unless that exists."""
        with self.reporting("close", name), _publishing:
            self.check_absent(name, path)
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.mv(temporary, path)
            self._fs.invalidate_cache()

    def remove(self, name: str, path: str) -> None:
        """Remove a file if it exists."""
        with self.reporting("delete", name), suppress(FileNotFoundError):
            self._retrier.call(lambda: self._fs.rm_file(path))

    def start(self, name: str, path: str) -> Any:
        """Open a file for writing."""
        with self.reporting("create", name):
            if not self._is_object_store:
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            file = self._fs.open(path, "wb")
        self._unfinished.add(path)
        return file

    def forget(self, path: str) -> None:
        """A file opened for writing is no longer anyone's."""
        self._unfinished.discard(path)

    @contextmanager
    def reporting(self, doing: str, name: str) -> Iterator[None]:
        """Turn whatever a backend raises into one of our errors."""
        try:
            yield
        except (HoldfastError, MemoryError):
            raise
        except Exception as error:  # a foreign edge: backends raise their own libraries' classes
            raise as_ours(error, doing=doing, name=name, url=self.url) from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"

    def _name(self, path: str) -> str:
        return path[len(self._root) :].lstrip("/")


class RemoteWriter(AbortingWriter):
    """A new object on its way to a remote store."""

    def __init__(self, storage: RemoteStorage, name: str, target: str, path: str) -> None:
        self._storage = storage
        self._name = name
        self._target = target
        self._path = path
        self._bytes = 0
        self._file: Any = None
        self._file = storage.start(name, target)

    @property
    def bytes(self) -> int:
        """How many bytes were written."""
        return self._bytes

    def write(self, data: ReadableBuffer) -> None:
        """Append a buffer."""
        file = self._opened()
        view = as_view(data)
        with self._aborting(), self._storage.reporting("write", self._name):
            while view.nbytes:
                part = view[:_IO_BYTES_MAX]
                file.write(part)
                self._bytes += part.nbytes
                view = view[part.nbytes :]

    def close(self) -> None:
        """Finish the upload and show it under its name."""
        file = self._opened()
        with self._aborting():
            if self._target == self._path:
                with self._storage.reporting("close", self._name):
                    self._storage.check_absent(self._name, self._path)
            with self._storage.reporting("close", self._name):
                file.close()
            self._check_length()
            if self._target != self._path:
                self._storage.publish(self._name, self._target, self._path)
            self._file = None
            self._storage.forget(self._target)

    def abort(self) -> None:
        """Stop the upload; what a failing store keeps of it, ``clean`` removes."""
        if self._file is None:
            return
        self._discard()
        if self._target != self._path:
            with suppress(HoldfastError):
                self._storage.remove(self._name, self._target)

    def __del__(self) -> None:
        # The backend's own finalizer would complete the upload: a torn object in plain sight.
        if self._file is not None:
            self._discard()

    def _opened(self) -> Any:
        if self._file is None:
            raise InvalidRequestError("the writer was closed or aborted", object=self._name)
        return self._file

    def _check_length(self) -> None:
        try:
            found = self._storage.size_of(self._name, self._target)
        except HoldfastError as error:
            if self._target == self._path or isinstance(error, UnavailableError):
                raise
            raise ConflictError(
                "the unfinished object was removed by another writer",
                object=self._name,
                url=self._storage.url,
                todo="stop one of the two trainings, or give each its own url",
            ) from error
        if found != self._bytes:
            raise UnavailableError(
                "the upload is incomplete",
                object=self._name,
                url=self._storage.url,
                expected_bytes=self._bytes,
                found_bytes=found,
                todo="save again",
            )

    def _discard(self) -> None:
        file, self._file = self._file, None
        self._storage.forget(self._target)
        # Errors of a stream that is thrown away anyway, of whatever class, help nobody.
        with suppress(Exception):
            if self._target != self._path:
                file.close()
            elif not file.closed:
                file.discard()
        with suppress(Exception):
            file.closed = True


class _Cell:
    """The object that a lease is written to; it knows no storage, so that it keeps none alive."""

    def __init__(self, fs: fsspec.AbstractFileSystem, path: str, *, url: str) -> None:
        self._fs = fs
        self._path = path
        self._url = url

    def read(self) -> bytes | None:
        """What is there."""
        return self._asking(lambda: bytes(self._fs.cat_file(self._path)))

    def write(self, data: bytes) -> None:
        """Replace it."""

        def put() -> None:
            self._fs.makedirs(self._path.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(self._path, data)

        self._asking(put)

    def remove(self) -> None:
        """Leave nothing there."""
        self._asking(lambda: self._fs.rm_file(self._path))

    def _asking(self, act: Callable[[], T]) -> T | None:
        try:
            self._fs.invalidate_cache()
            return act()
        except Exception as error:
            if is_absent(error):
                return None
            raise as_ours(error, doing="keep", name=LEASE, url=self._url) from error
