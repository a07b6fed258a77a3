"""Who draws batches: the training loop itself, or a pipeline, generator or thread in front of it.

A loop that draws its own batches is still running (on the call stack) when it counts its step.
Whatever draws for it is not: a pipeline's or a generator's frame has returned by then.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

_PIPELINES = "torchrec.distributed.train_pipeline"


class DrawnBy:
    """Remembers the thread, and while that is of interest the frame, that drew last."""

    def __init__(self) -> None:
        self._frame: FrameType | None = None
        self._thread: int | None = None
        self._is_piped = False

    def note(self, frame: FrameType, *, with_frame: bool) -> None:
        """``frame`` has drawn a batch, in this thread."""
        self._thread = threading.get_ident()
        if with_frame:
            self._frame = frame
            self._is_piped = self._is_piped or _is_pipeline(frame)

    def is_thread(self, thread: int) -> bool:
        """Whether this thread drew last."""
        return self._thread == thread

    def is_other_thread(self) -> bool:
        """Whether another thread than the calling one drew last."""
        return self._thread not in (None, threading.get_ident())

    def is_apart(self) -> bool:
        """Whether something in front of the running loop drew last."""
        return self._is_piped or not _is_running(self._frame)

    def forget_frame(self) -> None:
        """Let go of the frame: it keeps all of its variables alive."""
        self._frame = None


def _is_running(frame: FrameType | None) -> bool:
    """Whether a frame is one of those that called this function."""
    here: FrameType | None = sys._getframe(1)
    while here is not None:
        if here is frame:
            return True
        here = here.f_back
    return False


def _is_pipeline(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(_PIPELINES):
            return True
        frame = frame.f_back
    return False
