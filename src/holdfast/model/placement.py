"""Placement: which server holds which row of a table, and where. Arithmetic, no tables.

Rows form stripes of ``data`` rows; a stripe has ``parity`` coded rows besides, and all of its rows
lie on different servers. Data rows go round the servers one by one. Where the stripes would come
back to the same servers (data and servers have a common divisor), every round of stripes starts one
server further, so that parity goes round too. Without parity a row's server is its id modulo the
servers.

Servers may be divided into groups of neighbours, each with stripes of its own. Rows are dealt to
the groups one by one, like cards, and so are the numbers of stripes: row ``i`` is row
``i // groups`` of group ``i % groups``, and what is said above holds inside a group. (Stripes of
consecutive rows could not keep servers of different groups within one row of each other.) With one
group a stripe's rows are consecutive. The last stripe of a group may lack rows; to its parity they
are zeros.

A row's slot is its rank among the rows of its server, a parity row's slot its rank among the
server's parity rows in the order of stripes. Neither depends on the length of the table.

Invariants:
- The rows of a stripe, parity included, are on different servers of one group.
- Servers hold the same number of a table's data rows, give or take one, whatever its length.
- Servers hold the same number of parity rows, give or take ``parity``; over every ``servers``
  stripes exactly the same.
- Slots of a server's rows are 0, 1, 2, ...; slots of its parity rows too.

Not here: what servers do with their rows (cluster/), how they are saved (checkpoint/).

# N row ids, S stripes, D data rows and P parity rows of each, Q parity rows of a server, R rounds
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from holdfast.errors import InvalidRequestError
from holdfast.kernels.rows import placed_rows

SERVERS_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Placement:
    """Rows over ``servers`` in ``groups``, in stripes of ``data`` rows (0: one for each server of a
    group)."""

    servers: int
    data: int = 0
    parity: int = 0
    groups: int = 1

    def __post_init__(self) -> None:
        for name, least in (("servers", 1), ("data", 0), ("parity", 0), ("groups", 1)):
            value = getattr(self, name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if not is_whole or not least <= value <= SERVERS_MAX:
                raise InvalidRequestError(
                    f"a number of {name} is a whole number from {least} on", **{name: value}
                )
        if self.servers % self.groups != 0:
            raise InvalidRequestError(
                "groups are of the same size",
                servers=self.servers,
                groups=self.groups,
                todo="have a number of servers that the groups divide",
            )
        if self.data == 0:
            object.__setattr__(self, "data", self._group_servers)
        if self.data + self.parity > self._group_servers:
            grouped = {} if self.groups == 1 else {"groups": self.groups}
            raise InvalidRequestError(
                "a stripe's rows need a server each",
                servers=self.servers,
                **grouped,
                data=self.data,
                parity=self.parity,
                todo="have at least data + parity servers" + (" in a group" if grouped else ""),
            )

    @property
    def _group_servers(self) -> int:
        return self.servers // self.groups

    def group_servers(self) -> list[range]:
        """The servers of each group.

        >>> Placement(6, data=2, parity=1, groups=2).group_servers()
        [range(0, 3), range(3, 6)]
        """
        within = self._group_servers
        return [range(at, at + within) for at in range(0, self.servers, within)]

    @property
    def _round_rows(self) -> int:
        """Rows after which the stripes of a group are back at the server they began with."""
        return math.lcm(self.data, self._group_servers)

    @property
    def _round_stripes(self) -> int:
        return self._round_rows // self.data

    @property
    def numbers(self) -> placed_rows.Numbers:
        """As kernels take them."""
        return _numbers(self)

    @property
    def period_rows(self) -> int:
        """Rows after which all places begin anew: servers and positions are the same again, and
        slots and stripes further by the same number everywhere.

        >>> placement = Placement(4, data=2, parity=1)
        >>> placement.period_rows
        16
        >>> placement.servers_of(np.arange(16, 20))
        array([0, 1, 2, 3])
        """
        shifts = self._group_servers if self.parity else 1
        return self._round_rows * shifts * self.groups

    def servers_of(self, ids_N: np.ndarray) -> np.ndarray:
        """The server of each row.

        >>> Placement(3).servers_of(np.arange(5))
        array([0, 1, 2, 0, 1])
        >>> Placement(4, data=2, parity=1).servers_of(np.arange(8))
        array([0, 1, 2, 3, 1, 2, 3, 0])
        >>> Placement(6, data=2, parity=1, groups=2).servers_of(np.arange(8))
        array([0, 3, 1, 4, 2, 5, 0, 3])
        """
        return placed_rows.servers_of(ids_N, self.numbers)

    def slots_of(self, ids_N: np.ndarray) -> np.ndarray:
        """The rank of each row among the rows of its server.

        >>> Placement(4, data=2, parity=1).slots_of(np.arange(9))
        array([0, 0, 0, 0, 1, 1, 1, 1, 2])
        """
        # A round gives each server of a group the same number of rows, in one turn after another.
        slots_N: np.ndarray = ids_N // self.servers
        return slots_N

    def stripes_of(self, ids_N: np.ndarray) -> np.ndarray:
        """The stripe of each row.

        >>> Placement(6, data=2, parity=1, groups=2).stripes_of(np.arange(8))
        array([0, 1, 0, 1, 2, 3, 2, 3])
        """
        return placed_rows.stripes_of(ids_N, self.numbers)[0]

    def positions_of(self, ids_N: np.ndarray) -> np.ndarray:
        """The position of each row in its stripe, from 0 to ``data`` - 1.

        >>> Placement(6, data=2, parity=1, groups=2).positions_of(np.arange(8))
        array([0, 0, 1, 1, 0, 0, 1, 1])
        """
        return placed_rows.stripes_of(ids_N, self.numbers)[1]

    def members_of(self, stripes_S: np.ndarray) -> np.ndarray:
        """The row ids of each stripe, one column for each position.

        Ids beyond the end of a table are of rows that are not there: zeros, as parity has them.

        >>> Placement(6, data=2, parity=1, groups=2).members_of(np.arange(3)).tolist()
        [[0, 2], [1, 3], [4, 6]]
        """
        firsts_S = stripes_S // self.groups * (self.data * self.groups) + stripes_S % self.groups
        ids_SD: np.ndarray = firsts_S[:, None] + np.arange(self.data) * self.groups
        return ids_SD

    def stripes(self, rows: int) -> int:
        """How many stripes a table of so many rows has; they are 0, 1, 2, ...

        >>> Placement(4, data=3, parity=1).stripes(7)
        3
        >>> Placement(8, data=3, parity=1, groups=2).stripes(8)
        4
        """
        turns, rest = divmod(rows, self.data * self.groups)
        return turns * self.groups + min(rest, self.groups)

    def parity_servers_of(self, stripes_S: np.ndarray) -> np.ndarray:
        """The servers of each stripe's parity rows, one column for each.

        >>> Placement(4, data=2, parity=1).parity_servers_of(np.arange(4)).ravel()
        array([2, 0, 3, 1])
        """
        return placed_rows.parity_places(stripes_S, self.numbers)[0]

    def parity_slots_of(self, stripes_S: np.ndarray) -> np.ndarray:
        """The rank of each parity row among the parity rows of its server, one column for each.

        >>> Placement(4, data=2, parity=1).parity_slots_of(np.arange(6)).ravel()
        array([0, 0, 0, 0, 1, 1])
        """
        return placed_rows.parity_places(stripes_S, self.numbers)[1]

    def rows_of(self, server: int, rows: int) -> np.ndarray:
        """The row ids a server holds of a table of so many rows, in the order of their slots.

        >>> Placement(4, data=2, parity=1).rows_of(0, 10)
        array([0, 7])
        """
        self.check_server(server)
        group, within = divmod(server, self._group_servers)
        rows = self._group_rows(group, rows)
        if self.parity == 0:
            ids_N = np.arange(within, rows, self._group_servers)
        else:
            starts_R = np.arange(0, rows, self._round_rows)
            shifts_R = np.arange(len(starts_R))
            turns = self._round_rows // self._group_servers
            first_R = starts_R + (within - shifts_R) % self._group_servers
            ids_N = (first_R[:, None] + np.arange(turns) * self._group_servers).ravel()
            ids_N = ids_N[ids_N < rows]
        return ids_N if self.groups == 1 else ids_N * self.groups + group

    def data_rows(self, server: int, rows: int) -> int:
        """How many rows of a table a server holds.

        >>> [Placement(4, data=2, parity=1).data_rows(server, 10) for server in range(4)]
        [2, 2, 3, 3]
        """
        self.check_server(server)
        group, within = divmod(server, self._group_servers)
        rounds, rest = divmod(self._group_rows(group, rows), self._round_rows)
        first = (within - (0 if self.parity == 0 else rounds)) % self._group_servers
        turns = self._round_rows // self._group_servers
        return rounds * turns + max(0, -((first - rest) // self._group_servers))

    def parity_rows_of(self, server: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """The parity rows a server holds for a table of so many rows, in the order of their slots:
        the stripe of each, and which of the stripe's parity rows it is.

        >>> Placement(5, data=2, parity=2).parity_rows_of(0, 10)
        (array([1, 4]), array([1, 0]))
        """
        self.check_server(server)
        group, within = divmod(server, self._group_servers)
        step = math.gcd(self.data, self._group_servers)
        rounds = -(-self._group_rows(group, rows) // self._round_rows)
        stripes, indices = [], []
        for index in range(self.parity):
            # Of every ``step`` rounds one brings this parity row here, once.
            rounds_R = np.arange((within - index) % step, rounds, step)
            turns_R = placed_rows.turns_of(within - index - rounds_R, self.numbers)
            stripes.append((rounds_R * self._round_stripes + turns_R) * self.groups + group)
            indices.append(np.full(len(rounds_R), index))
        if not stripes:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        stripes_Q, index_Q = np.concatenate(stripes), np.concatenate(indices)
        order_Q = np.argsort(stripes_Q)
        order_Q = order_Q[stripes_Q[order_Q] < self.stripes(rows)]
        return stripes_Q[order_Q], index_Q[order_Q]

    def parity_rows(self, server: int, rows: int) -> int:
        """How many parity rows a server holds for a table of so many rows.

        >>> [Placement(5, data=2, parity=2).parity_rows(server, 10) for server in range(5)]
        [2, 2, 2, 2, 2]
        """
        self.check_server(server)
        group, within = divmod(server, self._group_servers)
        stripes = -(-self._group_rows(group, rows) // self.data)
        return placed_rows.parities_before(stripes, within, self.numbers)

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

    def _group_rows(self, group: int, rows: int) -> int:
        return max(0, -((group - rows) // self.groups))


@functools.lru_cache(maxsize=256)
def _numbers(placement: Placement) -> placed_rows.Numbers:
    within = placement.servers // placement.groups
    rows = math.lcm(placement.data, within)
    step = math.gcd(placement.data, within)
    stripes = rows // placement.data
    # A stripe's parity rows come after its data rows: (turn + 1) * data, modulo the servers.
    inverse = pow(placement.data // step, -1, stripes)
    return placed_rows.Numbers(
        placement.servers, placement.data, placement.parity, placement.groups, within, rows,
        stripes, step, inverse,
    )  # fmt: skip
