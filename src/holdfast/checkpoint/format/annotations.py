"""What a user says of a checkpoint: metrics, and free metadata.

    save(metrics=, metadata=) -> Annotations -> the checkpoint's entry in the catalog

Invariants:
- Every metric is a finite number, and metadata is a JSON object: what is read back is equal.
- Both are bounded, because each commit writes the catalog whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from holdfast.checkpoint.format import stored_json
from holdfast.errors import InvalidRequestError

METRICS_MAX = 64
NAME_CHARS_MAX = 128
METADATA_BYTES_MAX = 4096  # as compact JSON in ASCII
_DEPTH_MAX = 16
_WHOLE_MAX = 1 << 63


@dataclass(frozen=True, slots=True)
class Annotations:
    """Metrics by name, ascending, and metadata as compact JSON with sorted keys (or nothing)."""

    metrics: tuple[tuple[str, float], ...] = ()
    metadata: str = ""

    def __bool__(self) -> bool:
        return bool(self.metrics or self.metadata)

    def metadata_dict(self) -> dict[str, Any]:
        """The metadata as values.

        >>> Annotations(metadata='{"commit":"9f2a"}').metadata_dict()
        {'commit': '9f2a'}
        """
        return dict(json.loads(self.metadata)) if self.metadata else {}

    def updated(self, newer: Annotations) -> Self:
        """These, and ``newer`` ones in place of those of the same name.

        Raises:
            InvalidRequestError: together they are too many.
        """
        metadata = {**self.metadata_dict(), **newer.metadata_dict()}
        joined = type(self)(
            tuple(sorted({**dict(self.metrics), **dict(newer.metrics)}.items())),
            _as_text(metadata) if metadata else "",
        )
        try:
            check_annotations(joined)
        except ValueError as error:
            raise _too_much(error) from error
        return joined

    @classmethod
    def from_json(cls, metrics: object, metadata: object) -> Self:
        """What a catalog says; not checked yet."""
        if type(metrics) is not dict or type(metadata) is not dict:
            raise ValueError("annotations are not JSON objects")
        named = sorted((name, stored_json.number(value)) for name, value in metrics.items())
        return cls(tuple(named), _as_text(metadata) if metadata else "")


def check_annotations(annotations: Annotations) -> None:
    """Refuse what no writer stores.

    Raises:
        ValueError: says what is wrong.
    """
    names = [name for name, _ in annotations.metrics]
    if len(names) > METRICS_MAX or names != sorted(set(names)):
        raise ValueError(f"more than {METRICS_MAX} metrics, or two of one name")
    for name, value in annotations.metrics:
        if not 0 < len(stored_json.text(name)) <= NAME_CHARS_MAX:
            raise ValueError(f"a metric's name has 1 to {NAME_CHARS_MAX} characters")
        stored_json.number(value)
    if len(annotations.metadata) > METADATA_BYTES_MAX:
        raise ValueError(f"metadata takes more than {METADATA_BYTES_MAX} bytes as JSON")
    _check_json(annotations.metadata_dict(), depth=0)


def as_annotations(
    metrics: Mapping[str, Any] | None, metadata: Mapping[str, Any] | None
) -> tuple[Annotations, list[str]]:
    """What a user passes, and the names of metrics that are left out because they are NaN or
    infinite. A metric may be a tensor or an array of one number.

    >>> as_annotations({"auc": 0.81, "loss": float("nan")}, {"commit": "9f2a"})
    (Annotations(metrics=(('auc', 0.81),), metadata='{"commit":"9f2a"}'), ['loss'])

    Raises:
        InvalidRequestError: a metric is no number, metadata is not JSON, or there is too much.
    """
    for given in (metrics, metadata):
        if given is not None and not isinstance(given, Mapping):
            raise InvalidRequestError("metrics and metadata are dicts", type=type(given).__name__)
    numbers = {name: _as_number(name, value) for name, value in (metrics or {}).items()}
    left_out = [name for name, value in numbers.items() if not math.isfinite(value)]
    kept = {name: value for name, value in numbers.items() if math.isfinite(value)}
    try:
        _check_json(dict(metadata or {}), depth=0)
        found = Annotations(
            tuple(sorted(kept.items())), _as_text(dict(metadata)) if metadata else ""
        )
        check_annotations(found)
    except (TypeError, ValueError, RecursionError) as error:
        raise _too_much(error) from error
    return found, left_out


def _too_much(error: Exception) -> InvalidRequestError:
    return InvalidRequestError(
        "metrics or metadata cannot be stored with a checkpoint",
        detail=str(error)[:200],
        todo="pass metrics as {name: number}, metadata as a small dict of JSON values",
    )


def _as_number(name: object, value: Any) -> float:
    if isinstance(name, str) and not isinstance(value, str | bytes | None):
        try:
            return float(value)
        except Exception as error:  # the user's own class, or a tensor of several numbers
            raise _no_number(name, value) from error
    raise _no_number(name, value)


def _no_number(name: object, value: Any) -> InvalidRequestError:
    return InvalidRequestError(
        "a metric is a name and a number",
        metric=repr(name)[:80],
        type=type(value).__name__,
        todo="pass metrics={'auc': 0.81}; anything else goes into metadata=",
    )


def _as_text(metadata: dict[str, Any]) -> str:
    return json.dumps(metadata, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _check_json(value: Any, *, depth: int) -> None:
    """Refuse what JSON does not hold, or holds in some readers only."""
    if depth > _DEPTH_MAX:
        raise ValueError("metadata is nested too deep")
    if isinstance(value, dict):
        for key, inner in value.items():
            stored_json.text(key)
            _check_json(inner, depth=depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_json(inner, depth=depth + 1)
    elif type(value) is str:
        stored_json.text(value)
    elif type(value) is int:
        if not -_WHOLE_MAX <= value < _WHOLE_MAX:
            raise ValueError("a whole number in metadata needs more than 64 bits")
    elif value is not None and type(value) is not bool:
        stored_json.number(value)
