"""Where rows lie: the arithmetic of model/placement.py on many rows at once.

A placement is given by its numbers (``Numbers``); what they mean, and why the arithmetic is as it
is, is said in model/placement.py, which is the only one to make them.

Invariants:
- Every function is a pure function of the numbers and ids or stripes from 0 on.
- Rows sorted by server keep their order on each server.

# N row ids, S stripes, P parity rows of each, F = N x P, X servers
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast.kernels.compiling import as_slots, helper, kernel

Ids = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]
Positions = npt.NDArray[np.uint8]


class Numbers(NamedTuple):
    """A placement as kernels take it."""

    servers: int
    data: int
    parity: int
    groups: int
    within: int
    """Servers of a group."""
    round_rows: int
    """Rows of a group after which its stripes are back at the server they began with."""
    round_stripes: int
    step: int
    """The common divisor of ``data`` and ``within``."""
    inverse: int
    """Of ``data / step``, modulo ``round_stripes``."""


@helper(inline="always")
def _server(row: int, n: Numbers) -> int:
    inside = row // n.groups
    if n.parity:
        inside += inside // n.round_rows
    return inside % n.within + row % n.groups * n.within


@helper(inline="always")
def _stripe(row: int, n: Numbers) -> int:
    return row // (n.data * n.groups) * n.groups + row % n.groups


@helper(inline="always")
def _position(row: int, n: Numbers) -> int:
    return row // n.groups % n.data


@helper(inline="always")
def _parity_server(stripe: int, index: int, n: Numbers) -> int:
    rounds, turn = divmod(stripe // n.groups, n.round_stripes)
    after = (turn + 1) * n.data + rounds + index
    return after % n.within + stripe % n.groups * n.within


@helper(inline="always")
def _turn(offset: int, n: Numbers) -> int:
    """Which stripe of its round is followed by a server at this offset from where it began."""
    return (offset // n.step % n.round_stripes * n.inverse - 1) % n.round_stripes


@helper(inline="always")
def _parities_before(turns: int, within: int, n: Numbers) -> int:
    """How many parity rows of earlier stripes of its group a server of it holds."""
    rounds, turn = divmod(turns, n.round_stripes)
    found = 0
    for index in range(n.parity):
        offset = within - index
        # Finished rounds: one of every ``step``. Then the one that is under way.
        found += (rounds + n.step - 1 - offset % n.step) // n.step
        offset -= rounds
        if offset % n.step == 0 and _turn(offset, n) < turn:
            found += 1
    return found


@helper(inline="always")
def _parity_slot(stripe: int, server: int, n: Numbers) -> int:
    return _parities_before(stripe // n.groups, server % n.within, n)


@kernel()
def _servers_of(ids_N: Ids, n: Numbers, out_N: Ids) -> None:
    for i in range(ids_N.size):
        out_N[i] = _server(ids_N[i], n)


def servers_of(ids_N: npt.NDArray[Any], numbers: Numbers) -> Ids:
    """The server of each row, in ids of any shape."""
    out_N = np.empty(ids_N.size, np.int64)
    _servers_of(as_slots(ids_N.reshape(-1)), numbers, out_N)
    return out_N.reshape(ids_N.shape)


@kernel()
def _stripes_of(ids_N: Ids, n: Numbers, stripes_N: Ids, positions_N: Ids) -> None:
    for i in range(ids_N.size):
        stripes_N[i] = _stripe(ids_N[i], n)
        positions_N[i] = _position(ids_N[i], n)


def stripes_of(ids_N: npt.NDArray[Any], numbers: Numbers) -> tuple[Ids, Ids]:
    """The stripe of each row, and its position there, in ids of any shape."""
    stripes_N, positions_N = np.empty((2, ids_N.size), np.int64)
    _stripes_of(as_slots(ids_N.reshape(-1)), numbers, stripes_N, positions_N)
    return stripes_N.reshape(ids_N.shape), positions_N.reshape(ids_N.shape)


@kernel()
def _turns_of(offsets_S: Ids, n: Numbers, out_S: Ids) -> None:
    for i in range(offsets_S.size):
        out_S[i] = _turn(offsets_S[i], n)


def turns_of(offsets_S: npt.NDArray[Any], numbers: Numbers) -> Ids:
    """Which stripe of its round is followed by a server at each offset from where the round began;
    only offsets that ``step`` divides have one."""
    out_S = np.empty(offsets_S.size, np.int64)
    _turns_of(as_slots(offsets_S), numbers, out_S)
    return out_S


@kernel()
def _parity_places(stripes_S: Ids, n: Numbers, servers_SP: Ids, slots_SP: Ids) -> None:
    for i in range(stripes_S.size):
        for index in range(n.parity):
            server = _parity_server(stripes_S[i], index, n)
            servers_SP[i, index] = server
            slots_SP[i, index] = _parity_slot(stripes_S[i], server, n)


def parity_places(stripes_S: npt.NDArray[Any], numbers: Numbers) -> tuple[Ids, Ids]:
    """The server of each stripe's parity rows, and their slots there."""
    servers_SP = np.empty((stripes_S.size, numbers.parity), np.int64)
    slots_SP = np.empty_like(servers_SP)
    _parity_places(as_slots(stripes_S), numbers, servers_SP, slots_SP)
    return servers_SP, slots_SP


