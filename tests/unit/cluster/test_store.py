"""A server's rows as segments and back; which rows changed; work in a thread of its own."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint.format.catalog import BASE, DELTA, Catalog, CheckpointEntry
from holdfast.checkpoint.format.codec import parse_codec
from holdfast.checkpoint.format.object import Extent
from holdfast.checkpoint.format.stored_rows import entry_from_json, entry_to_json
from holdfast.checkpoint.store import catalogs
from holdfast.cluster import store
from holdfast.cluster.changes import SINCE_BASE, Changes, SnapshotOrder
from holdfast.cluster.keeper import Job
from holdfast.cluster.pushes import Gradients
from holdfast.cluster.shard import Copied, Shard
from holdfast.cluster.spec import ClusterSpec, Optimizer, TableSpec
from holdfast.errors import (
    ConflictError,
    CorruptDataError,
    DataLossError,
    HoldfastError,
    InvalidRequestError,
)
from holdfast.model.placement import Placement
from holdfast.storage.folder.objects import FolderStorage

MODULES = (
    "format.catalog", "format.segment", "store.catalogs", "store.append", "restoring.restore"
)  # fmt: skip


@pytest.mark.parametrize(
    "module",
    [*(f"holdfast.checkpoint.{name}" for name in MODULES), "holdfast.cluster.server"],
)
def test_what_a_server_imports_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# Which rows changed.


def order(
    step: int, committed: int | None, *, kind: str = DELTA, since: str = "last"
) -> SnapshotOrder:
    return SnapshotOrder(step, kind, None if kind == BASE else since, committed)


def slots(found: np.ndarray | None) -> list[int] | str:
    return "all" if found is None else found.tolist()


def test_a_delta_holds_what_changed_since_the_last_committed_checkpoint() -> None:
    changes = Changes(100)
    assert slots(changes.claim(order(0, None, kind=BASE))) == "all"
    changes.mark(np.array([3, 70]))
    assert slots(changes.claim(order(1, 0))) == [3, 70]
    changes.mark(np.array([5]))
    assert slots(changes.claim(order(2, 1))) == [5]
    assert slots(changes.claim(order(3, 2))) == []


def test_what_a_checkpoint_claimed_that_was_given_up_is_in_the_next() -> None:
    changes = Changes(100)
    changes.claim(order(0, None, kind=BASE))
    changes.mark(np.array([3]))
    changes.claim(order(1, 0))  # never committed
    changes.mark(np.array([5]))
    assert slots(changes.claim(order(2, 0))) == [3, 5]
    assert slots(changes.claim(order(3, 2))) == []


def test_a_delta_since_the_base_holds_what_all_before_it_held() -> None:
    changes = Changes(100)
    changes.claim(order(0, None, kind=BASE))
    for step, slot in ((1, 8), (2, 9)):
        changes.mark(np.array([slot]))
        changes.claim(order(step, step - 1, since=SINCE_BASE))
    assert slots(changes.claim(order(3, 2, since=SINCE_BASE))) == [8, 9]
    changes.claim(order(4, 3, kind=BASE))
    assert slots(changes.claim(order(5, 4, since=SINCE_BASE))) == []


def test_a_base_that_was_given_up_leaves_the_changes_since_the_one_before() -> None:
    changes = Changes(100)
    changes.claim(order(0, None, kind=BASE))
    changes.mark(np.array([8]))
    changes.claim(order(1, 0, since=SINCE_BASE))
    changes.mark(np.array([9]))
    changes.claim(order(2, 1, kind=BASE))  # never committed
    assert slots(changes.claim(order(3, 1, since=SINCE_BASE))) == [8, 9]


def test_a_server_that_knows_nothing_saves_all_its_rows_until_that_is_committed() -> None:
    changes = Changes(70)
    changes.mark(np.array([1]))
    assert slots(changes.claim(order(5, 4))) == "all"
    assert slots(changes.claim(order(6, 4))) == list(range(70))
    assert slots(changes.claim(order(7, 6))) == []


def test_loaded_rows_have_not_changed_since_the_last_checkpoint_but_since_the_base() -> None:
    changes = Changes(10)
    changes.begin()
    changes.mark_saved(np.array([4]))
    changes.mark(np.array([7]))
    assert slots(changes.claim(order(9, 8))) == [7]
    assert slots(changes.claim(order(10, 9, since=SINCE_BASE))) == [4, 7]


# Rows out and in.


def make_spec(optimizer: str = "adam") -> ClusterSpec:
    how = Optimizer(optimizer, lr=0.5)
    placed = Placement(3, data=2, parity=1)
    return ClusterSpec(
        (
            TableSpec("users", 50, 4, placed, "xor", how, seed=1, bound=0.5),
            TableSpec("held", 7, 2, Placement(3), "none", how, is_held=True),
        )
    )


@dataclasses.dataclass
class Run:
    """A run that servers stored, as the driver would commit it."""

    spec: ClusterSpec
    url: Path
    catalog: Catalog
    shards: list[Shard]

    @property
    def storage(self) -> FolderStorage:
        return FolderStorage(str(self.url))

    def add(self, step: int, kind: str, codec: str = "fp32", **changed: int) -> None:
        """One more checkpoint; of the servers alone that have rows."""
        committed = self.catalog.last.step if self.catalog.last else None
        schemas = tuple(store.schema_of(table) for table in self.spec.tables)
        codecs = {t.name: [parse_codec(codec)] * len(t.columns) for t in schemas}
        segments, objects = [], []
        for shard in self.shards:
            copied, _ = shard.snapshot(SnapshotOrder(step, kind, None, committed))
            name = f"objects/c{step + 1:08d}/rows-{shard.server}.hf"
            stored = store.store(
                copied, self.spec, storage=self.storage, name=name, step=step, codecs=codecs
            )
            if stored.segments:
                objects.append((name, stored.bytes))
            segments += stored.segments
        entry = CheckpointEntry(
            step, 0, kind, step if kind == BASE else self.catalog.last.base, 0, 0.0, codec, codec,
            1, 1, 1, 1, 0.0, "", Extent(objects[0][0], 16, 0, 0)
        )  # fmt: skip
        catalog = dataclasses.replace(self.catalog, schemas=(schemas,), number=step + 1)
        self.catalog = catalog.with_checkpoint(
            entry, tuple(segments), tuple(objects), replaces_since=None
        )
        catalogs.commit(self.storage, self.catalog)

    def loading(self, step: int, **changed: object) -> store.Loading:
        place = store.Place(str(self.url), {})
        found = store.Loading(place, self.catalog.number, step, is_apart=True, wants_held=True)
        return dataclasses.replace(found, **changed)  # type: ignore[arg-type]

    def push(self, number: int) -> None:
        for shard in self.shards:
            table = shard.arenas[0]
            picked_N = np.arange(number % 2, len(table.ids_M), 2)
            grads_ND = np.full((len(picked_N), 4), number + 1, np.float32)
            shard.push(0, number, [Gradients(0, picked_N, grads_ND)])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    spec = dataclasses.replace(make_spec(), waiting_rows=1000)
    shards = [Shard(spec, server, epoch=1) for server in range(3)]
    for shard in shards:
        shard.begin()
    return Run(spec, tmp_path, Catalog("run", 0, "me"), shards)


def test_a_shard_is_loaded_as_it_was_saved_to_the_bit(run: Run) -> None:
    run.add(0, BASE)
    run.push(0)
    run.add(1, DELTA)
    saved = [[table.records_MW.copy() for table in shard.arenas] for shard in run.shards]
    run.push(1)
    for server, records in enumerate(saved):
        shard = Shard(run.spec, server, epoch=1)
        loaded = store.load(shard, run.loading(1))
        assert loaded.rows == sum(len(table.ids_M) for table in shard.arenas)
        assert sum(table.rows_missing for table in shard.arenas) == 0
        for table, expected_MW in zip(shard.arenas, records, strict=True):
            np.testing.assert_array_equal(table.records_MW, expected_MW)


def test_only_changed_rows_are_stored_in_a_delta_and_none_where_nothing_changed(run: Run) -> None:
    run.add(0, BASE)
    run.push(0)
    run.add(1, DELTA)
    born = [segment for segment in run.catalog.segments if segment.born == 1]
    assert sum(segment.rows for segment in born) == sum(
        -(-len(shard.arenas[0].ids_M) // 2) for shard in run.shards
    )
    stored = store.store([], run.spec, storage=run.storage, name="objects/c1/x.hf", step=2,
                         codecs={})  # fmt: skip
    assert stored == store.Stored((), 0)
    assert not [item for item in run.storage.list("objects/") if item.name.endswith("x.hf")]


def test_rows_that_workers_hold_are_left_to_them_where_only_some_servers_load(run: Run) -> None:
    run.add(0, BASE)
    shard = Shard(run.spec, 1, epoch=1)
    store.load(shard, run.loading(0, wants_held=False))
    assert shard.arenas[0].rows_missing == 0
    assert shard.arenas[1].rows_missing == len(shard.arenas[1].ids_M)


def test_servers_that_are_placed_otherwise_pick_their_rows_out_of_all(run: Run) -> None:
    run.add(0, BASE)
    run.push(0)
    run.add(1, DELTA)
    users_NW = np.empty((50, run.spec.tables[0].width), np.float32)
    for shard in run.shards:
        users_NW[shard.arenas[0].ids_M] = shard.arenas[0].records_MW
    placed = Placement(5, data=3, parity=2)
    tables = (
        dataclasses.replace(run.spec.tables[0], placement=placed, code="rs"),
        dataclasses.replace(run.spec.tables[1], placement=Placement(5)),
    )
    for server in range(5):
        shard = Shard(dataclasses.replace(run.spec, tables=tables), server, epoch=1)
        store.load(shard, run.loading(1, is_apart=False))
        np.testing.assert_array_equal(shard.arenas[0].records_MW, users_NW[shard.arenas[0].ids_M])


def test_a_checkpoint_that_lacks_rows_of_a_server_is_data_loss(run: Run) -> None:
    run.add(0, BASE)
    kept = tuple(s for s in run.catalog.segments if "rows-1" not in s.extent.object)
    run.catalog = dataclasses.replace(run.catalog, segments=kept, number=9)
    catalogs.commit(run.storage, run.catalog)
    store.load(Shard(run.spec, 0, epoch=1), run.loading(0))
    with pytest.raises(DataLossError, match="does not hold every row"):
        store.load(Shard(run.spec, 1, epoch=1), run.loading(0))


def test_rows_that_are_stored_twice_do_not_stand_for_others(run: Run) -> None:
    """Two segments that share a row of a server's, and lack one: their counts add up to all."""
    width = run.spec.tables[0].width
    ids_N = run.spec.tables[0].placement.rows_of(0, 50)
    parts = [ids_N[:9], ids_N[8:-1]]
    copied = [Copied(0, part, np.zeros((len(part), width), np.float32)) for part in parts]
    run.shards = run.shards[:1]
    run.shards[0].snapshot = lambda order: (copied, None)  # type: ignore[method-assign,assign]
    run.add(0, BASE)
    with pytest.raises(CorruptDataError, match=r"stored twice.*users"):
        store.load(Shard(run.spec, 0, epoch=1), run.loading(0))


