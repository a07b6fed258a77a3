"""Runs that lie with right checksums: verify finds it, and no way of reading hands out a wrong row.

Each lie is read in every way there is: a read of all rows, of some, into arrays, into a model, and
the three formats of export. A way either raises an error of ours or gives the rows that the
segments have, newest birth first; memory that was never written is never handed out.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import holdfast as hf
from holdfast.checkpoint.format.catalog import Catalog, Sharding
from holdfast.checkpoint.restoring.restore import restore_rows
from holdfast.interchange.dcpfolder import read_dcp, write_dcp
from holdfast.interchange.handout import hand_out
from holdfast.interchange.source import Choice
from holdfast.interchange.torchfile import write_torch
from holdfast.interchange.weightsfile import Wanted, export
from holdfast.model.placement import Placement
from holdfast.model.schema import Column, TableSchema
from tests.hostile.forger import TABLE, WIDTH, Held, forge, newest, write_catalog

ROWS = 2_000
HALF = ROWS // 2
LOW, HIGH = range(HALF), range(HALF, ROWS)


class Model(torch.nn.Module):
    """A model that such a run fits."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.items = torch.nn.Embedding(rows, WIDTH, sparse=True)
        self.bias = torch.nn.Parameter(torch.zeros(3))


def whole(path: Path, rows: int, step: int) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    """Every way to get a whole table."""
    run = hf.open(path)
    out = path.parent

    def into() -> np.ndarray:
        array_ND = np.full((rows, WIDTH), 7, np.float32)
        run.restore_into(step, {TABLE: [array_ND]})
        return array_ND

    def model() -> np.ndarray:
        made = Model(rows)
        with hf.Checkpointer(str(path), model=made, optimizer={}) as ck:
            ck.restore(step)
        return made.items.weight.detach().numpy()

    def safetensors() -> np.ndarray:
        export(run, step, out / "out.safetensors", Wanted())
        found: np.ndarray = load_file(out / "out.safetensors")[TABLE].numpy()
        return found

    def torch_file() -> np.ndarray:
        handout = hand_out(run, step, weights_only=False)
        write_torch(handout, out / "out.pt", on_table=lambda done, total: None)
        found: np.ndarray = torch.load(out / "out.pt", weights_only=True)["model"][TABLE].numpy()
        return found

    def dcp() -> np.ndarray:
        handout = hand_out(run, step, weights_only=False)
        write_dcp(handout, out / "out.dcp", on_table=lambda done, total: None)
        found: np.ndarray = read_dcp(out / "out.dcp", Choice()).model[TABLE].whole().numpy()
        return found

    yield "read", lambda: run.read(step, TABLE).weight
    yield "restore_into", into
    yield "restore", model
    yield "safetensors", safetensors
    yield "torch", torch_file
    yield "dcp", dcp


def check_refused(path: Path, rows: int, step: int, *, but: tuple[str, ...] = ()) -> None:
    """Verify names the step, and every way of getting a whole table raises an error of ours."""
    report = hf.verify(path)
    assert not report.is_sound
    assert any(step in damage.steps for damage in report.damages)
    for name, read in whole(path, rows, step):
        if name not in but:
            with pytest.raises((hf.CorruptDataError, hf.DataLossError)):
                read()
            assert not [item for item in path.parent.iterdir() if item != path], name


def check_sound(path: Path, segments: list[Held], rows: int, steps: list[int]) -> None:
    """Verify finds nothing, and every way of reading gives the same rows."""
    report = hf.verify(path)
    assert report.is_sound, report.damages
    for step in steps:
        expected = newest(segments, rows, step)
        for name, read in whole(path, rows, step):
            assert np.array_equal(read(), expected), (step, name)
        ids = np.random.default_rng(step).permutation(rows)[:30]
        assert np.array_equal(hf.open(path).read(step, TABLE, ids).weight, expected[ids])


def read_some(path: Path, step: int, rows: range) -> np.ndarray:
    found: np.ndarray = hf.open(path).read(step, TABLE, rows).weight
    return found


