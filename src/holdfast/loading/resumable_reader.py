"""A reader that comes back to the batch that was trained last, whatever loader it reads from.

    loader -> one pass an epoch -> batches handed out -> trained, when a step says so
    state_dict: epoch, batches trained in it, random generators when it began and now

Coming back is a replay: the generators are set as they were when the epoch began, the loader is
iterated anew, the trained batches are read again and dropped, then the generators are set as the
checkpoint had them. That is exact for any loader that reads the same when its generators are the
same, and costs as much as reading those batches. A loader with ``state_dict`` (torchdata's
StatefulDataLoader, GrantedLoader) is placed by it instead, without a replay.

Where something reads ahead (a pipeline, a double buffer, a thread), batches handed out and not yet
trained are read once more after a resume, each with the generators as they were before it.

Invariants:
- The state is that of the last batch trained, never of one that was only read.
- Nothing is drawn from a generator that the loader alone would not draw.
- A pass that trains nothing (a look at one batch, an evaluation) moves nothing.

Not exact: a thread that reads ahead while both it and training draw from the global generators;
batches that persistent workers augment after their first epoch; a sampler that draws from the
global generators batch by batch while workers read ahead; loaders with ``in_order=False``.

Not here: which batches a step trained (trained_count.py), who holds the reader (reader_slot.py).
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Self

from torch.utils.data import DataLoader

from holdfast import events
from holdfast.errors import InvalidRequestError
from holdfast.loading.generators import (
    find_generators,
    host_state,
    is_same_state,
    load_rng_state,
    load_states,
    rng_state,
    states_of,
)
from holdfast.loading.reader_state import Resume, is_resumable, pack_state, parse_resume
from holdfast.loading.stateful import is_stateful
from holdfast.loading.trained_count import TrainedCount
from holdfast.loading.worker_generators import generators_in_state, only_counts

_AHEAD_MAX = 256  # batches read ahead of which generators and the loader's state are kept
_PIPELINES = "torchrec.distributed.train_pipeline"
_FINISHED = "_iterator_finished"  # torchdata's: a finished iterator draws seeds for two epochs
_REPORT_S = 2.0


@dataclass(slots=True)
class _Epoch:
    number: int
    start: Mapping[str, Any] | None = None  # generators just before it began
    is_over: bool = False
    has_trained: bool = False


@dataclass(slots=True)
class _Batch:
    """A batch handed out: which, and what is needed to save right behind it, or before it."""

    epoch: _Epoch
    index: int  # of its epoch, from 1; 0: none yet
    ordinal: int = 0  # of all that were handed out
    before: Mapping[str, Any] | None = None  # global generators, where reading it drew
    place: tuple[Any, Mapping[str, Any]] | None = None  # a stateful loader's state, its generators


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Pass:
    """One iteration of the loader."""

    reader: ResumableReader
    is_chained: bool = False  # the next epoch follows by itself
    inner: Iterator[Any] | None = None
    epoch: _Epoch | None = None
    drawn: int = 0  # batches of the epoch
    is_over: bool = False
    is_beside: bool = False  # not the one that is trained, as far as is known
    generation: int = -1

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self.reader._next(self, sys._getframe(1))


class ResumableReader:
    """Iterates any loader, and knows which batch was trained last.

    ``iter(reader)`` is one epoch, or after a resume the rest of one; ``epochs(n)`` all of them.
    Call ``trained`` after every step. With ``skips_trained`` iterations that a loop begins anew
    for epochs which are trained already are empty: for loops that always start at their first.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        batches_per_step: int | None = None,
        skips_trained: bool = False,
        log: events.EventLog | None = None,
    ) -> None:
        """``batches_per_step``: how many a step trains; by default it is found out.

        Raises:
            InvalidRequestError: the loader cannot be iterated, or fewer than one batch a step.
        """
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise InvalidRequestError(
                "a loader can be iterated",
                type=type(loader).__name__,
                todo="pass a DataLoader or another iterable of batches",
            )
        if iter_is_itself(loader):
            raise InvalidRequestError(
                "an iterator is used up once: no epoch can begin again",
                type=type(loader).__name__,
                todo="pass what it was made of: the loader, or an object whose __iter__ makes one",
            )
        if batches_per_step is not None and batches_per_step < 1:
            raise InvalidRequestError(
                "a step trains at least one batch", batches_per_step=batches_per_step
            )
        self.loader = loader
        self.log = log or events.EventLog()
        self._iter: Callable[[], Iterator[Any]] = lambda: iter(loader)
        self._restore_class: Callable[[], None] | None = None
        self._is_stateful = is_stateful(loader)
        self._batches_per_step = batches_per_step
        self._skips_trained = skips_trained
        self._reading = threading.RLock()  # held while the loader is used
        self._counting = threading.Lock()
        self._generation = 0
        self._resume: Resume | None = None
        self._resumed: Resume | None = None  # come back to, and nothing trained since
        self._skip = 0  # iterations that are empty
        self._home = threading.get_ident()
        self._start_over(remembered=None)

    def _start_over(self, *, remembered: int | None) -> None:
        self._count = TrainedCount(self._batches_per_step, remembered=remembered)
        self._handed: deque[_Batch] = deque()
        self._at = _Batch(_Epoch(0), 0)  # trained last
        self._last: _Batch | None = None  # handed out last
        self._epoch: _Epoch | None = None  # begun last
        self._main: Callable[[], _Pass | None] = lambda: None
        self._beside: Callable[[], _Pass | None] = lambda: None
        self._again: deque[Mapping[str, Any] | None] = deque()  # read ahead before the resume
        self._now: Mapping[str, Any] | None = None
        self._at_end: Mapping[str, Any] | None = None  # generators of a loader placed at an end
        self._frame: FrameType | None = None
        self._thread: int | None = None
        self._is_piped = False
        self._is_announced = False

    # What a loop sees.

    def __iter__(self) -> Iterator[Any]:
        return _Pass(self)

    def epochs(self, count: int) -> Iterator[Any]:
        """The batches of ``count`` epochs in all, without those that are trained already."""
        return _Epochs(self, count)

    @property
    def epoch(self) -> int:
        """The epoch of the batch that is trained next, from 0, as far as it was handed out."""
        if self._resume is not None:
            return self._resume.epoch
        with self._counting:
            waiting = self._waiting()
            return waiting[0].epoch.number if waiting else self._at.epoch.number

    @property
    def batch(self) -> int:
        """How many batches of the epoch were trained."""
        return self._resume.batches if self._resume is not None else self._at.index

    def next_epoch(self) -> int:
        """The epoch that an iteration begun now belongs to."""
        if self._resume is not None:
            return self._resume.epoch + self._resume.is_over
        epoch = self._epoch
        return 0 if epoch is None else epoch.number + (epoch.is_over or epoch.has_trained)

    def set_batches_per_step(self, batches: int) -> None:
        """Say how many batches a step trains, before the first is drawn."""
        self._batches_per_step = batches
        if not self._count.handed_out:
            self._count = TrainedCount(batches)

    def trained(self) -> None:
        """A step was trained: some of the batches handed out went into it."""
        with self._counting:
            beside = self._beside()
            if not self._count.ahead and beside is not None and beside.drawn:
                self._promote(beside)
            waits = bool(self._count.ahead)
            is_thread = waits and self._thread not in (None, threading.get_ident())
            if waits:
                self._resumed = None
            is_apart = self._count.is_open and (self._is_piped or not _is_running(self._frame))
            self._count.step(is_thread=is_thread, is_apart=is_apart)
            self._move()
        self._announce()

    def intercept(self) -> None:
        """Let every iteration of a DataLoader object go through this reader, until ``release``.

        Only this object changes, by a class of its own; copies and other loaders do not.

        Raises:
            InvalidRequestError: not a DataLoader.
        """
        loader = self.loader
        if not isinstance(loader, DataLoader):
            raise InvalidRequestError(
                "only a DataLoader can be followed where others iterate it",
                type=type(loader).__name__,
                todo="iterate ck.epochs(loader, n)",
            )
        if self._restore_class is not None:
            return
        base = type(loader)
        this = weakref.ref(self)

        def iterate(given: DataLoader[Any]) -> Any:
            reader = this()
            if reader is None or reader.loader is not given:
                return base.__iter__(given)
            return iter(reader)

        made = type(base.__name__, (base,), {"__iter__": iterate, "__module__": base.__module__})
        made.__qualname__ = base.__qualname__
        loader.__class__ = made

        def restore() -> None:
            if type(loader) is made:
                loader.__class__ = base

        self._iter = lambda: base.__iter__(loader)
        self._restore_class = restore

    def release(self) -> None:
        """Let go of the loader."""
        if self._restore_class is not None:
            self._restore_class()
            self._restore_class = None
        self._frame = None

    # What a checkpoint sees.

    def state_dict(self) -> dict[str, Any]:
        """Where training is, not where reading is."""
        if self._resume is not None:
            return dict(self._resume.raw)
        with self._reading, self._counting:
            if not self._is_stateful and self._is_at_known_end():
                self._look_for_end()
            waiting, at = self._waiting(), self._at
            generators = find_generators(self.loader)
            loader: Any = None
            own: Mapping[str, Any] | None = None
            start = at.epoch.start
            is_over = at.epoch.is_over
            if self._is_stateful and (at.index or at.place):
                loader, own = at.place or self._place()
                if only_counts(loader):
                    loader, own = None, None if waiting else own
                # A loader that goes on with its next epoch does not say that one is over.
                is_over = is_over or (not _is_torch(self.loader) and self._is_at_known_end())
            elif not waiting:
                own = states_of(generators)
            if at.epoch.is_over or not at.index:
                start = waiting[0].epoch.start if waiting else None
            is_exact = self._count.how != "thread" and len(waiting) <= _AHEAD_MAX
            return pack_state(
                epoch=at.epoch.number,
                batches=at.index,
                is_over=is_over,
                per_step=self._count.remembered,
                start=start,
                loader=loader,
                own=own,
                now=rng_state(),
                ahead=[batch.before for batch in waiting] if is_exact else [],
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Come back to where a state was taken, at the next batch that is asked for.

        Also takes what the loader's own ``state_dict`` gave, as older checkpoints have it.

        Raises:
            InvalidRequestError: not a reader's state.
        """
        resume = parse_resume(state, self.loader)
        if resume.loader is not None and not self._is_stateful:
            raise InvalidRequestError(
                "the checkpoint's loader had a state of its own, this one cannot take it",
                type=type(self.loader).__name__,
                todo="pass the loader that the run was trained with",
            )
        with self._reading, self._counting:
            self._generation += 1
            self._start_over(remembered=resume.per_step)
            self._resume, self._resumed = resume, None
            self._skip = resume.epoch if self._skips_trained else 0

    def _load_rank_states(self, states: list[Mapping[str, Any]]) -> None:
        """All ranks' states, of another number of ranks: for loaders that can divide them."""
        inner = [state["loader"] if is_resumable(state) else state for state in states]
        self.loader.load_rank_states(inner)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        # Only where the loader can: a checkpoint of another number of ranks is refused otherwise.
        if name == "load_rank_states" and hasattr(self.__dict__.get("loader"), name):
            return self._load_rank_states
        raise AttributeError(name)

    # Drawing.

    def _next(self, lane: _Pass, frame: FrameType) -> Any:
        with self._reading:
            return self._draw(lane, frame)

    def _draw(self, lane: _Pass, frame: FrameType) -> Any:
        if lane.generation != self._generation:  # new, or older than a restore
            lane.generation, lane.inner, lane.is_over = self._generation, None, False
            lane.drawn, lane.is_beside = 0, False
        if lane.is_over:
            raise StopIteration
        if lane.inner is None and self._is_idle(lane):
            self._resume, self._resumed = self._resumed, None
        if self._resume is not None:
            self._come_back(lane, self._resume)
        if lane.inner is None and self._is_main_running(lane):
            lane.is_beside = True
        if lane.is_beside:
            return self._draw_beside(lane)
        follows = self._count.is_open or self._count.per_step is not None
        last = self._last
        if self._is_stateful and last is not None and last.place is None:
            last.place = self._place()
        again = self._again.popleft() if self._again else None
        if again is not None:
            load_rng_state(again)
        before = host_state() if follows and self._count.ahead <= _AHEAD_MAX else None
        if lane.inner is None:
            self._begin(lane)
        batch = self._read(lane)
        if before is not None and is_same_state(before, host_state()):
            before = None
        if again is not None:
            assert self._now is not None
            load_rng_state(self._now)
        assert lane.epoch is not None
        with self._counting:
            self._count.hand_out()
            self._last = _Batch(lane.epoch, lane.drawn, self._count.handed_out, before)
            self._handed.append(self._last)
            self._thread = threading.get_ident()
            if self._count.is_open:
                self._frame = frame
                self._is_piped = self._is_piped or _is_pipeline(frame)
        return batch

    def _read(self, lane: _Pass) -> Any:
        assert lane.inner is not None
        try:
            batch = next(lane.inner)
        except StopIteration:
            lane.is_over = True
            if lane.epoch is not None:
                lane.epoch.is_over = True
            if not self._count.handed_out:  # nothing was left of the epoch: the next one follows
                self._resumed = None
            with self._counting:
                self._count.end()
            raise
        lane.drawn += 1
        return batch

    def _draw_beside(self, lane: _Pass) -> Any:
        """Read for somebody else than the training loop, until a step says otherwise."""
        if lane.inner is None:
            lane.epoch = _Epoch(-1, self._generators())
            lane.inner = self._iterate()
            self._beside = weakref.ref(lane)
        return self._read(lane)

    def _is_main_running(self, lane: _Pass) -> bool:
        main = self._main()
        return main is not None and main is not lane and not main.is_over and not lane.is_chained

    def _begin(self, lane: _Pass) -> None:
        """Start an epoch."""
        with self._counting:
            self._drop_abandoned(lane)
        self._enter(lane, _Epoch(self.next_epoch(), self._generators()))
        lane.inner = self._iterate() if self._at_end is None else self._pass_end(self._at_end)
        self._at_end = None

    def _pass_end(self, own: Mapping[str, Any]) -> Iterator[Any]:
        """Iterate a loader whose state was taken at an end that it had not noticed."""
        rng = rng_state()
        inner = self._iterate()
        if _is_torch(self.loader):  # what it draws now it drew for the epoch that is over
            load_rng_state(rng)
        ends = object()
        first = next(inner, ends)
        if first is not ends:
            return _chain(first, inner)
        load_rng_state(rng)
        load_states(find_generators(self.loader), own)
        return self._iterate()

    def _is_idle(self, lane: _Pass) -> bool:
        """Whether an iteration came back, trained nothing, and this one is to take its place."""
        main = self._main()
        is_left = main is None or (main.is_over and not lane.is_chained)
        return self._resumed is not None and is_left and self._thread == self._home

    def _enter(self, lane: _Pass, epoch: _Epoch) -> None:
        lane.epoch, lane.drawn = epoch, 0
        self._epoch = epoch
        self._main = weakref.ref(lane)

    def _drop_abandoned(self, lane: _Pass) -> None:
        """Forget batches that nobody will train: of a pass that was left, or trained nothing."""
        epoch = self._epoch
        if epoch is None or not self._count.ahead:
            return
        is_idle = not epoch.has_trained and self._thread == self._home
        if not epoch.is_over or (is_idle and not lane.is_chained):
            self._count.forget()
            self._handed.clear()
            self._last = None
            if not epoch.has_trained:
                epoch.is_over = False

    def _promote(self, lane: _Pass) -> None:
        """The pass beside is the one that is trained; the other was left."""
        assert lane.epoch is not None
        lane.is_beside = False
        lane.epoch.number = 0 if self._epoch is None else self._epoch.number + 1
        self._epoch, self._main, self._beside = lane.epoch, self._beside, lambda: None
        for index in range(1, lane.drawn + 1):
            self._count.hand_out()
            self._last = _Batch(lane.epoch, index, self._count.handed_out)
            self._handed.append(self._last)

    def _generators(self) -> dict[str, Any]:
        return {"rng": rng_state(), "own": states_of(find_generators(self.loader))}

    def _iterate(self) -> Iterator[Any]:
        with generators_in_state(self.loader):
            return self._iter()

    def _place(self) -> tuple[Any, Mapping[str, Any]]:
        """Where a stateful loader stands."""
        state = self.loader.state_dict()  # type: ignore[attr-defined]
        return state, states_of(find_generators(self.loader))

    # Trained, and the end of an epoch.

    def _waiting(self) -> list[_Batch]:
        return [batch for batch in self._handed if batch.ordinal > self._count.trained]

    def _move(self) -> None:
        """The last trained batch is where the count says."""
        for batch in self._handed:
            if batch.ordinal > self._count.trained:
                break
            self._at = batch
            batch.epoch.has_trained = True
        if not self._count.is_open:
            self._frame = None
            while self._handed and self._handed[0].ordinal <= self._count.trained:
                self._handed.popleft()

    def _announce(self) -> None:
        count = self._count
        if not self._is_announced and not count.is_open and count.per_step and count.ahead:
            self._is_announced = True
            self.log.emit(
                events.ReadAhead(batches=count.ahead, per_step=count.per_step, how=count.how)
            )

    @property
    def is_guess(self) -> bool:
        """Whether it is not known yet how many batches the only step so far has trained."""
        return self._count.is_guess

    def _is_at_known_end(self) -> bool:
        main = self._main()
        if main is None or main.is_over or main.epoch is not self._at.epoch:
            return False
        if self._waiting() or self._thread != threading.get_ident():
            return False
        try:
            return len(self.loader) == self._at.index  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return False

    def _look_for_end(self) -> None:
        """Ask for the end now: then the epoch need not be replayed to find that it is over."""
        main = self._main()
        assert main is not None and main.inner is not None and main.epoch is not None
        ends = object()
        kept = next(main.inner, ends)
        if kept is ends:
            main.is_over = main.epoch.is_over = True
            self._count.end()
        else:  # it has more than it said: hand the batch out next
            main.inner = _chain(kept, main.inner)

    # Coming back.

    def _come_back(self, lane: _Pass, resume: Resume) -> None:
        """Place the loader where the checkpoint had it; later batches are drawn as ever."""
        if self._skip:
            self._skip -= 1
            lane.is_over = True
            raise StopIteration
        now = resume.now if resume.now is not None else rng_state()
        generators = find_generators(self.loader)
        start = resume.start or {}
        own = resume.own if resume.own is not None else start.get("own", {})
        epoch = _Epoch(resume.epoch, resume.start, resume.is_over, has_trained=resume.has_begun)
        self._resume, self._resumed = None, None if resume.is_over else resume
        self._count.forget()
        self._handed.clear()
        self._last = None
        self._at = _Batch(epoch, resume.batches, place=(resume.loader, own))
        self._epoch = epoch
        self._again, self._now = deque(resume.ahead), now
        if resume.is_over or not resume.has_begun:
            self._warm_workers(resume.epoch + resume.is_over)
            if resume.loader is not None:
                self._place_loader(resume.loader, is_over=resume.is_over)
                self._at_end = own
            load_states(generators, own)
            load_rng_state(now)
            if resume.is_over and not lane.is_chained:
                lane.is_over = True
                raise StopIteration
            return
        self._enter(lane, epoch)
        if resume.loader is not None:
            self._place_loader(resume.loader, is_over=False)
            lane.inner = self._iterate()
        else:
            self._warm_workers(resume.epoch)
            load_states(generators, start.get("own", {}))
            if "rng" in start:
                load_rng_state(start["rng"])
            lane.inner = self._iterate()
            self._replay(lane.inner, resume)
        lane.drawn = resume.batches
        if resume.own is not None:
            load_states(generators, resume.own)
        load_rng_state(now)

    def _place_loader(self, state: Any, *, is_over: bool) -> None:
        if is_over and isinstance(state, dict) and _FINISHED in state:
            state = {**state, _FINISHED: False}
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]

    def _warm_workers(self, epoch: int) -> None:
        """Start persistent workers: only the first epoch of a process draws their seed."""
        is_persistent = getattr(self.loader, "persistent_workers", False)
        if is_persistent and epoch and getattr(self.loader, "_iterator", ...) is None:
            kept = self._generators()
            self._iterate()
            load_rng_state(kept["rng"])
            load_states(find_generators(self.loader), kept["own"])

    def _replay(self, inner: Iterator[Any], resume: Resume) -> None:
        started = reported = time.monotonic()
        for done in range(resume.batches):
            try:
                next(inner)
            except StopIteration as error:
                raise InvalidRequestError(
                    "the loader has fewer batches than were trained of this epoch",
                    trained=resume.batches,
                    found=done,
                    todo="resume with the data set and the batch size the run started with",
                ) from error
            if (time.monotonic() - reported) > _REPORT_S:
                reported = time.monotonic()
                self._tell_replay(resume, done + 1, reported - started)
        self._tell_replay(resume, resume.batches, time.monotonic() - started)

    def _tell_replay(self, resume: Resume, done: int, seconds: float) -> None:
        self.log.emit(
            events.ReaderReplayed(
                epoch=resume.epoch, batches=done, batches_total=resume.batches, seconds=seconds
            )
        )


