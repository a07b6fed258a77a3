"""Random generators of a loader's workers, carried in the state that torchdata collects from them.

A StatefulDataLoader asks each worker for the state of its data set with every batch, and gives it
back to the worker that takes its place. It leaves out where the worker's random generators stood:
a data set that augments at random would read other samples after a resume. So while an iterator is
made, the data set is replaced by a view of it whose state has the generators in it.

Invariants:
- The view shares everything with the data set and is an instance of its class.
- A data set that cannot be viewed so is left as it is.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe, get_worker_info

from holdfast.loading.stateful import is_stateful

_KEY = "holdfast.generators"


@contextlib.contextmanager
def generators_in_state(loader: Any) -> Iterator[None]:
    """Let iterators that are made meanwhile carry their workers' generators."""
    is_wanted = isinstance(loader, DataLoader) and is_stateful(loader) and loader.num_workers > 0
    view = _view(loader.dataset) if is_wanted else None
    if view is None:
        yield
        return
    kept = loader.__dict__["dataset"]
    loader.__dict__["dataset"] = view  # loaders refuse it as an attribute
    try:
        yield
    finally:
        loader.__dict__["dataset"] = kept


def _view(dataset: Any) -> Any:
    has_slots = any(vars(base).get("__slots__") for base in type(dataset).__mro__)
    if isinstance(dataset, IterableDataset | MapDataPipe) or has_slots:
        return None
    try:
        return _make_view(dataset)
    except (TypeError, AttributeError):  # not made of Python attributes alone
        return None


def _make_view(dataset: Any) -> Any:
    cls = type(dataset)

    def state_dict(self: Any) -> dict[str, Any]:
        own = cls.state_dict(self) if is_stateful(dataset) else None
        return {_KEY: pack_generators() if get_worker_info() else None, "dataset": own}

    def load_state_dict(self: Any, state: Mapping[str, Any]) -> None:
        own = state["dataset"] if _KEY in state else state
        if own is not None and is_stateful(dataset):
            cls.load_state_dict(self, own)
        if state.get(_KEY) is not None and get_worker_info():
            load_generators(state[_KEY])

    def reduce(self: Any, protocol: Any) -> Any:
        del protocol
        return _make_view, (dataset,)

    made = type(
        cls.__name__,
        (cls,),
        {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "state_dict": state_dict,
            "load_state_dict": load_state_dict,
            "__reduce_ex__": reduce,
        },
    )
    view: Any = object.__new__(made)
    view.__dict__ = dataset.__dict__
    return view


def only_counts(state: Any) -> bool:
    """Whether a StatefulDataLoader's state has nothing but a count of batches in it.

    That is so for an iterable data set without ``state_dict``. torchdata then counts the batches
    that it skips after a resume twice, and skips too many after the next.
    """
    if not isinstance(state, Mapping):
        return False
    workers = state.get("_snapshot", {}).get("_worker_snapshots", {})
    parts = list(workers.values()) if workers else [state]
    fetchers = [(part.get("fetcher_state") or part.get("_fetcher_state"), part) for part in parts]
    return any(
        fetcher is not None
        and fetcher.get("dataset_iter_state") is None
        and part.get("dataset_state") is None
        for fetcher, part in fetchers
    )


def pack_generators() -> dict[str, Any]:
    """Where this process's generators stand, as bytes: tensors would cost a file each to send."""
    name, key, *rest = np.random.get_state()
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": [str(name), np.asarray(key).tobytes(), *(float(number) for number in rest)],
        "python": [version, np.array(words, np.uint32).tobytes(), gauss],
    }


def load_generators(state: Mapping[str, Any]) -> None:
    """Set them where ``pack_generators`` found them."""
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    name, key, position, has_gauss, gauss = state["numpy"]
    words = np.frombuffer(key, np.uint32)
    np.random.set_state((name, words, int(position), int(has_gauss), gauss))
    version, packed, left = state["python"]
    random.setstate((version, tuple(np.frombuffer(packed, np.uint32).tolist()), left))
