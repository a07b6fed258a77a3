"""The sweep by slabs: used where one server alone is lost, right whoever crashes in the middle."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from holdfast.cluster import sweep
from holdfast.cluster.cluster import Cluster
from holdfast.cluster.coordinator import Settings
from holdfast.cluster.engine import Process
from holdfast.cluster.spec import ClusterSpec
from holdfast.errors import UnavailableError
from tests.cluster.oracle import Oracle, random_gradients
from tests.cluster.test_protocol import check_same, make_spec
from tests.cluster.threads import CrashingEngine, When


class CountingEngine(CrashingEngine):
    """Counts messages by kind; ``strike`` decides at each slab what crashes."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = Counter[str]()
        self.strike: Callable[[Process], When | None] = lambda process: None
        self._lock = threading.Lock()

    def choose(self, process: Process, kind: str) -> When | None:
        with self._lock:
            self.kinds[kind] += 1
            return self.strike(process) if kind == "slab" else None


class Run:
    """A cluster of threads whose servers have been trained a little."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.engine = CountingEngine()
        settings = Settings(spares=2, pulse_s=0)
        self.cluster = Cluster(spec, engine=self.engine, settings=settings)
        self.cluster.start()
        self.client = self.cluster.connect()
        self.spec, self.oracle, self.number = spec, Oracle(spec), 0
        self.rng = np.random.default_rng(0)

    def push(self, times: int) -> None:
        for _ in range(times):
            gradients = random_gradients(self.rng, self.spec)
            self.client.push(self.number, gradients)
            self.oracle.push(gradients)
            self.number += 1

    def settle(self) -> None:
        """Until all that was pushed is in the parities, and no witness keeps a copy of it.

        A replacement applies the copies that witnesses keep, and decodes their rows before.
        """
        self.client.drain()
        ends_at = time.monotonic() + 60
        while any(
            server._shard.copies(owner)
            for server in list(self.engine.servers.values())
            if server._shard is not None
            for owner in range(self.spec.servers)
        ):
            assert time.monotonic() < ends_at
            time.sleep(0.001)

    def process(self, server: int) -> Process:
        return self.cluster.coordinator.process(server)

    def check(self) -> None:
        self.client.drain()
        self.cluster.wait_whole(30)
        check_same(self.cluster, self.oracle)

    def close(self) -> None:
        self.client.close()
        self.cluster.close()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks a range: what is asked ahead, and memory taken in turns, counts."""
    monkeypatch.setattr(sweep, "_BLOCK_BYTES", 256)


@pytest.mark.parametrize(
    "spec",
    [
        make_spec(),
        make_spec(servers=7, data=3, parity=2),
        make_spec(servers=6, data=4, optimizer="rowwise-adagrad", locks=1),
    ],
    ids=["xor", "two parities", "servers without a part of a stripe"],
)
def test_one_lost_server_comes_back_by_slabs_alone(spec: ClusterSpec) -> None:
    run = Run(spec)
    try:
        run.push(6)
        for server in (0, 3):
            run.settle()
            run.engine.kinds.clear()
            run.engine.crash(run.process(server))
            run.cluster.wait_whole(30)
            assert run.engine.kinds["slab"] > spec.locks
            assert run.engine.kinds["fetch"] == 0
            assert run.engine.kinds["freeze"] == spec.servers - 1  # nobody trains meanwhile
            run.push(3)
        run.check()
    finally:
        run.close()


def test_where_memory_is_not_shared_slabs_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> None:
        raise UnavailableError("processes share no memory here")

    monkeypatch.setattr(sweep, "Offer", refuse)
    run = Run(make_spec())
    try:
        run.push(6)
        run.engine.crash(run.process(2))
        run.push(6)
        run.check()
        assert run.engine.kinds["slab"] > 0 and run.engine.kinds["handover"] == 0
    finally:
        run.close()


def test_memory_too_small_for_a_slab_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_pages", lambda size: 64)
    run = Run(make_spec())
    try:
        run.push(6)
        run.engine.crash(run.process(2))
        run.check()
        assert run.engine.kinds["handover"] > 0
    finally:
        run.close()


def test_memory_is_given_up_after_a_sweep() -> None:
    run = Run(make_spec())
    try:
        run.engine.crash(run.process(1))
        run.cluster.wait_whole(30)
        assert run.engine.kinds["handover"] == 2 * 4  # opened, and given up
        for server in run.engine.servers.values():
            assert not server._giver._handovers._open
    finally:
        run.close()


@pytest.mark.parametrize("nth", [1, 9])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_giver_lost_in_the_middle_of_a_slab_comes_back_too(nth: int, when: When) -> None:
    run = Run(make_spec(servers=7, data=4, parity=2))
    left = [nth]

    def strike(process: Process) -> When | None:
        left[0] -= 1
        return when if left[0] == 0 else None

    try:
        run.push(6)
        run.engine.strike = strike
        run.engine.crash(run.process(2))
        run.push(8)
        run.check()
        assert left[0] <= 0
    finally:
        run.close()


@pytest.mark.parametrize("nth", [1, 4, 9])
def test_a_replacement_lost_in_the_middle_of_its_sweep_is_replaced(nth: int) -> None:
    run = Run(make_spec())
    left = [nth]

    def strike(process: Process) -> When | None:
        left[0] -= 1
        if left[0] == 0:
            run.engine.crash(run.process(2))
        return None

    try:
        run.push(6)
        run.engine.strike = strike
        run.engine.crash(run.process(2))
        run.push(8)
        run.check()
        assert left[0] <= 0
    finally:
        run.close()
