"""Preemption: a notice that the process will end becomes a checkpoint, within a deadline.

    signal or ck.preempt() -> notice -> the running step ends -> save -> durable -> answered
                                     -> the deadline is over first               -> answered
    answered: Preempted says whether the step is saved -> the signal acts, or training goes on

One process saves at the end of the step it is in. Several ranks agree on one step (stop_step.py). A
thread watches the deadline, so that neither a step that never ends nor a storage that hangs keeps
the process.

Invariants:
- A notice is answered exactly once: saved or not, it is said in an event and on stderr.
- After the deadline nothing is waited for. A signal acts then, with whatever is saved.
- Flags are set in signal handlers; locks are taken outside of them only.

Not here: signals and what was there before us (signals.py), the save itself
(checkpoint/checkpointer.py).
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holdfast import events
from holdfast.checkpoint.planning.lineage import Lineage
from holdfast.checkpoint.preempting import signals
from holdfast.checkpoint.preempting.stop_step import Agreed, Said, StopStep
from holdfast.checkpoint.ranks.ranks import Ranks
from holdfast.checkpoint.saving.pending import PendingSave
from holdfast.errors import HoldfastError, UnavailableError

_POLL_S = 0.25
_POLL_OF_ONE_S = 0.001  # for every rank: the store serves all of them
_POLL_OPEN_S = 0.01  # once somebody rang: training may wait for it
_TELL_S = 5.0
_BY_METHOD = "ck.preempt()"


@dataclass(eq=False, slots=True)
class _Notice:
    """The process will end: who says so, and by when to be done."""

    reason: str
    signum: int | None
    deadline_s: float
    at: float = field(default_factory=time.monotonic)
    is_answered: bool = False
    is_told: threading.Event = field(default_factory=threading.Event)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.at + self.deadline_s - time.monotonic())


class Preemption:
    """What one Checkpointer does when its process is to end."""

    def __init__(
        self,
        signal_names: Sequence[str | int],
        *,
        deadline_s: float,
        lineage: Lineage,
        durable: Callable[[], int | None],
        log: events.EventLog,
        ranks: Ranks | None,
    ) -> None:
        """``durable``: the last step of this run that is committed, as far as is known."""
        self.is_preempted = False
        self._deadline_s = deadline_s
        self._lineage = lineage
        self._durable = durable
        self._is_saving = False
        self._log = log
        self._has_stepped = False
        # Set in handlers; the signal's stays, and ``is_answered`` says that it is over.
        self._signal: _Notice | None = None
        self._asked: _Notice | None = None
        self._agreed: tuple[Agreed, _Notice] | None = None
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._poll_s = _POLL_S
        self._stop: StopStep | None = None
        self._has_store = ranks is not None
        self._is_lost = False  # a rank of the others, or the store they talk through
        self._poll_lock = threading.Lock()
        if ranks is not None:
            self._poll_s += _POLL_OF_ONE_S * ranks.size
            self._stop = StopStep(ranks, self._say)
            self._start_watching()
        self._signums = signals.as_signums(signal_names)
        self.listen()

    def listen(self) -> None:
        """Hear of signals, before handlers that were installed until now."""
        signals.listen(self, self._signums)

    def unlisten(self) -> None:
        """Leave signals to those who had them before."""
        signals.unlisten(self)

    # What signals.py calls.

    def flag(self, signum: int) -> None:
        """There was a signal."""
        if self._signal is None:
            name = signal.Signals(signum).name
            self._signal = _Notice(name, signum, self._deadline_s)

    def holds(self, signum: int) -> bool:
        """Whether there is something to save before the signal acts. Of ranks, others may have
        steps that this one has not."""
        is_over = self._signal is not None and self._signal.is_answered
        return not is_over and (self._has_stepped or self._stop is not None)

    def awake(self) -> None:
        """Watch the deadline of whatever was noticed."""
        if self._pending() is not None:
            self._start_watching()
            self._wake.set()

    # What the training thread calls, through the Checkpointer.

    def ask(self, deadline_s: float | None) -> None:
        """A notice from elsewhere; may be called in any thread, and in a signal handler."""
        wanted = self._deadline_s if deadline_s is None else deadline_s
        signals.check_deadline(wanted)
        if self._asked is None:
            self._asked = _Notice(_BY_METHOD, None, wanted)
        signals.wake()

    def is_due(self, step: int) -> bool:
        """Whether this step, which has been counted, is the one to save."""
        self._has_stepped = True
        if self._stop is not None:
            return self._stop.is_due(step)
        return self._pending() is not None

    def answer(self, save: Callable[[], PendingSave]) -> PendingSave | None:
        """Save, wait until that is durable or the deadline over, and let a signal act.

        Raises:
            SystemExit: the process ends, as by its signal.
            HoldfastError: the save failed, and there was no signal.
        """
        notice = self._pending()
        assert notice is not None
        made: PendingSave | None = None
        problem: HoldfastError | None = None
        self._is_saving = True
        try:
            made = save()
            made.result(notice.left_s)
        except TimeoutError:
            problem = UnavailableError(
                "the save was not durable in time", deadline_s=notice.deadline_s
            )
        except HoldfastError as error:
            problem = error
        self._say_done(notice)
        self._answer(notice, problem)
        self._settle(notice)
        if notice.signum is not None:
            if made is not None and not made.done():
                signals.overdue(notice.signum)
            else:
                signals.act(self, notice.signum)
        elif problem is not None and (made is None or made.done()):
            raise problem
        return made

    def leave(self) -> None:
        """Of ranks: agree on nothing more. Rank 0, which may serve the store, can go."""
        with self._poll_lock:
            self._has_store = False

    def close(self) -> None:
        """Watch no more. A signal that came too late for a step acts now.

        Raises:
            SystemExit: the process ends, as by its signal.
        """
        if self._is_closed:
            return
        self._is_closed = True
        notice = self._pending()
        try:
            if notice is not None:
                is_saved = self._lineage.step in (0, self._durable())
                problem = None if is_saved else HoldfastError("training ended without a save of it")
                self._answer(notice, problem)
                if notice.signum is not None:
                    signals.act(self, notice.signum)
        finally:
            self.unlisten()
            self._wake.set()
            if self._thread is not None:
                self._thread.join()

    # How notices come about and end.

    def _pending(self) -> _Notice | None:
        """The notice to be answered next; of ranks one that they agreed on, if they did."""
        agreed = None if self._stop is None else self._stop.agreed
        if agreed is not None:
            return self._of_all(agreed)
        found = self._signal
        if found is not None and not found.is_answered:
            return found
        return self._asked

    def _of_all(self, agreed: Agreed) -> _Notice:
        """The notice of all ranks; its deadline counts from when this rank heard of it."""
        with self._lock:
            if self._agreed is None or self._agreed[0] is not agreed:
                limit = self._deadline_s if agreed.deadline_s is None else agreed.deadline_s
                notice = _Notice(agreed.reason, agreed.signum, limit)
                own = self._signal if agreed.signum is not None else self._asked
                if own is not None:
                    notice.at = own.at
                self._agreed = (agreed, notice)
            return self._agreed[1]

    def _settle(self, notice: _Notice) -> None:
        """A notice is over; what came meanwhile is another."""
        with self._lock:
            self.is_preempted = True
            self._is_saving = False
            if notice.signum is None:
                self._asked = None
            elif self._signal is not None:
                self._signal.is_answered = True
            self._agreed = None
            if self._stop is not None:
                self._stop.finish()

    def _answer(self, notice: _Notice, problem: Exception | None) -> None:
        """Say, once, what became of a notice."""
        with self._lock:
            is_first, notice.is_answered = not notice.is_answered, True
        if not is_first:  # another thread does; the process must not end before it has
            notice.is_told.wait(_TELL_S)
            return
        step, last = self._lineage.step, self._durable()
        found = "there is no checkpoint" if last is None else f"the last checkpoint is step {last}"
        text = f"step {step} is saved"
        if problem is not None:
            text = f"step {step} is not saved ({problem}); {found}"
        self._log.emit(
            events.Preempted(
                step=step,
                is_saved=problem is None,
                seconds=time.monotonic() - notice.at,
                reason=notice.reason if problem is None else f"{notice.reason}: {problem}",
            )
        )
        with contextlib.suppress(OSError, ValueError):  # nobody may read stderr any more
            print(f"holdfast: {notice.reason}: {text}", file=sys.stderr, flush=True)
        notice.is_told.set()

    def _say(self) -> Said:
        """What this rank tells the others."""
        own = self._signal if self._signal is not None else self._asked
        step = self._lineage.step
        if own is None or own.is_answered:
            return Said(step)
        return Said(step, own.reason, own.signum, own.deadline_s)

    def _say_done(self, notice: _Notice) -> None:
        """Ranks that end wait for each other: rank 0 may serve the store that others need."""
        if self._stop is None or notice.signum is None:
            return
        with contextlib.suppress(UnavailableError):  # then they are gone already
            self._stop.say_done()
            while not self._stop.are_all_done() and notice.left_s:
                time.sleep(_POLL_OPEN_S)

    # The watching thread.

    def _start_watching(self) -> None:
        with self._lock:
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(
                    target=self._watch, name="holdfast-preemption", daemon=True
                )
                self._thread.start()

    def _watch(self) -> None:
        while not self._is_closed:
            with self._poll_lock:
                self._poll()
            notice = self._pending()
            is_over = notice is not None and (not notice.left_s or self._is_lost)
            if notice is not None and is_over and not notice.is_answered:
                self._give_up(notice)
            self._wake.wait(self._next_look_s(notice))
            self._wake.clear()

    def _poll(self) -> None:
        """Hear of other ranks' notices, and tell them of one's own."""
        if self._stop is None or not self._has_store:
            return
        own = self._pending()
        try:
            if own is not None and not self._stop.is_open and not own.is_answered:
                self._stop.ring()
            self._stop.poll()
        except UnavailableError:
            self._has_store = False
            self._is_lost = True

    def _next_look_s(self, notice: _Notice | None) -> float | None:
        waits = [] if notice is None or notice.is_answered else [notice.left_s]
        if self._has_store and self._stop is not None:
            is_urgent = self._stop.is_open and self._stop.agreed is None
            waits.append(_POLL_OPEN_S if is_urgent else self._poll_s)
        return min(waits, default=None)

    def _give_up(self, notice: _Notice) -> None:
        """The deadline is over."""
        what = "the save was not durable in time" if self._is_saving else "no step ended in time"
        if self._is_lost:
            what = "the ranks lost each other"
        self._answer(notice, UnavailableError(what, deadline_s=notice.deadline_s))
        if notice.signum is not None:
            signals.overdue(notice.signum)
