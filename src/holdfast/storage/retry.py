"""Try again what may work the next time: few times, each later, never at the same moment as others.

Time and chance are arguments, so a test sees every wait and waits for none.

Not here: which failures may pass (failures.py).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, TypeVar

from holdfast.storage.settings import RemoteSettings

T = TypeVar("T")
CHANCE = random.SystemRandom().random  # not the generator that a training seeds


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """How often and how far apart."""

    tries: int
    first_s: float
    most_s: float
    total_s: float

    @classmethod
    def of(cls, settings: RemoteSettings) -> Self:
        """What the settings ask for."""
        return cls(
            tries=settings.tries,
            first_s=settings.retry_s,
            most_s=settings.retry_s_max,
            total_s=settings.give_up_s,
        )


def plan_wait(failed: int, *, elapsed_s: float, backoff: Backoff, chance: float) -> float | None:
    """How long to wait after so many failures; None: give up.

    ``chance`` in [0, 1) spreads the tries of many processes that failed at one moment.

    >>> backoff = Backoff(tries=3, first_s=1.0, most_s=1.5, total_s=60.0)
    >>> [plan_wait(n, elapsed_s=0.0, backoff=backoff, chance=0.0) for n in (1, 2, 3)]
    [0.5, 0.75, None]
    """
    if failed >= backoff.tries or elapsed_s >= backoff.total_s:
        return None
    return min(backoff.most_s, backoff.first_s * 2.0 ** (failed - 1)) * (0.5 + 0.5 * chance)


class Retrier:
    """Carries out calls, again where that may help."""

    def __init__(
        self,
        backoff: Backoff,
        *,
        is_transient: Callable[[BaseException], bool],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        chance: Callable[[], float] = CHANCE,
    ) -> None:
        self._backoff = backoff
        self._is_transient = is_transient
        self._clock = clock
        self._sleep = sleep
        self._chance = chance

    def call(self, act: Callable[[], T]) -> T:
        """What ``act`` returns or, when it failed for good or too often, what it raised last."""
        started, failed = self._clock(), 0
        while True:
            try:
                return act()
            except Exception as error:
                failed += 1
                if not self._is_transient(error):
                    raise
                wait_s = plan_wait(
                    failed,
                    elapsed_s=self._clock() - started,
                    backoff=self._backoff,
                    chance=self._chance(),
                )
                if wait_s is None:
                    raise
            self._sleep(wait_s)
