"""What goes along beside the model: schedulers that do not, and what a program does to extras in
epochs that it passes over.

A resumed program makes the calls of ``Checkpointer.epochs`` again whose epochs are trained. They
have no batches, but what the program does behind each of them (a scheduler's step, early stopping)
was done before the checkpoint, too. ``TrainingState`` takes it back where training goes on.

torch's schedulers write ``initial_lr`` into the groups of their optimizer, all but
``ReduceLROnPlateau``. A resumed run has the rates as they were saved, but a scheduler that is made
anew begins its schedule from the start.

Invariant: telling never stops training, also where warnings are made errors.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from holdfast import events
from holdfast.errors import HoldfastWarning
from holdfast.loading.generators import KeptGenerator
from holdfast.loading.unfollowed import instances_of

_NO_SCHEDULERS = (torch.amp.GradScaler, KeptGenerator)
_NOT_SEARCHED = (ModuleType, FunctionType, BuiltinFunctionType, type, torch.Tensor)
_OBJECTS_MAX = 20_000  # of extras that are searched for schedulers

Tell = Callable[[str, str], None]


def has_lost_scheduler(
    optimizers: Iterable[torch.optim.Optimizer], extras: Mapping[str, Any], *, is_thorough: bool
) -> bool:
    """Whether a scheduler is at work, and nothing that goes along is or holds it.

    ``is_thorough``: look at every object of the process. Otherwise only at what schedulers leave in
    their optimizers, which says nothing of ``ReduceLROnPlateau``, nor of several.
    """
    owned = list(optimizers)
    if is_thorough and not all(map(_holding(extras), _schedulers_of(owned))):
        return True
    is_scheduled = any("initial_lr" in group for one in owned for group in one.param_groups)
    return is_scheduled and all(isinstance(item, _NO_SCHEDULERS) for item in extras.values())


def _schedulers_of(optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    """torch's schedulers of these optimizers that are alive."""
    groups = [optimizer.param_groups for optimizer in optimizers]
    # By groups: the optimizer may be wrapped.
    return [
        item
        for item in instances_of(LRScheduler, ReduceLROnPlateau)
        if any(getattr(vars(item).get("optimizer"), "param_groups", None) is one for one in groups)
    ]


def _holding(extras: Mapping[str, Any]) -> Callable[[object], bool]:
    """Whether extras are, or hold, an object; also where they are too many to be searched."""
    seen: set[int] = set()
    waiting: list[Any] = list(extras.values())
    while waiting and len(seen) <= _OBJECTS_MAX:
        item = waiting.pop()
        if id(item) not in seen and not isinstance(item, _NOT_SEARCHED):
            seen.add(id(item))
            waiting += gc.get_referents(item)
    return lambda item: bool(waiting) or id(item) in seen


def tell_lost_scheduler(log: events.EventLog) -> None:
    """Emit a notice, and warn."""
    reason = (
        "a scheduler changes the learning rate and does not go along: a resumed run begins its "
        "schedule anew"
    )
    todo = "pass it: extras={'scheduler': scheduler}; or set its rate by ck.current_step"
    log.emit(events.ReaderNotice(reason=reason, todo=todo))
    # A filter may turn warnings into errors; training goes on all the same.
    with contextlib.suppress(HoldfastWarning):
        warnings.warn(f"{reason}; {todo}", HoldfastWarning, stacklevel=4)


class TrainingState:
    """What a loop changes beside its batches: extras, rates, the model.

    What a program does behind epochs that it passes over after a resume is taken back: ``keep`` at
    the first of them, ``put_back`` where training goes on.
    """

    def __init__(
        self,
        extras: Mapping[str, Any] | None = None,
        *,
        optimizers: Iterable[torch.optim.Optimizer] = (),
        model: torch.nn.Module | None = None,
    ) -> None:
        """``extras`` and the settings of ``optimizers`` can be put back; writes to ``model`` are
        only noticed."""
        self._extras = extras or {}
        self._optimizers = list(optimizers)
        self._model = model
        self.is_kept = False
        """Whether an epoch was passed over, and training does not go on yet."""
        self._states: dict[str, Any] = {}
        self._groups: list[dict[str, Any]] = []
        self._written: list[tuple[int, int]] = []

    def schedules(self) -> dict[str, Any]:
        """How far schedulers among the extras are."""
        found = ((name, getattr(item, "last_epoch", None)) for name, item in self._extras.items())
        return {name: last for name, last in found if isinstance(last, int)}

    def rates(self) -> list[Any]:
        """Differs where a learning rate does."""
        return [_rate_of(group.get("lr")) for group in self._all_groups()]

    def writes(self) -> list[tuple[int, int]]:
        """Differs where something wrote to the model."""
        if self._model is None:
            return []
        try:
            tensors = [*self._model.parameters(), *self._model.buffers()]
            return [(id(one), one._version) for one in tensors if not one.is_inference()]
        except (AttributeError, NotImplementedError, RuntimeError):  # a library's own kind
            return []

    def keep(self) -> None:
        """An epoch is passed over, the first since a resume."""
        if self.is_kept:
            return
        self.is_kept = True
        # A state may name a bound method, whose object is not to be copied.
        known = {id(item): item for item in (*self._extras.values(), *self._optimizers)}
        for name, item in self._extras.items():
            if not isinstance(item, DataLoader):  # asking one for its state may start workers
                self._states[name] = copy.deepcopy(item.state_dict(), dict(known))
        self._groups = [_settings_of(group) for group in self._all_groups()]
        self._written = self.writes()

    def put_back(self, tell: Tell) -> None:
        """Training goes on here."""
        if not self.is_kept:
            return
        for name, state in self._states.items():
            self._extras[name].load_state_dict(state)
        for group, settings in zip(self._all_groups(), self._groups, strict=False):
            _load_settings(group, settings)
        if self._written != self.writes():
            tell(
                "the program wrote to the model behind epochs that are trained: a resumed run has "
                "these writes twice",
                "pass reader=loader, and iterate it in a loop over range(ck.epoch, n)",
            )
        self.forget()

    def forget(self) -> None:
        """There is nothing to put back."""
        self.is_kept = False
        self._states, self._groups = {}, []

    def _all_groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self._optimizers:
            yield from optimizer.param_groups


def _rate_of(rate: Any) -> object:
    # A tensor is not read: it may be on a device, which would have to be waited for.
    return (id(rate), rate._version) if isinstance(rate, torch.Tensor) else rate


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def _load_settings(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        now = group.get(name)
        if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor):
            with torch.no_grad():  # a compiled step has this very tensor
                now.copy_(value)
        else:
            group[name] = value
