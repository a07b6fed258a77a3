"""Numbers for a plan, measured: how fast a machine copies, writes and reads, how a model changes.

The model trains for a while on the click stream. Rows that n steps touch grow as a power of n (few
rows are hot), so two points, half the steps and all of them, give the share of an hour.

Invariants:
- What is written is deleted again; reading does not come from the page cache where the system lets
  a file be dropped from it.

Not here: what is made of the numbers (plan/).
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from holdfast.errors import InvalidRequestError
from holdfast.recsys.clicks import ClickStream
from holdfast.recsys.layers import split_parameters
from holdfast.recsys.presets import CRITEO_KAGGLE_ROWS, PRESETS, make_model, scaled_rows

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


def measure_model(
    preset: str, *, table_bytes: int, batch: int, steps: int, seed: int = 0
) -> dict[str, Any]:
    """Rows of a model in Criteo Kaggle's proportions, and how training changes them.

    Raises:
        InvalidRequestError: an unknown preset, or too few steps.
    """
    if preset not in PRESETS:
        raise InvalidRequestError("unknown preset", preset=preset, known=list(PRESETS))
    if steps < STEPS_MIN:
        raise InvalidRequestError("too few steps to measure", steps=steps, todo="use 100 or more")
    width = PRESETS[preset].width
    rows = scaled_rows(CRITEO_KAGGLE_ROWS, total_rows=max(26, table_bytes // (4 * width)))
    torch.manual_seed(seed)
    model = make_model(preset, rows)
    tables, dense = split_parameters(model)
    optimizers = [torch.optim.SGD(tables, lr=0.1), torch.optim.SGD(dense, lr=0.01)]
    stream = ClickStream(rows, batch_size=batch, seed=seed)
    touched = [np.zeros(count, bool) for count in rows]
    shares: dict[int, float] = {}
    updated = 0
    seconds: list[float] = []
    for step in range(steps):
        data = stream[step]
        started = time.perf_counter()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(data), data.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
        seconds.append(time.perf_counter() - started)
        for is_touched, ids in zip(touched, data.ids.numpy().T, strict=True):
            unique = np.unique(ids)
            is_touched[unique] = True
            updated += len(unique)
        if step + 1 in (steps // 2, steps):
            shares[step + 1] = sum(int(t.sum()) for t in touched) / sum(rows)
    step_s = statistics.median(seconds)
    at_first, growth = _power(shares)
    return {
        "rows": sum(rows),
        "row_bytes": 4 * width,
        "dense_bytes": 4 * sum(p.numel() for p in dense),
        "changed_per_hour": min(1.0, at_first * (3600 / step_s) ** growth),
        "changed_growth": growth,
        "updates_per_s": updated / steps / step_s,
    }


def _power(shares: dict[int, float]) -> tuple[float, float]:
    """(a, g) of the curve a · n^g through two points.

    >>> _power({10: 0.2, 40: 0.4})[1]
    0.5
    """
    (n, low), (m, high) = sorted(shares.items())
    growth = min(1.0, max(0.01, math.log(high / low) / math.log(m / n)))
    return high / m**growth, growth
