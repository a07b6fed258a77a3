"""Whether pieces make up a whole: rectangles of a tensor, and stretches of a file.

Invariant: time is about linear in the number of pieces, however a stranger lays them out; a layout
that would take longer is refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from holdfast.errors import CorruptDataError
from holdfast.interchange.archive.files import Extent, shown

Span = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a rectangle begins, and its sizes."""

PIECES_MAX = 1 << 16
_COMPARED_MAX = 32  # so few rectangles are compared each with each
_ROUNDS_MAX = 40  # how often a rectangle may be sorted, on the average


def check_apart(extents: Sequence[Extent]) -> None:
    """Refuse stretches of files that share bytes.

    Raises:
        CorruptDataError: names the file.
    """
    ordered = sorted(
        (e for e in extents if e.bytes), key=lambda e: (e.file.parts, e.offset, e.bytes)
    )
    for one, other in itertools.pairwise(ordered):
        if one.file == other.file and other.offset < one.offset + one.bytes:
            raise CorruptDataError("two pieces share bytes of a file", file=shown(one.path),
                                   at=other.offset)  # fmt: skip


def check_cover(name: str, shape: tuple[int, ...], spans: Sequence[Span]) -> None:
    """Refuse rectangles that overlap, reach beyond a tensor, or leave some of it out.

    Raises:
        CorruptDataError: names the tensor.
    """
    is_inside = len(spans) <= PIECES_MAX and all(
        len(offsets) == len(sizes) == len(shape)
        and all(a + n <= full for a, n, full in zip(offsets, sizes, shape, strict=True))
        for offsets, sizes in spans
    )
    is_whole = is_inside and sum(math.prod(sizes) for _, sizes in spans) == math.prod(shape)
    if not is_whole or not _are_apart([span for span in spans if math.prod(span[1])]):
        raise CorruptDataError("the pieces of a tensor do not cover it once", name=name[:80])


def _are_apart(spans: list[Span]) -> bool:
    """Whether no two rectangles overlap.

    Rectangles that lie in different slabs of a dimension do not; those of a slab are looked at
    again. Where no dimension tells some of them apart they are compared, if they are few.

    >>> _are_apart([((0, 0), (2, 1)), ((0, 1), (2, 1)), ((2, 0), (1, 2))])
    True
    >>> _are_apart([((0, 0), (2, 2)), ((1, 1), (2, 2))])
    False
    """
    left = _ROUNDS_MAX * len(spans) + 1000
    waiting = [spans]
    while waiting:
        group = waiting.pop()
        left -= len(group)
        if len(group) < 2:
            continue
        if left < 0:
            return False
        slabs = _cut(group)
        if len(slabs) > 1:
            waiting += slabs
        elif len(group) > _COMPARED_MAX or any(
            _overlap(one, other) for one, other in itertools.combinations(group, 2)
        ):
            return False
    return True


def _cut(spans: list[Span]) -> list[list[Span]]:
    """Rectangles in slabs along the first dimension that has more than one; else all as one."""
    for axis in range(len(spans[0][0])):
        slabs: list[list[Span]] = []
        end = -1
        along = [(offsets[axis], sizes[axis]) for offsets, sizes in spans]
        for (start, size), span in sorted(zip(along, spans, strict=True)):
            if start >= end:
                slabs.append([])
            slabs[-1].append(span)
            end = max(end, start + size)
        if len(slabs) > 1:
            return slabs
    return [spans]


def _overlap(one: Span, other: Span) -> bool:
    pairs = zip(*one, *other, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in pairs)
