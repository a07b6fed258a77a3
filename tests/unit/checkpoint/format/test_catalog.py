"""Catalogs: what is alive at a step, what a commit promises, what a rewind and retention leave."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from holdfast.checkpoint.format.catalog import (
    BASE,
    DELTA,
    Catalog,
    CheckpointEntry,
    GridEntry,
    SegmentEntry,
    Sharding,
)
from holdfast.checkpoint.format.checksum import as_hex, checksum
from holdfast.checkpoint.format.object import ROWS, Extent, object_name
from holdfast.checkpoint.store import catalogs
from holdfast.errors import ConflictError, CorruptDataError, NotFoundError, UnavailableError
from holdfast.model.placement import Placement
from holdfast.model.schema import Column, TableSchema
from holdfast.storage import Storage, open_storage
from tests.fault import Fault, FaultyStorage, When

SCHEMA = (TableSchema("t", 10, (Column("weight", 2),)),)


def grown(
    catalog: Catalog,
    step: int,
    kind: str,
    *,
    since: int | None = None,
    is_rollup: bool = False,
) -> Catalog:
    """The catalog with one more checkpoint of ten rows."""
    name = object_name(step, ROWS, "aa")
    last = catalog.last
    base = step if kind == BASE or last is None else last.base
    extent = Extent(name, 16, 100, step)
    entry = CheckpointEntry(
        step=step, ordinal=0 if last is None else last.ordinal + 1, kind=kind, base=base, schema=0,
        time=1.0 * step, codec="fp32", state_codec="auto", rows=10, row_bytes=100, bytes=300,
        full_bytes=80, stall_s=0.0, reason="", dense=Extent(name, 116, 20, step + 1),
    )  # fmt: skip
    segment = SegmentEntry("t", step, None, 10, 0, 9, extent)
    return catalog.with_checkpoint(
        entry, (segment,), ((name, 300),), replaces_since=since, is_rollup=is_rollup
    )


def start() -> Catalog:
    return Catalog(run="r", number=1, writer="w", schemas=(SCHEMA,))


def births(catalog: Catalog, step: int) -> list[int]:
    return [segment.born for segment in catalog.alive(step)]


def names(catalog: Catalog) -> set[str]:
    return {name for name, _ in catalog.objects}


def test_consecutive_deltas_pile_up_and_a_base_ends_them() -> None:
    catalog = grown(grown(grown(start(), 2, BASE), 4, DELTA), 6, DELTA)
    catalog = grown(catalog, 8, BASE)
    assert [births(catalog, step) for step in (2, 4, 6, 8)] == [[2], [2, 4], [2, 4, 6], [8]]
    assert [(item.step, item.row_bytes) for item in catalog.growth] == [(8, 100)]


def test_delta_since_the_base_replaces_the_deltas_before_it() -> None:
    catalog = grown(grown(grown(start(), 2, BASE), 4, DELTA, since=2), 6, DELTA, since=2)
    assert [births(catalog, step) for step in (2, 4, 6)] == [[2], [2, 4], [2, 6]]
    kept = catalog.keeping(frozenset({6}))
    assert births(kept, 6) == [2, 6]
    assert names(kept) == {object_name(2, ROWS, "aa"), object_name(6, ROWS, "aa")}


def with_rollups() -> Catalog:
    """A base at 2, rollups at 6 and 10, a base at 14, a rollup at 18; increments between."""
    catalog = start()
    for step in range(2, 21, 2):
        if step in (2, 14):
            catalog = grown(catalog, step, BASE)
            catalog = catalog.with_grid(GridEntry(step, None, step, None))
        elif step in (6, 10, 18):
            base = 2 if step < 14 else 14
            catalog = grown(catalog, step, DELTA, since=base, is_rollup=True)
        else:
            catalog = grown(catalog, step, DELTA)
    return catalog


def rollups_of(catalog: Catalog) -> list[int]:
    return [catalog.rollup_of(entry) for entry in catalog.checkpoints]


def test_a_rollup_replaces_what_was_born_since_the_base_and_begins_a_grid() -> None:
    catalog = with_rollups()
    assert [births(catalog, step) for step in catalog.steps] == [
        [2], [2, 4], [2, 6], [2, 6, 8], [2, 10], [2, 10, 12], [14], [14, 16], [14, 18],
        [14, 18, 20],
    ]  # fmt: skip
    assert rollups_of(catalog) == [2, 2, 6, 6, 10, 10, 14, 14, 18, 18]
    assert [(g.rollup, g.end) for g in catalog.grids] == [
        (2, 6), (6, 10), (10, 14), (14, 18), (18, None)
    ]  # fmt: skip
    for entry in catalog.checkpoints:
        grid = catalog.grid_of(entry)
        assert grid is not None and grid.rollup == catalog.rollup_of(entry)


def test_a_grid_belongs_to_the_steps_from_its_rollup_to_its_end() -> None:
    catalog = with_rollups()
    without = dataclasses.replace(
        catalog, grids=tuple(g for g in catalog.grids if g.rollup not in (6, 14))
    )
    found = {e.step: without.grid_of(e) for e in without.checkpoints}
    assert [step for step, grid in found.items() if grid is None] == [6, 8, 14, 16]


@pytest.mark.parametrize("step", range(2, 21, 2))
def test_going_back_forgets_later_rollups_and_opens_the_grid_again(step: int) -> None:
    catalog = with_rollups()
    back = catalog.rewound(step)
    assert rollups_of(back) == rollups_of(catalog)[: step // 2]
    assert births(back, step) == births(catalog, step)
    if step < 20:
        assert back.grids[-1].end is None
        assert all(s.died is None for s in back.alive(step))


def test_a_grid_goes_with_the_last_checkpoint_in_it() -> None:
    kept = with_rollups().keeping(frozenset({8, 16, 20}))
    assert [g.rollup for g in kept.grids] == [6, 14, 18]
    assert [births(kept, step) for step in kept.steps] == [[2, 6, 8], [14, 16], [14, 18, 20]]
    assert sorted(s.born for s in kept.segments) == [2, 6, 8, 14, 16, 18, 20]


def test_rollups_return_from_bytes() -> None:
    catalog = with_rollups()
    assert catalogs.from_bytes(catalogs.to_bytes(catalog)) == catalog


def test_retention_keeps_what_a_kept_step_needs() -> None:
    catalog = grown(grown(grown(start(), 2, BASE), 4, DELTA), 6, DELTA)
    kept = catalog.keeping(frozenset({6}))
    assert births(kept, 6) == [2, 4, 6]
    assert len(kept.objects) == 3
    after_base = grown(kept, 8, BASE).keeping(frozenset({8}))
    assert names(after_base) == {object_name(8, ROWS, "aa")}


def test_rewind_revives_what_later_steps_had_replaced() -> None:
    catalog = grown(grown(grown(start(), 2, BASE), 4, DELTA, since=2), 6, DELTA, since=2)
    catalog = grown(catalog, 8, BASE)
    back = catalog.rewound(4)
    assert back.steps == (2, 4)
    assert births(back, 4) == [2, 4]
    assert all(segment.died is None for segment in back.segments)
    assert [(item.step, item.row_bytes) for item in back.growth] == [(2, 100), (4, 100)]
    assert [(r.to, r.last) for r in back.rewinds] == [(4, 8)]
    again = grown(back, 5, DELTA, since=2)
    assert [births(again, step) for step in (2, 4, 5)] == [[2], [2, 4], [2, 5]]


def test_catalog_returns_from_bytes() -> None:
    catalog = grown(grown(grown(start(), 2, BASE), 4, DELTA, since=2), 6, DELTA, since=2)
    catalog = grown(catalog.rewound(4), 7, DELTA, since=2)
    assert catalogs.from_bytes(catalogs.to_bytes(catalog)) == catalog
    assert catalogs.to_bytes(catalog) == catalogs.to_bytes(catalog)


def test_division_among_servers_returns_from_bytes() -> None:
    for sharding in (None, Sharding(Placement(3), 7), Sharding(Placement(6, data=4, parity=2), 0)):
        catalog = dataclasses.replace(start(), sharding=sharding)
        assert catalogs.from_bytes(catalogs.to_bytes(catalog)) == catalog


@pytest.mark.parametrize(
    "lie", [
        [0, 1, 0, 5], [3, 0, 0, 5], [3, 3, 1, 5], [3, 3, 0], [3, 3, 0, -1], [3, 3, 0, 5, 5], [],
        ["3", 3, 0, 5], [3.0, 3, 0, 5], [True, 1, 0, 5], 3, {"servers": 3}, [1 << 40, 1, 0, 5],
    ],
)  # fmt: skip
def test_impossible_division_is_refused(lie: object) -> None:
    good = dataclasses.replace(start(), sharding=Sharding(Placement(3), 5))
    text = catalogs.to_bytes(good).split(b"\n")[1].decode()
    lying = text.replace('"shards":[3,3,0,5]', f'"shards":{json.dumps(lie)}').encode()
    assert lying != text.encode()
    data = f"holdfast-catalog 2 {as_hex(checksum(lying))}\n".encode() + lying + b"\n"
    with pytest.raises(CorruptDataError):
        catalogs.from_bytes(data)


def test_unknown_format_is_refused_by_number() -> None:
    data = catalogs.to_bytes(start()).replace(b"holdfast-catalog 2 ", b"holdfast-catalog 9 ", 1)
    with pytest.raises(CorruptDataError, match=r"unknown format.*9"):
        catalogs.from_bytes(data)


def test_missing_step_is_told_with_those_that_exist() -> None:
    with pytest.raises(NotFoundError, match=r"step=5 steps=\[2, 4\]"):
        grown(grown(start(), 2, BASE), 4, DELTA).checkpoint(5)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


def test_of_two_commits_of_one_number_one_wins(storage: Storage) -> None:
    mine = grown(start(), 2, BASE)
    catalogs.commit(storage, mine)
    catalogs.commit(storage, mine)  # repeated after a lost answer: still ours
    with pytest.raises(ConflictError, match="another writer"):
        catalogs.commit(storage, dataclasses.replace(mine, writer="other"))
    assert catalogs.load_last(storage) == mine


@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER])
def test_lost_answer_is_settled_by_reading_back(storage: Storage, when: When) -> None:
    faulty = FaultyStorage(storage, Fault.outage(1, when))
    if when is When.AFTER:
        catalogs.commit(faulty, start())
        assert catalogs.load_last(storage) == start()
    else:
        with pytest.raises(UnavailableError):
            catalogs.commit(faulty, start())
        assert catalogs.load_last(storage) is None


def test_catalog_under_another_number_is_refused(storage: Storage) -> None:
    storage.put_if_absent(catalogs.name_of(2), catalogs.to_bytes(start()))
    with pytest.raises(CorruptDataError, match="wrong number"):
        catalogs.load_last(storage)


@pytest.mark.parametrize("name", ["7.json", "notes.json", "00000009.json.bak", "٠٠٠٠٠٠٠٩.json"])
def test_foreign_files_beside_the_catalogs_do_not_hide_them(
    storage: Storage, tmp_path: Path, name: str
) -> None:
    catalogs.commit(storage, start())
    (tmp_path / "catalog" / name).write_bytes(b"not ours")
    assert catalogs.load_last(storage) == start()


def test_what_is_said_of_steps_to_come_can_be_forgotten() -> None:
    catalog = with_rollups()
    assert catalog.without_future() == catalog  # no writer says such things
    grids = (*catalog.grids[:-1], dataclasses.replace(catalog.grids[-1], through=99, end=100))
    alive = catalog.alive(20)[-1]
    segments = tuple(
        dataclasses.replace(s, died=50, deaths_through=40) if s is alive else s
        for s in catalog.segments
    )
    lying = dataclasses.replace(catalog, grids=grids, segments=segments)
    honest = lying.without_future()
    assert (honest.grids[-1].through, honest.grids[-1].end) == (20, None)
    assert [(s.died, s.deaths_through) for s in honest.alive(20)][-1] == (None, 20)
    assert births(honest, 20) == births(catalog, 20)