def test_a_delta_that_stores_a_row_twice_is_refused_as_every_reader_does(run: Run) -> None:
    run.add(0, BASE)
    ids_N = run.spec.tables[0].placement.rows_of(0, 50)[:3]
    rows_NW = np.ones((3, run.spec.tables[0].width), np.float32)
    copied = [Copied(0, ids_N, rows_NW), Copied(0, ids_N, 2 * rows_NW)]
    run.shards = run.shards[:1]
    run.shards[0].snapshot = lambda order: (copied, None)  # type: ignore[method-assign,assign]
    run.add(1, DELTA)
    with pytest.raises(CorruptDataError, match="stored twice"):
        store.load(Shard(run.spec, 0, epoch=1), run.loading(1))


def test_rows_in_a_segment_that_begins_with_another_servers_are_not_passed_over(run: Run) -> None:
    """A server would load an older version of its rows, and every other reader the newest one."""
    run.add(0, BASE)
    placement = run.spec.tables[0].placement
    own_N, other_N = (placement.rows_of(server, 50) for server in (0, 1))
    ids_N = np.union1d(other_N, own_N[own_N > other_N[0]])
    mixed = Copied(0, ids_N, np.ones((len(ids_N), run.spec.tables[0].width), np.float32))
    run.shards = run.shards[:1]
    run.shards[0].snapshot = lambda order: ([mixed], None)  # type: ignore[method-assign,assign]
    run.add(1, DELTA)
    assert run.catalog.sharding is None
    with pytest.raises(CorruptDataError, match="rows of two servers"):
        store.load(Shard(run.spec, 0, epoch=1), run.loading(1))


