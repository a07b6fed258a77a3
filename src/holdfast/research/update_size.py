"""How often rows are used against how much they change (figure 6 of CPR): may counters stand in?

The paper says "the size of the update", which can be read in three ways. All are measured, from
the first step to several moments of one training without failures:

- *moved*: the distance (L2) from a row's first values to those it has now. It is what SCAR ranks
  rows by and what a recovery loses, so it is the reading that counts;
- *walked*: the lengths of a row's changes, step by step, added up;
- *pushed*: the lengths of the gradients that every single use gave, added up.

Invariants:
- Rows that were never used belong to the tables: they are dots at (0, 0).
- Watching changes nothing: the training is that of the run without failures, to the bit.

Not here: what saving the most used rows first is worth (studies.py).

# N rows of a table, B samples of a step, U rows used in it, D floats of a row
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from holdfast.checkpoint.selecting.priority import Priority, large_tables
from holdfast.research.emulation import Job, R, start_training, train_job
from holdfast.research.studies import pearson

MOMENTS = 4  # at which is measured, each after four times as many steps as the one before

Tell = Callable[[int], None]  # so many steps are done


def _silent(step: int) -> None:
    """Nobody watches."""


@dataclass(frozen=True, slots=True)
class TableUse:
    """Correlations of use and change over all rows of one table; None where one is constant."""

    table: int
    rows: int
    used: int
    moved: float | None
    walked: float | None
    pushed: float | None


@dataclass(frozen=True, slots=True)
class Moment:
    """Correlations of use and change from the first step to this one.

    ``moved``, ``walked`` and ``pushed`` are over the rows of all tables together; ``within`` is
    the mean over the tables of each one's own ``moved``, weighted by rows. ``caught`` is how much
    the most used r·N rows moved, as a share of how much the r·N did that moved most.
    """

    step: int
    moved: float | None
    within: float | None
    walked: float | None
    pushed: float | None
    caught: float
    tables: tuple[TableUse, ...]


@dataclass(frozen=True, slots=True)
class Updates:
    """Figure 6: rows of the large tables, in ``job.steps`` without failures."""

    job: Job
    moments: tuple[Moment, ...]  # in order; the last is the end
    counts_N: np.ndarray = field(repr=False)
    changes_N: np.ndarray = field(repr=False)  # how far rows moved until the end

    figure: int = 6

    @property
    def last(self) -> Moment:
        """After all steps."""
        return self.moments[-1]


def correlate_updates(job: Job, *, seed: int = 0, tell: Tell = _silent) -> Updates:
    """Figure 6: how often rows of the large tables were used, and how much they changed."""
    training = start_training(job, seed=seed)
    rows = {str(table): count for table, count in enumerate(job.recipe.table_rows)}
    watched = [
        _Watched(int(name), training.model.get_submodule(f"tables.{name}"))
        for name in large_tables(rows, Priority(by="mfu").share)
    ]
    moments: list[Moment] = []
    when = moment_steps(job.steps)

    def after(step: int) -> None:
        for table in watched:
            table.step()
        if step in when:
            moments.append(_measure(step, watched))
        tell(step)

    train_job(job, training, after)
    return Updates(
        job,
        tuple(moments),
        np.concatenate([table.counts_N for table in watched]),
        np.concatenate([table.moved() for table in watched]),
    )


def moment_steps(steps: int) -> list[int]:
    """After which steps is measured.

    >>> moment_steps(800), moment_steps(3)
    ([12, 50, 200, 800], [3])
    """
    found = {math.floor(steps / 4**back) for back in range(MOMENTS)}
    return sorted(found - {0})


class _Watched:
    """One table in training: how often its rows are used, and what that does to them."""

    def __init__(self, table: int, module: nn.Module) -> None:
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        self.table = table
        self._now_ND = weight.detach()
        self._first_ND = self._now_ND.clone()
        rows = len(self._now_ND)
        self.counts_N, self.walked_N, self.pushed_N = (np.zeros(rows) for _ in range(3))
        self._used_U = torch.empty(0, dtype=torch.int64)
        self._before_UD = self._now_ND[:0]
        module.register_forward_hook(self._use)

    def _use(self, module: nn.Module, arguments: tuple[Any, ...], rows_BD: torch.Tensor) -> None:
        ids_B = arguments[0].detach().reshape(-1)
        np.add.at(self.counts_N, ids_B.numpy(), 1)
        self._used_U = ids_B.unique()
        self._before_UD = self._now_ND[self._used_U]

        def push(gradient_BD: torch.Tensor) -> None:
            np.add.at(self.pushed_N, ids_B.numpy(), _lengths(gradient_BD))

        rows_BD.register_hook(push)  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """The optimizer has changed the rows that were used last."""
        self.walked_N[self._used_U.numpy()] += _lengths(
            self._now_ND[self._used_U] - self._before_UD
        )

    def moved(self) -> np.ndarray:
        """How far each row is from its first values."""
        return _lengths(self._now_ND - self._first_ND)

    def use(self) -> TableUse:
        """What use and change of the rows have to do with each other."""
        return TableUse(
            self.table,
            len(self.counts_N),
            int(np.count_nonzero(self.counts_N)),
            pearson(self.counts_N, self.moved()),
            pearson(self.counts_N, self.walked_N),
            pearson(self.counts_N, self.pushed_N),
        )


def _lengths(rows_ND: torch.Tensor) -> np.ndarray:
    lengths: np.ndarray = rows_ND.detach().norm(dim=1).double().numpy()
    return lengths


def _measure(step: int, watched: Sequence[_Watched]) -> Moment:
    counts_N = np.concatenate([table.counts_N for table in watched])
    changes = [table.moved() for table in watched]
    tables = tuple(table.use() for table in watched)
    return Moment(
        step,
        pearson(counts_N, np.concatenate(changes)),
        _within(tables),
        pearson(counts_N, np.concatenate([table.walked_N for table in watched])),
        pearson(counts_N, np.concatenate([table.pushed_N for table in watched])),
        caught([table.counts_N for table in watched], changes),
        tables,
    )


def _within(tables: Sequence[TableUse]) -> float | None:
    known = [(table.moved, table.rows) for table in tables if table.moved is not None]
    if not known:
        return None
    return sum(value * rows for value, rows in known) / sum(rows for _, rows in known)


def caught(counts: Sequence[np.ndarray], changes: Sequence[np.ndarray], *, r: float = R) -> float:
    """How much the most used r·N rows of each table changed, of what r·N rows could at most.

    >>> caught([np.array([5, 1, 0, 0])], [np.array([3.0, 4.0, 0.0, 0.0])], r=0.25)
    0.75
    """
    chosen = best = 0.0
    for counts_N, changes_N in zip(counts, changes, strict=True):
        k = math.ceil(r * len(counts_N))
        chosen += float(changes_N[np.argsort(-counts_N, kind="stable")[:k]].sum())
        best += float(np.sort(changes_N)[-k:].sum())
    return chosen / best if best else 1.0
