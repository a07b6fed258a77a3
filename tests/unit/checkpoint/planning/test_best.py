"""The best checkpoints by a metric: which they are, and that retention keeps them."""

from __future__ import annotations

import pytest

import holdfast as hf
from holdfast.checkpoint.format.annotations import Annotations
from holdfast.checkpoint.format.catalog import CheckpointEntry
from holdfast.checkpoint.format.object import Extent
from holdfast.checkpoint.planning.best import rank_by_metric
from holdfast.checkpoint.planning.retention import Keep, choose_kept


def entry(step: int, **metrics: float) -> CheckpointEntry:
    return CheckpointEntry(
        step=step, ordinal=step, kind="base", base=step, schema=0, time=float(step), codec="fp32",
        state_codec="", rows=1, row_bytes=1, bytes=1, full_bytes=1, stall_s=0.0, reason="",
        dense=Extent("o", 16, 1, 0), annotations=Annotations(tuple(sorted(metrics.items()))),
    )  # fmt: skip


RUN = [entry(1, auc=0.7), entry(2, auc=0.9), entry(3), entry(4, auc=0.9, loss=2), entry(5, loss=1)]


def test_the_best_come_first_and_of_equal_ones_the_newer() -> None:
    assert [e.step for e in rank_by_metric(RUN, "auc", "max")] == [4, 2, 1]
    assert [e.step for e in rank_by_metric(RUN, "auc", "min")] == [1, 4, 2]
    assert [e.step for e in rank_by_metric(RUN, "loss", "min")] == [5, 4]
    assert rank_by_metric(RUN, "other", "max") == []


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (Keep(best=1, metric="auc"), {4, 5}),  # the newest always stays
        (Keep(best=2, metric="auc"), {2, 4, 5}),
        (Keep(best=1, metric="auc", mode="min"), {1, 5}),
        (Keep(best=9, metric="auc"), {1, 2, 4, 5}),
        (Keep(best=1, metric="other"), {5}),
        (Keep(last=2, best=1, metric="auc", mode="min"), {1, 4, 5}),
        (Keep(every=3, best=1, metric="auc"), {3, 4, 5}),
    ],
)
def test_retention_keeps_the_best(keep: Keep, kept: set[int]) -> None:
    assert choose_kept(RUN, keep, now=1e9) == kept


@pytest.mark.parametrize(
    "rule",
    [{"best": 2}, {"metric": "auc"}, {"best": 0, "metric": "auc"},
     {"best": True, "metric": "auc"}, {"best": 1.5, "metric": "auc"},
     {"best": 1, "metric": "auc", "mode": "largest"}],
)  # fmt: skip
def test_half_a_rule_is_refused(rule: dict[str, object]) -> None:
    with pytest.raises(hf.InvalidRequestError):
        Keep(**rule)  # type: ignore[arg-type]
