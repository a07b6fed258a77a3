"""The codecs' kernels: bits in and out, sixteen-bit floats, the rounding of a pair, the search."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.kernels.codecs import floats, logarithm, quantize
from holdfast.kernels.codecs.packing import pack_tile, packed_width, padded_width, unpack_tile

SEED = 20240607


def patterns(count: int) -> np.ndarray:
    """Float32 numbers of every size: even over bit patterns, plus the edges of fp16."""
    rng = np.random.default_rng(SEED)
    values = rng.integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32).view(np.float32)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)].astype(np.float32)
    near = np.concatenate(
        [halves, np.nextafter(halves, np.float32(1)), halves * np.float32(1.0003)]
    )
    values = np.concatenate([values, near])
    return values[np.isfinite(values)]


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_unpack_returns_the_packed_codes_at_every_width(bits: int) -> None:
    rng = np.random.default_rng(SEED)
    for width in range(1, 71):
        codes = np.zeros((5, padded_width(width, bits)), np.uint8)
        codes[:, :width] = rng.integers(0, 1 << bits, (5, width))
        packed = np.full((5, packed_width(width, bits)), 0xAA, np.uint8)
        pack_tile(codes, bits, packed)
        found = np.full_like(codes, 0xAA)
        unpack_tile(packed, bits, found)
        np.testing.assert_array_equal(found, codes, err_msg=f"{width=} {SEED=}")


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_packed_codes_are_a_little_endian_bit_stream(bits: int) -> None:
    rng = np.random.default_rng(SEED)
    for width in (1, 2, 3, 7, 8, 9, 16, 31, 64):
        codes = np.zeros((1, padded_width(width, bits)), np.uint8)
        codes[0, :width] = rng.integers(0, 1 << bits, width)
        packed = np.empty((1, packed_width(width, bits)), np.uint8)
        pack_tile(codes, bits, packed)
        stream = sum(int(code) << (bits * j) for j, code in enumerate(codes[0, :width]))
        assert int.from_bytes(packed.tobytes(), "little") == stream, (width, SEED)


def test_every_fp16_pattern_widens_as_numpy_does() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    found = np.empty((256, 256), np.float32)
    floats.decode_fp16(halves, found, np.arange(256))
    expected = halves.view(np.float16).astype(np.float32)
    is_number = ~np.isnan(expected)
    np.testing.assert_array_equal(
        found.view(np.uint32)[is_number], expected.view(np.uint32)[is_number]
    )
    assert np.isnan(found[~is_number]).all()


def test_fp16_rows_round_to_nearest_even_and_mark_what_they_cannot_hold() -> None:
    values = patterns(200_000).reshape(-1, 1)
    found = np.empty(values.shape, np.uint16)
    bad = np.empty(len(values), np.uint8)
    floats.encode_fp16(values.view(np.uint32), found, bad)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    magnitude = np.abs(values[:, 0])
    is_bad = ~np.isfinite(expected[:, 0]) | ((magnitude > 0) & (magnitude < 2.0**-16))
    np.testing.assert_array_equal(bad.astype(bool), is_bad)
    np.testing.assert_array_equal(found[~is_bad], expected.view(np.uint16)[~is_bad])


def test_bf16_rows_round_to_nearest_even_and_mark_overflow() -> None:
    values = patterns(200_000).reshape(-1, 1)
    found = np.empty(values.shape, np.uint16)
    bad = np.empty(len(values), np.uint8)
    floats.encode_bf16(values.view(np.uint32), found, bad)
    good = bad == 0
    widened = (found.astype(np.uint32) << 16).view(np.float32)[good]
    below = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)[good]
    above = ((values.view(np.uint32) >> 16) + 1 << 16).astype(np.uint32).view(np.float32)[good]
    exact = values[good].astype(np.float64)
    with np.errstate(invalid="ignore"):
        to_below, to_above = np.abs(exact - below), np.abs(exact - above)
    error = np.abs(exact - widened)
    np.testing.assert_array_equal(error, np.fmin(to_below, to_above))
    is_tie = to_below == to_above
    assert is_tie.any()
    assert (found[good][is_tie] % 2 == 0).all()
    np.testing.assert_array_equal(good, np.abs(values[:, 0]) < 3.3961775e38)


def test_directed_rounding_brackets_and_is_tight() -> None:
    for value in patterns(3000):
        if abs(value) > 65504:
            continue
        down = floats.half_down(value)
        up = -floats.half_down(-value)
        assert down <= value <= up
        assert np.float32(np.float16(down)) == down and np.float32(np.float16(up)) == up
        assert down == up == value or np.nextafter(np.float16(down), np.float16(np.inf)) == up
        assert floats.half_up(abs(value)) == (up if value >= 0 else -down)
        assert floats.half_from_bits(floats.half_bits(down)) == down


def fit(rows: np.ndarray, bits: int, *, bins: int = 1, steps: int = 0) -> tuple[np.ndarray, ...]:
    count, width = rows.shape
    scale, offset = np.empty(count, np.uint16), np.empty(count, np.uint16)
    codes = np.empty((count, packed_width(width, bits)), np.uint8)
    bad = np.empty(count, np.uint8)
    search = (np.float32(bins), steps)
    quantize.encode_uniform(rows, bits, False, search, scale, offset, codes, bad)
    return scale, offset, codes, bad


def restore(parts: tuple[np.ndarray, ...], bits: int, width: int) -> np.ndarray:
    scale, offset, codes, _ = parts
    rows = np.empty((len(scale), width), np.float32)
    quantize.decode_uniform(codes, bits, scale, offset, rows, np.arange(len(scale)))
    return rows


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_the_stored_pair_is_the_rounded_range_of_the_row(bits: int) -> None:
    rng = np.random.default_rng(SEED)
    rows = (rng.standard_normal((500, 24)) * 10 ** rng.uniform(-2, 3, (500, 1))).astype(np.float32)
    scale, offset, _, bad = fit(rows, bits)
    assert not bad.any()
    lo, hi = rows.min(axis=1), rows.max(axis=1)
    low = offset.view(np.float16)
    assert (low.astype(np.float32) <= lo).all()
    assert (np.nextafter(low, np.float16(np.inf)).astype(np.float32) > lo).all()
    exact = (hi.astype(np.float64) - low) / (2**bits - 1)
    found = scale.view(np.float16).astype(np.float64)
    assert (found >= exact * (1 - 2.0**-22)).all()
    assert (found <= exact * (1 + 2.0**-10) + 2.0**-24).all()


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_codes_are_the_nearest_points_of_the_stored_grid(bits: int) -> None:
    rng = np.random.default_rng(SEED)
    rows = rng.standard_normal((300, 19)).astype(np.float32)
    parts = fit(rows, bits)
    scale = parts[0].view(np.float16).astype(np.float64)[:, None, None]
    offset = parts[1].view(np.float16).astype(np.float64)[:, None, None]
    grid = offset + scale * np.arange(2**bits)
    nearest = np.abs(rows[:, :, None] - grid).min(axis=2)
    error = np.abs(rows.astype(np.float64) - restore(parts, bits, 19))
    np.testing.assert_allclose(error, nearest, atol=1e-5 * scale[:, :, 0].max())


def greedy(row: np.ndarray, bits: int, bins: int, steps: int) -> float:
    """The paper's search on one row in float64, without fp16: the smallest squared error seen."""

    def loss(lo: float, hi: float) -> float:
        scale = (hi - lo) / (2**bits - 1)
        codes = np.clip(np.round((row - lo) / scale), 0, 2**bits - 1)
        return float(np.square(row - (lo + codes * scale)).sum())

    lo, hi = float(row.min()), float(row.max())
    step = (hi - lo) / bins
    best = loss(lo, hi)
    for _ in range(steps):
        raised, lowered = loss(lo + step, hi), loss(lo, hi - step)
        lo, hi = (lo + step, hi) if raised <= lowered else (lo, hi - step)
        best = min(best, raised, lowered)
    return best


