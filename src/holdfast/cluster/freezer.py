"""Freezes of ranges at all servers, and questions to them meanwhile: one consistent read.

    freeze everywhere -> differences on their way arrive -> ask, ask, ... -> thaw everywhere

Invariants:
- What is asked for between freeze and thaw belongs to one state of every stripe in the ranges: all
  are frozen before the first question, and each server answers only while it still is.
- A peer that is gone, or knows of other members, voids what is under way (ConflictError).
- No server stays frozen: each hears of the thaw, or enters a new epoch, which ends it too.

Not here: what is asked for (recovery.py, sweep.py), what a freeze holds back (shard.py).

# G ranges, W workers
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np

from holdfast.cluster.message import Message
from holdfast.cluster.peers import Peers, changed
from holdfast.cluster.shard import Shard
from holdfast.cluster.view import View

_RETRY_S = 0.005


class Freezer:
    """Asks peers in turns; several threads may."""

    def __init__(self, shard: Shard, peers: Peers, *, name: str) -> None:
        """Tickets have this name, which no other freezer of the server has."""
        self._shard, self._peers, self._name = shard, peers, name
        self._turn = threading.Lock()
        self._numbers = itertools.count()  # safe between threads, as a generator is not

    def enter(self, view: View) -> None:
        """Speak in this view from now on."""
        with self._turn:
            self._peers.enter(view)

    def ask(self, messages: dict[int, Message]) -> dict[int, Message]:
        """Ask peers.

        Raises:
            ConflictError: one is gone, or knows of other members.
        """
        with self._turn:
            answers, failures = self._peers.ask_all(messages)
        if failures:
            raise changed(failures)
        return answers

    @contextlib.contextmanager
    def frozen(
        self, view: View, granules: Sequence[int]
    ) -> Iterator[tuple[str, dict[int, np.ndarray]]]:
        """Freeze ranges everywhere, this server included; gives the marks of what has left."""
        shard = self._shard
        # With the epoch: whoever had this place before counted from 0 too, and was not in this one.
        ticket = f"{shard.server}.{view.epoch}.{self._name}.{next(self._numbers)}"
        others = [server for server in range(len(view.addresses)) if server != shard.server]
        meta = {"ticket": ticket, "granules": list(granules)}
        marks = {}
        try:
            marks[shard.server] = shard.freeze(ticket, granules, epoch=view.epoch)
            for server, answer in self.ask(
                {server: Message("freeze", meta) for server in others}
            ).items():
                marks[server] = answer.arrays[0]
            yield ticket, marks
        finally:
            shard.thaw(ticket)
            self._thaw(ticket, others, epoch=view.epoch)

    def _thaw(self, ticket: str, others: Sequence[int], *, epoch: int) -> None:
        message = Message("thaw", {"ticket": ticket})
        waiting = set(others)
        while waiting and self._shard.epoch == epoch and not self._shard.is_closed:
            with self._turn:
                answers, _ = self._peers.ask_all(dict.fromkeys(waiting, message))
            waiting -= set(answers)
            if waiting:
                time.sleep(_RETRY_S)
