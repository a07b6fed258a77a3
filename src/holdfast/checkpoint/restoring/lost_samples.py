"""Lost samples, as a run counts them: PLS live, and with each checkpoint (CPR, eq. 3).

Invariants:
- A step counts as a sample.
- Where only hot rows are saved, a round of such saves counts as one save of all, as in the paper.
- A full restore takes the count back to what it was: nothing is lost by it but time.

Not here: the equation (plan/pls.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.plan.pls import PlsMeter


class Rounds:
    """Which saves count as one of everything: each base, and each so manyth after one."""

    def __init__(self, saves: int) -> None:
        self._saves_a_round = saves
        self._saves = 0

    def saved(self, *, is_base: bool) -> bool:
        """One save more; whether everything counts as saved with it."""
        self._saves += 1
        is_whole = is_base or self._saves >= self._saves_a_round
        if is_whole:
            self._saves = 0
        return is_whole


class LostSamples:
    """Counts for one run; without a meter it counts nothing."""

    def __init__(self, meter: PlsMeter | None, *, saves_a_round: int) -> None:
        self._meter = meter
        self._rounds = Rounds(saves_a_round)

    @property
    def pls(self) -> float | None:
        """The portion of lost samples so far; None where it is not counted."""
        return None if self._meter is None else self._meter.pls

    def trained(self) -> None:
        """One step more."""
        if self._meter is not None:
            self._meter.trained(1)

    def saved(self, steps_ago: int, *, is_base: bool) -> None:
        """A save that was taken so many steps ago is durable."""
        if self._rounds.saved(is_base=is_base) and self._meter is not None:
            self._meter.saved(at=self._meter.samples - steps_ago)

    def failed(self, servers: Sequence[int]) -> float | None:
        """These servers got back what was saved of them; the PLS that adds."""
        return None if self._meter is None else self._meter.failed(servers)

    def state_when_saved(self) -> dict[str, Any] | None:
        """What a checkpoint taken now keeps: the count as it is once the checkpoint is durable."""
        if self._meter is None:
            return None
        meter = PlsMeter.from_state(self._meter.state())
        meter.saved()
        return meter.state()

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Take over a checkpoint's count, if it has one."""
        if self._meter is not None and state is not None:
            self._meter = PlsMeter.from_state(state)
