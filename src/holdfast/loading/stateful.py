"""What a checkpoint needs of a reader, of a loader, and of anything else that it carries along.

Not here: who holds the reader (reader_slot.py).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from holdfast.errors import InvalidRequestError


@runtime_checkable
class Stateful(Protocol):
    """Anything with state that a checkpoint carries along: a scheduler, a scaler, metrics of your
    own. Its state is a dict of tensors, arrays, numbers, texts and containers of those."""

    def state_dict(self) -> Any:
        """The state as of now; it is copied before ``save`` returns."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Take over what ``state_dict`` gave; called before training goes on."""
        ...


@runtime_checkable
class Reader(Protocol):
    """What a checkpoint needs of a reader: where it is, as JSON values, and to go there."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class GrantedReader(Reader, Protocol):
    """A reader that reads ahead, and is told how far it may."""

    def grant(self, batches: int | None) -> None: ...


READER = "reader"  # what the reader is called among the things that go along


def carried(extras: Mapping[str, Any], reader: Any) -> dict[str, Any]:
    """What goes along with a model: extras, and the held reader once there is one."""
    return {**extras, **({READER: reader} if reader.is_used else {})}


def is_stateful(item: Any) -> bool:
    """Whether it can say where it is, and go there."""
    return all(callable(getattr(item, name, None)) for name in ("state_dict", "load_state_dict"))


def check_stateful(name: str, item: Any) -> None:
    """Refuse what cannot say where it is.

    Raises:
        InvalidRequestError: says which method is missing.
    """
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(item, method, None)):
            raise InvalidRequestError(
                f"{name} has no {method}()",
                type=type(item).__name__,
                todo="give it state_dict() and load_state_dict(), or leave it out",
            )


def like_held(item: Any, state: Any) -> Any:
    """The stored state of a scheduler in the kinds of containers that it holds: a file knows dicts
    and tuples, and MultiStepLR needs its Counter. Of anything else as it is: asking a loader or a
    trainer for its state may change it."""
    return _in_kind(state, item.state_dict()) if isinstance(item, LRScheduler) else state


def _in_kind(stored: Any, held: Any) -> Any:
    """Stored values in the kinds of containers that are held.

    >>> from collections import Counter
    >>> _in_kind({"milestones": {4: 2}}, {"milestones": Counter([7])})
    {'milestones': Counter({4: 2})}
    """
    if type(stored) is dict and isinstance(held, dict):
        values = {k: _in_kind(v, held[k]) if k in held else v for k, v in stored.items()}
        if type(held) is dict:
            return values
        made = copy.copy(held)
        made.clear()
        made.update(values)
        return made
    if type(stored) in (list, tuple) and isinstance(held, type(stored)):
        if len(held) != len(stored):
            return stored
        items = [_in_kind(a, b) for a, b in zip(stored, held, strict=True)]
        if type(stored) is list:
            return items
        return held._make(items) if hasattr(held, "_make") else tuple(items)
    return stored


def check_loader(loader: Any) -> None:
    """Refuse what cannot be iterated, and what can be iterated only once.

    Raises:
        InvalidRequestError: says what to pass instead.
    """
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise InvalidRequestError(
            "a loader can be iterated",
            type=type(loader).__name__,
            todo="pass a DataLoader or another iterable of batches",
        )
    if hasattr(loader, "__next__") and not isinstance(loader, DataLoader):
        raise InvalidRequestError(
            "an iterator is used up once: no epoch can begin again",
            type=type(loader).__name__,
            todo="pass what it was made of: the loader, or an object whose __iter__ makes one",
        )
