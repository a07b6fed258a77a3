"""Random generators around a loader: the global ones, and those that its parts own.

What a loader reads depends on where these stood when its epoch began; what training draws depends
on where they stand now. A reader keeps both (resumable_reader.py).

Invariants:
- Looking for generators runs no code of the user's: attributes are read, nothing is called.
- A state that was taken here and stored goes back into a generator of the same kind and place.
"""

from __future__ import annotations

import contextlib
import functools
import random
import weakref
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from holdfast.errors import InvalidRequestError

_DEPTH_MAX = 5
_OBJECTS_MAX = 5000  # a data set that is one large graph of objects is not searched to its end
_ITEMS_MAX = 64  # of a container: longer ones hold samples
_READING = ("__getitem__", "__getitems__", "__iter__", "__next__", "__call__")
_SKIPPED = ("_iterator", "_inner", "_pass")  # a loader's running iteration

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_LEAVES = (str, bytes, int, float, type, torch.Tensor, np.ndarray, torch.nn.Parameter)


def find_generators(loader: Any) -> dict[str, Generator]:
    """The generators that a loader, its samplers and its data set own, by the path to each.

    >>> class Sampler:
    ...     def __init__(self):
    ...         self.draw = random.Random(1)
    >>> list(find_generators(Sampler()))
    ['.draw']
    """
    found: dict[str, Generator] = {}
    seen: set[int] = set()

    def visit(item: Any, path: str, depth: int) -> None:
        if id(item) in seen or len(seen) > _OBJECTS_MAX or isinstance(item, _LEAVES):
            return
        seen.add(id(item))
        if isinstance(item, _KINDS):
            if not isinstance(item, random.SystemRandom):
                found[path] = item
        elif depth < _DEPTH_MAX:
            for name, part in _parts(item):
                visit(part, path + name, depth + 1)

    visit(loader, "", 0)
    return found


def _parts(item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, FunctionType):
        yield from _held_by(item)
        return
    if isinstance(item, MethodType):
        yield ".__self__", item.__self__
        return
    if isinstance(item, functools.partial):
        yield from ((".func", item.func), (".args", item.args), (".keywords", item.keywords))
    yield from _reading_functions(type(item))
    if isinstance(item, dict):
        if len(item) <= _ITEMS_MAX:
            yield from ((f"[{key!r}]", part) for key, part in item.items())
    elif isinstance(item, list | tuple):
        if len(item) <= _ITEMS_MAX:
            yield from ((f"[{index}]", part) for index, part in enumerate(item))
    else:
        for name, part in list(getattr(item, "__dict__", {}).items()):
            if name not in _SKIPPED:
                yield f".{name}", part


# By class: a stateful loader is asked where it stands at every batch.
_reading_by_class: weakref.WeakKeyDictionary[type, tuple[tuple[str, FunctionType], ...]] = (
    weakref.WeakKeyDictionary()
)


def _reading_functions(kind: type) -> tuple[tuple[str, FunctionType], ...]:
    """What a class does when it is read, without torch's own."""
    known = _reading_by_class.get(kind)
    if known is not None:
        return known
    found = []
    for name in _READING:
        function = next((vars(one)[name] for one in kind.__mro__ if name in vars(one)), None)
        if isinstance(function, FunctionType) and not function.__module__.startswith("torch."):
            found.append((f".{name}", function))
    return _reading_by_class.setdefault(kind, tuple(found))


def _held_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function has closed over, its defaults, and the generators that it names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # nothing is in it yet
            yield f"({name})", cell.cell_contents
    yield "(defaults)", function.__defaults__ or ()
    yield "(keywords)", function.__kwdefaults__ or {}
    for name in function.__code__.co_names:
        found = function.__globals__.get(name)
        if isinstance(found, _KINDS):
            yield f"({name})", found


class KeptGenerator:
    """A generator that the program draws from itself, to go along with a checkpoint."""

    def __init__(self, generator: Generator) -> None:
        self._generators = {"": generator}

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""
        return states_of(self._generators)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set it where it stood."""
        load_states(self._generators, state)


def as_kept(item: Any) -> Any:
    """An extra as a checkpoint carries it: a generator gets the methods that it lacks."""
    return KeptGenerator(item) if isinstance(item, _KINDS) else item


def states_of(generators: Mapping[str, Generator]) -> dict[str, Any]:
    """Where generators stand, as values that can be stored."""
    return {path: _state_of(generator) for path, generator in generators.items()}


def _state_of(generator: Generator) -> Any:
    if isinstance(generator, np.random.Generator):
        return dict(generator.bit_generator.state)
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state()


def load_states(generators: Mapping[str, Generator], states: Mapping[str, Any]) -> list[str]:
    """Set generators where they stood; the paths of states that have no generator now.

    Raises:
        InvalidRequestError: a generator of another kind is in the place.
    """
    for path, generator in generators.items():
        if path not in states:
            continue
        try:
            if isinstance(generator, np.random.Generator):
                generator.bit_generator.state = states[path]
            elif isinstance(generator, random.Random):
                generator.setstate(states[path])
            else:
                generator.set_state(states[path])
        except (TypeError, ValueError, RuntimeError, LookupError, ArithmeticError) as error:
            raise InvalidRequestError(
                "the loader's random generator is of another kind than the checkpoint's",
                generator=path,
                type=type(generator).__name__,
                todo="build the loader as it was when the run started",
            ) from error
    return sorted(set(states) - set(generators))


def rng_state(*, has_cuda: bool = True) -> dict[str, Any]:
    """Every global random generator a training loop may draw from; GPUs' only if ``has_cuda``."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    # Else nothing has drawn from them, and asking would start every GPU.
    if has_cuda and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def load_rng_state(state: Mapping[str, Any]) -> None:
    """Set every global random generator as it was."""
    try:
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])
        if "cuda" in state and torch.cuda.is_available():
            # Of as many GPUs as there were, or are.
            torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
    except (TypeError, ValueError, RuntimeError, LookupError, OverflowError) as error:
        raise InvalidRequestError(
            "the checkpoint's random state does not fit this version of torch or NumPy"
        ) from error


def host_state() -> dict[str, Any]:
    """The global generators that reading may draw from; those of GPUs are left out, for speed."""
    return rng_state(has_cuda=False)


def is_same_state(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether nothing was drawn between two states of the global generators.

    >>> before = host_state()
    >>> is_same_state(before, host_state())
    True
    """
    return (
        torch.equal(one["torch"], other["torch"])
        and one["numpy"][2:] == other["numpy"][2:]
        and np.array_equal(one["numpy"][1], other["numpy"][1])
        and bool(one["python"] == other["python"])
    )
