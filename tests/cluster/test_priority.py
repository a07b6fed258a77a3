"""Hot rows first on a cluster: which rows servers save, what comes back, what is never lost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from holdfast import events
from holdfast.checkpoint.strategy import Strategy
from holdfast.cli.main import run as run_command
from holdfast.cluster.changes import Changes, SnapshotOrder
from holdfast.cluster.clustersave import order_for
from holdfast.cluster.shard import Shard
from holdfast.cluster.spec import ClusterSpec, Optimizer, TableSpec
from holdfast.errors import UnavailableError
from holdfast.model.placement import Placement
from tests.cluster.trial import Trial, is_same, rows_of, trial

LARGE = ("users", "items")
R = 0.125


def steady(by: str, **more: object) -> Strategy:
    """Without a clock that decides what is a base."""
    return Strategy("cpr-x", base="consecutive", codec="fp32", priority=hf.Priority(by=by, **more))


def make_spec(optimizer: str = "adagrad") -> ClusterSpec:
    """Two large tables with a small one between them in their arena, and one apart."""
    placed, how = Placement(5, data=4, parity=1), Optimizer(optimizer, lr=0.25)
    return ClusterSpec(
        (
            TableSpec("users", 400, 4, placed, "xor", how, seed=1, bound=0.5),
            TableSpec("genders", 3, 4, placed, "xor", how, seed=2, bound=0.5),
            TableSpec("items", 203, 4, placed, "xor", how, seed=3, bound=0.5),
            TableSpec("ads", 3, 3, placed, "xor", how, seed=4, bound=0.5),
            TableSpec("dense", 90, 8, Placement(5, data=1, parity=1), "xor", how),
        ),
        locks=3,
        waiting_rows=500,
    )


class Counted:
    """A trial whose pushes are counted, row by row, by plain arrays; and what was stored of each
    row, according to the run itself."""

    def __init__(self, t: Trial) -> None:
        self.t = t
        self.counts = {table.name: np.zeros(table.rows, np.int64) for table in t.spec.tables}
        self.fresh: set[int] = set()  # servers that did not count since the last checkpoint
        self.stored: dict[str, np.ndarray] = {}

    def push(self, ids: dict[str, np.ndarray]) -> None:
        rng, gradients = self.t.rng, {}
        for name, ids_N in ids.items():
            dim = self.t.spec.tables[self.t.spec.index[name]].dim
            gradients[name] = (ids_N, rng.standard_normal((len(ids_N), dim)).astype(np.float32))
            self.counts[name][ids_N] += 1
        self.t.client.push(self.t.number, gradients)
        self.t.oracle.push(gradients)
        self.t.number += 1

    def push_skewed(self, times: int) -> None:
        """Few rows often, many seldom; neither tables nor ids in their order."""
        for _ in range(times):
            ids = {}
            for table in reversed(self.t.spec.tables):
                drawn_N = table.rows * self.t.rng.random(max(2, table.rows // 6)) ** 3
                ids[table.name] = self.t.rng.permutation(np.unique(drawn_N.astype(np.int64)))
            self.push(ids)

    def most_used(self) -> dict[str, set[int]]:
        """What the next delta must hold: on each server the most used r of its rows."""
        found: dict[str, set[int]] = {}
        for table in self.t.spec.tables:
            counts_N = self.counts[table.name]
            chosen: list[int] = []
            for server in range(self.t.spec.servers):
                ids_M = table.placement.rows_of(server, table.rows)
                ids_M = ids_M[counts_N[ids_M] > 0]
                if table.name in LARGE and server not in self.fresh:
                    rows = len(table.placement.rows_of(server, table.rows))
                    by_use_M = np.lexsort((ids_M, -counts_N[ids_M]))
                    ids_M = ids_M[by_use_M[: max(1, int(R * rows))]]
                chosen += ids_M.tolist()
            found[table.name] = set(chosen)
        return found

    def save(self) -> dict[str, set[int]]:
        """Save; which rows went along. Their uses begin anew."""
        before = self.t.layer.steps
        now = self.t.save()
        run = hf.open(self.t.url)
        if not before:
            saved = {table.name: set(range(table.rows)) for table in self.t.spec.tables}
            self.stored = {name: records_NW.copy() for name, records_NW in now.items()}
        else:
            saved = {table.name: set() for table in self.t.spec.tables}
            for name, ids_N, _ in run.updates(since=before[-1]):
                saved[name] |= set(ids_N.tolist())
        for name, ids in saved.items():
            at_K = np.array(sorted(ids), np.int64)
            self.stored[name][at_K] = now[name][at_K]
            self.counts[name][at_K] = 0
        self.fresh.clear()
        return saved

    def fail_to_save(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An attempt that ends when everything is written but the catalog."""

        def fail(*args: object) -> None:
            raise UnavailableError("disk full")

        with monkeypatch.context() as patch:
            patch.setattr(self.t.layer._attempts, "_commit", fail)
            with pytest.raises(UnavailableError, match="disk full"):
                self.t.layer.save(step=self.t.number)

    def check_run(self) -> None:
        """The last checkpoint has every row as it was saved last, to the bit."""
        run = hf.open(self.t.url)
        for table in self.t.spec.tables:
            rows = run.read(run.steps[-1], table.name)
            found_NW = np.concatenate([rows.weight, *rows.state.values()], axis=1)
            assert is_same(found_NW, self.stored[table.name]), table.name


