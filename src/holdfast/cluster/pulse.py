"""Is a process still running? Asked again and again, because a hung one breaks no connection.

A death is seen at once by whoever waits for it (engine.py) or talks to it (wire.py); a process that
hangs or was stopped is seen here, by its silence. Listeners answer a pulse themselves, on a stream
of its own, so that a process that is merely busy is not taken for dead: it only has to run.

Not here: what to do about a silent process (coordinator.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from holdfast.cluster.message import Message
from holdfast.cluster.wire import PULSE, Stream
from holdfast.errors import HoldfastError


class Pulse:
    """Watches one listener from a thread of its own; reports silence once, and ends.

    ``on_silent`` is called in that thread with the reason.
    """

    def __init__(
        self,
        address: str,
        token: str,
        *,
        every_s: float = 0.1,
        deadline_s: float = 0.5,
        on_silent: Callable[[str], None],
    ) -> None:
        self.address = address
        self._token, self._every_s, self._deadline_s = token, every_s, deadline_s
        self._on_silent = on_silent
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name=f"holdfast-pulse-{address}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop watching; nothing is reported afterwards (it may also be called by on_silent)."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Pulse:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _watch(self) -> None:
        while not self._ended.is_set():
            asked_at = time.monotonic()
            try:
                with Stream(
                    self.address,
                    token=self._token,
                    name=PULSE,
                    epoch=None,
                    deadline_s=self._deadline_s,
                ) as stream:
                    while True:
                        asked_at = time.monotonic()
                        stream.ask(Message(PULSE))
                        if self._ended.wait(self._every_s):
                            return
            except HoldfastError as error:
                # When we ourselves were stopped meanwhile, the silence was ours: ask again.
                was_ours = time.monotonic() - asked_at > 3 * self._deadline_s
                if was_ours or self._ended.is_set():
                    continue
                self._ended.set()
                self._on_silent(str(error))
