"""A server with rows, and those who lack its token: they cost nothing, and training goes on."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from pyarrow import flight

from holdfast.cluster import gate, parts
from holdfast.cluster.engine import LocalEngine
from holdfast.cluster.message import Message
from holdfast.cluster.pushes import Gradients
from holdfast.cluster.spec import ClusterSpec, Optimizer, TableSpec
from holdfast.cluster.view import View
from holdfast.cluster.wire import Stream
from holdfast.model.placement import Placement
from tests.conftest import SEED as tests_seed
from tests.hostile import strangers
from tests.hostile.strangers import FLOODS, METHODS, PATHS, Memory

TOKEN = "5eca7e"
ROWS, DIM = 100_000, 16
SPEC = ClusterSpec(
    (TableSpec("users", ROWS, DIM, Placement(1), "none", Optimizer("sgd"), bound=0.5),), locks=2
)
MIB = 1 << 20
BODY = bytes(64 * MIB)
SPARE_BYTES = 24 * MIB  # that a server's memory may move by itself: threads, Python, its training
SEED = int(os.environ.get("HOLDFAST_SEED", tests_seed))
KNOCKS = int(os.environ.get("HOLDFAST_WIRE_MESSAGES", "4000")) // 4


class Training:
    """Pulls and pushes rows over and over."""

    def __init__(self, address: str) -> None:
        self.steps = 0
        self.error: BaseException | None = None
        self._stream = Stream(address, token=TOKEN, name="worker-0", epoch=1, deadline_s=60)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        slots_N = np.arange(0, ROWS, 50)
        grads_ND = np.ones((len(slots_N), DIM), np.float32)
        try:
            while not self._ended.is_set():
                pulled = self._stream.ask(parts.pack_slots("pull", [(0, slots_N)])).arrays[0]
                assert len(pulled) == len(slots_N) * DIM
                meta = {"worker": 0, "number": self.steps}
                self._stream.ask(
                    parts.pack_gradients("push", meta, [Gradients(0, slots_N, grads_ND)])
                )
                self.steps += 1
        except BaseException as error:
            self.error = error

    def check_goes_on(self) -> None:
        """Some more steps are made."""
        wanted = self.steps + 5
        strangers.wait_until(
            lambda: self.steps >= wanted or self.error is not None, "training stands still"
        )
        assert self.error is None

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._stream.close()


class Server:
    def __init__(self, address: str, pid: int) -> None:
        self.address, self.memory = address, Memory(pid)
        self.training = Training(address)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with LocalEngine(logs=tmp_path_factory.mktemp("logs")) as engine:
        process = engine.start("server", "server-0", {"token": TOKEN})
        with Stream(process.address, token=TOKEN, name="coordinator", epoch=None) as stream:
            view = View(1, (process.address,), version=1)
            meta = {"spec": SPEC.to_json(), "server": 0, "view": view.to_json()}
            stream.ask(Message("begin", meta), deadline_s=60)
        found = Server(process.address, process.pid)
        try:
            found.training.check_goes_on()
            strangers.knock(found.address, b"x")  # what a first stranger brings about once
            yield found
        finally:
            found.training.close()


@pytest.fixture(autouse=True)
def _costs_nothing(server: Server) -> Iterator[None]:
    """Around every test: memory stays as it was, nothing stays open, training goes on."""
    before, files = server.memory.now(), server.memory.files()
    with server.memory.watched():
        yield
        server.training.check_goes_on()
    assert server.memory.peak - before < SPARE_BYTES
    strangers.wait_until(
        lambda: server.memory.files() <= files + 2, "connections of strangers are left"
    )
    assert server.memory.now() - before < SPARE_BYTES


@pytest.mark.parametrize(
    ("method", "token"), [*((method, None) for method in METHODS), ("DoAction", b"wrong")]
)
def test_no_method_takes_in_a_body(server: Server, method: str, token: bytes | None) -> None:
    error = strangers.call(server.address, method, BODY, token=token)
    assert "unauthenticated" in str(error).lower() or isinstance(error, flight.FlightError)


def test_five_at_once_are_not_taken_in(server: Server) -> None:
    threads = [
        threading.Thread(target=strangers.call, args=(server.address, method, BODY))
        for method in ("DoAction", "GetFlightInfo", "DoGet", "DoPut", "DoExchange")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("path", PATHS)
def test_every_path_is_refused_as_by_a_grpc_server(server: Server, path: str) -> None:
    found = strangers.knock(server.address, strangers.request(path))
    assert b"grpc-status\x0216" in found


@pytest.mark.parametrize("what", FLOODS)
def test_no_flood_is_taken_in(server: Server, what: str) -> None:
    taken = strangers.pour(server.address, *FLOODS[what])
    # What the kernel holds on its way counts too: its buffers, on both sides.
    assert taken < 32 * MIB


def test_half_open_and_slow_connections_are_few_and_do_not_stay(server: Server) -> None:
    files = server.memory.files()
    connections = [strangers.connect(server.address) for _ in range(300)]
    for at, connection in enumerate(connections):
        try:
            connection.sendall(strangers.request()[: at % 120])
        except OSError:
            continue
    assert server.memory.files() <= files + gate.STRANGERS_MAX + 2
    server.training.check_goes_on()
    # The newest may still be there, and leave by themselves.
    assert all(strangers.ended(connection) for connection in connections)
    for connection in connections:
        connection.close()


def test_one_with_the_token_comes_in_among_many_without(server: Server) -> None:
    ended = threading.Event()

    def crowd() -> None:
        held = []
        while not ended.is_set():
            try:
                held.append(strangers.connect(server.address))
            except OSError:
                continue
            if len(held) > 100:
                held.pop(0).close()
        for each in held:
            each.close()

    threads = [threading.Thread(target=crowd) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        options = flight.FlightCallOptions(
            headers=[(b"holdfast-token", TOKEN.encode())], timeout=60
        )
        for _ in range(5):
            with flight.FlightClient(f"grpc://{server.address}") as client:
                assert list(client.do_action(flight.Action("hello", b""), options)) == []
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@pytest.mark.soak
def test_random_bytes_in_the_place_of_a_call(server: Server) -> None:
    print(f"HOLDFAST_SEED={SEED} HOLDFAST_WIRE_MESSAGES={4 * KNOCKS}")
    rng = random.Random(SEED)
    for _ in range(KNOCKS):
        sent = strangers.request(rng.choice(PATHS), token=rng.choice((None, b"5eca7f")))
        sent = strangers.changed(rng, sent + rng.randbytes(rng.choice((0, 0, 100, 30_000))))
        strangers.knock(server.address, sent)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_does_not_reach_the_local_socket(server: Server) -> None:
    folder = Path(f"/tmp/holdfast-{os.geteuid()}")
    assert folder.stat().st_mode & 0o777 == 0o700
