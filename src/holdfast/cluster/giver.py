"""What a server gives to others that rebuild lost rows: rows by their slots, or slabs of stripes.

    fetch: slots -> rows, parities    handover: memory to share    slab: stripes -> rows, packed

Invariants:
- Everything given is of ranges that are frozen, under the ticket that the question names.
- Memory that was offered is given up when members change: whoever offered it may be gone.

Not here: freezes (server.py, shard.py), what is rebuilt (recovery.py, sweep.py).

# N rows that are given, W floats of a record
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from holdfast.cluster import numbers, parts
from holdfast.cluster.handover import Handovers
from holdfast.cluster.message import Caller, Message
from holdfast.cluster.shard import Shard
from holdfast.errors import InvalidRequestError

_SLAB_BYTES_MAX = 1 << 28


class Giver:
    """Answers questions of others' recovery."""

    def __init__(self, get_shard: Callable[[], Shard]) -> None:
        self._get_shard = get_shard
        self._handovers = Handovers()

    def clear(self) -> None:
        """Give up memory that others offered."""
        self._handovers.clear()

    def fetch(self, _: Caller, message: Message) -> Message:
        """Rows and parities by their slots."""
        slots_N, parities_N = map(parts.as_ids, message.arrays)
        ticket, arena = numbers.text(message.meta["ticket"]), numbers.whole(message.meta["arena"])
        found = self._get_shard().fetch(ticket, arena, slots_N, parities_N)
        return Message("fetched", {}, found)

    def open(self, caller: Caller, message: Message) -> Message:
        """Open memory that a server on this machine offers, or give it up."""
        self._get_shard()  # a spare has nothing to give
        return Message("handover", {"is_here": self._handovers.accept(caller.name, message.meta)})

    def slab(self, caller: Caller, message: Message) -> Message:
        """All that is wanted of a range of stripes: in memory that is shared, or in the answer."""
        shard, meta = self._get_shard(), message.meta
        arena, lost, first, last = (
            numbers.whole(meta[name]) for name in ("arena", "lost", "first", "last")
        )
        stripes = range(first, last)
        rows, width = shard.slab_shape(arena, lost, stripes)
        if 4 * rows * width > _SLAB_BYTES_MAX:
            raise InvalidRequestError(
                "a slab is too large", rows=rows, width=width, todo="ask for fewer stripes"
            )
        memory = None if meta["at"] is None else self._handovers.find(caller.name)
        shared_NW = None if memory is None else memory.rows(numbers.whole(meta["at"]), rows, width)
        slab_NW = np.empty((rows, width), np.float32) if shared_NW is None else shared_NW
        shard.pack_slab(numbers.text(meta["ticket"]), arena, lost, stripes, slab_NW)
        return Message("slab", {}, (slab_NW,) if shared_NW is None else ())
