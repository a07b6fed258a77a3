"""Row ids to bytes and back: how a segment says which rows it holds.

Three encodings, the smallest wins: RANGE (contiguous ids, no bytes at all), BITMAP (a bit for every
row from the first id to the last) and DELTA (bit-packed gaps). The first and the last id and the
count travel beside the bytes, in the segment's header.

Invariants:
- ``decode_ids`` returns exactly ``count`` strictly ascending ids from ``first`` to ``last``, or
  raises; bytes, count and bounds may all be lies.
- It allocates no more than ``count`` ids and a copy of the data.

Not here: the packing itself (kernels/rows/ids.py, kernels/rows/bitmap.py); checksums (segment.py).
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from holdfast.errors import CorruptDataError, InvalidRequestError
from holdfast.kernels.rows import bitmap, ids

Ids = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class IdEncoding(IntEnum):
    """The number of each encoding, as stored."""

    RANGE = ids.RANGE
    BITMAP = ids.BITMAP
    DELTA = ids.DELTA


def encode_ids(ids_N: Ids) -> tuple[IdEncoding, Bytes]:
    """The smallest encoding of strictly ascending ids, and its bytes.

    >>> encode_ids(np.arange(5, 9))
    (<IdEncoding.RANGE: 0>, array([], dtype=uint8))
    >>> encode_ids(np.array([2, 3, 5]))
    (<IdEncoding.BITMAP: 1>, array([11], dtype=uint8))

    Raises:
        InvalidRequestError: ids are not strictly ascending, negative, or 2**56 and above.
    """
    ids_N = np.ascontiguousarray(ids_N, np.int64)
    if ids_N.ndim != 1 or not ids.is_ascending(ids_N):
        raise InvalidRequestError(
            "row ids are not strictly ascending in [0, 2**56)",
            shape=ids_N.shape,
            todo="sort them and drop duplicates",
        )
    if ids_N.size == 0 or int(ids_N[-1]) - int(ids_N[0]) + 1 == ids_N.size:
        return IdEncoding.RANGE, np.empty(0, np.uint8)
    first = int(ids_N[0])
    span = int(ids_N[-1]) - first + 1
    bitmap_bytes = -(-span // 8)
    delta_bytes = int(ids.delta_bytes(ids_N))
    if bitmap_bytes <= delta_bytes:
        words_W = bitmap.new(span)
        bitmap.mark(words_W, ids_N - first, span)
        return IdEncoding.BITMAP, words_W.astype("<u8", copy=False).view(np.uint8)[:bitmap_bytes]
    data_B = np.empty(delta_bytes, np.uint8)
    ids.delta_encode(ids_N, data_B)
    return IdEncoding.DELTA, data_B


def decode_ids(encoding: int, data: npt.ArrayLike, *, count: int, first: int, last: int) -> Ids:
    """The ids that ``encode_ids`` wrote; no ids at all are first=0, last=-1.

    >>> decode_ids(IdEncoding.BITMAP, np.array([11], np.uint8), count=3, first=2, last=5)
    array([2, 3, 5])

    Raises:
        CorruptDataError: the bytes are not ``count`` ids from ``first`` to ``last``.
    """
    data_B = (
        np.frombuffer(data, np.uint8)
        if isinstance(data, bytes | bytearray | memoryview)
        else np.ascontiguousarray(data, np.uint8)
    )
    ids_N = _decoded(encoding, data_B, count, first, last)
    if ids_N is None:
        raise CorruptDataError(
            "row ids do not match their header",
            encoding=encoding,
            bytes=data_B.size,
            count=count,
            first=first,
            last=last,
            todo="restore an older checkpoint",
        )
    return ids_N


def _decoded(encoding: int, data_B: Bytes, count: int, first: int, last: int) -> Ids | None:
    is_possible = first >= 0 and last < ids.ID_END and 0 <= count <= last - first + 1
    if data_B.ndim != 1 or not is_possible:
        return None
    if count == 0:
        is_empty = encoding == IdEncoding.RANGE and data_B.size == 0 and (first, last) == (0, -1)
        return np.empty(0, np.int64) if is_empty else None
    # Before ids are allocated: a lying count must not cost memory.
    if encoding == IdEncoding.BITMAP and data_B.size * 8 < count:
        return None
    if encoding == IdEncoding.DELTA and not ids.delta_fits(data_B, count):
        return None
    ids_N = np.empty(count, np.int64)
    return ids_N if ids.unpack(int(encoding), data_B, first, last, ids_N) else None
