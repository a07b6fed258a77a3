"""What was seen of optimizers that nobody knows: enough to trust a rule, or not. Pure.

Over its first saves all rows are compared. Each save adds the facts: which rows changed, which had
a gradient, which had one ever. A rule is trusted only if it could have failed and did not: rows
without a gradient must have been there, must have had one before (or moments could not show), and
must have stayed as they were.

Invariants:
- A rule that was broken once is never trusted.
- What was seen of one optimizer, or with one setting, is not believed of another.

# words_W: a bitmap of a table's rows, W words (kernels/rows/bitmap.py)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from holdfast.checkpoint.tracking.optimizers.rules import ALL, GRADIENT, TRAINED, UNKNOWN
from holdfast.kernels.rows import bitmap

Words = npt.NDArray[np.uint64]

SAVES_OBSERVED = 3  # saves in which rows changed, before a rule is trusted
MOST = 0.75  # of a table's rows: from here on telling them apart does not pay


@dataclass(frozen=True, slots=True)
class Evidence:
    """Facts from the saves so far. Counts are rows, added up over saves."""

    saves: int = 0
    escaped_gradient: int = 0
    """Changed without a gradient."""
    escaped_trained: int = 0
    """Changed without ever having had one."""
    stayed_trained: int = 0
    """Had a gradient before, had none now, and stayed."""
    stayed_fresh: int = 0
    """Never had a gradient, and stayed."""
    least_changed: float = 1.0
    """The smallest share of the rows that changed in a save."""

    def add(
        self, changed_W: Words, gradient_W: Words, trained_before_W: Words, *, rows: int
    ) -> Evidence:
        """The facts of one more save; one in which no row changed says nothing."""
        changed = int(bitmap.count(changed_W))
        if changed == 0:
            return self
        trained_W = trained_before_W | gradient_W
        idle_W = trained_before_W & ~gradient_W
        fresh = rows - int(bitmap.count(trained_W))
        escaped_trained = int(bitmap.count(changed_W & ~trained_W))
        return replace(
            self,
            saves=self.saves + 1,
            escaped_gradient=self.escaped_gradient + int(bitmap.count(changed_W & ~gradient_W)),
            escaped_trained=self.escaped_trained + escaped_trained,
            stayed_trained=self.stayed_trained + int(bitmap.count(idle_W & ~changed_W)),
            stayed_fresh=self.stayed_fresh + fresh - escaped_trained,
            least_changed=min(self.least_changed, changed / rows),
        )

    @property
    def conclusion(self) -> str:
        """The rule that held: gradient, trained or all; unknown while, or because, none can be
        trusted.

        >>> Evidence(saves=3, stayed_trained=5, stayed_fresh=90).conclusion
        'gradient'
        >>> Evidence(saves=3, escaped_gradient=7, stayed_fresh=90).conclusion
        'trained'
        >>> Evidence(saves=3, escaped_gradient=9, escaped_trained=9, least_changed=0.1).conclusion
        'unknown'
        """
        if self.saves < SAVES_OBSERVED:
            return UNKNOWN
        if self.escaped_gradient == 0 and self.stayed_trained > 0:
            return GRADIENT
        if self.escaped_trained == 0 and self.stayed_fresh > 0:
            return TRAINED
        return ALL if self.least_changed >= MOST else UNKNOWN


class Observations:
    """The evidence of each optimizer that is not known, by its class and settings."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, Evidence] = {}

    def conclusion(self, key: Hashable) -> str:
        """The rule that held of this one."""
        return self._by_key.get(key, Evidence()).conclusion

    def add(
        self,
        keys: Iterable[Hashable],
        changed_W: Words,
        gradient_W: Words,
        trained_before_W: Words | None,
        *,
        rows: int,
    ) -> None:
        """The facts of one more save; each of those that stepped may have moved any of the rows."""
        before_W = bitmap.new(rows) if trained_before_W is None else trained_before_W
        for key in keys:
            evidence = self._by_key.get(key, Evidence())
            self._by_key[key] = evidence.add(changed_W, gradient_W, before_W, rows=rows)

    def forget(self) -> None:
        """Begin anew."""
        self._by_key.clear()
