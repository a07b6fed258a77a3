"""Write messages.json: messages of every kind, as real clusters send them, for fuzzers to change.

    python -m tests.hostile.make_messages

To be run again where messages change; the fuzzer's test says when a kind is missing.
"""

from __future__ import annotations

import base64
import json
import tempfile
import threading
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.cluster.checkpoints import ClusterCheckpointer
from holdfast.cluster.cluster import Cluster
from holdfast.cluster.coordinator import Settings
from holdfast.cluster.engine import Process
from holdfast.cluster.kinds import COORDINATOR_KINDS, SERVER_KINDS
from holdfast.cluster.leases import Leases
from holdfast.cluster.message import Caller, Message, encode
from holdfast.cluster.spec import ClusterSpec, Optimizer, TableSpec
from holdfast.cluster.worker import Session
from holdfast.model.placement import Placement
from tests.cluster.oracle import random_gradients
from tests.cluster.threads import ThreadEngine

FILE = Path(__file__).parent / "messages.json"
FOLDER = "FOLDER"  # in the place of where checkpoints were
EACH = 4  # of each kind: the first ones that have arrays, and else the first


class Recorder(ThreadEngine):
    """Keeps what its servers are asked."""

    def __init__(self, found: dict[str, list[tuple[Caller, Message]]]) -> None:
        super().__init__()
        self.found = found
        self._lock = threading.Lock()

    def note(self, table: str, caller: Caller, message: Message) -> None:
        with self._lock:
            self.found.setdefault(f"{table}.{message.kind}", []).append((caller, message))

    def start(self, role: str, name: str, spec: Mapping[str, Any]) -> Process:
        process = super().start(role, name, spec)
        server = self.servers[name]
        handle = server._listener._handle

        def noting(caller: Caller, message: Message) -> Message:
            self.note("server", caller, message)
            return handle(caller, message)

        server._listener._handle = noting
        return process


def spec_of(parity: int, code: str, *, rows: int = 60, held: bool = False) -> ClusterSpec:
    """A cluster of five servers; messages for it fit any number of rows from 60 on."""
    placed = Placement(5, data=2, parity=parity)
    tables = [
        TableSpec("users", rows, 2, placed, code, Optimizer("adagrad"), seed=1, bound=0.5),
        TableSpec("ads", rows - 10, 3, placed, code, Optimizer("sgd"), seed=2, bound=0.5),
    ]
    if held:
        tables.append(
            TableSpec("dense", 9, 4, Placement(5), "none", Optimizer("sgd"), is_held=True)
        )
    return ClusterSpec(tuple(tables), locks=3)


def cluster_of(recorder: Recorder, spec: ClusterSpec, **settings: Any) -> Cluster:
    cluster = Cluster(
        spec,
        engine=recorder,
        settings=Settings(spares=2, pulse_s=0, flush_every_s=0.01, **settings),
    )
    handle = cluster.coordinator._listener._handle

    def noting(caller: Caller, message: Message) -> Message:
        recorder.note("coordinator", caller, message)
        return handle(caller, message)

    cluster.coordinator._listener._handle = noting
    cluster.start()
    return cluster


def crash(recorder: Recorder, cluster: Cluster, *servers: int) -> None:
    processes = [cluster.coordinator.process(server) for server in servers]
    for process in processes:
        recorder.crash(process, is_seen=False)
    for process in processes:
        cluster.coordinator._on_death(process, "was killed by signal 9")


def train_in_two_phases(recorder: Recorder, folder: Path) -> None:
    """Pushes, a loss, a lost worker, a checkpoint, more losses than parities."""
    spec = spec_of(2, "rs")
    cluster = cluster_of(recorder, spec)
    layer = ClusterCheckpointer(cluster, folder, strategy="check-n-run")
    rng = np.random.default_rng(1)
    client = cluster.connect()
    client.assign({"users": (np.arange(9), np.ones((9, 2), np.float32))})
    for number in range(20):
        client.push(number, random_gradients(rng, spec, rows=12))
        client.pull({"users": np.arange(12)})
    layer.save(step=20)
    for number in range(20, 30):
        client.push(number, random_gradients(rng, spec, rows=12))
        if number == 25:
            crash(recorder, cluster, 1)
    client.drain()
    cluster.wait_whole(60)
    worker = Process("worker-0", "worker", 99, "")
    cluster.coordinator.join(worker, 0)
    cluster.coordinator._on_death(worker, "was killed by signal 9")
    cluster.wait_whole(60)
    cluster.audit()
    cluster.stats()
    crash(recorder, cluster, 0, 1, 2)
    time.sleep(0.5)
    cluster.wait_whole(60)
    client.close()
    layer.close()
    cluster.close()


def train_in_one_phase(recorder: Recorder) -> None:
    spec = spec_of(1, "xor", held=True)
    cluster = cluster_of(recorder, spec, two_phase=False)
    rng = np.random.default_rng(1)
    client = cluster.connect()
    client.hold("dense", np.ones((9, 4), np.float32))
    for number in range(10):
        client.push(number, random_gradients(rng, spec, rows=12))
        if number == 5:
            crash(recorder, cluster, 1)
    cluster.wait_whole(60)
    client.close()
    cluster.close()


def train_in_rounds(recorder: Recorder) -> None:
    spec = spec_of(1, "xor")
    cluster = cluster_of(recorder, spec)
    cluster.coordinator.leases = Leases(range(4), round_batches=1)
    cluster._workers = 1
    session = Session.connect(
        spec,
        coordinator=cluster.coordinator.address,
        worker=0,
        token=cluster._token,
        two_phase=True,
        is_synchronous=True,
    )
    rng = np.random.default_rng(1)
    assert session._ask_lease is not None
    done = None
    while (lease := session._ask_lease(done)).kind == "lease":
        session.client.push(lease.meta["number"], random_gradients(rng, spec, rows=12))
        done = lease.meta["number"]
    session.close()
    cluster.close()


def main() -> None:
    found: dict[str, list[tuple[Caller, Message]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        train_in_two_phases(Recorder(found), Path(folder))
    train_in_one_phase(Recorder(found))
    train_in_rounds(Recorder(found))
    entries = []
    for name, messages in sorted(found.items()):
        table = name.split(".")[0]
        messages.sort(key=lambda each: (not each[1].arrays, len(encode(each[1])[1])))
        step = max(1, len(messages) // EACH)
        for caller, message in messages[::step][:EACH]:
            header, payload = encode(message)
            entries.append(
                {
                    "to": table,
                    "caller": caller.name,
                    "has_epoch": caller.epoch is not None,
                    "header": json.loads(header.replace(folder.encode(), FOLDER.encode())),
                    "payload": base64.b64encode(zlib.compress(payload.tobytes())).decode(),
                }
            )
    expected = {f"server.{kind}" for kind in SERVER_KINDS} | {
        f"coordinator.{kind}" for kind in COORDINATOR_KINDS
    }
    missing = expected - set(found) - {"server.pulse", "coordinator.pulse"}
    FILE.write_text("[\n" + ",\n".join(json.dumps(each) for each in entries) + "\n]\n")
    print(f"{len(entries)} messages of {len(found)} kinds; missing: {sorted(missing)}")


if __name__ == "__main__":
    main()
