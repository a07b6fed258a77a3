"""Memory for a shard that is there before it is needed: a spare takes a lost server's place in it.

The first touch of memory costs more than decoding what it will hold: the kernel finds and clears a
page, and on a virtual machine its host does too. A spare has time for that; a replacement has not.

Invariants:
- What is handed out is all zeros, and nobody touches it any more.
- A spare takes no more than half of the memory that is free: a shard that needs more is made
  without, as it would be on a machine with no spare.

Not here: what is in it (arenashard.py), who is a spare (members.py).
"""

from __future__ import annotations

import math
import threading

import numpy as np

from holdfast.checkpoint.saving.staging import free_bytes
from holdfast.cluster.spec import ClusterSpec

_PAGE = 4096
_PIECE = 16 << 20  # touched at a time: whoever needs the memory waits for one
_ALIGNED = 64


class Reserve:
    """Zeros to take floats from; what is not there any more, or never was, is made."""

    def __init__(self, size: int = 0) -> None:
        self._bytes_N = np.zeros(size, np.uint8)
        self._taken = 0
        self._lock = threading.Lock()

    @property
    def left(self) -> int:
        """Bytes that are not taken."""
        return len(self._bytes_N) - self._taken

    def touch(self) -> None:
        """Have the kernel find all of it; ends when somebody takes of it."""
        for start in range(0, len(self._bytes_N), _PIECE):
            with self._lock:
                if self._taken:
                    return
                self._bytes_N[start : start + _PIECE : _PAGE] = 0

    def zeros(self, rows: int, width: int) -> np.ndarray:
        """Rows of floats, all zero."""
        size = 4 * rows * width
        with self._lock:
            if not 0 < size <= self.left:
                return np.zeros((rows, width), np.float32)
            start, self._taken = self._taken, self._taken + _aligned(size)
        return self._bytes_N[start : start + size].view(np.float32).reshape(rows, width)


def reserve_for(spec: ClusterSpec) -> Reserve:
    """Enough for the rows and parities of any server, and for what waits there; or nothing where
    memory is scarce."""
    size = max(shard_bytes(spec, server) for server in range(spec.servers))
    return Reserve(size if size <= free_bytes() // 2 else 0)


def shard_bytes(spec: ClusterSpec, server: int) -> int:
    """Rows and parities of a server, and what waits there."""
    size = 0
    for arena in spec.arenas:
        rows = arena.placement.data_rows(server, arena.rows)
        counts = [rows, arena.waiting_rows(rows, spec.waiting_rows)]
        if arena.code != "none":
            counts.append(arena.placement.parity_rows(server, arena.rows))
        size += sum(_aligned(4 * rows * arena.width) for rows in counts)
    return size


def _aligned(size: int) -> int:
    return math.ceil(size / _ALIGNED) * _ALIGNED