# Every row once.


def test_rows_that_lie_between_each_other_are_read(tmp_path: Path) -> None:
    """What honest runs have: the rows of two writers, in turns."""
    segments = [Held(1, None, range(0, ROWS, 2)), Held(1, None, range(1, ROWS, 2))]
    forge(tmp_path / "run", ROWS, segments, {1: 1})
    check_sound(tmp_path / "run", segments, ROWS, [1])


def test_two_base_segments_with_the_same_rows_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    forge(path, ROWS, [Held(1, None, LOW), Held(1, None, LOW)], {1: 1})
    check_refused(path, ROWS, 1)
    with pytest.raises(hf.DataLossError, match="nowhere"):
        read_some(path, 1, range(1_400, 1_500))


def test_two_base_segments_that_share_one_row_are_refused(tmp_path: Path) -> None:
    ids = [*range(HALF - 1, ROWS - 1)]
    forge(tmp_path / "run", ROWS, [Held(1, None, LOW), Held(1, None, ids)], {1: 1})
    check_refused(tmp_path / "run", ROWS, 1)
    with pytest.raises(hf.DataLossError, match="nowhere"):
        read_some(tmp_path / "run", 1, range(ROWS - 2, ROWS))


def test_two_segments_of_one_delta_that_share_a_row_are_refused(tmp_path: Path) -> None:
    segments = [Held(1, None, range(ROWS)), Held(2, None, [3, 9, 40]), Held(2, None, [9, 90])]
    forge(tmp_path / "run", ROWS, segments, {1: 1, 2: 1})
    check_refused(tmp_path / "run", ROWS, 2)
    with contextlib.suppress(hf.HoldfastError):
        assert (hf.open(tmp_path / "run").read(1, TABLE).weight == newest(segments, ROWS, 1)).all()


def test_rows_of_another_server_are_refused(tmp_path: Path) -> None:
    placement = Placement(2, data=1, parity=0)
    ids = [placement.rows_of(server, ROWS) for server in range(2)]
    swapped = [np.append(ids[0][:-1], ids[1][-1]), np.append(ids[1][:-1], ids[0][-1])]
    for found, is_sound in ((ids, True), (swapped, False)):
        path = tmp_path / str(is_sound) / "run"
        segments = [Held(1, None, sorted(one.tolist())) for one in found]
        catalog = forge(path, ROWS, segments, {1: 1}, sharding=Sharding(placement, 1))
        assert hf.verify(path).is_sound == is_sound
        run = hf.open(path)
        target = np.full((ROWS, WIDTH), 7, np.float32)
        if is_sound:
            restore_rows(run.storage, catalog, 1, {TABLE: [target]}, servers=[0])
            assert (target[ids[1]] == 7).all() and not (target[ids[0]] == 7).all()
        else:
            with pytest.raises(hf.CorruptDataError, match="rows of another"):
                restore_rows(run.storage, catalog, 1, {TABLE: [target]}, servers=[0])


def test_a_row_that_one_server_lacks_is_not_made_up_for_by_another(tmp_path: Path) -> None:
    """The base has the right number of rows, and who restores one server sees only its own."""
    placement = Placement(servers=2)
    ids = [np.flatnonzero(placement.servers_of(np.arange(ROWS)) == server) for server in (0, 1)]
    held = [ids[0][:-1], ids[1], ids[1][:1]]
    segments = [Held(1, None, each.tolist()) for each in held]
    path = tmp_path / "run"
    catalog = forge(path, ROWS, segments, {1: 1}, sharding=Sharding(placement, 1))
    assert not hf.verify(path).is_sound
    storage = hf.open(path).storage
    for server in (0, 1):
        target = np.full((ROWS, WIDTH), 7, np.float32)
        with pytest.raises(hf.DataLossError, match="every row"):
            restore_rows(storage, catalog, 1, {TABLE: [target]}, servers=[server])


# Lifetimes.

