"""What every storage promises: named, immutable objects, and a put that only one writer wins.

Objects (segments) and catalogs both live here. A checkpoint's safety rests on three promises:

Invariants:
- An object is visible whole or not at all; when ``close`` or ``put_if_absent`` returns, it is also
  durable. It never changes afterwards.
- Of several ``put_if_absent`` of one name at most one succeeds; the others change nothing.
- Every failure is one of ours: NotFoundError, ConflictError, UnavailableError, CorruptDataError
  (shorter than asked for) or InvalidRequestError (a bad name).

Not here: checksums (checkpoint/format/segment.py); repeating what failed (a remote store does so
itself, retry.py; when it gives up, the caller knows what is worth doing again).
"""

from __future__ import annotations

import errno
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from holdfast.errors import (
    CorruptDataError,
    HoldfastError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

# Unfinished objects; hidden from ``list`` because a name's part never starts with a dot.
TEMPORARY = ".tmp"


@dataclass(frozen=True, slots=True, order=True)
class StoredObject:
    """An object that exists, and its length."""

    name: str
    bytes: int


StoredObjects = list[StoredObject]


class ObjectWriter(Protocol):
    """A new object while it is written; leaving a ``with`` block without ``close`` aborts it."""

    @property
    def bytes(self) -> int:
        """How many bytes were written so far."""

    def write(self, data: ReadableBuffer) -> None:
        """Append a contiguous buffer; it may be reused when this returns.

        After an error the writer is aborted: nothing of the object stays.
        """

    def close(self) -> None:
        """Make the object durable and visible.

        Raises:
            ConflictError: the name exists, or another writer removed the unfinished object.
        """

    def abort(self) -> None:
        """Forget the object; nothing of it stays. After ``close`` this does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Storage(Protocol):
    """A flat set of objects, named by relative paths with forward slashes. Safe from any thread."""

    @property
    def url(self) -> str:
        """Where it is, fit to be shown: without credentials."""

    def create(self, name: str) -> ObjectWriter:
        """Start a new object; nothing is visible until its ``close``."""

    def put_if_absent(self, name: str, data: bytes) -> None:
        """Create a small object at once, durably, unless the name exists.

        Raises:
            ConflictError: the name exists; it is left as it was.
            UnavailableError: it may or may not have been created; read it back to know.
        """

    def get(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """Exactly ``length`` bytes from ``offset`` on, or all the rest.

        Raises:
            NotFoundError: there is no such object.
            CorruptDataError: the object ends before that.
        """

    def get_into(self, name: str, buffer: WriteableBuffer, *, offset: int = 0) -> None:
        """Fill a contiguous buffer from ``offset`` on; raises as ``get``."""

    def size(self, name: str) -> int:
        """The length of an object in bytes."""

    def list(self, prefix: str) -> StoredObjects:
        """The objects whose names start with a prefix, sorted by name; unfinished ones never."""

    def delete(self, name: str) -> None:
        """Remove an object; that there is none is fine."""

    def clean(self) -> None:
        """Remove what dead writers left unfinished; for the writer that took over the run."""


def check_name(name: str) -> str:
    """The name itself, if it is one that every storage can hold.

    >>> check_name("objects/c00000012/r0.hf")
    'objects/c00000012/r0.hf'

    Raises:
        InvalidRequestError: absolute, not printable, or a part is empty or starts with a dot.
    """
    parts = name.split("/")
    if "\\" in name or not name.isprintable() or any(p == "" or p[0] == "." for p in parts):
        raise InvalidRequestError(
            "not an object name",
            name=name,
            todo="use a relative path of plain parts, like objects/c1/r0.hf",
        )
    return name


def check_prefix(prefix: str) -> str:
    """The folder part of a prefix, after the same checks as for a name.

    >>> check_prefix("objects/c0000"), check_prefix("objects/"), check_prefix("")
    ('objects', 'objects', '')
    """
    folder, _, start = prefix.rpartition("/")
    if folder or prefix.startswith("/"):
        check_name(folder)
    if start:
        check_name(start)
    return folder


def is_name(name: str) -> bool:
    """Whether what a store lists can be an object of ours, whoever put it there; hidden ones and
    those that ``check_name`` refuses cannot.

    >>> [is_name(name) for name in ("objects/a.hf", ".tmp/a", "objects/", "a\\b")]
    [True, False, False, False]
    """
    try:
        check_name(name)
    except InvalidRequestError:
        return False
    return True


def check_range(offset: int, length: int | None) -> None:
    """Refuse a range that no object could have."""
    if offset < 0 or (length is not None and length < 0):
        raise InvalidRequestError("not a range of an object", offset=offset, length=length)


def as_view(data: ReadableBuffer) -> memoryview:
    """A buffer as flat bytes, without a copy.

    >>> as_view(b"abc").nbytes
    3
    """
    view = memoryview(data)
    if not view.c_contiguous:
        raise InvalidRequestError("a buffer must be contiguous", shape=view.shape)
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def as_writable_view(buffer: WriteableBuffer) -> memoryview:
    """A buffer to be filled, as flat bytes."""
    view = as_view(buffer)
    if view.readonly and view.nbytes:
        raise InvalidRequestError("a buffer to read into must be writable", bytes=view.nbytes)
    return view


def read_pieces(
    get: Callable[..., bytes], name: str, buffer: WriteableBuffer, *, offset: int, most: int
) -> None:
    """Fill the caller's memory by reads of at most so many bytes; an object that ends before raises
    as ``get`` does."""
    check_range(offset, None)
    view = as_writable_view(buffer)
    if view.nbytes == 0:
        get(name, offset=offset, length=0)
    while view.nbytes:
        count = min(view.nbytes, most)
        view[:count] = get(name, offset=offset, length=count)
        view = view[count:]
        offset += count


class AbortingWriter(ABC):
    """How writers end: one that was not closed, or failed, leaves nothing to be seen."""

    @abstractmethod
    def abort(self) -> None:
        """Give up what was written; nothing, after ``close``."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    @contextmanager
    def _aborting(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.abort()
            raise


def shown(url: str) -> str:
    """A URL without user, password, query and fragment.

    >>> shown("s3://key:secret@bucket/run?token=abc")
    's3://bucket/run'
    """
    return re.sub(r"(://)[^/\s]*@", r"\1", re.sub(r"[?#]\S*", "", url))


def object_too_short(name: str, *, url: str, expected: int, found: int) -> CorruptDataError:
    """The error for an object that ends before the bytes asked for."""
    return CorruptDataError(
        "object is shorter than expected",
        object=name,
        url=url,
        expected_bytes=expected,
        found_bytes=found,
        todo="run 'holdfast verify', and restore an older step",
    )


def no_such_object(name: str, *, url: str) -> NotFoundError:
    """The error for a name that does not exist."""
    return NotFoundError("no such object", object=name, url=url)


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_FOLDER = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG}


def storage_error(error: OSError, *, doing: str, path: str, url: str) -> HoldfastError:
    """What an error of the operating system means to the caller, and what to do about it.

    >>> raised = OSError(errno.ENOSPC, "No space left on device")
    >>> print(storage_error(raised, doing="write", path="a.hf", url="/runs/a"))
    cannot write: no room. path='a.hf' url='/runs/a' errno='ENOSPC'; make room, then save again
    """
    code = errno.errorcode.get(error.errno or 0, "unknown")
    facts = {"path": path, "url": url, "errno": code}
    if error.errno in (errno.ENOENT, errno.ELOOP):
        return NotFoundError(f"cannot {doing}: it does not exist", **facts)
    if error.errno in _NO_FOLDER:
        return InvalidRequestError(
            f"cannot {doing}: a part of the path is not what it should be",
            **facts,
            todo="check that the url is a folder, and that no object is named like one",
        )
    if error.errno in _FULL:
        return UnavailableError(
            f"cannot {doing}: no room", **facts, todo="make room, then save again"
        )
    if error.errno in _DENIED:
        return UnavailableError(
            f"cannot {doing}: permission denied",
            **facts,
            todo="give this user write access, or mount the folder writable",
        )
    return UnavailableError(
        f"cannot {doing}: {error.strerror or error}", **facts, todo="retry, and check the disk"
    )
