"""What goes along with a run that is attached to a trainer, and is loaded twice.

A checkpoint is loaded when ``hf.attach`` is called. Until the first batch is drawn a trainer may
set up its own state anew, or run the ends of epochs that are trained already (a scheduler's step,
early stopping). So each extra keeps the state it was loaded with, and loads it once more then.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.errors import InvalidRequestError
from holdfast.integrations.trainer_values import TrainerValues
from holdfast.integrations.training_loader import LoaderKind, kind_of
from holdfast.loading.generators import Generator, as_kept
from holdfast.loading.stateful import Stateful, like_held

_TRAINER, _LOOP = "trainer", "loop"  # extras of our own


@dataclass(slots=True)
class Kept:
    """An extra, and the state it was loaded with."""

    item: Any
    state: Any = None

    def state_dict(self) -> Any:
        """The extra's own state."""
        return self.item.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Load it now, and keep it."""
        self.state = like_held(self.item, state)
        self._load()

    def begin(self) -> None:
        """Training begins, or goes on: load what was kept."""
        if isinstance(self.item, TrainerValues):
            self.item.begin()
        if self.state is not None:
            self._load()
            self.state = None

    def _load(self) -> None:
        self.item.load_state_dict(copy.deepcopy(self.state))

    def scalers(self) -> list[torch.amp.GradScaler]:
        """The gradient scalers in it."""
        items = self.item.stateful() if isinstance(self.item, TrainerValues) else [self.item]
        return [item for item in items if isinstance(item, torch.amp.GradScaler)]


@dataclass(slots=True)
class LoopState:
    """Which modules train and which evaluate, as trainers differ in when they switch; and what
    kind of loader is read."""

    model: torch.nn.Module
    loader: Any
    expected: LoaderKind | None = None  # by the checkpoint that was loaded

    def state_dict(self) -> dict[str, Any]:
        """Values only."""
        evaluating = [name for name, part in self.model.named_modules() if not part.training]
        return {"eval": evaluating, "loader": list(kind_of(self.loader))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Switch the modules; the loader is the trainer's to make."""
        evaluating = set(state["eval"])
        for name, part in self.model.named_modules():
            part.training = name not in evaluating
        batch_size, batches = state["loader"]
        self.expected = (batch_size, batches)


def keep(
    loop: LoopState, trainer: Any, extras: Mapping[str, Stateful | Generator] | None
) -> dict[str, Kept]:
    """Everything that goes along, by name.

    Raises:
        InvalidRequestError: an extra has a name that we use.
    """
    named: dict[str, Any] = {name: as_kept(item) for name, item in (extras or {}).items()}
    taken = sorted({_TRAINER, _LOOP} & set(named))
    if taken:
        raise InvalidRequestError(
            "extras has a name that hf.attach uses itself", name=taken[0], todo="rename it"
        )
    named[_LOOP] = loop
    if trainer is not None:
        named[_TRAINER] = TrainerValues(trainer)
    return {
        name: Kept(item if hasattr(item, "state_dict") else TrainerValues(item))
        for name, item in named.items()
    }
