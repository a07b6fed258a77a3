"""What extraction decides: cuts that lose no version, moves that free what they copy."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.checkpoint.format.catalog import SegmentEntry
from holdfast.checkpoint.format.object import ROWS, Extent, ObjectBuilder
from holdfast.checkpoint.grid.decide import (
    GARBAGE_MAX,
    THRESHOLD_MIN,
    Split,
    as_extract,
    choose_threshold,
    plan_moves,
    plan_split,
    rows_allowed,
)
from holdfast.storage import open_storage

pure = settings(max_examples=300, deadline=None, derandomize=True)


# Cutting a chunk

BORN = 10


@st.composite
def chunks(draw: st.DrawFn) -> tuple[np.ndarray, list[int], float]:
    """Deaths of a chunk's rows, the kept checkpoints, and how many dead rows a cell may hold."""
    deaths = draw(st.lists(st.one_of(st.just(-1), st.integers(BORN + 1, 40)), min_size=1))
    kept = sorted(draw(st.sets(st.integers(1, 45), max_size=12)))
    allowed = draw(st.one_of(st.just(0.0), st.floats(0, 20)))
    return np.array(deaths, np.int64), kept, allowed


def restored(split: Split, step: int) -> list[int]:
    """The rows that a restore of a step takes from the pieces of a chunk."""
    found = split.alive_N.tolist()
    for cell in split.cells:
        if step < cell.died:
            deaths_N = cell.deaths_N
            is_alive_N = np.full(len(cell.positions_N), True) if deaths_N is None else (
                deaths_N > step
            )  # fmt: skip
            found += cell.positions_N[is_alive_N].tolist()
    return found


@given(chunks())
@pure
def test_pieces_of_a_chunk_give_every_kept_step_exactly_its_rows(
    chunk: tuple[np.ndarray, list[int], float],
) -> None:
    deaths_N, kept, allowed = chunk
    split = plan_split(deaths_N, born=BORN, kept=kept, allowed=allowed)
    for step in kept:
        if step >= BORN:
            truth = np.flatnonzero((deaths_N < 0) | (deaths_N > step)).tolist()
            assert sorted(restored(split, step)) == truth


@given(chunks())
@pure
def test_no_cell_holds_a_version_that_no_kept_step_needs(
    chunk: tuple[np.ndarray, list[int], float],
) -> None:
    deaths_N, kept, allowed = chunk
    split = plan_split(deaths_N, born=BORN, kept=kept, allowed=allowed)
    moved = [at for cell in split.cells for at in cell.positions_N.tolist()]
    assert len(moved) == len(set(moved))
    needed = [
        at
        for at, died in enumerate(deaths_N.tolist())
        if died >= 0 and any(BORN <= step < died for step in kept)
    ]
    assert sorted(moved) == needed
    assert split.alive_N.tolist() == np.flatnonzero(deaths_N < 0).tolist()


@given(chunks())
@pure
def test_cells_mix_deaths_only_as_far_as_allowed_and_as_often_as_they_may(
    chunk: tuple[np.ndarray, list[int], float],
) -> None:
    deaths_N, kept, allowed = chunk
    cells = plan_split(deaths_N, born=BORN, kept=kept, allowed=allowed).cells
    for cell in cells:
        assert (np.diff(cell.positions_N) > 0).all()
        assert cell.died > BORN
        if cell.deaths_N is None:
            continue
        assert len(cell.deaths_N) == len(cell.positions_N)
        assert int(cell.deaths_N.max()) == cell.died
        assert len(np.unique(cell.deaths_N)) > 1
        assert (cell.deaths_N < cell.died).sum() <= allowed
    for cell, later in itertools.pairwise(cells):
        first = later.died if later.deaths_N is None else int(later.deaths_N.min())
        assert cell.died < first
        assert len(cell.positions_N) > allowed
    if allowed == 0:
        assert all(cell.deaths_N is None for cell in cells)


def test_deaths_that_no_kept_step_can_tell_apart_share_a_cell() -> None:
    deaths = np.array([20, 30, 40, 50, 60])
    cells = plan_split(deaths, born=10, kept=[10, 45, 60], allowed=0).cells
    assert [(c.died, c.positions_N.tolist(), c.deaths_N) for c in cells] == [
        (45, [0, 1, 2], None),
        (60, [3, 4], None),
    ]


def test_chunk_whose_rows_all_died_unseen_leaves_nothing() -> None:
    split = plan_split(np.array([20, 30]), born=10, kept=[5, 40], allowed=0)
    assert not len(split.alive_N) and split.cells == ()


# The threshold


