"""Random Criteo lines and what they mean, parsed the slow and obvious way."""

from __future__ import annotations

import gzip
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, slots=True)
class Sample:
    """One line's meaning; codes are value + 1, or 0 where missing."""

    label: int
    integers: tuple[int | None, ...]
    categories: tuple[int | None, ...]

    @property
    def line(self) -> str:
        integers = ["" if value is None else str(value) for value in self.integers]
        categories = ["" if value is None else f"{value:08x}" for value in self.categories]
        return "\t".join([str(self.label), *integers, *categories])

    @property
    def dense(self) -> list[float]:
        return [math.log1p(max(value or 0, 0)) for value in self.integers]

    @property
    def codes(self) -> list[int]:
        return [0 if value is None else value + 1 for value in self.categories]


def make_samples(count: int, *, seed: int = 0) -> list[Sample]:
    """Lines with missing fields and negative integers; the first integer is the sample's number."""
    rng = np.random.default_rng(seed)
    return [
        Sample(
            label=int(rng.integers(2)),
            integers=(
                number,
                *(None if rng.random() < 0.3 else int(rng.integers(-3, 10**5)) for _ in range(12)),
            ),
            categories=tuple(
                None if rng.random() < 0.2 else int(rng.integers(2**32 if c % 2 else 9))
                for c in range(26)
            ),
        )
        for number in range(count)
    ]


def write(path: Path, lines: list[str], *, newline: str = "\n", last: str = "\n") -> Path:
    """A plain or (by its suffix) gzipped file of lines."""
    data = (newline.join(lines) + (last if lines else "")).encode()
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(data))
    else:
        path.write_bytes(data)
    return path
