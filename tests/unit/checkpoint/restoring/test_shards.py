"""Rows divided among servers: one server's rows come back, nobody else's change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast import events
from holdfast.checkpoint.format.catalog import Catalog
from holdfast.checkpoint.restoring.restore import read_ids
from holdfast.errors import CorruptDataError, InvalidRequestError
from holdfast.model.placement import Placement
from holdfast.storage import open_storage

ROWS = (203, 64)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, 4, mode="sum", sparse=True) for rows in ROWS
        )


class Training:
    """A small model whose rows change by hand-picked lookups."""

    def __init__(self, url: Any, **settings: Any) -> None:
        self.model = Model()
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1)
        self.heard: list[events.Event] = []
        self.ck = hf.Checkpointer(
            url, model=self.model, optimizer=self.optimizer, events=self.heard.append, **settings
        )
        self._rng = np.random.default_rng(1)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            for table in self.model.tables:
                ids = self._rng.integers(0, table.num_embeddings, 40)
                table(torch.from_numpy(np.unique(ids)).unsqueeze(1)).sum().backward()
            self.optimizer.step()
            self.ck.step()

    def save(self) -> None:
        self.ck.save().result()
        self.ck.wait()

    def values(self) -> list[np.ndarray]:
        """Weights and row state of every table, side by side."""
        found = []
        for table in self.model.tables:
            state = self.optimizer.state[table.weight]["sum"]
            found.append(torch.cat([table.weight.detach(), state], dim=1).numpy().copy())
        return found

    def lose(self, placement: Placement, server: int) -> None:
        """A server dies, and its rows with it."""
        with torch.no_grad():
            for table in self.model.tables:
                ids = torch.from_numpy(placement.rows_of(server, table.num_embeddings))
                table.weight[ids] = float("nan")
                self.optimizer.state[table.weight]["sum"][ids] = float("nan")


STRATEGIES = ["full", "check-n-run", "incrcp"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("servers", [4, Placement(5, data=3, parity=2)], ids=["plain", "striped"])
def test_only_the_lost_rows_go_back_to_their_last_save(
    tmp_path: Path, strategy: str, servers: Any
) -> None:
    training = Training(tmp_path, strategy=strategy, codec="fp32", servers=servers)
    placement = servers if isinstance(servers, Placement) else Placement(servers)
    for _ in range(4):
        training.train(2)
        training.save()
    saved = training.values()
    training.train(3)
    now = training.values()
    training.lose(placement, 2)
    stats = training.ck.recover([2])
    for before, old, found in zip(now, saved, training.values(), strict=True):
        lost_N = placement.rows_of(2, len(before))
        expected = before.copy()
        expected[lost_N] = old[lost_N]
        assert np.array_equal(found, expected)
    assert stats.rows >= sum(len(placement.rows_of(2, rows)) for rows in ROWS)
    (event,) = [e for e in training.heard if isinstance(e, events.Recovered)]
    assert (event.servers, event.checkpoint_step, event.step) == ((2,), 8, 11)
    # What follows is saved and restored as if nothing had happened.
    training.train(1)
    training.save()
    last = training.values()
    training.train(1)
    training.ck.restore(training.ck.all_steps()[-1])
    assert all(np.array_equal(*pair) for pair in zip(last, training.values(), strict=True))
    training.ck.close()


class Counting:
    """A storage that counts what is read of objects of rows."""

    def __init__(self, url: str) -> None:
        self._inner = open_storage(url)
        self.row_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get_into(self, name: str, buffer: Any, *, offset: int = 0) -> None:
        self.row_bytes += memoryview(buffer).nbytes
        self._inner.get_into(name, buffer, offset=offset)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_recovery_reads_the_bytes_of_the_lost_shard_and_no_others(
    tmp_path: Path, strategy: str
) -> None:
    storage = Counting(str(tmp_path))
    training = Training(storage, strategy=strategy, codec="fp32", servers=8)
    for _ in range(3):
        training.train(1)
        training.save()
    catalog: Catalog = hf.open(tmp_path).catalog
    assert catalog.sharding is not None
    alive = catalog.alive(3)
    per_server = [
        sum(s.extent.bytes for s in catalog.sharding.held_by(alive, [server]))
        for server in range(8)
    ]
    assert sum(per_server) == sum(s.extent.bytes for s in alive)
    for server in range(8):
        storage.row_bytes = 0
        stats = training.ck.recover([server])
        assert stats.bytes == per_server[server]
        assert storage.row_bytes == per_server[server]
    storage.row_bytes = 0
    both = training.ck.recover([1, 5])
    assert both.bytes == storage.row_bytes == per_server[1] + per_server[5]
    training.ck.close()


def test_no_segment_holds_rows_of_two_servers(tmp_path: Path) -> None:
    training = Training(tmp_path, strategy="incrcp", servers=3)
    for _ in range(6):
        training.train(2)
        training.save()
    run = hf.open(tmp_path)
    for segment in run.catalog.segments:
        ids_N = read_ids(run.storage, segment)
        assert len(set(Placement(3).servers_of(ids_N).tolist())) == 1
    training.ck.close()


def test_other_servers_need_a_new_base(tmp_path: Path) -> None:
    with Training(tmp_path, strategy="check-n-run", codec="fp32", servers=3).ck:
        pass
    for servers, kinds in (
        (3, ["base", "delta"]),
        (3, ["delta"]),
        (4, ["base", "delta"]),
        (None, ["base"]),
    ):
        training = Training(tmp_path, strategy="check-n-run", codec="fp32", servers=servers)
        training.ck.resume()
        for _ in kinds:
            training.train(1)
            training.save()
        run = hf.open(tmp_path)
        assert [run.info(step).kind for step in run.steps[-len(kinds) :]] == kinds
        sharding = run.catalog.sharding
        assert (None if sharding is None else sharding.placement.servers) == servers
        training.ck.close()


def test_going_back_behind_the_division_forgets_it(tmp_path: Path) -> None:
    training = Training(tmp_path, strategy="check-n-run", codec="fp32")
    training.train(1)
    training.save()
    training.ck.close()
    training = Training(tmp_path, strategy="check-n-run", codec="fp32", servers=3)
    training.ck.resume()
    training.train(1)
    training.save()
    training.ck.restore(1, discard_later=True)
    with pytest.raises(InvalidRequestError, match="not stored apart"):
        training.ck.recover([0])
    training.train(1)
    training.save()
    training.ck.recover([0])
    training.ck.close()


def test_lost_samples_are_counted_and_survive_a_restart(tmp_path: Path) -> None:
    training = Training(tmp_path, strategy="full", servers=4, total_steps=100)
    training.train(10)
    training.save()
    training.train(20)
    training.ck.recover([1])  # 20 of 100 steps, on one of 4 servers
    assert training.ck.pls == pytest.approx(0.05)
    training.train(10)
    training.save()
    training.train(4)
    training.ck.recover([0, 3])
    assert training.ck.pls == pytest.approx(0.05 + 2 * 4 / 400)
    training.ck.close()
    again = Training(tmp_path, strategy="full", servers=4, total_steps=100)
    assert again.ck.resume() == 40
    assert again.ck.pls == pytest.approx(0.05)  # that of the checkpoint: nothing else was lost
    again.train(2)
    again.ck.recover([0])
    assert again.ck.pls == pytest.approx(0.05 + 2 / 400)
    again.ck.close()


def test_what_cannot_be_recovered_is_refused(tmp_path: Path) -> None:
    training = Training(tmp_path / "a", servers=4)
    with pytest.raises(InvalidRequestError, match="nothing is saved"):
        training.ck.recover([0])
    training.train(1)
    training.save()
    for servers in ([4], [-1], [0.5], [True]):
        with pytest.raises(InvalidRequestError):
            training.ck.recover(servers)
    training.ck.close()
    undivided = Training(tmp_path / "b")
    undivided.train(1)
    undivided.save()
    with pytest.raises(InvalidRequestError, match="servers="):
        undivided.ck.recover([0])
    undivided.ck.close()
    for servers in (0, -1, "four", 2.5):
        with pytest.raises(InvalidRequestError):
            Training(tmp_path / "c", servers=servers)


def test_damaged_shard_is_named_and_the_model_is_not_saved(tmp_path: Path) -> None:
    training = Training(tmp_path, strategy="full", servers=4)
    training.train(1)
    training.save()
    catalog = hf.open(tmp_path).catalog
    assert catalog.sharding is not None
    (victim, *_) = catalog.sharding.held_by(catalog.alive(1), [2])
    path = tmp_path / victim.extent.object
    data = bytearray(path.read_bytes())
    data[victim.extent.offset + victim.extent.bytes // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    training.ck.recover([1])
    with pytest.raises(CorruptDataError, match=victim.extent.object):
        training.ck.recover([2])
    training.train(1)
    with pytest.raises(InvalidRequestError, match="in part"):
        training.ck.save()
    training.ck.close()
