"""What changed since the last checkpoint, and what the next one takes of it.

    tracker -> cursor -> claim (this save's rows) -> committed: let go | failed: given back

Joins what sees changes (tracking/) and what chooses among them (checkpoint/selecting/chooser.py);
the rest of a checkpointer knows only selections.

Invariants:
- The rows of a save that did not commit are in the next one.
- A row that only other ranks write is never claimed (checkpoint/ranks/agreement.py).

Not here: whether a base or a delta is taken (checkpoint/planning/bases.py).

# words_W: a bitmap of the rows of a table held here
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from holdfast.checkpoint.format.catalog import BASE
from holdfast.checkpoint.planning.bases import SINCE_BASE, BaseChoice, deltas_since
from holdfast.checkpoint.run import as_ids
from holdfast.checkpoint.saving.snapshot import StagedPart
from holdfast.checkpoint.selecting.chooser import make_chooser
from holdfast.checkpoint.selecting.selection import Selection
from holdfast.checkpoint.strategy import Strategy
from holdfast.checkpoint.tracking import Marks, Notice, SinceBase, Tracker
from holdfast.errors import InvalidRequestError
from holdfast.kernels.rows import bitmap
from holdfast.model.model_state import ModelState
from holdfast.model.names import plain_name
from holdfast.model.placement import Placement


class Changed:
    """Sees what training changes in a model's tables, and hands it out to saves."""

    def __init__(
        self,
        state: ModelState,
        strategy: Strategy,
        *,
        tracking: str,
        saved_rows: Mapping[str, range],
        placement: Placement | None,
    ) -> None:
        """``saved_rows``: by table, the rows that this process saves; others save the rest."""
        self._state = state
        self._strategy = strategy
        self._placement = placement
        self._tracking = tracking
        self._begin(saved_rows)

    def _begin(self, saved_rows: Mapping[str, range]) -> None:
        """Watch the tables there are."""
        tables = self._tables = list(self._state.tables)
        self._saved_rows = saved_rows
        self._masks = {
            table.name: _mask(table.rows, saved_rows[table.name])
            for table in tables
            if len(saved_rows.get(table.name, range(table.rows))) < table.rows
        }
        self._tracker = Tracker(
            tables if self.has_deltas else [], tracking=self._tracking, spans=saved_rows
        )
        self._cursor = self._tracker.cursor()
        hot = self._strategy.priority
        self._chooser = None if hot is None else make_chooser(hot, tables, self._tracker)
        self._since_base = SinceBase() if self._strategy.has_rollups else None
        self._claim: Marks | None = None

    def _follow_tables(self) -> None:
        """Watch other tables, where the model has others now: all of their rows are new."""
        tables = self._state.tables
        if list(map(id, tables)) != list(map(id, self._tables)):
            self._tracker.close()
            # Only where one process holds them whole (ModelState.follow_model).
            self._begin({table.name: range(table.rows) for table in tables})
            self._tracker.mark_all()

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

    def catch_up(self) -> list[Notice]:
        """Find every change up to now; what there is to tell of how they were found."""
        self._follow_tables()
        return self._tracker.catch_up(self._cursor)

    def pending_bytes(self) -> int:
        """What the rows that a delta would take now are as the model holds them."""
        if not self.has_deltas or self._chooser is not None:
            return 0  # no delta, or one that takes a fixed part of them
        marks = self._own(self._cursor.peek())
        return sum(
            int(bitmap.count(marks[t.name])) * t.schema().row_bytes for t in self._state.tables
        )

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
        name = plain_name(table)
        held = [found for found in self._state.tables if found.whole_name == name]
        if not held:
            known = sorted({found.whole_name for found in self._state.tables})
            raise InvalidRequestError("no such table", table=table, tables=known)
        if isinstance(ids, torch.Tensor):
            ids = ids.detach().cpu().numpy().reshape(-1)
        for found in held:
            local_N = found.shard.local_of(as_ids(ids, found.schema()))
            if self.has_deltas:
                self._tracker.mark(found.name, local_N[local_N >= 0])

    def select(self, choice: BaseChoice) -> list[Selection]:
        """The rows that a checkpoint takes of what ``catch_up`` found, by table; claimed until
        ``settle``."""
        tables = self._state.tables
        is_differential = choice.since == SINCE_BASE and not choice.is_rollup
        if is_differential:
            marks = self._own(self._cursor.peek())
        else:
            marks = self._claim = self._own(self._cursor.advance())
        if choice.kind == BASE:
            if self._chooser is not None:
                self._chooser.saved(None)
            if self.has_deltas:
                for table in tables:
                    self._tracker.begin_save(table.name, is_whole=True)
            return [
                Selection(t.rows, placement=self._placement, within=self._saved_rows.get(t.name))
                for t in tables
            ]
        if self._chooser is not None:
            marks, later = self._chooser.choose(marks)
            self._claim = marks
            self._cursor.give_back(later)
            self._chooser.saved(marks)
        if choice.is_rollup and self._since_base is not None:
            marks = self._since_base.joined(marks)
        for table in tables:
            rows = len(self._saved_rows.get(table.name, range(table.rows)))
            is_whole = bitmap.count(marks[table.name]) == rows
            self._tracker.begin_save(table.name, is_whole=bool(is_whole))
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
        self._tracker.end_save(is_committed=is_committed)
        if not is_committed and kind == BASE:
            self._tracker.mark_all()  # its copies are known as saved, and are not
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
        self._follow_tables()
        self._tracker.reset()
        if self._chooser is not None:
            self._chooser.reset()
        if self._is_since_base:
            self._cursor.give_back(changed)
        if self._since_base is not None:
            self._since_base = SinceBase(self._own(changed))

    def learn(self, staged: StagedPart) -> None:
        """These rows were copied for a save: remember what they look like."""
        if self.has_deltas:
            part = staged.part
            ids_N = range(part.start, part.stop) if part.ids_N is None else part.ids_N
            names = [column.name for column in staged.schema.columns]
            self._tracker.learn(staged.schema.name, ids_N, names, staged.columns)

    def scan(self) -> None:
        """After a save, in the background: check a part of the rows for changes nobody saw."""
        self._tracker.scan(self._cursor)

    def close(self) -> None:
        """Stop watching the model."""
        self._tracker.close()


def _mask(rows: int, saved: range) -> bitmap.Words:
    words_W = bitmap.new(rows)
    bitmap.mark(words_W, np.arange(saved.start, saved.stop), rows)
    return words_W
