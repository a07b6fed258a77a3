"""Which checkpoint is best, by a metric it was saved with: a pure decision."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

from holdfast.checkpoint.format.catalog import CheckpointEntry
from holdfast.errors import unknown_name

MAX: Final = "max"
MIN: Final = "min"
Mode = Literal["max", "min"]
"""Whether a metric is better where it is larger, or smaller."""


def check_mode(mode: str) -> None:
    """Refuse what is no mode.

    Raises:
        InvalidRequestError: names the two.
    """
    if mode not in (MAX, MIN):
        raise unknown_name("mode", mode, [MAX, MIN])


def rank_by_metric(
    checkpoints: Iterable[CheckpointEntry], metric: str, mode: Mode
) -> list[CheckpointEntry]:
    """The checkpoints that have a metric, best first; of equal ones the newer first.

    Raises:
        InvalidRequestError: no such mode.
    """
    check_mode(mode)
    sign = 1 if mode == MAX else -1
    found = [
        (sign * value, entry.step, entry)
        for entry in checkpoints
        for name, value in entry.annotations.metrics
        if name == metric
    ]
    return [entry for *_, entry in sorted(found, key=lambda item: item[:2], reverse=True)]