BASE = Held(1, None, range(100))
GRID = [BASE, Held(2, None, [5, 6, 7]), Held(3, None, [6, 50])]  # row 6 of step 2 is dead at 3
GRID_STEPS = {1: 1, 2: 1, 3: 1}


def forge_grid(path: Path, kills: dict[int, tuple[list[int], list[int]]]) -> None:
    made = {(TABLE, born): vector for born, vector in kills.items()}
    forge(path, 100, GRID, GRID_STEPS, grid=(1, 3), kills=made)


def test_deletion_vectors_that_tell_the_truth_are_read(tmp_path: Path) -> None:
    forge_grid(tmp_path / "run", {2: ([6], [3])})
    check_sound(tmp_path / "run", GRID, 100, [1, 2, 3])


@pytest.mark.parametrize(
    ("kills", "step"),
    [
        ({2: ([5, 6], [3, 3])}, 3),  # a row that lives
        ({2: ([6], [3]), 3: ([50], [3 + 1])}, 3),  # dies after the last step: void, and so sound
        ({}, 3),  # a death that is left out
        ({3: ([6], [4])}, 3),
        ({2: ([5, 6, 7], [3, 3, 3])}, 3),
    ],
    ids=["a living row", "void", "forgotten", "another version", "all rows"],
)
def test_deletion_vectors_that_lie_are_refused(
    tmp_path: Path, kills: dict[int, tuple[list[int], list[int]]], step: int
) -> None:
    forge_grid(tmp_path / "run", kills)
    if 3 in kills and 2 in kills:
        check_sound(tmp_path / "run", GRID, 100, [1, 2, 3])
    else:
        check_refused(tmp_path / "run", 100, step)


@pytest.mark.parametrize("lie", [None, "older", "newer"])
def test_deletion_vectors_of_two_grids_in_one_object_are_both_checked(
    tmp_path: Path, lie: str | None
) -> None:
    segments = [
        BASE, Held(2, 4, [5, 6, 7]), Held(3, 4, [6, 50]),
        Held(4, None, [5, 6, 7, 50]), Held(5, None, [5, 8]), Held(6, None, [8, 9]),
    ]  # fmt: skip
    older = {(TABLE, 2): ([6] if lie != "older" else [7], [3])}
    newer = {(TABLE, 5): ([8] if lie != "newer" else [5], [6])}
    forge(
        tmp_path / "run", 100, segments, dict.fromkeys(range(1, 7), 1),
        older_grids={(1, 4, 3): older}, grid=(4, 6), kills=newer,
    )  # fmt: skip
    if lie is None:
        check_sound(tmp_path / "run", segments, 100, [1, 2, 3, 4, 5, 6])
    else:
        check_refused(tmp_path / "run", 100, {"older": 3, "newer": 6}[lie])


def test_a_vector_about_a_rollup_kills_nothing(tmp_path: Path) -> None:
    """A grid's vectors are about what was born after its rollup."""
    segments = [BASE, Held(2, None, [5, 50]), Held(3, None, [5, 8]), Held(4, None, [8])]
    kills = {(TABLE, 2): ([50], [3]), (TABLE, 1): ([7], [4]), (TABLE, 3): ([8], [4])}
    steps = dict.fromkeys(range(1, 5), 1)
    forge(tmp_path / "run", 100, segments, steps, grid=(2, 4), kills=kills)
    check_sound(tmp_path / "run", segments, 100, [1, 2, 3, 4])


def test_the_wrong_one_of_two_versions_is_not_dead(tmp_path: Path) -> None:
    """Each row is found twice and placed once, the older version: still a lie."""
    segments = [BASE, Held(2, None, [6]), Held(3, None, [6, 50], deaths=[4, 5])]
    steps = {1: 1, 2: 1, 3: 1, 4: 1}
    forge(tmp_path / "run", 100, segments, steps, grid=(1, 4), kills={})
    check_refused(tmp_path / "run", 100, 4)


