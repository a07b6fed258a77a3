"""Which checkpoints stay: a pure decision, taken after each commit.

Invariants:
- The newest checkpoint always stays.
- A checkpoint stays when any rule keeps it; with no rule at all, every checkpoint stays.
- A checkpoint without the metric is kept by the other rules only.

Not here: which segments and objects the kept ones need (checkpoint/format/catalog.py), deleting
(checkpoint/store/writer.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.checkpoint.format.catalog import CheckpointEntry
from holdfast.checkpoint.planning.best import Mode, check_mode, rank_by_metric
from holdfast.errors import InvalidRequestError

_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Keep:
    """Retention rules: the last n, every m-th checkpoint taken, all younger than some days, the
    best n by a metric that they were saved with."""

    last: int | None = None
    every: int | None = None
    days: float | None = None
    best: int | None = None
    metric: str | None = None
    mode: Mode = "max"

    def __post_init__(self) -> None:
        check_mode(self.mode)
        if (self.best is None) != (self.metric is None):
            raise InvalidRequestError(
                "the best checkpoints are kept by a metric",
                best=self.best,
                metric=self.metric,
                todo="pass both, as hf.Keep(best=3, metric='auc', mode='max')",
            )
        for name in ("last", "every", "days", "best"):
            value = getattr(self, name)
            is_whole = name == "days" or (isinstance(value, int) and not isinstance(value, bool))
            if value is not None and (isinstance(value, bool) or not is_whole or not value > 0):
                raise InvalidRequestError(
                    "a retention rule must be positive (all but days whole numbers)",
                    rule=name,
                    value=value,
                    todo="leave it out to switch the rule off",
                )


def as_keep(keep: Keep | int | None) -> Keep:
    """Retention rules from what a user passes: a number means the last so many."""
    if keep is None:
        return Keep()
    if isinstance(keep, Keep):
        return keep
    if isinstance(keep, int):
        return Keep(last=keep)
    raise InvalidRequestError(
        "not a retention rule",
        keep=keep,
        todo="pass a number or hf.Keep(last=, every=, days=, best=, metric=)",
    )


def choose_kept(
    checkpoints: Sequence[CheckpointEntry], keep: Keep, *, now: float
) -> frozenset[int]:
    """The steps that stay."""
    if keep.last is None and keep.every is None and keep.days is None and keep.best is None:
        return frozenset(entry.step for entry in checkpoints)
    kept = {entry.step for entry in checkpoints[-(keep.last or 1) :]}
    for entry in checkpoints:
        if keep.every is not None and entry.ordinal % keep.every == 0:
            kept.add(entry.step)
        if keep.days is not None and now - entry.time <= keep.days * _DAY_S:
            kept.add(entry.step)
    if keep.best is not None and keep.metric is not None:
        ranked = rank_by_metric(checkpoints, keep.metric, keep.mode)
        kept.update(entry.step for entry in ranked[: keep.best])
    return frozenset(kept)
