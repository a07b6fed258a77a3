"""What leaves a server: its flushes by number, what is known to have arrived, what has to wait.

    pushes applied -> flush begins (marks: the pushes in it) -> arrived everywhere -> known
    freeze -> differences of some ranges wait -> thaw

Numbers. A worker numbers its pushes; ``applied_W`` is the last one of each worker that changed rows
here, ``known_GW`` the last one that parity is known to have, range by range.

Invariants:
- One flush at a time; their numbers ascend, also over those who had this place before.
- What is known never goes back while a server has its place.
- A flush leaves ranges out that are frozen when it begins.

Not here: differences themselves (arenashard.py), waiting and waking (shard.py), what arrives from
others (incoming.py). Whoever calls holds the shard's lock.

# G ranges, W workers
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from holdfast.cluster.arenashard import Differences
from holdfast.cluster.flush import Flush, Report


class Outgoing:
    """The book of one server, as a holder of rows."""

    def __init__(self, *, ranges: int, workers: int, witnesses: tuple[int, ...]) -> None:
        """``witnesses`` hear with each flush what of the pushes before has arrived."""
        self.flush: Flush | None = None
        """The one that is on its way."""
        self.applied_W = np.full(workers, -1, np.int64)
        self._known_GW = np.full((ranges, workers), -1, np.int64)
        self._witnesses = witnesses
        self._told_W = np.full(workers, -1, np.int64)  # witnesses, of what is known
        self._next = 1
        self._last_whole = 0  # the last flush that arrived with nothing left out
        self._frozen: dict[str, frozenset[int]] = {}

    def adopt(self, reports: Mapping[int, Report]) -> None:
        """Go on where a lost server ended, from what others know of it."""
        if reports:
            self._known_GW = np.min([report.marks_GW for report in reports.values()], axis=0)
            self.applied_W = self._known_GW.min(axis=0)
        newest = (max(report.flushed, report.kept or 0) for report in reports.values())
        self._next = 1 + max(newest, default=0)

    def resume(self, applied: Sequence[int]) -> None:
        """Rows have all pushes up to these in them, and so will parities that are built of them."""
        self.applied_W[: len(applied)] = applied
        self._known_GW[:] = self.applied_W

    # Flushes.

    @property
    def next(self) -> int:
        """The number of the next flush."""
        return self._next

    @property
    def known_W(self) -> np.ndarray:
        """For each worker the last push that parity is known to have, in all ranges."""
        known_W: np.ndarray = self._known_GW.min(axis=0)
        return known_W

    def has_news(self) -> bool:
        """Whether others lack numbers that are known here."""
        known_W = self.known_W
        is_untold = len(self._witnesses) > 0 and bool((known_W > self._told_W).any())
        return is_untold or bool((self.applied_W > known_W).any())

    def begin(self, found: Mapping[int, Sequence[Differences]]) -> Flush:
        """These differences leave, by receiver; witnesses receive also nothing."""
        assert self.flush is None
        parts = dict.fromkeys(self._witnesses, ()) | {
            receiver: tuple(each) for receiver, each in found.items()
        }
        self.flush = Flush(
            self._next,
            self.applied_W.copy(),
            tuple(sorted(self.frozen)),
            tuple(sorted(parts)),
            parts,
            self.known_W,
        )
        self._next += 1
        return self.flush

    def end(self) -> Flush:
        """The flush under way has arrived everywhere, or its receiver is lost; which it was."""
        flush = self.flush
        assert flush is not None
        is_open_G = np.ones(len(self._known_GW), bool)
        is_open_G[list(flush.frozen)] = False
        self._known_GW[is_open_G] = np.maximum(self._known_GW[is_open_G], flush.marks_W)
        self._told_W = flush.durable_W
        if not flush.frozen:
            self._last_whole = flush.number
        self.flush = None
        return flush

    def has_arrived(self, applied_W: np.ndarray, after: int) -> bool:
        """Whether parity has all pushes up to these, and a flush numbered so or later arrived with
        nothing left out: rows that are assigned have no numbers."""
        return bool((self.known_W >= applied_W).all()) and self._last_whole >= after

    # Freezes.

    @property
    def frozen(self) -> frozenset[int]:
        """Ranges whose differences wait."""
        return frozenset[int]().union(*self._frozen.values())

    @property
    def tickets(self) -> int:
        """How many freezes there are."""
        return len(self._frozen)

    def freeze(self, ticket: str, granules: Collection[int]) -> None:
        """Leave ranges out from the next flush on."""
        self._frozen[ticket] = frozenset(granules)

    def thaw(self, ticket: str | None = None) -> None:
        """Let differences of ranges leave again; without a ticket, of all."""
        if ticket is None:
            self._frozen.clear()
        else:
            self._frozen.pop(ticket, None)

    def frozen_by(self, ticket: str) -> frozenset[int] | None:
        """The ranges that wait under a ticket; None if it is void."""
        return self._frozen.get(ticket)

    def known_of(self, granules: Collection[int]) -> np.ndarray:
        """The marks of what has left of ranges, in the order given."""
        marks_GW: np.ndarray = self._known_GW[list(granules)]
        return marks_GW
