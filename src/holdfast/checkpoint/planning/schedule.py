"""When a checkpoint is due: every so many steps, after a time, or as rarely as a loss allows.

    step -> is_due: a multiple of the steps?  or: is the time over, at a step where it is looked at?

Steps are known ahead. Times are not: steps change their speed, and the first ones are slow. One
process with a plain reader simply looks at the clock at every step. Where somebody has to know
ahead, a step is due only at the end of a *window* of steps that was announced: a granted reader
reads up to its end and no further, and several ranks meet there, to hear what rank 0's clock says.
A window takes at most half of the time that is left, by how long steps took lately, so windows
become short as the time runs out. One process can change its mind: its windows are extended before
a reader runs dry, and cut to one more step where the time is over early.

Invariants:
- A step is due only at the end of a window, where there are windows.
- All ranks save the same steps: rank 0's clock alone decides. Ranks exchange a number at the end of
  a window, never at other steps; so where steps become slow all of a sudden, ranks are late by
  ``_WINDOW_STEPS_MAX`` steps at most.
- A reader is granted the steps of a window at its beginning, and not before the checkpoint that is
  due has been taken.
- A clock that is set back delays nothing for longer than an interval.

Not here: what an interval is (interval.py), what is saved (checkpoint/selecting/selection.py).
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.checkpoint.planning.interval import Every, Interval, Pls, as_every

_WINDOW_STEPS_MAX = 100
_DUE = 0


class Schedule:
    """Tells when a checkpoint is due."""

    def __init__(
        self,
        every: Interval | None,
        *,
        clock: Callable[[], float],
        grant: Callable[[int], object] | None = None,
        share: Callable[[int], int] | None = None,
    ) -> None:
        """``grant`` tells a reader how many batches to read until the next look. ``share`` gives
        all ranks the number that rank 0 passes."""
        wanted = as_every(every)
        self._steps = wanted.steps if isinstance(wanted, Every) else None
        self._seconds = wanted.seconds if isinstance(wanted, Every) else None
        if isinstance(wanted, Pls):
            self._seconds = wanted.interval_h * 3600
        self._clock = clock
        self._grant = grant
        self._share = share
        self._window_end = self._half_way = 0
        self._since = self._now = clock()
        self._looked = (0, self._now)

    def start(self, step: int) -> None:
        """Training begins, or goes on, at a step."""
        self._restart(step)

    def is_due(self, step: int) -> bool:
        """Whether to save after this step. Where several ranks save by time, all ask together."""
        if self._steps is not None and step % self._steps == 0:
            return True
        if self._seconds is None:
            return False
        if not self._has_windows:
            return self._time_left() <= 0
        if step < self._window_end:
            if self._share is None:
                self._change_window(step)
            return False
        window = self._look(step)
        if self._share is not None:
            window = self._share(window)
        if window == _DUE:
            return True
        self._open_window(step, window)
        return False

    def steps_left(self, step: int) -> int | None:
        """Steps until the next one that may be due; None: any may."""
        ends = [] if self._steps is None else [(step // self._steps + 1) * self._steps]
        if self._seconds is not None and self._has_windows:
            ends.append(max(self._window_end, step))
        return min(ends) - step if ends else None

    def saved(self, step: int) -> None:
        """A checkpoint was begun that was due at this step."""
        self._restart(step)

    def close(self) -> None:
        """Let go of the reader."""
        self._grant = None

    @property
    def _has_windows(self) -> bool:
        return self._grant is not None or self._share is not None

    def _restart(self, step: int) -> None:
        """An interval begins. How long a step takes now is not known: the first window is one."""
        self._since = self._now = self._clock()
        self._looked = (step, self._now)
        self._open_window(step, 1)

    def _change_window(self, step: int) -> None:
        """In mid-window a reader hears early how it goes on."""
        if self._time_left() <= 0:
            self._open_window(step, 1)
        elif step == self._half_way:
            window = self._look(step)
            if step + window > self._window_end:
                self._open_window(step, window)

    def _open_window(self, step: int, steps: int) -> None:
        self._window_end = step + steps
        self._half_way = step + (steps + 1) // 2
        left = self.steps_left(step)
        if self._grant is not None and left is not None:
            self._grant(left)

    def _time_left(self) -> float:
        assert self._seconds is not None
        now = self._clock()
        if now < self._now:  # somebody set the clock back
            self._since -= self._now - now
            self._looked = (self._looked[0], self._looked[1] - (self._now - now))
        self._now = now
        return self._seconds - (now - self._since)

    def _look(self, step: int) -> int:
        """How many steps until the next look; ``_DUE``: the time is over."""
        left_s = self._time_left()
        first, looked = self._looked
        self._looked = (step, self._now)
        if left_s <= 0:
            return _DUE
        step_s = max((self._now - looked) / max(step - first, 1), 1e-9)
        return max(1, int(min(left_s / step_s / 2, _WINDOW_STEPS_MAX)))
