"""A strict reader of Prometheus' text format 0.0.4, written from its description alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"(,|$)')
_VALUE = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]Inf|NaN")
_KINDS = {"counter", "gauge", "summary", "histogram", "untyped"}


@dataclass
class Family:
    """A metric as the text has it."""

    kind: str
    help: str
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)


def parse(text: str) -> dict[str, Family]:
    """Every metric; ValueError for anything the format does not allow."""
    if text and not text.endswith("\n"):
        raise ValueError("the last line does not end")
    families: dict[str, Family] = {}
    help_of: dict[str, str] = {}
    current = ""
    for line in text.split("\n")[:-1]:
        if line.startswith("# HELP "):
            current, _, words = line.removeprefix("# HELP ").partition(" ")
            if current in help_of or not _NAME.fullmatch(current):
                raise ValueError(line)
            help_of[current] = words
        elif line.startswith("# TYPE "):
            name, _, kind = line.removeprefix("# TYPE ").partition(" ")
            if name != current or name in families or kind not in _KINDS:
                raise ValueError(line)
            families[name] = Family(kind, help_of[name])
        else:
            name, labels, value = _sample(line)
            family = families[current]  # samples of a metric stand together, after its type
            allowed = {current}
            if family.kind == "summary":
                allowed = {f"{current}_sum", f"{current}_count"}
            if name not in allowed or (name, labels) in family.samples:
                raise ValueError(line)
            if family.kind == "counter" and (value < 0 or not name.endswith("_total")):
                raise ValueError(line)
            family.samples[name, labels] = value
    if any(not family.samples for family in families.values()):
        raise ValueError("a metric without samples")
    return families


def _sample(line: str) -> tuple[str, tuple[tuple[str, str], ...], float]:
    found = _NAME.match(line)
    if not found:
        raise ValueError(line)
    rest = line[found.end() :]
    labels: list[tuple[str, str]] = []
    if rest.startswith("{"):
        inner, brace, rest = rest[1:].rpartition("}")
        if not brace:
            raise ValueError(line)
        while inner:
            label = _LABEL.match(inner)
            if not label:
                raise ValueError(line)
            labels.append((label[1], label[2]))
            inner = inner[label.end() :]
    if not rest.startswith(" ") or not _VALUE.fullmatch(rest[1:]):
        raise ValueError(line)
    if len({name for name, _ in labels}) != len(labels):
        raise ValueError(line)
    return found[0], tuple(labels), float(rest[1:])
