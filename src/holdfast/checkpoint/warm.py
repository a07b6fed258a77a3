"""Kernels compile on their first call and are cached: do it before training, and say so."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from functools import partial

import numpy as np

from holdfast.checkpoint.format.codec import Codec, fit_codec, parse_codec
from holdfast.checkpoint.format.segment import Segment, encode_segment
from holdfast.checkpoint.planning.codecs import CodecPlan
from holdfast.checkpoint.selecting import priority
from holdfast.kernels.compiling import run_all
from holdfast.kernels.rows import bitmap, bloom, gather, gradients
from holdfast.kernels.segments import deaths, scatter
from holdfast.model.dtypes import array_dtype, as_bits
from holdfast.model.schema import DTYPE_BYTES, FLOAT32

# A codec for each kernel that there is: the number of bits is an argument.
_EVERY_KIND = (
    "fp32", "fp16", "bf16", "sym8", "asym8", "adaptive4", "log8", "kmeans4", "kmeans4-block",
    "kmeans4-cluster",
)  # fmt: skip


def warm_kernels(
    codecs: CodecPlan,
    *,
    has_grid: bool,
    has_priority: bool = False,
    has_restore: bool = True,
    dtypes: Collection[str] = (FLOAT32,),
) -> float:
    """Run every kernel a save needs once, and what a restore needs besides if there is one to come,
    on a few rows of these types; the seconds it took to compile."""
    # Row state may appear only later: its codecs are needed at the first save all the same.
    used = {codecs.weights}
    used |= {codecs.for_column(1, is_non_negative=flag) for flag in (True, False)}
    return run_all([
        *_marking(),
        *([priority.warm] if has_priority else []),
        *_storing(used, dtypes, has_grid=has_grid),
        *([_place] if has_restore else []),
    ])  # fmt: skip


def warm_all() -> float:
    """The same for everything that any settings may need."""
    codecs = [parse_codec(name) for name in _EVERY_KIND]
    return run_all([
        *_marking(),
        priority.warm,
        *_storing(codecs, (FLOAT32,), has_grid=True),
        *_storing([parse_codec("fp32")], DTYPE_BYTES, has_grid=True),
        _kill,
        _place,
    ])  # fmt: skip


def _marking() -> Iterator[Callable[[], object]]:
    """What finds and keeps the rows that changed."""
    words_W = bitmap.new(64)
    ids_N = np.array([1, 2, 5], np.int64)
    for kind in (np.int64, np.int32):
        yield partial(bitmap.mark, words_W, ids_N.astype(kind), 64)
    yield lambda: bitmap.mark_sets(_at(words_W), np.array([64]), _at(ids_N), np.array([3]))
    yield lambda: bitmap.union_into(words_W, words_W)
    yield lambda: bitmap.ids(words_W, 0, 64)
    yield lambda: bitmap.split(words_W, 2)
    yield lambda: bitmap.is_set(words_W, ids_N)
    for width in (np.int64, np.int32):
        yield partial(gradients.mark_nonzero, np.ones((64, 2), width), words_W)


def _at(array: np.ndarray) -> np.ndarray:
    return np.array([array.ctypes.data])


def _storing(
    codecs: Collection[Codec], dtypes: Collection[str], *, has_grid: bool
) -> Iterator[Callable[[], object]]:
    """What rows become of and are made from."""
    for codec, dtype in itertools.product(codecs, dtypes):
        for ids_N in (np.array([1, 2, 5]), np.arange(3)):
            yield partial(_round_trip, fit_codec(codec, dtype), ids_N, dtype, has_grid=has_grid)


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


def _kill() -> None:
    """What tells the rows of a chunk that died."""
    ids_N, deaths_N = np.arange(3), np.full(3, -1)
    deaths.mark_deaths(ids_N, ids_N[:1], ids_N[:1], deaths_N)
    deaths.are_vectors(ids_N, ids_N, ids_N[1:2], ids_N[:1])


def _place() -> None:
    """What copies many small segments into tables."""
    nothing_K = np.empty(0, np.int64)
    nothing_TC = np.empty((0, 1), np.int64)
    tables = scatter.Tables(*(nothing_K,) * 3, *(nothing_TC,) * 4)
    facts_SF = np.empty((0, scatter.BIRTH + 1), np.int64)
    no_bytes_B = np.frombuffer(bytearray(8), np.uint8)
    scatter.place(no_bytes_B, facts_SF, tables, nothing_K, nothing_K, 0, is_masked=True)
