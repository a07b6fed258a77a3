"""What a resumed run cannot place: loaders that nobody named, and those without an order.

Invariant: other threads never notice that objects are looked for. ``gc.get_objects`` would give us
a reference to every object of the process, and a ``tuple`` that another thread is building from a
generator fails at that (SystemError: bad argument to internal function).
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter


def instances_of(*bases: type) -> list[Any]:
    """All objects of these classes, or of classes derived from them, that are alive.

    Looks at every object of the process, so it is for moments that come rarely.
    """
    kinds: set[type] = set()
    waiting = list(bases)
    while waiting:
        kind = waiting.pop()
        if kind not in kinds:
            kinds.add(kind)
            waiting += type.__subclasses__(kind)
    # An object refers to its class. isinstance would run code of the object's.
    return [item for item in gc.get_referrers(*kinds) if type(item) in kinds]


def has_running_loader(carried: Iterable[Any] | None) -> bool:
    """Whether some DataLoader of this process is being iterated, other than those ``carried``.

    Without ``carried`` loaders that have a state are left out: the checkpoint may store it.
    """
    placed = [getattr(loader, "_iterator", None) for loader in carried or ()]
    return any(
        getattr(item, "_num_yielded", 0) > 0
        and (carried is not None or not is_stateful_iterator(item))
        and all(item is not iterator for iterator in placed)
        for item in instances_of(_BaseDataLoaderIter)
    )


def is_stateful_iterator(iterator: Any) -> bool:
    """Whether a loader with a state made it."""
    return hasattr(iterator, "state_dict")


def is_unordered(loader: Any) -> bool:
    """Whether a loader hands out batches in the order its workers finish them."""
    return not getattr(loader, "in_order", True) and getattr(loader, "num_workers", 0) > 1
