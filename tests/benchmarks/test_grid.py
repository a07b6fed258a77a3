"""The stores that are compared hold the same training, and what is counted of them is so."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from benchmarks.grid import growth, study
from benchmarks.grid.every_step import (
    QUICK_SIZE,
    count_dead,
    count_overwritten,
    first_reset,
    spread,
)
from benchmarks.grid.restore import Bare, Reader, restore_all
from benchmarks.grid.train import (
    DIFFERENTIAL,
    GRID,
    NAIVE,
    STRATEGIES,
    Size,
    Training,
    Watched,
    peak_bytes,
    reset_peak,
    store_of,
    turn,
    watch,
)
from holdfast.checkpoint.grid.decide import Extract
from holdfast.checkpoint.planning import bases
from holdfast.checkpoint.run import Run
from holdfast.checkpoint.run import open as open_run

SIZE = dataclasses.replace(QUICK_SIZE, is_whole=False, checkpoints=7)
PURE = "R = 0"


@pytest.fixture(scope="module")
def stores(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Training, Watched, dict[str, Run]]]:
    """One training run, watched by every strategy and by a grid with R = 0."""
    folder = tmp_path_factory.mktemp("stores")
    strategies = {
        **STRATEGIES,
        PURE: dataclasses.replace(STRATEGIES[GRID], extract=Extract(threshold=0.0)),
    }
    training = Training(SIZE)
    settings = {name: {"strategy": strategy} for name, strategy in strategies.items()}
    with pytest.MonkeyPatch.context() as patch:
        # So small a model changes wholly: rollups would leave nothing to extract.
        patch.setattr(bases, "ROLLUP_PAYS_AT", 1.0)
        watched = watch(training, settings, folder, is_beside=True, check_every=1)
    yield training, watched, {name: open_run(store_of(folder, name)) for name in strategies}


def _rows_by_table(training: Training) -> list[np.ndarray]:
    return [column.copy() for columns in training.targets().values() for column in columns]


@pytest.mark.parametrize("kind", ["dlrm", "deepfm", "pnn"])
def test_training_without_the_network_changes_the_rows_of_the_batches_and_no_others(kind) -> None:  # type: ignore[no-untyped-def]
    size = dataclasses.replace(SIZE, kind=kind)
    touched, whole = Training(size), Training(dataclasses.replace(size, is_whole=True))
    changed = []
    for training in (touched, whole):
        before = _rows_by_table(training)
        training.interval(2)
        changed.append([
            np.flatnonzero((now != old).any(axis=1))
            for now, old in zip(_rows_by_table(training), before, strict=True)
        ])  # fmt: skip
    assert sum(map(len, changed[0])) > 0
    for without, with_ in zip(*changed, strict=True):
        # Learning for real may leave a row as it is: its gradient can round to nothing.
        assert np.isin(with_, without).all()
        assert len(with_) >= 0.9 * len(without)


def test_everybody_is_first_and_last_equally_often() -> None:
    orders = [turn("abc", index) for index in range(6)]
    assert len(set(map(tuple, orders))) == 6
    assert [sum(order[0] == name for order in orders) for name in "abc"] == [2, 2, 2]


def test_spread_has_the_last_and_never_more_than_there_are() -> None:
    assert spread([3, 5], 6) == [3, 5]
    assert spread(list(range(1, 151)), 6) == [25, 50, 75, 100, 125, 150]


def test_strategies_saved_the_same_rows_at_the_same_steps(
    stores: tuple[Training, Watched, dict[str, Run]],
) -> None:
    _, watched, _ = stores
    saves = {name: tally.saves for name, tally in watched.tallies.items()}
    assert [(s.step, s.rows) for s in saves[GRID]] == [(s.step, s.rows) for s in saves[PURE]]
    assert watched.tallies[GRID].rollups and watched.tallies[NAIVE].rollups
    for differential, naive, grid in zip(*(saves[n] for n in STRATEGIES), strict=True):
        assert differential.step == naive.step == grid.step
        assert naive.kind == grid.kind
        if naive.is_rollup == grid.is_rollup:
            assert naive.rows == grid.rows
        if not grid.is_rollup:
            assert differential.rows >= grid.rows


def test_every_store_restores_every_step_as_trained(
    stores: tuple[Training, Watched, dict[str, Run]],
) -> None:
    training, watched, runs = stores
    steps = runs[GRID].steps
    assert sorted(watched.checksums) == list(steps) and len(set(watched.checksums.values())) == 7
    seen: list[int] = []
    found = restore_all(
        runs, training.targets(), steps, checksums=watched.checksums, after=seen.append
    )
    assert seen == list(steps)
    for name, many in found.items():
        assert [one.step for one in many] == list(steps), name
        assert many[0].segments == many[0].changed_bytes == 0, name
        for one in many[1:]:
            assert one.whole_s > one.base_s > 0
            assert one.bytes > one.changed_bytes > 0
            assert one.objects <= one.segments
    assert all(one.masked_rows == 0 for one in found[PURE])
    assert any(one.masked_rows for one in found[GRID])
    # Nothing dead: as many rows as the differential holds, while both lie over the same base, and
    # those of a rollup that were changed again.
    kinds = [stats.kind for stats in watched.tallies[DIFFERENTIAL].saves]
    for kind, pure, other in zip(kinds[1:], found[PURE][1:], found[DIFFERENTIAL][1:], strict=True):
        if kind == "base":
            break
        again, rows = count_overwritten(runs[PURE], pure.step)
        assert pure.changed_rows == other.changed_rows + again
        assert again <= rows == pure.rollup_rows


def test_a_store_that_gives_other_values_is_found_out(
    stores: tuple[Training, Watched, dict[str, Run]],
) -> None:
    training, watched, runs = stores
    step = runs[GRID].steps[-1]
    wrong = {step: watched.checksums[step] ^ 1}
    with pytest.raises(AssertionError, match="other values"):
        restore_all({GRID: runs[GRID]}, training.targets(), [step], checksums=wrong)


def test_dead_rows_stay_below_what_the_threshold_allows(
    stores: tuple[Training, Watched, dict[str, Run]],
) -> None:
    training, _, runs = stores
    found = restore_all(runs, training.targets(), runs[GRID].steps, checksums={})
    dead = count_dead(runs[GRID].catalog, runs[NAIVE].catalog, found[GRID])
    above = {one.step: one for one in found[GRID] if one.grid_rows}
    assert [one.step for one in dead] == list(above)
    assert 1 < len(above) < len(runs[GRID].steps) - 1  # nothing lies above a rollup at its own step
    for one in dead:
        restored = above[one.step]
        assert one.rows == restored.masked_rows <= one.allowed
        assert one.share == pytest.approx(one.rows / restored.grid_rows)


def test_the_bare_peer_moves_the_rows_a_restore_moves(
    stores: tuple[Training, Watched, dict[str, Run]],
) -> None:
    """With R = 0 no row is dead, so bare copies in any order give the very same tables."""
    training, watched, runs = stores
    targets, run = training.targets(), runs[PURE]
    step = run.steps[-2]
    layers = Reader(run, targets).layers(step)
    assert all(layers)
    bares = [Bare(run, targets, step, segments) for segments in layers]
    for columns in targets.values():
        columns[0][:] = -1.0
    with ThreadPoolExecutor(2) as pool:
        for bare, segments in zip(bares, layers, strict=True):
            assert bare.bytes >= sum(s.extent.bytes for s in segments)
            bare.run(pool)
    assert training.checksum() == watched.checksums[step]


def test_extraction_is_tallied_alone_and_beside_training(
    stores: tuple[Training, Watched, dict[str, Run]],
) -> None:
    _, watched, runs = stores
    tally = watched.tallies[GRID]
    assert tally.alone and tally.beside and tally.backlogs and not tally.failures
    assert tally.waiting == 0
    assert len(tally.kept) == len(tally.saves) == SIZE.checkpoints
    on_disk = sum(path.stat().st_size for path in Path(runs[GRID].url).rglob("*") if path.is_file())
    assert tally.kept[-1] == on_disk
    assert not watched.tallies[NAIVE].rounds


def test_a_base_is_due_when_restores_take_longer_than_building_one(
    stores: tuple[Training, Watched, dict[str, Run]],
) -> None:
    training, _, runs = stores
    catalog = runs[GRID].catalog
    slow = dataclasses.replace(catalog.growth[0], build_s=1e6)
    patient = dataclasses.replace(catalog, growth=(slow, *catalog.growth[1:]))
    fast = dataclasses.replace(catalog.growth[0], build_s=1e-6)
    hasty = dataclasses.replace(catalog, growth=(fast, *catalog.growth[1:]))
    found = restore_all({GRID: runs[GRID]}, training.targets(), catalog.steps, checksums={})[GRID]
    assert first_reset(patient, found) is None
    assert first_reset(hasty, found) in catalog.steps[1:]


def test_peak_memory_is_that_since_the_reset() -> None:
    before = reset_peak()
    if before is None:
        pytest.skip("this system does not tell a process's peak")
    with mmap.mmap(-1, 64 << 20) as block:  # not from memory that the process has already
        block.write(bytes(64 << 20))
    peak = peak_bytes()
    assert peak is not None and peak >= before + (48 << 20)
    again = reset_peak()
    assert again is not None and again < peak


def test_rules_that_are_the_same_run_once(tmp_path: Path) -> None:
    rules = {"one": Extract(), "other": Extract(), "pure": Extract(threshold=0.0)}
    size = dataclasses.replace(study.QUICK, checkpoints=3)
    found = study.run_settings(size, rules, tmp_path)
    assert found["one"] is found["other"] is not found["pure"]
    assert found["pure"].chunks >= found["one"].chunks > 0
    assert not list(tmp_path.iterdir())


def test_a_long_run_is_weighed_as_it_grows(tmp_path: Path) -> None:
    points = growth.run_long(growth.QUICK, Extract(threshold=0.0), tmp_path)
    assert [point.checkpoints for point in points] == [2, 4, 6, 8]
    for field in ("segments", "catalog_bytes", "objects"):
        values = [getattr(point, field) for point in points]
        assert values == sorted(values) and values[0] > 0, field
    assert all(point.commit_s > 0 and point.round_s > 0 for point in points)
    assert not list(tmp_path.iterdir())


def test_size_is_what_was_asked_for() -> None:
    training = Training(Size(table_bytes=1 << 17, checkpoints=1, preset="small", tables=4))
    assert len(training.tables) == 4 and training.row_bytes == 1 << 17
