"""Codecs on columns that are not float32: lossless where nothing may be lost, bounded elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.checkpoint.format.codec import (
    CODEC_NAMES,
    Codec,
    decode,
    decode_into,
    encode,
    fit_codec,
    parse_codec,
    take,
)
from holdfast.checkpoint.format.segment import Segment, encode_segment
from holdfast.checkpoint.planning.codecs import column_codecs, plan_codec
from holdfast.errors import CorruptDataError, InvalidRequestError
from holdfast.model.dtypes import array_dtype, as_bits, for_users, from_float32
from holdfast.model.schema import (
    BFLOAT16,
    DTYPE_BYTES,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    Column,
    TableSchema,
)
from tests.unit.checkpoint.format.error_bound import error_bound
from tests.unit.kernels.codecs.encoded import bytes_of

OTHER = (FLOAT16, BFLOAT16, FLOAT64)
COUNT, WIDTH = 40, 5


def any_bits(dtype: str, seed: int = 1) -> np.ndarray:
    """Rows of random bits: NaN with payloads, infinities, denormals, both zeros."""
    rows = np.zeros((COUNT, WIDTH), array_dtype(dtype))
    bits = as_bits(rows)
    top = np.iinfo(bits.dtype).max
    bits[:] = np.random.default_rng(seed).integers(0, top, bits.shape, bits.dtype, endpoint=True)
    bits[0] = 0
    bits[1] = 1 << (8 * bits.itemsize - 1)  # -0.0
    bits[2] = 1  # the smallest denormal
    return rows


def usual(dtype: str) -> np.ndarray:
    """Rows as training has them, none negative; and some that codecs cannot describe."""
    draw = np.random.default_rng(2)
    values = np.abs(draw.standard_normal((COUNT, WIDTH))).astype(np.float32)
    rows = from_float32(values, dtype)
    rows[3] = from_float32(np.full(WIDTH, 3e4, np.float32), dtype)
    rows[4] = from_float32(np.linspace(0, 6.5504e4, WIDTH, dtype=np.float32), dtype)
    as_bits(rows)[5] = np.iinfo(as_bits(rows).dtype).max  # NaN
    as_bits(rows)[6] = 1  # denormal
    rows[7] = 0
    if dtype == FLOAT64:
        rows[8] = 1e300
        rows[9] = [1e-300, 1.0, 2.0, 3.0, 4.0]
        rows[10] = 1e-44
    return rows


@pytest.mark.parametrize("dtype", OTHER)
@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_lossless_means_every_bit(dtype: str, name: str) -> None:
    codec = fit_codec(parse_codec(name), dtype)
    if dtype == FLOAT64 and name != "fp32":
        assert codec.name == name  # half as wide: worth its loss
        return
    assert codec == Codec("raw", 8 * DTYPE_BYTES[dtype])
    rows = any_bits(dtype)
    section = encode(codec, rows)
    assert section.nbytes == rows.nbytes
    again = decode(codec.wire(), section, rows=COUNT, width=WIDTH, dtype=dtype)
    assert again.dtype == rows.dtype and again.tobytes() == rows.tobytes()


@pytest.mark.parametrize("dtype", OTHER)
@pytest.mark.parametrize("name", CODEC_NAMES)
def test_decoded_rows_are_within_the_bound(dtype: str, name: str) -> None:
    codec = fit_codec(parse_codec(name), dtype)
    rows = usual(dtype)
    section = encode(codec, rows)
    shape = {"rows": COUNT, "width": WIDTH, "dtype": dtype}
    again = decode(codec.wire(), section, **shape)  # type: ignore[arg-type]
    bound = error_bound(codec, rows)
    with np.errstate(invalid="ignore"):
        error = np.abs(for_users(again).astype(np.float64) - for_users(rows).astype(np.float64))
    kept = bound == 0
    assert again[kept & (for_users(rows) != 0).any(1)].tobytes() == (
        rows[kept & (for_users(rows) != 0).any(1)].tobytes()
    )
    assert (error[~kept] <= bound[~kept, None]).all()
    assert np.isfinite(for_users(again)[[3, 4]]).all()
    assert kept[5]  # what is not a number keeps its bits
    if dtype == FLOAT64:
        assert kept[[8, 9]].all()
        assert codec.kind != "log" or (again[10] > 0).all()  # never becomes zero
    positions = np.array([0, 3, 5, 6, 8, 39])
    wire, taken = take(codec.wire(), section, positions, **shape)  # type: ignore[arg-type]
    some = decode(wire, taken, rows=6, width=WIDTH, dtype=dtype)
    assert some.tobytes() == again[positions].tobytes()
    table = np.zeros((99, WIDTH), array_dtype(dtype))
    ids = np.where(np.arange(COUNT) % 3, np.arange(COUNT) * 2, -1)
    decode_into(codec.wire(), section, table, ids, **shape)  # type: ignore[arg-type]
    assert table[ids[ids >= 0]].tobytes() == again[ids >= 0].tobytes()
    assert not as_bits(table)[1::2].any()


@pytest.mark.parametrize("dtype", OTHER)
def test_a_codec_of_another_type_is_refused(dtype: str) -> None:
    rows = usual(dtype)
    with pytest.raises(InvalidRequestError, match="type"):
        encode(parse_codec("fp32"), rows)
    raw = Codec("raw", 16 if dtype == FLOAT64 else 64)
    with pytest.raises(InvalidRequestError, match="type"):
        encode(raw, rows)
    with pytest.raises(CorruptDataError, match="type"):
        decode(raw.wire(), bytes(800), rows=COUNT, width=WIDTH, dtype=dtype)
    with pytest.raises(CorruptDataError, match="type"):
        decode(Codec("raw", 16).wire(), bytes(400), rows=COUNT, width=WIDTH)


@pytest.mark.parametrize("name", ["fp32", "adaptive4", "bf16"])
def test_segments_of_mixed_types_move_as_codes(name: str) -> None:
    columns = [usual(dtype) for dtype in (BFLOAT16, FLOAT32, FLOAT64)]
    schema = TableSchema(
        "t", COUNT, tuple(Column(f"c{i}", WIDTH, d)
                          for i, d in enumerate((BFLOAT16, FLOAT32, FLOAT64)))
    )  # fmt: skip
    plan = plan_codec(name, None, expected_restores=0, restores=0)
    codecs = column_codecs(schema, plan)
    data = bytes_of(encode_segment(np.arange(COUNT), columns, codecs))
    segment = Segment(memoryview(data), where="here")
    segment.check_schema(schema)
    with pytest.raises(CorruptDataError, match="does not fit"):
        segment.check_schema(
            TableSchema("t", COUNT, tuple(Column(f"c{i}", WIDTH) for i in range(3)))
        )
    positions = np.array([1, 5, 6, 30])
    taken = segment.take(positions, has_filter=True, deaths_K=np.array([7, 8, 8, 9]))
    moved = Segment(memoryview(bytes_of(taken)), where="here")
    for column in range(3):
        wanted = segment.decode(column)
        if name == "fp32":
            assert wanted.tobytes() == columns[column].tobytes()
        assert moved.decode(column).tobytes() == wanted[positions].tobytes()
        assert segment.decode_some(column, positions).tobytes() == wanted[positions].tobytes()
