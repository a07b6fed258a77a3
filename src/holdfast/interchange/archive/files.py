"""Files of other programs: found below a folder without following links, read without mapping.

Invariants:
- Every part of a path below its folder is opened without following a link. What is no regular file
  (a pipe, a device) is not opened for reading at all.
- A file that is cut short while it is read is an error, not a crash: no byte of it is mapped.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from holdfast.errors import CorruptDataError, HoldfastError, NotFoundError, UnavailableError

Data = bytes  # where ``bytes`` is a number of them

_IO_BYTES_MAX = 1 << 30  # Linux moves at most 2 GB minus one page a call
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Without O_NONBLOCK a pipe would make us wait for ever.
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_SHOWN = 120  # characters of a name that are shown


@dataclass(frozen=True, slots=True)
class InputFile:
    """A regular file, and its length when it was found."""

    folder: Path
    parts: tuple[str, ...]
    bytes: int

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.folder.joinpath(*self.parts)

    def read_into(self, buffer: npt.NDArray[np.uint8], offset: int) -> None:
        """Fill a buffer from ``offset`` on.

        Raises:
            CorruptDataError: the file ends before that.
            NotFoundError, UnavailableError: it cannot be read.
        """
        view = buffer.data
        with _opened(self.folder, self.parts) as fd, _reporting(self.path):
            while view.nbytes:
                count = os.preadv(fd, [view[:_IO_BYTES_MAX]], offset)
                if count == 0:
                    raise CorruptDataError("the file is cut off", path=shown(self.path), at=offset)
                view = view[count:]
                offset += count


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of a file."""

    file: InputFile
    offset: int
    bytes: int

    @property
    def path(self) -> Path:
        """Where the file is."""
        return self.file.path

    def part(self, offset: int, bytes_: int) -> Extent:
        """Some of its bytes.

        Raises:
            CorruptDataError: they are not all inside.
        """
        if offset < 0 or bytes_ < 0 or offset + bytes_ > self.bytes:
            raise CorruptDataError(
                "bytes lie outside of what they belong to", path=shown(self.path), at=offset,
                bytes=bytes_, room=self.bytes,
            )  # fmt: skip
        return Extent(self.file, self.offset + offset, bytes_)

    def read(self) -> Data:
        """The bytes themselves; for that moment they take twice their size."""
        buffer = np.empty(self.bytes, np.uint8)
        self.file.read_into(buffer, self.offset)
        return buffer.tobytes()


def whole(file: InputFile) -> Extent:
    """All bytes of a file."""
    return Extent(file, 0, file.bytes)


def find_file(path: Path) -> InputFile:
    """The file that a user names; a link is followed, since the user named it.

    Raises:
        NotFoundError: there is no regular file.
        UnavailableError: it cannot be looked at.
    """
    with _reporting(path):
        real = path.resolve(strict=True)
    return find_inside(real.parent, (real.name,))


def find_inside(folder: Path, parts: Sequence[str]) -> InputFile:
    """A file below a folder, by names that may come from a stranger.

    Raises:
        CorruptDataError: the names lead outside of the folder, or through a link.
        NotFoundError: there is no regular file.
        UnavailableError: it cannot be looked at.
    """
    for part in parts:
        if part in ("", ".", "..") or "/" in part or "\0" in part:
            raise CorruptDataError("a file lies outside the folder", file="/".join(parts)[:_SHOWN])
    if not parts:
        raise NotFoundError("no such file", path=shown(folder))
    with _opened(folder, parts) as fd, _reporting(folder):
        return InputFile(folder, tuple(parts), os.fstat(fd).st_size)


def folder_bytes(folder: Path) -> int:
    """The length of all regular files below a folder.

    Raises:
        UnavailableError: a folder cannot be looked at.
    """

    def fail(error: OSError) -> None:
        raise error

    total = 0
    with _reporting(folder):
        for at, _, names, fd in os.fwalk(folder, onerror=fail, follow_symlinks=False):
            del at
            for name in names:
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def shown(path: Path) -> str:
    """A path for a message.

    >>> shown(Path("a/b.pt"))
    'a/b.pt'
    """
    text = str(path)
    return text if len(text) <= 4 * _SHOWN else f"{text[: 4 * _SHOWN]}..."


@contextmanager
def _opened(folder: Path, parts: Sequence[str]) -> Iterator[int]:
    """A readable descriptor of a regular file."""
    path = folder.joinpath(*parts)
    descriptors: list[int] = []
    try:
        with _reporting(path):
            descriptors.append(os.open(folder, _FOLDER))
            for part in parts[:-1]:
                descriptors.append(os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptors[-1]))
            descriptors.append(os.open(parts[-1], _FILE, dir_fd=descriptors[-1]))
            if not stat.S_ISREG(os.fstat(descriptors[-1]).st_mode):
                raise NotFoundError("no regular file", path=shown(path))
        yield descriptors[-1]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@contextmanager
def _reporting(path: Path) -> Iterator[None]:
    """Turn errors of the operating system into ours."""
    try:
        yield
    except HoldfastError:
        raise  # ours, although some are an OSError too
    except ValueError as error:  # a name that no file can have
        raise NotFoundError("no such file", path=shown(path)) from error
    except (OSError, RuntimeError) as error:  # the last by resolve(), for links in a circle
        code = error.errno if isinstance(error, OSError) else errno.ELOOP
        if code == errno.ELOOP:
            raise CorruptDataError(
                "a link is where a file should be", path=shown(path),
                todo="copy what it leads to: cp -rL",
            ) from error  # fmt: skip
        if code in (errno.ENOENT, errno.ENOTDIR, errno.ENXIO, errno.ENAMETOOLONG):
            raise NotFoundError("no such file", path=shown(path)) from error
        raise UnavailableError(
            "a file cannot be read", path=shown(path), cause=os.strerror(code or errno.EIO)
        ) from error