def test_a_segment_with_rows_of_two_servers_is_refused_where_they_should_be_apart(
    run: Run,
) -> None:
    mixed = Copied(0, np.arange(50), np.zeros((50, run.spec.tables[0].width), np.float32))
    run.shards = run.shards[:1]
    run.shards[0].snapshot = lambda order: ([mixed], None)  # type: ignore[method-assign,assign]
    run.add(0, BASE)
    with pytest.raises(CorruptDataError, match="rows of two servers"):
        store.load(Shard(run.spec, 0, epoch=1), run.loading(0))


def test_a_checkpoint_of_other_tables_is_refused(run: Run) -> None:
    run.add(0, BASE)
    other = dataclasses.replace(make_spec("sgd"), waiting_rows=1000)
    with pytest.raises(InvalidRequestError, match="other tables"):
        store.load(Shard(other, 0, epoch=1), run.loading(0))


def test_work_that_nobody_wants_any_more_ends_and_leaves_no_object(run: Run) -> None:
    copied, _ = run.shards[0].snapshot(order(0, None, kind=BASE))
    with pytest.raises(HoldfastError, match="given up"):
        store.store(copied, run.spec, storage=run.storage, name="objects/c1/a.hf", step=0,
                    codecs={}, is_cancelled=lambda: True)  # fmt: skip
    assert run.storage.list("objects/") == []
    run.add(0, BASE)
    with pytest.raises(HoldfastError, match="another checkpoint"):
        store.load(Shard(run.spec, 0, epoch=1), run.loading(0), is_cancelled=lambda: True)


