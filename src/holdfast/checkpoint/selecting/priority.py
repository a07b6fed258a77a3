"""Hot rows first: which r·N rows of a large table matter most (CPR, section 4.2). No torch.

    rows are used -> see() ; a checkpoint is due -> choose() -> saved(), or take() -> put_back()

Three ways to tell which rows matter most. ``scar``: those that changed most since they were saved;
needs a copy of the tables. ``mfu``: those used most since they were saved; a counter a row.
``ssu``: some of those used, hot ones most likely; a bit a row. They apply to the largest tables,
which together hold nearly all rows; of the others every changed row is saved.

Invariants:
- At most r·N rows of a table are chosen, and only rows that were used, or changed.
- ``put_back`` undoes ``take``: rows of a save that failed have their uses of before and those since
  (``scar``: they come first). ``give_back`` needs nothing to be kept: they come first again
  (``ssu``: when they are used again).

Not here: the kernels (kernels/rows/priority.py); all tables of a model (chooser.py), of a server
(cluster/uses.py).

# N rows of a table, K ids, words_W: a set of rows, a bit a row; a taken_X: what put_back needs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from holdfast.errors import InvalidRequestError
from holdfast.kernels.rows import bitmap, priority

Words = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]
Taken = npt.NDArray[Any]

SCAR, MFU, SSU = "scar", "mfu", "ssu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Priority:
    """Save the ``r``·N most important rows, 1/r times as often (``save_every``).

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
        """After so many saves as many rows were saved as a table has: a round."""
        return max(1, round(1 / self.r))

    def within(self, every: int) -> Priority:
        """This priority, or one with a larger r where ``every`` steps are fewer than the saves of a
        round: then each step saves, and as many rows as make a round of ``every`` saves.

        >>> Priority(by="mfu").within(100).r, Priority(by="mfu").within(5).r
        (0.125, 0.2)
        """
        return self if self.saves_a_round <= every else replace(self, r=1 / every)

    def save_every(self, every: int) -> int:
        """Steps from save to save so that a round takes at most ``every`` steps, and no more
        samples are lost than where all rows are saved every so many steps.

        Where the saves of a round do not divide ``every``, the round ends early rather than late.

        >>> [Priority(by="mfu").save_every(n) for n in (80, 100, 8, 5)]
        [10, 12, 1, 1]
        """
        return max(1, every // self.saves_a_round)


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


def rows_to_choose(rows: int, r: float) -> int:
    """How many rows of a table a checkpoint may hold: r·N, and one at least.

    >>> rows_to_choose(800, 0.125), rows_to_choose(5, 0.125)
    (100, 1)
    """
    return max(1, int(r * rows))


class Choice(Protocol):
    """How one table's rows are told apart."""

    @property
    def bytes(self) -> int:
        """Memory it keeps."""

    def see(self, ids_K: Ids) -> None:
        """Training used these rows, repeated ids included."""

    def choose(self, count: int) -> Words:
        """The rows that matter most, at most so many."""

    def saved(self, words_W: Words | None) -> None:
        """A snapshot took these rows (None: all)."""

    def give_back(self, words_W: Words) -> None:
        """The save that took these rows failed."""

    def take(self, ids_K: Ids) -> Taken:
        """``saved``, and what ``put_back`` needs should that save fail."""

    def put_back(self, ids_K: Ids, taken_X: Taken) -> None:
        """The save failed for which these rows were taken."""


class _MostUsed:
    def __init__(self, rows: int) -> None:
        self._counters_N = np.zeros(rows, np.uint32)

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

    def take(self, ids_K: Ids) -> Taken:
        taken_K: Taken = self._counters_N[ids_K]
        priority.clear(self._counters_N, ids_K)
        return taken_K

    def put_back(self, ids_K: Ids, taken_X: Taken) -> None:
        seen_K = self._counters_N[ids_K]
        room_K = np.iinfo(np.uint32).max - seen_K  # a full counter stays full
        self._counters_N[ids_K] = seen_K + np.minimum(taken_X, room_K)


class _SomeUsed:
    def __init__(self, rows: int, rules: Priority) -> None:
        self._rows = rows
        self._capacity = rows_to_choose(rows, rules.r)
        self._period = rules.period
        self._words_W = bitmap.new(rows)
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

    def take(self, ids_K: Ids) -> Taken:
        taken_W = self._words_W.copy()
        priority.reset(self._words_W, self._state_S)
        return taken_W

    def put_back(self, ids_K: Ids, taken_X: Taken) -> None:
        priority.relist(
            self._words_W, self._state_S, taken_X, self._rows, self._capacity, self._period
        )


class _MostChanged:
    def __init__(self, weights: Callable[[], np.ndarray]) -> None:
        self._weights = weights
        self._saved_ND = weights().copy()

    @property
    def bytes(self) -> int:
        return self._saved_ND.nbytes

    def see(self, ids_K: Ids) -> None:
        """Nothing: the rows themselves tell."""

    def choose(self, count: int) -> Words:
        changes_N = np.empty(len(self._saved_ND), np.float32)
        priority.changes(self._weights(), self._saved_ND, changes_N)
        return priority.top_set(changes_N, count)

    def saved(self, words_W: Words | None) -> None:
        if words_W is None:
            self._saved_ND[:] = self._weights()
        else:
            self.take(bitmap.ids(words_W, 0, len(self._saved_ND)))

    def give_back(self, words_W: Words) -> None:
        self._saved_ND[bitmap.ids(words_W, 0, len(self._saved_ND))] = np.inf  # comes first again

    def take(self, ids_K: Ids) -> Taken:
        self._saved_ND[ids_K] = self._weights()[ids_K]
        return np.empty(0, np.float32)

    def put_back(self, ids_K: Ids, taken_X: Taken) -> None:
        self._saved_ND[ids_K] = np.inf


def make_choice(rules: Priority, rows: int, weights: Callable[[], np.ndarray]) -> Choice:
    """How rows of a table are told apart; ``weights`` gives the table as it is now."""
    if rules.by == MFU:
        return _MostUsed(rows)
    return _SomeUsed(rows, rules) if rules.by == SSU else _MostChanged(weights)


def warm() -> None:
    """Compile or load the kernels of choosing."""
    ids_N = np.array([1, 2, 5], np.int64)
    counters_N = np.zeros(64, np.uint32)
    words_W, state_S = bitmap.new(64), priority.new_state(0)
    for kind in (np.int64, np.int32):
        priority.count(counters_N, ids_N.astype(kind))
        priority.sample(words_W, state_S, ids_N.astype(kind), 64, 8, 2)
    priority.clear(counters_N, ids_N)
    table_ND, changes_N = np.ones((64, 4), np.float32), np.zeros(64, np.float32)
    for now_ND in (table_ND, np.ones((64, 6), np.float32)[:, :4]):  # alone, or with state beside
        priority.changes(now_ND, table_ND, changes_N)
    for values_N in (counters_N, changes_N):
        priority.top_set(values_N, 2)
