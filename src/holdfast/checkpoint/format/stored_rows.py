"""What one writer stored of a checkpoint: its segments, and the object that they lie in.

A checkpoint of many writers is their parts and one commit. A writer (a rank of a training, a server
of a cluster) makes its object durable and then says what is in it, as plain values; the coordinator
commits what all of them said. No torch here: servers never load it.

Not here: how the words get there (checkpoint/ranks/rank_commit.py; cluster/keeper.py), the commit
(checkpoint/store/append.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.format.catalog import SegmentEntry
from holdfast.checkpoint.format.object import Extent


def entry_to_json(entry: SegmentEntry) -> list[Any]:
    """A new segment as plain values for a message."""
    extent = entry.extent
    return [entry.table, entry.born, entry.rows, entry.first, entry.last,
            extent.object, extent.offset, extent.bytes, extent.checksum]  # fmt: skip


def entry_from_json(value: Sequence[Any]) -> SegmentEntry:
    """What ``entry_to_json`` wrote."""
    table, born, rows, first, last, *extent = value
    return SegmentEntry(table, born, None, rows, first, last, Extent(*extent))


@dataclass(frozen=True, slots=True)
class StoredRows:
    """What a writer stored: its segments, and the objects they are in with their lengths."""

    segments: tuple[SegmentEntry, ...]
    objects: tuple[tuple[str, int], ...]
    stall_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values for a message."""
        return {
            "segments": [entry_to_json(entry) for entry in self.segments],
            "objects": [list(item) for item in self.objects],
            "stall_s": self.stall_s,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StoredRows:
        """What ``to_json`` wrote."""
        return cls(
            tuple(entry_from_json(entry) for entry in value["segments"]),
            tuple((str(name), int(size)) for name, size in value["objects"]),
            float(value["stall_s"]),
        )


def joined(parts: Sequence[StoredRows]) -> StoredRows:
    """Several writers' parts as one; training stood still as long as the slowest copied."""
    return StoredRows(
        tuple(entry for part in parts for entry in part.segments),
        tuple(item for part in parts for item in part.objects),
        max((part.stall_s for part in parts), default=0.0),
    )
