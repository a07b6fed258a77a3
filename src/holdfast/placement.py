"""Placement: which server holds which row of a table. Arithmetic, no tables.

Rows form stripes of ``data`` consecutive rows; a stripe has ``parity`` coded rows besides, and all
of its rows lie on different servers. Data rows go round the servers one by one. Where the stripes
would come back to the same servers (data and servers have a common divisor), every round of stripes
starts one server further, so that parity goes round too. Without parity a row's server is its id
modulo the servers.

Invariants:
- The rows of a stripe, parity included, are on different servers.
- Servers hold the same number of a table's data rows, give or take one, whatever its length.

Not here: what servers do with their rows (cluster/), how they are saved (checkpoint/).

# N row ids, S stripes, P parity rows of each, R rounds of stripes
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from holdfast.errors import InvalidRequestError

SERVERS_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Placement:
    """Rows over ``servers``, in stripes of ``data`` rows (0: one for each server)."""

    servers: int
    data: int = 0
    parity: int = 0

    def __post_init__(self) -> None:
        for name, least in (("servers", 1), ("data", 0), ("parity", 0)):
            value = getattr(self, name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if not is_whole or not least <= value <= SERVERS_MAX:
                raise InvalidRequestError(
                    f"a number of {name} is a whole number from {least} on", **{name: value}
                )
        if self.data == 0:
            object.__setattr__(self, "data", self.servers)
        if self.data + self.parity > self.servers:
            raise InvalidRequestError(
                "a stripe's rows need a server each",
                servers=self.servers,
                data=self.data,
                parity=self.parity,
                todo="have at least data + parity servers",
            )

    @property
    def _round_rows(self) -> int:
        """Rows after which the stripes are back at the server they began with."""
        return math.lcm(self.data, self.servers)

    def servers_of(self, ids_N: np.ndarray) -> np.ndarray:
        """The server of each row.

        >>> Placement(3).servers_of(np.arange(5))
        array([0, 1, 2, 0, 1])
        >>> Placement(4, data=2, parity=1).servers_of(np.arange(8))
        array([0, 1, 2, 3, 1, 2, 3, 0])
        """
        shift = 0 if self.parity == 0 else ids_N // self._round_rows
        servers_N: np.ndarray = (ids_N + shift) % self.servers
        return servers_N

    def parity_servers_of(self, stripes_S: np.ndarray) -> np.ndarray:
        """The servers of each stripe's parity rows, one column for each.

        >>> Placement(4, data=2, parity=1).parity_servers_of(np.arange(4)).ravel()
        array([2, 0, 3, 1])
        """
        first_S = stripes_S * self.data
        shift_S = first_S // self._round_rows
        after_S = first_S + self.data + shift_S
        servers_SP: np.ndarray = (after_S[:, None] + np.arange(self.parity)) % self.servers
        return servers_SP

    def rows_of(self, server: int, rows: int) -> np.ndarray:
        """The row ids a server holds of a table of so many rows, ascending.

        >>> Placement(4, data=2, parity=1).rows_of(0, 10)
        array([0, 7])
        """
        self.check_server(server)
        if self.parity == 0:
            return np.arange(server, rows, self.servers)
        starts_R = np.arange(0, rows, self._round_rows)
        shifts_R = np.arange(len(starts_R))
        turns = self._round_rows // self.servers
        first_R = starts_R + (server - shifts_R - starts_R) % self.servers
        ids_N = (first_R[:, None] + np.arange(turns) * self.servers).ravel()
        return ids_N[ids_N < rows]

    def check_server(self, server: int) -> None:
        """Refuse a number that is no server's.

        Raises:
            InvalidRequestError: says which there are.
        """
        is_whole = isinstance(server, int) and not isinstance(server, bool)
        if not is_whole or not 0 <= server < self.servers:
            raise InvalidRequestError(
                "no such server", server=server, known=f"0 to {self.servers - 1}"
            )
