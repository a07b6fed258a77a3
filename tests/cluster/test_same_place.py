"""A replacement on the very port of the process that was lost is another process to everybody."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from holdfast.cluster.cluster import Cluster
from holdfast.cluster.coordinator import Settings
from holdfast.cluster.engine import Process
from holdfast.cluster.server import Server
from tests.cluster.oracle import Oracle, random_gradients
from tests.cluster.test_protocol import check_same, make_spec
from tests.cluster.threads import ThreadEngine


class SamePlaceEngine(ThreadEngine):
    """Starts servers where others were lost."""

    def __init__(self) -> None:
        super().__init__()
        self.ports: list[int] = []
        self.reused = 0
        self._lock = threading.Lock()

    def kill(self, process: Process) -> None:
        with self._lock:  # nobody takes the place before it is free
            is_here = process.name in self.servers
            super().kill(process)
            if is_here:
                self._closing[-1].join()
                self.ports.append(int(process.address.rpartition(":")[2]))

    def make_server(self, spec: Mapping[str, Any]) -> Server:
        if not self.ports:
            return super().make_server(spec)
        self.reused += 1
        return Server(str(spec["token"]), port=self.ports.pop())


@pytest.mark.parametrize("parity", [1, 2])
def test_a_replacement_on_the_same_port_is_given_what_it_lacks(parity: int) -> None:
    spec = make_spec(servers=6, parity=parity)
    engine = SamePlaceEngine()
    settings = Settings(spares=0, pulse_s=0, flush_every_s=0.2)
    cluster = Cluster(spec, engine=engine, settings=settings)
    cluster.start()
    oracle, rng = Oracle(spec), np.random.default_rng(parity)
    client = cluster.connect()
    try:
        for number in range(30):
            gradients = random_gradients(rng, spec)
            client.push(number, gradients)
            oracle.push(gradients)
            if number % 10 == 5:
                cluster.wait_whole(30)
                engine.crash(cluster.coordinator.process(number // 10))
        client.drain()
        cluster.wait_whole(30)
        assert engine.reused == 3
        check_same(cluster, oracle)
    finally:
        client.close()
        cluster.close()
