"""The staging buffer: host memory between the snapshot and the background writer, bounded.

The snapshot acquires buffers and fills them while training stands still; the writer releases each
when its rows are stored. Memory is kept between checkpoints, because touching fresh memory costs
more than the copy itself, and pinning it still more.

Invariants:
- No more than ``bytes_max`` are out at a time, except that one buffer is always granted.
- ``acquire`` never waits for a writer that failed: it raises what the writer raised.

Not here: copies on a GPU, on their way to these buffers (device_staging.py). No torch: servers of a
cluster stage rows too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Buffer = npt.NDArray[np.uint8]

Make = Callable[[int], Buffer]

BUFFER_BYTES = 8 << 20


def free_bytes() -> int:
    """Memory of this machine that nobody uses now."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def default_bytes_max(full_bytes: int, tables: int) -> int:
    """Room for a whole base, but no more than half of the memory that is free now.

    The last buffer of each table may be filled only in part.
    """
    room = min(full_bytes + tables * BUFFER_BYTES, free_bytes() // 2)
    return max(2 * BUFFER_BYTES, room)


def ordinary(size: int) -> Buffer:
    """A new buffer of ordinary memory."""
    return np.empty(size, np.uint8)


class StagingPool:
    """Hands out buffers and takes them back."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._free: list[tuple[Make, Buffer]] = []
        self._makers: dict[int, Make] = {}  # of the buffers that are out, by their identity
        self._out = 0
        self._peak = 0
        self._failure: BaseException | None = None
        self._on_starved: Callable[[], None] = lambda: None
        self._changed = threading.Condition()

    def begin(self, on_starved: Callable[[], None]) -> None:
        """Start a snapshot, all buffers being back; ``on_starved`` hears when it has to wait."""
        with self._changed:
            self._failure = None
            self._on_starved = on_starved
            self._out = self._peak = 0
            self._makers.clear()

    def acquire(self, size: int, make: Make = ordinary) -> Buffer:
        """A buffer of at least ``size`` bytes; waits while the pool is exhausted.

        ``make``: makes one where there is none, of the kind of memory that is wanted.
        """
        # One size for all but the small ends of tables, so that buffers fit the next snapshot too.
        size = BUFFER_BYTES if BUFFER_BYTES // 4 < size <= BUFFER_BYTES else size
        with self._changed:
            while self._failure is None and self._out and self._out + size > self.bytes_max:
                self._on_starved()
                self._changed.wait()
            if self._failure is not None:
                raise self._failure
            self._out += size
            self._peak = max(self._peak, self._out)
            for index, (maker, buffer) in enumerate(self._free):
                if buffer.nbytes == size and maker == make:
                    del self._free[index]
                    self._makers[id(buffer)] = make
                    return buffer
        buffer = make(size)
        with self._changed:
            self._makers[id(buffer)] = make
        return buffer

    def release(self, buffer: Buffer) -> None:
        """Take a buffer back."""
        with self._changed:
            self._out -= buffer.nbytes
            make = self._makers.pop(id(buffer), ordinary)
            if buffer.nbytes == BUFFER_BYTES:
                self._free.append((make, buffer))
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Wake a waiting snapshot with the writer's error."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def trim(self) -> None:
        """Keep what the next snapshot can be expected to need: twice the last, as deltas grow."""
        with self._changed:
            del self._free[2 * self._peak // BUFFER_BYTES + 1 :]

    @property
    def bytes_held(self) -> int:
        """Memory in use and kept for the next snapshot."""
        with self._changed:
            return self._out + sum(buffer.nbytes for _, buffer in self._free)
