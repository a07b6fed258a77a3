"""The moment at which a process kills itself: a storage that ends it at a call of some kind.

Invariants:
- Death is SIGKILL: no handler, no thread and no buffer survives it.
- A death says what it must leave behind, so that whoever chose it can check that it happened.

Not here: errors and crashes within a process (tests.fault); who lives (killed.py).
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import TypeVar

from holdfast.storage import Storage
from tests.fault import FaultyStorage, FaultyWriter, When

T = TypeVar("T")


class Moment(Enum):
    """The kind of call at which a life ends."""

    CALL = "any call, those of taking over and restoring included"
    WRITE = "in the middle of writing an object"
    COMMIT = "in the middle of writing a catalog"
    SAVED = "right after the commit of a save"
    BUNDLE = "in the middle of writing what a round extracted"
    ROUND = "right before the commit of a round"


@dataclass(frozen=True, slots=True)
class Death:
    """A life ends at the n-th call of a kind."""

    moment: Moment
    nth: int
    when: When

    @property
    def leaves_unfinished(self) -> bool:
        """Whether an unfinished object must stay behind."""
        return self.moment in (Moment.WRITE, Moment.COMMIT, Moment.BUNDLE)

    @property
    def leaves_waiting(self) -> bool:
        """Whether an increment must wait for its round."""
        return self.moment in (Moment.BUNDLE, Moment.ROUND)

    @property
    def leaves_progress(self) -> bool:
        """Whether the life must have committed a step."""
        return self.moment in (Moment.SAVED, Moment.BUNDLE, Moment.ROUND)

    def is_at(self, label: str) -> bool:
        """Whether a call is of this kind."""
        kind = label.split("/")[-1].split("-")[0]
        return {
            Moment.CALL: True,
            Moment.WRITE: label.startswith("write objects/"),
            Moment.COMMIT: label.startswith("write catalog/"),
            Moment.SAVED: label.startswith("save "),
            Moment.BUNDLE: label.startswith("write ") and kind in ("live", "extracted"),
            Moment.ROUND: label.startswith("round "),
        }[self.moment]


def choose_death(moment: Moment, chance: random.Random) -> Death:
    """A death of this kind, sooner or later."""
    match moment:
        case Moment.CALL:
            return Death(moment, chance.randrange(1, 60), chance.choice(list(When)))
        case Moment.WRITE | Moment.BUNDLE:
            return Death(moment, chance.randrange(1, 9), When.TORN)
        case Moment.COMMIT:
            return Death(moment, chance.randrange(1, 4), When.TORN)
        case Moment.SAVED:
            return Death(moment, chance.randrange(1, 4), When.AFTER)
        case Moment.ROUND:
            return Death(moment, chance.randrange(1, 3), When.BEFORE)


class DyingStorage(FaultyStorage):
    """A storage whose process dies at the chosen call; without a death it only counts."""

    def __init__(self, inner: Storage, death: Death | None) -> None:
        super().__init__(inner)
        self._death = death
        self._seen = 0
        self._newest: int | None = None  # the newest step committed; none before training
        self._count = threading.Lock()
        # A commit writes its file through the storage's own create, which may be the last call too.
        bare = SimpleNamespace(create=inner.create)
        inner.create = lambda name: (  # type: ignore[method-assign]
            FaultyWriter(self, name, bare) if name.startswith("catalog/") else bare.create(name)
        )

    def begin_training(self, newest: int) -> None:
        """What was there is checked: from now on calls of every kind count."""
        self._newest = newest

    def put_if_absent(self, name: str, data: bytes) -> None:
        """A commit, of a save if it brings a newer step, else of a round."""
        newest = json.loads(data.split(b"\n")[1])["checkpoints"][-1:]
        is_save = self._newest is not None and newest and newest[0][0] > self._newest
        label = f"{'save' if is_save else 'round'} {name}"
        self.call(label, lambda: self._inner.put_if_absent(name, data))
        if is_save:
            self._newest = newest[0][0]

    def call(
        self, label: str, act: Callable[[], T], *, tear: Callable[[], object] | None = None
    ) -> T:
        """Carry out a call, or as much of it as happens before the death."""
        if not self._is_last(label):
            return super().call(label, act, tear=tear)
        assert self._death is not None
        if self._death.when is When.AFTER:
            act()
        if self._death.when is When.TORN and tear is not None:
            tear()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("a process outlived SIGKILL")

    def _is_last(self, label: str) -> bool:
        death = self._death
        if death is None or not death.is_at(label):
            return False
        if self._newest is None and death.moment is not Moment.CALL:
            return False
        with self._count:
            self._seen += 1
            return self._seen == death.nth
