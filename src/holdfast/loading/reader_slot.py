"""The readers of a checkpointer: given when it is made, or named by its ``epochs`` calls.

    reader=DataLoader         -> followed wherever it is iterated (interception.py)
    reader=anything stateful  -> saved and loaded by its own state_dict
    epochs(loader, n)         -> any iterable, placed after a resume

Most runs have one reader. A run that trains on several loaders (pretraining on one, fine-tuning on
another) names them in the same order after a resume, so each is found by its number.

Invariants:
- A state that arrives before its loader is named is kept, and loaded once, when it is named.
- A notice never stops training.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader

from holdfast import events
from holdfast.errors import HoldfastWarning, InvalidRequestError
from holdfast.loading.extras import TrainingState
from holdfast.loading.reader_state import (
    epoch_of,
    is_resumable,
    join_states,
    parse_resume,
    split_states,
)
from holdfast.loading.resumable_reader import ResumableReader
from holdfast.loading.stateful import READER, check_stateful, is_stateful
from holdfast.loading.unfollowed import has_running_loader, is_unordered


class ReaderSlot:
    """Holds the readers; a checkpoint stores and loads them as one."""

    def __init__(
        self,
        reader: Any,
        log: events.EventLog,
        *,
        carried: Mapping[str, Any] | None = None,
        training: TrainingState | None = None,
    ) -> None:
        """``reader``: None, a ResumableReader, a DataLoader, or anything with ``state_dict``.
        ``carried``: what a checkpoint stores beside it, which may be loaders, too; None where that
        is not known. ``training``: what a loop changes beside its batches.

        Raises:
            InvalidRequestError: it has no ``state_dict``; says how else it is placed.
        """
        self._log = log
        self._carried = carried
        self._training = training or TrainingState()
        self._is_at_place = True  # where training goes on, or began
        self._at_place: frozenset[int] = frozenset()  # the readers that take the run there
        self._loaded_schedules: dict[str, Any] = {}
        self._plain: Any = None  # stored by its own state_dict
        self._readers: list[ResumableReader] = []  # in the order they were named
        self._siblings: list[weakref.ref[ResumableReader]] = []
        self._beginnings: list[Mapping[str, Any]] = []  # their states when they were named
        self._current = 0  # which of them trained last
        self._steps = 0
        self._trained_at: dict[int, int] = {}  # their last steps, by their numbers
        self._late: dict[int, Mapping[str, Any]] = {}  # states of readers that are not named yet
        self._loaded_step: int | None = None
        self._is_placed_elsewhere = False
        self._has_looked = False  # for loaders that nobody named
        self._must_ask_epoch = False
        self._asked_epoch = 0  # what ``epoch`` said between a load and the first ``epochs``
        self._call_order: list[int] = []  # of ``epochs``: the number of the reader of each
        self._trained_under: dict[int, int] = {}  # by reader: the place in it of its last call
        self._has_planned = False  # ``epochs`` was called since the last load
        self._warned: set[str] = set()
        self._idle_steps = 0  # in a row that trained no batch
        self._has_long_batches = False  # several steps were counted for one
        self._saved = _Saved()
        self._is_attached = isinstance(reader, ResumableReader)  # hf.attach says what it counts
        if isinstance(reader, ResumableReader):
            reader.log = log
            self._add(reader)
        elif isinstance(reader, DataLoader):
            made = ResumableReader(reader, log=log)
            made.intercept()
            self._add(made)
        elif reader is not None:
            if not is_stateful(reader) and hasattr(reader, "__iter__"):
                raise InvalidRequestError(
                    "reader has no state_dict()",
                    type=type(reader).__name__,
                    todo="leave reader= out and iterate ck.epochs(loader, n), which places any "
                    "iterable; or give it state_dict() and load_state_dict()",
                )
            check_stateful(READER, reader)
            self._plain = reader

    # What a loop sees.

    @property
    def is_used(self) -> bool:
        """Whether a checkpoint has something to store here."""
        return bool(self._readers) or self._plain is not None

    @property
    def epoch(self) -> int:
        """The epoch that is trained, from 0."""
        self._must_ask_epoch = False
        if self._current < len(self._readers):
            found = self._readers[self._current].epoch
        else:
            found = epoch_of(self._late.get(self._current))
        if self._loaded_step and not self._has_planned:
            self._asked_epoch = found
        return found

    def epochs(
        self, loader: Iterable[Any], count: int, *, batches_per_step: int | None
    ) -> Iterator[Any]:
        """See ``Checkpointer.epochs``."""
        if count < 0:
            raise InvalidRequestError("a number of epochs is not negative", epochs=count)
        self._must_ask_epoch = False
        if 0 < count <= self._asked_epoch:
            self._warn(
                f"the first ck.epochs() after the resume stands for epochs that are trained, and "
                f"ck.epoch was asked before: a loop that begins at epoch {self._asked_epoch} and "
                "calls ck.epochs() for each trains too few",
                "call ck.epochs() as often as in a new run: for _ in range(n)",
            )
        self._asked_epoch, self._has_planned = 0, True
        for number, reader in enumerate(self._readers):
            if reader.loader is loader or reader is loader:
                if batches_per_step is not None:
                    reader.set_batches_per_step(batches_per_step)
                self._call_order.append(number)
                return reader.epochs(count)
        if self._plain not in (None, loader):
            raise InvalidRequestError(
                "reader= is another loader than the one that is iterated",
                reader=type(self._plain).__name__,
                given=type(loader).__name__,
                todo="pass the same object to reader= and to ck.epochs(), or leave reader= out",
            )
        reader = ResumableReader(loader, batches_per_step=batches_per_step, log=self._log)
        self._plain = None
        self._call_order.append(len(self._readers))
        self._add(reader)
        return reader.epochs(count)

    def _add(self, reader: ResumableReader) -> None:
        self._beginnings.append({**reader.state_dict(), "now": None})
        number = len(self._readers)
        self._readers.append(reader)
        self._siblings.append(weakref.ref(reader))
        reader.siblings = self._siblings
        # Weak: a reader must not keep the slot alive, which holds it.
        this = weakref.ref(self)
        reader.on_next_batch = lambda has_drawn: _tell(this(), has_drawn)
        reader.on_passed = lambda: _pass(this())
        reader.on_place = lambda: _place(this(), number)
        state = self._late.pop(number, None)
        if state is not None:
            reader.load_state_dict(state)
        elif self._loaded_step and not number:
            self._warn(
                f"the checkpoint of step {self._loaded_step} does not say where its loader "
                "stood: reading starts at epoch 0",
                "name the loader from the first step on, by reader= or ck.epochs()",
            )
        if is_unordered(reader.loader):
            self._warn(
                "the loader hands out batches in the order its workers finish them, which a "
                "resumed run cannot repeat",
                "make the DataLoader with in_order=True",
            )

    def trained(self) -> None:
        """A step was trained."""
        drawn = [reader for reader in self._readers if reader.has_waiting]
        # A step without a batch counts, too, where there is one reader alone.
        for reader in drawn if len(self._readers) > 1 else self._readers:
            reader.trained()
        self._steps += 1
        self._look_for_idle_steps(has_drawn=bool(drawn))
        for reader in drawn:
            self._current = self._readers.index(reader)
            self._trained_at[self._current] = self._steps
        if len(drawn) > 1:
            self._look_for_inner_loops(map(self._readers.index, drawn))
        if self._must_ask_epoch:
            self._must_ask_epoch = False
            self._warn(
                f"training goes on in epoch {self._readers[0].epoch}, and the loop has not asked "
                "for ck.epoch: a loop that counts its epochs from 0 trains too many",
                "loop over range(ck.epoch, n), or iterate ck.epochs(loader, n)",
            )
        if not self.is_used:
            self._look_for_unnamed()

    def _look_for_inner_loops(self, drawn: Iterable[int]) -> None:
        """Tell of loops over ``epochs`` inside of one: a resumed run makes fewer calls."""
        order = self._call_order
        for number in drawn:
            if number not in order:
                continue
            last = len(order) - 1 - order[::-1].index(number)
            inner = order[last + 1 :]
            if self._trained_under.get(number) == last and len(set(inner)) < len(inner):
                self._warn(
                    "ck.epochs() is called again for each batch of another loader: a resumed run, "
                    "which goes on in the middle, makes other calls, and trains other batches",
                    "iterate the inner loader itself, and call ck.step() once for each batch of "
                    "the outer one",
                )
            self._trained_under[number] = last

    def _look_for_idle_steps(self, *, has_drawn: bool) -> None:
        """Tell of steps that no batch was drawn for: a resume cannot go between them."""
        self._idle_steps = 0 if has_drawn or not self._readers else self._idle_steps + 1
        if not self._idle_steps or not self._trained_at or self._is_attached:
            return
        if self._readers[self._current].is_in_epoch:
            self._has_long_batches = True
            self._warn(
                "several steps are counted for one batch: a run that resumes between them goes on "
                "with the next batch",
                "call ck.step() once for each batch",
            )
        elif self._idle_steps > 1 and not self._has_long_batches:
            self._warn(
                "steps go on behind the loader's end, and nothing reads it again: if batches are "
                "kept (itertools.cycle, a list), a resumed run trains others",
                "iterate the loader anew for each pass, as ck.epochs(loader, n) does",
            )

    def tell_what_follows_saves(self, *, has_drawn: bool) -> None:
        """Tell of what the loop did between a save and the next batch."""
        todo = "let ck.step() be the last line of the loop"
        if has_drawn:
            self._warn(
                "random numbers are drawn between ck.step() and the next batch (an evaluation, "
                "another loader): a run that resumes from a save there does not draw them",
                todo,
            )
        saved, now = self._saved, self._saw()
        if now.schedules != saved.schedules:
            self._warn(
                "a scheduler steps between ck.step() and the next batch: a run that resumes from "
                "a save there leaves that step out",
                todo,
            )
        elif now.rates != saved.rates:
            self._warn(
                "a learning rate changes between ck.step() and the next batch: a run that resumes "
                "from a save there has the rate of before",
                todo,
            )
        if now.writes != saved.writes:
            self._warn(
                "the model is written to between ck.step() and the next batch (a moving average, "
                "an evaluation in train mode): a run that resumes from a save there leaves that "
                "out",
                todo,
            )

    def _saw(self) -> _Saved:
        training = self._training
        return _Saved(training.schedules(), training.rates(), training.writes())

    def pass_over(self) -> None:
        """A loop was passed over, because its epochs are trained."""
        if not self._is_at_place:
            self._look_at_schedules()
            self._training.keep()

    def placed(self, number: int) -> None:
        """A reader was brought to its place after a resume."""
        if not self._is_at_place and number in self._at_place:
            self._look_at_schedules()
            self._is_at_place = True
            self._training.put_back(self._warn)

    def _look_at_schedules(self) -> None:
        """Tell of a scheduler that stepped since a resume, and before its first batch."""
        if not self._training.is_kept and self._training.schedules() != self._loaded_schedules:
            self._warn(
                "a scheduler steps between ck.resume() and the first batch: a run that resumes "
                "there has taken that step already",
                "let a scheduler step behind the batches that it counts, before ck.step()",
            )

    def place_elsewhere(self) -> None:
        """Somebody else places the loader after a resume: expect none here."""
        self._is_placed_elsewhere = True

    def _look_for_unnamed(self) -> None:
        """Tell that no loader was named, where that is likely a mistake."""
        if self._has_looked or self._is_placed_elsewhere:
            return
        self._has_looked = True
        todo = "iterate ck.epochs(loader, n), or pass reader=loader"
        if self._late:
            self._warn(
                "the checkpoint knows where its loader stood, and no loader was named since", todo
            )
        elif has_running_loader(None if self._carried is None else self._carried.values()):
            reason = "a DataLoader is iterated that no checkpoint knows of"
            if self._loaded_step:
                reason += (
                    f": training goes on at step {self._loaded_step}, reading begins from the start"
                )
            self._warn(reason, todo)
        elif self._loaded_step:
            self._log.emit(
                events.ReaderNotice(
                    reason=f"training goes on at step {self._loaded_step}, and no loader was named",
                    todo=f"{todo}, unless batches depend on the step alone",
                )
            )

    # What a checkpoint sees.

    def loaded(self, step: int) -> None:
        """A checkpoint was loaded, with a reader's state or without."""
        self._loaded_step = step
        self._has_looked = self._has_planned = False
        self._asked_epoch = 0
        self._loaded_schedules = self._training.schedules()
        self._is_at_place = False
        self._training.forget()

    def state_dict(self) -> dict[str, Any]:
        """Where training is."""
        if self._plain is not None:
            state: dict[str, Any] = self._plain.state_dict()
            return state
        if any(reader.is_guess for reader in self._readers):
            self._warn(
                "several batches were read before the first step: whether they went into it or "
                "were read ahead is known at the second, and this checkpoint was taken before",
                "pass batches_per_step= to ck.epochs() or hf.attach()",
            )
        self._saved = self._saw()
        beside = self._beside()
        others = [number for number in range(len(self._readers)) if number != self._current]
        states = {number: self._state_of(number) for number in others}
        if self._current < len(self._readers):  # last: looking for the end of others may draw
            states[self._current] = now = self._readers[self._current].state_dict()
            for number in beside:
                if number in states:  # whichever goes on first has the generators as they are now
                    states[number] = {**states[number], "now": now["now"]}
        return join_states({**self._late, **states}, self._current, beside)

    def _beside(self) -> list[int]:
        """The readers whose batches the last step trained beside those of the current one."""
        last = self._trained_at.get(self._current)
        if last is None:  # no step since the resume
            return sorted(self._at_place - {self._current})
        return [n for n, at in self._trained_at.items() if at == last and n != self._current]

    def _state_of(self, number: int) -> dict[str, Any]:
        reader = self._readers[number]
        last = self._trained_at.get(self._current, 0)
        if reader.is_left and self._trained_at.get(number, 0) < last:
            return reader.left_state_dict()
        return {**reader.state_dict(), "now": None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state; parts of readers that are not named yet wait for them."""
        if self._plain is not None:
            own = state["loader"] if is_resumable(state) else state
            self._late, self._at_place = {0: state}, frozenset({0})
            if own is not None:
                self._plain.load_state_dict(own)
            return
        self._late, current, beside = split_states(state)
        self._at_place = frozenset({current, *beside})
        if self._readers and current != self._current:
            self._warn(
                "the checkpoint is of a time when another loader was trained: it cannot take a "
                "running loop back to it",
                "restore it before the first loop begins",
            )
        self._current = current
        for number, reader in enumerate(self._readers):
            reader.load_state_dict(self._late.pop(number, self._beginnings[number]))
        for late in self._late.values():
            if is_resumable(late):
                parse_resume(late, None)  # refused now, not when its reader is named
        first = self._readers[0] if self._readers else None
        self._must_ask_epoch = first is not None and first.is_intercepted and first.epoch > 0

    def __getattr__(self, name: str) -> Any:
        # A checkpoint of another number of ranks asks whether the reader can take it.
        if name == "load_rank_states":
            readers = self.__dict__.get("_readers")
            held = readers[0] if readers and len(readers) == 1 else self.__dict__.get("_plain")
            if hasattr(held, name):
                return getattr(held, name)
        raise AttributeError(name)

    def close(self) -> None:
        """Let go of the loaders: their workers should not live as long as a checkpointer."""
        for reader in self._readers:
            reader.release()
        self._plain, self._readers, self._late, self._carried = None, [], {}, None

    def _warn(self, reason: str, todo: str) -> None:
        if reason in self._warned:
            return
        self._warned.add(reason)
        self._log.emit(events.ReaderNotice(reason=reason, todo=todo))
        # A filter may turn warnings into errors; training goes on all the same.
        with contextlib.suppress(HoldfastWarning):
            warnings.warn(f"{reason}; {todo}", HoldfastWarning, stacklevel=4)


@dataclass(frozen=True, slots=True)
class _Saved:
    """What a save had of the training state that a step changes."""

    schedules: dict[str, Any] = field(default_factory=dict)
    rates: list[Any] = field(default_factory=list)
    writes: list[tuple[int, int]] = field(default_factory=list)


def _tell(slot: ReaderSlot | None, has_drawn: bool) -> None:
    if slot is not None:
        slot.tell_what_follows_saves(has_drawn=has_drawn)


def _pass(slot: ReaderSlot | None) -> None:
    if slot is not None:
        slot.pass_over()


def _place(slot: ReaderSlot | None, number: int) -> None:
    if slot is not None:
        slot.placed(number)
