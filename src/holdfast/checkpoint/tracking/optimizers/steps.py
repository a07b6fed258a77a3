"""Hear of every optimizer step in the process, before and after it.

torch has hooks for all optimizers at once. They are put in place once and stay: taking one away
while an optimizer walks through them, as the garbage collector might, would make that step fail.
Listeners come and go in a list of our own instead.

A step that is compiled (``torch.compile(optimizer.step)``) is traced once, with these hooks inside.
They then leave nothing but a mark that some optimizer has stepped.

A closure given to ``step`` is training code that runs inside of it: listeners hear of its end,
before the optimizer writes.

Invariant: a listener that was collected or removed is never called; nothing is kept alive.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class StepListener(Protocol):
    """What hears of steps."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        ...

    def after_closure(self, optimizer: torch.optim.Optimizer) -> None:
        """The closure of a step has run."""
        ...

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""
        ...

    def after_compiled_steps(self) -> None:
        """Some optimizers have stepped, and nobody can say which."""
        ...


_listeners: tuple[weakref.ref[StepListener], ...] = ()
_lock = threading.Lock()
_is_hooked = False


class _Compiled:
    """What compiled steps leave; only ever written by them, or each would be compiled anew."""

    has_stepped = False


_compiled = _Compiled()


def tell_compiled_steps() -> None:
    """Tell all listeners of compiled steps since the last call."""
    if _compiled.has_stepped:
        _compiled.has_stepped = False
        for listener in _alive():
            listener.after_compiled_steps()


def add_listener(listener: StepListener) -> None:
    """Tell a listener of every step from now on, for as long as it lives."""
    global _listeners, _is_hooked
    with _lock:
        if not _is_hooked:
            register_optimizer_step_pre_hook(_before)
            register_optimizer_step_post_hook(_after)
            _is_hooked = True
        alive = (known for known in _listeners if known() is not None)
        _listeners = (*alive, weakref.ref(listener))


def remove_listener(listener: StepListener) -> None:
    """Tell it no more."""
    global _listeners
    with _lock:
        _listeners = tuple(known for known in _listeners if known() not in (None, listener))


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return None
    for listener in _alive():
        listener.before_step(optimizer)
    # torch counts the optimizer itself among the arguments.
    if len(args) > 1 and callable(args[1]):
        return (args[0], _Closure(optimizer, args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _Closure(optimizer, kwargs["closure"])}
    return None


def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        _compiled.has_stepped = True
        return
    for listener in _alive():
        listener.after_step(optimizer)


def _alive() -> list[StepListener]:
    found = (known() for known in _listeners)
    return [listener for listener in found if listener is not None]


class _Closure:
    """A step's closure; tells when it has run."""

    def __init__(self, optimizer: torch.optim.Optimizer, run: Callable[..., Any]) -> None:
        self._optimizer = optimizer
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._run(*args, **kwargs)
        for listener in _alive():
            listener.after_closure(self._optimizer)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)  # trainers keep things at their closures
