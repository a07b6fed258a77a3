"""The click models on a cluster: the same tables, samples and training as without servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.cluster.cluster import Cluster
from holdfast.cluster.coordinator import Settings
from holdfast.cluster.leases import Leases
from holdfast.cluster.worker import Session
from holdfast.errors import InvalidRequestError
from holdfast.model.tables import find_tables
from holdfast.recsys import cluster_train
from holdfast.recsys.cluster_train import Layout, Workload, make_cluster_spec
from holdfast.recsys.data.skew import Skew
from holdfast.recsys.models.layers import split_parameters
from holdfast.recsys.models.presets import make_model
from holdfast.recsys.train import evaluate
from tests.cluster.threads import ThreadEngine

TINY = Workload(preset="tiny", rows=400, batch_size=32, seed=5)
SMALL = Layout(servers=3, data=2, parity=1)
KINDS: tuple[Any, ...] = ("dlrm", "deepfm", "pnn")


@pytest.fixture
def threads() -> Iterator[list[Cluster]]:
    started: list[Cluster] = []
    yield started
    for cluster in started:
        cluster.close()


def start(threads: list[Cluster], workload: Workload, layout: Layout = SMALL) -> Cluster:
    spec = make_cluster_spec(workload, layout)
    cluster = Cluster(spec, engine=ThreadEngine(), settings=Settings(spares=0, pulse_s=0))
    cluster.start()
    threads.append(cluster)
    return cluster


def join(cluster: Cluster, batches: int) -> Session:
    cluster.coordinator.leases = Leases(range(batches))
    client = cluster.connect()  # only to be given the id of a worker
    client.close()
    return Session.connect(
        cluster.spec,
        coordinator=cluster.coordinator.address,
        worker=client.worker,
        token=cluster._token,
        two_phase=True,
    )


def local_copy(workload: Workload, cluster: Cluster) -> nn.Module:
    """The model with tables of its own, at the cluster's rows and first networks."""
    model = make_model(workload.preset, workload.table_rows, kind=workload.model)
    ours = cluster_train.make_cluster_model(workload, Session(cluster.connect()))
    networks = ours.state_dict()
    rows = {
        table.name: torch.from_numpy(cluster.read(table.name)[:, : table.dim].copy())
        for table in cluster.spec.tables
        if table.name != "dense"
    }
    model.load_state_dict({**networks, **rows})
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_named_and_sized_as_in_local_training(kind: Any) -> None:
    workload = replace(TINY, model=kind)
    local = find_tables(make_model("tiny", workload.table_rows, kind=kind))
    spec = make_cluster_spec(workload, SMALL)
    expected = [(table.name, *table.modules[0].weight.shape) for table in local]
    assert [(t.name, t.rows, t.dim) for t in spec.tables[:-1]] == expected
    assert spec.tables[-1].name == "dense"
    assert len({table.seed for table in spec.tables[:-1]}) == len(expected)


def test_a_workload_survives_being_sent_and_gives_the_same_samples() -> None:
    sent = Workload.from_args(json.loads(json.dumps(replace(TINY, skew=Skew(0.5)).to_args())))
    assert sent == replace(TINY, skew=Skew(0.5))
    ours, theirs = cluster_train.make_stream(sent), cluster_train.make_stream(sent)
    theirs[3]
    assert torch.equal(ours[7].ids, theirs[7].ids)
    assert torch.equal(ours[7].labels, theirs[7].labels)


@pytest.mark.parametrize(
    ("kind", "optimizer"), [("dlrm", "sgd"), ("deepfm", "sgd"), ("pnn", "adagrad")]
)
def test_one_worker_on_a_cluster_trains_as_torch_does_without(
    threads: list[Cluster], tmp_path: Path, kind: Any, optimizer: str
) -> None:
    workload = replace(TINY, model=kind)
    cluster = start(threads, workload, replace(SMALL, optimizer=optimizer))
    driver = Session(cluster.connect())
    cluster_train.start_networks(workload, driver)
    local = local_copy(workload, cluster)
    first = {name: value.detach().clone() for name, value in local.named_parameters()}
    tables, dense = split_parameters(local)
    rate = cluster_train.RATES[optimizer]
    own: torch.optim.Optimizer = (
        torch.optim.SGD(tables, lr=rate)
        if optimizer == "sgd"
        else torch.optim.Adagrad(tables, lr=rate)
    )
    adam = torch.optim.Adam(dense, lr=2e-3)
    session = join(cluster, 4)
    cluster_train.train(session, workload=workload.to_args(), told=str(tmp_path))
    session.close()
    losses = []
    stream = cluster_train.make_stream(workload)
    for number in range(4):
        batch = stream[number]
        own.zero_grad()
        adam.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(local(batch), batch.labels)
        loss.backward()
        own.step()
        adam.step()
        losses.append(loss.item())
    told = cluster_train.Told(tmp_path).read()
    assert [each.batch for each in told] == [0, 1, 2, 3]
    np.testing.assert_allclose([each.loss for each in told], losses, rtol=5e-3)
    found = local_copy(workload, cluster)
    for name, parameter in local.named_parameters():
        if name.split(".")[0] in ("tables", "weights"):
            # the first steps of Adam and Adagrad make much of the noise of gradients near zero
            share = 0.01 if optimizer == "sgd" else 0.1
            moved = (parameter.detach() - first[name]).norm()
            assert (found.get_parameter(name) - parameter).norm() < share * moved, name
    found_auc = cluster_train.evaluate_cluster(workload, driver, samples=512)
    heldout = cluster_train.heldout_stream(workload, 512)
    expected = evaluate(local, (heldout[at] for at in range(len(heldout))))
    assert found_auc == pytest.approx(expected, abs=5e-3)
    assert cluster.audit().is_sound
    driver.close()


