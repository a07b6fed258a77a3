"""Deletion vectors: which rows of a grid's chunks are dead although nobody moved them out.

A kill says: the version of this row born at one checkpoint died at another. Kills are facts
about versions, not about files, so they stay true however chunks are cut and moved. A vector may
also name rows that its chunk does not hold (a Bloom filter's false hits); masking those masks
nothing. All vectors of a grid are one segment, rewritten whole by every round of extraction: with a
threshold R they stay below R of the chunks' rows.

Invariants:
- Every version of the grid that died by ``through`` is in a cell of its own or in a vector.
- A vector's ids are strictly ascending; each died after it was born.
- ``from_bytes`` checks everything; bytes may be lies.

Not here: which rows were killed, and whether they are extracted (grid.py).

# N killed rows of one table and birth
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from holdfast.checkpoint import stored_json
from holdfast.checkpoint.idcode import decode_ids, encode_ids
from holdfast.errors import CorruptDataError

MAGIC = b"HFKILLS1"
_HEAD = struct.Struct("<8sQ")  # magic, length of the JSON
_STEPS_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Vector:
    """Rows of one birth and the step each died at, aligned; ids ascending."""

    ids_N: np.ndarray
    deaths_N: np.ndarray

    def __len__(self) -> int:
        return len(self.ids_N)


NO_KILLS = Vector(np.empty(0, np.int64), np.empty(0, np.int64))
Kills = Mapping[tuple[str, int], Vector]  # by table and birth


def make_vector(ids_N: np.ndarray, deaths_N: np.ndarray) -> Vector:
    """A vector of kills in any order; of a row that is named twice the first death counts.

    >>> vector = make_vector(np.array([7, 3, 7]), np.array([20, 10, 30]))
    >>> vector.ids_N, vector.deaths_N
    (array([3, 7]), array([10, 20]))
    """
    order_N = np.lexsort((deaths_N, ids_N))
    ids_N, deaths_N = ids_N[order_N], deaths_N[order_N]
    is_first_N = np.ones(len(ids_N), bool)
    is_first_N[1:] = ids_N[1:] != ids_N[:-1]
    return Vector(ids_N[is_first_N], deaths_N[is_first_N])


def join(vectors: Iterable[Vector]) -> Vector:
    """One vector of several."""
    parts = list(vectors)
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return NO_KILLS
    return make_vector(
        np.concatenate([part.ids_N for part in parts]),
        np.concatenate([part.deaths_N for part in parts]),
    )


def look_up(vector: Vector, ids_M: np.ndarray) -> np.ndarray:
    """For each of some ascending ids the step it died at, or -1.

    >>> look_up(make_vector(np.array([3, 7]), np.array([10, 20])), np.array([2, 7, 9]))
    array([-1, 20, -1])
    """
    deaths_M = np.full(len(ids_M), -1, np.int64)
    if len(vector) and len(ids_M):
        at_N = np.searchsorted(ids_M, vector.ids_N)
        at_N[at_N == len(ids_M)] = 0
        is_here_N = ids_M[at_N] == vector.ids_N
        deaths_M[at_N[is_here_N]] = vector.deaths_N[is_here_N]
    return deaths_M


def to_bytes(kills: Kills) -> bytes:
    """Vectors as stored: a JSON head, then ids and numbers of steps, vector by vector."""
    found = {key: vector for key, vector in kills.items() if len(vector)}
    tables = sorted({table for table, _ in found})
    table_at = {name: index for index, name in enumerate(tables)}
    deaths = [vector.deaths_N for vector in found.values()]
    steps_S = np.unique(np.concatenate(deaths)) if deaths else np.empty(0, np.int64)
    type_ = _step_type(len(steps_S))
    heads: list[list[int]] = []
    parts: list[bytes] = []
    for (table, born), vector in sorted(found.items()):
        encoding, data = encode_ids(vector.ids_N)
        ids_N = vector.ids_N
        heads.append(
            [table_at[table], born, len(ids_N), int(ids_N[0]), int(ids_N[-1]), int(encoding),
             data.nbytes]
        )  # fmt: skip
        parts += [
            data.tobytes(),
            np.searchsorted(steps_S, vector.deaths_N).astype(type_).tobytes(),
        ]
    head = json.dumps(
        {"tables": tables, "steps": [int(step) for step in steps_S], "vectors": heads},
        separators=(",", ":"),
    ).encode()
    return _HEAD.pack(MAGIC, len(head)) + head + b"".join(parts)


def from_bytes(data: bytes, *, through: int, where: str) -> dict[tuple[str, int], Vector]:
    """The vectors that ``to_bytes`` wrote, without deaths after ``through``.

    Raises:
        CorruptDataError: names the object in ``where``.
    """
    try:
        return _parse(data, through)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, struct.error,
            CorruptDataError) as error:  # fmt: skip
        raise CorruptDataError(
            "deletion vectors are damaged", where=where, todo="run 'holdfast verify'"
        ) from error


def _parse(data: bytes, through: int) -> dict[tuple[str, int], Vector]:
    magic, head_bytes = _HEAD.unpack_from(data)
    at = _HEAD.size + head_bytes
    if magic != MAGIC or at > len(data):
        raise ValueError("head")
    head = stored_json.parse(data[_HEAD.size : at])
    tables = [stored_json.text(name) for name in head["tables"]]
    steps = [stored_json.count(step) for step in head["steps"]]
    if steps != sorted(set(steps)):
        raise ValueError("steps")
    steps_S = np.array(steps, np.int64)
    type_ = np.dtype(_step_type(len(steps)))
    found: dict[tuple[str, int], Vector] = {}
    for values in head["vectors"]:
        table, born, rows, first, last, encoding, id_bytes = map(stored_json.count, values)
        end = at + id_bytes + rows * type_.itemsize
        if rows == 0 or end > len(data) or (tables[table], born) in found:
            raise ValueError("vector")
        id_data = np.frombuffer(data, np.uint8, count=id_bytes, offset=at)
        ids_N = decode_ids(encoding, id_data, count=rows, first=first, last=last)
        index_N = np.frombuffer(data, type_, count=rows, offset=at + id_bytes)
        at = end
        if int(index_N.max()) >= len(steps):
            raise ValueError("step number")
        deaths_N = steps_S[index_N]
        if int(deaths_N.min()) <= born:
            raise ValueError("died before it was born")
        if int(deaths_N.max()) > through:
            is_valid_N = deaths_N <= through
            ids_N, deaths_N = ids_N[is_valid_N], deaths_N[is_valid_N]
        if len(ids_N):
            found[tables[table], born] = Vector(ids_N, deaths_N)
    if at != len(data):
        raise ValueError("length")
    return found


def _step_type(count: int) -> str:
    return "<u2" if count <= _STEPS_MAX else "<u4"
