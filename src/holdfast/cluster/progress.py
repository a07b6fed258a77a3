"""What a server reports to the coordinator while it brings rows and parities back. A value.

    range, rows, parities: what is there again    lost, failed: what cannot be brought back

Invariant: ``from_json(to_json(progress)) == progress``; what arrives is checked before anybody acts
on it, since the thread that does decides for all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.cluster.numbers import text, whole
from holdfast.errors import InvalidRequestError

RANGE, ROWS, PARITIES, LOST, FAILED = "range", "rows", "parities", "lost", "failed"
_WHATS = (RANGE, ROWS, PARITIES, LOST, FAILED)


@dataclass(frozen=True, slots=True)
class Progress:
    """One report."""

    server: int
    joined: int
    """The epoch in which its process took that place."""
    renewal: int
    """The renewal of all parities that its parities are of."""
    what: str
    seconds: float = 0.0
    granule: int = 0
    rows: int = 0
    left: int = 0
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values for a message."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any], *, servers: int) -> Progress:
        """What ``to_json`` wrote.

        Raises:
            InvalidRequestError: no server of ``servers`` reports so.
        """
        counts = {
            name: whole(value[name]) for name in ("joined", "renewal", "granule", "rows", "left")
        }
        what, seconds = value["what"], value["seconds"]
        is_time = type(seconds) in (int, float) and math.isfinite(seconds) and seconds >= 0
        if what not in _WHATS or not is_time:
            raise InvalidRequestError("no such progress", what=repr(what)[:40])
        return cls(
            server=whole(value["server"], most=servers - 1),
            what=what,
            seconds=float(seconds),
            error=text(value["error"]),
            **counts,
        )
