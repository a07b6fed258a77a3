"""Two-phase commit: what becomes of the pushes of a worker that is lost. Pure.

A worker sends commits only after every server has staged its part, and every witness its copies.
So a push that is applied anywhere can be applied everywhere: by those who staged it, and with a
copy by a server that took a lost one's place. So can one of which all parts are found, staged or as
copies: those who had applied it may all be lost, and it may have returned. The others are staged in
part; they are dropped, as if they had never been.

Invariants, as long as no server was lost together with all its witnesses:
- After ``choose_commits`` is carried out, a push is applied on all its servers or on none.
- A push that returned is among those that happen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Held:
    """What one server has of a lost worker's pushes."""

    staged: Collection[int]
    applied: int
    """The last that is in all its rows."""
    seen: int = -1
    """The last that is in any of its rows; later than ``applied`` where it took a lost one's place
    and parity had more of some rows than of others."""
    copies: Mapping[int, Collection[int]] = field(default_factory=dict)
    """By server, whose parts it has copies of."""
    servers: Mapping[int, Collection[int]] = field(default_factory=dict)
    """By push that it knows, which servers have parts of it."""

    def to_json(self) -> dict[str, Any]:
        """Plain values for a message."""
        return {
            "staged": list(self.staged),
            "applied": self.applied,
            "seen": self.seen,
            "copies": [[owner, list(numbers)] for owner, numbers in self.copies.items()],
            "servers": [[number, list(servers)] for number, servers in self.servers.items()],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Held:
        """What ``to_json`` wrote.

        >>> held = Held((7,), 6, 6, {0: (7,)}, {7: (0, 1)})
        >>> Held.from_json(held.to_json()) == held
        True
        """
        return cls(
            staged=tuple(value["staged"]),
            applied=int(value["applied"]),
            seen=int(value["seen"]),
            copies={int(owner): tuple(numbers) for owner, numbers in value["copies"]},
            servers={int(number): tuple(servers) for number, servers in value["servers"]},
        )


@dataclass(frozen=True, slots=True)
class Commits:
    """The last push of a lost worker that happened, and which witness gives a server what it lacks
    of the pushes up to that."""

    last: int
    given: Mapping[int, Mapping[int, Collection[int]]]
    """server -> witness -> numbers"""


def choose_commits(
    held: Mapping[int, Held], *, at_least: int = -1, is_counting_staged: bool = True
) -> Commits:
    """Which pushes of a lost worker happened, and who lacks parts of them.

    ``at_least`` was decided before, when some servers had been told and others were lost. Without
    ``is_counting_staged`` only what is applied somewhere happened: its worker lives, and may not
    commit yet.

    >>> choose_commits({0: Held([7], 6), 1: Held([], 7)})
    Commits(last=7, given={})
    >>> choose_commits({0: Held([7], 6), 1: Held([], 6)}).last
    6
    >>> choose_commits({0: Held([], 4), 1: Held([], 7, copies={0: [6, 7]})})
    Commits(last=7, given={0: {1: [6, 7]}})
    >>> choose_commits({0: Held([], 6), 1: Held([], 6, copies={0: [7]}, servers={7: [0]})})
    Commits(last=7, given={0: {1: [7]}})
    """
    last = max((max(each.applied, each.seen) for each in held.values()), default=-1)
    last = max(last, at_least)
    if is_counting_staged:
        last = max([last, *_staged_everywhere(held)])
    given: dict[int, dict[int, list[int]]] = {}
    for server, each in held.items():
        has = set(each.staged)
        for witness, other in sorted(held.items()):
            found = set(other.copies.get(server, ())) - has
            numbers = sorted(number for number in found if each.applied < number <= last)
            if numbers:
                given.setdefault(server, {})[witness] = numbers
                has.update(numbers)
    return Commits(last, given)


def _staged_everywhere(held: Mapping[int, Held]) -> list[int]:
    """Pushes of which every part is found: staged or applied at its server, or as a copy."""
    servers = {number: found for each in held.values() for number, found in each.servers.items()}
    has = {server: {*each.staged} for server, each in held.items()}
    for each in held.values():
        for owner, numbers in each.copies.items():
            has.setdefault(owner, set()).update(numbers)
    return [
        number
        for number, found in servers.items()
        if found and all(number in has[s] or number <= held[s].applied for s in found)
    ]
