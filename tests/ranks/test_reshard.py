"""What N ranks saved, M ranks load: any shards into any others, bases and deltas, to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from holdfast.checkpoint.restoring.restore import read_ids
from tests.ranks.held import LAYOUTS, Whole, assemble, expected
from tests.ranks.pool import Pool

SAVES = [2, 3, 5, 7]
STRATEGIES = ("check-n-run", "incrcp")


def check(found: Whole, step: int, *, optimizer: str = "adagrad") -> None:
    """Every float of every table, with its state, is what an undisturbed training has."""
    for table, columns in expected(step, optimizer=optimizer).items():
        for name, values in columns.items():
            assert np.array_equal(found[table][name], values), (table, name, step)


def check_written_once(run: hf.Run) -> None:
    """No two ranks wrote the same row of a checkpoint."""
    births: dict[tuple[str, int], list[int]] = {}
    for entry in run.catalog.segments:
        ids = read_ids(run.storage, entry).tolist()
        births.setdefault((entry.table, entry.born), []).extend(ids)
    for key, ids in births.items():
        assert len(ids) == len(set(ids)), key


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_ranks_saved_others_load(pool: Pool, tmp_path: Path, ranks: int, layout: str) -> None:
    url = str(tmp_path)
    strategy = STRATEGIES[(ranks + LAYOUTS.index(layout)) % 2]
    saved = pool.run("train", ranks, url=url, layout=layout, saves=SAVES, strategy=strategy)
    assert all(one["kinds"] == saved[0]["kinds"] for one in saved)
    assert saved[0]["kinds"][0] == "base" and "delta" in saved[0]["kinds"]
    check(assemble(one["held"] for one in saved), SAVES[-1])
    # Into other numbers of ranks and other layouts: over the cases all pairs of numbers come up.
    at = LAYOUTS.index(layout)
    for turn in (0, 2):
        others = 1 + (ranks + at + turn) % 4
        other = LAYOUTS[(at + turn + ranks) % len(LAYOUTS)]
        loaded = pool.run("load", others, url=url, layout=other, steps=SAVES)
        for index, step in enumerate(SAVES):
            check(assemble(one[index]["held"] for one in loaded), step)
            for one in loaded:
                assert np.array_equal(one[index]["network"], loaded[0][index]["network"])
    check_written_once(hf.open(url))
    report = hf.verify(url)
    assert report.is_sound, report.damages


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("layout", ["row", "grid"])
def test_shards_of_every_number_type_move_between_ranks(
    pool: Pool, tmp_path: Path, layout: str, dtype: str
) -> None:
    url, optimizer = str(tmp_path), f"adagrad@{dtype}"
    saved = pool.run("train", 2, url=url, layout=layout, saves=SAVES, strategy="incrcp",
                     optimizer=optimizer)  # fmt: skip
    assert "delta" in saved[0]["kinds"]
    check(assemble(one["held"] for one in saved), SAVES[-1], optimizer=optimizer)
    for others, other in ((3, "column"), (1, "replicated")):
        loaded = pool.run("load", others, url=url, layout=other, steps=SAVES, optimizer=optimizer)
        for index, step in enumerate(SAVES):
            check(assemble(one[index]["held"] for one in loaded), step, optimizer=optimizer)
    check_written_once(hf.open(url))
    assert hf.verify(url).is_sound
    assert {c.dtype for t in hf.open(url).tables(7) for c in t.columns} == {dtype}
