"""Metrics as TensorBoard's scalars, by step. A sink for events.

A counter is drawn as its running total, a gauge as its value, a summary as each observation. Where
an event has no step of its own, the last one seen holds.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Any, Self

from holdfast import events
from holdfast.errors import InvalidRequestError
from holdfast.metrics.counts import Metrics, as_labels
from holdfast.metrics.readings import COUNTER, METRICS, Reading, readings


class TensorBoard:
    """Writes scalars into a folder; pass it as ``events=``, or to an ``EventLog``; close it."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Raises InvalidRequestError where the package tensorboard is missing."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InvalidRequestError(
                "scalars need TensorBoard", todo="pip install 'holdfast[tensorboard]'"
            ) from error
        self._writer: Any = SummaryWriter(os.fspath(folder))
        self._lock = threading.Lock()
        self._totals = Metrics()
        self._step = 0

    def __call__(self, event: events.Event) -> None:
        """Draw what an event changes."""
        with self._lock:
            self._totals(event)
            self._step = _step_of(event, self._step)
            for reading in readings(event):
                value = reading.value
                if METRICS[reading.metric].kind == COUNTER:
                    value = self._totals.value(reading.metric, *reading.labels) or 0.0
                self._writer.add_scalar(
                    tag_of(reading), value, self._step, walltime=event.time or None
                )

    def close(self) -> None:
        """Write what is left."""
        with self._lock:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def tag_of(reading: Reading) -> str:
    """A scalar's name in TensorBoard.

    >>> tag_of(Reading("holdfast_checkpoints_total", 1, ("base",)))
    'holdfast/checkpoints_total/base'
    """
    labels = as_labels(reading.labels)
    return "/".join(("holdfast", reading.metric.removeprefix("holdfast_"), *labels))


def _step_of(event: events.Event, last: int) -> int:
    step = event.batches if isinstance(event, events.ClusterProgress) else getattr(
        event, "step", last
    )  # fmt: skip
    return step if isinstance(step, int) else last
