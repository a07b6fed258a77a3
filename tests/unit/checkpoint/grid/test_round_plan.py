"""A round's plan: what becomes of each chunk, and what the next catalog is; nothing is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.checkpoint.grid.chunk_cache import PartCache
from holdfast.checkpoint.grid.round_plan import RoundPlan, RoundPlanner, plan_round
from holdfast.checkpoint.grid.swap import RoundResult, Swap, garbage_bytes, swap_chunks
from holdfast.checkpoint.restoring import fetch
from tests.unit.checkpoint.lives import LEFT, Life

PURE = hf.Extract(threshold=0)
NOTHING = RoundResult((), {}, (), None)


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    """A base and three increments that no round has seen; the third replaces the first whole."""
    with Life(tmp_path, extract=PURE) as life:
        life.save(is_base=True)
        life.ck.wait()
        with life.ck._extractor.stopped():
            life.save([1, 2, 3])
            life.save([3, 4])
            life.save([1, 2, 3, 9])
            yield life


def planner(life: Life, plan: RoundPlan, rules: hf.Extract = PURE) -> RoundPlanner:
    return RoundPlanner(
        plan, rules, parts=fetch.PartReader(life.storage), cache=PartCache(0), vectors={}
    )


def found(life: Life) -> RoundPlan:
    plan = plan_round(life.run().catalog)
    assert plan is not None
    return plan


def test_a_round_takes_all_increments_that_wait(life: Life) -> None:
    plan = found(life)
    assert plan.births == (2, 3, 4) and plan.through == 4
    assert [entry.born for entry in plan.chunks[LEFT]] == [2, 3, 4]  # not the base


def test_no_round_where_nothing_waits(life: Life) -> None:
    plan = found(life)
    after = swap_chunks(plan.catalog, plan, NOTHING)
    assert after is not None and after.grids[0].through == 4
    assert plan_round(after) is None


def test_chunks_are_planned_by_birth_and_nothing_is_written(life: Life) -> None:
    before = list(life.storage.list("objects/"))
    making = planner(life, found(life))
    plans = list(making.chunk_plans())
    assert [None if p is None else (p.entry.born, p.outcome) for p in plans] == [
        (2, "rewritten"),  # row 3 died at 3, rows 1 and 2 at 4
        (3, "rewritten"),  # row 3 died at 4, row 4 lives
        None,  # nothing came after it
    ]
    first, second, _ = plans
    assert first is not None and first.split is not None and second is not None
    assert [(cell.died, cell.positions_N.tolist()) for cell in first.split.cells] == [
        (3, [2]), (4, [0, 1]),
    ]  # fmt: skip
    assert second.split is not None and second.split.alive_N.tolist() == [1]
    assert making.counts == {"chunks": 2, "rewritten": 2}
    assert list(life.storage.list("objects/")) == before


def test_a_chunk_that_died_at_once_is_closed(life: Life) -> None:
    life.save([3, 4, 1, 2, 9])
    last = [p for p in planner(life, found(life)).chunk_plans() if p is not None][-1]
    assert (last.entry.born, last.outcome, last.died) == (4, "closed", 5)


def test_dead_rows_that_stay_are_in_the_vectors(life: Life) -> None:
    making = planner(life, found(life), hf.Extract(threshold=1.0))
    plans = {p.entry.born: p.outcome for p in making.chunk_plans() if p is not None}
    assert plans[3] in ("by_filter", "by_ratio")
    assert making.vectors[LEFT, 3].ids_N.tolist() == [3]
    assert making.vectors[LEFT, 3].deaths_N.tolist() == [4]


def test_a_swap_keeps_what_was_saved_meanwhile(life: Life) -> None:
    plan = found(life)
    old = plan.chunks[LEFT][0]
    life.save([7])
    now = life.run().catalog
    swap = Swap(old, (dataclasses.replace(old, died=3),))
    after = swap_chunks(now, plan, dataclasses.replace(NOTHING, swaps=(swap,)))
    assert after is not None
    assert after.steps == now.steps == (1, 2, 3, 4, 5)
    assert {s.died for s in after.segments if s.extent == old.extent} == {3}
    assert after.grids[0].through == 4  # what came meanwhile waits for the next round


def test_a_swap_is_void_once_the_grid_moved_or_training_went_back(life: Life) -> None:
    plan = found(life)
    moved = swap_chunks(plan.catalog, plan, NOTHING)
    assert moved is not None and swap_chunks(moved, plan, NOTHING) is None
    assert swap_chunks(dataclasses.replace(plan.catalog, grids=()), plan, NOTHING) is None
    assert swap_chunks(plan.catalog.rewound(2), plan, NOTHING) is None


def test_garbage_is_what_no_checkpoint_reads(life: Life) -> None:
    catalog = life.run().catalog
    before = garbage_bytes(catalog)
    without = [s for s in catalog.segments if not (s.table == LEFT and s.born == 1)]
    dropped = sum(s.extent.bytes for s in catalog.segments) - sum(s.extent.bytes for s in without)
    assert garbage_bytes(dataclasses.replace(catalog, segments=tuple(without))) == before + dropped
