"""Open what lies below a folder one part at a time, and never through a link.

The root is the user's: it may be reached through links. Below it every part is opened from the
descriptor of the folder that holds it, and the call that opens it refuses a link. Nothing is
checked first and used afterwards, so a folder that is exchanged for a link meanwhile leads nowhere.

Invariants:
- No function here follows a link below the root.
- A part that should be a folder and is a link, a file or a pipe is a NotAFolderError, on every
  system.

A mount, and a second hard link of a file, are not links in this sense: making one takes rights over
what it shows.

Not here: what an object is (objects.py).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from types import TracebackType
from typing import Self

from holdfast.errors import HoldfastError, InvalidRequestError, UnavailableError
from holdfast.storage.base import check_name, storage_error

# Linux opens a folder to search in it without the right to list it; other systems ask for both.
_SEARCH = getattr(os, "O_PATH", os.O_RDONLY)
_FOLDER = os.O_DIRECTORY | os.O_CLOEXEC
# What opening a link without following it fails with: Linux and macOS, then FreeBSD.
LINKED = (errno.ELOOP, errno.EMLINK)
# Folders on the way to an object; a run has two. Listing holds so many descriptors at a time.
FOLDERS_MAX = 64
_NAME_LENGTH_MAX = 4096


class NotAFolderError(NotADirectoryError):
    """A part below the root that should be a folder is a link, or anything else."""


class Way:
    """Open folders from a root down to one below it, the root first; leaving the block closes them.

    A readable folder can be listed and synced; the others can only be gone through.

    Raises:
        NotAFolderError: a part below the root is not a folder.
        FileNotFoundError: a part is missing; with ``make``, it was removed at the same time.
    """

    def __init__(
        self, root: str, parts: Sequence[str], *, is_readable: bool = False, make: bool = False
    ) -> None:
        access = os.O_RDONLY if is_readable else _SEARCH
        self.folders = [os.open(root, access | _FOLDER)]
        try:
            for part in parts:
                self.folders.append(_open_part(part, access, self.last, make=make))
        except BaseException:
            self.close()
            raise

    @property
    def last(self) -> int:
        """The lowest folder."""
        return self.folders[-1]

    def close(self) -> None:
        """Close every folder."""
        while self.folders:
            os.close(self.folders.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _open_part(part: str, access: int, folder: int, *, make: bool) -> int:
    try:
        return open_folder(part, folder, access=access)
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):  # another writer was faster
        os.mkdir(part, dir_fd=folder)
    return open_folder(part, folder, access=access)


def open_folder(part: str, folder: int, *, access: int = os.O_RDONLY) -> int:
    """Open a folder by its name in another one."""
    try:
        return os.open(part, access | _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ENOTDIR or error.errno in LINKED:
            raise NotAFolderError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), part) from error
        raise


def open_file(root: str, parts: Sequence[str], flags: int) -> int:
    """Open a file below a root; the caller closes it.

    Systems do not follow a link in the last part of a path when asked not to, so that the root and
    the first part below it take one call.
    """
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    if len(parts) == 1:
        return os.open(f"{root}/{parts[0]}", flags)
    folder_flags = _SEARCH | _FOLDER | os.O_NOFOLLOW
    at = os.open(f"{root}/{parts[0]}", folder_flags)
    try:
        for part in parts[1:-1]:
            above, at = at, os.open(part, folder_flags, dir_fd=at)
            os.close(above)
        return os.open(parts[-1], flags, dir_fd=at)
    finally:
        os.close(at)


def exists(name: str, folder: int) -> bool:
    """Whether a name is taken, be it by a dangling link."""
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


@lru_cache(maxsize=512)  # a restore reads many ranges of few objects
def split_name(name: str) -> tuple[str, ...]:
    """The parts of an object's name.

    >>> split_name("objects/c00000012/r0.hf")
    ('objects', 'c00000012', 'r0.hf')

    Raises:
        InvalidRequestError: not a name, or longer than any of ours.
    """
    parts = tuple(check_name(name).split("/"))
    if len(parts) > FOLDERS_MAX + 1 or len(name) > _NAME_LENGTH_MAX:
        raise InvalidRequestError(
            "an object's name is too long",
            name=f"{name[:80]}...",
            length=len(name),
            parts=len(parts),
            todo=f"use {_NAME_LENGTH_MAX} characters and {FOLDERS_MAX} folders at most",
        )
    return parts


class Reporting:
    """Turns errors of the operating system into ours; a class, since a generator is slower."""

    __slots__ = ("_doing", "_path", "_url")

    def __init__(self, doing: str, path: str, url: str) -> None:
        self._doing = doing
        self._path = path
        self._url = url

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, OSError) and not isinstance(error, UnavailableError):
            raise as_ours(error, self._doing, self._path, self._url) from error


def as_ours(error: OSError, doing: str, path: str, url: str) -> HoldfastError:
    """What an error of the operating system means to the caller."""
    if isinstance(error, NotAFolderError):
        return InvalidRequestError(
            f"cannot {doing}: a part of the path is not what it should be",
            path=path,
            url=url,
            part=error.filename,
            todo="put a folder there: links below the url are not followed, a file holds no others",
        )
    return storage_error(error, doing=doing, path=path, url=url)
