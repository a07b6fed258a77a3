"""When extraction runs: in the background, after commits, never in the way of a snapshot.

Invariants:
- At most one round runs at a time; one that lags behind takes all waiting increments at once.
- While a snapshot is taken, a round stands still (at the next chunk); while a step is restored
  there is none.
- A round that fails costs nothing but space and speed: it is told as an event and tried again after
  the next save.

Not here: what a round does (extract.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator

from holdfast import events
from holdfast.checkpoint.grid.chunk_cache import PartCache
from holdfast.checkpoint.grid.decide import Extract
from holdfast.checkpoint.grid.extract import Round
from holdfast.checkpoint.grid.round_plan import plan_round
from holdfast.checkpoint.store.writer import RunWriter


class _GivenUpError(Exception):
    """The round is not wanted now."""


class Extractor:
    """Keeps the grids of a run worked off; without rules it does nothing."""

    def __init__(self, writer: RunWriter | None, rules: Extract | None) -> None:
        """Without a writer there are no rules: the process does not commit."""
        assert writer is not None or rules is None
        self._given = writer
        self._rules = rules
        self._cache = PartCache(rules.memory_bytes if rules is not None else 0)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_waking = False
        self._holds = 0
        self._may_move = threading.Event()
        self._may_move.set()

    @property
    def _writer(self) -> RunWriter:
        assert self._given is not None
        return self._given

    def wake(self) -> None:
        """Something was committed: see whether there is work."""
        if self._rules is None:
            return
        with self._lock:
            self._is_waking = True
            if self._thread is None and self._holds == 0:
                # Not a daemon: a process that ends leaves a grid that is worked off.
                self._thread = threading.Thread(target=self._run, name="holdfast-extract")
                try:
                    self._thread.start()
                except RuntimeError:  # the interpreter is ending; the next process takes over
                    self._thread = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stand still: the processor belongs to the snapshot."""
        self._may_move.clear()
        try:
            yield
        finally:
            self._may_move.set()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Let go of everything: what is stored will not change."""
        with self._lock:
            self._holds += 1
        try:
            self.wait()
            yield
        finally:
            with self._lock:
                self._holds -= 1
                is_waking = self._is_waking
            if is_waking:
                self.wake()

    def wait(self) -> None:
        """Wait until no round runs."""
        while (thread := self._thread) is not None:
            thread.join()

    def _pause(self) -> None:
        self._may_move.wait()
        if self._holds:
            raise _GivenUpError

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._is_waking or self._holds:
                    self._thread = None
                    return
                self._is_waking = False
            try:
                self._work_off()
            except _GivenUpError:
                self._is_waking = True
            except BaseException as error:  # a thread's edge: saving goes on without a grid
                text = str(error) or repr(error)
                self._writer.log.emit(events.ExtractionFailed(error=text))

    def _work_off(self) -> None:
        assert self._rules is not None
        while (plan := plan_round(self._writer.catalog)) is not None:
            stats = Round(
                self._writer, plan, self._rules, cache=self._cache, pause=self._pause
            ).run()
            if stats is not None:
                self._writer.log.emit(events.Extracted(**dataclasses.asdict(stats)))
