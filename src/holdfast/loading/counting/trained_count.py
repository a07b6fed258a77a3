"""How many of the batches handed out are trained: a step says that some were, not how many.

In a plain loop a step trains every batch that was handed out before it, also where several go into
one step (gradient accumulation) and where the loop skips some. Behind a pipeline, a prefetching
thread or a double buffer some still wait. What tells these apart, in this order:

1. ``batches_per_step``, where the user passes it.
2. Another thread than the training loop's draws the batches: a step trains one.
3. The process before found that a step trains so many while others wait: so it does in this one,
   which may begin where too few batches are left of an epoch to show it.
4. The loop draws its own batches, several before its first step, and has freed all but the last of
   them by then: it accumulated or skipped. A batch that waits is still in memory.
5. The pattern. A loop with something that reads ahead draws more batches before its first step than
   before each of the next ones. A loop that accumulates draws as many.

Invariants:
- A batch is counted as trained at most once, in the order of handing out.
- Until the pattern is known (at the second step at the latest) a count may be corrected; after that
  it never is.
"""

from __future__ import annotations


class TrainedCount:
    """Counts batches handed out and trained; totals since the reader was made or loaded."""

    def __init__(self, given: int | None = None, *, remembered: int | None = None) -> None:
        """``given``: batches a step trains, as the user says; ``remembered``: as an earlier process
        found, 0 for all that were handed out."""
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
        """The batches that wait were thrown away."""
        self.handed_out = self.trained
        self._since_step = 0

    def step(self, *, is_thread: bool, is_apart: bool, alive: int | None = None) -> None:
        """A step was trained.

        ``is_thread``: another thread draws the batches. ``is_apart``: something between the loader
        and the loop draws them (a pipeline, a generator). ``alive``: how many batches drawn since
        the last step are still in memory; None where that is not known.
        """
        drawn, self._since_step = self._since_step, 0
        has_ended, self._has_ended = self._has_ended, False
        if is_thread and self._given is None:
            self._settle(1, "thread")
        elif self._is_open and not self._steps:
            self._first = drawn
            if drawn > 1 and alive in (0, 1) and not is_apart and not self._assumed:
                self._settle(None, "freed")
            elif self._assumed:
                self._settle(self._assumed, "remembered")
            elif self._assumed is not None:
                self._per_step = None
            elif drawn > 1 and (is_apart or alive is not None):
                self._per_step = 1  # likelier than all of them, until the pattern is known
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