@pytest.mark.parametrize(("bits", "bins", "steps"), [(4, 45, 9), (3, 25, 5), (2, 25, 12)])
def test_the_search_finds_what_the_papers_greedy_search_finds(
    bits: int, bins: int, steps: int
) -> None:
    rng = np.random.default_rng(SEED)
    rows = rng.standard_t(4, (100, 32)).astype(np.float32)
    found = restore(fit(rows, bits, bins=bins, steps=steps), bits, 32)
    error = np.square(rows.astype(np.float64) - found).sum(axis=1)
    expected = np.array([greedy(row.astype(np.float64), bits, bins, steps) for row in rows])
    # Pairs rounded to fp16 move single rows a little, both ways, and now and then the path.
    assert abs(error.mean() / expected.mean() - 1) < 0.01
    assert np.median(np.abs(error / expected - 1)) < 0.01


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    bits=st.sampled_from([4, 3, 2]),
    width=st.integers(1, 70),
    tail=st.floats(1.5, 30),
    size=st.floats(-4, 4),
    center=st.floats(-2, 2),
)
def test_adaptive_is_never_worse_than_asym(
    seed: int, bits: int, width: int, tail: float, size: float, center: float
) -> None:
    rng = np.random.default_rng(seed)
    rows = ((rng.standard_t(tail, (37, width)) + center) * 10**size).astype(np.float32)
    plain, searched = fit(rows, bits), fit(rows, bits, bins=25, steps=12)
    np.testing.assert_array_equal(plain[3], searched[3])
    good = plain[3] == 0
    exact = rows[good].astype(np.float64)
    loss = np.square(exact - restore(plain, bits, width)[good]).sum(axis=1)
    loss_searched = np.square(exact - restore(searched, bits, width)[good]).sum(axis=1)
    assert (loss_searched <= loss).all()


