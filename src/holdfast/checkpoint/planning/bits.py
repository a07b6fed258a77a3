"""How many bits rows are stored with, from how often the run is expected to restore.

Every restore of a quantized checkpoint costs a little accuracy, so the fewer restores a run
expects, the fewer bits it may use (Check-N-Run, section 5.2.1). The table is data.

Invariants:
- More expected restores never choose fewer bits.
- Once a run has restored more often than estimated, it stores 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import InvalidRequestError

MAX_BITS = 8


@dataclass(frozen=True, slots=True)
class BitsFor:
    """Up to so many restores, so many bits are enough."""

    restores_max: int
    bits: int


PAPER_TABLE = (BitsFor(1, 2), BitsFor(3, 3), BitsFor(20, 4))


@dataclass(frozen=True, slots=True)
class BitsChoice:
    """The bits to store with, and why."""

    bits: int
    reason: str


@dataclass(frozen=True, slots=True)
class FailureEstimate:
    """What the expected number of restores follows from: how long, how many, how fragile."""

    training_h: float
    nodes: int
    failures_per_node_day: float

    def __post_init__(self) -> None:
        for name in ("training_h", "nodes", "failures_per_node_day"):
            value = getattr(self, name)
            if isinstance(value, bool) or not 0 <= value < float("inf"):
                raise InvalidRequestError(
                    "a failure estimate needs numbers of zero or more", field=name, value=value
                )

    @property
    def restores(self) -> float:
        """Expected failures of the whole job, each of which costs one restore.

        >>> FailureEstimate(training_h=72, nodes=16, failures_per_node_day=0.25).restores
        12.0
        """
        return self.training_h / 24.0 * self.nodes * self.failures_per_node_day


def choose_bits(
    expected_restores: float, *, restores: int = 0, table: Sequence[BitsFor] = PAPER_TABLE
) -> BitsChoice:
    """The bits for a run that expects so many restores and has had ``restores`` already.

    >>> [choose_bits(n).bits for n in (0, 1, 2, 3, 20, 21)]
    [2, 2, 3, 3, 4, 8]
    >>> choose_bits(1, restores=2)
    BitsChoice(bits=8, reason='2 restores so far exceed the 1 expected: back to 8 bits')
    """
    if not expected_restores >= 0:
        raise InvalidRequestError(
            "expected restores must be zero or more", expected_restores=expected_restores
        )
    if restores > expected_restores:
        reason = (
            f"{restores} restores so far exceed the {expected_restores:g} expected: "
            f"back to {MAX_BITS} bits"
        )
        return BitsChoice(MAX_BITS, reason)
    for line in sorted(table, key=lambda item: item.restores_max):
        if expected_restores <= line.restores_max:
            reason = (
                f"{expected_restores:g} expected restores: {line.bits} bits hold for up to "
                f"{line.restores_max}"
            )
            return BitsChoice(line.bits, reason)
    return BitsChoice(
        MAX_BITS, f"{expected_restores:g} expected restores: more than any smaller width holds for"
    )
