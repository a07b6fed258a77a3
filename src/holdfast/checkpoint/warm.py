"""Kernels compile on their first call and are cached: do it before training, and say so."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable

import numpy as np

from holdfast.checkpoint.save import column_codecs
from holdfast.checkpoint.segment import Segment, encode_segment
from holdfast.checkpoint.strategy import CodecPlan
from holdfast.kernels import bitmap
from holdfast.kernels import rows as row_kernels
from holdfast.tables import TableSchema

_PATIENCE_S = 1.0


def warm_kernels(schemas: Iterable[TableSchema], codecs: CodecPlan) -> float:
    """Run every kernel a save and a restore need once, on a few rows; the seconds it took."""
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
        bitmap.union_into(words_W, words_W)
        bitmap.ids(words_W, 0, int(bitmap.split(words_W, 2)[-1]))
        bitmap.is_set(words_W, ids_N)
        for schema in schemas:
            columns = [np.ones((3, c.width), np.float32) for c in schema.columns]
            for column_ND in columns:
                row_kernels.gather(column_ND, ids_N - ids_N, column_ND.copy())
            for chosen in (ids_N, np.arange(3)):
                encoded = encode_segment(chosen, columns, column_codecs(schema, codecs))
                data = b"".join(memoryview(b).cast("B") for b in encoded.buffers)  # type: ignore
                segment = Segment(memoryview(data), where="memory")
                target = np.empty((8, schema.columns[0].width), np.float32)
                segment.decode_into(0, target, segment.ids())
    finally:
        notice.cancel()
    return time.perf_counter() - started
