"""The metrics' values, and their text as Prometheus reads it. A sink for events.

Invariants:
- A counter and a summary never go down. A counter without labels is there from the start, as 0, so
  that a first failure is an increase.
- The text is one moment: no event is half in it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable

from holdfast import events
from holdfast.metrics.readings import GAUGE, METRICS, SUMMARY, Metric, readings
from holdfast.visible import visible

_LABEL_MAX = 200
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Adds up what happened; pass it as ``events=``, or to an ``EventLog``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in METRICS}
        self._counts: dict[str, dict[tuple[str, ...], int]] = {name: {} for name in METRICS}
        for metric in METRICS.values():
            if metric.kind != GAUGE and not metric.labels:
                self._values[metric.name][()] = 0.0
                self._counts[metric.name][()] = 0

    def __call__(self, event: events.Event) -> None:
        """Take note of an event."""
        with self._lock:
            for reading in readings(event):
                values, labels = self._values[reading.metric], as_labels(reading.labels)
                if METRICS[reading.metric].kind == GAUGE:
                    values[labels] = reading.value
                    continue
                values[labels] = values.get(labels, 0.0) + reading.value
                counts = self._counts[reading.metric]
                counts[labels] = counts.get(labels, 0) + 1

    def value(self, metric: str, *labels: str) -> float | None:
        """A metric's value, of a summary the sum; None: nothing is known of it yet."""
        with self._lock:
            return self._values[metric].get(as_labels(labels))

    def text(self) -> str:
        """All metrics in Prometheus' text format, version 0.0.4."""
        lines: list[str] = []
        with self._lock:
            for metric in METRICS.values():
                values = self._values[metric.name]
                if values:
                    lines.append(f"# HELP {metric.name} {metric.help}")
                    lines.append(f"# TYPE {metric.name} {metric.kind}")
                for labels, value in sorted(values.items()):
                    lines += self._samples(metric, labels, value)
        return "".join(f"{line}\n" for line in lines)

    def _samples(self, metric: Metric, labels: tuple[str, ...], value: float) -> list[str]:
        shown = _labels(metric, labels)
        if metric.kind != SUMMARY:
            return [f"{metric.name}{shown} {_number(value)}"]
        count = self._counts[metric.name].get(labels, 0)
        return [f"{metric.name}_sum{shown} {_number(value)}", f"{metric.name}_count{shown} {count}"]


def _labels(metric: Metric, values: tuple[str, ...]) -> str:
    pairs = zip(metric.labels, values, strict=True)
    inner = ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs)
    return f"{{{inner}}}" if inner else ""


def as_labels(values: Iterable[str]) -> tuple[str, ...]:
    r"""Values of labels as they can be sent and shown; what looks alike is counted together.

    >>> as_labels(["base", "\x1b\ud800"])
    ('base', '\\x1b\\ud800')
    """
    return tuple(visible(value, most=_LABEL_MAX) for value in values)


def _escaped(text: str) -> str:
    r"""A label's value as the format wants it.

    >>> _escaped('a"b\\')
    'a\\"b\\\\'
    """
    return text.replace("\\", r"\\").replace('"', r"\"")


def _number(value: float) -> str:
    """A number as the format wants it.

    >>> _number(3.0), _number(0.5), _number(float("inf")), _number(float("nan"))
    ('3', '0.5', '+Inf', 'NaN')
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
