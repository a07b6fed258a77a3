"""Which rows a checkpoint saves: all of them, or the changed ones, cut into parts.

    plan + cursor -> Selection per table -> RowPart: what the snapshot gathers and a segment holds

Invariant: the parts of a selection hold each of its rows exactly once, ascending within a part;
with a placement a part holds rows of one server, and servers come one after the other.

Not here: when a base is taken (checkpoint/planning/bases.py), how changes are seen
(checkpoint/tracking/tracker.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.kernels.rows import bitmap
from holdfast.model.placement import Placement

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class RowPart:
    """Some rows of a selection: contiguous where ``ids_N`` is None."""

    start: int
    stop: int
    ids_N: npt.NDArray[np.int64] | None

    @property
    def rows(self) -> int:
        """How many rows the part holds."""
        return self.stop - self.start if self.ids_N is None else len(self.ids_N)

    def ids(self) -> npt.NDArray[np.int64]:
        """The row ids, ascending."""
        return np.arange(self.start, self.stop) if self.ids_N is None else self.ids_N


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows of one table to save: all (``words_W`` None), or the marked ones.

    With a ``placement`` every server's rows are saved apart, so that they can be read apart.
    ``within``: of all rows only these are this process's to save; marked ones are its own already.
    """

    table_rows: int
    words_W: Words | None = None
    placement: Placement | None = None
    within: range | None = None

    @property
    def rows(self) -> int:
        """How many rows are selected."""
        return len(self._all) if self.words_W is None else int(bitmap.count(self.words_W))

    @property
    def _all(self) -> range:
        return range(self.table_rows) if self.within is None else self.within

    def parts(self, rows_max: int) -> Iterator[RowPart]:
        """The selection in parts of at most ``rows_max`` rows.

        >>> [(part.start, part.stop) for part in Selection(10).parts(4)]
        [(0, 4), (4, 8), (8, 10)]
        >>> [part.ids().tolist() for part in Selection(5, placement=Placement(2)).parts(2)]
        [[0, 2], [4], [1, 3]]
        """
        if self.placement is not None:
            yield from self._parts_of_servers(self.placement, rows_max)
            return
        if self.words_W is None:
            for start in self._all[::rows_max]:
                yield RowPart(start, min(self._all.stop, start + rows_max), None)
            return
        bounds = bitmap.split(self.words_W, rows_max)
        for lo, hi in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            ids_N = bitmap.ids(self.words_W, lo, hi)
            if len(ids_N):
                yield RowPart(lo, hi, ids_N)

    def _parts_of_servers(self, placement: Placement, rows_max: int) -> Iterator[RowPart]:
        for server in range(placement.servers):
            ids_N = placement.rows_of(server, self.table_rows)
            if self.words_W is not None:
                ids_N = ids_N[bitmap.is_set(self.words_W, ids_N)]
            for start in range(0, len(ids_N), rows_max):
                part_N = ids_N[start : start + rows_max]
                yield RowPart(int(part_N[0]), int(part_N[-1]) + 1, part_N)
