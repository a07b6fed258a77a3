"""Sums that follow gradients, against the rows they are sums of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from holdfast.kernels.servers import optimizers, replicas
from holdfast.kernels.servers.optimizers import ADAGRAD, ADAM, MOMENTUM, ROWWISE_ADAGRAD, SGD

HYPER = np.array([0.05, 0.9, 0.999, 1e-8, 0.0], np.float32)
DIM, SUMS, DATA = 5, 4, 3


@pytest.mark.parametrize("kind", [SGD, MOMENTUM, ADAGRAD, ROWWISE_ADAGRAD, ADAM])
def test_sums_change_as_their_rows_do_and_states_are_theirs_to_the_bit(kind: int) -> None:
    rng = np.random.default_rng(kind)
    width = DIM + optimizers.state_floats(kind, DIM)
    records = np.zeros((SUMS * DATA, width), np.float32)
    records[:, :DIM] = rng.normal(size=(SUMS * DATA, DIM))
    sums = records.reshape(SUMS, DATA, width).sum(axis=1)
    states = np.zeros((SUMS * DATA, width - DIM), np.float32)
    for _ in range(20):
        rows = rng.integers(0, SUMS * DATA, rng.integers(0, 9))  # one row several times, too
        grads = rng.normal(size=(rows.size, DIM)).astype(np.float32)
        grads.flags.writeable = False
        optimizers.apply(records, rows, grads, kind, HYPER)
        slots, positions = (rows // DATA).astype(np.int32), (rows % DATA).astype(np.uint8)
        replicas.fold_gradients(sums, states, slots, positions, grads, kind, HYPER)
    assert np.array_equal(states.view(np.uint32), records[:, DIM:].view(np.uint32))
    np.testing.assert_allclose(sums, records.reshape(SUMS, DATA, width).sum(axis=1), atol=1e-4)


def test_changes_are_added_to_the_states_of_their_rows() -> None:
    sums, states = np.zeros((2, 3), np.float32), np.zeros((4, 2), np.float32)
    changes = np.array([[9, 1, 2], [9, 3, 4], [9, 5, 6]], np.float32)[:, 1:]
    replicas.add_states(sums, states, np.array([1, 0, 1]), np.array([0, 1, 0], np.uint8), changes)
    assert states.tolist() == [[0, 0], [3, 4], [6, 8], [0, 0]]
    assert not sums.any()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"slots": [2]}, IndexError),
        ({"slots": [-1]}, IndexError),
        ({"positions": [3]}, IndexError),
        ({"positions": [-1]}, IndexError),
        ({"positions": [0, 0]}, ValueError),
        ({"states": np.zeros((5, 2), np.float32)}, ValueError),
        ({"states": np.zeros((6, 1), np.float32)}, ValueError),
        ({"values": np.ones((2, 2), np.float32)}, ValueError),
        ({"sums": np.zeros((0, 4), np.float32)}, (ValueError, IndexError)),
    ],
)
def test_what_does_not_belong_together_changes_nothing(
    changes: dict[str, Any], error: type[Exception]
) -> None:
    given = {"sums": np.zeros((2, 4), np.float32), "states": np.zeros((6, 2), np.float32),
             "slots": [1], "positions": [0], "values": np.ones((1, 2), np.float32)}  # fmt: skip
    given |= changes
    args = (given["sums"], given["states"], np.array(given["slots"]), np.array(given["positions"]))
    with pytest.raises(error):
        replicas.fold_gradients(*args, given["values"], MOMENTUM, HYPER)
    with pytest.raises(error):
        replicas.add_states(*args, given["values"])
    assert not given["sums"].any() and not given["states"].any()
