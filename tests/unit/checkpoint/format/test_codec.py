"""Every codec keeps its stated bound for any rows, and reads any bytes without harm."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from holdfast.checkpoint.format.codec import (
    CODEC_NAMES,
    Codec,
    decode,
    decode_into,
    encode,
    parse_codec,
)
from holdfast.errors import CorruptDataError, InvalidRequestError
from tests.unit.checkpoint.format.error_bound import error_bound

SEED = 20240609
LOSSY = tuple(name for name in CODEC_NAMES if name != "fp32")
CODECS = tuple(
    dataclasses.replace(codec, block_rows=3 if codec.block_rows else 0)
    for codec in map(parse_codec, CODEC_NAMES)
)
# 0, -0, both infinities, NaN, NaN with a payload, the largest and the smallest number; then fp16's
# largest, the first it rounds to infinity, the smallest row that is not an exception, its step.
EDGES = (0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFA12345, 0x7F7FFFFF, 1)
EDGES += (0x477FE000, 0x477FF000, 0x37800000, 0x33800000)
PATTERNS = hnp.arrays(
    np.uint32,
    st.tuples(st.integers(0, 12), st.integers(1, 20)),
    elements=st.one_of(
        st.integers(0, 2**32 - 1),
        st.floats(-100, 100, width=32).map(lambda x: int(np.float32(x).view(np.uint32))),
        st.sampled_from(EDGES),
    ),
    fill=st.nothing(),
)


def trained(count: int, width: int) -> np.ndarray:
    rng = np.random.default_rng(SEED)
    scale = np.exp(rng.normal(-3, 0.7, (count, 1)))
    return (rng.standard_t(5, (count, width)) * scale).astype(np.float32)


def bits(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).view(np.uint32)


def round_trip(codec: Codec, rows: np.ndarray) -> np.ndarray:
    section = encode(codec, rows)
    return decode(codec.wire(), section, rows=rows.shape[0], width=rows.shape[1])


def assert_within_bound(codec: Codec, rows: np.ndarray) -> None:
    found = round_trip(codec, rows)
    bound = error_bound(codec, rows)
    assert (bound >= 0).all()
    # No error means every bit, but for the sign of a zero in a row of zeros. Such rows stay zero
    # in every codec, unless they share a codebook with rows that are not.
    is_zero = (rows == 0).all(axis=1)
    if codec.kind in ("kmeans-block", "kmeans-cluster"):
        is_zero &= bound == 0
    is_exact = (bound == 0) & ~is_zero
    np.testing.assert_array_equal(bits(found)[is_exact], bits(rows)[is_exact])
    assert (found[is_zero] == 0).all()
    lossy = ~is_exact & ~is_zero
    error = np.abs(found[lossy].astype(np.float64) - rows[lossy])
    assert (error <= bound[lossy, None]).all()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@settings(max_examples=40, deadline=None)
@given(patterns=PATTERNS, is_positive=st.booleans())
def test_any_rows_return_within_the_stated_bound(
    codec: Codec, patterns: np.ndarray, is_positive: bool
) -> None:
    if is_positive:
        patterns = patterns & np.uint32(0x7FFFFFFF)
    assert_within_bound(codec, patterns.view(np.float32))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_a_row_of_zeros_beside_tiny_ones_returns_within_the_stated_bound(codec: Codec) -> None:
    patterns = np.array([[0, 0, 0], [0, 874512385, 931143673]], np.uint32)
    assert_within_bound(codec, patterns.view(np.float32))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("width", [1, 2, 3, 7, 8, 9, 13, 16, 64, 100])
def test_ordinary_rows_return_within_the_stated_bound(codec: Codec, width: int) -> None:
    rows = trained(70, width)
    assert_within_bound(codec, np.abs(rows) if codec.kind == "log" else rows)


@settings(max_examples=100, deadline=None)
@given(patterns=PATTERNS)
def test_fp32_returns_every_bit(patterns: np.ndarray) -> None:
    found = round_trip(parse_codec("fp32"), patterns.view(np.float32))
    np.testing.assert_array_equal(bits(found), patterns)


@pytest.mark.parametrize("name", LOSSY)
def test_rows_with_nan_or_infinity_return_every_bit_and_leave_the_others_alone(name: str) -> None:
    codec = parse_codec(name)
    rows = np.abs(trained(40, 13))
    clean = round_trip(codec, rows)
    spoiled = rows.copy()
    spoiled.view(np.uint32)[4, 2] = 0xFFA12345
    spoiled[39, 0] = -np.inf
    found = round_trip(codec, spoiled)
    np.testing.assert_array_equal(bits(found)[[4, 39]], bits(spoiled)[[4, 39]])
    if "-" not in codec.kind:
        others = np.delete(np.arange(40), [4, 39])
        np.testing.assert_array_equal(bits(found)[others], bits(clean)[others])


@pytest.mark.parametrize("name", LOSSY)
def test_rows_that_fp16_parameters_cannot_describe_return_every_bit(name: str) -> None:
    codec = parse_codec(name)
    rows = np.abs(trained(6, 8))
    rows[1] *= np.float32(1e30)
    rows[3] *= np.float32(1e-12)
    if codec.kind in ("bf16", "log"):
        assert (error_bound(codec, rows) > 0).all()
        assert_within_bound(codec, rows)
    else:
        assert (error_bound(codec, rows)[[1, 3]] == 0).all()
        np.testing.assert_array_equal(bits(round_trip(codec, rows))[[1, 3]], bits(rows)[[1, 3]])


@pytest.mark.parametrize("name", ["asym8", "asym4", "asym3", "asym2", "sym8", "sym4"])
def test_the_bound_is_half_a_step_of_the_rows_range(name: str) -> None:
    codec = parse_codec(name)
    rows = trained(200, 32)
    levels = 2**codec.bits - 1
    top = np.abs(rows).max(axis=1).astype(np.float64)
    span = (
        2 * top if codec.kind == "sym" else rows.max(axis=1).astype(np.float64) - rows.min(axis=1)
    )
    # An offset rounded down widens the range by 2^-10 of itself; the scale is rounded up likewise.
    step = (span + top * 2.0**-10) / levels * (1 + 2.0**-9) + 2.0**-24
    assert (error_bound(codec, rows) <= 0.5 * step + 2.0**-20 * top).all()


@pytest.mark.parametrize("name", ["asym4", "adaptive2", "sym3", "kmeans4", "fp16", "bf16"])
@pytest.mark.parametrize("value", [0.0, 1.0, -0.1, 3e-4, 1234.5, -65504.0])
def test_constant_rows_keep_fp16_precision(name: str, value: float) -> None:
    rows = np.full((5, 11), value, np.float32)
    found = round_trip(parse_codec(name), rows)
    relative = 2.0**-8 if name == "bf16" else 2.0**-10
    assert (np.abs(found - rows) <= abs(value) * relative + 2.0**-24).all()


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_no_rows_make_a_section_too(name: str) -> None:
    codec = parse_codec(name)
    section = encode(codec, np.empty((0, 7), np.float32))
    assert decode(codec.wire(), section.tobytes(), rows=0, width=7).shape == (0, 7)
    assert error_bound(codec, np.empty((0, 7), np.float32)).shape == (0,)


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_decode_into_scatters_to_the_ids_and_nowhere_else(name: str) -> None:
    codec = parse_codec(name)
    rows = np.abs(trained(30, 9))
    rows[7, 1] = np.nan
    table = np.full((100, 9), 42.0, np.float32)
    ids = np.random.default_rng(SEED).permutation(100)[:30]
    section = encode(codec, rows)
    decode_into(codec.wire(), section, table, ids, rows=30, width=9)
    expected = np.full((100, 9), 42.0, np.float32)
    expected[ids] = decode(codec.wire(), section, rows=30, width=9)
    np.testing.assert_array_equal(bits(table), bits(expected))


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_a_section_decodes_from_any_address(name: str) -> None:
    codec = parse_codec(name)
    rows = np.abs(trained(21, 5))
    rows[2, 2] = np.inf
    section = encode(codec, rows).tobytes()
    expected = decode(codec.wire(), section, rows=21, width=5)
    for shift in (1, 2, 3):
        buffer = memoryview(b"x" * shift + section)[shift:]
        found = decode(codec.wire(), buffer, rows=21, width=5)
        np.testing.assert_array_equal(bits(found), bits(expected))


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_encoding_is_repeatable_and_takes_rows_of_any_layout(name: str) -> None:
    codec = parse_codec(name)
    rows = np.abs(trained(64, 12))
    section = encode(codec, rows)
    np.testing.assert_array_equal(section, encode(codec, rows.copy()))
    np.testing.assert_array_equal(section, encode(codec, np.asfortranarray(rows)))
    np.testing.assert_array_equal(section, encode(codec, np.repeat(rows, 2, axis=1)[:, ::2]))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("asym4", 100 * (4 + 8) + 4),
        ("sym2", 100 * (2 + 4) + 4),
        ("adaptive3", 100 * (4 + 6) + 4),
        ("fp32", 6400),
        ("bf16", 3204),
        ("log8", 100 * (4 + 16) + 4),
        ("kmeans2", 100 * (8 + 4) + 4),
        ("kmeans4-block", 32 + 800 + 4),
        ("kmeans4-cluster", 32 + 200 + 800 + 4),
    ],
)
def test_a_section_is_as_small_as_its_codes(name: str, expected: int) -> None:
    assert encode(parse_codec(name), np.abs(trained(100, 16))).nbytes == expected


@pytest.mark.parametrize("name", ["log8", "log4"])
def test_log_keeps_zero_zero_and_positive_positive_within_a_ratio(name: str) -> None:
    codec = parse_codec(name)
    rng = np.random.default_rng(SEED)
    rows = np.exp2(rng.uniform(-20, 10, (300, 24))).astype(np.float32)
    rows[rng.random(rows.shape) < 0.2] = 0
    rows[5] = 0
    rows[6, :2] = [1e-45, 3e-39]
    found = round_trip(codec, rows)
    np.testing.assert_array_equal(found == 0, rows == 0)
    assert (found >= 0).all()
    for row, back in zip(rows, found, strict=True):
        is_set = (row > 0) & (row > 1e-37)
        if is_set.any():
            # Powers of two that the row spans, in even steps: half a step is the relative error.
            spread = (bits(row[row > 0]).max() - bits(row[row > 0]).min()) / 2**23 + 2.0**-6
            half_step = 0.5 * spread / (2**codec.bits - 2) * (1 + 2.0**-10) + 2.0**-15
            ratio = 2.0 ** np.ceil(half_step) if half_step > 1 else 1 + half_step
            error = np.maximum(back[is_set] / row[is_set], row[is_set] / back[is_set])
            assert error.max() <= (ratio if half_step > 1 else 1 / (1 - half_step) + 1e-6)


def test_finer_codebooks_and_more_bits_lose_less() -> None:
    rows = trained(512, 32)

    def loss(name: str) -> float:
        codec = parse_codec(name)
        codec = dataclasses.replace(codec, block_rows=32) if codec.block_rows else codec
        return float(np.sqrt(np.square(rows - round_trip(codec, rows)).sum(axis=1)).mean())

    for kind in ("sym{}", "asym{}", "adaptive{}", "kmeans{}", "kmeans{}-block", "kmeans{}-cluster"):
        losses = [loss(kind.format(width)) for width in (2, 3, 4, 8)]
        assert losses == sorted(losses, reverse=True), kind
    for width in (2, 3, 4):
        assert loss(f"kmeans{width}") < loss(f"adaptive{width}") < loss(f"asym{width}")
        assert loss(f"asym{width}") < loss(f"sym{width}")
        assert loss(f"kmeans{width}-cluster") < loss(f"kmeans{width}-block")


def test_adaptive8_is_asym8() -> None:
    rows = trained(100, 32)
    np.testing.assert_array_equal(
        encode(parse_codec("adaptive8"), rows), encode(parse_codec("asym8"), rows)
    )


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_names_and_wire_bytes_lead_back_to_the_codec(name: str) -> None:
    codec = parse_codec(name)
    assert codec.name == name
    assert parse_codec(codec) is codec
    assert len(codec.wire()) == 8
    assert Codec.from_wire(codec.wire()) == codec
    assert codec.is_lossless == (name == "fp32")


def test_the_wire_keeps_the_rows_of_a_block() -> None:
    codec = Codec("kmeans-block", 3, block_rows=77, iterations=2)
    assert Codec.from_wire(codec.wire()).block_rows == 77
    assert codec.wire() == bytes([9, 3, 0, 0, 77, 0, 0, 0])


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequestError, match=r"asym5.*kmeans4-cluster"):
        parse_codec("asym5")


@pytest.mark.parametrize(
    "fields",
    [
        ("fp32", 16),
        ("asym", 5),
        ("log", 5),
        ("zip", 4),
        ("adaptive", 4, 45, 1.5),
        ("kmeans-block", 4),
        ("asym", 4, 0, 0.0, 8),
        ("adaptive", 4, -1),
        ("kmeans", 4, 0, 0.0, 0, -1),
    ],
)
def test_a_codec_that_does_not_exist_cannot_be_made(fields: tuple[object, ...]) -> None:
    with pytest.raises(InvalidRequestError, match="no such codec"):
        Codec(*fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wire",
    [
        b"",
        b"\5\4\0\0\0\0\0",
        b"\5\4\0\0\0\0\0\0\0",
        b"\0\4\0\0\0\0\0\0",
        b"\xff\4\0\0\0\0\0\0",
        b"\5\5\0\0\0\0\0\0",
        b"\5\4\1\0\0\0\0\0",
        b"\5\4\0\0\1\0\0\0",
        b"\x09\4\0\0\0\0\0\0",
    ],
)
def test_unknown_wire_bytes_are_corrupt(wire: bytes) -> None:
    with pytest.raises(CorruptDataError, match="unknown codec"):
        Codec.from_wire(wire)


@pytest.mark.parametrize(
    "rows",
    [np.zeros(3, np.float32), np.zeros((3, 2), np.int32), np.zeros((3, 0), np.float32)],
    ids=["flat", "integers", "no columns"],
)
def test_only_rows_of_floats_are_encoded(rows: np.ndarray) -> None:
    with pytest.raises(InvalidRequestError, match="rows of a type"):
        encode(parse_codec("asym4"), rows)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_a_section_cut_or_grown_anywhere_is_corrupt(codec: Codec) -> None:
    rows = np.abs(trained(9, 5))
    rows[3, 0] = np.nan
    section = encode(codec, rows).tobytes()
    table = np.full((9, 5), 42.0, np.float32)
    for damaged in (*(section[:size] for size in range(len(section))), section + b"\0"):
        with pytest.raises(CorruptDataError):
            decode_into(codec.wire(), damaged, table, np.arange(9), rows=9, width=5)
    assert (table == 42).all()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_sections_raise_or_stay_in_bounds(codec: Codec, data: st.DataObject) -> None:
    rows = np.abs(trained(9, 5))
    rows[3, 0] = np.nan
    section = bytearray(encode(codec, rows).tobytes())
    for _ in range(data.draw(st.integers(1, 8))):
        section[data.draw(st.integers(0, len(section) - 1))] = data.draw(st.integers(0, 255))
    guarded = np.full((29, 5), 42.0, np.float32)
    try:
        decode_into(codec.wire(), section, guarded, np.arange(10, 19), rows=9, width=5)
    except CorruptDataError:
        assert (guarded == 42).all()
    assert (guarded[:10] == 42).all() and (guarded[19:] == 42).all()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@settings(max_examples=60, deadline=None)
@given(section=st.binary(max_size=300), rows=st.integers(-1, 40), width=st.integers(-1, 20))
def test_garbage_raises_or_decodes(codec: Codec, section: bytes, rows: int, width: int) -> None:
    with contextlib.suppress(CorruptDataError):
        assert decode(codec.wire(), section, rows=rows, width=width).shape == (rows, width)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_a_lying_row_count_is_refused_before_memory_is_taken(codec: Codec) -> None:
    section = encode(codec, np.abs(trained(9, 5)))
    with pytest.raises(CorruptDataError, match="too short"):
        decode(codec.wire(), section, rows=2**40, width=2**20)


def exceptions_at(section: bytes, count: int, width: int) -> int:
    return len(section) - 4 * count * (1 + width) - 4


@pytest.mark.parametrize("rows_listed", [(3, 3), (4, 1), (1, 9), (0, 2**31)])
def test_exceptions_out_of_order_or_range_are_corrupt(rows_listed: tuple[int, int]) -> None:
    codec = parse_codec("asym4")
    rows = trained(9, 5)
    rows[[1, 4]] = np.nan
    section = bytearray(encode(codec, rows).tobytes())
    at = exceptions_at(section, 2, 5) + 4
    section[at : at + 8] = np.array(rows_listed, np.uint32).tobytes()
    with pytest.raises(CorruptDataError, match="out of order or range"):
        decode(codec.wire(), section, rows=9, width=5)


@pytest.mark.parametrize("count", [1, 3, 10, 2**32 - 1])
def test_a_wrong_count_of_exceptions_is_corrupt(count: int) -> None:
    codec = parse_codec("asym4")
    rows = trained(9, 5)
    rows[[1, 4]] = np.nan
    section = bytearray(encode(codec, rows).tobytes())
    at = exceptions_at(section, 2, 5)
    section[at : at + 4] = count.to_bytes(4, "little")
    with pytest.raises(CorruptDataError):
        decode(codec.wire(), section, rows=9, width=5)


@pytest.mark.parametrize(
    ("name", "at", "word"),
    [
        ("asym4", 0, 0x7C00),
        ("asym4", 18, 0xFE00),
        ("sym4", 4, 0xFC00),
        ("kmeans2", 8, 0x7E01),
        ("log8", 0, 0x7F00),
        ("log4", 18, 0x7F80),
        ("kmeans4-cluster", 32, 1),
    ],
)
def test_impossible_parameters_are_corrupt(name: str, at: int, word: int) -> None:
    codec = parse_codec(name)
    section = bytearray(encode(codec, np.abs(trained(9, 5))).tobytes())
    section[at : at + 2] = word.to_bytes(2, "little")
    with pytest.raises(CorruptDataError, match="impossible parameters"):
        decode(codec.wire(), section, rows=9, width=5)


def test_the_bytes_of_a_section_are_those_of_the_format() -> None:
    rows = np.array([[0, 1, 2, 15], [np.inf, 0, 0, 0], [-2, -2, 13, 0]], np.float32)
    assert encode(parse_codec("asym4"), rows).tobytes().hex(" ", 2) == (
        "003c 0000 003c "  # scales: 1, none, 1
        "0000 0000 00c0 "  # offsets: 0, none, -2
        "10f2 0000 002f 0000 "  # codes, two a byte, the first one low; padding
        "0100 0000 0100 0000 "  # one exception, row 1
        "0000 807f 0000 0000 0000 0000 0000 0000"
    )
    assert encode(parse_codec("bf16"), rows[:1]).tobytes().hex(" ", 2) == (
        "0000 803f 0040 7041 0000 0000"
    )
    assert encode(parse_codec("kmeans2"), rows[:1]).tobytes().hex(" ", 2) == (
        "0000 003c 0040 804b e400 0000 0000 0000"
    )
    # From 1 (pattern 3f80) to 16 (4180) in fourteen steps; 4 lies halfway, at the seventh.
    log = encode(parse_codec("log4"), np.array([[1, 0, 16, 4]], np.float32))
    assert log.tobytes().hex(" ", 2) == "803f 8041 018f 0000 0000 0000"


@pytest.mark.parametrize(
    "values", [{"block_rows": -0.0}, {"bits": 4.0}, {"bins": True}, {"iterations": 1 << 16}]
)
def test_numbers_of_a_codec_are_counts_within_bounds(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="no such codec"):
        Codec(**{"kind": "asym", "bits": 4, **values})
