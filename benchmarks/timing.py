"""Fair timing: things that are compared run in turns, so that all meet the same machine.

What is too short to show as a difference between two runs is timed from within: every call of a
hook or of a method adds its seconds to a list.

Not here: what is timed.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import optimizer as torch_optimizer

Hooks = MutableMapping[int, Callable[..., Any]]
Clock = Callable[[], float]


def seconds_of(job: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def median_seconds(jobs: Sequence[Callable[[], object]], *, repeats: int) -> list[float]:
    """The median time of each job, run in turns; a first round that is not counted warms up.

    >>> len(median_seconds([lambda: None, lambda: None], repeats=3))
    2
    """
    for job in jobs:
        job()
    spent: list[list[float]] = [[] for _ in jobs]
    for _ in range(repeats):
        for job, seconds in zip(jobs, spent, strict=True):
            seconds.append(seconds_of(job))
    return [statistics.median(seconds) for seconds in spent]


def step_hooks() -> list[Hooks]:
    """The hooks around every optimizer step in this process, ours among them."""
    return [
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    ]


@contextmanager
def timed_hooks(hooks: Sequence[Hooks]) -> Iterator[list[float]]:
    """Time every call of the hooks that are registered now, while the context lasts."""
    spent: list[float] = []
    before = [dict(each) for each in hooks]
    try:
        for each in hooks:
            for key, hook in each.items():
                each[key] = _timed(hook, spent, time.perf_counter)
        yield spent
    finally:
        for each, known in zip(hooks, before, strict=True):
            each.update(known)


@contextmanager
def timed_method(owner: type, name: str, clock: Clock = time.perf_counter) -> Iterator[list[float]]:
    """Time every call of a class's method while the context lasts, in whatever thread."""
    spent: list[float] = []
    method = getattr(owner, name)
    setattr(owner, name, _timed(method, spent, clock))
    try:
        yield spent
    finally:
        setattr(owner, name, method)


def _timed(call: Callable[..., Any], spent: list[float], clock: Clock) -> Callable[..., Any]:
    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = clock()
        try:
            return call(*args, **kwargs)
        finally:
            spent.append(clock() - start)

    return timed
