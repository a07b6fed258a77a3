"""Tables on servers behave as torch's own, and a step is one push."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.cluster.cluster import Cluster
from holdfast.cluster.coordinator import Settings
from holdfast.cluster.dense import DIM, Dense
from holdfast.cluster.leases import Leases
from holdfast.cluster.spec import ClusterSpec, Optimizer, TableSpec
from holdfast.cluster.worker import Session
from holdfast.cluster.workerprocess import find_entry, run
from holdfast.errors import HoldfastError, InvalidRequestError
from holdfast.model.placement import Placement
from tests.cluster.threads import ThreadEngine

ROWS, WIDTH = 50, 4


def make_networks() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 300), nn.ReLU(), nn.Linear(300, 1))


class Counted:
    """Counts what goes to the servers."""

    def __init__(self, session: Session) -> None:
        self.pulls: list[list[str]] = []
        self.pushes: list[dict[str, tuple[np.ndarray, np.ndarray]]] = []
        pull, push = session.client.pull, session.client.push

        def counted_pull(wants: Any) -> Any:
            self.pulls.append(list(wants))
            return pull(wants)

        def counted_push(number: int, gradients: Any) -> None:
            self.pushes.append(dict(gradients))
            push(number, gradients)

        session.client.pull = counted_pull  # type: ignore[method-assign]
        session.client.push = counted_push  # type: ignore[method-assign]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    placed, how = Placement(4, data=3, parity=1), Optimizer("sgd", lr=0.5)
    rows = Dense(make_networks()).rows
    spec = ClusterSpec(
        (
            TableSpec("ads", ROWS, WIDTH, placed, "xor", how, seed=1, bound=0.5),
            TableSpec("users", ROWS, WIDTH, placed, "xor", how, seed=2, bound=0.5),
            TableSpec("dense", rows, DIM, Placement(4, data=1, parity=1), "xor", how),
        ),
        locks=2,
    )
    found = Cluster(spec, engine=ThreadEngine(), settings=Settings(spares=0, pulse_s=0))
    found.start()
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def session(cluster: Cluster) -> Iterator[Session]:
    cluster.coordinator.leases = Leases(range(100, 103))
    cluster._workers = 8
    found = Session.connect(
        cluster.spec,
        coordinator=cluster.coordinator.address,
        worker=7,
        token=cluster._token,
        two_phase=True,
    )
    try:
        yield found
    finally:
        found.close()


def table_of(session: Session, name: str) -> torch.Tensor:
    return torch.from_numpy(session.client.pull({name: np.arange(ROWS)})[name])


@pytest.mark.parametrize("is_announced", [True, False])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 5])
@pytest.mark.parametrize("shape", ["bags", "rectangle", "empty"])
def test_a_bag_on_servers_equals_torchs_in_values_and_training(
    session: Session, is_announced: bool, mode: Any, padding_idx: int | None, shape: str
) -> None:
    ids, offsets = torch.tensor([3, 5, 5, 3, 49, 0, 3, 5]), torch.tensor([0, 0, 3, 7])
    if shape == "rectangle":
        ids, offsets = ids.view(4, 2), None
    if shape == "empty":
        ids, offsets = ids[:0], torch.zeros(3, dtype=torch.long)
    before = table_of(session, "ads")
    local = nn.EmbeddingBag.from_pretrained(
        before.clone(), freeze=False, mode=mode, padding_idx=padding_idx
    )
    remote = session.embedding_bag("ads", mode, padding_idx=padding_idx)
    networks = make_networks()
    optimizer = session.optimizer(networks)
    batches = session.batches()
    assert next(batches) == 100
    if is_announced:
        session.prefetch({"ads": ids})
    optimizer.zero_grad()
    expected, found = local(ids, offsets), remote(ids, offsets)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    scale = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    (expected * scale).sum().backward()
    (found * scale).sum().backward()
    optimizer.step()
    torch.optim.SGD(local.parameters(), lr=0.5).step()
    torch.testing.assert_close(table_of(session, "ads"), local.weight.detach())


def test_weighted_bags_and_last_offsets_are_torchs(session: Session) -> None:
    ids, offsets = torch.tensor([1, 2, 1, 4]), torch.tensor([0, 1, 4])
    weights = torch.tensor([0.5, 2.0, -1.0, 0.0])
    local = nn.EmbeddingBag.from_pretrained(
        table_of(session, "ads"), mode="sum", include_last_offset=True
    )
    remote = session.embedding_bag("ads", include_last_offset=True)
    found = remote(ids, offsets, per_sample_weights=weights)
    torch.testing.assert_close(found, local(ids, offsets, per_sample_weights=weights))


def test_bags_without_columns_are_zeros(session: Session) -> None:
    found = session.embedding_bag("ads")(torch.zeros(3, 0, dtype=torch.long))
    assert torch.equal(found, torch.zeros(3, WIDTH))


def test_an_embedding_on_servers_equals_torchs_and_its_padding_is_not_trained(
    session: Session,
) -> None:
    ids = torch.tensor([[1, 5], [1, 2]])
    local = nn.Embedding.from_pretrained(table_of(session, "ads"), freeze=False, padding_idx=5)
    remote = session.embedding("ads", padding_idx=5)
    optimizer = session.optimizer(make_networks())
    seen = Counted(session)
    next(session.batches())
    torch.testing.assert_close(remote(ids), local(ids), rtol=0, atol=0)
    remote(ids).square().sum().backward()
    local(ids).square().sum().backward()
    optimizer.step()
    torch.optim.SGD(local.parameters(), lr=0.5).step()
    assert seen.pushes[0]["ads"][0].tolist() == [1, 2]
    torch.testing.assert_close(table_of(session, "ads"), local.weight.detach())


def test_a_step_is_one_pull_and_one_push_with_the_networks(session: Session) -> None:
    session.first_dense(make_networks())
    ads, users = session.embedding_bag("ads"), session.embedding_bag("users")
    networks = make_networks()
    optimizer = session.optimizer(networks)
    seen = Counted(session)
    ids = {"ads": torch.tensor([[1, 2]]), "users": torch.tensor([[9, 9]])}
    for _ in session.batches():
        session.prefetch(ids)
        optimizer.zero_grad()
        networks(ads(ids["ads"]) + users(ids["users"])).sum().backward()
        optimizer.step()
    assert seen.pulls == [["ads", "users", "dense"]] * 3
    assert [sorted(push) for push in seen.pushes] == [["ads", "dense", "users"]] * 3
    assert seen.pushes[0]["users"][0].tolist() == [9]
    assert session.is_over


def test_several_forwards_of_a_table_add_up_for_each_id(session: Session) -> None:
    before = table_of(session, "ads")
    ads = session.embedding_bag("ads")
    optimizer = session.optimizer(make_networks())
    next(session.batches())
    session.prefetch({"ads": torch.tensor([1, 2])})
    first, second = ads(torch.tensor([[1, 2]])), ads(torch.tensor([[2, 3]]))  # 3: not announced
    (first + 10 * second).sum().backward()
    optimizer.step()
    moved = (before - table_of(session, "ads"))[:, 0] / 0.5
    assert moved[:5].tolist() == pytest.approx([0, 1, 11, 10, 0], abs=1e-5)


def test_rows_announced_and_not_looked_up_are_not_pushed(session: Session) -> None:
    ads = session.embedding_bag("ads")
    optimizer = session.optimizer(make_networks())
    seen = Counted(session)
    next(session.batches())
    session.prefetch({"ads": torch.tensor([1, 2, 3]), "users": torch.tensor([4])})
    ads(torch.tensor([[2]])).sum().backward()
    optimizer.step()
    assert list(seen.pushes[0]) == ["ads"]
    assert seen.pushes[0]["ads"][0].tolist() == [2]


def test_evaluating_leaves_no_gradients_behind(session: Session) -> None:
    networks, ads = make_networks(), session.embedding_bag("ads")
    optimizer = session.optimizer(networks)
    seen = Counted(session)
    next(session.batches())
    with torch.no_grad():
        session.prefetch({"ads": torch.tensor([8])})
        assert not networks(ads(torch.tensor([[8]]))).requires_grad
        assert not ads(torch.tensor([[9]])).requires_grad
    found = ads(torch.tensor([[8]]))  # pulled again: what was announced cannot be trained
    assert found.requires_grad
    assert len(session._pulled) == 1
    networks(ads(torch.tensor([[1]]))).sum().backward()
    optimizer.step()
    assert seen.pushes[0]["ads"][0].tolist() == [1]


def test_gradients_that_were_zeroed_are_not_pushed(session: Session) -> None:
    networks, ads = make_networks(), session.embedding_bag("ads")
    optimizer = session.optimizer(networks)
    seen = Counted(session)
    next(session.batches())
    networks(ads(torch.tensor([[1]]))).sum().backward()
    optimizer.zero_grad()
    networks(ads(torch.tensor([[2]]))).sum().backward()
    optimizer.step()
    assert seen.pushes[0]["ads"][0].tolist() == [2]


def test_all_workers_get_the_first_networks_and_later_steps(
    session: Session, cluster: Cluster
) -> None:
    session.first_dense(make_networks())
    mine, other = make_networks(), make_networks()
    with torch.no_grad():
        for parameter in [*mine.parameters(), *other.parameters()]:
            parameter.zero_()
    optimizer = session.optimizer(mine)
    watcher = Session(cluster.connect())
    watcher.optimizer(other)
    next(session.batches())
    inputs = torch.ones(2, WIDTH)
    torch.testing.assert_close(mine(inputs), make_networks()(inputs), rtol=0, atol=0)
    mine(inputs).sum().backward()
    optimizer.step()
    torch.testing.assert_close(mine(inputs), other(inputs), rtol=0, atol=0)
    assert not torch.equal(mine(inputs), make_networks()(inputs))
    watcher.close()


def test_dense_rows_are_the_parameters_and_a_padding_of_zeros() -> None:
    model = make_networks()
    dense = Dense(model)
    rows_RD = dense.read()
    floats = sum(parameter.numel() for parameter in model.parameters())
    assert rows_RD.shape == (-(-floats // DIM), DIM)
    assert not rows_RD.reshape(-1)[floats:].any()
    dense.write(2 * rows_RD)
    np.testing.assert_array_equal(dense.read(), 2 * rows_RD)


def test_only_rows_of_parameters_with_gradients_are_pushed() -> None:
    model = make_networks()
    dense = Dense(model)
    model[2].bias.grad = torch.ones(1)  # type: ignore[union-attr]
    ids_R, grads_RD = dense.gradients()
    assert ids_R.tolist() == [dense.rows - 1]
    assert grads_RD.sum() == 1


def test_a_batch_has_one_step(session: Session) -> None:
    networks = make_networks()
    optimizer = session.optimizer(networks)
    with pytest.raises(InvalidRequestError, match="a step belongs to a batch"):
        optimizer.step()
    next(session.batches())
    networks(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    with pytest.raises(InvalidRequestError, match="a batch has one step"):
        optimizer.step()


def test_what_does_not_fit_is_refused(session: Session) -> None:
    with pytest.raises(InvalidRequestError, match="no such table"):
        session.embedding_bag("films")
    with pytest.raises(InvalidRequestError, match="sum or a mean"):
        session.embedding_bag("ads", "max")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="not those of the cluster"):
        session.optimizer(nn.Linear(2, 2))
    with pytest.raises(InvalidRequestError, match="outside its table"):
        session.embedding("ads")(torch.tensor([ROWS]))
    with pytest.raises(InvalidRequestError, match="whole numbers"):
        session.prefetch({"ads": torch.tensor([0.5])})
    with pytest.raises(InvalidRequestError, match="float32"):
        session.optimizer(nn.Linear(2, 2).double())
    with pytest.raises(InvalidRequestError, match="no batches"):
        next(Session(session.client).batches())


def test_a_local_table_among_the_networks_is_refused() -> None:
    model = nn.EmbeddingBag(10, 3, sparse=True)
    model(torch.tensor([[1]])).sum().backward()
    with pytest.raises(InvalidRequestError, match="local table"):
        Dense(model).gradients()


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("train", "not a training function"),
        ("no.such.module:train", "cannot be imported"),
        ("json:no_such", "cannot be imported"),
        ("json:__name__", "no function"),
    ],
)
def test_a_bad_entry_is_told(entry: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        find_entry(entry)


def leave_early(session: Session) -> None:
    next(session.batches())


def test_a_function_that_leaves_batches_undone_has_failed(cluster: Cluster) -> None:
    cluster.coordinator.leases = Leases(range(2))
    cluster._workers = 4
    spec = {
        "entry": f"{__name__}:leave_early",
        "args": {},
        "worker": 3,
        "token": cluster._token,
        "coordinator": cluster.coordinator.address,
        "cluster": cluster.spec.to_json(),
        "two_phase": True,
    }
    ready: list[str] = []
    with pytest.raises(HoldfastError, match="before all batches were done"):
        run(spec, ready.append, threading.Event())
    assert ready == ["worker-3"]
