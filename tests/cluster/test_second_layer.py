"""More servers lost than parity makes up for: the cluster falls back to its last checkpoint."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import holdfast as hf
from holdfast import events
from holdfast.checkpoint.format.codec import parse_codec
from holdfast.checkpoint.strategy import Strategy
from holdfast.cli.main import app
from holdfast.cluster.client import Client
from holdfast.cluster.leases import Leases
from holdfast.cluster.spec import ClusterSpec, Optimizer, TableSpec
from holdfast.errors import DataLossError, HoldfastError, UnavailableError
from holdfast.model.placement import Placement
from tests.cluster.oracle import Oracle, random_gradients
from tests.cluster.test_protocol import check_same, make_spec
from tests.cluster.trial import SINCE_BASE, STEPS, Trial, is_same, rows_of, trial
from tests.unit.checkpoint.format.error_bound import error_bound


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        ("full", "sgd"),
        ("check-n-run", "momentum"),
        ("incrcp", "rowwise-adagrad"),
        ("cpr", "adagrad"),
        (STEPS, "adam"),
        (SINCE_BASE, "adam"),
    ],
)
def test_what_is_saved_is_an_ordinary_run_with_every_row_as_it_was(
    strategy: str | Strategy, optimizer: str, tmp_path: Path
) -> None:
    with trial(make_spec(optimizer=optimizer), tmp_path, strategy=strategy, codec="fp32",
               keep=None) as t:  # fmt: skip
        saved = {0: t.save()}
        for _ in range(3):
            t.push(4)
            saved[t.number] = t.save()
        run = hf.open(tmp_path)
        assert run.steps == tuple(saved)
        for step, records in saved.items():
            for table in t.spec.tables:
                rows = run.read(step, table.name)
                found_NW = np.concatenate([rows.weight, *rows.state.values()], axis=1)
                assert is_same(found_NW, records[table.name]), (step, table.name)
                some = run.read(step, table.name, rows=[1, 5])
                assert is_same(some.weight, records[table.name][[1, 5], : table.dim])
        assert hf.verify(tmp_path).is_sound
        kinds = [run.info(step).kind for step in run.steps]
        if strategy in ("full", "cpr"):
            assert kinds == ["base"] * 4
        if strategy in (STEPS, SINCE_BASE):
            assert kinds == ["base"] + ["delta"] * 3


@pytest.mark.parametrize(("parity", "lost"), [(1, (0, 3)), (2, (1, 2, 5))])
def test_going_back_fully_equals_the_oracle_as_of_the_checkpoint_to_the_bit(
    parity: int, lost: tuple[int, ...], tmp_path: Path
) -> None:
    spec = make_spec(servers=4 + parity, parity=parity, optimizer="adam")
    with trial(spec, tmp_path, strategy=STEPS, recovery="full") as t:
        t.push(5)
        t.save()
        t.push(5)
        saved = t.save()
        t.push(6)
        t.crash(*lost)
        t.cluster.wait_whole(30)
        t.oracle.records = saved
        check_same(t.cluster, t.oracle)
        (restored,) = t.told(events.Restored)
        assert restored.step == 10
        assert t.told(events.RowsLost)
        # Training goes on from there, and parity is as good as ever.
        t.reconnect()
        t.push(5)
        t.crash(lost[0])
        t.push(5)
        t.client.drain()
        t.cluster.wait_whole(30)
        check_same(t.cluster, t.oracle)


@pytest.mark.parametrize(("parity", "lost"), [(1, (1, 4)), (2, (0, 1, 2))])
def test_going_back_partially_gives_lost_servers_their_saved_rows_and_leaves_the_others(
    parity: int, lost: tuple[int, ...], tmp_path: Path
) -> None:
    spec = make_spec(servers=4 + parity, parity=parity, optimizer="adagrad")
    with trial(spec, tmp_path, strategy="cpr") as t:
        t.push(5)
        saved = t.save()
        t.push(6)
        t.client.drain()  # a push that is kept would be applied again
        t.crash(*lost)
        t.cluster.wait_whole(30)
        found, is_lost = t.read(), rows_of(spec, set(lost))
        for name, found_NW in found.items():
            is_lost_N = is_lost[name]
            assert is_same(found_NW[~is_lost_N], t.oracle.records[name][~is_lost_N])
            assert is_same(found_NW[is_lost_N], saved[name][is_lost_N])
        (recovered,) = t.told(events.Recovered)
        assert (recovered.checkpoint_step, recovered.servers) == (5, lost)
        assert t.cluster.audit().is_sound
        # The same client trains on; one more loss is decoded to the bit.
        t.oracle.records = found
        t.push(5)
        t.crash(3)
        t.push(5)
        t.client.drain()
        t.cluster.wait_whole(30)
        check_same(t.cluster, t.oracle)


def test_pushes_that_a_worker_still_keeps_are_applied_once_to_rows_of_the_past(
    tmp_path: Path,
) -> None:
    """Some are in the checkpoint although their differences never reached parity."""
    spec = dataclasses.replace(make_spec(optimizer="sgd", bound=0.0), waiting_rows=500)
    with trial(spec, tmp_path, strategy="cpr") as t:
        shards = [server._shard for server in t.engine.servers.values() if server._shard]
        for shard in shards:
            shard.begin_flush = lambda: time.sleep(0.01)  # differences do not leave
        first = {"users": (np.arange(103), np.ones((103, 4), np.float32))}
        t.client.push(0, first)
        t.layer.save(step=1)
        second = {"users": (np.arange(103), np.full((103, 4), 2, np.float32))}
        t.client.push(1, second)
        assert sorted(t.client._kept) == [0, 1]
        for shard in shards:
            del shard.begin_flush
        t.crash(0, 1)
        t.client.pull({"users": np.arange(103)})  # learns of the change, and sends again
        t.cluster.wait_whole(30)
        expected_ND = np.full((103, 4), -0.25 * 3, np.float32)
        np.testing.assert_array_equal(t.cluster.read("users"), expected_ND)
        assert t.cluster.audit().is_sound


def test_quantized_deltas_come_back_within_their_bound(tmp_path: Path) -> None:
    spec = make_spec(optimizer="adagrad")
    with trial(spec, tmp_path, strategy="check-n-run", codec="asym8") as t:
        t.save()
        t.push(5)
        saved = t.save()
        assert t.layer._writer.catalog.last.kind == "delta"
        t.push(3)
        t.crash(0, 1)
        t.cluster.wait_whole(30)
        assert t.cluster.audit().is_sound
        for table in spec.tables:
            found_NW, expected_NW = t.cluster.read(table.name), saved[table.name]
            weights = slice(0, table.dim)
            bound_N = error_bound(parse_codec("asym8"), expected_NW[:, weights])
            off_N = np.abs(found_NW[:, weights] - expected_NW[:, weights]).max(axis=1)
            assert (off_N <= bound_N).all()


@pytest.mark.parametrize(
    ("kind", "when", "strategy"),
    [
        ("prepare", "before", STEPS),
        ("snapshot", "before", STEPS),
        ("snapshot", "after", SINCE_BASE),
        ("store", "before", SINCE_BASE),
        ("store", "after", STEPS),
        ("job", "after", STEPS),
    ],
)
def test_a_server_lost_while_it_saves_ends_that_checkpoint_and_the_next_holds_all_rows(
    kind: str, when: str, strategy: Strategy, tmp_path: Path
) -> None:
    with trial(make_spec(), tmp_path, strategy=strategy, recovery="full") as t:
        t.push(3)
        t.save()
        t.push(3)
        t.engine.kind, t.engine.when = kind, when
        with pytest.raises(UnavailableError, match="given up"):
            t.layer.save(step=t.number)
        assert len(t.engine.struck) == 1
        assert t.layer.steps == (3,)
        t.push(1, rows=2)  # what was claimed for the lost checkpoint must be in the next
        t.cluster.wait_whole(30)
        saved = t.save()
        assert t.layer.steps == (3, 7)
        stored = {item.name for item in t.layer._writer.storage.list("objects/")}
        assert stored == {name for name, _ in t.layer._writer.catalog.objects}
        assert hf.verify(tmp_path).is_sound
        t.push(2)
        t.crash(1, 2)
        t.cluster.wait_whole(30)
        t.oracle.records = saved
        check_same(t.cluster, t.oracle)


@pytest.mark.parametrize(
    ("kind", "recovery"),
    [
        ("load", "partial"),
        ("job", "full"),
        ("view", "partial"),
        ("recover", "partial"),
        ("recover", "full"),
        ("freeze", "partial"),
        ("fetch", "full"),
    ],
)
def test_a_server_lost_while_the_cluster_goes_back_is_made_good_too(
    kind: str, recovery: str, tmp_path: Path
) -> None:
    with trial(make_spec(), tmp_path, strategy="full", recovery=recovery) as t:
        t.push(5)
        saved = t.save()
        t.push(4)
        t.client.drain()
        t.engine.kind, t.engine.when = kind, "before"
        t.crash(0, 2)
        t.cluster.wait_whole(60)
        assert len(t.engine.struck) == 1
        found = t.read()
        # Whoever else was struck is of the past too; the others are not.
        for name, found_NW in found.items():
            is_past_N = (found_NW.view(np.uint32) == saved[name].view(np.uint32)).all(axis=1)
            is_now_N = (found_NW.view(np.uint32) == t.oracle.records[name].view(np.uint32)).all(
                axis=1
            )
            assert (is_past_N | is_now_N).all()
            is_lost_N = rows_of(t.spec, {0, 2})[name]
            assert is_past_N[is_lost_N].all()
            if recovery == "full":
                assert is_past_N.all()
        assert t.cluster.audit().is_sound


@pytest.mark.parametrize("recovery", ["partial", "full"])
def test_without_parity_one_lost_server_goes_back_to_the_checkpoint(
    recovery: str, tmp_path: Path
) -> None:
    how = Optimizer("adagrad", lr=0.25)
    spec = ClusterSpec(
        (
            TableSpec("users", 103, 4, Placement(3), "none", how, seed=1, bound=0.5),
            TableSpec("dense", 9, 8, Placement(3, data=1), "none", how),
        )
    )
    with trial(spec, tmp_path, strategy="full", recovery=recovery) as t:
        t.push(4)
        saved = t.save()
        assert hf.open(tmp_path).catalog.sharding.placement == Placement(3)
        t.push(3)
        t.crash(1)
        t.cluster.wait_whole(30)
        is_lost = rows_of(spec, {1} if recovery == "partial" else {0, 1, 2})
        for name, found_NW in t.read().items():
            expected_NW = np.where(is_lost[name][:, None], saved[name], t.oracle.records[name])
            assert is_same(found_NW, expected_NW)


def test_a_checkpoint_that_cannot_be_read_is_data_loss_and_says_why(tmp_path: Path) -> None:
    with trial(make_spec(), tmp_path, strategy="full") as t:
        t.push(2)
        t.save()
        for name, _ in t.layer._writer.catalog.objects:
            if "rows" in name:
                path = tmp_path / name
                path.write_bytes(path.read_bytes()[:-1])
        t.crash(0, 1)
        with pytest.raises(DataLossError, match=r"cannot be loaded.*damaged"):
            t.cluster.wait_whole(30)


def test_without_a_checkpoint_a_second_layer_cannot_help(tmp_path: Path) -> None:
    with trial(make_spec(), tmp_path, strategy="full") as t:
        t.push(2)
        t.crash(0, 1)
        with pytest.raises(DataLossError, match=r"servers=\[0, 1\]"):
            t.cluster.wait_whole(30)


class Workers:
    """Threads that train batches by lease; each batch's gradients are its own."""

    def __init__(self, t: Trial, count: int) -> None:
        self.t = t
        self.leases = t.cluster.coordinator.leases
        assert self.leases is not None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.trained: list[int] = []
        self.errors: list[BaseException] = []
        self._clients = [t.cluster.connect() for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._work, args=(client,)) for client in self._clients
        ]
        for thread in self._threads:
            thread.start()

    def _work(self, client: Client) -> None:
        coordinator = self.t.cluster.coordinator
        done = None
        try:
            while not self._stop.is_set():
                answer = coordinator.crew.answer_lease(client.worker, done)
                done = None
                if answer.kind == "over":
                    return
                if answer.kind == "wait":
                    time.sleep(0.002)
                    continue
                batch = int(answer.meta["batch"])
                client.push(int(answer.meta["number"]), gradients_of(self.t.spec, batch))
                with self._lock:
                    self.trained.append(batch)
                done = int(answer.meta["number"])
        except HoldfastError as error:
            if not self._stop.is_set():
                self.errors.append(error)
        finally:
            client.close()

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(60)
        assert not self.errors

    def stop(self) -> None:
        self._stop.set()
        for client in self._clients:
            client._patience_s = 0.0  # a process would be killed: nobody waits for its push
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


