"""Gradients that wait at a save: accumulated by ``backward``, and not yet given to a step.

A checkpoint has none of them, so a run that resumes there leaves their batches out of its next
step. The place for ``Checkpointer.step`` is behind each ``optimizer.step``.

Not gradients that wait: those of a step that a ``GradScaler`` left out, which are not finite, and
those that a step has used and nobody has cleared.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable

import torch

from holdfast import events
from holdfast.checkpoint.tracking.optimizers import steps
from holdfast.errors import HoldfastWarning


class WaitingGradients:
    """Hears of optimizer steps, and tells of a save that is taken between gradients and theirs."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], log: events.EventLog) -> None:
        """``optimizers`` have the parameters whose gradients are looked at."""
        self._optimizers = list(optimizers)
        self._log = log
        self._has_stepped = True  # an optimizer, before the step that is counted now
        self._has_stepped_since = False
        self._is_over = False
        steps.add_listener(self)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing to do."""

    def after_closure(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing to do."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Some optimizer has stepped."""
        self._has_stepped_since = True

    def after_compiled_steps(self) -> None:
        """Optimizers step in compiled code, which is told at saves only."""
        self._is_over = True

    def counted(self) -> None:
        """A training step is counted."""
        self._has_stepped, self._has_stepped_since = self._has_stepped_since, False

    def tell(self) -> None:
        """A save is taken: warn, once, if gradients wait."""
        if self._is_over or self._has_stepped or self._has_stepped_since or not self._are_there():
            return
        self._is_over = True
        reason = (
            "gradients wait for optimizer.step(), and a checkpoint does not have them: a run that "
            "resumes from it leaves their batches out"
        )
        todo = "where gradients are accumulated, call ck.step() once for each optimizer.step()"
        self._log.emit(events.ReaderNotice(reason=reason, todo=todo))
        # A filter may turn warnings into errors; training goes on all the same.
        with contextlib.suppress(HoldfastWarning):
            warnings.warn(f"{reason}; {todo}", HoldfastWarning, stacklevel=4)

    def _are_there(self) -> bool:
        found = False
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        values = _values_of(parameter.grad)
                        if not values.isfinite().all():
                            return False
                        found = found or bool(values.any())
        return found

    def close(self) -> None:
        """Hear no more."""
        steps.remove_listener(self)


def _values_of(gradient: torch.Tensor) -> torch.Tensor:
    return gradient._values() if gradient.layout == torch.sparse_coo else gradient.detach()
