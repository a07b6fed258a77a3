"""Codes: every erasure they promise to survive, to the bit; and how the float sum drifts."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from holdfast.cluster.code import Code, make_code
from holdfast.errors import DataLossError, InvalidRequestError
from holdfast.kernels.servers import galois, shard


def noise(*shape: int, seed: int = 1) -> np.ndarray:
    """Rows of arbitrary bits: NaN payloads and denormals included."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2**32, shape, np.uint32).view(np.float32)


def stripe_members(code: Code, rows: np.ndarray) -> np.ndarray:
    """Data rows and, made of them, parity rows: bits by position."""
    parities = [galois.combine(rows, line) for line in code.coefficients]
    return np.stack([*rows.view(np.uint32), *parities])


def decoded(code: Code, members: np.ndarray, lost: tuple[int, ...]) -> list[np.ndarray]:
    known = set(range(len(members))) - set(lost)
    plan = code.plan_decode(lost, known)
    assert set(plan.sources) <= known
    assert plan.matrix.shape == (len(lost), code.data)
    sources = [members[source] for source in plan.sources]
    return [galois.combine(sources, line) for line in plan.matrix]


@pytest.mark.parametrize("parity", [1, 2, 3])
@pytest.mark.parametrize("data", range(1, 11))
def test_every_erasure_up_to_parity_is_decoded_to_the_bit(data: int, parity: int) -> None:
    rows = noise(data, 2, 5, seed=data)
    rows[0, 0, 0] = np.uint32(0x7FA12345).view(np.float32)  # a signalling NaN with a payload
    for name in ("xor", "rs") if parity == 1 else ("rs",):
        code = make_code(name, data, parity)
        members = stripe_members(code, rows)
        for count in range(1, parity + 1):
            for lost in combinations(range(data + parity), count):
                for position, found in zip(lost, decoded(code, members, lost), strict=True):
                    assert np.array_equal(found, members[position]), (lost, position)


@pytest.mark.parametrize(("data", "parity"), [(252, 4), (1, 255), (100, 20), (255, 1)])
def test_wide_stripes_are_decoded_too(data: int, parity: int) -> None:
    code = make_code("rs", data, parity)
    members = stripe_members(code, noise(data, 1, 2))
    rng = np.random.default_rng(2)
    for _ in range(3):
        lost = tuple(rng.permutation(data + parity)[:parity].tolist())
        for position, found in zip(lost, decoded(code, members, lost), strict=True):
            assert np.array_equal(found, members[position])


def test_every_set_of_sources_suffices() -> None:
    """Also where more is known than needed, and whatever is asked for."""
    code = make_code("rs", 3, 3)
    members = stripe_members(code, noise(3, 2, 2))
    for count in range(3, 7):
        for known in combinations(range(6), count):
            lost = tuple(sorted(set(range(6)) - set(known)))
            plan = code.plan_decode(lost, known)
            sources = [members[source] for source in plan.sources]
            for position, line in zip(lost, plan.matrix, strict=True):
                assert np.array_equal(galois.combine(sources, line), members[position])


def test_xor_is_a_plain_xor_and_so_is_the_first_parity_row_of_rs() -> None:
    assert (make_code("xor", 10, 1).coefficients == 1).all()
    assert (make_code("xor", 10, 1).plan_decode([4], set(range(11)) - {4}).matrix == 1).all()
    assert (make_code("rs", 10, 4).coefficients[0] == 1).all()
    assert (make_code("rs", 10, 4).coefficients[:, 0] == 1).all()


def test_coefficients_do_not_depend_on_how_many_there_are() -> None:
    """Written down: servers of another version must mean the same parity."""
    large = make_code("rs", 200, 50).coefficients
    assert np.array_equal(make_code("rs", 4, 2).coefficients, large[:2, :4])
    assert make_code("rs", 6, 3).coefficients.tolist() == COEFFICIENTS
    with pytest.raises(ValueError, match="read-only"):
        large[0, 0] = 3


COEFFICIENTS = [[1, 1, 1, 1, 1, 1], [1, 231, 253, 2, 183, 171], [1, 253, 190, 44, 150, 39]]


@pytest.mark.parametrize(("name", "parity"), [("xor", 1), ("rs", 1), ("rs", 2), ("rs", 3)])
def test_folded_differences_in_any_order_are_encoded_parity(name: str, parity: int) -> None:
    code = make_code(name, 5, parity)
    rng = np.random.default_rng(7)
    rows = noise(5, 6, 4)
    parities = stripe_members(code, rows)[5:].copy()
    waiting: list[tuple[int, int, np.ndarray]] = []
    for step in range(200):
        position, stripe = rng.integers(0, 5), rng.integers(0, 6)
        before = rows[position, stripe].copy().view(np.uint32)
        rows[position, stripe] = noise(4, seed=step)
        waiting.append((position, stripe, before ^ rows[position, stripe].view(np.uint32)))
        if step % 23 == 0 or step == 199:
            order = rng.permutation(len(waiting))
            slots = np.array([waiting[i][1] for i in order])
            positions = np.array([waiting[i][0] for i in order])
            diffs = np.stack([waiting[i][2] for i in order])
            for index in range(parity):
                galois.fold(parities[index], slots, diffs, code.coefficients[index, positions])
            waiting.clear()
            assert np.array_equal(parities, stripe_members(code, rows)[5:])


