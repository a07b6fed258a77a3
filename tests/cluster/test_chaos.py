"""Servers crash at random messages, several at once, replacements too; workers die in mid-message.

Nothing that was committed is lost, nothing is applied twice. Each run is seeded; a failure prints
the seed and the crashes. What threads do between messages is not replayed, so a seed may have to be
run again. HOLDFAST_CHAOS_RUNS makes more runs than the few of the suite.
"""

from __future__ import annotations

import os
import queue
import random
import threading

import numpy as np
import pytest

from holdfast.cluster.client import Client
from holdfast.cluster.cluster import Cluster
from holdfast.cluster.coordinator import Settings
from holdfast.cluster.engine import Process
from holdfast.cluster.spec import ClusterSpec
from tests.cluster.chaos import Chaos, DyingPeers, WorkerDied
from tests.cluster.oracle import Oracle, random_gradients
from tests.cluster.test_protocol import OPTIMIZERS, check_same, make_spec

RUNS = int(os.environ.get("HOLDFAST_CHAOS_RUNS", "8"))
PUSHES = 25


class Life:
    """One worker's pushes, through the deaths of its processes."""

    def __init__(self, trial: Trial, index: int, deaths: int) -> None:
        self.trial, self.index, self.deaths = trial, index, deaths
        self.rng = random.Random(trial.seed * 1000 + index)
        self.grads = np.random.default_rng((trial.seed, index))
        self.process: Process | None = None

    def begin(self) -> Client:
        cluster = self.trial.cluster
        client = cluster.connect()
        self.process = Process(f"worker-{client.worker}", "worker", client.worker, "nowhere")
        cluster.coordinator.join(self.process, client.worker)
        if self.deaths:
            self.deaths -= 1
            after = self.rng.randrange(4, 3 * PUSHES)
            client._peers = DyingPeers(client._peers, self.rng, after=after)
        return client

    def live(self) -> None:
        client, number = self.begin(), -1
        for _ in range(PUSHES):
            gradients = random_gradients(self.grads, self.trial.spec, is_exact=self.trial.is_exact)
            is_counted = False
            while not is_counted:
                number += 1
                try:
                    client.pull({name: ids_N for name, (ids_N, _) in gradients.items()})
                    client.push(number, gradients)
                    is_counted = True
                except WorkerDied:
                    # Whether its last push happened is for the coordinator to say.
                    is_counted = self.die(client) >= number
                    client, number = self.begin(), -1
            self.trial.count(gradients)
        try:
            client.drain()
        except WorkerDied:
            self.die(client)
        else:
            client.close()

    def die(self, client: Client) -> int:
        """The last push that happened."""
        client.close()
        assert self.process is not None
        self.trial.cluster.coordinator._on_death(self.process, "was killed by signal 9")
        worker, last = self.trial.retired[client.worker].get(timeout=120)
        assert worker == client.worker
        return last


class Trial:
    """A cluster with random settings, an oracle, and crashes."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        rng = random.Random(seed)
        parity = rng.choice([1, 1, 2])
        workers = rng.choice([1, 1, 3])
        deaths = rng.choice([0, 1, 2])
        # Sums of small whole numbers: the order of pushes does not matter.
        self.is_exact = workers > 1 or deaths > 0
        groups = rng.choice([1, 1, 2]) if parity == 1 else 1
        self.spec: ClusterSpec = make_spec(
            servers=groups * (4 + parity + rng.randrange(2)) if groups == 1 else 6,
            data=4 if groups == 1 else 2,
            parity=parity,
            groups=groups,
            optimizer="sgd" if self.is_exact else rng.choice(OPTIMIZERS),
            locks=rng.choice([1, 3, 5]),
            bound=0.0 if self.is_exact else 0.5,
        )
        self.chaos = Chaos(seed, self.spec, kills=rng.randrange(1, 5))
        settings = Settings(
            spares=rng.randrange(1, 3), pulse_s=0, flush_every_s=rng.choice([0.0, 0.1, 2.0])
        )
        self.cluster = Cluster(self.spec, engine=self.chaos.engine, settings=settings)
        self.oracle = Oracle(self.spec)
        self.retired: dict[int, queue.SimpleQueue[tuple[int, int]]] = {
            worker: queue.SimpleQueue() for worker in range(32)
        }
        self.lives = [Life(self, index, deaths) for index in range(workers)]
        self._lock = threading.Lock()

    def count(self, gradients: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
        with self._lock:
            self.oracle.push(gradients)

    def run(self) -> None:
        self.cluster.start()
        try:
            self._listen()
            self._live()
            self.cluster.wait_whole(60)
            check_same(self.cluster, self.oracle)
        finally:
            self.cluster.close()

    def _listen(self) -> None:
        """Hear what the coordinator decides of lost workers."""
        crew = self.cluster.coordinator.crew
        retire = crew.retire

        def heard(worker: int, *, committed: int) -> list[int]:
            batches = retire(worker, committed=committed)
            self.retired[worker].put((worker, committed))
            return batches

        crew.retire = heard  # type: ignore[method-assign]
        self.chaos.coordinator = self.cluster.coordinator

    def _live(self) -> None:
        errors: list[BaseException] = []

        def live(life: Life) -> None:
            try:
                life.live()
            except BaseException as error:
                errors.append(error)

        self.chaos.is_on = True
        threads = [threading.Thread(target=live, args=(life,)) for life in self.lives]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.chaos.is_on = False
        if errors:
            raise errors[0]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(RUNS))
def test_rows_equal_the_oracles_whoever_crashes_when(seed: int) -> None:
    trial = Trial(seed)
    try:
        trial.run()
    finally:
        print(f"seed {seed}: {trial.chaos.killed}")
