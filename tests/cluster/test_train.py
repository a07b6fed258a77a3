"""Workers and servers as processes: killed while they train, and every batch counts once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from holdfast import events
from holdfast.cluster.cluster import Cluster, Outcome
from holdfast.cluster.coordinator import Settings
from holdfast.cluster.engine import LocalEngine
from holdfast.cluster.leases import Leases
from holdfast.cluster.worker import Session
from holdfast.errors import InvalidRequestError
from holdfast.recsys import cluster_train
from holdfast.recsys.cluster_train import BatchTold, Layout, Told, Workload, make_cluster_spec

WORKLOAD = Workload(preset="tiny", rows=2000, batch_size=64)
LAYOUT = Layout(servers=3, data=2, parity=1, locks=2)
BATCHES = 40

Tick = Callable[[Cluster, Leases, list[events.Event]], None]


class Trained:
    """A cluster that has trained, and what happened."""

    def __init__(self, folder: Path, tick: Tick, *, workers: int) -> None:
        self.happened: list[events.Event] = []
        spec = make_cluster_spec(WORKLOAD, LAYOUT)
        self.cluster = Cluster(
            spec,
            engine=LocalEngine(logs=folder / "logs"),
            settings=Settings(two_phase=True, pulse_s=0),
            log=events.EventLog([self.happened.append]),
        )
        self.cluster.start()
        try:
            self._train(folder, tick, workers)
        except BaseException:
            self.cluster.close()
            raise

    def _train(self, folder: Path, tick: Tick, workers: int) -> None:
        driver = Session(self.cluster.connect())
        cluster_train.start_networks(WORKLOAD, driver)

        def on_tick(leases: Leases) -> None:
            tick(self.cluster, leases, self.happened)

        self.outcome: Outcome = self.cluster.train(
            cluster_train.ENTRY,
            {"workload": WORKLOAD.to_args(), "told": str(folder)},
            batches=range(BATCHES),
            workers=workers,
            on_begin=on_tick,  # a tick may hold batches back: before the first is trained, too
            on_tick=on_tick,
        )
        self.cluster.wait_whole(60)
        self.auc = cluster_train.evaluate_cluster(WORKLOAD, driver, samples=4096)
        driver.close()
        self.told: list[BatchTold] = Told(folder).read()

    def pushes(self) -> int:
        """How many pushes the servers applied, of all workers."""
        applied = self.cluster.stats()[0]["applied"]
        return sum(last + 1 for last in applied)


def of(happened: list[events.Event], kind: type[events.Event]) -> list[events.Event]:
    return [event for event in happened if isinstance(event, kind)]


def test_training_goes_on_when_a_server_is_killed_and_no_push_is_lost(tmp_path: Path) -> None:
    killed: list[int] = []

    def tick(cluster: Cluster, leases: Leases, happened: list[events.Event]) -> None:
        if leases.finished >= BATCHES // 3 and not killed:
            killed.append(cluster.coordinator.process(1).pid)
            os.kill(killed[0], signal.SIGKILL)
        leases.hold_after(None if killed else BATCHES // 2)  # not over before the kill

    trained = Trained(tmp_path, tick, workers=2)
    with closing(trained.cluster):
        assert trained.outcome.batches == BATCHES
        assert trained.outcome.workers_lost == 0
        assert sorted(each.batch for each in trained.told) == list(range(BATCHES))
        lost = of(trained.happened, events.ServerLost)
        assert [(event.server, event.pid) for event in lost] == [(1, killed[0])]  # type: ignore[attr-defined]
        assert len(of(trained.happened, events.ServerReplaced)) == 1
        assert trained.cluster.coordinator.process(1).pid != killed[0]
        assert trained.cluster.audit().is_sound
        assert trained.auc is not None
        assert trained.auc > 0.55
        assert trained.pushes() == BATCHES


def test_what_holds_batches_back_is_heard_before_any_worker_starts(tmp_path: Path) -> None:
    finished: list[int] = []

    def tick(cluster: Cluster, leases: Leases, happened: list[events.Event]) -> None:
        if not finished:
            assert not of(happened, events.WorkerStarted)
        finished.append(leases.finished)
        leases.hold_after(1 if len(finished) < 5 else None)

    trained = Trained(tmp_path, tick, workers=2)
    with closing(trained.cluster):
        assert max(finished[:5]) <= 1
        assert trained.outcome.batches == BATCHES


def test_a_killed_worker_is_replaced_and_every_batch_is_trained_once(tmp_path: Path) -> None:
    killed: list[int] = []

    def tick(cluster: Cluster, leases: Leases, happened: list[events.Event]) -> None:
        started = of(happened, events.WorkerStarted)
        if leases.finished >= BATCHES // 4 and not killed:
            killed.append(started[0].pid)  # type: ignore[attr-defined]
            os.kill(killed[0], signal.SIGKILL)
        leases.hold_after(None if killed else BATCHES // 2)  # not over before the kill

    trained = Trained(tmp_path, tick, workers=2)
    with closing(trained.cluster):
        assert trained.outcome.batches == BATCHES
        assert trained.outcome.workers_lost == 1
        assert len(of(trained.happened, events.WorkerStarted)) == 3
        assert trained.pushes() == BATCHES
        batches = [each.batch for each in trained.told]
        assert len(set(batches)) == len(batches)  # none was trained twice
        assert len(batches) >= BATCHES - 1  # the killed one may have died before it said so
        assert trained.cluster.audit().is_sound


def test_synchronous_training_is_the_same_to_the_bit_every_time(tmp_path: Path) -> None:
    losses = []
    for run in ("one", "again"):
        folder = tmp_path / run
        folder.mkdir()
        spec = make_cluster_spec(WORKLOAD, Layout(servers=2, data=1, parity=1))
        engine = LocalEngine(logs=folder / "logs")
        with Cluster(spec, engine=engine, settings=Settings(spares=0, pulse_s=0)) as cluster:
            driver = Session(cluster.connect())
            cluster_train.start_networks(WORKLOAD, driver)
            cluster.train(
                cluster_train.ENTRY,
                {"workload": WORKLOAD.to_args(), "told": str(folder)},
                batches=range(6),
                workers=2,
                is_synchronous=True,
            )
            driver.close()
        losses.append({each.batch: each.loss for each in Told(folder).read()})
    assert sorted(losses[0]) == list(range(6))
    assert losses[0] == losses[1]  # to the bit, whoever was faster


def test_a_bad_entry_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    spec = make_cluster_spec(WORKLOAD, Layout(servers=2, data=1, parity=1))
    engine = LocalEngine(logs=tmp_path)
    with (
        Cluster(spec, engine=engine, settings=Settings(spares=0, pulse_s=0)) as cluster,
        pytest.raises(InvalidRequestError, match="cannot be imported"),
    ):
        cluster.train("no.such.module:train", batches=range(3), workers=1)
