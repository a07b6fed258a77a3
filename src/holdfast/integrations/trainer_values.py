"""What a trainer keeps beside model and optimizer: best metric, patience, counters, schedulers.

    first batch -> values as ``fit()`` made them -> those that differ later are stored

A trainer has no ``state_dict``. Its attributes are read instead: numbers, strings, tensors, arrays,
lists and dicts of these; objects with ``state_dict`` (schedulers, scalers); and the same inside
objects of the trainer's own package (an early stopper).

Invariants:
- Only what changed while training is stored and set back: what the user chose for this process
  (epochs, patience) stays as chosen.
- Reading runs no code of the trainer's but ``state_dict``.

Not here: local variables of ``fit()``. They cannot be set back.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

_DEPTH_MAX = 3
_HASHED_BYTES_MAX = 1 << 20  # larger arrays count as changed when they are other objects
_MODULE_OWN = frozenset(vars(nn.Module()))  # what torch keeps in every module
_SKIPPED = (nn.Module, torch.optim.Optimizer, DataLoader, Dataset, type)
_DICTS, _LISTS = (dict, OrderedDict), (list, tuple)


class TrainerValues:
    """Stores and sets back the attributes of one object that change while training."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._packages = {
            kind.__module__.partition(".")[0] for kind in type(owner).__mro__
        } - {"builtins", "torch"}  # fmt: skip
        self._begun: dict[str, tuple[Any, Any]] | None = None  # value and mark, by path
        self._changed: set[str] = set()

    def begin(self) -> None:
        """Training begins: what differs from now on is the trainer's state."""
        self._begun = {
            path: (holder.get(name), _mark(holder.get(name)))
            for path, holder, name in self._values()
        }

    def state_dict(self) -> dict[str, Any]:
        """What changed since training began, here or in an earlier process."""
        begun = self._begun or {}
        values = {}
        for path, holder, name in self._values():
            if path not in begun or _mark(holder[name]) != begun[path][1]:
                self._changed.add(path)
            if path in self._changed:
                values[path] = holder[name]
        states = {path: _storable(item.state_dict()) for path, item in self._stateful()}
        return {"values": values, "objects": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set values back; what this trainer does not have is left out."""
        state = copy.deepcopy(dict(state))
        places = dict(self._holders())
        for path, value in state["values"].items():
            self._changed.add(path)
            parent, _, name = path.rpartition(".")
            if parent in places:
                _set(places[parent], name, value)
        found = dict(self._stateful())
        for path, stored in state["objects"].items():
            if path in found:
                found[path].load_state_dict(stored)

    def stateful(self) -> list[Any]:
        """The objects with ``state_dict`` that go along."""
        return [item for _, item in self._stateful()]

    def _holders(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The owner and the objects of its package that it holds: path and attributes."""
        seen: set[int] = set()

        def visit(item: Any, path: str, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
            if id(item) in seen or not hasattr(item, "__dict__"):
                return
            seen.add(id(item))
            yield path, vars(item)
            if depth == _DEPTH_MAX:
                return
            for name, part in list(vars(item).items()):
                is_own = type(part).__module__.partition(".")[0] in self._packages
                if is_own and not isinstance(part, _SKIPPED) and not _has_state(part):
                    yield from visit(part, f"{path}.{name}", depth + 1)

        yield from visit(self._owner, "", 0)

    def _attributes(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        for path, attributes in self._holders():
            for name in list(attributes):
                if not (isinstance(self._owner, nn.Module) and not path and name in _MODULE_OWN):
                    yield f"{path}.{name}", attributes, name

    def _values(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        for path, attributes, name in self._attributes():
            if _is_value(attributes[name]):
                yield path, attributes, name

    def _stateful(self) -> Iterator[tuple[str, Any]]:
        for path, attributes, name in self._attributes():
            item = attributes[name]
            if _has_state(item) and not isinstance(item, _SKIPPED):
                yield path, item


def _has_state(item: Any) -> bool:
    return hasattr(item, "state_dict") and hasattr(item, "load_state_dict")


def _set(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Into the same list or dict where there is one: others may hold it too."""
    held: Any = attributes.get(name)
    if type(held) is list and type(value) is list:
        held[:] = value
    elif type(held) in _DICTS and type(value) in _DICTS:
        held.clear()
        held.update(value)
    elif isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor):
        attributes[name] = value.to(held.device)
    else:
        attributes[name] = value


def _is_value(value: Any) -> bool:
    """Whether a checkpoint can store it.

    >>> _is_value({"best": 0.5, "seen": [1, 2]}), _is_value(print), _is_value({1, 2})
    (True, False, False)
    """
    if type(value) in _DICTS:
        return all(_is_value(key) and _is_value(item) for key, item in value.items())
    if type(value) in _LISTS:
        return all(_is_value(item) for item in value)
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.grad_fn is None
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind in "biuf" and value.dtype.byteorder != ">"
    return value is None or type(value) in (bool, int, float, str, bytes)


def _storable(state: Mapping[str, Any]) -> dict[str, Any]:
    """A scheduler's state without what it makes again itself (functions)."""
    return {name: value for name, value in state.items() if _is_value(value)}


def _mark(value: Any) -> Any:
    """Something that differs where the value does.

    >>> _mark([1, {"a": 2.0}]) == _mark([1, {"a": 2.0}]), _mark([1]) == _mark([1.0])
    (True, False)
    """
    if type(value) in _DICTS:
        return {key: _mark(item) for key, item in value.items()}
    if type(value) in _LISTS:
        return [_mark(item) for item in value]
    if isinstance(value, torch.Tensor):
        return (id(value), value._version)
    if isinstance(value, np.ndarray):
        small = value.tobytes() if value.nbytes <= _HASHED_BYTES_MAX else b""
        return (id(value), small)
    return (type(value), repr(value))
