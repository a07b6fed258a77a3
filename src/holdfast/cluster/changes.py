"""Which rows of a table on a server changed since the last checkpoint, and since the base: bits.

    mark (every change) -> claim (a snapshot takes what it saves) -> settle (was it committed?)

A server does not hear whether a checkpoint was committed. The next snapshot says which one was the
last; a claim of another one goes back to what changed.

Invariants:
- A row that changed is in every delta from then on, until one that holds it is committed.
- What is not known counts as changed: a server that joins late saves all its rows.

Not here: locks; callers take turns.

# M rows of a table on this server, W = ceil(M / 64) words
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.checkpoint.catalog import BASE
from holdfast.kernels import bitmap

SINCE_BASE = (
    "base"  # as checkpoint/baseline.py names it: a delta since the base, not since the last
)


@dataclass(frozen=True, slots=True)
class SnapshotOrder:
    """What a checkpoint holds: every row, or those changed since the base or since the last."""

    step: int
    kind: str
    since: str | None
    committed: int | None
    """The last checkpoint that exists; None: there is none."""


@dataclass(frozen=True, slots=True)
class _Claim:
    step: int
    kind: str
    words_W: bitmap.Words


class Changes:
    """The bits of one table; nothing is known before ``begin`` or the first claim."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._changed_W: bitmap.Words | None = None
        self._since_base_W = bitmap.new(0)
        self._claim: _Claim | None = None

    def begin(self) -> None:
        """From now on it is known: no row has changed."""
        self._changed_W = bitmap.new(self._rows)
        self._since_base_W = bitmap.new(self._rows)
        self._claim = None

    def mark(self, slots_N: np.ndarray) -> None:
        """These rows changed."""
        if self._changed_W is not None:
            bitmap.mark(self._changed_W, slots_N, self._rows)

    def mark_saved(self, slots_N: np.ndarray) -> None:
        """These rows are as the last checkpoint has them, and not as its base does."""
        bitmap.mark(self._since_base_W, slots_N, self._rows)

    def claim(self, order: SnapshotOrder) -> np.ndarray | None:
        """The slots that a checkpoint must hold, ascending; None: all."""
        is_known = self._changed_W is not None
        if self._changed_W is None:
            self.begin()
        self._settle(order.committed)
        changed_W = self._changed_W
        assert changed_W is not None
        if not is_known:
            bitmap.mark(changed_W, np.arange(self._rows), self._rows)
        self._claim = _Claim(order.step, order.kind, changed_W)
        self._changed_W = bitmap.new(self._rows)
        if order.kind == BASE or not is_known:
            return None  # all, without a list of them
        if order.since == SINCE_BASE:
            changed_W = changed_W | self._since_base_W
        return bitmap.ids(changed_W, 0, self._rows)

    def _settle(self, committed: int | None) -> None:
        claim, self._claim = self._claim, None
        if claim is None:
            return
        if claim.step != committed:
            assert self._changed_W is not None
            bitmap.union_into(self._changed_W, claim.words_W)
        elif claim.kind == BASE:
            self._since_base_W = bitmap.new(self._rows)
        else:
            bitmap.union_into(self._since_base_W, claim.words_W)
