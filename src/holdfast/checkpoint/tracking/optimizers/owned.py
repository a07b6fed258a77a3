"""The tables that an optimizer moves: found among its parameters once, and again when those change.

Invariant: a step of an optimizer reaches the watch of every table whose parameter, or whose memory
under the name of another parameter, the optimizer has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from holdfast.checkpoint.tracking.optimizers.rules import Mover
from holdfast.checkpoint.tracking.optimizers.steady import SteadySteps
from holdfast.checkpoint.tracking.watch import TableWatch


class Owned:
    """The tables of an optimizer, as of its groups when they were looked at."""

    def __init__(self, groups: list[dict[str, Any]], watches: Sequence[TableWatch]) -> None:
        self._groups = groups
        self._parameters = [(group["params"], len(group["params"])) for group in self._groups]
        by_id = {id(watch.table.parameter): watch for watch in watches}
        self._tables: list[tuple[Mapping[str, Any], list[TableWatch]]] = [
            (group, [by_id[id(found)] for found in group["params"] if id(found) in by_id])
            for group in self._groups
        ]
        strange = {
            memory_of(parameter)
            for parameters, _ in self._parameters
            for parameter in parameters
            if id(parameter) not in by_id
        }
        self.overlapped = [
            watch for watch in watches if memory_of(watch.table.parameter) in strange - {0}
        ]
        """Tables whose memory other parameters of the optimizer share: it writes there unseen."""
        self._steady: SteadySteps | None = None
        self._others = self._tables  # than the steady ones
        self._may_be_steady = True

    def begin_step(self) -> None:
        """The optimizer is about to step: look at the steady tables."""
        if self._steady is None:
            return
        is_done = False
        try:
            is_done = self._steady.begin_step()
        finally:
            if not is_done:
                self.end_steady()

    def end_step(self, optimizer: torch.optim.Optimizer) -> list[TableWatch]:
        """The optimizer has stepped: the steady tables, whose rows are marked."""
        if self._steady is None:
            return []
        marked: list[TableWatch] = []
        try:
            marked = self._steady.end_step(optimizer)
        finally:
            if not marked:
                self.end_steady()
        return marked

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """All watches have looked at a step: from now on some tables may be steady.

        Once only: a table that stops being steady would stop again.
        """
        if not self._may_be_steady:
            return
        self._may_be_steady = False
        steady = [one for one in self.tables(optimizer) if one[0].is_steady(one[1])]
        if steady:
            self._steady = SteadySteps(steady)
            self._others = [
                (group, [watch for watch in watches if watch.steady is None])
                for group, watches in self._tables
            ]

    def end_steady(self) -> None:
        """No table is steady any longer."""
        if self._steady is not None:
            self._steady.end()
            self._steady = None

    def tables(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[TableWatch, Mover]]:
        """Each table that its own watch looks at, with what moves it at this step."""
        for group, watches in self._tables if self._steady is None else self._others:
            mover = Mover(optimizer, group)
            for watch in watches:
                yield watch, mover

    def is_current(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer has the same groups of the same parameters."""
        groups = optimizer.param_groups
        return (
            groups is self._groups
            and len(groups) == len(self._parameters)
            and all(
                group["params"] is parameters and len(parameters) == size
                for group, (parameters, size) in zip(groups, self._parameters, strict=True)
            )
        )


def find_overlaps(watches: Sequence[TableWatch]) -> None:
    """Note which tables share memory: a write to one of them is one to the others."""
    memories = [memory_of(watch.table.parameter) for watch in watches]
    for watch, memory in zip(watches, memories, strict=True):
        watch.is_overlapped = memory != 0 and memories.count(memory) > 1


def memory_of(parameter: torch.Tensor) -> int:
    """The address of a tensor's storage; 0 where it has none."""
    try:
        return parameter.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0
