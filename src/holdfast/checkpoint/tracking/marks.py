"""Sets of changed rows, by table: on the host as bitmaps, on another device until a save.

    gradient -> (device marks, one byte a row) -> host bitmap, one bit a row -> cursors
    gradient -> ids on their way to the host -> those who count how often rows are used

Invariants:
- Marking rows of a table on a GPU never waits for the GPU: the marks stay there until ``take``.
- ``ArrivingIds`` are those of when they were asked for, whatever becomes of the gradient.
- ``Marks`` always hold host bitmaps, whatever device a table is on.

# words_W: a bitmap of a table's rows, W words (kernels/rows/bitmap.py)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from holdfast.kernels.rows import bitmap, gradients
from holdfast.model import devices

Words = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]  # or int32: the kernels take both
Marks = dict[str, Words]

_WIDTHS = (torch.int64, torch.int32, torch.int16, torch.uint8)


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


def host_ids(gradient: torch.Tensor) -> Ids:
    """The rows that a sparse gradient in host memory names, as often as it does."""
    # NumPy takes a row of a matrix ten times as fast as torch, and this is done at every step.
    ids_N: Ids = np.ascontiguousarray(gradient._indices().numpy()[0])
    return ids_N


def nonzero_rows(values: torch.Tensor, words_W: Words) -> None:
    """Write the set of rows of a host tensor that are not zero; rows are the first dimension."""
    gradients.mark_nonzero(row_bits(values), words_W)


def row_bits(values: torch.Tensor) -> npt.NDArray[np.generic]:
    """A host tensor's rows as integers, as wide as they can be; shares memory where it can."""
    bits_NW: npt.NDArray[np.generic] = _as_integers(values).numpy()
    return bits_NW


def _as_integers(values: torch.Tensor) -> torch.Tensor:
    # Integers: -0.0 is not zero, as it can change the sign of a zero.
    rows_ND = values.detach().reshape(len(values), -1).contiguous()
    row_bytes = rows_ND.shape[1] * rows_ND.element_size()
    # Gradients may lie anywhere in a buffer of many (DDP's gradient_as_bucket_view).
    start_bytes = rows_ND.storage_offset() * rows_ND.element_size()
    return rows_ND.view(
        next(
            kind for kind in _WIDTHS if not row_bytes % kind.itemsize + start_bytes % kind.itemsize
        )
    )


def _is_nonzero(values: torch.Tensor) -> torch.Tensor:
    """Of each row on a device whether it is not zero, as ``nonzero_rows`` on the host; a multiple
    of 64 of them."""
    # Not through a matrix of booleans, which would be a quarter as large as a gradient.
    found = _as_integers(values).any(1).to(torch.bool)
    return torch.nn.functional.pad(found, (0, -len(found) % 64))


def _pack(is_marked: torch.Tensor) -> torch.Tensor:
    """Booleans, a multiple of 64, as the bytes of a bitmap; no waiting."""
    places = torch.arange(8, dtype=torch.uint8, device=is_marked.device)
    weights = torch.ones_like(places).bitwise_left_shift(places)
    return (is_marked.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


class DeviceMarks:
    """Marked rows of a table that is not in host memory: torch operations alone, no waiting."""

    def __init__(self, rows: int, device: torch.device) -> None:
        # Rounded up to whole words, so that packing needs no special case at the end.
        self._is_marked = torch.zeros(-(-rows // 64) * 64, dtype=torch.bool, device=device)
        self._rows = rows

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self._is_marked.device

    def mark_ids(self, ids: torch.Tensor) -> None:
        """Mark rows by their ids."""
        ids = ids.detach().reshape(-1).to(self.device, torch.int64)
        self._is_marked.index_fill_(0, ids, True)

    def mark_nonzero(self, values: torch.Tensor) -> None:
        """Mark the rows of a dense gradient that are not zero."""
        if values.numel():
            self._is_marked.logical_or_(_is_nonzero(values))

    def take(self) -> Words:
        """The marked rows as a host bitmap; afterwards nothing is marked. Waits for the device."""
        words_W: Words = devices.to_host(_pack(self._is_marked)).numpy().view(np.uint64).copy()
        self._is_marked.zero_()
        return words_W

    @property
    def bytes(self) -> int:
        """Memory of the marks on the device."""
        return self._is_marked.nbytes


class ArrivingIds:
    """Row ids on their way from a device to the host, as they were when asked for."""

    def __init__(self, values: torch.Tensor, read: Callable[[torch.Tensor], Ids]) -> None:
        """``read``: ids of what has arrived of ``values``."""
        self._host, self._arrival = devices.join([values]).to_new_host()
        self._read = read

    def is_here(self) -> bool:
        """Whether they have arrived; does not wait."""
        return self._arrival.is_over()

    def ids(self) -> Ids:
        """The ids; waits for them."""
        self._arrival.wait()
        return self._read(self._host)


def arriving_ids(ids: torch.Tensor) -> ArrivingIds:
    """Ids that a device has, as often as they are named."""
    return ArrivingIds(ids.detach().reshape(-1), lambda host: host.numpy())


def arriving_nonzero(values: torch.Tensor) -> ArrivingIds:
    """The rows of a tensor on a device that are not zero."""
    rows = len(values)
    packed = _pack(_is_nonzero(values))
    return ArrivingIds(packed, lambda host: bitmap.ids(host.numpy().view(np.uint64), 0, rows))


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
        """They and these: what a rollup holds."""
        both = {name: words_W.copy() for name, words_W in self._marks.items()}
        union(both, marks)
        return both

    def _count(self) -> None:
        self.rows = {name: int(bitmap.count(words_W)) for name, words_W in self._marks.items()}
