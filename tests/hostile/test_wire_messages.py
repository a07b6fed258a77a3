"""Messages of all kinds, changed at random, at servers with rows in every state.

Whatever is refused changes nothing, is refused by an error of ours, and the next one is heard. The
same number of messages and the same seed bring the same messages:

    HOLDFAST_SEED=7 HOLDFAST_WIRE_MESSAGES=100000 pytest tests/hostile/test_wire_messages.py
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from holdfast.cluster import coordinator as coordinators
from holdfast.cluster import crew, orders, wire
from holdfast.cluster.arenashard import ArenaShard
from holdfast.cluster.cluster import Cluster
from holdfast.cluster.coordinator import Settings
from holdfast.cluster.kinds import COORDINATOR_KINDS, SERVER_KINDS
from holdfast.cluster.leases import Leases
from holdfast.cluster.message import Message, kind_of
from holdfast.cluster.server import Server
from holdfast.cluster.wire import Stream
from holdfast.errors import HoldfastError, UnavailableError
from tests.cluster.oracle import random_gradients
from tests.cluster.threads import ThreadEngine
from tests.conftest import SEED as tests_seed
from tests.hostile import wirefuzz
from tests.hostile.make_messages import spec_of
from tests.hostile.wirefuzz import Fuzzer, Recorded

SEED = int(os.environ.get("HOLDFAST_SEED", tests_seed))
MESSAGES = int(os.environ.get("HOLDFAST_WIRE_MESSAGES", "4000")) // 10
STATES = ("spare", "serving", "frozen", "recovering")
TICKET = "1.1.fuzz.0"
NAMES = ("coordinator", "driver", "worker-0", "worker-7", "server-1", "server-1-sweep", "somebody")
MAY_WAIT = {"drain", "freeze", "pull", "present", "push", "commit", "assign", "job", "resolve",
            "prepare", "snapshot", "store", "load", "turn", "view", "begin"}  # fmt: skip
PATIENCE_S = 10.0
SHORT_S = 0.3
# What is under way for a while after they are answered.
MOVING = {"recover", "resolve", "load", "adopt", "begin", "view"}
# Moved by flushes and freezes of the server's own, whatever is asked meanwhile.
OWN = {"durable", "waiting", "kept", "frozen"}


class Rows:
    """Rows that are here; those decoded later are no change."""

    def __init__(self, arena: ArenaShard) -> None:
        self._records_MW, self._is_here_M = arena.records_MW.copy(), arena.is_here_M.copy()

    def __eq__(self, later: object) -> bool:
        assert isinstance(later, Rows)
        is_here_M = self._is_here_M
        return bool(later._is_here_M[is_here_M].all()) and (
            self._records_MW[is_here_M].tobytes() == later._records_MW[is_here_M].tobytes()
        )


class Site:
    """A cluster of threads, and one server of it in a state."""

    def __init__(self, state: str) -> None:
        self.state = state
        self.spec = spec_of(2, "rs")
        self.engine = ThreadEngine()
        self.cluster = Cluster(
            self.spec,
            engine=self.engine,
            settings=Settings(spares=2, pulse_s=0, flush_every_s=0.01),
        )
        self.cluster.start()
        coordinator = self.cluster.coordinator
        coordinator.leases = Leases(range(1 << 20))
        rng = np.random.default_rng(1)
        client = self.cluster.connect()
        for number in range(3):
            client.push(number, random_gradients(rng, self.spec, rows=12))
        client.drain()
        client.close()
        wait_until(lambda: not any(is_flushing(each) for each in self.engine.servers.values()))
        process = coordinator.process(0)
        if state != "coordinator":
            coordinator._progressed = lambda progress: None  # type: ignore[method-assign]
        if state == "spare":
            process = coordinator._servers.spares[0]
        if state == "recovering":
            coordinator._servers.tell_to_recover = lambda servers: None  # type: ignore[method-assign]
            self.engine.crash(process)
            wait_until(lambda: coordinator.is_complete and 0 in coordinator.view.lacks_rows)
            process = coordinator.process(0)
        self.server: Server = self.engine.servers[process.name]
        self.address = coordinator.address if state == "coordinator" else process.address
        self._streams: dict[tuple[str, int | None], Stream] = {}
        if state == "frozen":
            self.stream("server-1", 1).ask(
                Message("freeze", {"ticket": TICKET, "granules": [0, 1, 2]})
            )
        self.has_moved = False

    @property
    def epoch(self) -> int:
        return self.server._listener.epoch

    def stream(self, name: str, epoch: int | None) -> Stream:
        found = self._streams.get((name, epoch))
        if found is None or not found.is_open:
            found = self._streams[name, epoch] = Stream(
                self.address,
                token=self.cluster._token,
                name=name,
                epoch=epoch,
                deadline_s=PATIENCE_S,
            )
        return found

    def fit(self, recorded: Recorded) -> Message:
        """A message as it would be sent here and now."""
        meta = json.loads(json.dumps(recorded.message.meta))
        view = self.cluster.coordinator.view.to_json()
        if "view" in meta:
            meta["view"] = view
            if recorded.message.kind == "view":
                view["version"] += 1
        if "ticket" in meta and recorded.message.kind != "freeze":
            meta["ticket"] = TICKET
        if "coordinator" in meta:
            meta["coordinator"] = self.cluster.coordinator.address
        return Message(recorded.message.kind, meta, recorded.message.arrays)

    def is_in_state(self) -> bool:
        """Whether it still is what is to be tested."""
        if self.has_moved or (self.state != "coordinator" and self.server._is_closing):
            return False
        if self.state == "coordinator":
            return self.cluster.coordinator.failure is None
        shard = self.server._shard
        if self.state == "spare":
            return shard is None
        assert shard is not None
        if self.epoch != self.cluster.coordinator.view.epoch:
            return False
        if self.state == "frozen":
            return shard._out.frozen_by(TICKET) is not None
        if self.state == "recovering":
            return shard.rows_missing > 0
        return not shard._out.frozen and not shard.rows_missing

    def snapshot(self) -> dict[str, Any]:
        """Everything that the target holds and knows."""
        coordinator = self.cluster.coordinator
        if self.state == "coordinator":
            leases = coordinator.leases
            assert leases is not None
            return {
                "view": coordinator.view,
                "failure": coordinator.failure,
                "open": dict(leases._open),
                "done": (leases._started, leases.finished),
                "retired": coordinator.crew.retired,
            }
        server = self.server
        found: dict[str, Any] = {
            "serving": server._is_serving,
            "epoch": self.epoch,
            "view": server._view,
            "reserve": server._memory.left,
            "sweeps": server._sweeps,
        }
        shard = server._shard
        if shard is None:
            return found
        with shard._changed:
            found |= {
                "shard": id(shard),
                "applied": shard._out.applied_W.tobytes(),
                "durable": shard._out.known_W.tobytes(),
                "kept": sorted(shard._pushes._own),
                "copies": sorted(shard._pushes._copies),
                "barred": set(shard._pushes._barred),
                "waiting": shard.waiting(),
                "frozen": {t: g for t, g in shard._out._frozen.items() if not t.startswith("0.")},
                "ready": shard.ready_G.tobytes(),
                "marks": shard._in._marks_SGW.tobytes(),
                "flushed": (shard._in._flushed_S.tobytes(), sorted(shard._in._kept)),
                "renewal": shard._renewal,
                "resolving": shard._resolving,
                "handovers": sorted(server._giver._handovers._open),
                "job": id(server._keeper._job),
                "parities": [arena.parities_QW.tobytes() for arena in shard.arenas],
                "rows": [Rows(arena) for arena in shard.arenas],
            }
        return found

    def wait_heard(self) -> None:
        """Until the membership thread has acted on what it was told."""
        is_heard = threading.Event()
        self.cluster.coordinator._queue.put(is_heard.set)
        assert is_heard.wait(PATIENCE_S)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self.cluster.close()


def is_flushing(server: Server) -> bool:
    """Whether it has something to tell others."""
    shard = server._shard
    if shard is None:
        return False
    with shard._changed:
        return shard._has_news() or shard._out.flush is not None


def wait_until(condition: Any) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def ask(site: Site, name: str, epoch: int | None, header: bytes, payload: np.ndarray) -> Any:
    """Send bytes as a message; what was answered, or the error."""
    try:
        stream = site.stream(name, epoch)
    except HoldfastError as error:
        return error
    try:
        with stream._closing_on_failure(), stream._wire.sending(PATIENCE_S) as writer:
            wire._write(writer, stream._sent, header, payload)
        stream._sent += 1
        return stream.receive(SHORT_S if kind_of(header) in MAY_WAIT else PATIENCE_S)
    except HoldfastError as error:
        return error


class Fuzzing:
    """Messages at one site after the other."""

    def __init__(self, state: str, recorded: list[Recorded], seed: int) -> None:
        to = "coordinator" if state == "coordinator" else "server"
        self.state = state
        self.recorded = [each for each in recorded if each.to == to]
        self.rng = random.Random(seed)
        self.fuzzer = Fuzzer(self.rng, self.recorded)
        self.site = Site(state)
        self.outcomes: Counter[str] = Counter()

    def close(self) -> None:
        self.site.close()

    def step(self) -> None:
        """One message."""
        chosen = self.rng.choice(self.recorded)
        message = self.site.fit(chosen)
        is_changed = self.rng.random() < 0.9
        if is_changed:
            message = self.fuzzer.change(message)
        name = chosen.caller if self.rng.random() < 0.8 else self.rng.choice(NAMES)
        has_epoch = chosen.has_epoch if self.rng.random() < 0.95 else not chosen.has_epoch
        if not wirefuzz.travels(message):
            return
        header, payload = self.fuzzer.encode(message)
        epoch = self.site.epoch if has_epoch else None
        before = self.site.snapshot()
        found = ask(self.site, name, epoch, header, payload)
        said = f"{self.state} {name} {epoch} {header[:1000]!r} -> {found!r}"
        self._check(before, found, message.kind, said)
        if not self.site.is_in_state():
            self.site.close()
            self.site = Site(self.state)
            self.outcomes["begun anew"] += 1

    def _check(self, before: dict[str, Any], found: Any, kind: str, said: str) -> None:
        if isinstance(found, Message):
            self.outcomes["accepted"] += 1
            if self.state == "coordinator":
                self.site.wait_heard()
            else:
                self.site.has_moved |= kind in MOVING
            return
        if isinstance(found, UnavailableError) and "no answer in time" in str(found):
            assert kind in MAY_WAIT, said
            self.outcomes["waits"] += 1
            self.site.has_moved = True  # it may still act
            return
        self.outcomes[type(found).__name__] += 1
        assert type(found) is not HoldfastError, said  # an error of Python's or of a library's
        after = self.site.snapshot()
        changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        assert changed <= OWN, f"{changed} {said}"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[Recorded]:
    return wirefuzz.load(tmp_path_factory.mktemp("checkpoints"))


def test_every_kind_is_recorded(recorded: list[Recorded]) -> None:
    found = {(each.to, each.message.kind) for each in recorded}
    assert found == {("server", kind) for kind in SERVER_KINDS if kind != "pulse"} | {
        ("coordinator", kind) for kind in COORDINATOR_KINDS if kind != "pulse"
    }


@pytest.fixture
def _quiet(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing that a message brings about is a traceback; questions are not kept waiting long; a
    server's machine is so small that what fits it fits this process many times."""
    monkeypatch.setattr(orders, "memory_bytes", lambda: 64 << 20)
    for module in (coordinators, crew):
        monkeypatch.setattr(module, "_POLL_S", 0.01)
    yield
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.soak
@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("state", [*STATES, "coordinator"])
def test_refused_messages_change_nothing(state: str, recorded: list[Recorded]) -> None:
    print(f"HOLDFAST_SEED={SEED} HOLDFAST_WIRE_MESSAGES={10 * MESSAGES}")
    fuzzing = Fuzzing(state, recorded, SEED)
    try:
        for _ in range(MESSAGES):
            fuzzing.step()
    finally:
        print(dict(fuzzing.outcomes))
        with suppress(HoldfastError):
            fuzzing.close()
    assert fuzzing.outcomes["InvalidRequestError"] > MESSAGES // 4
