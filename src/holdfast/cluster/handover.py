"""Memory that two processes of one machine share, so that a slab need not travel.

    asker: makes memory, says where -> giver: opens and checks it, fills it -> answers how much

The memory is an anonymous file of the kernel, which its maker names by process and descriptor:
``/proc/PID/fd/N``. It has no path, so nothing is left behind however either of them ends, and there
is no path that anybody could choose. Its label is random; a process elsewhere, where the same
numbers are something else, finds another label or nothing, and answers the usual way.

Invariants:
- Nothing is opened before its label is seen to be the one that was told, nothing is mapped that is
  not this user's, not of the size that was told, or not sealed against becoming shorter: writing
  behind an end would kill a server.
- Memory is used by one asker and one giver; what it holds counts once the giver has answered.

Not here: what is in it (slab.py), when it is made and given up (sweep.py).
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import stat
import sys
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from holdfast.errors import InvalidRequestError, UnavailableError

BYTES_MAX = 1 << 30
_LABEL = re.compile(r"holdfast-[0-9a-f]{32}")


class Memory:
    """Shared memory as one process sees it."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._bytes_N = np.frombuffer(mapped, np.uint8)

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self._bytes_N)

    def rows(self, at: int, rows: int, width: int) -> np.ndarray | None:
        """Rows of floats from a byte on; None if there is no room for them."""
        size = 4 * rows * width
        if at < 0 or at % 64 or at + size > self.size:
            return None
        return self._bytes_N[at : at + size].view(np.float32).reshape(rows, width)


class Offer(Memory):
    """Shared memory that was made here, for one other process to open."""

    def __init__(self, size: int) -> None:
        """Raises UnavailableError where there is no such memory."""
        if sys.platform != "linux":
            raise UnavailableError("processes share no memory here", platform=sys.platform)
        import fcntl  # only there

        self._label = f"holdfast-{secrets.token_hex(16)}"
        try:
            self._file = os.memfd_create(self._label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.posix_fallocate(self._file, 0, size)  # now, rather than a signal later
                fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _seals())
                super().__init__(mmap.mmap(self._file, size))
            except BaseException:
                os.close(self._file)
                raise
        except OSError as error:
            raise UnavailableError("no memory to share", bytes=size, found=str(error)) from error

    def to_json(self) -> dict[str, Any]:
        """Where the other process finds it, until ``withdraw``."""
        return {
            "pid": os.getpid(),
            "file": self._file,
            "label": self._label,
            "bytes": self.size,
        }

    def withdraw(self) -> None:
        """Nobody else can open it from now on; who has it keeps it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Handovers:
    """The memory that others offered to this process, by who did; safe between threads."""

    def __init__(self) -> None:
        self._open: dict[str, Memory] = {}
        self._lock = threading.Lock()

    def accept(self, caller: str, offer: Mapping[str, Any]) -> bool:
        """Open what a caller offers, in the place of what it offered before; whether it is here.

        Raises:
            InvalidRequestError: what was offered would not be safe to use.
        """
        memory = _open(offer) if offer else None
        with self._lock:
            self._open.pop(caller, None)
            if memory is not None:
                self._open[caller] = memory
        return memory is not None

    def find(self, caller: str) -> Memory | None:
        """What a caller offered last."""
        with self._lock:
            return self._open.get(caller)

    def clear(self) -> None:
        """Give up everything."""
        with self._lock:
            self._open.clear()


def _open(offer: Mapping[str, Any]) -> Memory | None:
    """What is offered, or None if it is not on this machine."""
    label = offer["label"]
    numbers = [offer[name] for name in ("pid", "file", "bytes")]
    if not all(type(number) is int and 0 <= number < 1 << 31 for number in numbers):
        raise InvalidRequestError("shared memory is told by whole numbers", offer=repr(offer))
    if type(label) is not str or not _LABEL.fullmatch(label):
        raise InvalidRequestError("not the label of shared memory", label=repr(label)[:80])
    pid, file, size = numbers
    if not 0 < size <= BYTES_MAX:
        raise InvalidRequestError("shared memory of this size", bytes=size, most=BYTES_MAX)
    place = f"/proc/{pid}/fd/{file}"
    if sys.platform != "linux" or not _has_label(place, label):
        return None
    import fcntl  # only there

    try:
        opened = os.open(place, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
    try:
        found = os.fstat(opened)
        is_ours = (
            _has_label(f"/proc/self/fd/{opened}", label)
            and stat.S_ISREG(found.st_mode)
            and found.st_uid == os.geteuid()
            and found.st_size == size
            and fcntl.fcntl(opened, fcntl.F_GET_SEALS) & _seals() == _seals()
        )
        if not is_ours:
            raise InvalidRequestError("not shared memory as it should be", label=label, bytes=size)
        return Memory(mmap.mmap(opened, size))
    except OSError:
        return None
    finally:
        os.close(opened)


def _has_label(place: str, label: str) -> bool:
    try:
        return os.readlink(place) == f"/memfd:{label} (deleted)"  # noqa: PTH115
    except OSError:
        return False


def _seals() -> int:
    """Its size stays as it is, and nobody can change that."""
    import fcntl

    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
