"""Pushes that parity may still lack: what workers sent to this server, and copies of others' parts.

    stage -> (commit) applied -> its differences at parity -> forgotten
    copy  -> kept by a witness until the server it is for says that parity has it

With two-phase commit a worker stages every part of a push twice: at its server, and at the server's
witnesses (``ClusterSpec.witnesses``), as many as losses can be decoded. So the worker and that many
servers can be lost at once, at any moment: whoever takes a lost server's place is given its part of
what was committed by a witness, and whoever takes a witness's place is given copies by the servers.

Invariants:
- A part that was staged is here until parity has it, or until it is decided that it never happened.
- A copy is forgotten only when its owner has said that parity has it, or with that decision.
- A worker that is barred is not heard any more.

Not here: applying pushes to rows (shard.py), which of a lost worker's pushes happen (commit.py).
Whoever calls holds the shard's lock.

# N rows of a part, D weights of a row, W workers
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.errors import ConflictError, InvalidRequestError

BARRED = "barred"
SLICE_BYTES = 64 << 20  # of parts in one message
_PARTS_MAX = 1 << 18  # a worker has less than a hundred under way, for each server


@dataclass(frozen=True, slots=True)
class Gradients:
    """What a push brings for one arena: gradients of rows, by their slots at their server."""

    arena: int
    slots_N: np.ndarray
    grads_ND: np.ndarray


Part = Sequence[Gradients]
"""What a push brings for one server."""


@dataclass(frozen=True, slots=True)
class Entrusted:
    """One server's part of a push, as it travels between servers."""

    worker: int
    number: int
    part: Part
    servers: tuple[int, ...] = ()
    """All that have a part of the push: whoever finds all their parts knows that it can happen."""

    @property
    def bytes(self) -> int:
        """What it takes in a message."""
        return sum(each.slots_N.nbytes + each.grads_ND.nbytes for each in self.part)


def slices(given: Iterable[Entrusted], most: int = SLICE_BYTES) -> Iterator[list[Entrusted]]:
    """Parts in the order given, as many at a time as fit into one message."""
    found: list[Entrusted] = []
    size = 0
    for each in given:
        if found and size + each.bytes > most:
            yield found
            found, size = [], 0
        found.append(each)
        size += each.bytes
    if found:
        yield found


class Pushes:
    """The book of one server."""

    def __init__(self, *, is_keeping: bool) -> None:
        """``is_keeping``: parts stay here after they were applied, until parity has them."""
        self.is_keeping = is_keeping
        self._own: dict[tuple[int, int], Entrusted] = {}
        self._copies: dict[tuple[int, int, int], Entrusted] = {}
        self._barred: set[int] = set()

    # Who is heard.

    def bar(self, workers: Collection[int]) -> None:
        """Hear nothing more of workers that are lost."""
        self._barred.update(workers)

    def check_heard(self, worker: int) -> None:
        """Refuse what a worker says that was taken for lost.

        Raises:
            ConflictError: its ``kind`` is BARRED.
        """
        if worker in self._barred:
            raise ConflictError("this worker was taken for lost", worker=worker, kind=BARRED)

    def check_room(self, more: int) -> None:
        """Refuse parts beyond what all workers together can have under way.

        Raises:
            InvalidRequestError: there are too many already.
        """
        if max(len(self._own), len(self._copies)) + more > _PARTS_MAX:
            raise InvalidRequestError("too many pushes are kept here", most=_PARTS_MAX)

    # This server's own parts.

    def put(self, push: Entrusted) -> None:
        """Keep a part that is staged."""
        self._own[push.worker, push.number] = push

    def find(self, worker: int, *, after: int = -1) -> dict[int, Entrusted]:
        """A worker's parts, of pushes after a number, in order."""
        found = {n: push for (w, n), push in self._own.items() if w == worker and n > after}
        return dict(sorted(found.items()))

    def owed(self, workers: Collection[int] | None = None) -> list[Entrusted]:
        """Parts of pushes of some workers (None: of all), in order."""
        return [self._own[w, n] for w, n in sorted(self._own) if workers is None or w in workers]

    def apply(self, push: Entrusted) -> None:
        """A part is in the rows here, and its differences are not at parity yet."""
        if self.is_keeping:
            known = self._own.get((push.worker, push.number))
            self._own[push.worker, push.number] = known or push
        else:
            self._own.pop((push.worker, push.number), None)

    def drop(self, worker: int, *, after: int) -> None:
        """Pushes of a worker after a number never happened."""
        self._own = {
            (w, n): part for (w, n), part in self._own.items() if w != worker or n <= after
        }
        self._copies = {
            (owner, w, n): part
            for (owner, w, n), part in self._copies.items()
            if w != worker or n <= after
        }

    def forget(self, applied_W: np.ndarray, durable_W: np.ndarray) -> None:
        """Parity has what was applied up to these numbers."""
        self._own = {
            (w, n): part
            for (w, n), part in self._own.items()
            if n > durable_W[w] or n > applied_W[w]
        }

    # Copies, as a witness.

    def witness(self, owner: int, push: Entrusted) -> None:
        """Keep a copy of another server's part."""
        self._copies[owner, push.worker, push.number] = push

    def copies(self, owner: int, workers: Collection[int] | None = None) -> list[Entrusted]:
        """Copies of a server's parts of pushes of some workers (None: of all), in order."""
        return [
            self._copies[o, w, n]
            for o, w, n in sorted(self._copies)
            if o == owner and (workers is None or w in workers)
        ]

    def servers(self, worker: int) -> dict[int, tuple[int, ...]]:
        """Of a worker's pushes that are known here, which servers have parts."""
        own = [push for (w, _), push in self._own.items() if w == worker]
        copies = [push for (_, w, _), push in self._copies.items() if w == worker]
        return {push.number: push.servers for push in (*own, *copies) if push.servers}

    def copied(self, worker: int) -> dict[int, list[int]]:
        """By owner, which of a worker's pushes there are copies of."""
        found: dict[int, list[int]] = {}
        for owner, w, number in sorted(self._copies):
            if w == worker:
                found.setdefault(owner, []).append(number)
        return found

    def forget_copies(self, owner: int, durable_W: np.ndarray | None = None) -> None:
        """An owner says that parity has its parts up to these numbers; None: all are void."""
        self._copies = {
            (o, w, n): part
            for (o, w, n), part in self._copies.items()
            if o != owner or (durable_W is not None and n > durable_W[w])
        }
