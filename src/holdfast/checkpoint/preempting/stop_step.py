"""The step at which all ranks save after a notice, agreed on without a collective in every step.

    one rank rings -> every rank's watching thread: "I have counted c steps", in the store
    all have said so -> all save at step max(c) + 1

A rank that has said c waits after each later step until it knows the agreed one. Watching threads
speak, not training threads: a training thread may be inside a collective that another rank has not
joined yet. So no rank can be past the agreed step, however far apart ranks are and however short
steps are, and no rank waits for one that waits for it.

Invariants:
- All ranks that learn of an agreed step learn of the same one, with the same reasons.
- No rank has passed the agreed step when it is agreed on.
- A rank that is lost ends the wait with an error, never with an endless wait.

Not here: what a notice is and what follows from it (preemption.py), messages
(checkpoint/ranks/mailbox.py).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holdfast.checkpoint.ranks.ranks import Ranks
from holdfast.errors import UnavailableError


@dataclass(frozen=True, slots=True)
class Said:
    """What a rank says: the steps it has counted, and the notice it had itself, if it had one."""

    step: int
    reason: str = ""
    signum: int | None = None
    deadline_s: float | None = None

    def to_bytes(self) -> bytes:
        """As a message."""
        return json.dumps([self.step, self.reason, self.signum, self.deadline_s]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Said:
        """What ``to_bytes`` wrote."""
        return cls(*json.loads(data))


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks do: save at a step, because of the notices that some of them had."""

    step: int
    reason: str
    signum: int | None
    deadline_s: float | None


def plan_stop(said: Sequence[Said]) -> Agreed:
    """What follows from what all ranks said. A signal to one is a signal to all: training cannot go
    on without it. The shortest deadline counts.

    >>> plan_stop([Said(7), Said(8, "SIGTERM", 15, 30.0)])
    Agreed(step=9, reason='SIGTERM at rank 1', signum=15, deadline_s=30.0)
    """
    noticed = [(rank, one) for rank, one in enumerate(said) if one.reason]
    signalled = [(rank, one) for rank, one in noticed if one.signum is not None]
    rank, first = (signalled or noticed or [(0, Said(0, "a notice"))])[0]
    deadlines = [one.deadline_s for _, one in noticed if one.deadline_s is not None]
    return Agreed(
        step=1 + max(one.step for one in said),
        reason=f"{first.reason} at rank {rank}",
        signum=first.signum,
        deadline_s=min(deadlines, default=None),
    )


@dataclass(slots=True)
class _Round:
    """One agreement; the next notice has another."""

    number: int
    is_open: bool = False
    agreed: Agreed | None = None
    is_known: threading.Event = field(default_factory=threading.Event)

    @property
    def bell(self) -> str:
        return f"preempt/{self.number}/bell"

    def said(self, rank: int) -> str:
        return f"preempt/{self.number}/said/{rank}"

    def done(self, rank: int) -> str:
        return f"preempt/{self.number}/done/{rank}"


class StopStep:
    """One rank's part in agreeing where to stop."""

    def __init__(self, ranks: Ranks, say: Callable[[], Said]) -> None:
        """``say``: how many steps this rank has counted, and its own notice."""
        self._ranks = ranks
        self._say = say
        self._round = _Round(0)

    @property
    def agreed(self) -> Agreed | None:
        """What is agreed on and not done yet."""
        return self._round.agreed

    @property
    def is_open(self) -> bool:
        """Whether somebody rang."""
        return self._round.is_open

    def ring(self) -> None:
        """Have all ranks say where they are; not on the training thread.

        Raises:
            UnavailableError: the store does not answer.
        """
        bell = self._round.bell
        if not self._ranks.mailbox.has(bell):
            self._ranks.mailbox.put(bell, b"")

    def poll(self) -> None:
        """Look whether somebody rang, and whether all have said; on the watching thread.

        Raises:
            UnavailableError: the store does not answer.
        """
        box, now = self._ranks.mailbox, self._round
        if not now.is_open:
            if not box.has(now.bell):
                return
            # First this, then the count: a step that did not see it is in the count.
            now.is_open = True
            box.put(now.said(self._ranks.rank), self._say().to_bytes())
        if now.agreed is None:
            said = [box.get(now.said(rank)) for rank in range(self._ranks.size)]
            if None not in said:
                now.agreed = plan_stop([Said.from_bytes(one) for one in said if one is not None])
                now.is_known.set()

    def is_due(self, step: int) -> bool:
        """Whether to save after this step, which has been counted; on the training thread. Once
        somebody rang it waits until all ranks have said where they are.

        Raises:
            UnavailableError: a rank did not.
        """
        now = self._round
        if not now.is_open:
            return False
        if not now.is_known.wait(self._ranks.timeout_s):
            raise UnavailableError(
                "ranks did not agree on a step to save after a notice",
                rank=self._ranks.rank,
                timeout_s=self._ranks.timeout_s,
                todo="start all ranks again; the checkpoints before are whole",
            )
        assert now.agreed is not None
        return step >= now.agreed.step

    def finish(self) -> None:
        """The agreed step is saved, or could not be; another notice begins another agreement."""
        self._round = _Round(self._round.number + 1)

    def say_done(self) -> None:
        """This rank needs nothing more of the others."""
        self._ranks.mailbox.put(self._round.done(self._ranks.rank), b"")

    def are_all_done(self) -> bool:
        """Whether no rank needs anything more. Rank 0, which may serve the store, waits for it."""
        box, now = self._ranks.mailbox, self._round
        return not self._ranks.is_coordinator or all(
            box.has(now.done(rank)) for rank in range(self._ranks.size)
        )
