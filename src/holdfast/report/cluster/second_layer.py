"""The second layer of a run: its checkpoints, what they cost, what going back to them cost.

    events -> Layer

Not here: when checkpoints are taken (cluster/checkpoints.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast import events
from holdfast.report import words


@dataclass(frozen=True, slots=True)
class Layer:
    """Checkpoints of a cluster, and what was made of them."""

    strategy: str
    checkpoints: int
    """That exist, or did."""
    given_up: int
    bytes: int
    stall_s: float
    """In which no batch was given out, all checkpoints together."""
    restores: int
    """Everybody went back."""
    recoveries: int
    """Lost servers alone did."""
    restore_bytes: int
    restore_s: float
    batches_again: int
    """Trained a second time."""
    pls: float
    """The share of samples whose effect on lost rows is gone (CPR)."""


def find_layer(strategy: str | None, happened: Sequence[events.Event]) -> Layer | None:
    """What the second layer did; None where there is none."""
    if strategy is None:
        return None
    durable = [e for e in happened if isinstance(e, events.SaveDurable)]
    staged = [e for e in happened if isinstance(e, events.SaveStaged)]
    back = [e for e in happened if isinstance(e, events.Restored | events.Recovered)]
    parts = [e for e in back if isinstance(e, events.Recovered)]
    trained = [e.batch for e in happened if isinstance(e, events.BatchTrained)]
    return Layer(
        strategy=strategy,
        checkpoints=len(durable),
        given_up=sum(isinstance(e, events.SaveFailed) for e in happened),
        bytes=sum(e.bytes for e in durable),
        stall_s=sum(e.stall_s for e in staged),
        restores=len(back) - len(parts),
        recoveries=len(parts),
        restore_bytes=sum(e.bytes for e in back),
        restore_s=sum(e.seconds for e in back),
        batches_again=len(trained) - len(set(trained)),
        pls=sum(e.pls or 0.0 for e in parts),
    )


def layer_lines(layer: Layer) -> list[tuple[str, str]]:
    """What to know of it, as (name, text)."""
    given_up = f", {layer.given_up} given up" if layer.given_up else ""
    found = [
        (
            "checkpoints",
            f"{layer.checkpoints} by {layer.strategy}{given_up}: {words.size(layer.bytes)}; "
            f"training stood still for {words.duration(layer.stall_s)}",
        )
    ]
    if layer.restores:
        found.append(
            (
                "going back",
                f"{words.counted(layer.restores, 'time')}, everybody: "
                f"{words.size(layer.restore_bytes)} in {words.duration(layer.restore_s)}; "
                f"{words.counted(layer.batches_again, 'batch', 'batches')} trained again",
            )
        )
    if layer.recoveries:
        found.append(
            (
                "going back",
                f"{words.counted(layer.recoveries, 'time')}, lost servers alone: "
                f"{words.size(layer.restore_bytes)} in {words.duration(layer.restore_s)}; "
                f"PLS {layer.pls:.2g}",
            )
        )
    return found
