"""The view: who is a member of the cluster, and what they lack. A value; a change makes a new one.

An epoch is one set of members. Everyone speaks in an epoch, and nobody listens to an older one, so
that a server taken for dead cannot be heard any more. What members lack changes within an epoch.

Not here: who decides (coordinator.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class View:
    """Where each server is, which of them lack rows, and which lack parities."""

    epoch: int
    addresses: tuple[str, ...]
    lacks_rows: frozenset[int] = frozenset()
    lacks_parities: frozenset[int] = frozenset()
    version: int = 0

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
                epoch=int(value["epoch"]),
                addresses=tuple(str(address) for address in value["addresses"]),
                lacks_rows=frozenset(int(server) for server in value["lacks_rows"]),
                lacks_parities=frozenset(int(server) for server in value["lacks_parities"]),
                version=int(value["version"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequestError("not a view of a cluster") from error
