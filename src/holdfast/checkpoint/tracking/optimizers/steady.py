"""Steps that are like the one before: all tables of an optimizer are looked at together.

    a step, each table by its own watch -> the tables that allow it become steady
    the next steps                      -> before: one comparison of all counters
                                           after: the rows of all gradients are marked
    a step that is unlike the one before, or a save -> each table by its own watch again

After a training step the processor's caches hold the model, and not the tracker. What the tracker
costs at a step is how much memory it touches, so a usual step of many tables touches a few lists
instead of many objects for each table.

Invariants:
- A steady table is one whose last step moved rows by a known rule, with a sparse gradient in host
  memory, by the optimizer that is saved with it. Its watch would learn nothing new of the next one.
- While a table is steady, the counters that its watch has seen are out of date. Whatever asks the
  watch calls ``end`` first.
- Nothing is marked by halves: a step either is like the one before, or is left to the watches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from holdfast.checkpoint.tracking.optimizers import rules
from holdfast.checkpoint.tracking.versions import count_writes
from holdfast.checkpoint.tracking.watch import TableWatch
from holdfast.kernels.rows import bitmap
from holdfast.model import devices


class SteadySteps:
    """The steady tables of one optimizer, with the counters of all their tensors."""

    def __init__(self, tables: Sequence[tuple[TableWatch, rules.Mover]]) -> None:
        """``tables``: those whose watches say that they are steady after the step that has just
        ended, with what moved them."""
        self._watches = [watch for watch, _ in tables]
        self._sets = [watch.fresh_W for watch in self._watches]
        self._sets_at_T = np.array([words_W.ctypes.data for words_W in self._sets], np.int64)
        self._rows_T = np.array([watch.table.rows for watch in self._watches], np.int64)
        self._parameters = [watch.table.parameter for watch in self._watches]
        self._writes_max = min(watch.step_writes_max for watch in self._watches)
        self._keys = {id(mover.group): (mover.group, mover.key) for _, mover in tables}
        self._tensors: list[torch.Tensor] = []
        self._parts: list[slice] = []  # of the tensors, by table; the weight comes first
        for watch in self._watches:
            begin = len(self._tensors)
            self._tensors += watch.counted_tensors
            self._parts.append(slice(begin, len(self._tensors)))
        self._seen = count_writes(self._tensors)
        self._is_over = False
        for watch in self._watches:
            watch.steady = self

    def begin_step(self) -> bool:
        """Whether nothing wrote to the tables since the last step; else nothing is done.

        Other tensors in the place of row state are seen by the watches at the next save.
        """
        return not self._is_over and self._seen == count_writes(self._tensors)

    def end_step(self, optimizer: torch.optim.Optimizer) -> list[TableWatch]:
        """Mark the rows of the gradients, and return the tables; none: this step was not like the
        one before, and nothing is done."""
        if self._is_over:
            return []
        if any(rules.rule_key(optimizer, group) != key for group, key in self._keys.values()):
            return []
        found = [each.grad for each in self._parameters]
        ids = [one._indices() for one in found if one is not None and _is_sparse_on_host(one)]
        if len(ids) < len(found) or not all(one.is_contiguous() for one in ids):
            return []
        now = count_writes(self._tensors)
        for part in self._parts:
            (address_before, writes_before) = self._seen[part.start]
            (address, writes) = now[part.start]
            if address != address_before or not 0 <= writes - writes_before <= self._writes_max:
                return []
        # One call for all tables: a call costs as much as marking a thousand rows.
        bitmap.mark_sets(
            self._sets_at_T,
            self._rows_T,
            np.array([one.data_ptr() for one in ids], np.int64),
            np.array([one.shape[1] for one in ids], np.int64),
        )
        self._seen = now
        return self._watches

    def end(self) -> None:
        """Let each watch look at its table again, from where these steps have come to."""
        if not self._is_over:
            self._is_over = True
            for watch, part in zip(self._watches, self._parts, strict=True):
                watch.end_steady(self._seen[part])


def _is_sparse_on_host(gradient: torch.Tensor) -> bool:
    return gradient.layout == torch.sparse_coo and devices.is_on_host(gradient)
