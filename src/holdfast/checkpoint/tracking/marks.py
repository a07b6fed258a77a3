"""Sets of changed rows, by table: on the host as bitmaps, on another device until a save.

    gradient -> (device marks, one byte a row) -> host bitmap, one bit a row -> cursors

Invariants:
- Marking rows of a table on a GPU never waits for the GPU: the marks stay there until ``take``.
- ``Marks`` always hold host bitmaps, whatever device a table is on.

# words_W: a bitmap of a table's rows, W words (kernels/bitmap.py)
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from holdfast.kernels import bitmap, gradients

Words = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]  # or int32: the kernels take both
Marks = dict[str, Words]

_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def union(into: Marks, marks: Mapping[str, Words]) -> None:
    """Add rows to a set, table by table."""
    for name, words_W in marks.items():
        if name in into:
            bitmap.union_into(into[name], words_W)
        else:
            into[name] = words_W.copy()


def all_rows(rows: int) -> Words:
    """The set of every row.

    >>> [hex(word) for word in all_rows(66).tolist()]
    ['0xffffffffffffffff', '0x3']
    """
    words_W = np.full(-(-rows // 64), ~np.uint64(0))
    if rows % 64:
        words_W[-1] = np.uint64((1 << rows % 64) - 1)
    return words_W


def nonzero_rows(values: torch.Tensor, words_W: Words) -> None:
    """Write the set of rows of a host tensor that are not zero; rows are the first dimension."""
    gradients.mark_nonzero(row_bits(values), words_W)


def row_bits(values: torch.Tensor) -> npt.NDArray[np.generic]:
    """A host tensor's rows as integers, as wide as they can be; shares memory where it can."""
    rows_ND = values.detach().reshape(len(values), -1).contiguous()
    row_bytes = rows_ND.shape[1] * rows_ND.element_size()
    kind = next(
        kind
        for kind in (torch.int64, torch.int32, torch.int16, torch.uint8)
        if row_bytes % kind.itemsize == 0
    )
    bits_NW: npt.NDArray[np.generic] = rows_ND.view(kind).numpy()
    return bits_NW


class DeviceMarks:
    """Marked rows of a table that is not in host memory: torch operations alone, no waiting."""

    def __init__(self, rows: int, device: torch.device) -> None:
        # Rounded up to whole words, so that packing needs no special case at the end.
        self._is_marked = torch.zeros(-(-rows // 64) * 64, dtype=torch.bool, device=device)
        self._rows = rows
        self._weights = 2 ** torch.arange(8, dtype=torch.uint8, device=device)

    def mark_ids(self, ids: torch.Tensor) -> None:
        """Mark rows by their ids."""
        ids = ids.reshape(-1).to(self._is_marked.device, torch.int64)
        self._is_marked.index_fill_(0, ids, True)

    def mark_nonzero(self, values: torch.Tensor) -> None:
        """Mark the rows of a dense gradient that are not zero."""
        bits = values.detach().reshape(self._rows, -1).contiguous()
        if bits.dtype in _BITS:  # -0.0 counts, as on the host: it can change the sign of a zero
            bits = bits.view(_BITS[bits.dtype])
        is_nonzero = (bits != 0).any(1)
        self._is_marked[: self._rows].logical_or_(is_nonzero)

    def take(self) -> Words:
        """The marked rows as a host bitmap; afterwards nothing is marked. Waits for the device."""
        bytes_B = (self._is_marked.view(-1, 8) * self._weights).sum(1, dtype=torch.uint8)
        words_W: Words = bytes_B.cpu().numpy().view(np.uint64).copy()
        self._is_marked.zero_()
        return words_W

    @property
    def bytes(self) -> int:
        """Memory of the marks on the device."""
        return self._is_marked.nbytes


class SinceBase:
    """The rows that committed deltas hold since the base; with a cursor's, all that changed."""

    def __init__(self, changed: Marks | None = None) -> None:
        self._marks: Marks = {} if changed is None else changed
        self.rows: dict[str, int] = {}
        """How many they are, by table."""
        self._count()

    def add(self, marks: Mapping[str, Words]) -> None:
        """A delta with these rows was committed."""
        union(self._marks, marks)
        self._count()

    def joined(self, marks: Mapping[str, Words]) -> Marks:
        """They and these: what a floor holds."""
        both = {name: words_W.copy() for name, words_W in self._marks.items()}
        union(both, marks)
        return both

    def _count(self) -> None:
        self.rows = {name: int(bitmap.count(words_W)) for name, words_W in self._marks.items()}