def gradients_of(spec: ClusterSpec, batch: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Of small whole numbers: with SGD the order of batches does not matter."""
    return random_gradients(np.random.default_rng(batch), spec, is_exact=True)


def test_checkpoints_taken_while_workers_train_are_of_whole_batches(tmp_path: Path) -> None:
    spec = make_spec(optimizer="sgd", bound=0.0)
    with trial(spec, tmp_path, strategy=STEPS, every_batches=10, keep=None) as t:
        t.layer.save(step=0)  # compiles what a checkpoint needs: that may outlast the batches
        leases = t.cluster.coordinator.leases = Leases(range(60))
        workers = Workers(t, 3)
        while not leases.is_over:
            t.layer.tick(leases)
            time.sleep(0.002)
        workers.wait()
        t.layer.wait()
        t.layer.save()
        run = hf.open(tmp_path)
        assert run.steps[0] == 0 and len(run.steps) >= 3 and run.steps[-1] == 60
        for step in run.steps[1:]:
            extra = run.dense(step)["extras"]["cluster"]
            done = set(range(extra["batches"]["started"])) - set(extra["batches"]["again"])
            assert len(done) == step
            oracle = Oracle(spec)
            for batch in done:
                oracle.push(gradients_of(spec, batch))
            for table in spec.tables:
                assert is_same(run.read(step, table.name).weight, oracle.records[table.name])
        assert hf.verify(tmp_path).is_sound


def test_going_back_fully_takes_batches_back_and_stops_who_trained_them(tmp_path: Path) -> None:
    spec = make_spec(optimizer="sgd", bound=0.0)
    with trial(spec, tmp_path, strategy="full") as t:
        leases = t.cluster.coordinator.leases = Leases(range(40))
        finished: list[int] = []  # when it is told, which no progress that is told later may exceed

        def hear(event: events.Event) -> None:
            if isinstance(event, events.Restored):
                finished.append(leases.finished)

        t.cluster.log.add(hear)
        t.layer.save()
        first = Workers(t, 2)
        while leases.finished < 10:
            time.sleep(0.002)
        t.layer.save()
        (_, step) = t.layer.steps
        while leases.finished < min(40, step + 5):
            time.sleep(0.002)
        t.crash(3, 4)
        while not t.cluster._has_rewound.is_set():
            time.sleep(0.01)
        first.stop()
        assert leases.finished == step
        assert finished == [step]
        second = Workers(t, 2)  # what Cluster.train does with processes
        second.wait()
        t.cluster.wait_whole(30)
        oracle = Oracle(spec)
        for batch in range(40):
            oracle.push(gradients_of(spec, batch))
        check_same(t.cluster, oracle)
        assert sorted(second.trained) == list(range(step, 40))


@pytest.mark.parametrize("servers", [5, 7])
def test_another_cluster_goes_on_where_the_last_one_was_saved(servers: int, tmp_path: Path) -> None:
    with trial(make_spec(optimizer="adam"), tmp_path, strategy=STEPS) as t:
        t.push(3)
        t.save()
        t.push(3)
        saved = t.save()
    with trial(make_spec(servers=servers, optimizer="adam"), tmp_path, strategy=STEPS) as t:
        with pytest.raises(HoldfastError, match="checkpoints here already"):
            t.layer.save(step=7)
        assert t.layer.resume() == 6
        t.cluster.wait_whole(30)
        t.oracle.records = saved
        check_same(t.cluster, t.oracle)
        t.number = 7
        t.reconnect()
        t.push(2, rows=3)
        kind = t.layer.save(step=8).kind
        assert kind == ("delta" if servers == 5 else "base")
        saved = t.copy()
        t.push(2)
        t.crash(0, 1)
        t.cluster.wait_whole(30)
        t.oracle.records = saved
        check_same(t.cluster, t.oracle)
        assert hf.verify(tmp_path).is_sound


@pytest.mark.parametrize("seed", range(3))
def test_losses_at_random_messages_leave_parity_sound_and_no_push_is_applied_twice(
    seed: int, tmp_path: Path
) -> None:
    """Push n adds 2^n to every row: a row's value says which pushes are in it."""
    rng = random.Random(seed)
    parity = rng.choice([0, 1, 2])
    servers, code = 4 + parity, ("none", "xor", "rs")[parity]
    how = Optimizer("sgd", lr=1.0)
    placed = Placement(servers, data=4, parity=parity)
    spec = ClusterSpec((TableSpec("users", 103, 4, placed, code, how),), locks=2, waiting_rows=200)
    with trial(spec, tmp_path, strategy=rng.choice([STEPS, SINCE_BASE]), recovery="partial",
               keep=rng.choice([None, 1])) as t:  # fmt: skip
        t.layer.save(step=0)
        ids_N = np.arange(103)
        for number in range(20):
            if rng.random() < 0.4:
                t.engine.kind = rng.choice(
                    [
                        "stage",
                        "commit",
                        "fold",
                        "freeze",
                        "fetch",
                        "view",
                        "recover",
                        "store",
                        "job",
                    ]
                )
                t.engine.when = rng.choice(["before", "after"])
            if rng.random() < 0.2:
                t.crash(*rng.sample(range(servers), rng.choice([1, 2, 3])))
            grads_ND = np.full((103, 4), -float(2**number), np.float32)
            t.client.push(number, {"users": (ids_N, grads_ND)})
            if rng.random() < 0.3:
                with suppress(UnavailableError):
                    t.layer.save(step=number + 1)
        t.engine.kind = None
        t.client.drain()
        t.cluster.wait_whole(30)
        assert t.cluster.audit().is_sound
        values_NW = t.cluster.read("users")
        assert (values_NW == values_NW[:, :1]).all()
        values_N = values_NW[:, 0].astype(np.int64)
        assert (values_N == values_NW[:, 0]).all() and values_N.min() >= 0
        assert values_N.max() < 2**20
        if not t.told(events.Recovered):
            assert (values_N == 2**20 - 1).all()
        t.layer.save(step=100)
        np.testing.assert_array_equal(hf.open(tmp_path).read(100, "users").weight, values_NW)
        assert hf.verify(tmp_path).is_sound


def test_a_commit_whose_answer_was_lost_is_found_and_built_upon(tmp_path: Path) -> None:
    with trial(make_spec(), tmp_path, strategy=STEPS, keep=None) as t:
        t.push(2)
        t.save()
        t.push(2)
        writer = t.layer._writer
        put, get = writer.storage.put_if_absent, writer.storage.get

        def put_and_fail(name: str, data: bytes) -> None:
            put(name, data)
            raise UnavailableError("no answer")

        def fail(*args: object, **kwargs: object) -> bytes:
            raise UnavailableError("no answer")

        writer.storage.put_if_absent, writer.storage.get = put_and_fail, fail
        with pytest.raises(UnavailableError):
            t.layer.save(step=4)
        writer.storage.put_if_absent, writer.storage.get = put, get
        t.push(2)
        t.save()
        assert t.layer.steps == (2, 4, 6)
        run = hf.open(tmp_path)
        rows = run.read(6, "users")
        found_NW = np.concatenate([rows.weight, *rows.state.values()], axis=1)
        assert is_same(found_NW, t.oracle.records["users"])
        assert hf.verify(tmp_path).is_sound


def test_a_clusters_run_can_be_inspected_and_verified_by_command(tmp_path: Path) -> None:
    with trial(make_spec(), tmp_path, strategy=STEPS) as t:
        t.push(2)
        t.save()
        t.push(2)
        t.save()
    for command in (["inspect"], ["inspect", "--json"], ["verify"]):
        result = CliRunner().invoke(app, [command[0], str(tmp_path), *command[1:]])
        assert result.exit_code == 0, result.output
        assert "users" in result.output or command == ["verify"]
