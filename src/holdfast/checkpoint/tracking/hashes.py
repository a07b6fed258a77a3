"""The hash of every row as it was saved last: tells changed rows apart, whoever changed them.

    save: staged rows -> learn            (in the background, from the copies)
    after a save: the next part -> scan   (in the background: rows that differ and are not marked)
    next save: recheck those, or compare all rows of a table that cannot be tracked otherwise

Tables in host memory are hashed by a kernel. Tables on another device are hashed there, by torch
operations, and only the hashes travel.

Memory: 4 bytes a row while hashes only guard what gradients tell; 8 bytes a row where rows are
compared at every save, so that no table is large enough for two different rows to meet.

Invariants:
- ``values`` belong to rows as they were staged for a save, or as they were when compared. A row
  that is not marked and has another hash was changed by something that nothing saw.
- Reading rows while training writes them can only yield too many candidates. They are looked at
  again while training stands still.

# N rows, hashes_N
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from holdfast.kernels.rows import gather
from holdfast.model import devices
from holdfast.model.tables import Table
from holdfast.model.tensors import as_array, as_tensor

Hashes = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]

_CHUNK_BYTES = 4 << 20  # of rows hashed at a time: stays in the cache, bounds temporaries
_MULTIPLIERS = 0x9E3779B97F4A7C15


class RowHashes:
    """Hashes of the rows of one table that this process saves (``span``)."""

    def __init__(self, table: Table, span: range) -> None:
        self._table = table
        self.span = span
        self._values: npt.NDArray[np.unsignedinteger] | None = None
        self._columns: tuple[str, ...] = ()
        self._to_learn = 0  # rows still to come, while all of them are being staged
        self._next = span.start  # where the next scan begins
        self._counting = threading.Lock()  # staged parts are learned by several threads
        self.is_known = False
        """Whether there is a hash for every row of the span."""

    @property
    def is_exact(self) -> bool:
        """Whether the hashes are long enough to compare every row at every save."""
        return self._values is not None and self._values.dtype == np.uint64

    @property
    def is_comparable(self) -> bool:
        """Whether comparing now tells exactly which rows changed."""
        return self.is_known and self.is_exact and self._columns == self._column_names()

    @property
    def bytes(self) -> int:
        """Memory of the hashes."""
        return 0 if self._values is None else self._values.nbytes

    def forget(self) -> None:
        """Keep nothing: the table is saved whole, or its rows are unknown."""
        self._values = None
        self._to_learn = 0
        self.is_known = False

    def begin_whole(self, *, is_exact: bool = False) -> None:
        """Every row is about to be staged: from then on the hashes are known."""
        self._to_learn = len(self.span)
        if self._values is None or (is_exact and not self.is_exact):
            self._values = np.zeros(len(self.span), np.uint64 if is_exact else np.uint32)
            self.is_known = False

    def end_save(self, *, is_committed: bool) -> None:
        """The save is over that ``begin_whole`` was for."""
        if self._to_learn:
            self.forget()  # some rows were learned, nobody knows which

    def shorten(self) -> None:
        """Keep half of each hash: from now on they only guard."""
        if self._values is not None and self.is_exact:
            self._values = self._values.astype(np.uint32)

    def learn(
        self, ids_N: Ids | range, names: Sequence[str], columns: Sequence[np.ndarray]
    ) -> None:
        """These rows were staged with these values, by the names of their columns.

        Training may go on meanwhile, and give the table other columns.
        """
        values = self._values
        if values is None or not (self.is_known or self._to_learn):
            return
        # With columns that only other ranks have, these rows are never comparable here.
        self._columns = tuple(names)
        hashes_N = self._hash_staged(columns).astype(values.dtype)
        if isinstance(ids_N, range):
            begin = ids_N.start - self.span.start
            values[begin : begin + len(ids_N)] = hashes_N
        else:
            values[ids_N - self.span.start] = hashes_N
        with self._counting:
            if self._to_learn:
                self._to_learn = max(0, self._to_learn - len(ids_N))
                self.is_known = self.is_known or self._to_learn == 0

    def learn_all(self, *, is_exact: bool) -> None:
        """Take the rows as they are now as known."""
        hashes_N = self._hash_range(self.span.start, self.span.stop)
        self._values = hashes_N if is_exact else hashes_N.astype(np.uint32)
        self._columns = self._column_names()
        self.is_known = True

    def compare_all(self) -> npt.NDArray[np.bool_] | None:
        """Which rows of the span changed since they were known; knows them as they are now.

        None: it cannot be told, every row may have changed.
        """
        hashes_N = self._hash_range(self.span.start, self.span.stop)
        is_comparable = self.is_comparable
        known_N = self._values
        self._values = hashes_N
        self._columns = self._column_names()
        self.is_known = True
        if not is_comparable or known_N is None:
            return None
        differs_N: npt.NDArray[np.bool_] = hashes_N != known_N
        return differs_N

    def scan(self, turn: int) -> Ids:
        """The rows of the next part, of ``turn``, that differ; training may go on meanwhile."""
        if not self.is_known or self._values is None or len(self.span) == 0:
            return np.empty(0, np.int64)
        if self._columns != self._column_names():
            return np.empty(0, np.int64)  # row state appeared: a base follows
        begin = self._next
        end = min(begin + -(-len(self.span) // turn), self.span.stop)
        self._next = end if end < self.span.stop else self.span.start
        found = self._hash_range(begin, end).astype(self._values.dtype)
        at = begin - self.span.start
        differing_K: Ids = np.flatnonzero(found != self._values[at : at + len(found)]) + begin
        return differing_K

    def differing(self, ids_N: Ids) -> Ids:
        """Of these rows, those that differ now."""
        if not self.is_known or self._values is None or len(ids_N) == 0:
            return ids_N[:0]
        if self._columns != self._column_names():
            return ids_N[:0]
        found = self._hash_ids(ids_N).astype(self._values.dtype)
        differing_K: Ids = ids_N[found != self._values[ids_N - self.span.start]]
        return differing_K

    def _column_names(self) -> tuple[str, ...]:
        return ("weight", *self._table.state_tensors())

    def _is_on_host(self) -> bool:
        return devices.is_on_host(self._table.weight())

    def _hash_staged(self, columns: Sequence[np.ndarray]) -> Hashes:
        if self._is_on_host():
            return _hash_arrays(columns)
        return _to_host(hash_tensors([as_tensor(column) for column in columns]))

    def _hash_range(self, start: int, stop: int) -> Hashes:
        columns = [column[start:stop] for column in self._table.tensors()]
        if self._is_on_host():
            return _hash_arrays([as_array(column) for column in columns])
        return _to_host(hash_tensors(columns))

    def _hash_ids(self, ids_N: Ids) -> Hashes:
        ids = torch.from_numpy(ids_N)
        columns = [column[ids.to(column.device)] for column in self._table.tensors()]
        if self._is_on_host():
            return _hash_arrays([as_array(column) for column in columns])
        return _to_host(hash_tensors(columns))


def _hash_arrays(columns: Sequence[np.ndarray]) -> Hashes:
    hashes_N = np.zeros(len(columns[0]), np.uint64)
    row_bytes = max(1, sum(column.strides[0] for column in columns))
    rows_max = max(1, _CHUNK_BYTES // row_bytes)
    for start in range(0, len(hashes_N), rows_max):
        part_N = hashes_N[start : start + rows_max]
        for column in columns:
            gather.hash_rows(column[start : start + rows_max], part_N)
    return hashes_N


def _to_host(hashes: torch.Tensor) -> Hashes:
    found: Hashes = devices.to_host(hashes).numpy().view(np.uint64)
    return found


def hash_tensors(columns: Sequence[torch.Tensor]) -> torch.Tensor:
    """A 64-bit hash of every row, by torch operations alone: the same on every device.

    A sum of the row's words, each times an odd number of its own, modulo 2^64.
    """
    rows = len(columns[0])
    hashes = torch.zeros(rows, dtype=torch.int64, device=columns[0].device)
    for index, column in enumerate(columns):
        words = _words_of(column)
        seed = (_MULTIPLIERS * (2 * index + 1)) % (1 << 63)
        draw = torch.Generator("cpu").manual_seed(seed)
        shape = (words.shape[1],)
        factors = torch.randint(-(1 << 62), 1 << 62, shape, generator=draw, device="cpu")
        factors = (factors * 2 + 1).to(words.device)
        rows_max = max(1, _CHUNK_BYTES // (8 * words.shape[1]))
        for start in range(0, rows, rows_max):
            part = words[start : start + rows_max].to(torch.int64)
            hashes[start : start + rows_max] += (part * factors).sum(1)
    # Guards keep the low half, in which a sum of two flipped signs would vanish.
    return hashes ^ (hashes >> 32)


def _words_of(column: torch.Tensor) -> torch.Tensor:
    flat = column.detach().reshape(len(column), -1).contiguous()
    row_bytes = flat.shape[1] * flat.element_size()
    if flat.storage_offset() * flat.element_size() % 4:
        flat = flat.clone()  # within a buffer of others; a view must begin at a whole word
    return flat.view(torch.int32 if row_bytes % 4 == 0 else torch.int16)
