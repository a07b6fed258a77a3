"""What a checkpoint needs of a reader, of a loader, and of anything else that it carries along.

Not here: who holds the reader (reader_slot.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader

from holdfast.errors import InvalidRequestError


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