@dataclass(slots=True)
class _Epochs:
    """Epoch after epoch, as one iterator."""

    reader: ResumableReader
    count: int
    lane: _Pass | None = field(default=None)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        reader = self.reader
        while True:
            if self.lane is None or self.lane.generation not in (-1, reader._generation):
                number = reader.next_epoch()
                if number >= self.count:
                    raise StopIteration
                set_epoch(reader.loader, number)
                self.lane = _Pass(reader, is_chained=True)
            try:
                return reader._next(self.lane, sys._getframe(1))
            except StopIteration:
                self.lane = None


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader, its samplers and its data set which epoch begins, where they ask for it."""
    parts = [loader] + [
        getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset")
    ]
    parts.append(getattr(parts[2], "sampler", None))
    told: list[Any] = []
    for part in parts:
        tell = getattr(part, "set_epoch", None)
        if callable(tell) and not any(part is other for other in told):
            told.append(part)
            tell(epoch)


def iter_is_itself(loader: Any) -> bool:
    """Whether this is an iterator: something that can be iterated once."""
    return hasattr(loader, "__next__") and not isinstance(loader, DataLoader)


def _is_torch(loader: Any) -> bool:
    return isinstance(loader, DataLoader)


def _is_running(frame: FrameType | None) -> bool:
    """Whether a frame is one of those that called this function."""
    here: FrameType | None = sys._getframe(1)
    while here is not None:
        if here is frame:
            return True
        here = here.f_back
    return False


def _is_pipeline(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(_PIPELINES):
            return True
        frame = frame.f_back
    return False


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest
