"""Attach a Checkpointer to a training loop that somebody else wrote: one call before ``fit()``.

    ck = hf.attach(trainer.optimizer, "runs/mine", model=model, loader=loader, every=100)
    trainer.fit(loader)
    ck.close()

    optimizer.step() -> a step is pending -> ... -> next batch drawn: the step counts, save if due

What a trainer does between a step and the next batch (a scheduler's step, an evaluation, early
stopping) belongs to that step: so it is counted, and saved if a save is due, when the next batch is
drawn. At an epoch's end that is the next epoch's first batch; after the last epoch it is ``close``.

After a resume the model, the optimizer and extras are loaded when attached. A trainer may touch
them before it trains; so everything is as the checkpoint had it when the first batch is drawn that
was not trained yet.

Invariants:
- A step is everything between two draws in which an optimizer stepped: several optimizers, or
  several steps on one batch, are one step.
- Iterations of the loader without gradients (an evaluation) are not followed.
- A batch is trained once: a resumed run takes as many steps in all as one that was never stopped.

Not here: finding and following the loader (training_loader.py), what goes along (kept_state.py,
trainer_values.py).
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Self, Unpack

import torch

from holdfast import events
from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.settings import SettingsKeywords
from holdfast.deprecation import warn_renamed
from holdfast.errors import HoldfastWarning, InvalidRequestError
from holdfast.integrations.kept_state import LoopState, keep
from holdfast.integrations.training_loader import (
    FollowedLoader,
    FoundLoader,
    has_given_all,
    kind_of,
)
from holdfast.loading.generators import Generator
from holdfast.loading.resumable_reader import ResumableReader
from holdfast.loading.stateful import Stateful
from holdfast.model.model_state import as_optimizers
from holdfast.storage.base import Storage

_OUTSIDE_MAX = 8  # steps without a batch of the loader, before it is not the one that is trained

_OPEN: list[Attachment] = []


def _close_all() -> None:
    """Close what the program forgot to close; with its error, if it ended by one."""
    for each in tuple(_OPEN):
        each._close(getattr(sys, "last_value", None))


# A plain atexit function comes too late: executors take no more work by then.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]


def attach(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    url: str | os.PathLike[str] | Storage,
    *,
    model: torch.nn.Module,
    loader: Any = None,
    trainer: Any = None,
    extras: Mapping[str, Stateful | Generator] | None = None,
    batches_per_step: int | None = None,
    **settings: Unpack[SettingsKeywords],
) -> Attachment:
    """Follow a training loop from outside: resume now, count its steps, save when due.

    ``loader``: what the trainer iterates; left out, the first DataLoader that is iterated to train.
    ``trainer``: the object whose own values go along (best metric, patience, schedulers).
    ``extras``: other things that go along, with ``state_dict`` or kept by their attributes.
    ``batches_per_step``: where it is not to be found out. ``settings``: as a Checkpointer's.

    Raises:
        InvalidRequestError: the loader cannot be followed, or the checkpoint is of another model.
        CorruptDataError: the checkpoint is damaged.
    """
    attached = Attachment(
        optimizer,
        model=model,
        loader=loader,
        batches_per_step=batches_per_step,
        trainer=trainer,
        extras=extras,
    )
    attached._start(url, settings)
    return attached


class Attachment:
    """What ``hf.attach`` returns: a run that follows a trainer's loop, until it is closed.

    As a context manager it does not save a step of a loop that failed.
    """

    checkpointer: Checkpointer
    resumed_step: int = 0

    def __init__(
        self,
        optimizer: Any,
        *,
        model: torch.nn.Module,
        loader: Any,
        batches_per_step: int | None,
        trainer: Any,
        extras: Mapping[str, Stateful | Generator] | None,
    ) -> None:
        """Made by ``hf.attach``."""
        self._model = model
        self._optimizer = optimizer
        self._optimizers = list(as_optimizers(optimizer).values())
        self._knows_rates = trainer is not None or bool(extras)
        self._is_given = batches_per_step is not None
        self._since = _Since()
        self._is_immediate = False  # batches are read elsewhere: a step counts when it is taken
        self._saved_rates: list[Any] | None = None  # with the last step that counted at once
        self._has_begun = False
        self._has_scaled = False
        self._epochs_to_skip = 0
        self._skipped = 0
        self._groups: list[list[dict[str, Any]]] = []
        self._versions: tuple[int, ...] = ()
        self._warned: set[str] = set()
        self._reading: set[int] = set()  # threads that are inside of the reader
        self._read_in: int | None = None  # thread of the last draw
        self._is_closed = False
        self._undo: list[Callable[[], None]] = []
        self._found = FoundLoader(self._follow) if loader is None else None
        self._reader = ResumableReader(
            loader if self._found is None else self._found, batches_per_step=batches_per_step
        )
        self._loop = LoopState(model, self._reader.loader)
        self._kept = keep(self._loop, trainer, extras)

    def _start(self, url: str | os.PathLike[str] | Storage, settings: SettingsKeywords) -> None:
        try:
            if self._found is not None:
                self._undo.append(self._found.release)
                self._found.wait()
            else:
                followed = FollowedLoader(self._reader.loader, self._follow)
                self._undo.append(followed.release)
            self.checkpointer = Checkpointer(
                url,
                model=self._model,
                optimizer=self._optimizer,
                reader=self._reader,
                extras=self._kept,
                **settings,
            )
            self._hook()
            self.resumed_step = self.checkpointer.resume()
        except BaseException as error:
            self._let_go()
            if hasattr(self, "checkpointer"):
                self.checkpointer.__exit__(type(error), error, None)
            raise
        if self.resumed_step:
            self._epochs_to_skip = self._reader.next_epoch()
            self._groups = [
                [_settings_of(group) for group in optimizer.param_groups]
                for optimizer in self._optimizers
            ]
            self._versions = self._tensor_versions()
            for optimizer in self._optimizers:  # else schedulers warn, at the end of an empty epoch
                optimizer._opt_called = True  # type: ignore[attr-defined]
            if self._found is None and self._loop.expected != kind_of(self._reader.loader):
                self._warn(
                    "the loader's batches are not those of the checkpoint: the run goes on at the "
                    "batch of the same number",
                    "resume with the data set and the batch size the run started with",
                )
        _OPEN.append(self)
        self._undo.append(lambda: _OPEN.remove(self))

    # What a user calls.

    @property
    def current_step(self) -> int:
        """How many steps this run has taken, with one that is not counted yet."""
        return self.checkpointer.current_step + self._since.is_pending

    def all_steps(self) -> tuple[int, ...]:
        """The steps that are saved and can be restored, ascending."""
        return self.checkpointer.all_steps()

    @property
    def steps(self) -> tuple[int, ...]:
        """Deprecated: ``all_steps()``."""
        warn_renamed("Attachment.steps", "all_steps()")
        return self.all_steps()

    def start_epoch(self) -> int:
        """The epoch to start at, for trainers that can start later or be given fewer epochs.

            trainer.fit(loader, initial_epoch=ck.start_epoch(), epochs=10)
            trainer.fit(loader, epochs=10 - ck.start_epoch())

        From then on no iteration is empty: the first goes on with the epoch that was stopped.

        Raises:
            InvalidRequestError: the trainer has begun already.
        """
        if self._has_begun or self._skipped:
            raise InvalidRequestError(
                "the trainer has begun already", todo="call start_epoch() before fit()"
            )
        self._epochs_to_skip = 0
        return self._reader.next_epoch()

    def preempt(self, deadline_s: float | None = None) -> None:
        """The process will end soon: save when the next batch is drawn (``Checkpointer``)."""
        self.checkpointer.preempt(deadline_s)

    def close(self) -> None:
        """Count a step that is pending, save the last one (``save_last``), let go of everything.

        Raises:
            HoldfastError: a save failed.
        """
        self._close(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if error is None:
                self._tell_unreached()
                if self._since.is_pending:
                    self._count()
            elif self._skipped and not self._has_begun:
                error.add_note(
                    f"holdfast: {self._skipped} iteration(s) of the loader were empty, because "
                    "their epochs are trained already; if the trainer cannot run an empty epoch, "
                    "have it start at ck.start_epoch()"
                )
        finally:
            self._let_go()
            self.checkpointer.__exit__(None if error is None else type(error), error, None)

    def _let_go(self) -> None:
        while self._undo:
            self._undo.pop()()

    # Steps.

    def _hook(self) -> None:
        for index, optimizer in enumerate(self._optimizers):
            before = optimizer.register_step_pre_hook(
                lambda *_, index=index: self._before_step(index)
            )
            after = optimizer.register_step_post_hook(lambda *_, index=index: self._stepped(index))
            self._undo += [before.remove, after.remove]
        for kept in self._kept.values():
            for scaler in kept.scalers():
                self._hook_scaler(scaler)

    def _hook_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """A step that the scaler leaves out used its batch too, and changed the scaler."""
        own = scaler.update

        def update(*args: Any, **kwargs: Any) -> None:
            own(*args, **kwargs)
            if not self._has_scaled:
                self._stepped(len(self._optimizers) - 1)
            self._has_scaled = False

        scaler.update = update  # type: ignore[method-assign]
        self._undo.append(lambda: scaler.__dict__.pop("update", None))

    def _before_step(self, index: int) -> None:
        """Where steps are taken and no batch was drawn between them, they count one by one."""
        since = self._since
        if since.is_pending and index in since.stepped:
            since.outside += not self._reader.is_in_epoch
            if since.drawn > 1:
                self._is_immediate = True
                self._warn_unless(
                    self._is_given,
                    "several batches were read before several steps: which step trained which "
                    "batch is not known, and a resumed run may leave some out",
                    "pass batches_per_step=1 to hf.attach()",
                )
            elif since.outside > _OUTSIDE_MAX:
                self._is_immediate = True
                self._warn_unread()
            if self._is_immediate:
                self._count()
        if self._saved_rates not in (None, self._rates()):
            self._warn(
                "the learning rate changed right after a step that was saved: batches are read "
                "ahead, so that steps are saved before what follows them",
                "have the trainer read its batches in the thread and in the loop that trains",
            )

    def _stepped(self, index: int) -> None:
        since = self._since
        self._has_scaled = True
        since.stepped.add(index)
        if self._read_in is None:
            self._warn_unread()
        if self._read_in == threading.get_ident() and not self._is_immediate:
            since.is_pending = True
            self._reader.stepped()
        elif index == len(self._optimizers) - 1:
            self._count()
            self._saved_rates = self._rates() if self._since.is_saved else None

    def _count(self) -> None:
        self._since = _Since()
        self._since.is_saved = self.checkpointer.step() is not None
        if not self._knows_rates and self._groups and self._rates() != self._begun_rates():
            self._warn(
                "the learning rate changes, and nothing goes along that changes it",
                "pass the scheduler in extras=, or the object that holds it as trainer=",
            )

    def _rates(self) -> list[Any]:
        return [
            float(group.get("lr", 0.0))
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        ]

    def _begun_rates(self) -> list[Any]:
        return [float(group.get("lr", 0.0)) for groups in self._groups for group in groups]

    # Draws.

    def _follow(self, loader: Any) -> Iterator[Any] | None:
        """A pass of our own for an iteration that trains; None for any other."""
        is_inner = threading.get_ident() in self._reading
        if self._is_closed or is_inner or not torch.is_grad_enabled():
            return None
        if self._found is not None and not self._takes(self._found, loader):
            return None
        if self._skipped < self._epochs_to_skip:
            self._skipped += 1
            return iter(())
        if not self._since.is_pending:
            self._since.drawn = 0
        return _Draws(self, iter(self._reader))

    def _takes(self, found: FoundLoader, loader: Any) -> bool:
        """Whether a DataLoader is the one that is trained, as far as can be told."""
        if found.target is loader:
            return True
        expected = self._loop.expected
        if self.current_step > self.resumed_step:  # it is known which: another may follow it
            expected = None if self._reader.is_in_epoch else kind_of(found)
            if expected is None:
                return False
        if not self._model.training or expected not in (None, kind_of(loader)):
            return False
        found.target = loader
        return True

    def _draw(self, passing: Any, caller: FrameType) -> Any:
        here = threading.get_ident()
        if not self._is_closed:
            self._read_in = here
            if not self._has_begun:
                self._begin()
            if self._since.is_pending and not self._is_at_end(passing):
                self._count()
        self._reading.add(here)
        try:
            batch = self._reader.next_batch(passing, caller)
        except StopIteration:
            self._reader.end_training(passing)
            raise
        finally:
            self._reading.discard(here)
        self._since.drawn += 1
        return batch

    def _is_at_end(self, passing: Any) -> bool:
        """Whether the pending step was the epoch's last: then the epoch's end belongs to it."""
        is_ahead = self._reader.has_read_ahead
        return not is_ahead and has_given_all(self._reader.loader, passing.drawn)

    def _begin(self) -> None:
        """The first batch that was not trained is drawn: all is as the checkpoint had it."""
        self._has_begun = True
        # All ranks restore together, and none knows what was written on another.
        may_differ = self.checkpointer.world_size > 1 or self._tensor_versions() != self._versions
        if self.resumed_step and may_differ:
            self.checkpointer.restore(self.resumed_step)
        for optimizer, groups in zip(self._optimizers, self._groups, strict=False):
            for group, stored in zip(optimizer.param_groups, groups, strict=False):
                group.update(copy.deepcopy(stored))
        if not self._groups:
            self._groups = [
                [_settings_of(group) for group in optimizer.param_groups]
                for optimizer in self._optimizers
            ]
        for kept in self._kept.values():
            kept.begin()
        if self.resumed_step and self._reader.next_epoch() > self._reader.epoch:
            with contextlib.suppress(StopIteration):  # the rest of an epoch that was over
                next(iter(self._reader))

    def _tensor_versions(self) -> tuple[int, ...]:
        """Differs where somebody wrote to the model or the optimizer's state."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                tensors += [item for item in state.values() if isinstance(item, torch.Tensor)]
        return tuple(number for tensor in tensors for number in (id(tensor), tensor._version))

    # Telling.

    def _tell_unreached(self) -> None:
        if 0 < self._skipped < self._epochs_to_skip:
            self._warn(
                f"the trainer stopped after {self._skipped} of {self._epochs_to_skip} epochs that "
                "are trained already, and trained nothing; did early stopping see the same metric "
                "again?",
                "have the trainer start at ck.start_epoch()",
            )

    def _warn_unread(self) -> None:
        self._warn(
            "the optimizer steps, and the loader is not read: a resumed run will read from its "
            "first batch",
            "pass the object that the trainer iterates as loader=",
        )

    def _warn_unless(self, is_fine: bool, reason: str, todo: str) -> None:
        if not is_fine:
            self._warn(reason, todo)

    def _warn(self, reason: str, todo: str) -> None:
        if reason in self._warned:
            return
        self._warned.add(reason)
        self._reader.log.emit(events.ReaderNotice(reason=reason, todo=todo))
        # A filter may turn warnings into errors; training goes on all the same.
        with contextlib.suppress(HoldfastWarning):
            warnings.warn(f"{reason}; {todo}", HoldfastWarning, stacklevel=3)


@dataclass(slots=True)
class _Since:
    """What happened since the last step was counted."""

    is_pending: bool = False
    is_saved: bool = False  # the last step was
    drawn: int = 0
    outside: int = 0  # steps again, and the loader was not being read
    stepped: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Draws:
    """One iteration of the loader, as a trainer sees it."""

    attached: Attachment
    passing: Any

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self.attached._draw(self.passing, sys._getframe(1))


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
