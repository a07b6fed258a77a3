"""A cluster of threads with a second layer, an oracle beside it, and crashes at chosen messages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from holdfast import events
from holdfast.checkpoint.strategy import Strategy
from holdfast.cluster.checkpoints import ClusterCheckpointer
from holdfast.cluster.cluster import Cluster
from holdfast.cluster.coordinator import Settings
from holdfast.cluster.engine import Process
from holdfast.cluster.spec import ClusterSpec
from tests.cluster.oracle import Oracle, random_gradients
from tests.cluster.threads import CrashingEngine, When

Records = dict[str, np.ndarray]
STEPS = Strategy("steps", base="consecutive", codec="fp32")  # no clock decides what is a base
SINCE_BASE = Strategy("since-base", base="one-shot", codec="fp32")


class StrikingEngine(CrashingEngine):
    """Crashes one server at the next message of some kind."""

    def __init__(self) -> None:
        super().__init__()
        self.kind: str | None = None
        self.when: When = "before"
        self.struck: list[Process] = []
        self._lock = threading.Lock()

    def choose(self, process: Process, kind: str) -> When | None:
        with self._lock:
            if kind != self.kind:
                return None
            self.kind = None
            self.struck.append(process)
            return self.when


class Trial:
    """A cluster of threads with a second layer, one client, and an oracle that sees its pushes."""

    def __init__(self, spec: ClusterSpec, url: Path, seed: int = 0, **settings: object) -> None:
        self.spec, self.url = spec, url
        self.happened: list[events.Event] = []
        self.engine = StrikingEngine()
        self.cluster = Cluster(
            spec,
            engine=self.engine,
            settings=Settings(spares=2, pulse_s=0),
            log=events.EventLog([self.happened.append]),
        )
        self.cluster.start()
        self.layer = ClusterCheckpointer(self.cluster, url, **settings)
        self.oracle = Oracle(spec)
        self.rng = np.random.default_rng(seed)
        self.client = self.cluster.connect()
        self.number = 0

    def push(self, times: int = 1, *, rows: int = 20) -> None:
        for _ in range(times):
            gradients = random_gradients(self.rng, self.spec, rows=rows)
            self.client.push(self.number, gradients)
            self.oracle.push(gradients)
            self.number += 1

    def save(self) -> Records:
        """Save, and what the oracle had then."""
        self.layer.save(step=self.number)
        return self.copy()

    def copy(self) -> Records:
        return {name: records_NW.copy() for name, records_NW in self.oracle.records.items()}

    def crash(self, *servers: int) -> None:
        """All at once: the coordinator hears of the first when all are gone."""
        processes = [self.cluster.coordinator.process(server) for server in servers]
        for process in processes:
            self.engine.crash(process, is_seen=False)
        for process in processes:
            self.cluster.coordinator._on_death(process, "was killed by signal 9")

    def read(self) -> Records:
        return {table.name: self.cluster.read(table.name) for table in self.spec.tables}

    def told(self, kind: type[events.Event]) -> list[events.Event]:
        return [event for event in self.happened if isinstance(event, kind)]

    def reconnect(self) -> None:
        self.client.close()
        self.client = self.cluster.connect()
        self.number = 0

    def close(self) -> None:
        self.client.close()
        self.layer.close()
        self.cluster.close()


@contextmanager
def trial(spec: ClusterSpec, url: Path, **settings: object) -> Iterator[Trial]:
    found = Trial(spec, url, **settings)
    try:
        yield found
    finally:
        found.close()


def is_same(found: np.ndarray, expected: np.ndarray) -> bool:
    return np.array_equal(found.view(np.uint32), expected.view(np.uint32))


def rows_of(spec: ClusterSpec, servers: set[int]) -> dict[str, np.ndarray]:
    """Of each table which rows these servers hold."""
    return {
        table.name: np.isin(table.placement.servers_of(np.arange(table.rows)), list(servers))
        for table in spec.tables
    }
