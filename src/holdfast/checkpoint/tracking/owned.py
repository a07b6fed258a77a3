"""The tables that an optimizer moves: found among its parameters once, and again when those change.

Invariant: a step of an optimizer reaches the watch of every table whose parameter, or whose memory
under the name of another parameter, the optimizer has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast.checkpoint.tracking.watch import TableWatch


class Owned:
    """The tables of an optimizer, as of its groups when they were looked at."""

    def __init__(self, optimizer: torch.optim.Optimizer, watches: Sequence[TableWatch]) -> None:
        self._groups = optimizer.param_groups
        self._parameters = [(group["params"], len(group["params"])) for group in self._groups]
        by_id = {id(watch.table.parameter): watch for watch in watches}
        self.tables: list[tuple[TableWatch, Mapping[str, Any]]] = [
            (by_id[id(parameter)], group)
            for group in self._groups
            for parameter in group["params"]
            if id(parameter) in by_id
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
