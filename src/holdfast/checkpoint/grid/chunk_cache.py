"""Filters and ids of living chunks in bounded memory, from one round of extraction to the next.

Invariants:
- No more than ``bytes_max``, bookkeeping counted.
- Nothing is forgotten for another chunk: every round looks at every chunk, so the one forgotten
  would be the next one wanted. Room comes from chunks that are gone.

Not here: what a round does with them (round_plan.py), reading them (checkpoint/restoring/fetch.py).

# N rows of a chunk
"""

from __future__ import annotations

from collections.abc import Callable, Set

import numpy as np

from holdfast.checkpoint.format.catalog import SegmentEntry
from holdfast.checkpoint.format.object import Extent
from holdfast.checkpoint.restoring import fetch

_ENTRY_BYTES = 512  # of bookkeeping

Parts = tuple[np.ndarray | None, ...]


class PartCache:
    """Filters and ids of living chunks, as many as memory allows."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._parts: dict[tuple[str, Extent], Parts] = {}

    def keep_only(self, extents: Set[Extent]) -> None:
        """Forget all other chunks."""
        self._parts = {key: part for key, part in self._parts.items() if key[1] in extents}
        self._bytes = sum(map(_size, self._parts.values()))

    def filter(self, reader: fetch.PartReader, entry: SegmentEntry) -> np.ndarray | None:
        """The words of a chunk's filter; None where it has none."""
        return self._get("filter", entry, lambda: (reader.filter(entry),))[0]

    def has_ids(self, entry: SegmentEntry) -> bool:
        """Whether a chunk's ids need not be read."""
        return ("ids", entry.extent) in self._parts

    def note_ids(self, entry: SegmentEntry, ids_N: np.ndarray) -> None:
        """These are the ids of a chunk that says nothing of deaths."""
        self._put(("ids", entry.extent), (ids_N, None))

    def ids(self, reader: fetch.PartReader, entry: SegmentEntry) -> np.ndarray:
        """The row ids of a chunk."""
        return self.ids_and_deaths(reader, entry)[0]

    def ids_and_deaths(
        self, reader: fetch.PartReader, entry: SegmentEntry
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """The row ids of a chunk, and what it says of their deaths."""
        if entry.deaths_through is not None:
            return reader.ids_and_deaths(entry)  # what counts of them may change without the bytes
        ids_N, deaths_N = self._get("ids", entry, lambda: reader.ids_and_deaths(entry))
        assert ids_N is not None
        return ids_N, deaths_N

    def _get(self, part: str, entry: SegmentEntry, read: Callable[[], Parts]) -> Parts:
        key = (part, entry.extent)
        found = self._parts.get(key)
        if found is None:
            found = read()
            self._put(key, found)
        return found

    def _put(self, key: tuple[str, Extent], part: Parts) -> None:
        if self._bytes + _size(part) <= self._bytes_max:
            self._parts[key] = part
            self._bytes += _size(part)


def _size(arrays: Parts) -> int:
    return _ENTRY_BYTES + sum(array.nbytes for array in arrays if array is not None)
