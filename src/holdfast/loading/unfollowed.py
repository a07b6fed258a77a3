"""Loaders that a resumed run cannot place: those that nobody named, and those without an order."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter


def has_running_loader(carried: Iterable[Any] | None) -> bool:
    """Whether some DataLoader of this process is being iterated, other than those ``carried``.

    Without ``carried`` loaders that have a state are left out: the checkpoint may store it. Looks
    at every object of the process, so it is for moments that come once.
    """
    # All types first, at the speed of C: most processes have no such iterator at all.
    items = gc.get_objects()
    kinds = {kind for kind in set(map(type, items)) if issubclass(kind, _BaseDataLoaderIter)}
    if not kinds:
        return False
    placed = [getattr(loader, "_iterator", None) for loader in carried or ()]
    return any(
        type(item) in kinds  # isinstance would run code of the object's
        and getattr(item, "_num_yielded", 0) > 0
        and (carried is not None or not is_stateful_iterator(item))
        and all(item is not iterator for iterator in placed)
        for item in items
    )


def is_stateful_iterator(iterator: Any) -> bool:
    """Whether a loader with a state made it."""
    return hasattr(iterator, "state_dict")


def is_unordered(loader: Any) -> bool:
    """Whether a loader hands out batches in the order its workers finish them."""
    return not getattr(loader, "in_order", True) and getattr(loader, "num_workers", 0) > 1
