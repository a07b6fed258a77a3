"""Objects as files of a folder: durable by fsync, immutable by hard link.

An object is written to ``.tmp/``, synced, and linked to its name. A link, unlike a rename, fails
when the name exists: that is the whole of put-if-absent. Then the folders above it are synced, up
to the root, since a file is durable only when every folder on the way to it is.

Invariants:
- A file outside ``.tmp/`` is complete and never written to.
- A live writer holds a lock on its temporary file; the system drops it when the process dies, so
  ``clean`` can tell leftovers from work in progress.
- Reads never map a file: a file cut short by someone else is an error, not a crash.
- Nothing outside the root is read, created, changed or deleted, whatever links lie below it: a
  name that leads through one does not exist, and nothing can be written under it.

Not here: names and errors (storage/base.py); writing (writer.py); opening without following links
(beneath.py).
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, InvalidRequestError, NotFoundError, UnavailableError
from holdfast.storage.base import (
    TEMPORARY,
    StoredObject,
    StoredObjects,
    as_writable_view,
    check_prefix,
    check_range,
    no_such_object,
    object_too_short,
)
from holdfast.storage.failures import name_taken
from holdfast.storage.folder.beneath import (
    FOLDERS_MAX,
    LINKED,
    NotAFolderError,
    Reporting,
    Way,
    as_ours,
    exists,
    open_file,
    open_folder,
    split_name,
)
from holdfast.storage.folder.writer import IO_BYTES_MAX, FolderWriter

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# What opening a socket, or a device without a driver, fails with.
_NO_FILE = (errno.ENXIO, errno.ENODEV, errno.EOPNOTSUPP)


class FolderStorage:
    """A folder; it is created by the first write."""

    def __init__(self, root: str | Path) -> None:
        self._root = _absolute(root)
        self._url = str(self._root)

    def __repr__(self) -> str:
        return f"FolderStorage({self.url!r})"

    @property
    def url(self) -> str:
        """The folder's absolute path."""
        return self._url

    def create(self, name: str) -> FolderWriter:
        """Start a new object in a temporary file."""
        split_name(name)
        return FolderWriter(self._root, name)

    def put_if_absent(self, name: str, data: bytes) -> None:
        """Create an object at once unless its name exists."""
        *folders, leaf = split_name(name)
        # The usual loser is told without writing anything; a race is settled by the link.
        with (
            Reporting("look", name, self.url),
            suppress(FileNotFoundError),
            Way(self.url, folders) as way,
        ):
            if exists(leaf, way.last):
                raise name_taken(name, url=self.url)
        with self.create(name) as writer:
            writer.write(data)
            writer.close()

    def get(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """A range of an object."""
        check_range(offset, length)
        with _Reading(name, self.url) as (fd, size):
            wanted = max(size - offset, 0) if length is None else length
            self._check_end(name, offset + wanted, size)
            parts: list[bytes] = []
            while wanted > 0:
                part = os.pread(fd, min(wanted, IO_BYTES_MAX), offset)
                if not part:
                    raise object_too_short(
                        name, url=self.url, expected=offset + wanted, found=offset
                    )
                parts.append(part)
                offset += len(part)
                wanted -= len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def get_into(self, name: str, buffer: WriteableBuffer, *, offset: int = 0) -> None:
        """A range of an object, straight into the caller's memory."""
        check_range(offset, None)
        view = as_writable_view(buffer)
        with _Reading(name, self.url) as (fd, size):
            end = offset + view.nbytes
            self._check_end(name, end, size)
            while view.nbytes:
                count = os.preadv(fd, [view[:IO_BYTES_MAX]], offset)
                if count == 0:
                    raise object_too_short(name, url=self.url, expected=end, found=offset)
                view = view[count:]
                offset += count

    def size(self, name: str) -> int:
        """An object's length."""
        with _Reading(name, self.url) as (_, size):
            return size

    def list(self, prefix: str) -> StoredObjects:
        """The objects under a prefix; a folder that does not exist has none."""
        folder = check_prefix(prefix)
        parts = split_name(folder) if folder else ()
        with Reporting("list", folder, self.url):
            try:
                with Way(self.url, parts, is_readable=True) as way:
                    found = _walk(way.last, "".join(f"{part}/" for part in parts))
                    return sorted(item for item in found if item.name.startswith(prefix))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def delete(self, name: str) -> None:
        """Remove an object, and the folders that it leaves empty."""
        *folders, leaf = split_name(name)
        with Reporting("delete", name, self.url):
            try:
                way = Way(self.url, folders)
            except (FileNotFoundError, NotADirectoryError):
                return
            with way:
                try:
                    os.unlink(leaf, dir_fd=way.last)
                except FileNotFoundError:
                    return
                # Not synced: an object that comes back after a power cut is collected again.
                for part, above in zip(reversed(folders), way.folders[-2::-1], strict=True):
                    try:
                        os.rmdir(part, dir_fd=above)
                    except OSError:
                        break  # not empty, or already gone

    def clean(self) -> None:
        """Remove the temporary files whose writers are dead."""
        with Reporting("clean", TEMPORARY, self.url):
            try:
                way = Way(self.url, [TEMPORARY], is_readable=True)
            except FileNotFoundError:
                return
            with way:
                for entry in _entries(way.last):
                    if entry.is_file(follow_symlinks=False):
                        _remove_if_dead(entry.name, way.last)

    def _check_end(self, name: str, end: int, size: int) -> None:
        """Before memory is taken: a range past the end would be found out only afterwards."""
        if end > size:
            raise object_too_short(name, url=self.url, expected=end, found=size)


class _Reading:
    """An object while it is read: a descriptor and its length; errors become ours."""

    __slots__ = ("_fd", "_name", "_url")

    def __init__(self, name: str, url: str) -> None:
        self._name = name
        self._url = url

    def __enter__(self) -> tuple[int, int]:
        parts = split_name(self._name)
        try:
            # Without O_NONBLOCK a pipe placed in the folder would make us wait for ever.
            self._fd = open_file(self._url, parts, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise _not_opened(error, self._name, self._url) from error
        try:
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise no_such_object(self._name, url=self._url)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self._fd, status.st_size

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)
        if isinstance(error, OSError) and not isinstance(error, UnavailableError):
            raise as_ours(error, "read", self._name, self._url) from error


def _not_opened(error: OSError, name: str, url: str) -> HoldfastError:
    """What it means that an object cannot be opened."""
    if error.errno in (errno.ENOENT, *_NO_FILE):
        return no_such_object(name, url=url)
    if error.errno in (errno.ENOTDIR, *LINKED):
        return NotFoundError(
            "no such object",
            object=name,
            url=url,
            todo="a part of its path is a link, or a file with others in it; links below the url "
            "are not followed",
        )
    return as_ours(error, "read", name, url)


def _absolute(root: str | Path) -> Path:
    """The root as a path that the system can take.

    Raises:
        InvalidRequestError: it holds a null, is not text, or names a home that nobody has.
    """
    try:
        path = Path(root).expanduser().absolute()
        if "\0" in os.fsdecode(os.fsencode(path)):
            raise ValueError("a null in a path")
    except (ValueError, RuntimeError) as error:
        raise InvalidRequestError(
            "the storage url is not a path", url=str(root), todo="give a folder or a URL"
        ) from error
    return path


def _entries(folder: int) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


def _walk(folder: int, start: str) -> Iterator[StoredObject]:
    """Every regular file under an open folder that can be an object's; what vanishes meanwhile is
    left out."""
    for entry in _entries(folder):
        name = entry.name
        if name.startswith(".") or "\\" in name or not name.isprintable():
            continue
        if entry.is_dir(follow_symlinks=False):
            if start.count("/") == FOLDERS_MAX:
                continue
            try:
                below = open_folder(name, folder)
            except (FileNotFoundError, NotAFolderError):
                continue
            try:
                yield from _walk(below, f"{start}{name}/")
            finally:
                os.close(below)
        elif entry.is_file(follow_symlinks=False):
            with suppress(FileNotFoundError):
                yield StoredObject(f"{start}{name}", entry.stat(follow_symlinks=False).st_size)


def _remove_if_dead(name: str, folder: int) -> None:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        # Over NFS only a writable descriptor can be locked.
        fd = os.open(name, flags, dir_fd=folder)
    except (FileNotFoundError, PermissionError):
        return  # gone, or another user's
    except OSError as error:
        if error.errno in (errno.EISDIR, *LINKED, *_NO_FILE):
            return  # exchanged for something else since it was listed
        raise
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # locked: its writer lives
    else:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
    finally:
        os.close(fd)
