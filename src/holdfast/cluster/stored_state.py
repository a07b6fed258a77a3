"""What a checkpoint of a cluster says besides rows, checked before anything acts on it.

    dense state of the last checkpoint -> read_state -> StoredState -> a plan to go back to it

Invariants:
- Whatever dense state holds, the answer is a ``StoredState`` or an error of ours.
- Numbers of pushes and batches are ones that servers and leases can count with.

Not here: which batches a training has now, and so which of the stored ones it believes (leases.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.format import stored_json
from holdfast.cluster.numbers import WORKERS_MAX, number_of
from holdfast.cluster.spec import ClusterSpec
from holdfast.errors import CorruptDataError, InvalidRequestError

EXTRA = "cluster"  # what dense state calls everything but rows


@dataclass(frozen=True, slots=True)
class StoredState:
    """What a checkpoint says of its pushes and batches, and whether servers held the same rows."""

    timeline: str
    applied: tuple[tuple[int, ...], ...]
    """For each server the last push of each worker; of use only if ``is_apart``."""
    batches: Mapping[str, Any] | None
    """What was done, as ``Leases.state`` says it."""
    is_apart: bool


def layout_of(spec: ClusterSpec) -> dict[str, Any]:
    """Where every table's rows lie, as plain values."""
    return {
        table.name: [
            table.placement.servers,
            table.placement.data,
            table.placement.parity,
            table.placement.groups,
        ]
        for table in spec.tables
    }


def read_state(dense: Mapping[str, Any], spec: ClusterSpec, *, where: str) -> StoredState:
    """What the dense state of a cluster's checkpoint says.

    Raises:
        CorruptDataError: it is not that of a cluster's checkpoint, or says what cannot be.
    """
    try:
        extra = dense["extras"][EXTRA]
        if not isinstance(extra, dict):
            raise ValueError("not a dict")
        applied = tuple(tuple(map(number_of, numbers)) for numbers in extra["applied"])
        layout = {name: _counts(numbers) for name, numbers in extra["layout"].items()}
        is_apart = layout == layout_of(spec)
        is_possible = not is_apart or len(applied) == spec.servers
        if not is_possible or any(len(numbers) > WORKERS_MAX for numbers in applied):
            raise ValueError("pushes of other servers, or of too many workers")
        batches = None if extra["batches"] is None else _batches(extra["batches"])
        return StoredState(stored_json.text(extra["timeline"]), applied, batches, is_apart)
    except (LookupError, TypeError, ValueError, AttributeError, InvalidRequestError) as error:
        raise CorruptDataError("this is not a checkpoint of a cluster", where=where) from error


def _batches(value: Any) -> dict[str, Any]:
    """What was done, in numbers that fit together."""
    start, started = stored_json.count(value["start"]), stored_json.count(value["started"])
    again = _counts(value["again"])
    if len(set(again)) != len(again) or len(again) > started:
        raise ValueError("batches that cannot be out")
    return {"start": start, "started": started, "again": again}


def _counts(value: Any) -> list[int]:
    if type(value) is not list:
        raise ValueError("not a list")
    return [stored_json.count(number) for number in value]
