from __future__ import annotations

import os
import queue
import signal
import threading

import pytest

from holdfast.cluster.engine import LocalEngine
from holdfast.cluster.message import Message
from holdfast.cluster.pulse import Pulse
from holdfast.cluster.wire import Listener, Stream
from tests.cluster.roles import TOKEN, answer

LONG_S = 60
PATIENT_S = 2.5  # of a pulse: a busy machine answers late


@pytest.fixture
def reports() -> queue.Queue[str]:
    return queue.Queue()


def test_a_stopped_process_is_reported_once(engine: LocalEngine, reports: queue.Queue[str]) -> None:
    process = engine.start("echo", "e0", {"token": TOKEN})
    with Pulse(process.address, TOKEN, deadline_s=PATIENT_S, on_silent=reports.put) as pulse:
        with pytest.raises(queue.Empty):
            reports.get(timeout=0.3)
        os.kill(process.pid, signal.SIGSTOP)
        assert process.address in reports.get(timeout=LONG_S)
        pulse._thread.join(LONG_S)
        assert not pulse._thread.is_alive()
    assert reports.empty()
    engine.kill(process)


def test_a_killed_process_is_reported_without_waiting_for_the_deadline(
    engine: LocalEngine, reports: queue.Queue[str]
) -> None:
    process = engine.start("echo", "e0", {"token": TOKEN})
    with Pulse(process.address, TOKEN, deadline_s=600, on_silent=reports.put):
        os.kill(process.pid, signal.SIGKILL)
        assert process.address in reports.get(timeout=LONG_S)


def test_nobody_there_is_reported(reports: queue.Queue[str]) -> None:
    with Pulse("127.0.0.1:1", TOKEN, on_silent=reports.put):
        assert "127.0.0.1:1" in reports.get(timeout=LONG_S)


@pytest.mark.parametrize("kind", ["sleep", "compute"])
def test_a_busy_handler_does_not_look_dead(
    engine: LocalEngine, reports: queue.Queue[str], kind: str
) -> None:
    process = engine.start("echo", "e0", {"token": TOKEN})
    with (
        Stream(process.address, token=TOKEN, name="w0", deadline_s=LONG_S) as stream,
        Pulse(process.address, TOKEN, deadline_s=PATIENT_S, on_silent=reports.put),
    ):
        assert stream.ask(Message(kind, {"s": PATIENT_S + 0.5})).kind == kind
    assert reports.empty()


def test_a_new_epoch_does_not_look_dead(reports: queue.Queue[str]) -> None:
    with (
        Listener(answer, token=TOKEN) as listener,
        Pulse(listener.address, TOKEN, every_s=0.01, deadline_s=LONG_S, on_silent=reports.put),
    ):
        listener.epoch = 5
        with pytest.raises(queue.Empty):
            reports.get(timeout=0.3)


def test_nothing_is_reported_after_close(reports: queue.Queue[str]) -> None:
    with Listener(answer, token=TOKEN) as listener:
        pulse = Pulse(listener.address, TOKEN, deadline_s=LONG_S, on_silent=reports.put)
        pulse.close()
    assert reports.empty()
    assert not [t for t in threading.enumerate() if t.name.startswith("holdfast-pulse")]


def test_the_report_itself_may_close_the_pulse(engine: LocalEngine) -> None:
    process = engine.start("echo", "e0", {"token": TOKEN})
    told = threading.Event()

    def report(why: str) -> None:
        pulse.close()
        told.set()

    pulse = Pulse(process.address, TOKEN, on_silent=report)
    engine.kill(process)
    assert told.wait(LONG_S)
