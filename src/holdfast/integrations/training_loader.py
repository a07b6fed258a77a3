"""The loader that a trainer iterates: followed where it is iterated, or found when it is.

    trainer: iter(loader) -> follow(loader) -> a pass of the attachment's own, or None
                                            -> None: the loader's own iteration

``FollowedLoader`` changes one object, by a class of its own. ``FoundLoader`` sees every DataLoader
of the process begin an iteration, for trainers that make theirs inside ``fit()``.

Invariants:
- An iteration that is not followed runs the loader's own code, unchanged.
- After ``release`` nothing of the loader or of torch is changed.

Not here: which iterations are followed, and what happens at a draw (attach.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from holdfast.errors import InvalidRequestError

Follow = Callable[[Any], Iterator[Any] | None]
LoaderKind = tuple[int | None, int | None]  # samples a batch, batches an epoch


class FollowedLoader:
    """One loader object whose iterations ask ``follow`` first."""

    def __init__(self, loader: Any, follow: Follow) -> None:
        """``loader``: an object of a class written in Python that has ``__iter__``.

        Raises:
            InvalidRequestError: nothing can be changed about it, as of a list.
        """
        base = type(loader)
        this = weakref.ref(self)

        def iterate(given: Any) -> Any:
            me = this()
            passing = me._follow(given) if me is not None and me._loader is given else None
            return base.__iter__(given) if passing is None else passing

        try:
            own = {"__iter__": iterate, "__module__": base.__module__}
            made = type(base.__name__, (base,), own)
            made.__qualname__ = base.__qualname__
            loader.__class__ = made
        except TypeError as error:
            raise InvalidRequestError(
                "this loader cannot be followed where a trainer iterates it",
                type=base.__name__,
                todo="pass a DataLoader, or an object of a class of your own with __iter__",
            ) from error
        self._loader, self._base, self._made = loader, base, made
        self._follow = follow

    def release(self) -> None:
        """Make the object what it was."""
        if type(self._loader) is self._made:
            self._loader.__class__ = self._base
        self._loader = None


class FoundLoader:
    """Stands for a DataLoader that is not known yet; a later one may take its place.

    To a reader it looks like the loader it stands for.
    """

    __slots__ = ("__weakref__", "_follow", "target")

    _waiting: list[weakref.ref[FoundLoader]] = []  # noqa: RUF012  one list for the process
    _own_iter: Callable[..., Any] | None = None

    def __init__(self, follow: Follow) -> None:
        self.target: DataLoader[Any] | None = None
        self._follow: Follow | None = follow

    def wait(self) -> None:
        """See every DataLoader that is iterated from now on."""
        FoundLoader._waiting.append(weakref.ref(self))
        if FoundLoader._own_iter is None:
            own = FoundLoader._own_iter = DataLoader.__iter__

            def iterate(given: DataLoader[Any]) -> Any:
                for reference in tuple(FoundLoader._waiting):
                    found = reference()
                    if found is None or found._follow is None:
                        continue
                    passing = found._follow(given)
                    if passing is not None:
                        return passing
                return own(given)

            DataLoader.__iter__ = iterate  # type: ignore[method-assign]

    def __iter__(self) -> Iterator[Any]:
        assert self.target is not None
        return iter(self.target)

    def __len__(self) -> int:
        if self.target is None:
            raise TypeError("no loader yet")
        return len(self.target)

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """Where a reader looks for random generators."""
        return {} if self.target is None else vars(self.target)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)  # it cannot be placed by a state before it is known
        return getattr(self.target, name)

    def release(self) -> None:
        """Give DataLoader back its own iteration, if this was the last that waited."""
        self.target = self._follow = None
        kept = [each for each in FoundLoader._waiting if each() not in (None, self)]
        FoundLoader._waiting[:] = kept
        if not kept and FoundLoader._own_iter is not None:
            DataLoader.__iter__ = FoundLoader._own_iter  # type: ignore[method-assign]
            FoundLoader._own_iter = None


def kind_of(loader: Any) -> LoaderKind:
    """What tells one loader from another, and is the same in the next process."""
    size = getattr(loader, "batch_size", None)
    return size if isinstance(size, int) else None, _length(loader)


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def has_given_all(loader: Any, drawn: int) -> bool:
    """Whether the next draw meets the loader's end, as far as its length says.

    >>> has_given_all([1, 2], 2), has_given_all([1, 2], 1), has_given_all(iter([]), 0)
    (True, False, False)
    """
    return _length(loader) == drawn
