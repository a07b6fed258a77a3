"""Optimizers on records: bit for bit against scalar NumPy, closely against torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from holdfast.kernels.servers import optimizers
from holdfast.kernels.servers.optimizers import ADAGRAD, ADAM, MOMENTUM, ROWWISE_ADAGRAD, SGD

KINDS = {
    "sgd": SGD,
    "momentum": MOMENTUM,
    "adagrad": ADAGRAD,
    "rowwise": ROWWISE_ADAGRAD,
    "adam": ADAM,
}
F = np.float32


def hypers(decay: float = 0.0) -> np.ndarray:
    return np.array([0.05, 0.9, 0.999, 1e-8, decay], np.float32)


def start(kind: int, rows: int, dim: int, *, seed: int = 1) -> np.ndarray:
    """Records with random weights and fresh state."""
    rng = np.random.default_rng(seed)
    records = np.zeros((rows, dim + optimizers.state_floats(kind, dim)), np.float32)
    records[:, :dim] = rng.normal(size=(rows, dim))
    return records


def batches(rows: int, dim: int, steps: int, *, seed: int = 2) -> list[tuple[np.ndarray, ...]]:
    """Different rows in each step, with gradients of very different sizes."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(steps):
        slots = rng.permutation(rows)[: rng.integers(1, rows + 1)]
        grads = rng.normal(size=(slots.size, dim)) * 10.0 ** rng.integers(-6, 3, (slots.size, 1))
        made.append((slots, grads.astype(np.float32)))
    return made


def scalar_step(record: list[np.float32], grad: np.ndarray, kind: int, hyper: np.ndarray) -> None:
    """The rules of the module, one float32 operation after another."""
    lr, beta1, beta2, eps, decay = hyper
    dim = len(grad)
    g = [F(grad[d] + F(decay * record[d])) if decay != 0 else F(grad[d]) for d in range(dim)]
    if kind == ROWWISE_ADAGRAD:
        sums = [F(0)] * 4
        for d in range(dim):
            lane = d % 4 if d < dim // 4 * 4 else 0
            sums[lane] = F(sums[lane] + F(g[d] * g[d]))
        total = F(F(sums[0] + sums[1]) + F(sums[2] + sums[3]))
        record[dim] = F(record[dim] + F(total / F(dim)))
        size = F(lr / F(np.sqrt(record[dim]) + eps))
        for d in range(dim):
            record[d] = F(record[d] - F(size * g[d]))
        return
    if kind == ADAM:
        record[3 * dim] = F(record[3 * dim] + F(1))
        powers = []
        for beta in (beta1, beta2):
            power, base, exponent = np.float64(1), np.float64(beta), int(record[3 * dim])
            while exponent:
                power = power * base if exponent % 2 else power
                base, exponent = base * base, exponent // 2
            powers.append(power)
        size = F(np.float64(lr) * np.sqrt(1 - powers[1]) / (1 - powers[0]))
    for d in range(dim):
        if kind == SGD:
            change = F(lr * g[d])
        elif kind == MOMENTUM:
            record[dim + d] = F(F(beta1 * record[dim + d]) + g[d])
            change = F(lr * record[dim + d])
        elif kind == ADAGRAD:
            record[dim + d] = F(record[dim + d] + F(g[d] * g[d]))
            change = F(lr * F(g[d] / F(np.sqrt(record[dim + d]) + eps)))
        else:
            m, v = record[dim + d], record[2 * dim + d]
            m = F(m + F(F(g[d] - m) * F(F(1) - beta1)))
            v = F(v + F(F(F(g[d] * g[d]) - v) * F(F(1) - beta2)))
            record[dim + d], record[2 * dim + d] = m, v
            change = F(size * F(m / F(np.sqrt(v) + eps)))
        record[d] = F(record[d] - change)


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("dim", [1, 3, 4, 7, 16, 19])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_records_are_those_of_scalar_arithmetic_to_the_bit(
    kind: int, dim: int, decay: float
) -> None:
    records = start(kind, 8, dim)
    expected = [list(row) for row in records]
    hyper = hypers(decay)
    for slots, grads in batches(8, dim, 12):
        optimizers.apply(records, slots, grads, kind, hyper)
        for slot, grad in zip(slots, grads, strict=True):
            scalar_step(expected[slot], grad, kind, hyper)
    assert np.array_equal(records.view(np.uint32), np.array(expected, np.float32).view(np.uint32))


TORCH: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda tables, h: torch.optim.SGD(tables, lr=h[0]),
    "adagrad": lambda tables, h: torch.optim.Adagrad(tables, lr=h[0], eps=h[3]),
    "adam": lambda tables, h: torch.optim.SparseAdam(tables, lr=h[0], betas=(h[1], h[2]), eps=h[3]),
}


