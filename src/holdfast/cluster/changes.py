"""Which rows of a table on a server changed since the last checkpoint, and since the base: bits.

    use, mark (every change) -> claim (what a snapshot saves) -> conclude (was it committed?)

A server does not hear whether a checkpoint was committed. The next snapshot says which one was the
last; a claim of another one goes back to what changed. Where hot rows are saved first, a delta
takes the most used ones of large tables (uses.py); the others stay changed.

Invariants:
- A row that changed is in every delta from then on, until one that holds it is committed.
- What is not known counts as changed: a server that joins late saves all its rows, and one that
  has not counted uses since the last checkpoint all that changed.
- Uses are counted from the first snapshot that asks for it; then a row's are forgotten only by a
  checkpoint that holds the row and is committed.

Not here: locks; callers take turns.

# M rows of a table on this server, W = ceil(M / 64) words
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.checkpoint.format.catalog import BASE, DELTA
from holdfast.checkpoint.selecting.priority import Taken
from holdfast.cluster.numbers import whole
from holdfast.cluster.uses import PriorityOrder, Span, Uses
from holdfast.errors import InvalidRequestError
from holdfast.kernels.rows import bitmap

SINCE_BASE, SINCE_LAST = "base", "last"  # as checkpoint/planning/bases.py names them


@dataclass(frozen=True, slots=True)
class SnapshotOrder:
    """What a checkpoint holds: every row, or those changed since the base or since the last."""

    step: int
    kind: str
    since: str | None
    committed: int | None
    """The last checkpoint that exists; None: there is none."""
    priority: PriorityOrder | None = None
    """Which rows a delta since the last one saves first; None: it saves all that changed."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SnapshotOrder:
        """What the driver says of a checkpoint.

        Raises:
            InvalidRequestError: it says of none that there is.
        """
        kind, since, committed = value["kind"], value["since"], value["committed"]
        if kind not in (BASE, DELTA) or since not in (None, SINCE_BASE, SINCE_LAST):
            raise InvalidRequestError(
                "no such checkpoint", kind=repr(kind)[:40], since=repr(since)[:40]
            )
        given = value.get("priority")
        return cls(
            whole(value["step"]),
            kind,
            since,
            None if committed is None else whole(committed),
            None if given is None else PriorityOrder.from_json(given),
        )


@dataclass(frozen=True, slots=True)
class _Claim:
    step: int
    kind: str
    words_W: bitmap.Words
    taken: Sequence[Taken] | None
    """What uses were taken; None: none were counted."""


class Changes:
    """The bits of one table; nothing is known before ``begin`` or the first claim."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._changed_W: bitmap.Words | None = None
        self._since_base_W = bitmap.new(0)
        self._claim: _Claim | None = None
        self._uses: Uses | None = None

    def begin(self) -> None:
        """From now on it is known: no row has changed."""
        self._changed_W = bitmap.new(self._rows)
        self._since_base_W = bitmap.new(self._rows)
        self._claim = None
        self._uses = None

    def use(self, slots_N: np.ndarray) -> None:
        """Training used these rows, and changed them."""
        self.mark(slots_N)
        if self._uses is not None:
            self._uses.see(slots_N)

    def mark(self, slots_N: np.ndarray) -> None:
        """These rows changed."""
        if self._changed_W is not None:
            bitmap.mark(self._changed_W, slots_N, self._rows)

    def mark_saved(self, slots_N: np.ndarray) -> None:
        """These rows are as the last checkpoint has them, and not as its base does."""
        bitmap.mark(self._since_base_W, slots_N, self._rows)

    def claim(self, order: SnapshotOrder, spans: Sequence[Span] = ()) -> np.ndarray | None:
        """The slots that a checkpoint must hold, ascending; None: all. ``spans`` say where tables
        lie, for an order that has a priority."""
        is_known = self._changed_W is not None
        if self._changed_W is None:
            self.begin()
        self._conclude(order.committed)
        changed_W = self._changed_W
        assert changed_W is not None
        if not is_known:
            bitmap.mark(changed_W, np.arange(self._rows), self._rows)
        if self._uses is not None and self._uses.order != order.priority:
            self._uses = None
        later_W = bitmap.new(self._rows)
        if self._uses is None:
            taken = None
        else:
            if order.kind != BASE:
                chosen_W = self._uses.choose(changed_W)
                later_W = changed_W & ~chosen_W
                changed_W = chosen_W
            taken = self._uses.take(changed_W)
        self._claim = _Claim(order.step, order.kind, changed_W, taken)
        self._changed_W = later_W
        if self._uses is None and order.priority is not None:
            self._uses = Uses(order.priority, spans, self._rows)
        if order.kind == BASE or not is_known:
            return None  # all, without a list of them
        if order.since == SINCE_BASE:
            changed_W = changed_W | self._since_base_W
        return bitmap.ids(changed_W, 0, self._rows)

    def _conclude(self, committed: int | None) -> None:
        claim, self._claim = self._claim, None
        if claim is None:
            return
        if claim.step != committed:
            assert self._changed_W is not None
            bitmap.union_into(self._changed_W, claim.words_W)
            if claim.taken is None:
                self._uses = None  # how much its rows were used is not known: all go again
            elif self._uses is not None:
                self._uses.put_back(claim.words_W, claim.taken)
        elif claim.kind == BASE:
            self._since_base_W = bitmap.new(self._rows)
        else:
            bitmap.union_into(self._since_base_W, claim.words_W)
