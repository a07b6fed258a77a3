"""What changed since the last checkpoint, and what the next one takes of it.

    tracker -> cursor -> claim (this save's rows) -> committed: let go | failed: given back

Joins what sees changes (tracker.py), what notices that some were missed (unseen.py) and what
chooses among them (chooser.py); the rest of a checkpointer knows only selections.

Invariants:
- The rows of a save that did not commit are in the next one.
- A row that only other ranks write is never claimed (shares.py).

Not here: whether a base or a delta is taken (baseline.py).

# words_W: a bitmap of the rows of a table held here
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from holdfast.checkpoint.baseline import SINCE_BASE, CheckpointPlan, deltas_since
from holdfast.checkpoint.catalog import BASE
from holdfast.checkpoint.chooser import make_chooser
from holdfast.checkpoint.run import as_ids
from holdfast.checkpoint.selection import Selection
from holdfast.checkpoint.strategy import Strategy
from holdfast.checkpoint.tracker import LOOKUP, Marks, SinceBase, make_tracker
from holdfast.checkpoint.unseen import Canary, check_lookups_suffice
from holdfast.errors import InvalidRequestError
from holdfast.kernels import bitmap
from holdfast.modelstate import ModelState
from holdfast.placement import Placement


class Changed:
    """Sees what training changes in a model's tables, and hands it out to saves."""

    def __init__(
        self,
        state: ModelState,
        strategy: Strategy,
        *,
        tracking: str,
        shares: Mapping[str, range],
        placement: Placement | None,
    ) -> None:
        """``shares``: by table, the rows that this process saves, where others save the rest."""
        self._state = state
        self._strategy = strategy
        self._placement = placement
        self._shares = shares
        self._masks = {
            table.name: _mask(table.rows, shares[table.name])
            for table in state.tables
            if len(shares.get(table.name, range(table.rows))) < table.rows
        }
        self._is_tracking_lookups = tracking == LOOKUP and self.has_deltas
        tables = state.tables if self.has_deltas else []
        self._tracker = make_tracker(tracking, tables, state.model)
        self._cursor = self._tracker.cursor()
        hot = strategy.priority
        self._chooser = None if hot is None else make_chooser(hot, state.tables, self._tracker)
        self._canary = Canary(tables if self._is_tracking_lookups else [])
        self._since_base = SinceBase() if strategy.has_floors else None
        self._claim: Marks | None = None

    @property
    def has_deltas(self) -> bool:
        """Whether not every checkpoint is a base."""
        return deltas_since(self._strategy.base) is not None

    @property
    def _is_since_base(self) -> bool:
        return deltas_since(self._strategy.base) == SINCE_BASE

    @property
    def wants_restored(self) -> bool:
        """Whether it must know which rows of a restored checkpoint differ from its base."""
        return self._is_since_base or self._since_base is not None

    def check(self) -> None:
        """Refuse to go on where changes would be missed.

        Raises:
            InvalidRequestError: names the tables and why.
        """
        if self._is_tracking_lookups:
            check_lookups_suffice(self._state.tables, self._state.model)

    def since_base_bytes(self) -> int | None:
        """What the rows committed since the base take in fp32; None where nobody asks."""
        if self._since_base is None:
            return None
        rows = self._since_base.rows
        return sum(rows.get(t.name, 0) * t.schema().row_bytes for t in self._state.tables)

    def mark(self, table: str, ids: Sequence[int] | np.ndarray | torch.Tensor) -> None:
        """Declare rows changed, by their global ids; those that others hold are theirs to declare.

        Raises:
            InvalidRequestError: no such table, or ids outside it.
        """
        held = [found for found in self._state.tables if found.whole_name == table]
        if not held:
            known = sorted({found.whole_name for found in self._state.tables})
            raise InvalidRequestError("no such table", table=table, tables=known)
        if isinstance(ids, torch.Tensor):
            ids = ids.detach().cpu().numpy().reshape(-1)
        for found in held:
            local_N = found.piece.local_of(as_ids(ids, found.schema()))
            if self.has_deltas:
                self._tracker.mark(found.name, local_N[local_N >= 0])

    def select(self, plan: CheckpointPlan) -> list[Selection]:
        """The rows that a checkpoint takes, by table; claimed until ``settle``.

        Raises:
            InvalidRequestError: rows changed that nobody saw change.
        """
        tables = self._state.tables
        is_differential = plan.since == SINCE_BASE and not plan.is_floor
        if is_differential:
            seen = self._cursor.peek()
            marks = self._own(seen)
        else:
            seen = self._cursor.advance()
            marks = self._claim = self._own(seen)
        if plan.kind == BASE:
            self._canary.reset()
            if self._chooser is not None:
                self._chooser.saved(None)
            return [
                Selection(t.rows, placement=self._placement, within=self._shares.get(t.name))
                for t in tables
            ]
        self._canary.check(seen)
        if not is_differential:
            self._canary.reset()
        if self._chooser is not None:
            marks, later = self._chooser.choose(marks)
            self._claim = marks
            self._cursor.give_back(later)
            self._chooser.saved(marks)
        if plan.is_floor and self._since_base is not None:
            marks = self._since_base.joined(marks)
        return [Selection(t.rows, marks[t.name], self._placement) for t in tables]

    def _own(self, marks: Marks) -> Marks:
        """Of these rows, those that this process saves."""
        return {
            name: words_W & self._masks[name] if name in self._masks else words_W
            for name, words_W in marks.items()
        }

    def settle(self, *, is_committed: bool, kind: str) -> None:
        """A save is over: what it claimed is let go, or given back."""
        claim, self._claim = self._claim, None
        if claim is None:
            return
        if is_committed:
            if self._since_base is not None and kind != BASE:
                self._since_base.add(claim)
            return
        self._cursor.give_back(claim)
        if self._chooser is not None:
            self._chooser.give_back(claim)

    def based(self) -> None:
        """A base was committed."""
        if self._since_base is not None:
            self._since_base = SinceBase()

    def restored(self, changed: Marks) -> None:
        """The tables were just loaded; ``changed`` differs from their base."""
        self._tracker.reset()
        self._canary.reset()
        if self._chooser is not None:
            self._chooser.reset()
        if self._is_since_base:
            self._cursor.give_back(changed)
        if self._since_base is not None:
            self._since_base = SinceBase(self._own(changed))

    def close(self) -> None:
        """Stop watching the model."""
        self._tracker.close()


def _mask(rows: int, share: range) -> bitmap.Words:
    words_W = bitmap.new(rows)
    bitmap.mark(words_W, np.arange(share.start, share.stop), rows)
    return words_W
