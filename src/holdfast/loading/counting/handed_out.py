"""The batches that a reader has handed out: which was trained last, which still wait.

    loader -> handed out (maybe held by a pipeline or a thread) -> trained

A checkpoint is taken behind the last trained batch. For every batch that waits, the log keeps what
is needed to read it once more after a resume.

Not here: how many batches a step trains (trained_count.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.loading.counting.trained_count import TrainedCount


@dataclass(slots=True)
class Epoch:
    """One pass over the data that is, or may be, trained."""

    number: int
    start: Mapping[str, Any] | None = None  # random generators just before it began
    is_over: bool = False
    has_trained: bool = False


@dataclass(slots=True)
class Batch:
    """A batch that was handed out, and what a save needs to place a reader behind or before it."""

    epoch: Epoch
    index: int  # in its epoch, from 1; 0 stands for the epoch's beginning
    ordinal: int = 0  # among all that were handed out
    before: Mapping[str, Any] | None = None  # global generators, where reading it drew from them
    place: tuple[Any, Mapping[str, Any]] | None = None  # a stateful loader's state, its generators


class HandedOut:
    """The log of batches handed out since the reader was made, or came back."""

    def __init__(
        self, batches_per_step: int | None, *, remembered: int | None, trained: Batch
    ) -> None:
        """``trained`` is where the log begins: the batch trained last. For the rest see
        ``TrainedCount``."""
        self.count = TrainedCount(batches_per_step, remembered=remembered)
        self.trained = trained
        self.last: Batch | None = None  # handed out last
        self._batches: deque[Batch] = deque()

    def add(self, epoch: Epoch, index: int, before: Mapping[str, Any] | None = None) -> None:
        """A batch is handed out."""
        self.count.hand_out()
        self.last = Batch(epoch, index, self.count.handed_out, before)
        self._batches.append(self.last)

    def step(self, *, is_thread: bool, is_apart: bool, alive: int | None = None) -> None:
        """A step trained some of them; see ``TrainedCount.step``."""
        self.count.step(is_thread=is_thread, is_apart=is_apart, alive=alive)
        for batch in self._batches:
            if batch.ordinal > self.count.trained:
                break
            self.trained = batch
            batch.epoch.has_trained = True
        if not self.count.is_open:
            while self._batches and self._batches[0].ordinal <= self.count.trained:
                self._batches.popleft()

    def waiting(self) -> list[Batch]:
        """Handed out and not trained, in order."""
        return [batch for batch in self._batches if batch.ordinal > self.count.trained]

    def is_over(self) -> bool:
        """Whether all batches of the epoch that was trained last are trained."""
        epoch = self.trained.epoch
        return epoch.is_over and all(batch.epoch is not epoch for batch in self.waiting())

    def forget_waiting(self) -> None:
        """The batches that wait were thrown away: no step will train them."""
        self.count.forget()
        self._batches.clear()
        self.last = None
