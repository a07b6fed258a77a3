"""Follow a DataLoader wherever it is iterated, also by code that knows nothing of Holdfast.

The object gets a subclass of its own class, whose ``__iter__`` asks the reader. Copies of the
loader and other loaders of the same class are not affected.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from holdfast.errors import InvalidRequestError


class Interception:
    """Sends every ``iter(loader)`` to ``reader``, until ``undo``."""

    def __init__(self, loader: Any, reader: Any) -> None:
        """Begin.

        Raises:
            InvalidRequestError: not a DataLoader.
        """
        if not isinstance(loader, DataLoader):
            raise InvalidRequestError(
                "only a DataLoader can be followed where others iterate it",
                type=type(loader).__name__,
                todo="iterate ck.epochs(loader, n)",
            )
        self._loader = loader
        self._base = base = type(loader)
        # Weak: the class must not keep the loader and its workers alive.
        found, followed = weakref.ref(reader), weakref.ref(loader)

        def iterate(given: DataLoader[Any]) -> Any:
            reader = found()
            if reader is None or given is not followed():
                return base.__iter__(given)
            return iter(reader)

        made = type(base.__name__, (base,), {"__iter__": iterate, "__module__": base.__module__})
        made.__qualname__ = base.__qualname__
        loader.__class__ = made
        self._made = made

    def iterate(self) -> Iterator[Any]:
        """Iterate the loader itself, as it would without the interception."""
        return self._base.__iter__(self._loader)

    def undo(self) -> None:
        """Give the loader its own class back."""
        if type(self._loader) is self._made:
            self._loader.__class__ = self._base
