"""Hot rows first: which r·N rows of the large tables a checkpoint saves (CPR, section 4.2).

    optimizer.step -> tracker -> see() ; a checkpoint is due -> choose() -> selection

Three ways to tell which rows matter most. ``scar``: those that changed most since they were saved;
needs a copy of the tables. ``mfu``: those used most since they were saved; a counter a row.
``ssu``: some of those used, hot ones most likely; a bit a row. They apply to the largest tables,
which together hold nearly all rows; of the others every changed row is saved.

Invariants:
- At most r·N rows of a large table are chosen, and only rows that were used, or changed.
- A row that was not chosen stays changed: the next checkpoint may save it.
- What a save had taken that failed comes first again (``ssu``: when it is used again).

Not here: the kernels (kernels/priority.py), when a checkpoint is due (schedule.py).

# N rows of a table, K ids, words_W: a set of rows, a bit a row
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from holdfast.checkpoint.tracker import LookupTracker, Tracker
from holdfast.errors import InvalidRequestError
from holdfast.kernels import bitmap, priority
from holdfast.tables import Table

Words = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]

SCAR, MFU, SSU = "scar", "mfu", "ssu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Priority:
    """Save the ``r``·N most important rows, 1/r times as often.

    ``by``: scar, mfu or ssu. ``share``: of all rows, those of the largest tables to which it
    applies. ``period``: ssu looks at one of so many lookups.
    """

    by: str
    r: float = 0.125
    share: float = 0.99
    period: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.by not in (SCAR, MFU, SSU):
            raise InvalidRequestError("unknown priority", by=self.by, known=[SCAR, MFU, SSU])
        for name in ("r", "share"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value <= 1:
                raise InvalidRequestError(
                    f"{name} is a share of the rows", todo="give a number above 0, up to 1",
                    **{name: value},
                )  # fmt: skip
        if isinstance(self.period, bool) or not isinstance(self.period, int) or self.period < 1:
            raise InvalidRequestError("a period is a whole number of lookups", period=self.period)

    @property
    def saves_a_round(self) -> int:
        """After so many saves as many rows were saved as a table has."""
        return max(1, round(1 / self.r))


def large_tables(rows: Mapping[str, int], share: float) -> list[str]:
    """The largest tables that together hold at least ``share`` of all rows.

    >>> large_tables({"a": 10, "b": 980, "c": 5, "d": 30}, 0.98)
    ['b', 'd']
    """
    chosen: list[str] = []
    held, total = 0, sum(rows.values())
    for name in sorted(rows, key=lambda name: -rows[name]):
        if held >= share * total:
            break
        chosen.append(name)
        held += rows[name]
    return chosen


class _Choice(Protocol):
    """How one table's rows are told apart."""

    @property
    def bytes(self) -> int: ...

    def see(self, ids_K: Ids) -> None: ...

    def choose(self, count: int) -> Words: ...

    def saved(self, words_W: Words | None) -> None: ...

    def give_back(self, words_W: Words) -> None: ...


class _MostUsed:
    def __init__(self, table: Table) -> None:
        self._counters_N = np.zeros(table.rows, np.uint32)

    @property
    def bytes(self) -> int:
        return self._counters_N.nbytes

    def see(self, ids_K: Ids) -> None:
        priority.count(self._counters_N, ids_K)

    def choose(self, count: int) -> Words:
        return priority.top_set(self._counters_N, count)

    def saved(self, words_W: Words | None) -> None:
        if words_W is None:
            self._counters_N[:] = 0
        else:
            priority.clear(self._counters_N, bitmap.ids(words_W, 0, len(self._counters_N)))

    def give_back(self, words_W: Words) -> None:
        ids_K = bitmap.ids(words_W, 0, len(self._counters_N))
        self._counters_N[ids_K] = np.iinfo(np.uint32).max  # comes first again


class _SomeUsed:
    def __init__(self, table: Table, rules: Priority) -> None:
        self._rows = table.rows
        self._capacity = _count(table.rows, rules.r)
        self._period = rules.period
        self._words_W = bitmap.new(table.rows)
        self._state_S = priority.new_state(rules.seed)

    @property
    def bytes(self) -> int:
        return self._words_W.nbytes + self._state_S.nbytes

    def see(self, ids_K: Ids) -> None:
        priority.sample(
            self._words_W, self._state_S, ids_K, self._rows, self._capacity, self._period
        )

    def choose(self, count: int) -> Words:
        return self._words_W.copy()

    def saved(self, words_W: Words | None) -> None:
        priority.reset(self._words_W, self._state_S)

    def give_back(self, words_W: Words) -> None:
        """Nothing: its rows are listed again when they are used again."""


class _MostChanged:
    def __init__(self, table: Table) -> None:
        self._table = table
        self._saved_ND = table.tensors()[0].cpu().numpy().copy()

    @property
    def bytes(self) -> int:
        return self._saved_ND.nbytes

    def see(self, ids_K: Ids) -> None:
        """Nothing: the rows themselves tell."""

    def choose(self, count: int) -> Words:
        changes_N = np.empty(self._table.rows, np.float32)
        priority.changes(self._weights(), self._saved_ND, changes_N)
        return priority.top_set(changes_N, count)

    def saved(self, words_W: Words | None) -> None:
        weights_ND = self._weights()
        if words_W is None:
            self._saved_ND[:] = weights_ND
        else:
            ids_K = bitmap.ids(words_W, 0, self._table.rows)
            self._saved_ND[ids_K] = weights_ND[ids_K]

    def give_back(self, words_W: Words) -> None:
        self._saved_ND[bitmap.ids(words_W, 0, self._table.rows)] = np.inf  # comes first again

    def _weights(self) -> np.ndarray:
        weights_ND: np.ndarray = self._table.tensors()[0].cpu().numpy()
        return weights_ND


def _count(rows: int, r: float) -> int:
    return max(1, int(r * rows))


class Chooser:
    """Chooses rows of a model's large tables."""

    def __init__(self, rules: Priority, tables: Sequence[Table]) -> None:
        self.rules = rules
        large = set(large_tables({table.name: table.rows for table in tables}, rules.share))
        self._tables = {table.name: table for table in tables if table.name in large}
        self._choices: dict[str, _Choice] = {
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
            chosen_W = choice.choose(_count(self._tables[name].rows, self.rules.r))
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


def _make_choice(rules: Priority, table: Table) -> _Choice:
    if rules.by == MFU:
        return _MostUsed(table)
    return _SomeUsed(table, rules) if rules.by == SSU else _MostChanged(table)


def make_chooser(rules: Priority, tables: Sequence[Table], tracker: Tracker) -> Chooser:
    """A chooser that hears of every lookup the tracker sees.

    Raises:
        InvalidRequestError: it must count lookups, and the tracker sees none.
    """
    chooser = Chooser(rules, tables)
    if isinstance(tracker, LookupTracker):
        tracker.listen(chooser.see)
    elif rules.by != SCAR:
        raise InvalidRequestError(
            "this priority counts lookups, and row hashes do not see them",
            priority=rules.by,
            todo="use tracking='lookup', or priority by scar",
        )
    return chooser
