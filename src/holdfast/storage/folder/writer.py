"""Write an object of a folder: a temporary file, synced, then linked to its name.

    .tmp/<random>.part, locked -> written -> fsync -> link to its name -> fsync every folder above

Invariants:
- The lock on a temporary file lives as long as its writer.
- An object is durable when ``close`` returns; one whose folders cannot be synced loses its name.

Not here: reading, listing and deleting (objects.py); opening without following links (beneath.py).
"""

from __future__ import annotations

import errno
import fcntl
import os
import uuid
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import ConflictError, InvalidRequestError, UnavailableError
from holdfast.storage.base import TEMPORARY, AbortingWriter, as_view
from holdfast.storage.failures import name_taken
from holdfast.storage.folder.beneath import Reporting, Way, exists, split_name

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# Linux moves at most 2 GB minus one page per call.
IO_BYTES_MAX = 1 << 30
# A folder emptied by ``delete`` may vanish between making it and linking into it; only a storm of
# deletions makes that happen twice.
_LINK_TRIES = 16


class FolderWriter(AbortingWriter):
    """A new object in ``.tmp/``, linked to its name by ``close``."""

    def __init__(self, root: Path, name: str) -> None:
        self._root = str(root)
        self._name = name
        self._bytes = 0
        with Reporting("create", name, self._root):
            self._temporary, fd = _new_temporary(root)  # a name in .tmp/
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
        with self._aborting(), Reporting("write", self._name, self._root):
            while view.nbytes:
                count = os.write(self._fd, view[:IO_BYTES_MAX])
                view = view[count:]
                self._bytes += count

    def close(self) -> None:
        """Sync the file, link it to its name, sync the folders."""
        self._check_open()
        *folders, leaf = split_name(self._name)
        with self._aborting(), Reporting("close", self._name, self._root):
            os.fsync(self._fd)
            with self._link(folders, leaf) as way:
                try:
                    self._remove_temporary()
                    for folder in reversed(way.folders):
                        _sync(folder)
                except BaseException:
                    # Visible but not durable must not be taken for done: the name goes again.
                    with suppress(FileNotFoundError):
                        os.unlink(leaf, dir_fd=way.last)
                    raise
        self._release()

    def abort(self) -> None:
        """Remove the temporary file."""
        if self._release.alive:
            self._release()
            with suppress(OSError):  # what cannot be removed now, ``clean`` removes later
                self._remove_temporary()

    def _check_open(self) -> None:
        if not self._release.alive:
            raise InvalidRequestError("the writer was closed or aborted", object=self._name)

    def _remove_temporary(self) -> None:
        with suppress(FileNotFoundError), Way(self._root, [TEMPORARY]) as way:
            os.unlink(self._temporary, dir_fd=way.last)

    def _link(self, folders: Sequence[str], leaf: str) -> Way:
        """Give the temporary file its name; the folders above it, open, so as to be synced."""
        for _ in range(_LINK_TRIES):
            try:
                unfinished = Way(self._root, [TEMPORARY])
            except FileNotFoundError as error:
                raise self._removed() from error
            with unfinished:
                try:
                    way = Way(self._root, folders, is_readable=True, make=True)
                except FileNotFoundError:
                    continue  # a deletion got in between
                try:
                    if self._link_once(unfinished.last, leaf, way.last):
                        return way
                except BaseException:
                    way.close()
                    raise
                way.close()
        raise UnavailableError(
            "cannot close: the folder keeps vanishing",
            object=self._name,
            url=self._root,
            todo="find out what deletes it",
        )

    def _link_once(self, unfinished: int, leaf: str, folder: int) -> bool:
        """Whether the file got its name; False when the folder was removed."""
        try:
            os.link(
                self._temporary,
                leaf,
                src_dir_fd=unfinished,
                dst_dir_fd=folder,
                follow_symlinks=False,
            )
        except FileExistsError as error:
            # A network file system may repeat a link whose answer was lost.
            if _is_same_file((self._temporary, unfinished), (leaf, folder)):
                return True
            raise name_taken(self._name, url=self._root) from error
        except FileNotFoundError as error:
            if not exists(self._temporary, unfinished):
                raise self._removed() from error
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            raise UnavailableError(
                "cannot close: the file system refuses hard links",
                object=self._name,
                url=self._root,
                todo="use a folder on another file system",
            ) from error
        return True

    def _removed(self) -> ConflictError:
        return ConflictError(
            "the unfinished object was removed by another writer",
            object=self._name,
            url=self._root,
            todo="stop one of the two trainings, or give each its own url",
        )


def _is_same_file(one: tuple[str, int], other: tuple[str, int]) -> bool:
    try:
        first, second = (os.stat(n, dir_fd=at, follow_symlinks=False) for n, at in (one, other))
    except FileNotFoundError:
        return False
    return os.path.samestat(first, second)


def _new_temporary(root: Path) -> tuple[str, int]:
    """A new, locked file in ``.tmp/``: its name there, and its descriptor."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    for _ in range(_LINK_TRIES):
        _make_root(root)
        name = f"{uuid.uuid4().hex}.part"
        try:
            with Way(str(root), [TEMPORARY], make=True) as way:
                fd = os.open(name, flags, 0o666, dir_fd=way.last)
        except FileNotFoundError:
            continue  # a deletion got in between
        try:
            # A file system without locks: ``clean`` cannot lock either and leaves the file alone.
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink > 0:
                return name, fd
        except BaseException:
            os.close(fd)
            raise
        # A ``clean`` elsewhere took the file for a leftover in the instant before it was locked.
        os.close(fd)
    raise UnavailableError(
        "cannot create: the temporary file keeps vanishing",
        url=str(root),
        todo="find out what deletes it",
    )


def _make_root(root: Path) -> None:
    """Create the root and make it durable, with every folder above it that is new."""
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        try:
            above = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # removed since: there is nothing left to make durable
        try:
            _sync(above)
        finally:
            os.close(above)


def _sync(folder: int) -> None:
    try:
        os.fsync(folder)
    except OSError as error:
        # Some file systems have no fsync for folders, and order their entries themselves.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
