"""Objects as files of a folder: durable by fsync, immutable by hard link.

An object is written to ``.tmp/``, synced, and linked to its name. A link, unlike a rename, fails
when the name exists: that is the whole of put-if-absent. Then the folders above it are synced, up
to the root, since a file is durable only when every folder on the way to it is.

Invariants:
- A file outside ``.tmp/`` is complete and never written to.
- A live writer holds a lock on its temporary file; the system drops it when the process dies, so
  ``clean`` can tell leftovers from work in progress.
- Reads never map a file: a file cut short by someone else is an error, not a crash.

Not here: names and errors (base.py).
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import ConflictError, InvalidRequestError, UnavailableError
from holdfast.storage.base import (
    TEMPORARY,
    AbortingWriter,
    StoredObject,
    StoredObjects,
    as_view,
    as_writable_view,
    check_name,
    check_prefix,
    check_range,
    no_such_object,
    object_too_short,
    storage_error,
)

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

# Linux moves at most 2 GB minus one page per call.
_IO_BYTES_MAX = 1 << 30
# A folder emptied by ``delete`` may vanish between making it and linking into it; only a storm of
# deletions makes that happen twice.
_LINK_TRIES = 16


class FolderStorage:
    """A folder; it is created by the first write."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root).expanduser().absolute()
        self._url = str(self._root)

    def __repr__(self) -> str:
        return f"FolderStorage({self.url!r})"

    @property
    def url(self) -> str:
        """The folder's absolute path."""
        return self._url

    def create(self, name: str) -> FolderWriter:
        """Start a new object in a temporary file."""
        return FolderWriter(self._root, check_name(name))

    def put_if_absent(self, name: str, data: bytes) -> None:
        """Create an object at once unless its name exists."""
        path = self._root / check_name(name)
        # The usual loser is told without writing anything; a race is settled by the link.
        with _reporting("look", name, self.url):
            if _exists(path):
                raise _conflict(name, self.url)
        with self.create(name) as writer:
            writer.write(data)
            writer.close()

    def get(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """A range of an object."""
        check_range(offset, length)
        with self._open(name) as (fd, size):
            wanted = max(size - offset, 0) if length is None else length
            self._check_end(name, offset + wanted, size)
            parts: list[bytes] = []
            while wanted > 0:
                part = os.pread(fd, min(wanted, _IO_BYTES_MAX), offset)
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
        with self._open(name) as (fd, size):
            end = offset + view.nbytes
            self._check_end(name, end, size)
            while view.nbytes:
                count = os.preadv(fd, [view[:_IO_BYTES_MAX]], offset)
                if count == 0:
                    raise object_too_short(name, url=self.url, expected=end, found=offset)
                view = view[count:]
                offset += count

    def size(self, name: str) -> int:
        """An object's length."""
        with self._open(name) as (_, size):
            return size

    def list(self, prefix: str) -> StoredObjects:
        """The objects under a prefix; a folder that does not exist has none."""
        folder = check_prefix(prefix)
        with _reporting("list", folder, self.url):
            found = _walk(self._root / folder, f"{folder}/" if folder else "")
            return sorted(item for item in found if item.name.startswith(prefix))

    def delete(self, name: str) -> None:
        """Remove an object, and the folders that it leaves empty."""
        path = self._root / check_name(name)
        with _reporting("delete", name, self.url):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                return
            # Not synced: an object that comes back after a power cut is collected again.
            for folder in path.parents:
                if folder == self._root:
                    break
                try:
                    folder.rmdir()
                except OSError:
                    break  # not empty, or already gone

    def clean(self) -> None:
        """Remove the temporary files whose writers are dead."""
        with _reporting("clean", TEMPORARY, self.url):
            try:
                leftovers = list(os.scandir(self._root / TEMPORARY))
            except FileNotFoundError:
                return
            for entry in leftovers:
                if entry.is_file(follow_symlinks=False):
                    _remove_if_dead(entry.path)

    @contextmanager
    def _open(self, name: str) -> Iterator[tuple[int, int]]:
        """A readable descriptor of an object, and its length."""
        path = f"{self.url}/{check_name(name)}"
        # Without O_NONBLOCK a pipe placed in the folder would make us wait for ever.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with _reporting("read", name, self.url):
            try:
                fd = os.open(path, flags)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise no_such_object(name, url=self.url) from error
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise no_such_object(name, url=self.url)
                yield fd, status.st_size
            finally:
                os.close(fd)

    def _check_end(self, name: str, end: int, size: int) -> None:
        """Before memory is taken: a range past the end would be found out only afterwards."""
        if end > size:
            raise object_too_short(name, url=self.url, expected=end, found=size)


class FolderWriter(AbortingWriter):
    """A new object in ``.tmp/``, linked to its name by ``close``."""

    def __init__(self, root: Path, name: str) -> None:
        self._root = root
        self._name = name
        self._bytes = 0
        with _reporting("create", name, str(root)):
            self._temporary, fd = _new_temporary(root)
        self._fd = fd
        # A writer that nobody closed ends like a killed process: the lock goes, the file stays.
        self._release = weakref.finalize(self, os.close, fd)

    @property
    def bytes(self) -> int:
        """How many bytes were written."""
        return self._bytes

    def write(self, data: ReadableBuffer) -> None:
        """Append a buffer."""
        self._check_open()
        view = as_view(data)
        with self._aborting(), _reporting("write", self._name, str(self._root)):
            while view.nbytes:
                count = os.write(self._fd, view[:_IO_BYTES_MAX])
                view = view[count:]
                self._bytes += count

    def close(self) -> None:
        """Sync the file, link it to its name, sync the folders."""
        self._check_open()
        path = self._root / self._name
        with self._aborting(), _reporting("close", self._name, str(self._root)):
            os.fsync(self._fd)
            self._link(path)
            try:
                self._temporary.unlink(missing_ok=True)
                for folder in path.parents:
                    _sync_folder(folder)
                    if folder == self._root:
                        break
            except BaseException:
                # Visible but not durable must not be taken for done: the name goes again.
                path.unlink(missing_ok=True)
                raise
        self._release()

    def abort(self) -> None:
        """Remove the temporary file."""
        if self._release.alive:
            self._release()
            with suppress(OSError):  # what cannot be removed now, ``clean`` removes later
                self._temporary.unlink(missing_ok=True)

    def _check_open(self) -> None:
        if not self._release.alive:
            raise InvalidRequestError("the writer was closed or aborted", object=self._name)

    def _link(self, path: Path) -> None:
        for _ in range(_LINK_TRIES):
            if not _make_parent(path):
                continue
            try:
                os.link(self._temporary, path, follow_symlinks=False)
                return
            except FileExistsError as error:
                # A network file system may repeat a link whose answer was lost.
                if _is_same_file(self._temporary, path):
                    return
                raise _conflict(self._name, str(self._root)) from error
            except FileNotFoundError as error:
                if not _exists(self._temporary):
                    raise ConflictError(
                        "the unfinished object was removed by another writer",
                        object=self._name,
                        url=str(self._root),
                        todo="stop one of the two trainings, or give each its own url",
                    ) from error
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                raise UnavailableError(
                    "cannot close: the file system refuses hard links",
                    object=self._name,
                    url=str(self._root),
                    todo="use a folder on another file system",
                ) from error
        raise UnavailableError(
            "cannot close: the folder keeps vanishing",
            object=self._name,
            url=str(self._root),
            todo="find out what deletes it",
        )


@contextmanager
def _reporting(doing: str, path: str, url: str) -> Iterator[None]:
    """Turn errors of the operating system into ours."""
    try:
        yield
    except UnavailableError:
        raise  # ours, although it is an OSError too
    except OSError as error:
        raise storage_error(error, doing=doing, path=path, url=url) from error


def _conflict(name: str, url: str) -> ConflictError:
    return ConflictError(
        "the object exists already", object=name, url=url, todo="another writer may own the run"
    )


def _exists(path: Path) -> bool:
    """Whether a name is taken, be it by a dangling link."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _is_same_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samestat(os.lstat(one), os.lstat(other))
    except FileNotFoundError:
        return False


def _new_temporary(root: Path) -> tuple[Path, int]:
    """A new, locked file in ``.tmp/``."""
    folder = root / TEMPORARY
    _make_root(root)
    while True:
        path = folder / f"{uuid.uuid4().hex}.part"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            folder.mkdir(parents=True, exist_ok=True)
            continue
        try:
            # A file system without locks: ``clean`` cannot lock either and leaves the file alone.
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink > 0:
                return path, fd
        except BaseException:
            os.close(fd)
            raise
        # A ``clean`` elsewhere took the file for a leftover in the instant before it was locked.
        os.close(fd)


def _make_root(root: Path) -> None:
    """Create the root and make it durable, with every folder above it that is new."""
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def _make_parent(path: Path) -> bool:
    """Create the folder of a path; False when a deletion got in between."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError:
        return False
    except FileExistsError:
        if _exists(path.parent) and not path.parent.is_dir():
            raise
        return False
    return True


def _sync_folder(folder: Path) -> None:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # emptied and removed since: there is nothing left to make durable
    try:
        os.fsync(fd)
    except OSError as error:
        # Some file systems have no fsync for folders, and order their entries themselves.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)


def _walk(folder: Path, start: str) -> Iterator[StoredObject]:
    """Every regular file under a folder; what vanishes meanwhile is left out."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(folder / entry.name, f"{start}{entry.name}/")
        elif entry.is_file(follow_symlinks=False):
            with suppress(FileNotFoundError):
                yield StoredObject(
                    f"{start}{entry.name}", entry.stat(follow_symlinks=False).st_size
                )


def _remove_if_dead(path: str) -> None:
    try:
        # Over NFS only a writable descriptor can be locked.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, PermissionError):
        return  # gone, or another user's
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # locked: its writer lives
    else:
        with suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108 - a path as the system gave it
    finally:
        os.close(fd)
