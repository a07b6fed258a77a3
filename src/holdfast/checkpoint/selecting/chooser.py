"""Hot rows first in one process: a model's tables, and the tracker that sees them used.

    optimizer.step -> tracker -> see() ; a checkpoint is due -> choose() -> selection

Invariants:
- A row that was not chosen stays changed: the next checkpoint may save it.
- What a save had taken that failed comes first again (``ssu``: when it is used again).

Not here: how rows of one table are ranked (priority.py), when a checkpoint is due
(checkpoint/planning/schedule.py); servers of a cluster choose by themselves (cluster/uses.py).

# K ids, words_W: a set of rows, a bit a row
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from holdfast.checkpoint.selecting.priority import (
    SCAR,
    Choice,
    Ids,
    Priority,
    Words,
    large_tables,
    make_choice,
    rows_to_choose,
)
from holdfast.checkpoint.tracking import Tracker
from holdfast.model.dtypes import to_float32
from holdfast.model.tables import Table
from holdfast.model.tensors import as_array


class Chooser:
    """Chooses rows of a model's large tables."""

    def __init__(self, rules: Priority, tables: Sequence[Table]) -> None:
        self.rules = rules
        large = set(large_tables({table.name: table.rows for table in tables}, rules.share))
        self._tables = {table.name: table for table in tables if table.name in large}
        self._choices: dict[str, Choice] = {
            name: _make_choice(rules, table) for name, table in self._tables.items()
        }

    @property
    def tables(self) -> list[str]:
        """The tables of which not everything is saved."""
        return list(self._tables)

    @property
    def bytes(self) -> int:
        """Memory it keeps."""
        return sum(choice.bytes for choice in self._choices.values())

    def see(self, table: str, ids_K: Ids) -> None:
        """Training used these rows of a table, repeated ids included."""
        choice = self._choices.get(table)
        if choice is not None:
            choice.see(ids_K)

    def choose(self, marks: Mapping[str, Words]) -> tuple[dict[str, Words], dict[str, Words]]:
        """Divide the changed rows of all tables: those to save now, and those left for later."""
        now, later = dict(marks), {}
        for name, choice in self._choices.items():
            chosen_W = choice.choose(rows_to_choose(self._tables[name].rows, self.rules.r))
            now[name] = marks[name] & chosen_W
            later[name] = marks[name] & ~chosen_W
        return now, later

    def saved(self, marks: Mapping[str, Words] | None) -> None:
        """A snapshot took these rows (None: all)."""
        for name, choice in self._choices.items():
            choice.saved(None if marks is None else marks[name])

    def give_back(self, marks: Mapping[str, Words]) -> None:
        """The save that took these rows last failed."""
        for name, choice in self._choices.items():
            if name in marks:
                choice.give_back(marks[name])

    def reset(self) -> None:
        """The tables were just loaded: nothing in them is new."""
        self._choices = {
            name: _make_choice(self.rules, table) for name, table in self._tables.items()
        }


def _make_choice(rules: Priority, table: Table) -> Choice:
    def weights() -> np.ndarray:
        weights_ND = as_array(table.tensors()[0])
        # Norms are taken of numbers: types that the kernel does not know are widened.
        is_known = weights_ND.dtype in (np.float32, np.float64)
        return weights_ND if is_known else to_float32(weights_ND)

    return make_choice(rules, table.rows, weights)


def make_chooser(rules: Priority, tables: Sequence[Table], tracker: Tracker) -> Chooser:
    """A chooser that hears of every row that the tracker sees used."""
    chooser = Chooser(rules, tables)
    if rules.by != SCAR:
        tracker.listen(chooser.see)
    return chooser
