"""Dense gradients: finding the rows that are not zero, beside the optimizer's own step.

A dense embedding's gradient has as many numbers as its table; training a batch leaves most of them
zero. The tracker reads them all once after each step. Both sides run on one thread, in turns.

# N rows, D floats
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.one_thread import one_thread
from benchmarks.results import AT_MOST, TIMES_LESS, Ratio, Sheet
from benchmarks.timing import median_seconds, seconds_of, step_hooks, timed_hooks
from holdfast.checkpoint.tracking import Tracker
from holdfast.checkpoint.tracking.marks import nonzero_rows
from holdfast.kernels.rows import bitmap
from holdfast.model.tables import find_tables
from holdfast.recsys import CRITEO_KAGGLE_ROWS, scaled_rows

STEP_MAX = 0.25
_BATCH_IDS = 4096  # rows of a table that one batch touches


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    rows: int  # of 16 floats; of wider rows as many as take the same memory
    repeats: int


FULL = Size(rows=1_000_000, repeats=15)
QUICK = Size(rows=4000, repeats=3)


@dataclass(frozen=True, slots=True)
class Case:
    """One optimizer over tables of one shape."""

    optimizer: str
    width: int = 16
    tables: int = 1
    note: str = ""


CASES = (
    Case("Adagrad"),
    Case("Adagrad", width=64),
    Case("Adagrad", tables=26),
    Case("Adam"),
    Case(
        "SGD",
        note="plain SGD reads the gradient once and writes the weights, so one more pass over the "
        "gradient is a large part of it, however fast the pass is",
    ),
)


@dataclass(frozen=True, slots=True)
class DenseCost:
    """Seconds of an optimizer's step, inside the tracker's hooks, and of other passes over the
    same gradients."""

    case: Case
    shape: str
    step_s: float
    hooks_s: float
    kernel_s: float
    any_s: float
    sum_s: float


class DenseTables:
    """Tables with a dense gradient of one batch, and their optimizer."""

    def __init__(self, case: Case, size: Size) -> None:
        total = size.rows * 16 // case.width
        counts = scaled_rows(CRITEO_KAGGLE_ROWS, total_rows=total) if case.tables > 1 else (total,)
        torch.manual_seed(7)
        self.model = nn.ModuleList(nn.Embedding(rows, case.width) for rows in counts)
        self.optimizer: torch.optim.Optimizer = getattr(torch.optim, case.optimizer)(
            self.model.parameters(), lr=0.01
        )
        self.tables = find_tables(self.model, [self.optimizer])
        for table in self.tables:
            ids = torch.randint(table.rows, (min(table.rows, _BATCH_IDS),))
            gradient = torch.zeros(table.rows, table.width)
            gradient[ids] = torch.randn(len(ids), table.width)
            table.parameter.grad = gradient
        self._words = [bitmap.new(table.rows) for table in self.tables]
        self.shape = f"{total:,} rows x {case.width} floats"
        self.shape += f" in {len(self.tables)} tables" if len(self.tables) > 1 else ""

    @property
    def gradients(self) -> list[torch.Tensor]:
        """The gradient of each table."""
        return [table.parameter.grad for table in self.tables if table.parameter.grad is not None]

    def mark(self) -> None:
        """Ours: the rows that are not zero, as bitmaps."""
        for gradient, words_W in zip(self.gradients, self._words, strict=True):
            nonzero_rows(gradient, words_W)

    def any(self) -> None:
        """torch's way to the same rows."""
        for gradient in self.gradients:
            gradient.any(1)

    def sum(self) -> None:
        """The physical limit: read every number once."""
        for gradient in self.gradients:
            gradient.sum()

    def seconds_in_hooks(self) -> float:
        """Seconds inside the tracker during one step."""
        tracker = Tracker(self.tables)
        try:
            self.optimizer.step()  # the first one sets the tracker up
            with timed_hooks(step_hooks()) as spent:
                self.optimizer.step()
        finally:
            tracker.close()
        return sum(spent)


def measure_dense(size: Size, cases: Sequence[Case] = CASES) -> list[DenseCost]:
    """Every case, on one thread."""
    with one_thread():
        return [_measure(case, size) for case in cases]


def _measure(case: Case, size: Size) -> DenseCost:
    tables = DenseTables(case, size)
    tables.optimizer.step()
    tables.seconds_in_hooks()
    steps: list[float] = []
    hooks: list[float] = []
    for _ in range(size.repeats):
        steps.append(seconds_of(tables.optimizer.step))
        hooks.append(tables.seconds_in_hooks())
    jobs: list[Callable[[], object]] = [tables.mark, tables.any, tables.sum]
    kernel_s, any_s, sum_s = median_seconds(jobs, repeats=size.repeats)
    return DenseCost(
        case=case,
        shape=tables.shape,
        step_s=statistics.median(steps),
        hooks_s=statistics.median(hooks),
        kernel_s=kernel_s,
        any_s=any_s,
        sum_s=sum_s,
    )


def ratios(found: Sequence[DenseCost]) -> list[Ratio]:
    """Each case beside its optimizer's step; our pass beside torch's."""
    steps = [
        Ratio(
            name=f"{cost.case.optimizer}, dense, {cost.shape}: time inside the hooks",
            ours=1e3 * cost.hooks_s,
            peer=1e3 * cost.step_s,
            against=f"{cost.case.optimizer}'s own step",
            unit="ms",
            target=STEP_MAX,
            sense=AT_MOST,
            note=cost.case.note,
        )
        for cost in found
    ]
    first = found[0]
    beside_torch = Ratio(
        name=f"rows of a dense gradient, {first.shape}",
        ours=1e3 * first.kernel_s,
        peer=1e3 * first.any_s,
        against="torch's `grad.any(1)`",
        unit="ms",
        target=1.0,
        sense=TIMES_LESS,
    )
    return [*steps, beside_torch]


def sheet(found: Sequence[DenseCost]) -> Sheet:
    """Every case with what it could be at best."""
    return Sheet(
        "Dense gradients, one thread",
        ("tables", "optimizer", "its step, ms", "tracking, ms", "part of the step",
         "our pass, ms", "grad.any(1), ms", "grad.sum(), ms"),
        tuple(
            (
                cost.shape,
                cost.case.optimizer,
                f"{1e3 * cost.step_s:.2f}",
                f"{1e3 * cost.hooks_s:.2f}",
                f"{cost.hooks_s / cost.step_s:.1%}",
                f"{1e3 * cost.kernel_s:.2f}",
                f"{1e3 * cost.any_s:.2f}",
                f"{1e3 * cost.sum_s:.2f}",
            )
            for cost in found
        ),
        note="`grad.sum()` reads every number once and keeps nothing: about the speed of memory.",
    )  # fmt: skip
