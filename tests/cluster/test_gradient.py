"""Parity that is told gradients: copies equal their rows to the bit, whoever is lost when."""

from __future__ import annotations

import dataclasses
import os
import threading

import numpy as np
import pytest

from holdfast.cluster.cluster import Cluster
from holdfast.cluster.coordinator import Settings
from holdfast.cluster.shard import Shard
from holdfast.cluster.spec import ClusterSpec, Optimizer, TableSpec
from holdfast.errors import DataLossError
from holdfast.model.placement import Placement
from tests.cluster.chaos import Chaos
from tests.cluster.oracle import Oracle, random_gradients
from tests.cluster.test_protocol import check_same, make_spec, start

RUNS = int(os.environ.get("HOLDFAST_CHAOS_RUNS", "2"))


def by_gradient(spec: ClusterSpec) -> ClusterSpec:
    """The networks are told by gradients, other tables by differences."""
    tables = tuple(
        dataclasses.replace(table, propagation="gradient") if table.name == "dense" else table
        for table in spec.tables
    )
    return dataclasses.replace(spec, tables=tables)


def count(cluster: Cluster, name: str) -> int:
    return sum(stats["counts"].get(name, 0) for stats in cluster.stats())


@pytest.mark.parametrize(("optimizer", "parity"), [("adam", 1), ("rowwise-adagrad", 2)])
def test_copies_equal_their_rows_after_losses(optimizer: str, parity: int) -> None:
    spec = by_gradient(make_spec(servers=6, parity=parity, optimizer=optimizer))
    cluster, engine = start(spec)
    oracle, rng = Oracle(spec), np.random.default_rng(parity)
    client = cluster.connect()
    try:
        first_ND = rng.standard_normal((9, 8)).astype(np.float32)
        client.assign({"dense": (np.arange(9), first_ND)})
        oracle.records["dense"][:, :8] = first_ND
        for number in range(18):
            gradients = random_gradients(rng, spec)
            client.push(number, gradients)
            oracle.push(gradients)
            if number in (8, 13):  # by then both rows and copies have been lost
                cluster.wait_whole(30)
                engine.crash(cluster.coordinator.process(number % 6))
        client.drain()
        cluster.wait_whole(30)
        check_same(cluster, oracle)
    finally:
        client.close()
        cluster.close()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(RUNS))
def test_copies_equal_their_rows_whoever_crashes_when(seed: int) -> None:
    parity = 1 + seed % 2
    spec = by_gradient(make_spec(servers=6, parity=parity, optimizer="adam", locks=1 + seed % 5))
    chaos = Chaos(seed, spec, kills=2)
    cluster = Cluster(spec, engine=chaos.engine, settings=Settings(spares=2, pulse_s=0))
    cluster.start()
    chaos.coordinator = cluster.coordinator
    oracle, rng = Oracle(spec), np.random.default_rng(seed)
    client = cluster.connect()
    try:
        chaos.is_on = True
        for number in range(25):
            gradients = random_gradients(rng, spec)
            client.pull({name: ids_N for name, (ids_N, _) in gradients.items()})
            client.push(number, gradients)
            oracle.push(gradients)
        client.drain()
        chaos.is_on = False
        cluster.wait_whole(60)
        print(f"seed {seed}: {chaos.killed}")
        check_same(cluster, oracle)
    finally:
        client.close()
        cluster.close()


def test_pushes_of_several_workers_reach_copies_in_one_order() -> None:
    """Adam's steps do not commute: a copy that took them in another order would differ."""
    spec = by_gradient(make_spec(optimizer="adam"))
    cluster, engine = start(spec)
    errors: list[BaseException] = []

    def work(worker: int) -> None:
        client = cluster.connect()
        rng = np.random.default_rng(worker)
        try:
            for number in range(25):
                client.push(number, random_gradients(rng, spec))
            client.drain()
        except BaseException as error:
            errors.append(error)
        finally:
            client.close()

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(3)]
    try:
        for thread in threads:
            thread.start()
        engine.crash(cluster.coordinator.process(2))
        for thread in threads:
            thread.join()
        assert not errors
        cluster.wait_whole(30)
        assert cluster.audit().is_sound
        assert count(cluster, "gradient_bytes") > 0
    finally:
        cluster.close()


def test_bytes_are_counted_by_what_is_told() -> None:
    told = by_gradient(make_spec(optimizer="adam"))
    rng = np.random.default_rng(0)
    gradients = random_gradients(rng, told)
    rows = {name: len(ids_N) for name, (ids_N, _) in gradients.items()}
    for spec in (make_spec(optimizer="adam"), told):
        cluster, _ = start(spec)
        client = cluster.connect()
        try:
            client.push(0, gradients)
            client.drain()
            found = [count(cluster, f"{kind}_bytes") for kind in ("difference", "gradient")]
        finally:
            client.close()
            cluster.close()
        coded = sum(
            rows[table.name] * (5 + 4 * table.width)
            for table in spec.tables
            if table.propagation == "difference"
        )
        copied = rows["dense"] * (5 + 4 * 8) if spec is told else 0
        assert found == [coded, copied]


SUMS = TableSpec(
    "users", 103, 4, Placement(5, data=4, parity=1), "sum", Optimizer("adagrad", lr=0.1),
    seed=1, bound=0.5, propagation="gradient",
)  # fmt: skip


def test_float_sums_of_gradients_train_and_are_audited_nearly() -> None:
    spec = ClusterSpec((SUMS,), waiting_rows=50)
    cluster, _ = start(spec)
    oracle, rng = Oracle(spec), np.random.default_rng(0)
    client = cluster.connect()
    try:
        for number in range(40):
            gradients = random_gradients(rng, spec, rows=100)
            client.push(number, gradients)
            oracle.push(gradients)
        client.drain()
        audited = cluster.audit()
        assert audited.is_sound and 0 < audited.deviation_max < 1e-3
        np.testing.assert_array_equal(cluster.read("users"), oracle.records["users"])
    finally:
        client.close()
        cluster.close()


def test_a_loss_with_float_sums_of_gradients_is_said_to_be_data_loss() -> None:
    spec = ClusterSpec((SUMS,))
    cluster, engine = start(spec)
    client = cluster.connect()
    try:
        client.push(0, random_gradients(np.random.default_rng(0), spec))
        engine.crash(cluster.coordinator.process(2))
        with pytest.raises(DataLossError, match=r"servers=\[2\]"):
            cluster.wait_whole(30)
    finally:
        client.close()
        cluster.close()


def test_float_sums_of_gradients_are_not_built_anew_without_their_states() -> None:
    shard = Shard(ClusterSpec((SUMS,)), 0, epoch=1)
    shard.freeze("t", [0], epoch=1)
    with pytest.raises(DataLossError, match=r"cannot be built anew\. tables='users'; use propag"):
        shard.install_parities("t", [0], [], {})
    assert not shard.ready_G.any()
