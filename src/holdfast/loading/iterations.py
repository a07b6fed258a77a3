"""What a loop holds of a reader: the iterator of one epoch, or of several in a row.

Iterators know their place in the program and in the run; the reader decides what they get.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol, Self

from holdfast.loading.counting.callers import call_site
from holdfast.loading.counting.handed_out import Epoch
from holdfast.loading.loader_place import set_epoch


class Source(Protocol):
    """What iterators need of a reader."""

    loader: Any
    generation: int  # grows whenever a state is loaded

    def next_batch(self, iteration: Iteration, frame: FrameType) -> Any: ...

    def next_epoch(self) -> int: ...

    @property
    def is_to_go_back(self) -> bool: ...

    def resume_again(self, iteration: Iteration) -> None: ...

    def go_to_end(self, end: int) -> None: ...

    def pass_over(self) -> None: ...

    def go_behind_left(self, first: int) -> None: ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class Iteration:
    """One iteration of the loader."""

    reader: Source
    is_chained: bool = False  # one of ``Epochs``: the next follows without the loop's doing
    is_sequel: bool = False  # of another in the same ``Epochs``
    first_epoch: int = 0  # of ``Epochs``
    inner: Iterator[Any] | None = None
    epoch: Epoch | None = None
    drawn: int = 0  # batches of the epoch
    is_over: bool = False
    is_other: bool = False  # not the one that is trained, as far as is known
    generation: int = -1  # of the reader, when it drew last; -1: it never did
    site: tuple[object, ...] = ()  # where in the program it drew first
    is_alone: bool = True  # no other was begun meanwhile: the loader's state is this one's

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self.reader.next_batch(self, sys._getframe(1))


@dataclass(slots=True)
class EpochPlan:
    """Which epochs one call of ``epochs`` stands for."""

    first: int
    end: int
    is_used: bool = False  # a step trained one of its batches, or all were trained before


@dataclass(slots=True, eq=False, weakref_slot=True)
class Epochs:
    """Epoch after epoch, as one iterator."""

    reader: Source
    plan: EpochPlan
    iteration: Iteration | None = None
    generation: int = -1  # of the reader, when an iteration began last

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        reader = self.reader
        while True:
            if self.iteration is None or self.iteration.generation not in (-1, reader.generation):
                self.iteration = self._begin(sys._getframe(1))
            try:
                return reader.next_batch(self.iteration, sys._getframe(1))
            except StopIteration:
                self.iteration = None

    def _begin(self, frame: FrameType) -> Iteration:
        reader, plan = self.reader, self.plan
        is_sequel = self.generation == reader.generation
        made = Iteration(reader, is_chained=True, is_sequel=is_sequel, first_epoch=plan.first)
        made.site = call_site(frame)
        reader.resume_again(made)
        reader.go_behind_left(plan.first)
        number = reader.next_epoch()
        if not reader.is_to_go_back:
            number = max(number, plan.first)
        if number >= plan.end:
            plan.is_used = True
            if reader.is_to_go_back:
                reader.go_to_end(plan.end)
                reader.pass_over()
            raise StopIteration
        set_epoch(reader.loader, number)
        self.generation = reader.generation
        return made
