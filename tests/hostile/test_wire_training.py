"""A cluster of processes that trains, and crowds around it with and without its token.

Messages of all kinds, changed at random, go to a server that serves, one that is frozen, a spare,
one that recovers, and the coordinator; raw bytes without a token to all their ports. Training goes
on, no process dies or grows, and in the end every parity is what its rows say.

Those with the token are in confusion, not in power: they do not call themselves the coordinator or
a member, whose valid orders are followed (test_wire_messages.py is about those).
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from holdfast.cluster import wire
from holdfast.cluster.cluster import Cluster
from holdfast.cluster.coordinator import Settings
from holdfast.cluster.engine import LocalEngine
from holdfast.cluster.message import Message, kind_of
from holdfast.cluster.wire import Stream
from holdfast.errors import HoldfastError
from tests.cluster.oracle import random_gradients
from tests.conftest import SEED as tests_seed
from tests.hostile import strangers, wirefuzz
from tests.hostile.make_messages import spec_of
from tests.hostile.strangers import Memory
from tests.hostile.wirefuzz import Fuzzer

SEED = int(os.environ.get("HOLDFAST_SEED", tests_seed))
MESSAGES = int(os.environ.get("HOLDFAST_WIRE_MESSAGES", "4000")) // 16  # in each state
WARM = 60  # messages before memory is compared: kernels, buffers and threads for the first time
NAMES = ("worker-250", "worker-250", "worker-251", "somebody", "server-77", "driver")
GROWN_MAX = 48 << 20
PATIENCE_S, SHORT_S = 20.0, 0.2
MAY_WAIT = {"drain", "pull", "present", "push", "commit", "assign", "job", "snapshot", "prepare"}


class Training:
    """A worker that pulls and pushes over and over."""

    def __init__(self, cluster: Cluster) -> None:
        self.steps = 0
        self.error: BaseException | None = None
        self._cluster = cluster
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        rng = np.random.default_rng(SEED)
        spec = self._cluster.spec
        client = self._cluster.connect()
        try:
            while not self._ended.is_set():
                gradients = random_gradients(rng, spec, rows=64)
                client.pull({name: ids_N for name, (ids_N, _) in gradients.items()})
                client.push(self.steps, gradients)
                self.steps += 1
            client.drain()
        except BaseException as error:
            self.error = error
        finally:
            client.close()

    def check_goes_on(self) -> None:
        wanted = self.steps + 5
        strangers.wait_until(
            lambda: self.steps >= wanted or self.error is not None, "training stands still"
        )
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


class Crowd:
    """Sends one message after the other to some address."""

    def __init__(self, token: str, folder: Path) -> None:
        self.rng = random.Random(SEED)
        self._token = token
        self._recorded = wirefuzz.load(folder)
        self._fuzzer = Fuzzer(self.rng, self._recorded)
        self._streams: dict[tuple[str, str], Stream] = {}
        self.outcomes: Counter[str] = Counter()

    def send(self, address: str, epoch: int) -> None:
        """One message, with a token or without."""
        if self.rng.random() < 0.4:
            self._knock(address)
        else:
            self._ask(address, epoch)

    def _knock(self, address: str) -> None:
        self.outcomes["without token"] += 1
        if self.rng.random() < 0.02:
            method = self.rng.choice(list(strangers.METHODS))
            strangers.call(address, method, bytes(self.rng.choice((0, 1000, 1 << 20))))
            return
        sent = strangers.request(self.rng.choice(strangers.PATHS))
        sent = strangers.changed(self.rng, sent + self.rng.randbytes(self.rng.choice((0, 2000))))
        strangers.knock(address, sent)

    def _ask(self, address: str, epoch: int) -> None:
        chosen = self.rng.choice(self._recorded)
        meta = json.loads(json.dumps(chosen.message.meta))
        name = self.rng.choice(NAMES)
        if name.startswith("worker-") and "worker" in meta:
            meta["worker"] = int(name.removeprefix("worker-"))
        message = Message(chosen.message.kind, meta, chosen.message.arrays)
        if self.rng.random() < 0.8:
            message = self._fuzzer.change(message)
        if not wirefuzz.travels(message):
            return
        header, payload = self._fuzzer.encode(message)
        try:
            stream = self._stream(address, name, epoch)
            with stream._closing_on_failure(), stream._wire.sending(PATIENCE_S) as writer:
                wire._write(writer, stream._sent, header, payload)
            stream._sent += 1
            stream.receive(SHORT_S if kind_of(header) in MAY_WAIT else PATIENCE_S)
            self.outcomes["accepted"] += 1
        except HoldfastError as error:
            self.outcomes[type(error).__name__] += 1
            assert type(error) is not HoldfastError, f"{name} {header[:2000]!r} -> {error!r}"

    def _stream(self, address: str, name: str, epoch: int) -> Stream:
        found = self._streams.get((address, name))
        if found is None or not found.is_open:
            found = self._streams[address, name] = Stream(
                address, token=self._token, name=name, epoch=epoch, deadline_s=PATIENCE_S
            )
        return found

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()


@contextmanager
def frozen(cluster: Cluster, server: int) -> Iterator[None]:
    """As another server does that recovers."""
    view = cluster.coordinator.view
    with Stream(
        view.addresses[server], token=cluster._token, name="server-3-recovery", epoch=view.epoch
    ) as stream:
        stream.ask(Message("freeze", {"ticket": "3.0.fuzz.0", "granules": [0, 1, 2]}))
        try:
            yield
        finally:
            stream.ask(Message("thaw", {"ticket": "3.0.fuzz.0"}))


@pytest.mark.soak
def test_training_goes_on_beside_any_messages(tmp_path: Path) -> None:
    print(f"HOLDFAST_SEED={SEED} HOLDFAST_WIRE_MESSAGES={16 * MESSAGES}")
    engine = LocalEngine(logs=tmp_path / "logs")
    cluster = Cluster(
        spec_of(2, "rs", rows=60_000),
        engine=engine,
        settings=Settings(spares=2, pulse_s=5, flush_every_s=0.05, recovery_share=1e-4),
    )
    with cluster:
        coordinator = cluster.coordinator
        crowd = Crowd(cluster._token, tmp_path)
        training = Training(cluster)
        try:
            members = coordinator._servers
            spare = members.spares[0].address
            epoch = coordinator.view.epoch
            pids = [process.pid for process in (*members.members.values(), *members.spares)]

            def crowd_around(address: str, count: int) -> None:
                for at in range(count):
                    crowd.send(coordinator.address if at % 10 == 9 else address, epoch)

            for address in (*coordinator.view.addresses, spare):
                crowd_around(address, WARM)
            memories = [Memory(pid) for pid in pids]
            before = [memory.now() for memory in memories]
            crowd_around(coordinator.view.addresses[2], MESSAGES)
            training.check_goes_on()
            crowd_around(spare, MESSAGES)
            for _ in range(0, MESSAGES, 25):
                with frozen(cluster, 1):
                    crowd_around(coordinator.view.addresses[1], 25)
                training.check_goes_on()
            grown = [memory.now() - size for memory, size in zip(memories, before, strict=True)]
            print("grown:", [size >> 20 for size in grown], "MiB; steps:", training.steps)
            assert max(grown) < GROWN_MAX
            assert [process.pid for process in members.members.values()] == pids[:5]

            # One that brings its rows back, slowly: workers ask for some before.
            recover = members.tell_to_recover

            def recover_later(servers: Collection[int]) -> None:
                order = functools.partial(recover, servers)
                threading.Timer(0.5, coordinator._queue.put, (order,)).start()

            members.tell_to_recover = recover_later  # type: ignore[method-assign]
            os.kill(pids[0], signal.SIGKILL)
            strangers.wait_until(
                lambda: coordinator.is_complete and 0 in coordinator.view.lacks_rows,
                "nobody took the lost server's place",
            )
            epoch = coordinator.view.epoch
            crowd_around(coordinator.view.addresses[0], WARM)
            memory = Memory(coordinator.process(0).pid)
            size = memory.now()
            crowd_around(coordinator.view.addresses[0], MESSAGES)
            training.check_goes_on()
            print("recovering, grown:", (memory.now() - size) >> 20, "MiB")
            print("lacking:", sorted(coordinator.view.lacking))
            assert memory.now() - size < GROWN_MAX
        finally:
            print(dict(crowd.outcomes))
            with suppress(HoldfastError):
                crowd.close()
            training.close()
        assert training.error is None
        cluster.wait_whole(120)
        found = cluster.audit()
        assert found.is_sound, found
        assert found.parities > 0
    for log in (tmp_path / "logs").iterdir():
        assert "Traceback" not in log.read_text(), log.read_text()[-4000:]
