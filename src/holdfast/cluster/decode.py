"""How a lost row or parity is rebuilt from its stripe: which rows of which servers, times what.

    rows to rebuild + who lacks what -> Sources: (row, server, slot, coefficient) -> fetch -> fold

Invariants:
- A row is rebuilt from exactly ``data`` others of its stripe (rows behind an arena's end are zero
  and known), none of them on a server that lacks it.
- Pure: no network here; what is fetched is folded in any order.

Not here: consistency while it is fetched (recovery.py), the codes (code.py).

# N rows to rebuild, X members of a stripe: its data rows, then its parities; F fetches
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from holdfast.cluster.arenashard import ArenaShard
from holdfast.errors import DataLossError


@dataclass(frozen=True, slots=True)
class Sources:
    """What to fetch from where: ``rows_F`` is the row each is a part of."""

    rows_F: np.ndarray
    servers_F: np.ndarray
    slots_F: np.ndarray
    is_parity_F: np.ndarray
    coefficients_F: np.ndarray

    def of(self, server: int) -> Sources:
        """What is to be fetched from one server: data rows first, then parities."""
        at_F = np.flatnonzero(self.servers_F == server)
        at_F = at_F[np.argsort(self.is_parity_F[at_F], kind="stable")]
        return Sources(
            self.rows_F[at_F],
            self.servers_F[at_F],
            self.slots_F[at_F],
            self.is_parity_F[at_F],
            self.coefficients_F[at_F],
        )

    @property
    def servers(self) -> list[int]:
        """Every server that something is fetched from."""
        return [int(server) for server in np.unique(self.servers_F)]


def plan_rows(
    arena: ArenaShard,
    slots_N: np.ndarray,
    *,
    lacks_rows: Collection[int],
    lacks_parities: Collection[int],
) -> Sources:
    """How to rebuild data rows of this server.

    Raises:
        DataLossError: names the tables and rows whose stripes have lost too much.
    """
    code, placement, spec = arena.code, arena.spec.placement, arena.spec
    if code is None:
        raise _lost(arena, arena.ids_M[slots_N])
    data, parity = placement.data, placement.parity
    stripes_N = placement.stripes_of(arena.ids_M[slots_N])
    positions_N = placement.positions_of(arena.ids_M[slots_N])
    members_NX = placement.members_of(stripes_N)
    is_row_NX = members_NX < spec.rows
    servers_NX = np.concatenate(
        [
            placement.servers_of(members_NX.ravel()).reshape(members_NX.shape),
            placement.parity_servers_of(stripes_N),
        ],
        axis=1,
    )
    slots_NX = np.concatenate(
        [
            placement.slots_of(members_NX.ravel()).reshape(members_NX.shape),
            placement.parity_slots_of(stripes_N),
        ],
        axis=1,
    )
    is_known_NX = np.concatenate(
        [
            ~np.isin(servers_NX[:, :data], list(lacks_rows)) | ~is_row_NX,
            ~np.isin(servers_NX[:, data:], list(lacks_parities)),
        ],
        axis=1,
    )
    is_known_NX[np.arange(len(slots_N)), positions_N] = False
    is_fetched_NX = np.concatenate(
        [is_row_NX, np.ones((len(slots_N), parity), bool)], axis=1
    )  # rows behind the end are known without asking
    coefficients_NX = np.zeros(servers_NX.shape, np.int16)
    for lost, known_X, at_N in _patterns(positions_N, is_known_NX):
        known = np.flatnonzero(known_X).tolist()
        if len(known) < data:
            raise _lost(arena, arena.ids_M[slots_N[at_N]])
        plan = code.plan_decode((lost,), known)
        coefficients_NX[at_N[:, None], np.array(plan.sources)] = plan.matrix[0]
    rows_F, columns_F = np.nonzero((coefficients_NX != 0) & is_fetched_NX)
    return Sources(
        rows_F,
        servers_NX[rows_F, columns_F],
        slots_NX[rows_F, columns_F],
        columns_F >= data,
        coefficients_NX[rows_F, columns_F],
    )


def plan_parities(arena: ArenaShard, slots_N: np.ndarray) -> Sources:
    """How to rebuild parities of this server: from all data rows of their stripes."""
    placement, code = arena.spec.placement, arena.code
    assert code is not None
    members_NX = placement.members_of(arena.stripes_Q[slots_N])
    rows_F, positions_F = np.nonzero(members_NX < arena.spec.rows)
    ids_F = members_NX[rows_F, positions_F]
    index_F = arena.index_Q[slots_N][rows_F]
    return Sources(
        rows_F,
        placement.servers_of(ids_F),
        placement.slots_of(ids_F),
        np.zeros(len(rows_F), bool),
        code.coefficients[index_F, positions_F].astype(np.int16),
    )


def _patterns(
    positions_N: np.ndarray, is_known_NX: np.ndarray
) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Rows grouped by which member is lost and which are known: there are few such cases."""
    keys_NX = np.concatenate([positions_N[:, None], is_known_NX], axis=1)
    powers_X = np.int64(2) ** np.arange(is_known_NX.shape[1], dtype=np.int64)
    if is_known_NX.shape[1] < 48:  # one number says it all, and sorts faster
        keys_N = (is_known_NX @ powers_X) * is_known_NX.shape[1] + positions_N
        _, first_G, group_N = np.unique(keys_N, return_index=True, return_inverse=True)
    else:
        _, first_G, group_N = np.unique(keys_NX, axis=0, return_index=True, return_inverse=True)
    return [
        (int(positions_N[first]), is_known_NX[first], np.flatnonzero(group_N == group))
        for group, first in enumerate(first_G)
    ]


def _lost(arena: ArenaShard, ids_N: np.ndarray) -> DataLossError:
    return DataLossError(
        "rows cannot be decoded: their stripes lost more than their parities can make up for",
        rows=len(ids_N),
        tables=arena.spec.describe(ids_N),
        todo="restore the last checkpoint, or begin again",
    )
