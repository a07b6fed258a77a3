"""A server's flushes on their way: one thread that carries differences to those who need them.

Invariants:
- A flush is delivered to every receiver that is still the process it was made for, however often
  the members change meanwhile; a receiver that was replaced builds its parities anew.
- With several parities a stripe nobody is told to fold a flush before all have it.

Not here: what is in a flush (outgoing.py), what becomes of it where it arrives (incoming.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast.cluster import parts
from holdfast.cluster.flush import Flush
from holdfast.cluster.message import Message
from holdfast.cluster.peers import Peers
from holdfast.cluster.shard import Shard
from holdfast.cluster.view import View

_IDLE_S = 0.05
_RETRY_S = 0.005


class Delivery:
    """Delivers one flush after the other, in whatever thread ``run`` is called."""

    def __init__(
        self, shard: Shard, peers: Peers, *, every_s: float, get_view: Callable[[], View]
    ) -> None:
        """Flushes are ``every_s`` apart, unless somebody waits for one. ``get_view`` ends ``run``
        by what it raises when the server closes."""
        self._shard, self._peers = shard, peers
        self._every_s, self._get_view = every_s, get_view

    def run(self) -> None:
        """Deliver until the shard is closed."""
        shard = self._shard
        try:
            while not shard.is_closed:
                shard.wait_for_work(_IDLE_S, every_s=self._every_s)
                flush = shard.begin_flush()
                if flush is not None:
                    self._deliver(flush)
                    shard.end_flush()
        finally:
            self._peers.close()

    def _deliver(self, flush: Flush) -> None:
        made_in = self._get_view()
        self._give_all(flush, made_in, lambda to: parts.pack_flush(flush, to))
        if self._shard.spec.parity_max > 1:
            applying = Message("apply", {"number": flush.number})
            self._give_all(flush, made_in, lambda _: applying)

    def _give_all(self, flush: Flush, made_in: View, make: Callable[[int], Message]) -> None:
        """Give a message to every receiver that is still the process it was."""
        waiting = set(flush.receivers)
        while waiting:
            view = self._get_view()
            waiting -= view.replaced_since(made_in)
            self._peers.enter(view)
            answers, _ = self._peers.ask_all({receiver: make(receiver) for receiver in waiting})
            waiting -= set(answers)
            if waiting:
                time.sleep(_RETRY_S)