@pytest.mark.parametrize("name", TORCH)
def test_sparse_steps_are_those_of_torch(name: str) -> None:
    """Each row is a table of its own to torch: SparseAdam counts the steps of a table."""
    dim, rows, kind = 16, 6, KINDS[name]
    records = start(kind, rows, dim)
    tables = [torch.nn.Parameter(torch.tensor(records[row : row + 1, :dim])) for row in range(rows)]
    hyper = hypers()
    optimizer = TORCH[name](tables, [float(h) for h in hyper])
    for slots, grads in batches(rows, dim, 30):
        optimizers.apply(records, slots, grads, kind, hyper)
        optimizer.zero_grad()
        for slot, grad in zip(slots, grads, strict=True):
            tables[slot].grad = torch.sparse_coo_tensor(
                torch.tensor([[0]]), torch.tensor(grad).reshape(1, dim), (1, dim)
            )
        optimizer.step()
    ours = records[:, :dim]
    theirs = torch.cat([table.detach() for table in tables]).numpy()
    np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-6)
    if name == "adagrad":
        sums = torch.cat([optimizer.state[table]["sum"] for table in tables]).numpy()
        np.testing.assert_allclose(records[:, dim:], sums, rtol=2e-6)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adagrad"])
def test_steps_with_momentum_and_decay_are_those_of_torch_on_a_row(name: str) -> None:
    dim, kind = 16, KINDS[name]
    records = start(kind, 1, dim)
    row = torch.nn.Parameter(torch.tensor(records[0, :dim]))
    hyper = hypers(0.02)
    lr, momentum, _, eps, decay = (float(h) for h in hyper)
    optimizer: torch.optim.Optimizer
    if name == "adagrad":
        optimizer = torch.optim.Adagrad([row], lr=lr, eps=eps, weight_decay=decay)
    else:
        momentum = momentum if name == "momentum" else 0.0
        optimizer = torch.optim.SGD([row], lr=lr, momentum=momentum, weight_decay=decay)
    for _, grads in batches(1, dim, 40):
        optimizers.apply(records, np.array([0]), grads, kind, hyper)
        row.grad = torch.tensor(grads[0])
        optimizer.step()
    np.testing.assert_allclose(records[0, :dim], row.detach().numpy(), rtol=1e-5, atol=1e-5)


def test_rowwise_adagrad_divides_by_the_root_of_summed_mean_squares() -> None:
    records = start(ROWWISE_ADAGRAD, 1, 20)
    weights, total = records[0, :20].astype(np.float64), 0.0
    for _, grads in batches(1, 20, 30):
        optimizers.apply(records, np.array([0]), grads, ROWWISE_ADAGRAD, hypers())
        total += np.mean(grads[0].astype(np.float64) ** 2)
        weights -= float(hypers()[0]) / (np.sqrt(total) + 1e-8) * grads[0]
    np.testing.assert_allclose(records[0, :20], weights, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(records[0, 20], total, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_rows_without_a_gradient_keep_every_bit(kind: int) -> None:
    records = start(kind, 50, 8)
    before = records.copy()
    slots = np.array([3, 17, 49])
    optimizers.apply(records, slots, np.ones((3, 8), np.float32), kind, hypers(0.1))
    changed = np.flatnonzero((records != before).any(axis=1))
    assert changed.tolist() == slots.tolist()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_slot_that_comes_twice_has_two_steps(kind: int) -> None:
    grads = np.random.default_rng(3).normal(size=(2, 8)).astype(np.float32)
    together, apart = start(kind, 2, 8), start(kind, 2, 8)
    optimizers.apply(together, np.array([1, 1]), grads, kind, hypers())
    for i in range(2):
        optimizers.apply(apart, np.array([1]), grads[i : i + 1], kind, hypers())
    assert np.array_equal(together, apart)


def test_adam_goes_on_when_its_count_of_steps_is_full() -> None:
    records = start(ADAM, 1, 4)
    records[0, 12] = 2.0**24
    optimizers.apply(records, np.array([0]), np.ones((1, 4), np.float32), ADAM, hypers())
    assert records[0, 12] == 2.0**24
    assert np.isfinite(records).all()


@pytest.mark.parametrize("bad", [-1, 10, 2**40])
def test_a_slot_outside_the_records_is_refused_before_anything_changes(bad: int) -> None:
    records = start(ADAGRAD, 10, 4)
    before = records.copy()
    with pytest.raises(IndexError, match="outside"):
        slots = np.array([1, bad])
        optimizers.apply(records, slots, np.ones((2, 4), np.float32), ADAGRAD, hypers())
    assert np.array_equal(records, before)


@pytest.mark.parametrize(
    ("kind", "width", "rows", "numbers", "match"),
    [
        (ADAGRAD, 7, 2, 5, "width"),
        (SGD, 8, 2, 5, "width"),
        (ADAM, 12, 2, 5, "width"),
        (SGD, 4, 3, 5, "one gradient"),
        (SGD, 4, 2, 4, "lr, momentum"),
        (5, 4, 2, 5, "no such kind"),
        (-1, 4, 2, 5, "no such kind"),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(
    kind: int, width: int, rows: int, numbers: int, match: str
) -> None:
    records = np.zeros((10, width), np.float32)
    with pytest.raises(ValueError, match=match):
        optimizers.apply(
            records, np.array([1, 2]), np.ones((rows, 4), np.float32), kind,
            np.ones(numbers, np.float32),
        )  # fmt: skip
    assert not records.any()


def test_an_unknown_optimizer_has_no_state() -> None:
    with pytest.raises(ValueError, match="no such kind"):
        optimizers.state_floats(5, 16)
