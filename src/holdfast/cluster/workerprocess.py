"""A worker process: finds the training function, gives it a session, and ends with the driver.

    {"entry": "module:function", "args": {...}, ...} -> function(session, **args)

Invariants:
- What is wrong with the entry is told to the driver as an error, before training starts.
- A function that returns before all batches are done has failed; one that returns after waits here
  for the driver, so that an end is never mistaken for a loss.

Not here: what is trained (the entry's module), the session (worker.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch

from holdfast.cluster.spec import ClusterSpec
from holdfast.cluster.worker import Session
from holdfast.errors import HoldfastError, InvalidRequestError

Entry = Callable[..., object]


def run(spec: Mapping[str, Any], ready: Callable[[str], None], stop: threading.Event) -> None:
    """Train until every batch is done, then wait to be stopped."""
    torch.set_num_threads(int(spec.get("threads", 1)))  # workers share the cores
    entry = find_entry(str(spec["entry"]))
    session = Session.connect(
        ClusterSpec.from_json(spec["cluster"]),
        coordinator=str(spec["coordinator"]),
        worker=int(spec["worker"]),
        token=str(spec["token"]),
        two_phase=bool(spec["two_phase"]),
        is_synchronous=bool(spec.get("is_synchronous", False)),
    )
    ready(f"worker-{spec['worker']}")  # it listens nowhere
    entry(session, **spec["args"])
    if not session.is_over:
        raise HoldfastError(
            "the training function returned before all batches were done",
            entry=spec["entry"],
            todo="train every batch of session.batches()",
        )
    session.close()
    stop.wait()


def find_entry(entry: str) -> Entry:
    """The function of a name like ``"package.module:function"``.

    >>> find_entry("json:dumps")(1)
    '1'

    Raises:
        InvalidRequestError: it cannot be imported, or is no function.
    """
    module, _, name = entry.partition(":")
    if not module or not name:
        raise InvalidRequestError(
            "not a training function", entry=entry, todo="write it like 'package.module:function'"
        )
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidRequestError(
            "the training function cannot be imported",
            entry=entry,
            found=f"{type(error).__name__}: {error}",
            todo="give a module that worker processes can import",
        ) from error
    if not callable(found):
        raise InvalidRequestError("the training function is no function", entry=entry)
    function: Entry = found
    return function
