"""Tensors in files: where their numbers lie, and how a part of them is read.

A tensor is a view of a record: it begins somewhere, and a step along each of its dimensions is so
many numbers. Parts are read from the file when they are asked for; none is mapped, none is whole in
memory. So a table of any size is imported through small buffers.

Invariants:
- Every number that a view can reach lies inside its record.
- Numbers of a view lie over each other only where all of them fit into one read; a step of zero
  (an expanded tensor) does not count. So what is read in all is about as much as the record holds,
  or as is copied out of it.
- Reading changes no bit, and takes at most ``_SPAN_BYTES`` besides the caller's own array.

# ND: rows of numbers, B bytes; the other arrays have the shape of the tensor, or of a part of it
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from holdfast.errors import CorruptDataError, InvalidRequestError
from holdfast.interchange.archive.files import Extent, shown

SIZE_MAX = 1 << 56
DIMENSIONS_MAX = 32
_SPAN_BYTES = 4 << 20  # numbers with gaps between them are read so many bytes at a time
_WORDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A view of a record: its bytes from the first number to the last, its shape, and its strides,
    counted in numbers."""

    extent: Extent
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_negated: bool = False
    """One of torch's lazy views: its floats have the other sign than those in the file."""

    @property
    def is_contiguous(self) -> bool:
        """Whether its numbers lie one after the other."""
        return _is_contiguous(self.shape, self.stride)

    def map(self) -> np.ndarray:
        """The bytes of a contiguous tensor in a file of our own, mapped to be filled."""
        assert self.is_contiguous
        size = math.prod(self.shape) * self.dtype.itemsize
        if size == 0:
            return np.empty(0, np.uint8)
        return np.memmap(
            self.extent.path, np.uint8, mode="r+", offset=self.extent.offset, shape=size
        )

    def read_into(self, starts: Sequence[int], out: npt.NDArray[Any]) -> None:
        """Fill an array with the rectangle that begins at ``starts`` and has the array's shape.

        The array's numbers have as many bytes as the tensor's: they are copied as they are.
        """
        item = self.dtype.itemsize
        at = sum(start * step for start, step in zip(starts, self.stride, strict=True))
        words = out.view(_WORDS[item])
        stride_B = tuple(item * step for step in self.stride)
        self._read(self.extent.offset + item * at, stride_B, words)
        if self.is_negated:
            words ^= words.dtype.type(1 << (8 * item - 1))

    def _read(self, at: int, stride_B: tuple[int, ...], out: npt.NDArray[Any]) -> None:
        if out.size == 0:
            return
        item = out.itemsize
        if out.flags.c_contiguous and _is_contiguous(out.shape, [s // item for s in stride_B]):
            self.extent.file.read_into(out.reshape(-1).view(np.uint8), at)
            return
        reaches = [(size - 1) * step for size, step in zip(out.shape, stride_B, strict=True)]
        span = sum(reaches) + item
        if span <= _SPAN_BYTES:
            data_B = np.empty(span, np.uint8)
            self.extent.file.read_into(data_B, at)
            out[...] = np.ndarray(out.shape, out.dtype, data_B, strides=stride_B)
            return
        # The longest step: what is left lies together, and no byte of it is read again.
        axis = max((a for a in range(out.ndim) if out.shape[a] > 1), key=stride_B.__getitem__)
        step = stride_B[axis]
        count = max(1, (_SPAN_BYTES - (span - reaches[axis])) // step + 1)
        for start in range(0, out.shape[axis], count):
            part = out[(slice(None),) * axis + (slice(start, start + count),)]
            self._read(at + start * step, stride_B, part)


def view_record(
    record: Extent,
    dtype: torch.dtype,
    at: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    *,
    is_negated: bool = False,
) -> TensorRef:
    """A view of a record, from its ``at``-th number on.

    Raises:
        CorruptDataError: it has an impossible shape, or reaches beyond its record.
        InvalidRequestError: its numbers lie over each other, and there are many.
    """
    is_possible = len(shape) == len(stride) <= DIMENSIONS_MAX and all(
        type(size) is int and 0 <= size < SIZE_MAX for size in (at, *shape, *stride)
    )
    if not is_possible or math.prod(shape) >= SIZE_MAX:
        raise CorruptDataError("a tensor has an impossible shape", path=shown(record.path))
    item, reach = dtype.itemsize, 0
    if math.prod(shape):
        reach = sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1
    if (at + reach) * item > record.bytes:
        raise CorruptDataError(
            "a tensor reaches beyond its record", path=shown(record.path), shape=shape,
            bytes=(at + reach) * item, record_bytes=record.bytes,
        )  # fmt: skip
    if reach * item > _SPAN_BYTES and _is_overlapping(shape, stride):
        raise InvalidRequestError(
            "numbers of a large tensor lie over each other", path=shown(record.path), shape=shape,
            stride=stride, todo="save it as tensor.contiguous()",
        )  # fmt: skip
    return TensorRef(record.part(at * item, reach * item), dtype, shape, stride, is_negated)


def _is_overlapping(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a step along one dimension may end inside of what the shorter steps span. A step of
    zero repeats numbers, and overlaps nothing.

    >>> _is_overlapping((4, 3), (3, 1)), _is_overlapping((4, 3), (1, 4))
    (False, False)
    >>> _is_overlapping((4, 3), (1, 1)), _is_overlapping((9, 3), (0, 1))
    (True, False)
    """
    span = 0
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1 and step:
            if step <= span:
                return True
            span += (size - 1) * step
    return False


def _is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether numbers lie one after the other.

    >>> _is_contiguous((2, 3), (3, 1)), _is_contiguous((2, 3), (1, 2))
    (True, False)
    """
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a tensor, and where it begins in it."""

    offsets: tuple[int, ...]
    ref: TensorRef


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in pieces that lie in files and cover it: read a part at a time."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        """Size of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize

    def rows_into(self, start: int, stop: int, out_ND: np.ndarray) -> None:
        """Copy the rows ``start`` to ``stop``, each as one line of numbers."""
        assert out_ND.flags.c_contiguous  # otherwise reshape() copies
        self._read(start, out_ND.reshape(stop - start, *self.shape[1:]))

    def as_column(self) -> StoredTensor:
        """One number a row as [rows, 1], as tables have it."""

        def column(ref: TensorRef) -> TensorRef:
            return dataclasses.replace(ref, shape=(*ref.shape, 1), stride=(*ref.stride, 1))

        pieces = tuple(Piece((*p.offsets, 0), column(p.ref)) for p in self.pieces)
        return dataclasses.replace(self, shape=(*self.shape, 1), pieces=pieces)

    def whole(self) -> torch.Tensor:
        """All of it, in memory of its own."""
        made = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        words = made.reshape(-1).view(torch.uint8).numpy().view(_WORDS[self.dtype.itemsize])
        self._read(0, words.reshape(self.shape))
        return made

    def _read(self, start: int, out: npt.NDArray[Any]) -> None:
        """Fill an array with as many of the tensor's rows as it has, from ``start`` on."""
        for piece in self.pieces:
            if not piece.offsets:  # a single number
                piece.ref.read_into((), out)
                continue
            first, *rest = piece.offsets
            rows, *sizes = piece.ref.shape
            lo, hi = max(start, first), min(start + len(out), first + rows)
            if lo < hi:
                where = [slice(a, a + size) for a, size in zip(rest, sizes, strict=True)]
                part = out[(slice(lo - start, hi - start), *where)]
                piece.ref.read_into((lo - first, *(0,) * len(rest)), part)


def stored(ref: TensorRef) -> StoredTensor:
    """A tensor that is one piece."""
    return StoredTensor(ref.shape, ref.dtype, (Piece((0,) * len(ref.shape), ref),))
