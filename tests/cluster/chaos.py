"""Crashes at chosen messages, and messages that are late.

Servers crash before or after they act on a message, never more at once than can be decoded; workers
in the middle of sending one; any message may be handled late.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.cluster.coordinator import Coordinator
from holdfast.cluster.engine import Process
from holdfast.cluster.message import Message
from holdfast.cluster.peers import Failures, Peers
from holdfast.cluster.spec import ClusterSpec
from holdfast.errors import HoldfastError
from tests.cluster.threads import CrashingEngine, When

KINDS = ("pull", "push", "stage", "commit", "fold", "apply", "freeze", "fetch", "slab", "handover",
         "thaw", "view", "adopt", "recover", "report", "settle", "drain", "bar", "resolve",
         "held", "copies", "owed", "entrust", "inherit")  # fmt: skip
LATE = 0.02  # of the messages
LATE_S = 0.03


@dataclass
class Chaos:
    """Crashes a server at about every n-th message of some kinds."""

    seed: int
    spec: ClusterSpec
    kills: int
    rng: random.Random = field(init=False)
    killed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.engine = ChaosEngine(self)
        self.coordinator: Coordinator | None = None
        self.is_on = False
        self._doomed: set[str] = set()  # chosen, and perhaps still acting on their last message
        self._lock = threading.Lock()
        self._kind, self._left, self._is_before = self._next()

    def _next(self) -> tuple[str, int, bool]:
        kind = self.rng.choice(KINDS)
        most = 40 if kind in ("pull", "push", "stage", "commit", "fold", "apply") else 6
        return kind, self.rng.randrange(most), self.rng.random() < 0.5

    def choose(self, process: Process, kind: str) -> When | None:
        """Whether a server is to crash at this message: before or after it acts."""
        with self._lock:
            if not self.is_on or self.kills == 0:
                return None
            if kind != self._kind and self.rng.random() < 0.99:
                return None  # now and then whatever comes, so that no plan waits for ever
            self._left -= 1
            if self._left > 0 or not self._may_lose(process):
                return None
            when: When = "before" if self._is_before else "after"
            self.kills -= 1
            self._doomed.add(process.name)
            self.killed.append(f"{process.name} {when} {kind}")
            self._kind, self._left, self._is_before = self._next()
            return when

    def _may_lose(self, process: Process) -> bool:
        coordinator = self.coordinator
        assert coordinator is not None
        members = coordinator._members
        lacking = set(coordinator.view.lacking) | set(coordinator._lost)
        lacking |= {s for s, member in members.items() if member.name not in self.engine.servers}
        lacking |= {s for s, member in members.items() if member.name in self._doomed}
        index = next((s for s, member in members.items() if member == process), None)
        if index is None:
            return True  # a spare: nothing is lost with it
        return self.spec.can_decode(lacking | {index})


class WorkerDied(BaseException):
    """The process of a worker is gone, in the middle of something."""


class DyingPeers(Peers):
    """A worker's streams, on which it dies: when some servers have been sent a message, and nobody
    is heard."""

    def __init__(self, peers: Peers, rng: random.Random, *, after: int) -> None:
        super().__init__(peers._name, peers._token)
        self.enter(peers.view)
        self._rng, self._left = rng, after

    def ask_all(self, messages: Mapping[int, Message]) -> tuple[dict[int, Message], Failures]:
        self._left -= 1
        if self._left >= 0:
            return super().ask_all(messages)
        for server in self._rng.sample(sorted(messages), self._rng.randint(0, len(messages))):
            with contextlib.suppress(HoldfastError):
                self._stream(server).send(messages[server])
        time.sleep(self._rng.choice([0, 0, 0.01]))  # what was sent may arrive, or be cut off
        raise WorkerDied


class ChaosEngine(CrashingEngine):
    """Crashes its servers as a Chaos says."""

    def __init__(self, chaos: Chaos) -> None:
        super().__init__()
        self._chaos = chaos

    def choose(self, process: Process, kind: str) -> When | None:
        if self._chaos.is_on and self._chaos.rng.random() < LATE:
            time.sleep(LATE_S * self._chaos.rng.random())
        return self._chaos.choose(process, kind)
