"""Unix sockets for processes of one user on one machine, in a folder that only this user can enter.

    listener: host:port, token -> name -> /tmp/holdfast-UID/NAME   bound by the transport library
    stream:   host:port, token -> name -> connect there if it exists, else to the gate (gate.py)

The file system authenticates a client: only this user and root can enter the folder. This protects
the transport library, which receives a request of any size before it can refuse it.

Invariants:
- This user owns the folder, and its mode is 0700. If such a folder cannot be had, the listener
  binds its socket in a new folder with a random name, and every client uses the gate.
- The name of a socket depends on address and token. It does not reveal the token, and a process
  without the token cannot compute it.

Not here: the other way in (gate.py), what is said (wire.py).
"""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

# Not TMPDIR: all processes of a user must find the same folder, and the path of a Unix socket may
# have 107 bytes at most.
_TMP = Path("/tmp")
_FOLDER = _TMP / f"holdfast-{os.geteuid()}"
_BOUND = Path("/proc/net/unix")  # the sockets that are bound, of this network namespace
_NAME_BYTES = 16
_LEFT_S = 60.0  # a younger socket may be bound by a process that does not listen yet


def find_socket(address: str, token: str) -> Path | None:
    """The socket of the listener at an address; None if this machine has none."""
    path = _FOLDER / _name(address, token)
    return path if _is_private(_FOLDER) and path.is_socket() else None


def choose_socket(address: str, token: str) -> Path:
    """A free path where the listener at an address binds its socket."""
    folder = _FOLDER
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(folder):
        folder = Path(tempfile.mkdtemp(prefix="holdfast-", dir=_TMP))
    else:
        _remove_left(folder)
    path = folder / _name(address, token)
    path.unlink(missing_ok=True)  # left by a process that had the same port before
    return path


def remove_socket(path: Path) -> None:
    """Remove a closed listener's socket, and its folder if the folder was made for it alone."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
        if path.parent != _FOLDER:
            path.parent.rmdir()


def _name(address: str, token: str) -> str:
    key = hashlib.blake2b(token.encode(), digest_size=32).digest()
    return hashlib.blake2b(address.encode(), key=key, digest_size=_NAME_BYTES).hexdigest()


def _is_private(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    is_alone = stat.S_IMODE(found.st_mode) & 0o077 == 0
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and is_alone


def _remove_left(folder: Path) -> None:
    """Remove the sockets of processes that were killed."""
    old = time.time() - _LEFT_S
    with suppress(OSError):
        living = set(_BOUND.read_text().split()) if _BOUND.exists() else set()
        for path in folder.iterdir():
            if str(path) not in living and path.lstat().st_mtime < old and _is_left(path):
                path.unlink(missing_ok=True)


def _is_left(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as asked:
        asked.setblocking(False)
        try:
            asked.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
    return False
