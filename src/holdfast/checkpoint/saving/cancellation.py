"""Whether a save that is under way is to give up, because a newer one takes its place."""

from __future__ import annotations

import threading

from holdfast.errors import SaveCancelledError


class Cancellation:
    """Asked for by one thread, and noticed by the one that stores."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._asked = threading.Event()

    @property
    def is_asked(self) -> bool:
        """Whether the save is to give up."""
        return self._asked.is_set()

    def ask(self) -> None:
        """Have the save give up, unless its commit has begun."""
        self._asked.set()

    def check(self) -> None:
        """Give up if asked to.

        Raises:
            SaveCancelledError: it was.
        """
        if self.is_asked:
            raise SaveCancelledError("a newer save took its place", step=self._step)