@kernel()
def _count_before(turns: int, within: int, n: Numbers) -> int:
    return _parities_before(turns, within, n)


def parities_before(turns: int, within: int, numbers: Numbers) -> int:
    """How many parity rows of a group's first stripes a server of the group holds."""
    return int(_count_before(turns, within, numbers))


@helper()
def _ends(counts_X: Ids) -> Ids:
    """Where each server's part begins, and the last one ends."""
    ends_X = np.zeros(counts_X.size + 1, np.int64)
    for x in range(counts_X.size):
        ends_X[x + 1] = ends_X[x] + counts_X[x]
    return ends_X


@kernel()
def _sort_rows(ids_N: Ids, n: Numbers, at_N: Slots, slots_N: Slots) -> Ids:
    counts_X = np.zeros(n.servers, np.int64)
    for i in range(ids_N.size):
        counts_X[_server(ids_N[i], n)] += 1
    ends_X = _ends(counts_X)
    next_X = ends_X.copy()
    for i in range(ids_N.size):
        server = _server(ids_N[i], n)
        place = next_X[server]
        next_X[server] += 1
        at_N[place] = i
        slots_N[place] = ids_N[i] // n.servers
    return ends_X


def sort_rows(ids_N: npt.NDArray[Any], numbers: Numbers) -> tuple[Slots, Slots, list[int]]:
    """Rows sorted by server: which row each is, its slot there, and where each server's begin; the
    last number is where they end."""
    at_N, slots_N = np.empty((2, ids_N.size), np.int32)
    ends_X = _sort_rows(as_slots(ids_N), numbers, at_N, slots_N)
    return at_N, slots_N, ends_X.tolist()


@kernel()
def _sort_parities(ids_N: Ids, n: Numbers, at_F: Slots, slots_F: Slots,
                   positions_F: Positions) -> Ids:  # fmt: skip
    counts_X = np.zeros(n.servers, np.int64)
    for i in range(ids_N.size):
        stripe = _stripe(ids_N[i], n)
        for index in range(n.parity):
            counts_X[_parity_server(stripe, index, n)] += 1
    ends_X = _ends(counts_X)
    next_X = ends_X.copy()
    for i in range(ids_N.size):
        stripe = _stripe(ids_N[i], n)
        for index in range(n.parity):
            server = _parity_server(stripe, index, n)
            place = next_X[server]
            next_X[server] += 1
            at_F[place] = i
            slots_F[place] = _parity_slot(stripe, server, n)
            positions_F[place] = _position(ids_N[i], n)
    return ends_X


def sort_parities(
    ids_N: npt.NDArray[Any], numbers: Numbers
) -> tuple[Slots, Slots, Positions, list[int]]:
    """The parity rows of rows, sorted by server: which row each belongs to, its slot there, the
    row's position in its stripe, and where each server's begin; the last is where they end."""
    at_F, slots_F = np.empty((2, ids_N.size * numbers.parity), np.int32)
    positions_F = np.empty(at_F.size, np.uint8)
    ends_X = _sort_parities(as_slots(ids_N), numbers, at_F, slots_F, positions_F)
    return at_F, slots_F, positions_F, ends_X.tolist()