def test_a_row_that_goes_back_to_an_older_version_is_refused(tmp_path: Path) -> None:
    """The delta of step 3 replaces that of step 2, and lacks one of its rows."""
    segments = [BASE, Held(2, 3, [5, 6]), Held(3, None, [5])]
    forge(tmp_path / "run", 100, segments, {1: 1, 2: 1, 3: 1})
    report = hf.verify(tmp_path / "run")
    assert [damage.steps for damage in report.damages] == [(1, 2, 3)]
    assert "older version" in report.damages[0].error
    segments[-1] = Held(3, None, [5, 6])
    forge(tmp_path / "other" / "run", 100, segments, {1: 1, 2: 1, 3: 1})
    check_sound(tmp_path / "other" / "run", segments, 100, [1, 2, 3])


# What a catalog may claim.


def honest(path: Path) -> Catalog:
    return forge(path, ROWS, [Held(1, None, LOW), Held(1, None, HIGH)], {1: 1})


def wide(catalog: Catalog, width: int) -> Catalog:
    return dataclasses.replace(
        catalog, schemas=((TableSchema(TABLE, ROWS, (Column("weight", width),)),),)
    )


def decoy(catalog: Catalog, width: int) -> Catalog:
    """A narrow schema that nobody uses, and one that claims absurd rows."""
    absurd = (TableSchema(TABLE, ROWS, (Column("weight", width),)),)
    narrow = (TableSchema(TABLE, ROWS, (Column("weight", 1),)),)
    return dataclasses.replace(catalog, schemas=(absurd, narrow))


def with_checkpoint(catalog: Catalog, **changes: object) -> Catalog:
    changed = dataclasses.replace(catalog.checkpoints[0], **changes)
    return dataclasses.replace(catalog, checkpoints=(changed, *catalog.checkpoints[1:]))


def with_segment(catalog: Catalog, **changes: object) -> Catalog:
    changed = dataclasses.replace(catalog.segments[1], **changes)
    return dataclasses.replace(catalog, segments=(catalog.segments[0], changed))


def shared(catalog: Catalog, times: int) -> Catalog:
    """Many segments in one extent."""
    return dataclasses.replace(catalog, segments=catalog.segments * times)


def overlapping(catalog: Catalog) -> Catalog:
    extent = catalog.segments[1].extent
    moved = dataclasses.replace(extent, offset=extent.offset - 8)
    return with_segment(catalog, extent=moved)


def renamed(catalog: Catalog, name: str) -> Catalog:
    (_, size), *others = catalog.objects
    extents = [dataclasses.replace(s.extent, object=name) for s in catalog.segments]
    segments = [
        dataclasses.replace(s, extent=e) for s, e in zip(catalog.segments, extents, strict=True)
    ]
    return dataclasses.replace(catalog, objects=((name, size), *others), segments=tuple(segments))


