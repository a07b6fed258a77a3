"""Hot rows: nobody can tell from what is pulled, read or saved, whoever is lost when."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from holdfast.cluster.spec import ClusterSpec
from holdfast.errors import HoldfastError
from tests.cluster.oracle import Oracle, random_gradients
from tests.cluster.test_protocol import check_same, make_spec, start
from tests.cluster.trial import SINCE_BASE, STEPS, Records, Trial, is_same, trial

HOT = {"users": (0, 3, 4, 17, 50, 51, 52, 99, 102), "ads": (1, 6)}


def make_hot(hot: dict[str, tuple[int, ...]] = HOT, **settings: object) -> ClusterSpec:
    return dataclasses.replace(make_spec(**settings), hot=hot)


@pytest.mark.parametrize(("optimizer", "parity"), [("adam", 1), ("rowwise-adagrad", 2)])
def test_rows_equal_the_oracles_while_servers_are_lost(optimizer: str, parity: int) -> None:
    spec = make_hot(servers=6, parity=parity, optimizer=optimizer)
    cluster, engine = start(spec)
    oracle, rng = Oracle(spec), np.random.default_rng(parity)
    client = cluster.connect()
    try:
        first_ND = rng.standard_normal((60, 4)).astype(np.float32)
        client.assign({"users": (np.arange(40, 100), first_ND)})
        oracle.records["users"][40:100, :4] = first_ND
        oracle.records["users"][40:100, 4:] = 0
        for number in range(12):
            gradients = random_gradients(rng, spec, rows=60)
            client.push(number, gradients)
            oracle.push(gradients)
            ids_N = rng.integers(0, 103, 70)  # some twice, in no order
            wants = {"ads": np.arange(7), "users": ids_N, "items": np.arange(31)}
            pulled = client.pull(wants)
            assert list(pulled) == list(wants)
            for name, asked_N in wants.items():
                np.testing.assert_array_equal(pulled[name], oracle.weights(name, asked_N))
            if number in (3, 8):
                cluster.wait_whole(30)
                engine.crash(cluster.coordinator.process(number % 6))
                if parity == 2:
                    engine.crash(cluster.coordinator.process((number + 1) % 6))
        client.drain()
        cluster.wait_whole(30)
        check_same(cluster, oracle)
        assert sum(stats["counts"].get("gradient_bytes", 0) for stats in cluster.stats()) > 0
    finally:
        client.close()
        cluster.close()


def test_requests_of_hot_rows_alone_or_of_none_are_answered() -> None:
    spec = make_hot()
    cluster, _ = start(spec)
    oracle = Oracle(spec)
    client = cluster.connect()
    try:
        for ids in (HOT["users"], (1, 2), (), (102, 0, 1, 0)):
            ids_N = np.array(ids, np.int64)
            (rows_ND,) = client.pull({"users": ids_N}).values()
            np.testing.assert_array_equal(rows_ND, oracle.weights("users", ids_N))
        for number, ids in enumerate((HOT["users"], (1, 2), ())):
            gradients = {"users": (np.array(ids, np.int64), np.ones((len(ids), 4), np.float32))}
            client.push(number, gradients)
            oracle.push(gradients)
        check_same(cluster, oracle)
        with pytest.raises(HoldfastError, match="no such table"):
            client.pull({"users (hot)": np.arange(2)})
        with pytest.raises(HoldfastError, match="outside its table"):
            client.pull({"users": np.array([103])})
        with pytest.raises(HoldfastError, match="do not fit"):
            client.push(9, {"users": (np.arange(4), np.ones((3, 4), np.float32))})
    finally:
        client.close()
        cluster.close()


# Checkpoints.


def check_saved(url: Path, spec: ClusterSpec, saved: dict[int, Records]) -> None:
    run = hf.open(url)
    assert run.steps == tuple(saved)
    for step, records in saved.items():
        for table in spec.tables:
            rows = run.read(step, table.name)
            found_NW = np.concatenate([rows.weight, *rows.state.values()], axis=1)
            assert is_same(found_NW, records[table.name]), (step, table.name)
    assert hf.verify(url).is_sound


def save_some(t: Trial) -> dict[int, Records]:
    saved = {0: t.save()}
    for _ in range(2):
        t.push(3, rows=60)
        saved[t.number] = t.save()
    return saved


@pytest.mark.parametrize("strategy", [STEPS, SINCE_BASE])
def test_saved_rows_are_the_same_as_without_hot_ones(strategy: object, tmp_path: Path) -> None:
    plain = make_spec(optimizer="adam")
    with trial(plain, tmp_path / "plain", strategy=strategy, keep=None) as t:
        saved = save_some(t)
    spec = make_hot(optimizer="adam")
    with trial(spec, tmp_path / "hot", strategy=strategy, keep=None) as t:
        for step, records in save_some(t).items():
            assert all(is_same(records[name], saved[step][name]) for name in records)
    check_saved(tmp_path / "plain", plain, saved)
    check_saved(tmp_path / "hot", plain, saved)


def test_rows_that_changed_while_hot_are_in_checkpoints_after_a_server_was_replaced(
    tmp_path: Path,
) -> None:
    """A replacement marks all rows that it decodes as changed: also those nobody reads."""
    spec = make_hot(optimizer="adam")
    with trial(spec, tmp_path, strategy=STEPS, keep=None) as t:
        saved = {0: t.save()}
        for server in (1, 4):
            t.push(3, rows=60)
            t.crash(server)
            t.cluster.wait_whole(30)
            t.push(1, rows=60)
            saved[t.number] = t.save()
        check_saved(tmp_path, spec, saved)


@pytest.mark.parametrize(
    "hot", [HOT, {}, {"users": (3, 5, 50, 101), "items": (0,)}], ids=["same", "none", "others"]
)
def test_a_cluster_goes_back_to_what_was_saved_whichever_rows_were_hot(
    hot: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    with trial(make_hot(optimizer="adam"), tmp_path, strategy=STEPS) as t:
        *_, saved = save_some(t).values()
    with trial(make_hot(hot, optimizer="adam"), tmp_path, strategy=STEPS, recovery="full") as t:
        t.crash(0, 3)
        t.cluster.wait_whole(30)
        t.oracle.records = saved
        check_same(t.cluster, t.oracle)
        t.reconnect()
        t.push(3, rows=60)
        t.crash(2)
        t.push(3, rows=60)
        t.client.drain()
        t.cluster.wait_whole(30)
        check_same(t.cluster, t.oracle)


def test_lost_servers_alone_go_back_to_saved_hot_rows(tmp_path: Path) -> None:
    spec, lost = make_hot(optimizer="adagrad"), {1, 4}
    with trial(spec, tmp_path, strategy="cpr") as t:
        t.push(5, rows=60)
        saved = t.save()
        t.push(6, rows=60)
        t.client.drain()
        t.crash(*lost)
        t.cluster.wait_whole(30)
        for name, found_NW in t.read().items():
            table = spec.tables[spec.index[name]]
            servers_N = table.placement.servers_of(np.arange(table.rows))
            if name in spec.hot_tables:
                hot = spec.hot_tables[name]
                ranks_H = np.arange(hot.table.rows)
                servers_N[hot.ids_H] = hot.table.placement.servers_of(ranks_H)
            is_lost_N = np.isin(servers_N, list(lost))
            assert is_same(found_NW[is_lost_N], saved[name][is_lost_N])
            assert is_same(found_NW[~is_lost_N], t.oracle.records[name][~is_lost_N])
        assert t.cluster.audit().is_sound
