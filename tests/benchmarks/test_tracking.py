"""The tracking section trains and saves for real, and its sides are what they are called."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from benchmarks.checkpoint import tracking_dense, tracking_modes
from benchmarks.timing import timed_hooks, timed_method
from holdfast.kernels.rows import bitmap

SECTION = "tracking"


def test_every_target_of_tracking_is_judged(section: SimpleNamespace) -> None:
    judged = {ratio.name.split(",")[0]: ratio for ratio in section.ratios if ratio.target}
    assert judged["sparse gradients: time inside the hooks"].target == 0.01
    dense = [ratio for ratio in section.ratios if ", dense, " in ratio.name]
    assert {ratio.target for ratio in dense} == {0.25}
    assert {r.against.split("'")[0] for r in dense} == {"Adagrad", "Adam", "SGD"}
    check = next(ratio for ratio in section.ratios if "looked at again" in ratio.name)
    assert check.target == 0.05
    for ratio in section.ratios:
        assert ratio.peer > 0, ratio.name
        if "less steps without" not in ratio.name:  # a difference of two times may be negative
            assert ratio.ours > 0, ratio.name


def test_modes_keep_the_memory_and_save_the_rows_that_they_should(tmp_path: Path) -> None:
    size = tracking_modes.QUICK
    found = {
        (cost.mode.tracking, cost.mode.found_by): cost
        for cost in tracking_modes.measure_modes(size, tmp_path)
    }
    assert len(found) == len(tracking_modes.MODES)
    sparse = found["auto", "sparse gradients"]
    dense = found["auto", "dense gradients"]
    assert sparse.share == dense.share  # the same batches: the same rows, however they are found
    assert 0 < sparse.share < 0.2
    assert found["auto", "rows ever trained"].share > sparse.share
    assert found["auto", "nothing: saved whole"].share == 1.0
    assert found["lookup", "sparse gradients, unchecked"].bytes_a_row < 1  # bits alone
    assert 4 < sparse.bytes_a_row < 5 and 8 < found["hash", "comparing"].bytes_a_row < 9
    assert list(tmp_path.iterdir()) == []


def test_dense_tables_have_the_gradient_of_one_batch() -> None:
    tables = tracking_dense.DenseTables(
        tracking_dense.Case("Adagrad", tables=26), tracking_dense.QUICK
    )
    assert len(tables.tables) == 26
    tables.mark()
    for gradient, words_W in zip(tables.gradients, tables._words, strict=True):
        expected = torch.nonzero(gradient.any(1)).reshape(-1).numpy()
        np.testing.assert_array_equal(bitmap.ids(words_W, 0, len(gradient)), expected)
    assert tables.seconds_in_hooks() > 0


def test_calls_are_timed_and_then_left_as_they_were() -> None:
    class Thing:
        def work(self, value: int) -> int:
            return value + 1

    before = Thing.work
    with timed_method(Thing, "work", time.perf_counter) as spent:
        assert Thing().work(1) == 2
    assert len(spent) == 1 and Thing.work is before

    hooks = {1: lambda value: value * 2}
    known = dict(hooks)
    with timed_hooks([hooks]) as inside:
        assert hooks[1](4) == 8
    assert len(inside) == 1 and hooks == known
