"""recsys/data/skew.py: how many rows an interval touches, expected and drawn."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.errors import InvalidRequestError
from holdfast.recsys.data.skew import (
    Skew,
    draw_ranks,
    expected_touched,
    quantiles,
    skew_for_touched,
)
from holdfast.recsys.models.presets import CRITEO_KAGGLE_ROWS, scaled_rows

TABLE_ROWS = scaled_rows(CRITEO_KAGGLE_ROWS, total_rows=50_000)


def drawn(skew: Skew, rows: int, draws: int) -> np.ndarray:
    bits = np.random.default_rng(7).integers(0, 2**64, size=(draws, 1), dtype=np.uint64)
    return draw_ranks(bits, quantiles(rows, skew)[None, :])[:, 0]


@pytest.mark.parametrize("skew", [Skew(0), Skew(1.0), Skew(1.3), Skew(0.9, 3.3, 0.2)])
@pytest.mark.parametrize("rows", [1, 2, 37, 5000])
def test_ranks_are_drawn_with_the_chance_of_the_law(skew: Skew, rows: int) -> None:
    draws = 200_000
    ranks = drawn(skew, rows, draws)
    assert ranks.min() >= 0
    assert ranks.max() < rows
    knee = 1 + skew.knee * rows
    edge = np.linspace(1, rows + 1, 200 * rows + 1)
    density = np.where(
        edge <= knee, edge**-skew.head, knee ** (skew.tail - skew.head) * edge**-skew.tail
    )
    piece = (density[1:] + density[:-1]) / 2
    chance = piece.reshape(rows, 200).sum(axis=1) / piece.sum()
    found = np.bincount(ranks, minlength=rows) / draws
    below = np.abs(np.cumsum(found) - np.cumsum(chance)).max()
    assert below < 0.006  # Kolmogorov-Smirnov at this many draws, with room


def test_expected_touched_equals_the_sum_over_every_rank() -> None:
    skew, rows, draws = Skew(1.1, 3.0, 0.25), 3000, 5000
    edges = np.arange(1, rows + 2, dtype=np.float64)
    knee = 1 + 0.25 * rows
    head = (np.minimum(edges, knee) ** -0.1 - 1) / -0.1
    tail = knee**1.9 * (np.maximum(edges, knee) ** -2 - knee**-2) / -2
    weight = head + tail
    chance = np.diff(weight) / weight[-1]
    exact = (1 - (1 - chance) ** draws).sum() / rows
    assert expected_touched([rows], skew, draws=draws) == pytest.approx(exact, abs=1e-4)


def test_an_interval_and_ten_touch_the_shares_check_n_run_saw() -> None:
    skew = skew_for_touched(TABLE_ROWS, batch_size=256, batches=50)
    seen = [np.zeros(rows, dtype=bool) for rows in TABLE_ROWS]
    table = np.stack([quantiles(rows, skew) for rows in TABLE_ROWS])
    rng = np.random.default_rng(3)
    shares = []
    for _ in range(10):
        bits = rng.integers(0, 2**64, size=(256 * 50, len(TABLE_ROWS)), dtype=np.uint64)
        for rows_seen, ranks in zip(seen, draw_ranks(bits, table).T, strict=True):
            rows_seen[ranks] = True
        shares.append(sum(int(s.sum()) for s in seen) / sum(TABLE_ROWS))
    assert shares[0] == pytest.approx(0.26, abs=0.02)
    assert shares[-1] == pytest.approx(0.52, abs=0.03)


def test_zipf_alone_meets_one_interval() -> None:
    skew = skew_for_touched(
        TABLE_ROWS, batch_size=256, batches=100, touched=0.2, touched_after_ten=None
    )
    assert skew.knee == 1
    assert expected_touched(TABLE_ROWS, skew, draws=25_600) == pytest.approx(0.2, abs=0.001)


def test_refuses_shares_that_cannot_be_reached() -> None:
    with pytest.raises(InvalidRequestError, match="too short") as caught:
        skew_for_touched(TABLE_ROWS, batch_size=8, batches=10)
    assert isinstance(caught.value.facts["reachable"], float)
    with pytest.raises(InvalidRequestError, match="ten intervals"):
        skew_for_touched(TABLE_ROWS, batch_size=256, batches=100, touched_after_ten=0.999)
    with pytest.raises(InvalidRequestError, match="out of order"):
        skew_for_touched(TABLE_ROWS, batch_size=256, batches=100, touched=0.6)
    with pytest.raises(InvalidRequestError, match="skew"):
        Skew(-1)
