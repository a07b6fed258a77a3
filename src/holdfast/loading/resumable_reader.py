"""A reader that resumes behind the batch that was trained last, whatever loader it reads from.

    loader -> an iteration per epoch -> batches handed out -> trained, when a step says so
    state_dict: epoch, batches trained in it, random generators when it began and now

Loading a state does nothing until the next batch is asked for. Then the loader is brought to its
place (loader_place.py). Where something reads ahead (a pipeline, a double buffer, a thread), the
batches that were handed out and not trained are read once more after a resume, each with the
generators as they were before it.

Several iterations of one loader may run at a time, or in turn: the one that is trained, and others
(a look at one batch, an evaluation). Only ``trained`` tells which is which: an iteration that never
trains a batch does not move the reader, unless the same loop of the program goes on with the next
one (it accumulates gradients, or skips batches).

Invariants:
- The state is that of the last batch trained, never of one that was only read.
- Nothing is drawn from a generator that the loader alone would not draw.

Not exact, and listed in docs/readers.md: a thread that reads ahead while both it and training draw
from the global generators; batches that persistent workers augment after their first epoch; a
sampler that draws from the global generators batch by batch while workers read ahead; loaders with
``in_order=False``.

Not here: which batches a step trained (loading/counting/handed_out.py), who holds the reader
(reader_slot.py).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

from holdfast import events
from holdfast.errors import InvalidRequestError
from holdfast.loading.counting.callers import DrawnBy, call_site
from holdfast.loading.counting.handed_out import Batch, Epoch, HandedOut
from holdfast.loading.generators import host_state, is_same_state, load_rng_state, rng_state
from holdfast.loading.interception import Interception
from holdfast.loading.iterations import EpochPlan, Epochs, Iteration
from holdfast.loading.loader_place import LoaderPlace, chain
from holdfast.loading.reader_state import Resume, is_resumable, pack_state, parse_resume
from holdfast.loading.stateful import check_loader
from holdfast.loading.worker_generators import only_counts

_AHEAD_MAX = 256  # batches read ahead of which generators and the loader's state are kept


class ResumableReader:
    """Iterates any loader, and knows which batch was trained last.

    ``iter(reader)`` is one epoch, or after a resume the rest of one; ``epochs(n)`` is all of them.
    Call ``trained`` after every step. ``skips_trained`` is for loops that always start at their
    first epoch: iterations that belong to epochs which are already trained are then empty.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        batches_per_step: int | None = None,
        skips_trained: bool = False,
        log: events.EventLog | None = None,
    ) -> None:
        """``batches_per_step``: how many a step trains; by default the reader finds out.

        Raises:
            InvalidRequestError: the loader cannot be iterated, or fewer than one batch a step.
        """
        check_loader(loader)
        if batches_per_step is not None and batches_per_step < 1:
            raise InvalidRequestError(
                "a step trains at least one batch", batches_per_step=batches_per_step
            )
        self.loader = loader
        self.log = log or events.EventLog()
        self.on_next_batch: Callable[[bool], None] = lambda has_drawn: None
        """Called at the first batch behind a save, in the same epoch, in a loop where nothing reads
        ahead: whether random numbers were drawn since, which a resumed run would not draw."""
        self.on_place: Callable[[], None] = lambda: None
        """Called when the loader was brought to where the checkpoint had it."""
        self.on_passed: Callable[[], None] = lambda: None
        """Called when a call of ``epochs`` has no batches left after a resume."""
        # All readers of the same checkpointer. Weak: torch's iterators wait for workers, in vain,
        # where the garbage collector finds them in a cycle.
        self.siblings: Sequence[weakref.ref[ResumableReader]] = ()
        self._place = LoaderPlace(loader, lambda: iter(loader))
        self._interception: Interception | None = None
        self._batches_per_step = batches_per_step
        self._skips_trained = skips_trained
        self._keeps_batches = isinstance(loader, Sequence)  # they are never freed
        self._reading = threading.RLock()  # held while the loader is used
        self._counting = threading.Lock()  # held while batches are counted
        self.generation = 0  # grows with every load_state_dict
        self._resume: Resume | None = None  # loaded; the loader is not there yet
        self._resumed: Resume | None = None  # the loader is there; nothing was trained since
        self._skip = 0  # how many iterations will be empty
        self._plan: EpochPlan | None = None  # of the last call of ``epochs``
        self._calls = 0  # of ``epochs``
        self._trained_call: tuple[int, int] | None = None  # the last that was trained; first epoch
        self._planned: Callable[[], Epochs | None] = lambda: None
        self._home = threading.get_ident()
        self._start_over(remembered=None)

    def _start_over(self, *, remembered: int | None) -> None:
        self._handed = HandedOut(
            self._batches_per_step, remembered=remembered, trained=Batch(Epoch(0), 0)
        )
        self._epoch: Epoch | None = None  # begun last
        self._site: tuple[object, ...] = ()  # where in the program it was begun
        self._training: Callable[[], Iteration | None] = lambda: None
        self._other: Callable[[], Iteration | None] = lambda: None
        self._again: deque[Mapping[str, Any] | None] = deque()  # generators of batches read again
        self._ends_again = False  # the end of the epoch behind them was read, too
        self._now: Mapping[str, Any] | None = None  # generators as training left them
        self._saved: Mapping[str, Any] | None = None  # generators at a save, until the next batch
        self._drawn_by = DrawnBy()
        self._alive: tuple[int | None] | None = None  # batches not freed when a step was taken
        self._is_announced = False
        self._place.forget()

    # What a loop sees.

    def __iter__(self) -> Iterator[Any]:
        return Iteration(self)

    def epochs(self, count: int) -> Iterator[Any]:
        """The batches of ``count`` epochs, without those that are trained already.

        Another call stands for ``count`` epochs more. After a resume the program makes the same
        calls again; those whose epochs are trained have no batches left.
        """
        last = self._plan
        first = 0 if last is None else last.end if last.is_used else last.first
        self._calls += 1
        # By number: a call before it may have been used, and now nothing asks it for a batch. A zip
        # asks its second loader for none where the first has none left.
        number, trained_first = self._trained_call or (0, 0)
        if number == self._calls:
            first = trained_first
        self._plan = EpochPlan(first, first + count, is_used=number == self._calls)
        made = Epochs(self, self._plan)
        self._planned = weakref.ref(made)
        return made

    @property
    def epoch(self) -> int:
        """The epoch of the batch that is trained next, from 0, as far as it was handed out."""
        if self._resume is not None:
            return self._resume.epoch
        with self._counting:
            waiting = self._handed.waiting()
            return waiting[0].epoch.number if waiting else self._handed.trained.epoch.number

    @property
    def batch(self) -> int:
        """How many batches of the epoch were trained."""
        return self._resume.batches if self._resume is not None else self._handed.trained.index

    def next_epoch(self) -> int:
        """The epoch that an iteration begun now belongs to."""
        if self._resume is not None:
            return self._resume.epoch + self._resume.is_over
        epoch = self._epoch
        return 0 if epoch is None else epoch.number + (epoch.is_over or epoch.has_trained)

    def set_batches_per_step(self, batches: int) -> None:
        """Say how many batches a step trains, before the first is drawn."""
        self._batches_per_step = batches
        if not self._handed.count.handed_out:
            self._handed = HandedOut(batches, remembered=None, trained=self._handed.trained)

    def stepped(self) -> None:
        """An optimizer stepped, and ``trained`` will count it later: see now, while the loop still
        holds them, which batches it has not freed."""
        with self._counting:
            self._alive = (self._drawn_by.alive(are_kept=self._keeps_batches),)

    def trained(self) -> None:
        """A step was trained: some of the batches handed out went into it."""
        self._saved = None
        with self._counting:
            alive = self._alive or (self._drawn_by.alive(are_kept=self._keeps_batches),)
            self._alive = None
            count, other = self._handed.count, self._other()
            if not count.ahead and other is not None and other.drawn:
                self._promote(other)
            if count.ahead:
                self._resumed = None
                if self._plan is not None:
                    self._plan.is_used = True
                    self._trained_call = (self._calls, self._plan.first)
            self._handed.step(
                is_thread=bool(count.ahead) and self._drawn_by.is_other_thread(),
                is_apart=count.is_open and self._drawn_by.is_apart(),
                alive=alive[0],
            )
            self._drawn_by.forget()
        self._announce()

    @property
    def has_waiting(self) -> bool:
        """Whether batches were handed out since the last step, or wait to be trained."""
        other = self._other()
        return bool(self._handed.count.ahead) or (other is not None and other.drawn > 0)

    @property
    def is_intercepted(self) -> bool:
        """Whether the loop iterates the loader itself, and counts epochs itself."""
        return self._interception is not None and not self._skips_trained

    @property
    def is_guess(self) -> bool:
        """Whether it is not known yet how many batches the only step so far has trained."""
        return self._handed.count.is_guess

    @property
    def is_in_epoch(self) -> bool:
        """Whether the trained iteration is running."""
        training = self._training()
        return training is not None and not training.is_over

    @property
    def has_read_ahead(self) -> bool:
        """Whether batches wait that a step which was taken just now did not train."""
        count = self._handed.count
        return count.per_step is not None and count.ahead > count.per_step

    def end_training(self, iteration: Iteration) -> None:
        """An iteration that ended was one of training, even if no step came of it: what a resumed
        run accumulates of the rest of an epoch is not read once more."""
        if not iteration.is_other:
            self._resumed = None

    def intercept(self) -> None:
        """Let every iteration of a DataLoader object go through this reader, until ``release``.

        Raises:
            InvalidRequestError: not a DataLoader.
        """
        if self._interception is None:
            self._interception = Interception(self.loader, self)
            self._place.iterate_itself = self._interception.iterate

    def release(self) -> None:
        """Let go of the loader."""
        if self._interception is not None:
            self._interception.undo()
            self._interception = None
        self._drawn_by.forget()

    # What a checkpoint sees.

    def state_dict(self) -> dict[str, Any]:
        """Where training is, not where reading is."""
        if self._resume is not None:
            return dict(self._resume.raw)
        with self._reading, self._counting:
            place, count = self._place, self._handed.count
            if not place.is_stateful and self._is_at_known_end():
                self._look_for_end()
            waiting, at = self._handed.waiting(), self._handed.trained
            loader: Any = None
            own: Mapping[str, Any] | None = None
            start = at.epoch.start
            is_over = self._handed.is_over()
            if place.is_stateful and (at.index or at.place):
                loader, own = at.place or self._state_of_loader()
                if loader is None or only_counts(loader):
                    loader, own = None, None if waiting else own
                # A loader that goes on with its next epoch does not say that one is over.
                is_over = is_over or (not place.is_torch and self._is_at_known_end())
            elif not waiting:
                own = place.own_generators()
            if is_over or not at.index:
                start = waiting[0].epoch.start if waiting else None
            is_known = len(waiting) <= _AHEAD_MAX
            # A thread reads while training draws, too; but in the order drawn for an epoch.
            is_exact = count.how != "thread"
            now = self._saved = rng_state()
            return pack_state(
                epoch=at.epoch.number,
                batches=at.index,
                is_over=is_over,
                per_step=count.remembered,
                start=start,
                loader=loader,
                own=own,
                now=now,
                ahead=[
                    batch.before if is_exact or batch.index == 1 else None
                    for batch in (waiting if is_known else [])
                ],
                has_read_end=bool(waiting) and waiting[-1].epoch.is_over,
                call=self._trained_call,
            )

    @property
    def is_left(self) -> bool:
        """Whether the loop over ``epochs`` has ended, early or not."""
        return self._plan is not None and self._planned() is None and self._resume is None

    def left_state_dict(self) -> dict[str, Any]:
        """The state where the program has left ``epochs`` and trains on with another reader: all
        epochs that were planned are over."""
        assert self._plan is not None
        with self._reading, self._counting:
            is_own = self._place.is_stateful and not self._place.is_torch
            return pack_state(
                epoch=self._plan.end - 1,
                batches=self._handed.trained.index,
                is_over=True,
                per_step=self._handed.count.remembered,
                start=None,
                loader=self._place.state()[0] if is_own else None,
                own=self._place.own_generators(),
                now=None,
                ahead=[],
                has_read_end=False,
                call=self._trained_call,
            )

    def _state_of_loader(self) -> tuple[Any, Mapping[str, Any]]:
        """Where a stateful loader stands. None in place of its state where another iteration has
        replaced it: then a resume replays the epoch."""
        training = self._training()
        if self._place.is_torch and training is not None and not training.is_alone:
            return None, self._place.own_generators()
        return self._place.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to where a state was taken, when the next batch is asked for.

        Also takes what the loader's own ``state_dict`` returned, as older checkpoints have it.

        Raises:
            InvalidRequestError: not a reader's state.
        """
        resume = parse_resume(state, self.loader)
        if resume.loader is not None and not self._place.is_stateful:
            raise InvalidRequestError(
                "the checkpoint's loader had a state of its own, this one cannot take it",
                type=type(self.loader).__name__,
                todo="pass the loader that the run was trained with",
            )
        with self._reading, self._counting:
            self.generation += 1
            self._start_over(remembered=resume.per_step)
            self._resume, self._resumed = resume, None
            self._trained_call = resume.call
            self._skip = resume.epoch if self._skips_trained else 0

    def _load_rank_states(self, states: list[Mapping[str, Any]]) -> None:
        """Take the states of another number of ranks, where the loader can divide them."""
        inner = [state["loader"] if is_resumable(state) else state for state in states]
        self.loader.load_rank_states(inner)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        # Only where the loader can: a checkpoint of another number of ranks is refused otherwise.
        if name == "load_rank_states" and hasattr(self.__dict__.get("loader"), name):
            return self._load_rank_states
        raise AttributeError(name)

    # Drawing.

    def next_batch(self, iteration: Iteration, frame: FrameType) -> Any:
        """The next batch of an iteration, for the code that ``frame`` runs."""
        with self._reading:
            return self._draw(iteration, frame)

    def _draw(self, iteration: Iteration, frame: FrameType) -> Any:
        if iteration.generation != self.generation:  # new, or older than a restore
            iteration.generation = self.generation
            iteration.inner, iteration.is_over = None, False
            iteration.drawn, iteration.is_other = 0, False
            iteration.site = call_site(frame)
        if iteration.is_over:
            raise StopIteration
        self.resume_again(iteration)
        if self._resume is not None:
            self._go_back(iteration, self._resume)
        if iteration.inner is None and self._is_another_training(iteration):
            iteration.is_other = True
        if iteration.is_other:
            return self._draw_other(iteration)
        return self._draw_training(iteration, frame)

    def _draw_training(self, iteration: Iteration, frame: FrameType) -> Any:
        """Read a batch and hand it out, with what a save needs to read it again."""
        count, last = self._handed.count, self._handed.last
        if self._saved is not None:
            self._look_behind_save(self._saved, iteration)
        if self._place.is_stateful and last is not None and last.place is None:
            last.place = self._state_of_loader()
        again = self._again[0] if self._again else None
        now = rng_state() if not self._again and self._ends_again else self._now
        if again is not None:
            load_rng_state(again)
        may_read_ahead = count.is_open or count.per_step is not None
        before = host_state() if may_read_ahead and count.ahead <= _AHEAD_MAX else None
        try:
            if iteration.inner is None:
                self._begin(iteration)
            batch = self._read(iteration)
        except StopIteration:
            if again is not None or (not self._again and self._ends_again):
                assert now is not None
                load_rng_state(now)
            if not self._again:
                self._ends_again = False
            raise
        after = host_state() if before is not None else None
        if again is not None:
            assert now is not None
            load_rng_state(now)
        if self._again:
            self._again.popleft()
        if before is not None and after is not None and is_same_state(before, after):
            before = None
        assert iteration.epoch is not None
        with self._counting:
            self._handed.add(iteration.epoch, iteration.drawn, before)
            self._drawn_by.note(frame, batch, is_watched=count.is_open)
        return batch

    def _look_behind_save(self, saved: Mapping[str, Any], iteration: Iteration) -> None:
        """A batch is drawn, the first one since a save."""
        if iteration.inner is not None and not self._handed.count.ahead:
            self.on_next_batch(not is_same_state(saved, host_state()))
        self._saved = None
        for sibling in self.siblings:  # what this one reads may draw
            other = sibling()
            if other is not None:
                other._saved = None

    def _draw_other(self, iteration: Iteration) -> Any:
        """Read for an iteration that is not the trained one, until a step says that it is."""
        if iteration.inner is None:
            iteration.epoch = Epoch(-1, self._place.generators())
            training = self._training()
            if training is not None:
                training.is_alone = False
            iteration.inner = self._place.iterate()
            self._other = weakref.ref(iteration)
        return self._read(iteration)

    def _read(self, iteration: Iteration) -> Any:
        assert iteration.inner is not None
        try:
            batch = next(iteration.inner)
        except StopIteration:
            iteration.is_over = True
            if iteration.epoch is not None:
                iteration.epoch.is_over = True
            if not self._handed.count.handed_out and not iteration.is_chained:
                self._resumed = None  # the epoch had no batches left
            with self._counting:
                self._handed.count.end()
            raise
        iteration.drawn += 1
        return batch

    # Which iteration is the trained one.

    def _begin(self, iteration: Iteration) -> None:
        """Start an epoch."""
        with self._counting:
            self._drop_abandoned(iteration)
        number = max(self.next_epoch(), iteration.first_epoch)
        self._enter(iteration, Epoch(number, self._place.generators()))
        iteration.inner = self._place.begin_epoch()

    def _enter(self, iteration: Iteration, epoch: Epoch) -> None:
        iteration.epoch, iteration.drawn = epoch, 0
        self._epoch, self._site = epoch, iteration.site
        self._training = weakref.ref(iteration)

    def _is_another_training(self, iteration: Iteration) -> bool:
        """Whether another iteration than this is running, and is taken for the trained one."""
        training = self._training()
        is_running = training is not None and training is not iteration and not training.is_over
        return is_running and not iteration.is_chained

    def resume_again(self, iteration: Iteration) -> None:
        """Resume this iteration instead of one that ended, or was left, without a step."""
        if iteration.inner is None and self._is_unused(iteration):
            self._resume, self._resumed = self._resumed, None

    def _is_unused(self, iteration: Iteration) -> bool:
        training = self._training()
        is_gone = training is None or (training.is_over and not iteration.is_chained)
        is_another_loop = not iteration.is_sequel and iteration.site != self._site
        is_at_home = self._drawn_by.is_thread(self._home)
        return self._resumed is not None and is_gone and is_another_loop and is_at_home

    def _drop_abandoned(self, iteration: Iteration) -> None:
        """Forget batches that no step will train: those of an iteration that was left early, or
        that ended without a step (an evaluation)."""
        epoch = self._epoch
        if epoch is None or not self._handed.count.ahead:
            return
        is_unused = not epoch.has_trained and self._drawn_by.is_thread(self._home)
        is_another_loop = not iteration.is_chained and iteration.site != self._site
        if not epoch.is_over or (is_unused and is_another_loop):
            self._handed.forget_waiting()
            if not epoch.has_trained:
                epoch.is_over = False

    def _promote(self, iteration: Iteration) -> None:
        """A step shows that another iteration is the trained one; the loop left the one before."""
        assert iteration.epoch is not None
        iteration.is_other = False
        iteration.epoch.number = 0 if self._epoch is None else self._epoch.number + 1
        self._epoch, self._training = iteration.epoch, self._other
        self._other = lambda: None
        for index in range(1, iteration.drawn + 1):
            self._handed.add(iteration.epoch, index)

    # The end of an epoch.

    def _is_at_known_end(self) -> bool:
        """Whether the last trained batch is the last of its epoch, by the loader's length."""
        training, trained = self._training(), self._handed.trained
        if training is None or training.is_over or training.epoch is not trained.epoch:
            return False
        if self._handed.waiting() or not self._drawn_by.is_thread(threading.get_ident()):
            return False
        return self._place.length() == trained.index

    def _look_for_end(self) -> None:
        """Ask the loader for its end now, so that a resume need not replay the whole epoch. Reading
        the end may draw (RandomSampler does), so it cannot be left out."""
        training = self._training()
        assert training is not None and training.inner is not None and training.epoch is not None
        ends = object()
        more = next(training.inner, ends)
        if more is ends:
            training.is_over = training.epoch.is_over = True
            self._handed.count.end()
        else:  # it has more than its length: hand the batch out next
            training.inner = chain(more, training.inner)

    # Coming back.

    def _go_back(self, iteration: Iteration, resume: Resume) -> None:
        """Bring the loader to where the checkpoint had it.

        Raises:
            StopIteration: the epoch that this iteration stands for is already trained.
        """
        if self._skip and not iteration.is_chained:
            self._skip -= 1
            iteration.is_over = True
            raise StopIteration
        is_between = resume.is_over or not resume.has_begun
        now = resume.now if resume.now is not None or is_between else self._now_of_siblings()
        now = now if now is not None else rng_state()
        own = resume.own if resume.own is not None else (resume.start or {}).get("own", {})
        epoch = Epoch(resume.epoch, resume.start, resume.is_over, has_trained=resume.has_begun)
        is_end = resume.is_over and not iteration.is_chained
        self._resume, self._resumed = None, None if is_end else resume
        self._handed.forget_waiting()
        self._handed.trained = Batch(epoch, resume.batches, place=(resume.loader, own))
        self._epoch = epoch
        self._again, self._now = deque(resume.ahead), now
        self._ends_again = resume.has_read_end
        if is_between:
            self._place.go_between_epochs(resume, own=own, now=now)
            if resume.now is not None:
                self._forget_now_of_siblings()
            self.on_place()
            if is_end:
                iteration.is_over = True
                raise StopIteration
            return
        self._enter(iteration, epoch)
        self._forget_now_of_siblings()
        iteration.inner = self._place.go_into_epoch(
            resume, now=now, on_progress=lambda done, s: self._report_replay(resume, done, s)
        )
        iteration.drawn = resume.batches
        self.on_place()

    def _waiting_siblings(self) -> Iterator[ResumableReader]:
        """The other readers that have not gone back yet."""
        for sibling in self.siblings:
            other = sibling()
            if other is not None and other is not self and other._resume is not None:
                yield other

    def _now_of_siblings(self) -> Mapping[str, Any] | None:
        """The generators as training left them, where another reader was the one trained last."""
        found = (other._resume for other in self._waiting_siblings())
        return next((one.now for one in found if one is not None and one.now is not None), None)

    def _forget_now_of_siblings(self) -> None:
        """What this one, or the program, draws from now on they must not take back."""
        for other in self._waiting_siblings():
            assert other._resume is not None
            other._resume = replace(other._resume, now=None)

    @property
    def is_to_go_back(self) -> bool:
        """Whether a state was loaded, and no batch was asked for since."""
        return self._resume is not None

    def go_to_end(self, end: int) -> None:
        """Bring the loader to the end of the epochs before ``end``, if the checkpoint was taken
        there. Not later: what the program draws between two ``epochs`` belongs to the run."""
        with self._reading:
            resume = self._resume
            if resume is not None and resume.is_over and resume.epoch + 1 == end:
                self._go_back(Iteration(self, is_chained=True), resume)
                self._resumed = None

    def go_behind_left(self, first: int) -> None:
        """A call begins whose first epoch is behind the one of the checkpoint: the program left
        that one in the middle, and does not ask for the rest (a ``zip`` whose other loader ended).
        """
        with self._reading:
            resume = self._resume
            if resume is None or resume.is_over or not resume.has_begun:
                return
            if resume.epoch < first:
                self._go_back(Iteration(self, is_chained=True), resume)
                self._resumed = None

    def pass_over(self) -> None:
        """A call of ``epochs`` has no batches left: all of its epochs are trained."""
        self.on_passed()

    # Events.

    def _announce(self) -> None:
        """Emit ReadAhead, once it is known that something reads ahead."""
        count = self._handed.count
        if not self._is_announced and not count.is_open and count.per_step and count.ahead:
            self._is_announced = True
            self.log.emit(
                events.ReadAhead(batches=count.ahead, per_step=count.per_step, how=count.how)
            )

    def _report_replay(self, resume: Resume, done: int, seconds: float) -> None:
        self.log.emit(
            events.ReaderReplayed(
                epoch=resume.epoch, batches=done, batches_total=resume.batches, seconds=seconds
            )
        )
