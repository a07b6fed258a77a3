"""The mutators there are: each a function of a run apart, or laid out, and a source of chance.

A mutator changes the copy it is given and says what it did, or returns None where there is nothing
of its kind in this run. ``mutate`` applies one to four of them: first those of parts, whose lies
the whole run agrees with, then those of frames and of the catalog.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.hostile.mutators.stored_run import Laid, StoredRun, lay_out

PARTS, FRAMES, CATALOG, TEXT = range(4)  # the order in which they are applied
_MUTATED = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError,
            RecursionError, struct.error)  # fmt: skip
Change = Callable[[Any, random.Random], str | None]


@dataclass(frozen=True, slots=True)
class Mutator:
    """A mutator, when it is applied, and how often among the others."""

    name: str
    stage: int
    weight: float
    change: Change


MUTATORS: list[Mutator] = []


def mutator(stage: int, weight: float = 1.0) -> Callable[[Change], Change]:
    """Enter a function among the mutators."""

    def enter(change: Change) -> Change:
        MUTATORS.append(Mutator(change.__name__.replace("_", " "), stage, weight, change))
        return change

    return enter


def mutate(run: StoredRun, rng: random.Random) -> tuple[Laid, list[str]]:
    """A run with some lies in it, and what they are; the run itself stays as it is."""
    count = rng.choices((1, 2, 3, 4), (60, 22, 12, 6))[0]
    weights = [m.weight for m in MUTATORS]
    chosen = sorted(rng.choices(MUTATORS, weights, k=count), key=lambda m: m.stage)
    apart = run.copy()
    told: list[str] = []

    def apply(one: Mutator, to: Any) -> None:
        try:
            done = one.change(to, rng)
        except _MUTATED:
            if not told:
                raise
            done = None  # what it would change is no longer what it knows
        if done is not None:
            told.append(f"{one.name}: {done}")

    for one in chosen:
        if one.stage == PARTS:
            apply(one, apart)
    laid = lay_out(apart)
    for one in chosen:
        if one.stage != PARTS:
            apply(one, laid)
    return laid, told
