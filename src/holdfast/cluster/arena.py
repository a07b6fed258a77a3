"""Arenas: tables of one shape behind each other, so that servers work on all of them at once.

A model has dozens of tables, most of the same width. One call for all their rows costs a
fraction of one call for each: messages, kernels and flushes know arenas only.

    table, id -> arena, start + id -> server, slot, stripe: the same arithmetic as for one table

Invariants:
- A table starts where places begin anew (``Placement.period_rows``): its rows lie on the servers,
  and in stripes with each other, as if it were alone, whatever tables are before it. Checkpoints
  and whoever counts a table's rows need not know of arenas.
- Rows between two tables are zero for ever.
- Hot rows are a table like others here (hot.py).

Not here: the rows (arenashard.py).

# N row ids
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from holdfast.model.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.cluster.hot import HotTable
    from holdfast.cluster.spec import Optimizer, TableSpec


@dataclass(frozen=True, slots=True)
class PlacedTable:
    """One table of an arena, and where it starts there."""

    table: TableSpec
    start: int
    hot: HotTable | None = None
    """Whose hot rows they are, if they are."""

    def first_ids(self, ids_N: np.ndarray) -> np.ndarray:
        """The ids that decide first values: hot rows begin as they do in their base table."""
        return ids_N if self.hot is None else self.hot.ids_H[ids_N]

    @property
    def slot(self) -> int:
        """Its first slot, the same on every server."""
        return self.start // self.table.placement.servers

    @property
    def stripe(self) -> int:
        """Its first stripe."""
        return self.start // self.table.placement.data


@dataclass(frozen=True)
class Arena:
    """Tables that are placed, coded and trained alike."""

    tables: tuple[PlacedTable, ...]

    @cached_property
    def rows(self) -> int:
        """All rows, those between tables included."""
        last = self.tables[-1]
        return last.start + last.table.rows

    @property
    def name(self) -> str:
        """Its tables, for people."""
        first, last = self.tables[0].table.name, self.tables[-1].table.name
        return first if len(self.tables) == 1 else f"{first} to {last}"

    @cached_property
    def dim(self) -> int:
        """Weights of a row."""
        return self.tables[0].table.dim

    @cached_property
    def width(self) -> int:
        """Floats of a record."""
        return self.tables[0].table.width

    @cached_property
    def placement(self) -> Placement:
        """Where rows lie."""
        return self.tables[0].table.placement

    @cached_property
    def code(self) -> str:
        """How they are coded."""
        return self.tables[0].table.code

    @cached_property
    def optimizer(self) -> Optimizer:
        """How they are trained."""
        return self.tables[0].table.optimizer

    @cached_property
    def is_held(self) -> bool:
        """Whether workers hold them."""
        return self.tables[0].table.is_held

    @cached_property
    def propagation(self) -> str:
        """What servers tell parity of them."""
        return self.tables[0].table.propagation

    @cached_property
    def keeps_states(self) -> bool:
        """Whether parity servers keep the optimizer state of the rows of their stripes."""
        return self.tables[0].table.keeps_states

    @cached_property
    def stripes(self) -> int:
        """How many stripes its rows form."""
        return self.placement.stripes(self.rows)

    def waiting_rows(self, rows: int, room: int) -> int:
        """For how many records that wait for parity a server with so many rows has memory; a row
        waits once, and while one push is made room for, each of its rows counts again."""
        return 0 if self.code == "none" else max(1, min(room, 2 * rows))

    def describe(self, ids_N: np.ndarray) -> str:
        """Rows of an arena as their tables number them.

        >>> from holdfast.cluster.spec import ClusterSpec, TableSpec
        >>> tables = [TableSpec(name, 10, 4, Placement(3), "none") for name in ("users", "items")]
        >>> (arena,) = ClusterSpec(tuple(tables)).arenas
        >>> arena.describe(np.array([3, 12, 14]))
        'users: 1 row (3); items: 2 rows (0 to 2)'
        """
        told = []
        for placed in self.tables:
            own_N = ids_N[(ids_N >= placed.start) & (ids_N < placed.start + placed.table.rows)]
            if len(own_N):
                ends_N = placed.first_ids(np.array([own_N.min(), own_N.max()]) - placed.start)
                first, last = ends_N.tolist()
                rows = "1 row" if len(own_N) == 1 else f"{len(own_N)} rows"
                where = f"{first}" if len(own_N) == 1 else f"{first} to {last}"
                name = placed.table.name if placed.hot is None else placed.hot.base.name
                told.append(f"{name}: {rows} ({where})")
        return "; ".join(told)


def plan_arenas(tables: Iterable[TableSpec], hot: Iterable[HotTable] = ()) -> tuple[Arena, ...]:
    """Which tables lie behind each other: those alike in all but length, name and first values.
    Hot rows come after all tables, so that those lie as they would without."""
    alike: dict[tuple[object, ...], list[PlacedTable]] = {}
    for table, rows in (
        *((table, None) for table in tables),
        *((each.table, each) for each in hot),
    ):
        key = (table.dim, table.placement, table.code, table.optimizer, table.is_held,
               table.propagation)  # fmt: skip
        before = alike.setdefault(key, [])
        start = 0
        if before:
            period = table.placement.period_rows
            start = -(-(before[-1].start + before[-1].table.rows) // period) * period
        before.append(PlacedTable(table, start, rows))
    return tuple(Arena(tuple(placed)) for placed in alike.values())
