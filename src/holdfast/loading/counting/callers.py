"""Who draws batches: the training loop itself, or a pipeline, generator or thread in front of it.

A loop that draws its own batches is still running (on the call stack) when it counts its step.
Whatever draws for it is not: a pipeline's or a generator's frame has returned by then. A progress
bar is a generator that never reads ahead, so it counts as the loop that runs it.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Mapping
from dis import opname
from types import FrameType
from typing import Any

_PIPELINES = "torchrec.distributed.train_pipeline"
_PROGRESS_BARS = ("tqdm", "rich")  # packages
_DEPTH_MAX = 4


class DrawnBy:
    """Remembers the thread that drew last; on request also its frame, and the batches it drew."""

    def __init__(self) -> None:
        self._frame: FrameType | None = None
        self._thread: int | None = None
        self._is_piped = False
        self._is_for = False
        self._drawn: list[weakref.ref[Any] | None] = []  # None: nothing that can be referred to

    def note(self, frame: FrameType, batch: Any, *, is_watched: bool) -> None:
        """``frame`` has drawn a batch, in this thread."""
        self._thread = threading.get_ident()
        if is_watched:
            self._frame = _behind_progress_bars(frame)
            self._is_for = _is_for_statement(self._frame)
            self._is_piped = self._is_piped or _is_pipeline(frame)
            self._drawn.append(_refer(batch))

    def alive(self, *, are_kept: bool) -> int | None:
        """How many of the batches drawn are still in memory; None where that cannot be told.

        Where it cannot, because batches are numbers or the loader itself keeps them, a ``for``
        statement over the loader is taken to use up what it draws.
        """
        if are_kept or any(drawn is None for drawn in self._drawn):
            return 1 if self._is_for else None
        return sum(drawn() is not None for drawn in self._drawn if drawn is not None)

    def is_thread(self, thread: int) -> bool:
        """Whether this thread drew last."""
        return self._thread == thread

    def is_other_thread(self) -> bool:
        """Whether another thread than the calling one drew last."""
        return self._thread not in (None, threading.get_ident())

    def is_apart(self) -> bool:
        """Whether something in front of the running loop drew last."""
        return self._is_piped or not _is_running(self._frame)

    def forget(self) -> None:
        """Let go of the frame, which keeps all of its variables alive, and of the batches."""
        self._frame = None
        self._drawn.clear()


def _refer(batch: Any, depth: int = 0) -> weakref.ref[Any] | None:
    """A weak reference to a batch, or to a part of one that is a plain container."""
    if isinstance(batch, list | tuple | Mapping):
        parts = batch.values() if isinstance(batch, Mapping) else batch
        found = (_refer(part, depth + 1) for part in parts if depth < _DEPTH_MAX)
        return next((part for part in found if part is not None), None)
    try:
        return weakref.ref(batch)
    except TypeError:
        return None


def _behind_progress_bars(frame: FrameType) -> FrameType:
    while frame.f_back is not None and _package(frame) in _PROGRESS_BARS:
        frame = frame.f_back
    return frame


def _is_for_statement(frame: FrameType) -> bool:
    """Whether a frame stands at the head of a ``for`` loop, rather than in a call of ``next``."""
    return opname[frame.f_code.co_code[frame.f_lasti]] == "FOR_ITER"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def call_site(frame: FrameType) -> tuple[object, ...]:
    """Where in the program a frame stands: equal for every turn of the same loop."""
    found: list[object] = []
    here: FrameType | None = frame
    while here is not None:
        found += (here.f_code, here.f_lasti)
        here = here.f_back
    return tuple(found)


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