def test_adaptive_cuts_an_outlier_that_asym_has_to_span() -> None:
    rng = np.random.default_rng(SEED)
    rows = rng.uniform(-1, 1, (50, 64)).astype(np.float32)
    rows[:, 7] = 2.5
    loss = [
        np.square(rows - restore(fit(rows, 2, bins=25, steps=steps), 2, 64)).sum()
        for steps in (0, 12)
    ]
    assert loss[1] < 0.75 * loss[0]


def skipping(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids of twice as many places, and the same with every third row skipped."""
    ids = np.random.default_rng(SEED).permutation(2 * count)[:count]
    return ids, np.where(np.arange(count) % 3 == 1, -1, ids)


@pytest.mark.parametrize("kernel", ["fp16", "bf16", "bytes", "log8", "uniform4", "uniform8"])
def test_a_negative_id_skips_its_row_and_leaves_the_others_alone(kernel: str) -> None:
    count, width = 1000, 12  # several tiles
    rng = np.random.default_rng(SEED)
    codes = rng.integers(0, 256, (count, 4 * width), dtype=np.uint8)
    halves = rng.integers(0, 0x7C00, (3, count), dtype=np.uint16)
    low, high = np.sort(halves[:2], axis=0)
    wide = codes[:, : 2 * width].copy().view(np.uint16)

    def decode(ids: np.ndarray) -> np.ndarray:
        table = np.full((2 * count, width), 42.0, np.float32)
        if kernel == "fp16":
            floats.decode_fp16(wide, table, ids)
        elif kernel == "bf16":
            floats.decode_bf16(wide, table.view(np.uint32), ids)
        elif kernel == "bytes":
            floats.scatter_bytes(codes, table.view(np.uint8), ids)
        elif kernel == "log8":
            packed = codes[:, :width].copy()
            logarithm.decode_log(packed, 8, low, high, table.view(np.uint32), ids)
        else:
            bits = int(kernel[-1])
            packed = codes[:, : packed_width(width, bits)].copy()
            quantize.decode_uniform(packed, bits, halves[0], halves[1], table, ids)
        return table.view(np.uint32)

    ids, some = skipping(count)
    expected = decode(ids)
    expected[ids[some < 0]] = np.float32(42).view(np.uint32)
    np.testing.assert_array_equal(decode(some), expected)
    assert (decode(np.full(count, -1)) == np.float32(42).view(np.uint32)).all()
