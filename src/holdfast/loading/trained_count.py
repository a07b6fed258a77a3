"""Which of the batches handed out have been trained: a step says that some were, not which.

In a plain loop every batch handed out before a step was trained by it, also where several go into
one step (gradient accumulation). Behind a pipeline, a prefetching thread or a double buffer some
are still waiting. What tells them apart, in this order:

1. ``batches_per_step``, where the user said it.
2. Batches drawn in another thread than steps are counted in: one is trained by a step.
3. The pattern. Whoever reads ahead draws more batches before the first step than before each of
   the next ones; whoever accumulates draws as many.

Invariants:
- A batch is counted as trained at most once, and in the order they were handed out.
- Until the pattern is known (at the second step) a count may be taken back; then never.
"""

from __future__ import annotations


class TrainedCount:
    """Counts batches handed out and trained; totals since the reader was made or loaded."""

    def __init__(self, given: int | None = None, *, remembered: int | None = None) -> None:
        """``given``: what the user said; ``remembered``: what an earlier process found, 0 for all
        that is handed out."""
        self.handed_out = 0
        self.trained = 0
        self.how = "given" if given is not None else ""
        self._given = given
        self._assumed = remembered
        self._since_step = 0
        self._steps = 0
        self._first = 0  # batches drawn before the first step
        self._has_ended = False  # since the last step
        self._is_open = given is None  # nothing is known for certain yet
        self._per_step = given

    @property
    def is_open(self) -> bool:
        """Whether a later step may correct ``trained``."""
        return self._is_open

    @property
    def per_step(self) -> int | None:
        """Batches that a step trains where something reads ahead; None: all handed out."""
        return self._per_step

    @property
    def ahead(self) -> int:
        """Batches handed out and not trained."""
        return self.handed_out - self.trained

    @property
    def is_guess(self) -> bool:
        """Whether several batches went before the only step, which may have trained one or all."""
        return self._is_open and self._assumed is None and self._first > 1

    @property
    def remembered(self) -> int | None:
        """What the next process should assume; None: nothing is known yet."""
        return self._assumed if self._is_open else self._per_step or 0

    def hand_out(self) -> None:
        """A batch was drawn."""
        self.handed_out += 1
        self._since_step += 1

    def end(self) -> None:
        """The loader's end was met: fewer batches until the next step prove nothing."""
        self._has_ended = True

    def forget(self) -> None:
        """What was drawn and not trained was thrown away."""
        self.handed_out = self.trained
        self._since_step = 0

    def step(self, *, is_thread: bool, is_apart: bool) -> None:
        """A step was trained.

        ``is_thread``: the batches were drawn in another thread. ``is_apart``: something between
        the loader and the loop draws them (a pipeline, a generator), so that one is likelier than
        all until the pattern is known.
        """
        drawn, self._since_step = self._since_step, 0
        has_ended, self._has_ended = self._has_ended, False
        if is_thread and self._given is None:
            self._settle(1, "thread")
        elif self._is_open and not self._steps:
            self._first = drawn
            if self._assumed is not None:
                self._per_step = self._assumed or None
            elif is_apart and drawn > 1:
                self._per_step = 1
        elif self._is_open and drawn and not has_ended:
            if drawn < self._first:
                self.trained = min(self._steps * drawn, self.handed_out - drawn)
                self._settle(drawn, "pattern")
            else:
                self.trained = self.handed_out - drawn
                self._settle(None, "pattern")
        self._steps += 1
        per_step = self.ahead if self._per_step is None else self._per_step
        self.trained += min(per_step, self.ahead)

    def _settle(self, per_step: int | None, how: str) -> None:
        self._per_step, self.how, self._is_open = per_step, how, False