@given(st.floats(0, 1e15), st.floats(0, 1e15))
@pure
def test_larger_updates_deserve_a_smaller_threshold(one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert THRESHOLD_MIN <= choose_threshold(large) <= choose_threshold(small) <= 1


@given(st.floats(0, 1), st.integers(1, 10**9), st.integers(1, 10**9))
@pure
def test_allowance_is_half_the_threshold_of_the_larger_of_chunk_and_update(
    threshold: float, rows: int, update: int
) -> None:
    allowed = rows_allowed(threshold, rows, update)
    assert allowed == rows_allowed(threshold, update, rows)
    assert 0 <= allowed <= max(rows, update) / 2
    assert math.isclose(allowed, threshold * max(rows, update) / 2, abs_tol=1e-12)
    assert rows_allowed(0, rows, update) == 0


@pytest.mark.parametrize("r", [-0.1, 1.1, float("nan"), float("inf"), True, "0.1", [0.1]])
def test_threshold_outside_zero_to_one_is_refused(r: Any) -> None:
    with pytest.raises(hf.InvalidRequestError, match="share of rows"):
        hf.Extract(threshold=r)
    with pytest.raises(hf.InvalidRequestError):
        as_extract(r)


@pytest.mark.parametrize("r", [0, 0.0, 0.02, 1, 1.0])
def test_a_number_is_the_threshold(r: float) -> None:
    assert as_extract(r) == hf.Extract(threshold=r)
    rules = hf.Extract(by_filter=False)
    assert as_extract(rules) is rules


@pytest.mark.parametrize("base", ["full", "one-shot", "intermittent"])
def test_a_grid_of_anything_but_increments_is_refused(base: str) -> None:
    with pytest.raises(hf.InvalidRequestError, match="increments"):
        hf.Strategy("mine", base=base, codec="fp32", extract=hf.Extract())


# Moving out of garbage


def real_objects(
    folder: Path, contents: dict[str, list[tuple[str, int]]]
) -> tuple[dict[str, int], dict[tuple[str, int], SegmentEntry]]:
    """Objects as they are really written: sizes, and the segment at each place."""
    storage = open_storage(str(folder))
    sizes, entries = {}, {}
    for name, segments in contents.items():
        builder = ObjectBuilder(name, storage.create(name))
        for index, (table, size) in enumerate(segments):
            extent = builder.append(ROWS, table, (bytes(size),), 1 << 60)
            entries[name, index] = SegmentEntry(table, 5, None, 1, 0, 0, extent)
        sizes[name] = builder.close()
    return sizes, entries


def test_objects_in_which_everything_lives_are_never_copied(tmp_path: Path) -> None:
    contents = {
        f"objects/c{i:08d}/live-{i}.hf": [("a table", 1 + 13 * j) for j in range(i + 1)]
        for i in range(12)
    }
    sizes, entries = real_objects(tmp_path, contents)
    assert plan_moves(sizes, list(entries.values())) == []
    assert plan_moves(sizes, list(entries.values()), garbage_max=0) == []


def test_object_with_a_dead_segment_is_emptied(tmp_path: Path) -> None:
    names = {"objects/c00000001/live-a.hf": 1, "objects/c00000001/live-b.hf": 1}
    sizes, entries = real_objects(tmp_path, {n: [("t", 400), ("t", 600)] for n in names})
    first, second = names
    living = [entries[first, 0], entries[second, 0], entries[second, 1]]
    assert plan_moves(sizes, living) == [entries[first, 0]]
    assert plan_moves(sizes, living, pinned={first}) == []
    assert plan_moves(sizes, living, garbage_max=0.5) == []


@st.composite
def stores(draw: st.DrawFn) -> tuple[dict[str, int], list[SegmentEntry], set[str]]:
    sizes: dict[str, int] = {}
    living: list[SegmentEntry] = []
    for index in range(draw(st.integers(1, 8))):
        name, at = f"o{index}", 16
        for size in draw(st.lists(st.integers(64, 10_000), min_size=1, max_size=6)):
            if draw(st.booleans()):
                extent = Extent(name, at, size, 7)
                living.append(SegmentEntry("t", 3, None, 1, 0, 0, extent))
            at += size
        sizes[name] = at + 1000  # more than any footer
    pinned = {name for name in sizes if draw(st.integers(0, 5)) == 0}
    return sizes, living, pinned


@given(stores())
@pure
def test_moves_bring_garbage_under_its_limit_or_take_all_there_is(
    store: tuple[dict[str, int], list[SegmentEntry], set[str]],
) -> None:
    sizes, living, pinned = store
    moves = plan_moves(sizes, living, pinned=pinned)
    emptied = {segment.extent.object for segment in moves}
    assert not emptied & pinned
    assert [s for s in living if s.extent.object in emptied] == moves

    def garbage_without(gone: set[str]) -> int:
        held = {s.extent.object for s in living} - gone
        return sum(sizes[o] for o in held) - sum(
            s.extent.bytes for s in living if s.extent.object in held
        )

    slack = 1000 * len(sizes)  # footers and heads are no garbage
    limit = GARBAGE_MAX * sum(sizes.values())
    may_move = {s.extent.object for s in living} - pinned
    assert garbage_without(emptied) <= limit + slack or emptied == may_move
    if garbage_without(set()) <= limit:
        assert not moves
