"""recsys/auc.py: the exact area, against counting all pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidRequestError
from holdfast.recsys.auc import auc


def by_all_pairs(labels: list[int], scores: list[float]) -> float:
    pairs = [
        1.0 if p > n else 0.5 if p == n else 0.0
        for p, is_positive in zip(scores, labels, strict=True)
        if is_positive
        for n, is_also_positive in zip(scores, labels, strict=True)
        if not is_also_positive
    ]
    return sum(pairs) / len(pairs)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(-3, 3)), min_size=2, max_size=40))
def test_equals_the_share_of_ordered_pairs_with_ties_half(samples: list[tuple[int, int]]) -> None:
    labels = [label for label, _ in samples]
    scores = [float(score) for _, score in samples]
    if 0 < sum(labels) < len(labels):
        assert auc(labels, scores) == pytest.approx(by_all_pairs(labels, scores))


def test_any_monotone_score_gives_the_same_area() -> None:
    rng = np.random.default_rng(0)
    labels, logits = rng.integers(0, 2, 500), rng.normal(size=500)
    assert auc(labels, logits) == auc(labels, 1 / (1 + np.exp(-logits)))


@pytest.mark.parametrize(
    ("labels", "scores"),
    [([1, 1], [0.1, 0.2]), ([0, 0], [0.1, 0.2]), ([0, 1], [0.1]), ([0, 1], [0.1, np.nan])],
)
def test_refuses_what_has_no_area(labels: list[int], scores: list[float]) -> None:
    with pytest.raises(InvalidRequestError):
        auc(labels, scores)
