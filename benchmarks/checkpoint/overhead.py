"""What being saved costs training: the stall of a checkpoint.

The stall of a delta beside a bare gather of the same rows: what any checkpointer must copy at
least, done by ``torch.index_select``.

Not here: what tracking costs each step (tracking.py); the background half of a save (peers.py).
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.results import AT_MOST, Ratio, Section, Sheet
from benchmarks.timing import seconds_of
from benchmarks.workload import Ids, Workload, make_workload, share, touched_ids
from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.strategy import Strategy

STALL_MAX = 1.5

ONE_SHOT_4 = Strategy("one-shot, 4 bits", base="one-shot", codec="adaptive4")


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    model_bytes: int
    saves: int


FULL = Size(model_bytes=1 << 30, saves=9)
QUICK = Size(model_bytes=1 << 20, saves=3)


def measure(*, quick: bool, folder: Path = Path()) -> Section:
    """The stall of a checkpoint."""
    size = QUICK if quick else FULL
    stall = measure_stall(size, folder)
    ratios = (
        Ratio(
            name="stall of a delta",
            ours=1e3 * stall.stall_s,
            peer=1e3 * stall.fresh_s,
            against="torch.index_select into new memory",
            unit="ms",
            target=STALL_MAX,
            sense=AT_MOST,
            note="what `tensor[ids]` costs: the outputs are allocated",
        ),
        Ratio(
            name="stall of a delta",
            ours=1e3 * stall.stall_s,
            peer=1e3 * stall.reused_s,
            against="torch.index_select into memory used before",
            unit="ms",
            target=STALL_MAX,
            sense=AT_MOST,
            note="the physical limit: ids known, outputs allocated and touched",
        ),
    )
    return Section(
        name="overhead",
        title="What being saved costs training",
        text=(
            "A checkpoint stops training while the changed rows, weights and optimizer state, are "
            "copied. Everything else happens in the background. The stall is of a model of "
            f"{stall.model_bytes / 1e9:.2f} GB (rows of 64 floats, Adagrad) with "
            f"{stall.share:.0%} of its rows changed, {stall.bytes / 1e6:.0f} MB; medians of "
            f"{size.saves} checkpoints after the first, each measured next to the two "
            "gathers. The stall includes finding the rows from the bitmaps, the check of rows that "
            "changed unseen, the plan, and copying the dense state."
        ),
        ratios=ratios,
        sheets=(_stall_sheet(stall),),
    )


def _stall_sheet(stall: StallCost) -> Sheet:
    rows = tuple(
        (name, f"{1e3 * seconds:.1f}", f"{stall.bytes / 1e9 / seconds:.2f}")
        for name, seconds in (
            ("first checkpoint: a base, every row, new memory", stall.first_s),
            ("delta, checkpoint's stall", stall.stall_s),
            ("index_select into new memory", stall.fresh_s),
            ("index_select into memory used before", stall.reused_s),
        )
    )
    first = (rows[0][0], rows[0][1], f"{stall.model_bytes / 1e9 / stall.first_s:.2f}")
    return Sheet("Stall", ("copy", "ms", "GB/s"), (first, *rows[1:]))


@dataclass(frozen=True, slots=True)
class StallCost:
    """Seconds training stands still, and what copying the same rows takes at least."""

    stall_s: float
    first_s: float
    reused_s: float
    fresh_s: float
    bytes: int
    model_bytes: int
    share: float


class BareGather:
    """The same rows of every column, gathered by torch and nothing else."""

    def __init__(self, work: Workload, ids: Ids) -> None:
        self._jobs = [
            (column, torch.from_numpy(ids_N))
            for table, ids_N in zip(work.tables, ids, strict=True)
            for column in table.tensors()
        ]
        self._outputs = [column.index_select(0, ids_N) for column, ids_N in self._jobs]

    @property
    def bytes(self) -> int:
        """What is copied."""
        return sum(output.nbytes for output in self._outputs)

    def reused(self) -> None:
        """Into outputs that exist already."""
        for (column, ids_N), output in zip(self._jobs, self._outputs, strict=True):
            torch.index_select(column, 0, ids_N, out=output)

    def fresh(self) -> None:
        """Into new outputs, all alive until the end, as a snapshot's are."""
        held = [torch.index_select(column, 0, ids_N) for column, ids_N in self._jobs]
        del held


def measure_stall(size: Size, folder: Path) -> StallCost:
    """Deltas of the same rows again and again, each next to bare gathers of these rows."""
    work = make_workload(size.model_bytes, has_row_state=True)
    ids = touched_ids([table.rows for table in work.tables], intervals=1)[0]
    gather = BareGather(work, ids)
    stalls: list[float] = []
    reused: list[float] = []
    fresh: list[float] = []
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=".bench-") as scratch,
        Checkpointer(
            scratch, model=work.model, optimizer=work.optimizer, strategy=ONE_SHOT_4, keep=1
        ) as ck,
    ):
        ck.step()
        first = ck.save().result()
        for turn in range(size.saves + 1):
            work.train(ids, seed=turn)
            ck.step()
            stats = ck.save().result()
            assert stats.staged_bytes == gather.bytes, (stats.staged_bytes, gather.bytes)
            stalls.append(stats.stall_s)
            reused.append(seconds_of(gather.reused))
            fresh.append(seconds_of(gather.fresh))
    return StallCost(
        stall_s=statistics.median(stalls[1:]),
        first_s=first.stall_s,
        reused_s=statistics.median(reused[1:]),
        fresh_s=statistics.median(fresh[1:]),
        bytes=gather.bytes,
        model_bytes=work.row_bytes,
        share=share(ids, work.rows),
    )
