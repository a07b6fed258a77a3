"""Servers lost at any moment: rows and optimizer state equal a plain oracle's, bit for bit."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest

from holdfast.cluster import parts
from holdfast.cluster.cluster import Cluster
from holdfast.cluster.coordinator import Settings
from holdfast.cluster.engine import Process
from holdfast.cluster.leases import Lease, Leases
from holdfast.cluster.message import Message
from holdfast.cluster.spec import ClusterSpec, Optimizer, TableSpec
from holdfast.errors import DataLossError, HoldfastError
from holdfast.model.placement import Placement
from tests.cluster.oracle import Oracle, random_gradients
from tests.cluster.threads import ThreadEngine

OPTIMIZERS = ("sgd", "momentum", "adagrad", "rowwise-adagrad", "adam")


def make_spec(
    *,
    servers: int = 5,
    data: int = 4,
    parity: int = 1,
    optimizer: str = "adagrad",
    locks: int = 3,
    bound: float = 0.5,
    groups: int = 1,
) -> ClusterSpec:
    placed = Placement(servers, data=data, parity=parity, groups=groups)
    code = "xor" if parity == 1 else "rs"
    how = Optimizer(optimizer, lr=0.25, momentum=0.5)
    return ClusterSpec(
        (
            TableSpec("users", 103, 4, placed, code, how, seed=1, bound=bound),
            TableSpec("items", 31, 4, placed, code, how, seed=3, bound=bound),  # in one arena
            TableSpec("ads", 7, 3, placed, code, how, seed=2, bound=bound),
            TableSpec("dense", 9, 8, dataclasses.replace(placed, data=1), code, how),
        ),
        locks=locks,
        waiting_rows=16,
    )


def start(
    spec: ClusterSpec, *, two_phase: bool = True, spares: int = 2
) -> tuple[Cluster, ThreadEngine]:
    engine = ThreadEngine()
    cluster = Cluster(
        spec,
        engine=engine,
        settings=Settings(spares=spares, two_phase=two_phase, pulse_s=0),
    )
    cluster.start()
    return cluster, engine


def check_same(cluster: Cluster, oracle: Oracle) -> None:
    assert cluster.audit().is_sound
    for name, expected_NW in oracle.records.items():
        found_NW = cluster.read(name)
        np.testing.assert_array_equal(found_NW.view(np.uint32), expected_NW.view(np.uint32))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("parity", [1, 2])
def test_rows_equal_the_oracles_without_failures(optimizer: str, parity: int) -> None:
    spec = make_spec(servers=6, parity=parity, optimizer=optimizer)
    cluster, _ = start(spec)
    oracle, rng = Oracle(spec), np.random.default_rng(0)
    with_client = cluster.connect()
    try:
        for number in range(12):
            gradients = random_gradients(rng, spec)
            with_client.push(number, gradients)
            oracle.push(gradients)
            ids_N = np.arange(spec.tables[0].rows)
            pulled = with_client.pull({"users": ids_N})["users"]
            np.testing.assert_array_equal(pulled, oracle.weights("users", ids_N))
        check_same(cluster, oracle)
    finally:
        with_client.close()
        cluster.close()


@pytest.mark.parametrize("server", range(5))
def test_a_lost_server_comes_back_to_the_bit_while_training_goes_on(server: int) -> None:
    spec = make_spec()
    cluster, engine = start(spec)
    oracle, rng = Oracle(spec), np.random.default_rng(server)
    client = cluster.connect()
    try:
        for number in range(30):
            gradients = random_gradients(rng, spec)
            client.push(number, gradients)
            oracle.push(gradients)
            if number == 10:
                engine.crash(cluster.coordinator.process(server))
        client.drain()
        cluster.wait_whole(30)
        check_same(cluster, oracle)
    finally:
        client.close()
        cluster.close()


def test_two_servers_lost_at_once_come_back_with_two_parities() -> None:
    spec = make_spec(servers=7, parity=2, optimizer="adam")
    cluster, engine = start(spec)
    oracle, rng = Oracle(spec), np.random.default_rng(7)
    client = cluster.connect()
    try:
        for number in range(30):
            gradients = random_gradients(rng, spec)
            client.push(number, gradients)
            oracle.push(gradients)
            if number == 12:
                engine.crash(cluster.coordinator.process(2))
                engine.crash(cluster.coordinator.process(3))
        client.drain()
        cluster.wait_whole(30)
        check_same(cluster, oracle)
    finally:
        client.close()
        cluster.close()


def test_without_two_phase_commit_only_pushes_in_flight_at_the_lost_server_are_missing() -> None:
    spec = make_spec(optimizer="sgd", bound=0.0)
    engine = ThreadEngine()
    # Differences wait long enough that some are lost, unless a flush comes just before the crash.
    settings = Settings(spares=1, two_phase=False, pulse_s=0, flush_every_s=1.0)
    cluster = Cluster(spec, engine=engine, settings=settings)
    cluster.start()
    oracle, rng = Oracle(spec), np.random.default_rng(3)
    client = cluster.connect()
    try:
        for number in range(20):
            gradients = random_gradients(rng, spec, is_exact=True)
            client.push(number, gradients)
            oracle.push(gradients)
            if number == 10:
                engine.crash(cluster.coordinator.process(1))
        client.drain()
        cluster.wait_whole(30)
        assert cluster.audit().is_sound
        has_lost = False
        for index, table in enumerate(spec.tables):
            found_NW, expected_NW = cluster.read(table.name), oracle.records[table.name]
            is_other_N = (found_NW != expected_NW).any(axis=1)
            servers_N = spec.tables[index].placement.servers_of(np.flatnonzero(is_other_N))
            assert set(servers_N.tolist()) <= {1}
            has_lost |= len(servers_N) > 0
        assert client.pushes_lost > 0 or not has_lost
    finally:
        client.close()
        cluster.close()


def test_more_losses_than_parities_are_said_to_be_data_loss() -> None:
    spec = make_spec()
    cluster, engine = start(spec)
    client = cluster.connect()
    try:
        client.push(0, random_gradients(np.random.default_rng(0), spec))
        for server in (0, 1):
            engine.crash(cluster.coordinator.process(server), is_seen=False)
        for server in (0, 1):
            cluster.coordinator._on_death(cluster.coordinator.process(server), "killed")
        with pytest.raises(DataLossError, match=r"servers=\[0, 1\]"):
            cluster.wait_whole(30)
        with pytest.raises(HoldfastError):
            cluster.coordinator.check()
    finally:
        client.close()
        cluster.close()


@pytest.mark.parametrize("sent", [0, 2, 5])
def test_a_lost_workers_push_happens_on_all_servers_or_on_none(sent: int) -> None:
    """The worker stages everywhere, commits at ``sent`` servers, and is lost."""
    spec = make_spec(optimizer="momentum")
    cluster, _ = start(spec)
    coordinator = cluster.coordinator
    coordinator.leases = Leases(range(3))
    process = Process("worker-0", "worker", 1, "nowhere")
    client, other = cluster.connect(), cluster.connect()
    coordinator.join(process, client.worker)
    oracle, rng = Oracle(spec), np.random.default_rng(1)
    ids_N = np.arange(spec.tables[0].rows)
    try:
        assert coordinator.leases.next(0) == Lease(0, 0, 0)
        grads_ND = rng.standard_normal((len(ids_N), 4)).astype(np.float32)
        gradients = {"users": (ids_N, grads_ND)}
        by_server = client._gradients_by_server(gradients)
        meta = {"worker": 0, "number": 0}
        for server, found in by_server.items():
            client._peers.ask(server, parts.pack_stage(0, 0, {server: found}))
        for server in list(by_server)[:sent]:
            client._peers.ask(server, Message("commit", meta))
        coordinator._on_death(process, "was killed by signal 9")
        while coordinator.leases.open_number(0) is not None:
            time.sleep(0.01)
        if sent > 0:
            oracle.push(gradients)
        assert coordinator.leases.finished == (1 if sent > 0 else 0)
        # What it sends from its grave is not heard.
        with pytest.raises(HoldfastError, match="taken for lost"):
            client._peers.ask(0, parts.pack_stage(0, 1, {0: by_server[0]}))
        check_same(cluster, oracle)
        assert coordinator.leases.next(other.worker).batch == (1 if sent > 0 else 0)
    finally:
        client.close()
        other.close()
        cluster.close()


def test_the_papers_float_sum_recovers_rows_only_nearly() -> None:
    placed = Placement(5, data=4, parity=1)
    how = Optimizer("adagrad", lr=0.1)
    spec = ClusterSpec((TableSpec("users", 103, 4, placed, "sum", how, seed=1, bound=0.5),))
    cluster, engine = start(spec)
    oracle, rng = Oracle(spec), np.random.default_rng(0)
    client = cluster.connect()
    try:
        for number in range(40):
            gradients = random_gradients(rng, spec, rows=100)
            client.push(number, gradients)
            oracle.push(gradients)
        client.drain()
        engine.crash(cluster.coordinator.process(2))
        client.pull({"users": np.arange(103)})
        cluster.wait_whole(30)
        found_NW, expected_NW = cluster.read("users"), oracle.records["users"]
        np.testing.assert_allclose(found_NW, expected_NW, atol=1e-3)
        assert (found_NW != expected_NW).any()
    finally:
        client.close()
        cluster.close()


def test_weights_that_workers_hold_are_supplied_to_a_replacement() -> None:
    placed = Placement(5, data=4, parity=1)
    spec = ClusterSpec(
        (
            TableSpec("users", 103, 4, placed, "xor", Optimizer("sgd", lr=1.0)),
            TableSpec("dense", 9, 8, Placement(5), "none", Optimizer("sgd", lr=1.0), is_held=True),
        )
    )
    cluster, engine = start(spec, two_phase=False)
    client = cluster.connect()
    try:
        weights_ND = np.arange(72, dtype=np.float32).reshape(9, 8)
        client.assign({"dense": (np.arange(9), weights_ND)})
        client.hold("dense", weights_ND)
        engine.crash(cluster.coordinator.process(3))
        pulled = client.pull({"dense": np.arange(9), "users": np.arange(103)})
        np.testing.assert_array_equal(pulled["dense"], weights_ND)
        cluster.wait_whole(30)
        assert cluster.audit().is_sound
    finally:
        client.close()
        cluster.close()


def test_a_worker_that_dies_before_it_is_known_gives_its_batch_back() -> None:
    """It was ready, and asked for a batch, before its driver had heard of it."""
    lost: list[int] = []
    engine = ThreadEngine()
    with Cluster(make_spec(), engine=engine, settings=Settings(pulse_s=0)) as cluster:
        coordinator = cluster.coordinator
        coordinator._on_worker_lost = lost.append
        leases = coordinator.leases = Leases(range(3))
        client = cluster.connect()
        answer = coordinator.crew.answer_lease(client.worker, None)
        assert answer.kind == "lease"
        process = Process("worker-0", "worker", 1 << 22, "nowhere")
        coordinator._on_death(process, "was killed by signal 9")
        coordinator.wait_whole(30)
        coordinator.join(process, client.worker)
        coordinator.wait_whole(30)
        assert lost == [client.worker]
        again = leases.next(77)
        assert again is not None and again.batch == answer.meta["batch"]
        client.close()


@pytest.mark.parametrize("lost", ["together", "in turn", "the server alone"])
def test_a_push_that_returned_happened_though_all_who_had_applied_it_are_lost(lost: str) -> None:
    """It is in no parity yet, and its worker does not speak again."""
    spec = make_spec(optimizer="sgd", bound=0.0)
    engine = ThreadEngine()
    settings = Settings(spares=3, pulse_s=0, flush_every_s=60.0)
    with Cluster(spec, engine=engine, settings=settings) as cluster:
        coordinator, client = cluster.coordinator, cluster.connect()
        process = Process("worker-0", "worker", 1, "nowhere")
        coordinator.join(process, client.worker)
        for number in range(2):
            client.push(number, {"users": (np.array([0]), np.ones((1, 4), np.float32))})
        (server,) = client._kept[1].servers
        client.close()
        engine.crash(coordinator.process(server))
        if lost == "in turn":
            cluster.wait_whole(30)
        if lost != "the server alone":
            coordinator._on_death(process, "was killed by signal 9")
        cluster.wait_whole(30)
        assert cluster.read("users")[0].tolist() == [-0.5] * 4
        assert cluster.audit().is_sound


def test_after_a_push_that_raised_there_are_no_further_ones() -> None:
    """Else it would count as one that happened, when its worker is lost."""
    with Cluster(make_spec(), engine=ThreadEngine(), settings=Settings(pulse_s=0)) as cluster:
        client = cluster.connect()
        gradients = random_gradients(np.random.default_rng(0), cluster.spec)

        def interrupt() -> None:
            raise KeyboardInterrupt

        client._wait_turn = interrupt
        with pytest.raises(KeyboardInterrupt):
            client.push(0, gradients)
        client._wait_turn = None
        with pytest.raises(HoldfastError, match="connect again"):
            client.push(1, gradients)
        client.close()


def test_what_is_given_travels_in_as_many_messages_as_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast.cluster.pushes.slices.__defaults__", (64,))
    spec = make_spec(optimizer="sgd", bound=0.0)
    engine = ThreadEngine()
    settings = Settings(spares=2, pulse_s=0, flush_every_s=60.0)
    with Cluster(spec, engine=engine, settings=settings) as cluster:
        client = cluster.connect()
        for number in range(3):
            client.push(number, {"users": (np.arange(103), np.ones((103, 4), np.float32))})
        client.close()  # nobody but witnesses can give a replacement its parts
        engine.crash(cluster.coordinator.process(2))
        cluster.wait_whole(30)
        np.testing.assert_array_equal(cluster.read("users")[:, 0], np.full(103, -0.75))
