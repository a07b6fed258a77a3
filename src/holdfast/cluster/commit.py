"""Two-phase commit: what becomes of a push whose worker is lost. Pure.

A worker sends commits only after every server has staged, so a push that is applied anywhere was
staged everywhere, and can be applied everywhere. One that is applied nowhere may be staged in part;
it is dropped, as if it had never been.

Invariant: after ``choose_commits`` is carried out, a push is applied on all its servers or on none,
unless a server that had staged it was lost together with the worker.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """What one server has of a worker's pushes: staged ones, and the last that it applied."""

    staged: Collection[int]
    applied: int


def choose_commits(held: Mapping[int, Held]) -> tuple[frozenset[int], int]:
    """Which staged pushes of a lost worker to commit, and the last push that then happened.

    >>> choose_commits({0: Held([7], 6), 1: Held([], 7)})
    (frozenset({7}), 7)
    >>> choose_commits({0: Held([7], 6), 1: Held([], 6)})
    (frozenset(), 6)
    """
    applied = max((server.applied for server in held.values()), default=-1)
    staged = {number for server in held.values() for number in server.staged}
    return frozenset(number for number in staged if number <= applied), applied