def train(name: str, steps: list[int]) -> list[float]:
    """Random walks of the rows of four servers; after so many steps each, how far a decoded server
    is from the lost one (root of the mean square)."""
    code = make_code(name, 4, 1)
    rng = np.random.default_rng(5)
    records = rng.normal(size=(4, 64, 8)).astype(np.float32)
    lists = [shard.new_waiting(64, 8, 64) for _ in range(4)]
    slots = np.arange(64)
    parities = np.zeros((64, 8), np.float32)
    for position in range(4):
        fold(code, parities, slots, records[position].copy())
    errors, done = [], 0
    for stop in steps:
        for _ in range(done, stop):
            for position in range(4):
                values = records[position] + rng.normal(size=(64, 8)).astype(np.float32) / 10
                count = shard.overwrite(records[position], slots, values, *lists[position], 0)
                take = shard.take_differences if code.is_exact else shard.take_changes
                taken, diffs, left = take(records[position], *lists[position], count)
                assert left == 0
                fold(code, parities, taken, diffs)
        done = stop
        plan = code.plan_decode([2], [0, 1, 3, 4])
        found = np.zeros((64, 8), np.float32)
        members = [*records, parities]
        # Parity first, as the subtraction reads.
        for source, factor in reversed(list(zip(plan.sources, plan.matrix[0], strict=True))):
            if code.is_exact:
                galois.fold(found, slots, members[source], np.full(64, factor, np.uint8))
            else:
                galois.add(found, slots, members[source] * np.float32(factor))
        errors.append(float(np.sqrt(np.mean((found - records[2]).astype(np.float64) ** 2))))
    return errors


def fold(code: Code, parities: np.ndarray, slots: np.ndarray, diffs: np.ndarray) -> None:
    if code.is_exact:
        galois.fold(parities, slots, diffs, np.ones(len(slots), np.uint8))
    else:
        galois.add(parities, slots, diffs.view(np.float32))


def test_the_float_sum_drifts_with_the_number_of_updates_and_xor_does_not() -> None:
    steps = [10, 100, 1000]
    assert train("xor", steps) == [0.0, 0.0, 0.0]
    few, some, many = train("sum", steps)
    assert 0 < 2 * few < 2 * some < many < 1e-2


def test_the_float_sum_subtracts_for_data_and_adds_for_parity() -> None:
    code = make_code("sum", 3, 1)
    assert code.coefficients.tolist() == [[1, 1, 1]]
    plan = code.plan_decode([1], [0, 2, 3])
    assert (plan.sources, plan.matrix.tolist()) == ((0, 2, 3), [[-1, -1, 1]])
    plan = code.plan_decode([3], [0, 1, 2])
    assert (plan.sources, plan.matrix.tolist()) == ((0, 1, 2), [[1, 1, 1]])
    assert code.coefficients.dtype == plan.matrix.dtype == np.int8


@pytest.mark.parametrize(
    ("lost", "known", "error"),
    [
        ([0, 1, 2], [3, 4, 5], DataLossError),
        ([0], [], DataLossError),
        ([0], [0, 1, 2, 3], InvalidRequestError),
        ([0, 0], [1, 2, 3, 4], InvalidRequestError),
        ([6], [0, 1, 2, 3], InvalidRequestError),
        ([-1], [0, 1, 2, 3], InvalidRequestError),
    ],
)
def test_what_cannot_be_decoded_is_refused(lost: list[int], known: list[int], error: Any) -> None:
    with pytest.raises(error):
        make_code("rs", 4, 2).plan_decode(lost, known)


@pytest.mark.parametrize(
    ("name", "data", "parity", "match"),
    [
        ("raid", 4, 1, "xor, rs, sum"),
        ("xor", 4, 2, "one parity row"),
        ("sum", 4, 2, "one parity row"),
        ("rs", 0, 1, "from 1 on"),
        ("rs", 4, 0, "from 1 on"),
        ("xor", 4, 0, "from 1 on"),
        ("rs", -4, 1, "from 1 on"),
        ("rs", 4.0, 1, "from 1 on"),
        ("rs", True, 1, "from 1 on"),
        ("rs", 255, 2, "at most 256"),
        ("xor", 256, 1, "at most 256"),
    ],
)
def test_absurd_codes_are_refused(name: str, data: Any, parity: Any, match: str) -> None:
    with pytest.raises(InvalidRequestError, match=match):
        make_code(name, data, parity)