def test_servers_save_their_most_used_rows_and_all_that_changed_of_small_tables(
    tmp_path: Path,
) -> None:
    with trial(make_spec(), tmp_path, strategy=steady("mfu"), keep=None) as t:
        c = Counted(t)
        c.push_skewed(3)
        c.save()
        for _ in range(4):
            c.push_skewed(7)
            expected = c.most_used()
            assert c.save() == expected
            c.check_run()
        # Something waited, and it comes without being used again.
        waiting = sum(int((c.counts[name] > 0).sum()) for name in LARGE)
        assert waiting > 20
        assert len(expected["dense"]) > max(1, int(R * 90))
        c.push({"genders": np.array([1])})
        expected = c.most_used()
        assert c.save() == expected
        assert sum(len(expected[name]) for name in LARGE) > 20
        assert hf.verify(tmp_path).is_sound


@pytest.mark.parametrize("by", ["mfu", "ssu", "scar"])
def test_lost_servers_get_each_row_as_it_was_saved_last_whenever_that_was(
    by: str, tmp_path: Path
) -> None:
    spec = make_spec("adam")
    with trial(spec, tmp_path, strategy=steady(by), keep=None) as t:
        c = Counted(t)
        c.save()
        used = {name: np.zeros(len(counts), bool) for name, counts in c.counts.items()}
        for _ in range(3):
            c.push_skewed(5)
            for name, counts_N in c.counts.items():
                used[name] |= counts_N > 0
            last = c.save()
            for table in spec.tables:
                found_K = np.array(sorted(last[table.name]), np.int64)
                assert used[table.name][found_K].all()
                for server, ids_M in enumerate(
                    table.placement.rows_of(each, table.rows) for each in range(5)
                ):
                    if table.name in LARGE:
                        held = np.isin(found_K, ids_M).sum()
                        assert held <= max(1, int(R * len(ids_M))), (table.name, server)
        saved = t.copy()
        c.check_run()
        c.push_skewed(4)
        t.client.drain()
        t.crash(1, 4)
        t.cluster.wait_whole(30)
        older = 0
        for name, is_lost_N in rows_of(spec, {1, 4}).items():
            found_NW = t.cluster.read(name)
            assert is_same(found_NW[is_lost_N], c.stored[name][is_lost_N])
            assert is_same(found_NW[~is_lost_N], t.oracle.records[name][~is_lost_N])
            older += int((c.stored[name] != saved[name]).any(axis=1)[is_lost_N].sum())
        assert older > 20  # than the last checkpoint
        (recovered,) = t.told(events.Recovered)
        assert recovered.servers == (1, 4)
        assert t.cluster.audit().is_sound
        # Whoever is new has not counted: it saves all that changed, and then counts as well.
        t.oracle.records = t.read()
        c.fresh = {1, 4}
        for name, is_lost_N in rows_of(spec, {1, 4}).items():
            c.counts[name][is_lost_N] = 0
        for _ in range(2):
            c.push_skewed(5)
            expected = c.most_used()
            found = c.save()
            if by == "mfu":
                assert found == expected
            else:
                assert found["users"] >= expected["users"] & set(lost_users(spec, c.fresh))
            c.check_run()


