"""hf.attach on several ranks: a stopped trainer ends with the bits of one that was not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from tests.ranks.attached import BATCH, EPOCHS, EVERY, SAMPLES
from tests.ranks.pool import Pool

RANKS = 2
STEPS = EPOCHS * SAMPLES // BATCH // RANKS


@pytest.mark.parametrize("starts_later", [True, False])
@pytest.mark.parametrize(
    ("wraps_before", "edits"), [(False, None), (True, None), (True, 0), (True, 1)]
)
def test_a_stopped_trainer_ends_with_the_same_bits(
    pool: Pool, tmp_path: Path, wraps_before: bool, edits: int | None, starts_later: bool
) -> None:
    whole = pool.run("fit_attached", RANKS, url=str(tmp_path / "whole"), wraps_before=wraps_before)
    assert [taken for taken, _ in whole] == [STEPS] * RANKS
    url, at = str(tmp_path / "stopped"), 0
    for stop_after in (5, 4):  # in the middle of an epoch, and right behind one
        pool.run("fit_attached", RANKS, url=url, stop_after=stop_after)
        saved = (at + stop_after - 1) // EVERY * EVERY  # the last step was not counted yet
        assert hf.open(url).steps[-1] == saved
        at = saved
    ended = pool.run(
        "fit_attached", RANKS, url=url, edits=edits, starts_later=starts_later,
        wraps_before=wraps_before,
    )  # fmt: skip
    for (taken, found), (_, wanted) in zip(ended, whole, strict=True):
        assert taken == STEPS - at
        assert found.keys() == wanted.keys()
        for name, values in wanted.items():
            assert np.array_equal(found[name], values), name
