"""The pace of a sweep: as fast as it can while nobody works here, a share of the time else.

    work a while -> is there traffic? -> rest, so that work is its share of work and rest

Rests in the middle of a frozen range are short: differences of the range wait meanwhile. What is
left of them is made up for after it.

Not here: what is done (sweep.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast.errors import InvalidRequestError

_RECENT_S = 0.25
_REST_S = 0.05  # at a time: traffic may end


def check_share(share: float) -> None:
    """Refuse what is no share of the time.

    Raises:
        InvalidRequestError: says what is.
    """
    is_number = isinstance(share, int | float) and not isinstance(share, bool)
    if not is_number or not 0 < share <= 1:
        raise InvalidRequestError(
            "recovery's share of the time is a number above 0, up to 1", recovery_share=share
        )


class Pace:
    """Tells a sweep when to rest."""

    def __init__(
        self,
        share: float,
        count: Callable[[], int],
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``count`` rises with every row that workers pull or push here."""
        check_share(share)
        self._share, self._count, self._now, self._sleep = share, count, now, sleep
        self._counted = count()
        self._seen: float | None = None
        self._owed_s = 0.0

    def work(self, seconds: float) -> None:
        """So long was worked: a rest is owed for it."""
        self._owed_s += seconds * (1 / self._share - 1)

    def rest(self, most_s: float = float("inf")) -> float:
        """Rest as long as is owed, but not longer than this; how long."""
        rested_s = 0.0
        while self._owed_s > 0 and rested_s < most_s:
            if not self.has_traffic():
                self._owed_s = 0.0
                break
            piece_s = min(_REST_S, self._owed_s, most_s - rested_s)
            self._sleep(piece_s)
            rested_s += piece_s
            self._owed_s -= piece_s
        return rested_s

    def has_traffic(self) -> bool:
        """Whether workers pulled or pushed here a moment ago."""
        counted = self._count()
        if counted != self._counted:
            self._counted, self._seen = counted, self._now()
        return self._seen is not None and self._now() - self._seen < _RECENT_S
