"""Kernels compile on their first call and are cached: do it before training, and say so."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Collection

import numpy as np

from holdfast.checkpoint.format.codec import Codec, fit_codec
from holdfast.checkpoint.format.segment import Segment, encode_segment
from holdfast.checkpoint.planning.codecs import CodecPlan
from holdfast.checkpoint.selecting import priority
from holdfast.kernels.rows import bitmap, bloom, gather, gradients
from holdfast.kernels.segments import scatter
from holdfast.model.dtypes import array_dtype, as_bits
from holdfast.model.schema import FLOAT32

_PATIENCE_S = 1.0


def warm_kernels(
    codecs: CodecPlan,
    *,
    has_grid: bool,
    has_priority: bool = False,
    dtypes: Collection[str] = (FLOAT32,),
) -> float:
    """Run every kernel a save and a restore need once, on a few rows of these types; the seconds it
    took."""
    started = time.perf_counter()
    notice = threading.Timer(
        _PATIENCE_S,
        lambda: print("holdfast: compiling kernels, once per machine ...", file=sys.stderr),
    )
    notice.daemon = True
    notice.start()
    try:
        words_W = bitmap.new(64)
        ids_N = np.array([1, 2, 5], np.int64)
        for kind in (np.int64, np.int32):
            bitmap.mark(words_W, ids_N.astype(kind), 64)
        ats = [np.array([array.ctypes.data]) for array in (words_W, ids_N)]
        bitmap.mark_sets(ats[0], np.array([64]), ats[1], np.array([3]))
        bitmap.union_into(words_W, words_W)
        bitmap.ids(words_W, 0, int(bitmap.split(words_W, 2)[-1]))
        bitmap.is_set(words_W, ids_N)
        for width in (np.int64, np.int32):
            gradients.mark_nonzero(np.ones((64, 2), width), words_W)
        if has_priority:
            priority.warm()
        # Row state may appear only later: its codecs are needed at the first save all the same.
        used = {codecs.weights}
        used |= {codecs.for_column(1, is_non_negative=flag) for flag in (True, False)}
        for codec, dtype in itertools.product(used, dtypes):
            for chosen_N in (ids_N, np.arange(3)):
                _round_trip(fit_codec(codec, dtype), chosen_N, dtype, has_grid=has_grid)
    finally:
        notice.cancel()
    return time.perf_counter() - started


def _round_trip(codec: Codec, ids_N: np.ndarray, dtype: str, *, has_grid: bool) -> None:
    table_ND = np.ones((8, 4), array_dtype(dtype))
    rows_ND = np.empty((3, 4), array_dtype(dtype))
    gather.gather(as_bits(table_ND), ids_N, as_bits(rows_ND))
    gather.hash_rows(rows_ND, np.zeros(3, np.uint64))
    encoded = encode_segment(ids_N, [rows_ND], [codec], has_filter=has_grid)
    data = b"".join(memoryview(part).cast("B") for part in encoded.buffers if len(part))
    segment = Segment(memoryview(data), where="memory")
    segment.decode_into(0, table_ND, segment.ids())
    if has_grid:
        segment.take(np.array([0, 2]), deaths_K=None)
    words_W = segment.filter()
    if words_W is not None:
        bloom.has(words_W, ids_N)
    nothing_K = np.empty(0, np.int64)
    nothing_TC = np.empty((0, 1), np.int64)
    tables = scatter.Tables(*(nothing_K,) * 3, *(nothing_TC,) * 4)
    facts_SF = np.empty((0, scatter.BIRTH + 1), np.int64)
    no_bytes_B = np.frombuffer(bytearray(8), np.uint8)
    scatter.place(no_bytes_B, facts_SF, tables, nothing_K, nothing_K, 0, is_masked=True)