def test_evaluating_changes_nothing(threads: list[Cluster]) -> None:
    cluster = start(threads, TINY)
    driver = Session(cluster.connect())
    cluster_train.start_networks(TINY, driver)
    before = {table.name: cluster.read(table.name) for table in cluster.spec.tables}
    assert cluster_train.evaluate_cluster(TINY, driver, samples=64) is not None
    for name, records_NW in before.items():
        np.testing.assert_array_equal(cluster.read(name), records_NW)
    driver.close()


def test_the_best_auc_is_better_than_chance_and_not_perfect() -> None:
    best = cluster_train.best_auc(TINY, samples=4096)
    assert best is not None
    assert 0.75 < best < 0.9


@pytest.mark.parametrize(
    ("layout", "workload", "said"),
    [
        (replace(SMALL, optimizer="lion"), TINY, "unknown optimizer"),
        (replace(SMALL, data=3), TINY, "need a server each"),
        (Layout(servers=1, data=1, parity=1), TINY, "one server"),
        (Layout(servers=0, data=1, parity=0), TINY, "servers"),
        (replace(SMALL, code="parchive"), TINY, "unknown code"),
        (replace(SMALL, lr=float("nan")), TINY, "lr"),
        (replace(SMALL, locks=0), TINY, "locks"),
        (SMALL, replace(TINY, rows=0), "out of range"),
        (SMALL, replace(TINY, rows=20), "too few rows"),
        (SMALL, replace(TINY, preset="huge"), "unknown preset"),
    ],
)
def test_absurd_settings_are_refused(layout: Layout, workload: Workload, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        make_cluster_spec(workload, layout)


def test_networks_have_as_many_copies_as_stripes_have_parities() -> None:
    for parity, code in ((1, "xor"), (2, "rs")):
        spec = make_cluster_spec(TINY, Layout(servers=4, data=2, parity=parity))
        assert (spec.tables[-1].placement.data, spec.tables[-1].placement.parity) == (1, parity)
        assert {table.code for table in spec.tables} == {code}
        assert spec.parity == parity
    alone = make_cluster_spec(TINY, replace(SMALL, replicate_networks=False))
    assert (alone.tables[-1].code, alone.tables[0].code) == ("none", "xor")
    assert alone.tables[-1].is_held
    assert alone.parity == 1
    drifting = make_cluster_spec(TINY, replace(SMALL, code="sum"))
    assert (drifting.tables[-1].code, drifting.tables[0].code) == ("xor", "sum")


@pytest.mark.parametrize(("parity", "held", "is_held"), [
    (0, None, False), (0, True, True), (1, None, True), (1, False, False),
])  # fmt: skip
def test_workers_hold_networks_that_are_there_once_where_they_are_to_give_them_back(
    parity: int, held: bool | None, is_held: bool
) -> None:
    layout = replace(SMALL, parity=parity, replicate_networks=False, hold_networks=held)
    spec = make_cluster_spec(TINY, layout)
    assert [table.is_held for table in spec.tables] == [False] * 26 + [is_held]
    twice = make_cluster_spec(TINY, replace(SMALL, hold_networks=True))
    assert not twice.tables[-1].is_held  # they are replicated


def test_a_line_that_a_kill_tore_is_left_out_until_it_is_whole(tmp_path: Path) -> None:
    line = {"time": 1.0, "batch": 3, "loss": 0.5, "cpu_s": 2.0, "pushes_lost": 0}
    path = tmp_path / "worker-4.jsonl"
    text = json.dumps(line) + "\n"
    path.write_text(text + text[:9])
    told = cluster_train.Told(tmp_path)
    assert [(each.worker, each.batch) for each in told.read()] == [(4, 3)]
    assert told.read() == []
    path.write_text(text + text)
    assert len(told.read()) == 1