def lost_users(spec: ClusterSpec, servers: set[int]) -> list[int]:
    return np.flatnonzero(rows_of(spec, servers)["users"]).tolist()


def test_uses_of_rows_that_a_failed_checkpoint_had_taken_are_counted_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trial(make_spec(), tmp_path, strategy=steady("mfu"), keep=None) as t:
        c = Counted(t)
        c.save()
        c.push_skewed(6)
        for _ in range(2):
            c.fail_to_save(monkeypatch)
            c.push_skewed(3)
        expected = c.most_used()  # by all uses since the base
        assert c.save() == expected
        c.check_run()
        c.push_skewed(3)
        assert t.layer.save(step=t.number).kind == "delta"
        assert hf.verify(tmp_path).is_sound


@pytest.mark.parametrize("by", ["mfu", "ssu", "scar"])
def test_rows_of_a_failed_checkpoint_are_in_the_next_though_nobody_used_them_again(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trial(make_spec(), tmp_path, strategy=steady(by, period=1), keep=None) as t:
        c = Counted(t)
        c.save()
        c.push({"users": np.arange(0, 50, 2), "ads": np.array([2])})
        c.fail_to_save(monkeypatch)
        c.push({"users": np.arange(300, 310)})
        saved = c.save()
        assert saved["users"] == {*range(0, 50, 2), *range(300, 310)}
        assert saved["ads"] == {2}


@pytest.mark.parametrize("when", ["before", "after"])
def test_servers_that_stay_count_on_when_another_is_lost_while_it_saves(
    when: str, tmp_path: Path
) -> None:
    with trial(make_spec(), tmp_path, strategy=steady("mfu"), keep=None) as t:
        c = Counted(t)
        c.save()
        c.push_skewed(5)
        before = {server: t.cluster.coordinator.process(server) for server in range(5)}
        t.engine.kind, t.engine.when = "snapshot", when
        with pytest.raises(UnavailableError, match="given up"):
            t.layer.save(step=t.number)
        (struck,) = t.engine.struck
        (lost,) = (server for server, process in before.items() if process is struck)
        t.client.drain()
        t.cluster.wait_whole(30)
        c.push_skewed(3)
        expected = c.most_used()
        found = c.save()
        for name, is_lost_N in rows_of(t.spec, {lost}).items():
            lost_rows = set(np.flatnonzero(is_lost_N).tolist())
            assert found[name] - lost_rows == expected[name] - lost_rows
            assert lost_rows <= found[name]  # it does not know what changed: everything
        c.push_skewed(5)
        expected = c.most_used()
        assert c.save() == expected
        c.check_run()


def test_nothing_is_counted_unless_a_strategy_asks_for_it(tmp_path: Path) -> None:
    spec = make_spec()
    with trial(spec, tmp_path / "cpr", strategy="cpr") as t:
        t.save()
        t.push(2)
        t.save()
        assert not [uses for uses in uses_of(t) if uses is not None]
    with trial(spec, tmp_path / "mfu", strategy="cpr-mfu") as t:
        assert not [uses for uses in uses_of(t) if uses is not None]
        t.save()
        sizes = [0 if uses is None else uses.bytes for uses in uses_of(t)]
        rows = sum(spec.tables[spec.index[name]].rows for name in LARGE)
        assert 4 * rows <= sum(sizes) <= 4 * rows + 8 * 5 * len(spec.arenas) * 4


def uses_of(t: Trial) -> list[object]:
    shards = [server._shard for server in t.engine.servers.values() if server._shard is not None]
    assert len(shards) == 5
    return [arena.changes._uses for shard in shards for arena in shard.arenas]


def test_another_priority_and_none_at_all_save_every_change_once_and_count_anew() -> None:
    spec = make_spec()
    shard = Shard(spec, 0, epoch=1)
    shard.begin()
    arena = shard.arenas[0]
    mfu = order_for(hf.Priority(by="mfu"), spec)
    ssu = order_for(hf.Priority(by="ssu"), spec)
    assert mfu.tables == LARGE
    slots_N = np.arange(0, 60)
    grads_ND = np.ones((len(slots_N), 4), np.float32)
    committed = None
    for step, (priority, kind, rows) in enumerate(
        [
            (mfu, "base", len(arena.ids_M)),
            (mfu, "delta", int(R * 80)),
            (ssu, "delta", 60),
            (ssu, "delta", int(R * 80)),
            (None, "delta", 60),
        ]
    ):
        order = SnapshotOrder(step, kind, None, committed, priority)
        ids_N, _ = arena.copy(order)
        assert len(ids_N) == rows, step
        committed = step
        arena.update(slots_N, grads_ND)
        arena.take(())
    assert arena.changes._uses is None


def test_a_first_delta_that_fails_before_anything_was_counted_goes_again_whole() -> None:
    changes = Changes(64)
    changes.begin()  # as after loading
    changes.use(np.arange(40))
    order = order_for(hf.Priority(by="mfu"), make_spec())
    for step in (5, 6):  # of step 5 nothing is heard again
        claimed = changes.claim(SnapshotOrder(step, "delta", "last", 4, order))
        assert claimed is not None and claimed.tolist() == list(range(40))


def test_the_pls_counts_from_the_last_round_of_saves(tmp_path: Path) -> None:
    with trial(make_spec(), tmp_path, strategy=steady("mfu", r=0.5), keep=None) as t:
        for step, at, passed in ((10, 15, 5), (20, 25, 15), (30, 36, 6), (40, 41, 11)):
            t.push(1)
            t.layer.save(step=step)  # a base, a half, the other half, a half
            assert t.layer.lost([1, 2], at, 1000) == pytest.approx(2 * passed / 1000 / 5)


@pytest.mark.parametrize(("every", "apart", "r"), [(80, 10, 0.125), (100, 12, 0.125), (4, 1, 0.25)])
def test_an_interval_is_that_of_a_whole_round_of_saves(
    every: int, apart: int, r: float, tmp_path: Path
) -> None:
    with trial(make_spec(), tmp_path, strategy="cpr-mfu", every_batches=every) as t:
        assert t.layer._every == apart
        assert t.layer.strategy.priority is not None
        assert t.layer.strategy.priority.r == r
        assert apart * t.layer.strategy.priority.saves_a_round <= every


@pytest.mark.parametrize("strategy", ["cpr-mfu", "cpr-ssu", "cpr-scar"])
def test_a_strategy_by_name_recovers_partially(strategy: str, tmp_path: Path) -> None:
    with trial(make_spec(), tmp_path, strategy=strategy) as t:
        assert t.layer.is_partial
        t.push(2)
        t.save()
        t.push(2)
        t.save()
        t.crash(0, 2)
        t.cluster.wait_whole(30)
        assert t.told(events.Recovered) and t.cluster.audit().is_sound


def test_a_command_trains_on_after_a_kill_with_rows_saved_by_their_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_command(
        ["train", "--preset", "tiny", "--rows", "1500", "--batch-size", "64", "--workers", "1",
         "--servers", "3", "--silence", "0", "--strategy", "cpr-ssu", "--steps", "30", "--every",
         "5", "--kill", "1@0.6", "--url", str(tmp_path / "run"), "--json"]
    )  # fmt: skip
    data = json.loads(capsys.readouterr().out)
    assert code == 0, data
    (failure,) = data["failures"]
    assert (failure["server"], failure["is_loaded"]) == (1, True)
    layer = data["layer"]
    assert (layer["strategy"], layer["recoveries"], layer["restores"]) == ("cpr-ssu", 1, 0)
    assert layer["pls"] > 0
    assert data["auc"] > 0.5
    run = hf.open(tmp_path / "run")
    assert run.steps[-1] > 0  # beyond the base; when is up to the machine
    assert hf.verify(tmp_path / "run").is_sound
