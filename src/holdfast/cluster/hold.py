"""A freeze that is kept for a while, since whoever asks for a lost row will soon ask for the next.

    using -> frozen already? -> fetch, decode -> using -> ... -> nobody for a while -> thaw

While a server comes back, nearly every batch wants some rows that it lacks. To freeze and thaw all
servers for each of them costs twice as much as what is fetched in between.

Invariants:
- All ranges are frozen while the block runs, at members of one epoch.
- A freeze ends soon after the last use, and after a time however often it is used: differences that
  wait must leave now and then.

Not here: what a freeze is (freezer.py), what is fetched (recovery.py).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from holdfast.cluster.freezer import Freezer
from holdfast.cluster.view import View
from holdfast.errors import ConflictError

_MOST_S = 0.5
_IDLE_S = 0.25


class Hold:
    """Freezes all ranges when first needed; used by one thread at a time, others wait."""

    def __init__(
        self, freezer: Freezer, ranges: int, *, most_s: float = _MOST_S, idle_s: float = _IDLE_S
    ) -> None:
        self._freezer, self._ranges = freezer, range(ranges)
        self._most_s, self._idle_s = most_s, idle_s
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._watcher: threading.Thread | None = None
        self._freeze: contextlib.ExitStack | None = None
        self._ticket = ""
        self._epoch = -1
        self._began = self._used = 0.0

    @contextlib.contextmanager
    def using(self, view: View) -> Iterator[str]:
        """All ranges are frozen; gives the ticket.

        Raises:
            ConflictError: a peer is gone, or knows of other members.
        """
        with self._lock:
            if self._is_closed.is_set():
                raise ConflictError("this server is closing")
            if view.epoch != self._epoch:
                self._end()  # its members have thawed when they heard of the next epoch
            try:
                if self._freeze is None:
                    self._begin(view)
                yield self._ticket
            except BaseException:
                self._end()
                raise
            self._used = time.monotonic()

    def close(self) -> None:
        """Thaw, and freeze no more."""
        self._is_closed.set()
        with self._lock:
            self._end()
            watcher = self._watcher
        if watcher is not None:
            watcher.join()

    def _begin(self, view: View) -> None:
        with contextlib.ExitStack() as made:
            self._ticket, _ = made.enter_context(self._freezer.frozen(view, self._ranges))
            self._freeze = freeze = made.pop_all()
        self._epoch = view.epoch
        self._began = self._used = time.monotonic()
        self._watcher = threading.Thread(
            target=self._watch, args=(freeze,), name="holdfast-hold", daemon=True
        )
        self._watcher.start()

    def _end(self) -> None:
        freeze, self._freeze = self._freeze, None
        if freeze is not None:
            freeze.close()

    def _watch(self, freeze: contextlib.ExitStack) -> None:
        """Thaw when it is time."""
        while True:
            with self._lock:
                if self._freeze is not freeze:
                    return
                ends_at = min(self._began + self._most_s, self._used + self._idle_s)
                left_s = ends_at - time.monotonic()
                if left_s <= 0:
                    return self._end()
            self._is_closed.wait(left_s)
