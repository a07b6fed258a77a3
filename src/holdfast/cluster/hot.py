"""Hot rows: rows that change so often that copies of them cost less traffic than their stripes do.

    ClusterSpec(hot={"users": ids}) -> a table of those rows, copied, told to parity by gradients

A coded row is told to parity as a whole record; a copy as a gradient, which is narrower where
optimizer state is wide. So some rows of a table can lie in a table of their own beside it, the hot
table: the same rows in the order of their ids, with one data row a stripe. Its base table keeps
places for them, which nobody reads.

Invariants:
- To whoever pulls, pushes, reads or saves there is one table, as if no row of it were hot.
- A hot row begins with the bits it has in its base table, and is trained alike.
- As many servers may be lost as before.

Not here: which rows are worth it (choosehot.py), where they are mapped (client.py, audit.py,
store.py).

# N ids of a request, H hot rows of a table
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.errors import InvalidRequestError

if TYPE_CHECKING:
    from holdfast.cluster.spec import TableSpec

HOT_ROWS_MAX = 1 << 16  # of a table: every server and worker is told them


@dataclass(frozen=True)
class HotTable:
    """The hot rows of one table."""

    base: TableSpec
    ids: tuple[int, ...]

    @cached_property
    def ids_H(self) -> np.ndarray:
        """Their ids in the base table, ascending."""
        return np.array(self.ids, np.int64)

    @cached_property
    def table(self) -> TableSpec:
        """They alone, as a table: copies, as many as their stripes had parities."""
        return dataclasses.replace(
            self.base,
            name=name_hot(self.base.name),
            rows=len(self.ids),
            placement=dataclasses.replace(self.base.placement, data=1),
            propagation="gradient",
        )

    def find(self, ids_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which ids of the base table are hot, and for those the rows of the hot table.

        >>> from holdfast.cluster.spec import TableSpec
        >>> from holdfast.model.placement import Placement
        >>> hot = HotTable(TableSpec("users", 9, 4, Placement(3, data=2, parity=1)), (2, 5))
        >>> hot.find(np.array([5, 0, 2, 8]))
        (array([ True, False,  True, False]), array([1, 0]))
        """
        ranks_N = np.searchsorted(self.ids_H, ids_N)
        is_hot_N = self.ids_H[np.minimum(ranks_N, len(self.ids_H) - 1)] == ids_N
        return is_hot_N, ranks_N[is_hot_N]


def name_hot(name: str) -> str:
    """What the hot rows of a table are called in the arenas.

    >>> name_hot("users")
    'users (hot)'
    """
    return f"{name} (hot)"


def check_hot(tables: Iterable[TableSpec], hot: object) -> dict[str, tuple[int, ...]]:
    """Hot rows as plain numbers, by table; tables without any are left out.

    Raises:
        InvalidRequestError: there are no such rows, or copies of them make no sense.
    """
    by_name = {table.name: table for table in tables}
    if not isinstance(hot, Mapping):
        raise InvalidRequestError("hot rows are ids by table", hot=repr(hot)[:40])
    found = {}
    for name, ids in hot.items():
        if name not in by_name:
            raise InvalidRequestError("no such table", table=name, tables=list(by_name))
        table = by_name[name]
        if table.is_held or table.code not in ("xor", "rs") or table.placement.data == 1:
            raise InvalidRequestError(
                "only rows of stripes that are coded exactly can be copied instead",
                table=name,
                code=table.code,
                data=table.placement.data,
                todo="leave the hot rows of this table out",
            )
        if name_hot(name) in by_name:
            raise InvalidRequestError("a table has the name of hot rows", table=name_hot(name))
        checked = _check_ids(table, ids)
        if checked:
            found[name] = checked
    return found


def _check_ids(table: TableSpec, ids: Any) -> tuple[int, ...]:
    try:
        ids_H = np.asarray(ids)
    except ValueError as error:  # lists of lists of any lengths
        raise InvalidRequestError("hot rows are ids", table=table.name) from error
    if ids_H.size == 0:
        return ()
    if ids_H.ndim != 1 or ids_H.dtype.kind not in "iu" or len(ids_H) > HOT_ROWS_MAX:
        raise InvalidRequestError(
            "hot rows are ids, a few thousand at most",
            table=table.name,
            dtype=str(ids_H.dtype),
            shape=ids_H.shape,
            most=HOT_ROWS_MAX,
        )
    is_known = ids_H[0] >= 0 and ids_H[-1] < table.rows and bool((ids_H[1:] > ids_H[:-1]).all())
    if not is_known:
        raise InvalidRequestError(
            "ids of hot rows ascend, and are ids of their table", table=table.name, rows=table.rows
        )
    return tuple(ids_H.tolist())