def test_a_shard_that_lacks_rows_is_not_copied(run: Run) -> None:
    with pytest.raises(ConflictError, match="rows are missing"):
        Shard(run.spec, 0, epoch=1).snapshot(order(0, None, kind=BASE))


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adagrad", "rowwise-adagrad", "adam"])
def test_a_schema_has_one_column_for_each_kind_of_state(optimizer: str) -> None:
    (table, _) = make_spec(optimizer).tables
    assert sum(column.width for column in store.schema_of(table).columns) == table.width


def test_what_goes_through_messages_comes_out_as_it_was(run: Run) -> None:
    run.add(0, BASE)
    for entry in run.catalog.segments:
        assert entry_from_json(entry_to_json(entry)) == entry
    loading = run.loading(0)
    assert store.Loading.from_json(loading.to_json()) == loading
    codecs = {"users": [parse_codec("adaptive4"), parse_codec("log8")]}
    assert store.codecs_from_json(store.codecs_to_json(codecs)) == codecs


# Jobs.


def test_a_job_tells_what_it_found_or_what_went_wrong() -> None:
    may_end = threading.Event()

    def work(job: Job) -> dict[str, int]:
        may_end.wait()
        return {"rows": 3}

    job = Job(work, "job")
    assert job.ask(0.01) == {"is_over": False}
    may_end.set()
    assert job.ask(10) == {"is_over": True, "rows": 3}

    def fail(job: Job) -> dict[str, int]:
        raise CorruptDataError("all is lost")

    assert Job(fail, "job").ask(10) == {"is_over": True, "error": "all is lost"}


def test_a_cancelled_job_is_over_when_cancel_returns() -> None:
    ended = []

    def work(job: Job) -> dict[str, int]:
        while not job.is_cancelled:
            pass
        ended.append(True)
        return {}

    Job(work, "job").cancel()
    assert ended
