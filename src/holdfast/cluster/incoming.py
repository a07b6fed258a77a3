"""What arrives at a server's parities: whose flushes, which pushes are in them, range by range.

    flush -> kept -> taken and folded -> noted: its marks are in the parities of open ranges

A server that takes a lost one's place reads those marks (``report``) to know which pushes the rows
it decodes contain.

Invariants:
- A flush is taken to be folded at most once, in the order of their numbers.
- Marks of a range say what its parities contain; of a range that is not ready nothing is marked.

Not here: folding itself (arenashard.py), who folds what of a lost server (flush.py), what leaves
(outgoing.py). Whoever calls holds the shard's lock.

# G ranges, S servers, W workers
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from holdfast.cluster.flush import Flush, Report


class Incoming:
    """The book of one server, as a holder of parities."""

    def __init__(self, *, servers: int, ranges: int, workers: int) -> None:
        self.is_ready_G = np.zeros(ranges, bool)
        """Of which ranges the parities are here."""
        self._marks_SGW = np.full((servers, ranges, workers), -1, np.int64)
        self._flushed_S = np.zeros(servers, np.int64)
        self._kept: dict[int, Flush] = {}

    def keep(self, source: int, flush: Flush) -> bool:
        """Keep a flush until it is taken; False if it, or a later one, was folded before."""
        if flush.number <= self._flushed_S[source]:
            return False
        self._kept[source] = flush
        return True

    def take(self, source: int, number: int) -> Flush | None:
        """A flush that is kept, to be folded now; None if it is not here."""
        kept = self._kept.get(source)
        if kept is None or kept.number != number:
            return None
        return self._kept.pop(source)

    def forget(self, source: int) -> None:
        """What is kept of a server never happened."""
        self._kept.pop(source, None)

    def note(self, source: int, flush: Flush) -> None:
        """A flush was folded into the parities of ranges that are ready."""
        is_open_G = self.is_ready_G.copy()
        is_open_G[list(flush.frozen)] = False
        marks_GW = self._marks_SGW[source]
        marks_GW[is_open_G] = np.maximum(marks_GW[is_open_G], flush.marks_W)
        self._flushed_S[source] = flush.number

    def report(self, source: int) -> Report:
        """What is known here of a server's flushes."""
        kept = self._kept.get(source)
        return Report(
            flushed=int(self._flushed_S[source]),
            kept=None if kept is None else kept.number,
            receivers=() if kept is None else kept.receivers,
            marks_GW=self._marks_SGW[source].copy(),
        )

    def set_ready(self, granules: Sequence[int], marks: Mapping[int, np.ndarray]) -> None:
        """Parities of ranges are here, with the pushes of each server that these marks name."""
        for server, marks_GW in marks.items():
            self._marks_SGW[server, list(granules)] = marks_GW
        self.is_ready_G[list(granules)] = True

    def void(self, replaced: Iterable[int]) -> None:
        """All parities here are void; those in the place of some servers begin anew."""
        self.is_ready_G[:] = False
        self._marks_SGW[:] = -1
        for server in replaced:
            self._flushed_S[server] = 0
            self._kept.pop(server, None)
