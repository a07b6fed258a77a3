"""Real processes: started, killed, stopped, orphaned; none is ever left behind."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.cluster.engine import Engine, LocalEngine, Process, Start
from holdfast.cluster.message import Message
from holdfast.cluster.wire import Stream
from holdfast.errors import (
    HoldfastError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from tests.cluster.roles import MODULE, TOKEN

ROOT = Path(__file__).parents[2]
SPEC = {"token": TOKEN}
LONG_S = 20


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LocalEngine]:
    with LocalEngine(logs=tmp_path / "logs", module=MODULE) as engine:
        yield engine


def is_running(pid: int) -> bool:
    """Whether there is such a process that is more than an entry waiting to be read."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < until, "never happened"
        time.sleep(0.01)


def ask_pid(process: Process) -> int:
    with Stream(process.address, token=TOKEN, name="test") as stream:
        found: int = stream.ask(Message("who")).meta["pid"]
        return found


def test_a_started_process_answers_where_it_says(engine: LocalEngine) -> None:
    is_an_engine: Engine = engine
    process = is_an_engine.start("echo", "e0", SPEC)
    assert (process.name, process.role) == ("e0", "echo")
    assert ask_pid(process) == process.pid != os.getpid()


def test_many_processes_start_together(engine: LocalEngine) -> None:
    processes = engine.start_many([Start("echo", f"e{n}", SPEC) for n in range(3)])
    assert [p.name for p in processes] == ["e0", "e1", "e2"]
    assert [ask_pid(p) for p in processes] == [p.pid for p in processes]


def test_a_token_shows_in_no_argument_and_no_environment(engine: LocalEngine) -> None:
    process = engine.start("echo", "e0", {"token": "secret4711"})
    for file in ("cmdline", "environ"):
        assert b"secret4711" not in Path(f"/proc/{process.pid}/{file}").read_bytes()


def test_a_death_is_told_once_with_its_reason(engine: LocalEngine) -> None:
    deaths: queue.Queue[tuple[Process, str]] = queue.Queue()
    engine.watch(lambda process, how: deaths.put((process, how)))
    first, second = engine.start_many([Start("echo", f"e{n}", SPEC) for n in range(2)])
    os.kill(first.pid, signal.SIGKILL)
    assert deaths.get(timeout=LONG_S) == (first, "was killed by signal 9\na role may print")
    with Stream(second.address, token=TOKEN, name="test") as stream, pytest.raises(HoldfastError):
        stream.ask(Message("vanish"))
    process, how = deaths.get(timeout=LONG_S)
    assert process == second
    assert how.startswith("ended with code 3")
    assert "vanishing as told" in how
    engine.stop()
    assert deaths.empty()


def test_a_death_before_anyone_watched_is_told_too(engine: LocalEngine) -> None:
    process = engine.start("echo", "e0", SPEC)
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{process.pid}").exists())
    deaths: queue.Queue[Process] = queue.Queue()
    engine.watch(lambda process, how: deaths.put(process))
    assert deaths.get(timeout=LONG_S) == process


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
def test_a_killed_process_is_gone_and_no_death_is_told(
    engine: LocalEngine, is_stopped: bool
) -> None:
    deaths: list[Process] = []
    engine.watch(lambda process, how: deaths.append(process))
    process = engine.start("echo", "e0", SPEC)
    if is_stopped:
        os.kill(process.pid, signal.SIGSTOP)
    engine.kill(process)
    assert not Path(f"/proc/{process.pid}").exists()
    engine.kill(process)  # once more does no harm
    engine.stop()
    assert deaths == []


def test_a_name_is_free_again_after_its_process_has_gone(engine: LocalEngine) -> None:
    process = engine.start("echo", "e0", SPEC)
    with pytest.raises(InvalidRequestError, match="of this name"):
        engine.start("echo", "e0", SPEC)
    engine.kill(process)
    again = engine.start("echo", "e0", SPEC)
    engine.kill(process)
    assert ask_pid(again) == again.pid != process.pid


def test_killing_a_process_of_another_is_refused(engine: LocalEngine) -> None:
    with pytest.raises(NotFoundError):
        engine.kill(Process("me", "echo", os.getpid(), ""))


