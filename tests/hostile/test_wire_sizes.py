"""Messages with the token that are too long, and streams that are too many: what they leave."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from holdfast.cluster import wire
from holdfast.cluster.engine import LocalEngine, Process
from holdfast.cluster.message import Message
from holdfast.cluster.wire import Caller, Listener, Stream
from holdfast.errors import CorruptDataError, UnavailableError
from tests.hostile.strangers import Memory, wait_until

TOKEN = "5eca7e"
MIB = 1 << 20
BIG = np.zeros(96 * MIB, np.uint8)
SPARE_BYTES = 32 * MIB


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with LocalEngine(logs=tmp_path_factory.mktemp("logs")) as engine:
        process = engine.start("server", "server-0", {"token": TOKEN})
        yield process
        assert Memory(process.pid).now()  # it lives


def connect(process: Process, name: str = "worker-0") -> Stream:
    return Stream(process.address, token=TOKEN, name=name, epoch=0, deadline_s=60)


@pytest.mark.parametrize("kind", ["stats", "commit", "view", "no such kind"])
def test_nothing_is_kept_of_a_payload_that_is_too_long(process: Process, kind: str) -> None:
    memory = Memory(process.pid)
    before = memory.now()
    streams = [connect(process) for _ in range(3)]
    for stream in streams:
        with pytest.raises(CorruptDataError, match="longer than its kind"):
            stream.ask(Message(kind, {}, (BIG,)))
    wait_until(lambda: memory.now() - before < SPARE_BYTES, "memory is kept")
    for stream in streams:
        stream.close()
    wait_until(lambda: memory.now() - before < SPARE_BYTES, "memory is kept")


@pytest.mark.parametrize("kind", ["stats", "pull", "freeze", "no such kind"])
def test_a_header_that_is_too_long_is_not_parsed(process: Process, kind: str) -> None:
    memory = Memory(process.pid)
    before = memory.now()
    message = Message(kind, {"x": [[]] * (2 * MIB)})  # 8 MB, and 130 MB as objects
    with (
        memory.watched(),
        connect(process) as stream,
        pytest.raises(CorruptDataError, match="longer than its kind"),
    ):
        stream.ask(message)
    assert memory.peak - before < 64 * MIB


def test_streams_are_served_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "STREAMS_MAX", 3)

    def answer(caller: Caller, message: Message) -> Message:
        return message

    with Listener(answer, token=TOKEN) as listener:
        streams = [Stream(listener.address, token=TOKEN, name=f"w{n}") for n in range(3)]
        with pytest.raises(UnavailableError):
            Stream(listener.address, token=TOKEN, name="w3")
        assert all(stream.ask(Message("x")).kind == "x" for stream in streams)
        streams.pop().close()

        def is_served() -> bool:
            try:
                streams.append(Stream(listener.address, token=TOKEN, name="w4"))
            except UnavailableError:
                return False
            return True

        wait_until(is_served, "a place is never free again")
        for stream in streams:
            stream.close()
