"""Servers crash at random messages, two at once with two parities, replacements too; none is lost.

Each run is seeded; a failure prints the seed and the crashes. What threads do between messages is
not replayed, so a seed may have to be run again.
"""

from __future__ import annotations

import os
import random
import threading

import numpy as np
import pytest

from holdfast.cluster.client import Client
from holdfast.cluster.cluster import Cluster
from holdfast.cluster.coordinator import Settings
from tests.cluster.chaos import Chaos
from tests.cluster.oracle import Oracle, random_gradients
from tests.cluster.test_protocol import OPTIMIZERS, check_same, make_spec

RUNS = int(os.environ.get("HOLDFAST_CHAOS_RUNS", "6"))


def run(seed: int) -> list[str]:
    """One run with random settings and crashes; what crashed."""
    rng = random.Random(seed)
    parity = rng.choice([1, 1, 2])
    workers = rng.choice([1, 1, 3])
    is_exact = workers > 1  # sums of small whole numbers: the order of pushes does not matter
    spec = make_spec(
        servers=4 + parity + rng.randrange(2),
        parity=parity,
        optimizer="sgd" if is_exact else rng.choice(OPTIMIZERS),
        locks=rng.choice([1, 3, 5]),
        bound=0.0 if is_exact else 0.5,
    )
    chaos = Chaos(seed, parity, kills=rng.randrange(1, 5))
    settings = Settings(spares=rng.randrange(1, 3), pulse_s=0)
    cluster = Cluster(spec, engine=chaos.engine, settings=settings)
    cluster.start()
    chaos.coordinator = cluster.coordinator
    oracle = Oracle(spec)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work(client: Client, worker: int) -> None:
        grads = np.random.default_rng((seed, worker))
        try:
            for number in range(25):
                gradients = random_gradients(grads, spec, is_exact=is_exact)
                client.pull({name: ids_N for name, (ids_N, _) in gradients.items()})
                client.push(number, gradients)
                with lock:
                    oracle.push(gradients)
            client.settle()
        except BaseException as error:
            errors.append(error)
        finally:
            client.close()

    try:
        chaos.is_on = True
        clients = [cluster.connect() for _ in range(workers)]
        threads = [
            threading.Thread(target=work, args=(client, worker))
            for worker, client in enumerate(clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        chaos.is_on = False
        if errors:
            raise errors[0]
        cluster.wait_whole(60)
        check_same(cluster, oracle)
    finally:
        cluster.close()
    return chaos.killed


@pytest.mark.parametrize("seed", range(RUNS))
def test_rows_equal_the_oracles_whoever_crashes_when(seed: int) -> None:
    killed = run(seed)
    print(f"seed {seed}: {killed}")
