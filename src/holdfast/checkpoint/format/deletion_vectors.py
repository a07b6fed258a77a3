"""Deletion vectors: which rows of a grid's chunks are dead although nobody moved them out.

A deletion says: the version of this row born at one checkpoint died at another. Deletions are facts
about versions, not about files, so they stay true however chunks are cut and moved. A vector may
also name rows that its chunk does not hold (a Bloom filter's false hits); masking those masks
nothing. All vectors of a grid are one segment, rewritten whole by every round of extraction: with a
threshold R they stay below R of the chunks' rows.

Invariants:
- Every version of the grid that died by ``through`` is in a cell of its own or in a vector.
- A vector's ids are strictly ascending; each died after it was born.
- ``from_bytes`` checks everything; bytes may be lies.

Not here: which rows died, and whether they are extracted (checkpoint/grid/decide.py).

# N dead rows of one table and birth
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from holdfast.checkpoint.format import stored_json
from holdfast.errors import CorruptDataError
from holdfast.kernels.segments import deaths
from holdfast.model.names import plain_name

MAGIC = b"HFKILLS1"
_HEAD = struct.Struct("<8sQ")  # magic, length of the JSON
_STEPS_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class DeletionVector:
    """Rows of one birth and the step each died at, aligned; ids ascending."""

    ids_N: np.ndarray
    deaths_N: np.ndarray

    def __len__(self) -> int:
        return len(self.ids_N)


NO_DELETIONS = DeletionVector(np.empty(0, np.int64), np.empty(0, np.int64))
DeletionVectors = Mapping[tuple[str, int], DeletionVector]  # by table and birth


class StoredDeletionVectors(Mapping[tuple[str, int], DeletionVector]):
    """All vectors of a grid, one behind the other: what a restore hands to its kernel."""

    def __init__(
        self,
        all_: DeletionVector = NO_DELETIONS,
        places: Mapping[tuple[str, int], tuple[int, int]] | None = None,
    ) -> None:
        self.all = all_
        self.places = places or {}

    def __getitem__(self, key: tuple[str, int]) -> DeletionVector:
        lo, hi = self.places[key]
        return DeletionVector(self.all.ids_N[lo:hi], self.all.deaths_N[lo:hi])

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def make_vector(ids_N: np.ndarray, deaths_N: np.ndarray) -> DeletionVector:
    """A vector of deletions in any order; of a row that is named twice the first death counts.

    >>> vector = make_vector(np.array([7, 3, 7]), np.array([20, 10, 30]))
    >>> vector.ids_N, vector.deaths_N
    (array([3, 7]), array([10, 20]))
    """
    order_N = np.lexsort((deaths_N, ids_N))
    ids_N, deaths_N = ids_N[order_N], deaths_N[order_N]
    is_first_N = np.ones(len(ids_N), bool)
    is_first_N[1:] = ids_N[1:] != ids_N[:-1]
    return DeletionVector(ids_N[is_first_N], deaths_N[is_first_N])


def join(vectors: Iterable[DeletionVector]) -> DeletionVector:
    """One vector of several."""
    parts = list(vectors)
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return NO_DELETIONS
    return make_vector(
        np.concatenate([part.ids_N for part in parts]),
        np.concatenate([part.deaths_N for part in parts]),
    )


def look_up(vector: DeletionVector, ids_M: np.ndarray) -> np.ndarray:
    """For each of some ascending ids the step it died at, or -1.

    >>> look_up(make_vector(np.array([3, 7]), np.array([10, 20])), np.array([2, 7, 9]))
    array([-1, 20, -1])
    """
    deaths_M = np.full(len(ids_M), -1, np.int64)
    deaths.mark_deaths(ids_M, vector.ids_N, vector.deaths_N, deaths_M)
    return deaths_M


def to_bytes(vectors: DeletionVectors) -> bytes:
    """Vectors as stored: a JSON head, all ids in a row, all numbers of steps in a row."""
    found = sorted((key, vector) for key, vector in vectors.items() if len(vector))
    tables = sorted({table for (table, _), _ in found})
    table_at = {name: index for index, name in enumerate(tables)}
    all_ = DeletionVector(
        np.concatenate([NO_DELETIONS.ids_N, *(vector.ids_N for _, vector in found)]),
        np.concatenate([NO_DELETIONS.deaths_N, *(vector.deaths_N for _, vector in found)]),
    )
    steps_S, index_N = np.unique(all_.deaths_N, return_inverse=True)
    id_bytes = 4 if len(all_) == 0 or int(all_.ids_N.max()) < 1 << 32 else 8
    head = json.dumps(
        {
            "tables": tables,
            "steps": steps_S.tolist(),
            "id_bytes": id_bytes,
            "vectors": [[table_at[table], born, len(vector)] for (table, born), vector in found],
        },
        separators=(",", ":"),
    ).encode()
    return b"".join(
        [
            _HEAD.pack(MAGIC, len(head)),
            head,
            all_.ids_N.astype(f"<u{id_bytes}").tobytes(),
            index_N.astype(_step_type(len(steps_S))).tobytes(),
        ]
    )


def from_bytes(data: bytes, *, through: int, where: str) -> StoredDeletionVectors:
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


def _parse(data: bytes, through: int) -> StoredDeletionVectors:
    magic, head_bytes = _HEAD.unpack_from(data)
    at = _HEAD.size + head_bytes
    if magic != MAGIC or at > len(data):
        raise ValueError("head")
    head = stored_json.parse(data[_HEAD.size : at])
    tables = [plain_name(stored_json.text(name)) for name in head["tables"]]
    steps = [stored_json.count(step) for step in head["steps"]]
    id_bytes = stored_json.count(head["id_bytes"])
    if steps != sorted(set(steps)) or id_bytes not in (4, 8):
        raise ValueError("steps or ids")
    vectors_V3 = np.array(head["vectors"] or np.empty((0, 3), np.int64))
    if vectors_V3.dtype != np.int64 or vectors_V3.ndim != 2 or (vectors_V3 < 0).any():
        raise ValueError("vectors")
    table_V, births_V, counts_V = vectors_V3.T
    count = sum(counts_V.tolist())
    type_ = np.dtype(_step_type(len(steps)))
    if (counts_V == 0).any() or len(data) != at + count * (id_bytes + type_.itemsize):
        raise ValueError("length")
    ids_N = np.frombuffer(data, f"<u{id_bytes}", count=count, offset=at).astype(np.int64)
    index_N = np.frombuffer(data, type_, count=count, offset=at + count * id_bytes)
    deaths_N = np.array(steps, np.int64)[index_N] if count else NO_DELETIONS.deaths_N
    if not deaths.are_vectors(ids_N, deaths_N, counts_V, births_V):
        raise ValueError("ids or deaths out of order")
    keys = [(tables[table], born) for table, born in zip(table_V.tolist(), births_V.tolist(),
                                                         strict=True)]  # fmt: skip
    if len(set(keys)) != len(keys):
        raise ValueError("vector")
    ends_V = np.cumsum(counts_V)
    is_valid_N = deaths_N <= through
    if not is_valid_N.all():
        ends_V = np.concatenate([[0], np.cumsum(is_valid_N)])[ends_V]
        ids_N, deaths_N = ids_N[is_valid_N], deaths_N[is_valid_N]
    ends = ends_V.tolist()
    places = zip(keys, [0, *ends], ends, strict=False)
    return StoredDeletionVectors(
        DeletionVector(ids_N, deaths_N), {key: (lo, hi) for key, lo, hi in places if hi > lo}
    )


def _step_type(count: int) -> str:
    return "<u2" if count <= _STEPS_MAX else "<u4"
