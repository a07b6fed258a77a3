"""Which rows of a server are used most: counted where updates are applied. No torch.

    a push is applied -> see -> a snapshot: choose -> take -> (not committed) put_back

The rules of one process (checkpoint/selecting/priority.py), table by table, for the rows that lie
here: of a large table at most r of them are saved by one delta. A push names each row once, with
the sum of its gradients: a row that is looked up many times by one batch counts as used once.

Invariants:
- Of rows outside large tables (small ones, networks, replicated ones) every changed one is chosen.
- Nothing is counted, and no memory kept, before a snapshot's order asks for it.

Not here: which rows changed, and whether a claim was committed (changes.py); locks: callers take
turns.

# N slots of a push, K slots of a claim, M rows of an arena on this server, W = ceil(M / 64) words,
# B = two bounds for each large table; a taken_X: what put_back needs
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.checkpoint.selecting.priority import (
    Choice,
    Priority,
    Taken,
    make_choice,
    rows_to_choose,
)
from holdfast.kernels.rows import bitmap


@dataclass(frozen=True, slots=True)
class PriorityOrder:
    """Which rows go first, and the tables of which not every changed row is saved."""

    rules: Priority
    tables: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values for a message."""
        return {"rules": dataclasses.asdict(self.rules), "tables": list(self.tables)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PriorityOrder:
        """What ``to_json`` wrote."""
        return cls(Priority(**value["rules"]), tuple(value["tables"]))


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one table on a server: slots from ``start`` to ``stop`` of an arena."""

    table: str
    start: int
    stop: int
    weights: Callable[[], np.ndarray]
    """As they are now; where they lie, not a copy."""


@dataclass(frozen=True, slots=True)
class _Ranked:
    span: Span
    choice: Choice

    @property
    def rows(self) -> int:
        return self.span.stop - self.span.start

    def ids(self, words_W: bitmap.Words) -> np.ndarray:
        """Those of a set of slots that are rows of this table, counted from its first."""
        found_K: np.ndarray = bitmap.ids(words_W, self.span.start, self.span.stop)
        return found_K - self.span.start


class Uses:
    """The uses of the rows of one arena on a server, from now on."""

    def __init__(self, order: PriorityOrder, spans: Sequence[Span], rows: int) -> None:
        self.order = order
        self._rows = rows
        self._ranked = [
            _Ranked(span, make_choice(order.rules, span.stop - span.start, span.weights))
            for span in sorted(spans, key=lambda span: span.start)
            if span.table in order.tables and span.start < span.stop
        ]
        bounds = [(each.span.start, each.span.stop) for each in self._ranked]
        self._bounds_B = np.array(bounds, np.int64).reshape(-1)
        is_other_M = np.ones(rows, bool)
        for start, stop in bounds:
            is_other_M[start:stop] = False
        self._others_W = bitmap.new(rows)
        bitmap.mark(self._others_W, np.flatnonzero(is_other_M), rows)

    @property
    def bytes(self) -> int:
        """Memory it keeps."""
        return self._others_W.nbytes + sum(each.choice.bytes for each in self._ranked)

    def see(self, slots_N: np.ndarray) -> None:
        """A push changed these rows."""
        if not self._ranked:
            return
        slots_N = slots_N.astype(np.int64, copy=False)
        if not (slots_N[1:] >= slots_N[:-1]).all():  # workers sort them; others may not
            slots_N = np.sort(slots_N)
        cuts = np.searchsorted(slots_N, self._bounds_B).tolist()
        for each, lo, hi in zip(self._ranked, cuts[::2], cuts[1::2], strict=True):
            if lo < hi:
                each.choice.see(slots_N[lo:hi] - each.span.start)

    def choose(self, changed_W: bitmap.Words) -> bitmap.Words:
        """Those of the changed rows that a delta saves now."""
        wanted_W = self._others_W.copy()
        for each in self._ranked:
            chosen_W = each.choice.choose(rows_to_choose(each.rows, self.order.rules.r))
            slots_K = bitmap.ids(chosen_W, 0, each.rows) + each.span.start
            bitmap.mark(wanted_W, slots_K, self._rows)
        chosen: bitmap.Words = changed_W & wanted_W
        return chosen

    def take(self, words_W: bitmap.Words) -> list[Taken]:
        """A snapshot took these rows: they are counted anew; what ``put_back`` needs."""
        return [each.choice.take(each.ids(words_W)) for each in self._ranked]

    def put_back(self, words_W: bitmap.Words, taken: Sequence[Taken]) -> None:
        """These rows were taken for a checkpoint that does not exist: no use of them is lost."""
        for each, taken_X in zip(self._ranked, taken, strict=True):
            each.choice.put_back(each.ids(words_W), taken_X)
