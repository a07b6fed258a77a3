"""Messages between the background threads of many ranks, over a key-value store.

A message is put under a key and taken once it is there. Nobody waits inside the store: it is asked
again and again, so that its connection is free for others, and so that whoever waits can see who
has gone silent.

Invariants:
- A message is seen whole or not at all, however large.
- Whoever waits for somebody silent for ``timeout_s`` gets an error that names them.

Not here: who tells what to whom (rank_commit.py), exchanges while training stands still (ranks.py).
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from holdfast.errors import UnavailableError

_PIECE_BYTES = 1 << 20  # stores refuse values of more than a few megabytes
_BEAT_S = 0.5
_POLL_S = 0.02
_POLL_OF_ONE_S = 0.001

T = TypeVar("T")


class Mailbox:
    """A store, used for messages."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def _ask(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except (RuntimeError, OSError) as error:  # of several kinds, by the version of torch
            raise UnavailableError(
                "the store that ranks talk through does not answer",
                error=str(error).splitlines()[0][:200] if str(error) else repr(error),
            ) from error

    def put(self, key: str, data: bytes) -> None:
        """Leave a message; nobody has left one under this key."""
        pieces = [data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES)]
        for index, piece in enumerate(pieces):
            self._ask(functools.partial(self._store.set, f"{key}/{index}", piece))
        self._ask(lambda: self._store.set(key, str(len(pieces))))

    def has(self, key: str) -> bool:
        """Whether there is a message."""
        return bool(self._ask(lambda: self._store.check([key])))

    def get(self, key: str) -> bytes | None:
        """A message, if it is there."""
        if not self.has(key):
            return None
        count = int(self._ask(lambda: self._store.get(key)))
        return b"".join(
            self._ask(functools.partial(self._store.get, f"{key}/{i}")) for i in range(count)
        )

    def delete(self, key: str) -> None:
        """Forget a message, if there is one."""
        if not self.has(key):
            return
        count = int(self._ask(lambda: self._store.get(key)))
        for name in (key, *(f"{key}/{i}" for i in range(count))):
            self._ask(functools.partial(self._store.delete_key, name))

    @contextmanager
    def beating(self, key: str) -> Iterator[None]:
        """Show that this process lives, as long as the block lasts."""
        over = threading.Event()

        def beat() -> None:
            count = 0
            while not over.is_set():
                count += 1
                try:
                    self._ask(functools.partial(self._store.set, key, str(count)))
                except UnavailableError:
                    return  # whoever listens will notice
                over.wait(_BEAT_S)

        thread = threading.Thread(target=beat, name="holdfast-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def end_beat(self, key: str) -> None:
        """Forget a sign of life, if there is one."""
        if self.has(key):
            self._ask(lambda: self._store.delete_key(key))

    def beat_of(self, key: str) -> bytes | None:
        """The last sign of life under a key."""
        if not self.has(key):
            return None
        beat: bytes = self._ask(lambda: self._store.get(key))
        return beat


class Watch:
    """Notices who of some has gone silent."""

    def __init__(
        self, mailbox: Mailbox, beats: Iterable[tuple[int, str]], *, timeout_s: float
    ) -> None:
        """``beats``: ranks, and where they show that they live."""
        self._mailbox = mailbox
        self._keys = dict(beats)
        self._timeout_s = timeout_s
        now = time.monotonic()
        self._seen: dict[int, tuple[float, bytes | None]] = dict.fromkeys(self._keys, (now, None))
        self._looked = now

    def check(self, waiting: Iterable[int], *, what: str) -> None:
        """Look whether those that are waited for live; sleeps for a moment.

        Raises:
            UnavailableError: names the ranks that are silent.
        """
        ranks = list(waiting)
        time.sleep(max(_POLL_S, _POLL_OF_ONE_S * len(ranks)))
        now = time.monotonic()
        if now - self._looked < _BEAT_S:
            return
        self._looked = now
        silent = []
        for rank in ranks:
            seen, last = self._seen[rank]
            beat = self._mailbox.beat_of(self._keys[rank])
            if beat is not None and beat != last:
                self._seen[rank] = (now, beat)
            elif now - seen > self._timeout_s:
                silent.append(rank)
        if silent:
            raise UnavailableError(
                f"ranks gave no sign of life while {what}",
                ranks=silent,
                timeout_s=self._timeout_s,
                todo="restart them; the checkpoints before are whole",
            )