def test_no_process_is_left_after_stop(engine: LocalEngine) -> None:
    processes = engine.start_many(
        [Start("echo", "e0", SPEC), Start("deaf", "d0", {}), Start("echo", "e1", SPEC)]
    )
    os.kill(processes[2].pid, signal.SIGSTOP)
    engine.stop()
    assert not [p for p in processes if Path(f"/proc/{p.pid}").exists()]
    engine.stop()
    with pytest.raises(InvalidRequestError, match="stopped"):
        engine.start("echo", "e2", SPEC)
    assert not [t for t in threading.enumerate() if t.name.startswith("holdfast-child")]


def test_a_refusal_at_the_start_is_raised_as_it_was(engine: LocalEngine) -> None:
    with pytest.raises(InvalidRequestError, match="no rows to serve") as caught:
        engine.start("refuses", "r0", {"rows": 0})
    assert (caught.value.facts, caught.value.todo) == ({"rows": 0}, "give it rows")


def test_a_crash_at_the_start_shows_what_it_wrote(engine: LocalEngine) -> None:
    with pytest.raises(UnavailableError, match=r"(?s)code 7.*the floor gave way"):
        engine.start("crashes", "c0", {})


def test_an_unknown_role_is_refused(engine: LocalEngine) -> None:
    with pytest.raises(InvalidRequestError, match="unknown role"):
        engine.start("os:system", "x0", {})


def test_a_process_that_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    with LocalEngine(logs=tmp_path, module=MODULE, start_s=1.5) as engine:
        with pytest.raises(UnavailableError, match=r"(?s)in time.*still thinking"):
            engine.start("silent", "s0", {})
        assert not [c for c in engine._children.values() if is_running(c.pid)]


def test_when_one_of_many_fails_none_is_left(engine: LocalEngine) -> None:
    with pytest.raises(UnavailableError, match="code 7"):
        engine.start_many([Start("echo", "e0", SPEC), Start("crashes", "c0", {})])
    assert not [c for c in engine._children.values() if is_running(c.pid)]


def test_a_spec_that_is_no_json_is_refused(engine: LocalEngine) -> None:
    with pytest.raises(InvalidRequestError, match="JSON"):
        engine.start("echo", "e0", {"token": object()})


DRIVER = """
import json, os, sys, time
from holdfast.cluster.engine import LocalEngine, Start
from tests.cluster.roles import MODULE
engine = LocalEngine(module=MODULE)
starts = [Start("echo", f"e{n}", {"token": "a"}) for n in range(2)]
if "deaf" in sys.argv:
    starts.append(Start("deaf", "d0", {}))
pids = [process.pid for process in engine.start_many(starts)]
try:
    print(json.dumps(pids), flush=True)
    sys.stdin.readline()
except KeyboardInterrupt:
    if "survive" not in sys.argv:
        raise
    time.sleep(0.3)
    print("alive", flush=True)
    sys.stdin.readline()
"""


def start_driver(*how: str) -> tuple[subprocess.Popen[str], list[int]]:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, *how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert driver.stdout is not None
    pids = json.loads(driver.stdout.readline())
    assert all(is_running(pid) for pid in pids)
    return driver, pids


def test_no_process_outlives_a_killed_driver() -> None:
    driver, pids = start_driver("deaf")
    driver.kill()
    driver.communicate(timeout=LONG_S)
    wait_until(lambda: not any(map(is_running, pids)))


def test_no_process_outlives_an_interrupted_driver() -> None:
    # As a terminal does it: Ctrl-C goes to the driver and to all its children.
    driver, pids = start_driver()
    os.killpg(driver.pid, signal.SIGINT)
    assert driver.wait(LONG_S) != 0
    assert not any(map(is_running, pids))
    assert driver.communicate()[1].count("Traceback") == 1  # the driver's own, and no child's


def test_children_go_on_through_an_interrupt_that_the_driver_survives() -> None:
    driver, pids = start_driver("survive")
    os.killpg(driver.pid, signal.SIGINT)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "alive\n"
    assert all(map(is_running, pids))
    driver.communicate("go\n", timeout=LONG_S)
    assert not any(map(is_running, pids))


def test_no_process_outlives_a_driver_that_just_ends() -> None:
    driver, pids = start_driver()
    _, stderr = driver.communicate("go\n", timeout=LONG_S)
    assert driver.returncode == 0
    assert not any(map(is_running, pids))
    assert "Traceback" not in stderr
