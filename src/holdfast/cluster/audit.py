"""The audit: every stripe of a cluster recomputed, every parity compared bit for bit.

    drain all servers -> read all rows -> encode -> compare with the parities that servers hold

Call it when nobody pushes. Of the float sum code the largest deviation is told instead, since its
parities drift from their rows.

# N rows of a table, Q parity rows of a server, W floats of a record
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from holdfast.cluster.arena import Arena
from holdfast.cluster.arenashard import fold_rows
from holdfast.cluster.code import make_code
from holdfast.cluster.message import Message
from holdfast.cluster.spec import ClusterSpec

_READ_ROWS = 1 << 16

Ask = Callable[[int, Message], Message]


@dataclass(frozen=True, slots=True)
class Audit:
    """How many parities were compared, and what was found."""

    stripes: int
    parities: int
    wrong: int
    deviation_max: float = 0.0
    """Of the float sum code."""

    @property
    def is_sound(self) -> bool:
        """Whether every parity is what its rows say."""
        return self.wrong == 0


def drain(spec: ClusterSpec, ask: Ask) -> None:
    """Wait until no difference is on its way."""
    for server in range(spec.servers):
        ask(server, Message("drain"))


def read_table(spec: ClusterSpec, name: str, ask: Ask) -> np.ndarray:
    """All rows of a table, whole records, in the order of their ids."""
    index, start = spec.places[name]
    records_NW = _read_rows(spec, index, start, spec.tables[spec.index[name]].rows, ask)
    hot = spec.hot_tables.get(name)
    if hot is not None:
        index, start = spec.places[hot.table.name]
        records_NW[hot.ids_H] = _read_rows(spec, index, start, hot.table.rows, ask)
    return records_NW


def _read_rows(spec: ClusterSpec, index: int, start: int, rows: int, ask: Ask) -> np.ndarray:
    """Rows of an arena from where a table starts."""
    arena = spec.arenas[index]
    records_NW = np.empty((rows, arena.width), np.float32)
    slot = start // spec.servers
    for server in range(spec.servers):
        ids_M = arena.placement.rows_of(server, rows)
        slots = range(slot, slot + len(ids_M))
        records_NW[ids_M] = _read(index, server, slots, arena.width, ask, is_parity=False)
    return records_NW


def audit(spec: ClusterSpec, ask: Ask) -> Audit:
    """Recompute all parities of a cluster in which nothing moves."""
    drain(spec, ask)
    stripes = parities = wrong = 0
    deviation = 0.0
    for index, arena in enumerate(spec.arenas):
        if arena.code == "none":
            continue
        records_NW = _read_rows(spec, index, 0, arena.rows, ask)
        stripes += arena.stripes
        for server in range(spec.servers):
            expected_QW = encode(arena, server, records_NW)
            slots = range(len(expected_QW))
            found_QW = _read(index, server, slots, arena.width, ask, is_parity=True)
            parities += len(expected_QW)
            if arena.code == "sum":
                difference_QW = np.abs(expected_QW - found_QW)
                deviation = max(deviation, float(difference_QW.max(initial=0.0)))
            else:
                is_wrong_QW = expected_QW.view(np.uint32) != found_QW.view(np.uint32)
                wrong += int(is_wrong_QW.any(axis=1).sum())
    return Audit(stripes, parities, wrong, deviation)


def encode(arena: Arena, server: int, records_NW: np.ndarray) -> np.ndarray:
    """The parities a server should hold, from all rows of an arena."""
    code = make_code(arena.code, arena.placement.data, arena.placement.parity)
    stripes_Q, index_Q = arena.placement.parity_rows_of(server, arena.rows)
    parities_QW = np.zeros((len(stripes_Q), arena.width), np.float32)
    for position, ids_Q in enumerate(arena.placement.members_of(stripes_Q).T):
        inside_Q = np.flatnonzero(ids_Q < arena.rows)
        rows_QW = records_NW[ids_Q[inside_Q]]
        coefficients_Q = code.coefficients[index_Q[inside_Q], position]
        fold_rows(code, parities_QW, inside_Q, rows_QW, coefficients_Q)
    return parities_QW


def _read(
    arena: int, server: int, slots: range, width: int, ask: Ask, *, is_parity: bool
) -> np.ndarray:
    out_NW = np.empty((len(slots), width), np.float32)
    for start in range(0, len(slots), _READ_ROWS):
        part = slots[start : start + _READ_ROWS]
        meta = {"arena": arena, "is_parity": is_parity, "start": part.start, "stop": part.stop}
        out_NW[start : start + len(part)] = ask(server, Message("read", meta)).arrays[0]
    return out_NW
