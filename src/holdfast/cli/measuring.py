"""Metrics of a training, while it runs: what ``--metrics-port`` and ``--tensorboard`` ask for.

Not here: what they are made of (metrics/).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from holdfast import events

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Measuring:
    """Where metrics go; None: nowhere."""

    port: int | None = None
    host: str = LOOPBACK
    tensorboard: Path | None = None


@contextmanager
def metric_sinks(wanted: Measuring, console: Console) -> Iterator[list[events.Sink]]:
    """Sinks for a training's events; says where metrics are.

    Raises:
        UnavailableError: the port is taken.
        InvalidRequestError: TensorBoard is missing.
    """
    from holdfast.metrics import Metrics, TensorBoard, serve

    with ExitStack() as stack:
        sinks: list[events.Sink] = []
        if wanted.port is not None:
            metrics = Metrics()
            url = stack.enter_context(serve(metrics, port=wanted.port, host=wanted.host))
            console.print(f"metrics: {url}", soft_wrap=True)
            sinks.append(metrics)
        if wanted.tensorboard is not None:
            sinks.append(stack.enter_context(TensorBoard(wanted.tensorboard)))
        yield sinks
