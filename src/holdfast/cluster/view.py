"""The view: who is a member of the cluster, and what they lack. A value; a change makes a new one.

An epoch is one set of members. Everyone speaks in an epoch, and nobody listens to an older one, so
that a server taken for dead cannot be heard any more. What members lack changes within an epoch.

A process is known by its server and the epoch in which it took that place, never by its address
alone: a replacement may listen on the very port of the process that was lost.

Not here: who decides (coordinator.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.cluster.numbers import text, whole
from holdfast.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class View:
    """Where each server is, which of them lack rows, and which lack parities."""

    epoch: int
    addresses: tuple[str, ...]
    lacks_rows: frozenset[int] = frozenset()
    lacks_parities: frozenset[int] = frozenset()
    version: int = 0
    joined: tuple[int, ...] = ()
    """The epoch in which each server's process took its place; all in the first, if not told."""

    def __post_init__(self) -> None:
        if not self.joined:
            object.__setattr__(self, "joined", (self.epoch,) * len(self.addresses))
        if len(self.joined) != len(self.addresses):
            raise InvalidRequestError("a view says of every server since when it is one")

    @property
    def lacking(self) -> frozenset[int]:
        """Servers that are not whole."""
        return self.lacks_rows | self.lacks_parities

    def replacing(self, replacements: Mapping[int, str], *, epoch: int) -> View:
        """A later epoch: other processes in the place of some servers, which lack everything."""
        assert epoch > self.epoch
        lost = frozenset(replacements)
        return View(
            epoch=epoch,
            addresses=tuple(
                replacements.get(server, address) for server, address in enumerate(self.addresses)
            ),
            lacks_rows=self.lacks_rows | lost,
            lacks_parities=self.lacks_parities | lost,
            version=self.version + epoch - self.epoch,
            joined=tuple(
                epoch if server in lost else since for server, since in enumerate(self.joined)
            ),
        )

    def replaced_since(self, older: View) -> frozenset[int]:
        """Servers that are another process now than in an older view.

        >>> view = View(1, ("a:1", "b:2"))
        >>> sorted(view.replacing({1: "b:2"}, epoch=2).replaced_since(view))
        [1]
        """
        return frozenset(
            server
            for server, (now, before) in enumerate(zip(self.joined, older.joined, strict=True))
            if now != before
        )

    def with_rows(self, server: int) -> View:
        """All rows of a server are there again."""
        return dataclasses.replace(
            self, lacks_rows=self.lacks_rows - {server}, version=self.version + 1
        )

    def with_parities(self, server: int) -> View:
        """All parities of a server are there again."""
        return dataclasses.replace(
            self, lacks_parities=self.lacks_parities - {server}, version=self.version + 1
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values for a message."""
        return {
            "epoch": self.epoch,
            "addresses": list(self.addresses),
            "lacks_rows": sorted(self.lacks_rows),
            "lacks_parities": sorted(self.lacks_parities),
            "version": self.version,
            "joined": list(self.joined),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> View:
        """What ``to_json`` wrote.

        >>> view = View(3, ("a:1", "b:2"), frozenset({1}))
        >>> View.from_json(view.to_json()) == view
        True
        """
        try:
            return cls(
                epoch=whole(value["epoch"]),
                addresses=tuple(text(address) for address in value["addresses"]),
                lacks_rows=frozenset(whole(server) for server in value["lacks_rows"]),
                lacks_parities=frozenset(whole(server) for server in value["lacks_parities"]),
                version=whole(value["version"]),
                joined=tuple(whole(epoch) for epoch in value["joined"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequestError("not a view of a cluster") from error
