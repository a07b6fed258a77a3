"""Fair timing: things that are compared run in turns, so that all meet the same machine.

Not here: what is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence


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