CLAIMS: dict[str, Callable[[Catalog], Catalog]] = {
    "a width of 2^20": lambda c: wide(c, 1 << 20),
    "a width of 2^40": lambda c: wide(c, 1 << 40),
    "a decoy beside 2^20": lambda c: decoy(c, 1 << 20),
    "a decoy beside 2^40": lambda c: decoy(c, 1 << 40),
    "an extent shared twice": lambda c: shared(c, 2),
    "an extent shared often": lambda c: shared(c, 20_000),
    "extents that overlap": overlapping,
    "a row beyond the table": lambda c: with_segment(c, last=ROWS),
    "a segment older than its base": lambda c: with_segment(c, born=0),
    "a table of no name": lambda c: with_segment(c, table="other.weight"),
    "an object that is a catalog": lambda c: renamed(c, "catalog/00000001.json"),
    "an object outside": lambda c: renamed(c, "../objects/c00000001/rows-aa.hf"),
    "an object that is hidden": lambda c: renamed(c, ".tmp/c00000001/rows-aa.hf"),
    "a time after all time": lambda c: with_checkpoint(c, time=1e300),
    "a time before time": lambda c: with_checkpoint(c, time=-1.0),
    "a stall of less than nothing": lambda c: with_checkpoint(c, stall_s=-1.0),
    "a base that is no base": lambda c: with_checkpoint(c, base=0),
    "half a character": lambda c: with_checkpoint(c, reason="\ud800"),
    "a step beyond all": lambda c: with_checkpoint(c, step=1 << 57, base=1 << 57),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_impossible_claims_of_a_catalog_are_refused(tmp_path: Path, claim: str) -> None:
    path = tmp_path / "run"
    catalog = honest(path)
    assert hf.verify(path).is_sound
    write_catalog(path, CLAIMS[claim](catalog))
    with pytest.raises(hf.CorruptDataError):
        hf.open(path)
    report = hf.verify(path)
    assert not report.is_sound
    assert report.bytes < 4 << 20  # nothing but the catalog was read


def test_a_run_at_the_end_of_all_counts_can_be_resumed_and_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "run"
    write_catalog(path, dataclasses.replace(honest(path), restores=(1 << 56) - 1))
    for _ in range(2):
        with hf.Checkpointer(str(path), model=Model(ROWS), optimizer={}) as ck:
            assert ck.resume() == 1
        assert hf.verify(path).is_sound


def test_a_step_that_no_reader_takes_is_not_committed(tmp_path: Path) -> None:
    path, last = tmp_path / "run", (1 << 56) - 1
    forge(path, 10, [Held(last, None, range(10))], {last: last})
    with hf.Checkpointer(str(path), model=Model(10), optimizer={}, save_last=False) as ck:
        assert ck.resume() == last
        ck.step()
        with pytest.raises(hf.InvalidRequestError, match="beyond"):
            ck.save().result()
    assert hf.open(path).steps == (last,)
    assert hf.verify(path).is_sound


# What a run says of steps to come.

TO_COME = {
    "worked off": ([Held(2, None, [5, 6, 7])], (1, 50), {}),
    "vectors": ([Held(2, None, [5, 6, 7])], (1, 50), {(TABLE, 2): ([5, 6], [4, 5])}),
    "a grid's end": ([Held(2, 5, [5, 6, 7])], (1, 3), {}),
    "deaths": ([Held(2, 6, [5, 6, 7], deaths=[4, 5, 6])], (1, 3), {}),
}


@pytest.mark.parametrize("strategy", ["check-n-run", "incrcp"])
@pytest.mark.parametrize("claim", list(TO_COME))
def test_training_on_forgets_what_a_run_says_of_steps_to_come(
    tmp_path: Path, claim: str, strategy: str
) -> None:
    path = tmp_path / "run"
    segments, grid, kills = TO_COME[claim]
    forge(path, 100, [BASE, *segments], {1: 1, 2: 1, 3: 1}, grid=grid, kills=kills)
    assert hf.verify(path).is_sound
    model, expected = Model(100), {}
    with hf.Checkpointer(str(path), model=model, optimizer={}, strategy=strategy) as ck:
        assert ck.resume() == 3
        expected[3] = model.items.weight.detach().numpy().copy()
        for rows in ([50], [6, 51], [5, 50], [7], [52, 6], [53]):
            with torch.no_grad():
                model.items.weight[rows] += 1
            ck.step()
            expected[ck.save().result().step] = model.items.weight.detach().numpy().copy()
    assert hf.verify(path).is_sound
    assert sorted(expected) == [3, 4, 5, 6, 7, 8, 9]
    for step, rows_ND in expected.items():
        for name, read in whole(path, 100, step):
            assert np.array_equal(read(), rows_ND), (step, name)


def test_a_segment_that_is_alive_cannot_say_when_its_rows_die(tmp_path: Path) -> None:
    segments = [BASE, Held(2, None, [5, 6, 7], deaths=[4, 5, 6])]
    forge(tmp_path / "run", 100, segments, {1: 1, 2: 1, 3: 1}, grid=(1, 3), kills={})
    check_refused(tmp_path / "run", 100, 3)
