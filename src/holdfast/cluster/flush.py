"""Flushes: differences on their way to parity, and what is left of them when their sender is lost.

A flush carries the numbers of the pushes in it (marks), so that whoever folds it knows, range by
range, what its parities contain. With several parities a stripe it is kept by all of them before
any folds it; ``choose_settlement`` decides what becomes of one whose sender is lost in between.

Invariants:
- One that anybody folded is folded by all who live.
- What was ever known to be in a server's rows stays known (``remember``).

Not here: making and folding flushes (shard.py), carrying them (server.py).

# K differences, G ranges, W workers
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from holdfast.cluster.arenashard import Differences


@dataclass(frozen=True, slots=True)
class Flush:
    """Differences on their way to every server that holds parities of them."""

    number: int
    marks_W: np.ndarray
    frozen: tuple[int, ...]
    receivers: tuple[int, ...]
    parts: Mapping[int, tuple[Differences, ...]]
    """By receiver; one that arrived holds its own. Witnesses are receivers also of nothing."""
    durable_W: np.ndarray
    """Pushes up to these were all at parity when it was made: witnesses may forget them."""

    @property
    def rows(self) -> int:
        """Differences in it, one for each parity row."""
        return sum(len(part.slots_K) for parts in self.parts.values() for part in parts)

    def bytes_of(self, kind: str) -> int:
        """Bytes of its parts of one kind, with what they name."""
        return sum(
            part.bytes for parts in self.parts.values() for part in parts if part.kind == kind
        )


@dataclass(frozen=True, slots=True)
class Report:
    """What a server with parities knows of another.

    Its last flush that was folded, one that is kept (and who else was to get it), and by range the
    last push of each worker that was in what was folded.
    """

    flushed: int
    kept: int | None
    receivers: tuple[int, ...]
    marks_GW: np.ndarray


def choose_settlement(reports: Mapping[int, Report]) -> int:
    """Which flush of a lost server counts as its last, from what every living server reports.

    One that anybody folded had been given to all. One that is only kept counts if everyone alive
    who was to get it has it; else nobody can have folded it, and it is forgotten.

    >>> marks = np.empty((0, 0))
    >>> choose_settlement({1: Report(4, 5, (1, 2), marks), 2: Report(4, None, (), marks)})
    4
    >>> choose_settlement({1: Report(4, 5, (1, 3), marks), 2: Report(4, None, (), marks)})
    5
    """
    last = max((report.flushed for report in reports.values()), default=0)
    kept = {server: report for server, report in reports.items() if report.kept is not None}
    newest = max((report.kept or 0 for report in kept.values()), default=0)
    if newest <= last:
        return last
    holders = {server for server, report in kept.items() if report.kept == newest}
    expected = {receiver for server in holders for receiver in kept[server].receivers}
    return newest if expected & set(reports) <= holders else last


def remember(known: Mapping[int, Report], reports: Mapping[int, Report]) -> dict[int, Report]:
    """Which pushes were ever known to be in a server's rows: what is reported now, and before.

    A replacement decodes rows with these pushes in, and parities that are built anew are built of
    its rows: the pushes stay in, also when those who first reported them are lost.
    """
    merged = dict(known)
    for server, report in reports.items():
        if server in known:
            marks_GW = np.maximum(known[server].marks_GW, report.marks_GW)
            report = dataclasses.replace(report, marks_GW=marks_GW)
        merged[server] = report
    return merged
