"""Numbers for a plan, measured: how fast a machine copies, writes and reads, how a model changes.

The model trains for a while on the click stream. Rows that n steps touch grow as a power of n (few
rows are hot), so two points, half the steps and all of them, give the share of an hour.

Invariants:
- What is written is deleted again; reading does not come from the page cache where the system lets
  a file be dropped from it.

Not here: what is made of the numbers (plan/).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.errors import InvalidRequestError
from holdfast.recsys.data.batch import Batch
from holdfast.recsys.data.skew import Skew
from holdfast.recsys.models.layers import split_parameters
from holdfast.recsys.models.presets import CRITEO_KAGGLE_ROWS, PRESETS
from holdfast.recsys.train import Plan, Reader, Recipe, make_training, train

BLOCK_BYTES = 128 << 20
REPEATS = 3
STEPS_MIN = 4


def measure_machine(folder: Path, *, block_bytes: int = BLOCK_BYTES) -> dict[str, float]:
    """Bytes a second of copies in memory, and of writing to and reading from a folder."""
    source = np.ones(block_bytes, np.uint8)
    target = np.zeros(block_bytes, np.uint8)
    copy_s = _median(lambda: np.copyto(target, source))
    with tempfile.TemporaryDirectory(dir=folder, prefix=".measure-") as scratch:
        path = Path(scratch) / "block"
        write_s = _median(lambda: _write(path, source))
        read_s = _median(lambda: _read(path, target.data))
    return {
        "copy_bytes_s": block_bytes / copy_s,
        "write_bytes_s": block_bytes / write_s,
        "read_bytes_s": block_bytes / read_s,
    }


def _median(action: Callable[[], object]) -> float:
    spent = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        action()
        spent.append(time.perf_counter() - started)
    return max(statistics.median(spent), 1e-9)


def _write(path: Path, data: np.ndarray) -> None:
    with path.open("wb", buffering=0) as file:
        file.write(data.data)
        os.fsync(file.fileno())


def _read(path: Path, into: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while into.nbytes and (count := file.readinto(into)):
            into = into[count:]


def measure_model(preset: str, *, table_bytes: int, batch: int, steps: int) -> dict[str, Any]:
    """Rows of a model in Criteo Kaggle's proportions, and how training changes them.

    Raises:
        InvalidRequestError: an unknown preset, or too few steps.
    """
    if preset not in PRESETS:
        raise InvalidRequestError("unknown preset", preset=preset, known=list(PRESETS))
    if steps < STEPS_MIN:
        raise InvalidRequestError("too few steps to measure", steps=steps, todo="use 100 or more")
    row_bytes = 4 * PRESETS[preset].width
    rows = max(len(CRITEO_KAGGLE_ROWS), table_bytes // row_bytes)
    recipe = Recipe(preset=preset, rows=rows, batch_size=batch, optimizer="sgd")
    training = make_training(Plan(recipe, Skew()), steps=steps)
    touched = _Touched(training.reader, recipe.table_rows)
    moments = [time.perf_counter()]
    train(
        dataclasses.replace(training, reader=touched),
        start=0,
        steps=steps,
        after_step=lambda: moments.append(time.perf_counter()),
        emit=lambda event: None,
    )
    step_s = statistics.median(b - a for a, b in itertools.pairwise(moments))
    at_first, growth = _power({n: touched.shares[n - 1] for n in (steps // 2, steps)})
    _, dense = split_parameters(training.model)
    return {
        "rows": sum(recipe.table_rows),
        "row_bytes": row_bytes,
        "dense_bytes": 4 * sum(p.numel() for p in dense),
        "changed_per_hour": min(1.0, at_first * (3600 / step_s) ** growth),
        "changed_growth": growth,
        "updates_per_s": touched.updates / steps / step_s,
    }


class _Touched:
    """Hands batches on, and notes the rows they look up: ``shares`` of all rows, after each."""

    def __init__(self, reader: Reader, table_rows: Sequence[int]) -> None:
        self._reader = reader
        self._is_touched = [np.zeros(rows, bool) for rows in table_rows]
        self._rows = sum(table_rows)
        self._found = 0
        self.updates = 0
        self.shares: list[float] = []

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._reader:
            for is_touched, ids in zip(self._is_touched, batch.ids.numpy().T, strict=True):
                unique = np.unique(ids)
                self.updates += len(unique)
                self._found += int(np.count_nonzero(~is_touched[unique]))
                is_touched[unique] = True
            self.shares.append(self._found / self._rows)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return self._reader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._reader.load_state_dict(state)


def _power(shares: dict[int, float]) -> tuple[float, float]:
    """(a, g) of the curve a · n^g through two points.

    >>> _power({10: 0.2, 40: 0.4})[1]
    0.5
    """
    (n, low), (m, high) = sorted(shares.items())
    growth = min(1.0, max(0.01, math.log(high / low) / math.log(m / n)))
    return high / m**growth, growth
