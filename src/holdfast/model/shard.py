"""A shard: the part of a table that one process holds, in global terms. No torch.

Row-wise sharding gives a process some rows, column-wise sharding some floats of every row, both
together a grid of shards; table-wise sharding gives it whole tables or none. Data-parallel training
replicates tables: every process holds the same shard.

    local row i of a shard  <->  row ``row_ids[i]`` of the table, floats ``columns``

Invariants:
- Row ids are global wherever they are stored or sent; local rows never leave a process.
- ``row_ids`` are strictly ascending, so that rows in local order are in global order too.
- Shards with the same ``columns`` are one stored table; its rows are divided among the processes.

Not here: the tensors of a shard (tables.py), which process writes a replicated one
(checkpoint/ranks/agreement.py).

# N ids
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.errors import InvalidRequestError
from holdfast.model.schema import FLOAT32, Column, Cut, TableSchema

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Shard:
    """Which rows and floats of a table of ``rows`` x ``width`` floats a process holds.

    ``row_ids`` None: all rows; a range of step 1 or ascending ids else. ``columns`` None: whole
    rows. ``is_replicated``: every process holds the same.
    """

    rows: int
    width: int
    row_ids: range | Ids | None = None
    columns: range | None = None
    is_replicated: bool = False
    table: str | None = None
    """The table's name where it is another than its parameter's."""

    def __post_init__(self) -> None:
        ids = range(self.rows) if self.row_ids is None else self.row_ids
        if not isinstance(ids, range):
            ids = _as_range(np.ascontiguousarray(ids, np.int64))
        columns = range(self.width) if self.columns is None else self.columns
        object.__setattr__(self, "row_ids", ids)
        object.__setattr__(self, "columns", columns)
        is_inside = len(ids) == 0 or (ids[0] >= 0 and ids[-1] < self.rows)
        if isinstance(ids, range):
            is_ascending = ids.step == 1
        else:
            is_ascending = ids.ndim == 1 and bool((np.diff(ids) > 0).all())
        if not (is_inside and is_ascending):
            raise InvalidRequestError(
                "a shard's rows are ascending ids of its table",
                rows=self.rows,
                held=len(ids),
                first=int(ids[0]) if len(ids) else None,
                last=int(ids[-1]) if len(ids) else None,
            )
        is_slice = columns.step == 1 and 0 <= columns.start < columns.stop <= self.width
        if not is_slice:
            raise InvalidRequestError(
                "a shard's columns are a range of the row's floats", columns=columns,
                width=self.width,
            )  # fmt: skip

    @property
    def ids(self) -> range | Ids:
        """The global row of every local one."""
        assert self.row_ids is not None
        return self.row_ids

    @property
    def floats(self) -> range:
        """Which floats of a row."""
        assert self.columns is not None
        return self.columns

    @property
    def local_rows(self) -> int:
        """How many rows are held."""
        return len(self.ids)

    @property
    def is_cut(self) -> bool:
        """Whether rows are held only in part."""
        return len(self.floats) != self.width

    @property
    def is_whole(self) -> bool:
        """Whether all of the table is held."""
        return self.local_rows == self.rows and not self.is_cut

    def schema(
        self, name: str, state: tuple[Column, ...] = (), *, dtype: str = FLOAT32
    ) -> TableSchema:
        """The stored table that this shard's rows belong to; ``dtype`` is that of the weights."""
        columns = self.floats
        weight = Column("weight", len(columns), dtype)
        if not self.is_cut:
            return TableSchema(name, self.rows, (weight, *state))
        stored = f"{name}[{columns.start}:{columns.stop}]"
        return TableSchema(
            stored, self.rows, (weight, *state), Cut(name, columns.start, self.width)
        )

    def global_ids(self, local_N: Ids) -> Ids:
        """The global ids of local rows.

        >>> Shard(9, 4, range(3, 9)).global_ids(np.array([0, 2]))
        array([3, 5])
        """
        ids = self.ids
        if isinstance(ids, range):
            return local_N + ids.start if ids.start else local_N
        found: Ids = ids[local_N]
        return found

    def local_of(self, ids_N: Ids) -> Ids:
        """The local row of each global id; -1 where it is not held.

        >>> Shard(9, 4, range(3, 6)).local_of(np.array([2, 3, 5, 6]))
        array([-1,  0,  2, -1])
        >>> Shard(9, 4, np.array([1, 4, 8])).local_of(np.array([1, 2, 8]))
        array([ 0, -1,  2])
        """
        ids = self.ids
        if isinstance(ids, range):
            local_N = ids_N - ids.start
            return np.where((local_N >= 0) & (local_N < len(ids)), local_N, -1)
        if len(ids) == 0:
            return np.full(len(ids_N), -1, np.int64)
        at_N = np.minimum(np.searchsorted(ids, ids_N), len(ids) - 1)
        return np.where(ids[at_N] == ids_N, at_N, -1)

    def may_hold(self, first: int, last: int) -> bool:
        """Whether a row from ``first`` to ``last`` may be held."""
        ids = self.ids
        if len(ids) == 0:
            return False
        if isinstance(ids, range):
            return first < ids.stop and ids.start <= last
        return bool(np.searchsorted(ids, first) < np.searchsorted(ids, last + 1))


def _as_range(ids_N: Ids) -> range | Ids:
    """Ids that follow each other are a range, which costs nothing to look up."""
    if ids_N.ndim == 1 and len(ids_N) and (np.diff(ids_N) == 1).all():
        return range(int(ids_N[0]), int(ids_N[-1]) + 1)
    return ids_N
