"""The 2-D chunk grid: what extraction decides, as pure functions.

Consecutive increments store a row again and again; a restore that replayed them all would read
every version to keep the last. The grid stores each version in the cell (born, died) instead. Row 0
of the grid are the chunks that are still alive; a new increment replaces versions in them, and
extraction moves those out, so that a restore of step s reads the cells with born <= s < died.

Moving out a few dead rows costs rewriting a whole chunk. So extraction is selective (IncrCP,
section 4.3): a chunk is passed over when its range of ids, then its Bloom filter, then its true ids
say that too little of it is dead. Dead rows that stay are named by deletion vectors
(checkpoint/format/deletion_vectors.py).

Invariants:
- A restore reads at most ``threshold`` (R) dead rows for each row of a chunk or of the increment
  that replaced them, whichever is larger: half of it may be dead rows not extracted yet, half rows
  that were extracted together although they died at different steps.
- With R = 0 every cell is pure and no dead row is read.
- A version that no kept checkpoint needs is not moved but dropped.

Not here: reading, moving and committing (extract.py), what a restore reads
(checkpoint/restoring/restore.py).

# N rows of a chunk
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from holdfast.checkpoint.format.catalog import SegmentEntry
from holdfast.errors import InvalidRequestError

# A chunk more costs a restore about as long as reading so many bytes in vain: 18 us a segment
# beyond its memory traffic (over 1,475 segments), at the 1.7 GB/s at which rows are scattered.
EXTRACTED_BYTES_MIN = 32 << 10
THRESHOLD_MIN = 0.01
_FRAME_BYTES = (
    65  # of an object: head, tail, and a footer without segments (checkpoint/format/object.py)
)
_INDEX_BYTES = 60  # a segment takes in its object's footer at most, beyond the table's name
GARBAGE_MAX = 0.05  # of all stored bytes may be dead versions inside objects that still live


@dataclass(frozen=True, slots=True)
class Extract:
    """How selective extraction is; ``threshold`` is the paper's R, None: chosen by itself.

    The three stages and the concatenation of chunks into bundles can be switched off, to see what
    each of them is worth. Ids of chunks are kept in ``memory_bytes``; where a chunk's are, its
    filter is not asked.
    """

    threshold: float | None = None
    by_range: bool = True
    by_filter: bool = True
    by_ratio: bool = True
    bundles: bool = True
    memory_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        r = self.threshold
        is_number = isinstance(r, int | float) and not isinstance(r, bool)
        if r is not None and not (is_number and 0 <= r <= 1):
            raise InvalidRequestError(
                "the threshold of extraction is a share of rows",
                threshold=r,
                todo="give a number from 0 (extract everything) to 1, or None",
            )
        room = self.memory_bytes
        if not isinstance(room, int) or isinstance(room, bool) or room < 0:
            raise InvalidRequestError(
                "the memory of extraction is a number of bytes",
                memory_bytes=room,
                todo="give 0 or more; 64 MiB keeps the ids of eight million rows",
            )


def as_extract(extract: Extract | float) -> Extract:
    """The rules of extraction from what a user passes: a number is the threshold R."""
    if isinstance(extract, Extract):
        return extract
    if isinstance(extract, int | float) and not isinstance(extract, bool):
        return Extract(threshold=extract)
    raise InvalidRequestError(
        "not a rule of extraction", extract=extract, todo="pass a number or hf.Extract(...)"
    )


def choose_threshold(update_bytes: float) -> float:
    """R for a table whose increments take so many bytes.

    What is extracted at a time must be worth a chunk of its own, so a larger update deserves a
    smaller R (IncrCP, section 5.3.1).

    >>> choose_threshold(64 << 10), choose_threshold(320 << 10), choose_threshold(1 << 30)
    (0.5, 0.1, 0.01)
    """
    return min(1.0, max(THRESHOLD_MIN, EXTRACTED_BYTES_MIN / max(1.0, update_bytes)))


def rows_allowed(threshold: float, rows: int, update_rows: int) -> float:
    """How many rows of a chunk may be dead before it is extracted.

    >>> rows_allowed(0.1, 1000, 4000)
    200.0
    """
    return threshold / 2 * max(rows, update_rows)


@dataclass(frozen=True, slots=True)
class Cell:
    """Rows to be extracted together: ``died`` is when the last of them did.

    ``deaths_N`` tells when each did, where that is not the same step.
    """

    positions_N: np.ndarray
    died: int
    deaths_N: np.ndarray | None


@dataclass(frozen=True, slots=True)
class Split:
    """What becomes of a chunk: rows that stay alive, cells of dead ones; the rest is dropped."""

    alive_N: np.ndarray
    cells: tuple[Cell, ...]


def plan_split(deaths_N: np.ndarray, *, born: int, kept: Sequence[int], allowed: float) -> Split:
    """Cut a chunk by the steps at which its rows died (-1: alive).

    ``kept`` are the checkpoints that can be restored, ascending. Between two of them nobody can
    tell one death from another, and a version that died before the first one it could serve is
    dropped. Rows that died at different steps share a cell while no more than ``allowed`` of them
    would be dead in it at any step.

    >>> deaths = np.array([-1, 30, 40, 20, 50])
    >>> split = plan_split(deaths, born=10, kept=[10, 20, 30, 50], allowed=0)
    >>> split.alive_N, [(cell.died, cell.positions_N.tolist()) for cell in split.cells]
    (array([0]), [(20, [3]), (30, [1]), (50, [2, 4])])
    """
    alive_N = np.flatnonzero(deaths_N < 0)
    dead_N = np.flatnonzero(deaths_N >= 0)
    at = bisect.bisect_left(kept, born)
    if at == len(kept) or len(dead_N) == 0:
        return Split(alive_N, ())
    kept_S = np.array(kept, np.int64)
    next_N = np.searchsorted(kept_S, deaths_N[dead_N])
    # A death after the last kept checkpoint is not known yet to any that could be restored.
    seen_N = np.where(next_N < len(kept), kept_S[np.minimum(next_N, len(kept) - 1)],
                      deaths_N[dead_N])  # fmt: skip
    is_needed_N = seen_N > kept[at]
    dead_N, seen_N = dead_N[is_needed_N], seen_N[is_needed_N]
    steps_S, counts_S = np.unique(seen_N, return_counts=True)
    cells = []
    for lo, hi in _runs(counts_S.tolist(), allowed):
        is_in_N = (seen_N >= steps_S[lo]) & (seen_N <= steps_S[hi - 1])
        deaths = None if hi == lo + 1 else seen_N[is_in_N]
        cells.append(Cell(dead_N[is_in_N], int(steps_S[hi - 1]), deaths))
    return Split(alive_N, tuple(cells))


def _runs(counts: Sequence[int], allowed: float) -> list[tuple[int, int]]:
    """Neighbouring groups joined while all but the last of a run hold no more than is allowed."""
    runs = []
    start = earlier = 0
    for index, count in enumerate(counts):
        if index > start and earlier > allowed:
            runs.append((start, index))
            start, earlier = index, 0
        earlier += count
    if counts:
        runs.append((start, len(counts)))
    return runs


def plan_moves(
    objects: Mapping[str, int],
    segments: Sequence[SegmentEntry],
    *,
    pinned: Set[str] = frozenset(),
    garbage_max: float = GARBAGE_MAX,
) -> list[SegmentEntry]:
    """Segments to copy, so that objects that are mostly garbage can be deleted.

    ``objects`` are the sizes of all that exist; ``pinned`` ones stay. Objects with the most garbage
    for the least copying come first, until no more than ``garbage_max`` of all bytes is garbage. An
    object in which every segment lives has none, however small it is.
    """
    living: dict[str, int] = {}
    for segment in segments:
        name = segment.extent.object
        size = segment.extent.bytes + len(segment.table) + _INDEX_BYTES
        living[name] = living.get(name, _FRAME_BYTES) + size
    total = sum(objects.values())
    garbage_in = {name: max(0, objects[name] - size) for name, size in living.items()}
    garbage = sum(garbage_in.values())
    candidates = sorted(
        (name for name, size in garbage_in.items() if size and name not in pinned),
        key=lambda name: living[name] / max(1, objects[name]),
    )
    chosen: set[str] = set()
    for name in candidates:
        if garbage <= garbage_max * total:
            break
        garbage -= garbage_in[name]
        chosen.add(name)
    return [segment for segment in segments if segment.extent.object in chosen]
