"""Real processes: started, killed, stopped, orphaned; none is ever left behind.

What every engine promises, asked of each of them: subprocesses, and actors of a real Ray.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.cluster.engine import START_S, Engine, LocalEngine, Process, Start
from holdfast.cluster.message import Message
from holdfast.cluster.rayengine import RayEngine
from holdfast.cluster.wire import Stream
from holdfast.errors import (
    HoldfastError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from tests.cluster.roles import MODULE, TOKEN

pytestmark = pytest.mark.xdist_group("ray")
ROOT = Path(__file__).parents[2]
SPEC = {"token": TOKEN}
LONG_S = 60
NAMES = ("echo", "deaf", "silent", "compiles", "refuses", "crashes")
ROLES = {name: f"{MODULE}:{name}" for name in NAMES}
# A parent sees how its child ended; Ray sees that it did.
KILLED = {"local": "was killed by signal 9", "ray": "died: .*"}
VANISHED = {"local": "ended with code 3", "ray": "died: .*"}
CRASHED = {"local": "ended with code 7", "ray": "died"}


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module", params=["local", "ray"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which engine; Ray is started once for all the tests that use it."""
    if request.param == "local":
        yield "local"
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        with RayEngine():
            yield "ray"


Make = Callable[..., LocalEngine | RayEngine]


@pytest.fixture
def make(kind: str, tmp_path: Path) -> Make:
    def make(start_s: float = START_S) -> LocalEngine | RayEngine:
        logs = tmp_path / "logs"
        if kind == "local":
            return LocalEngine(logs=logs, start_s=start_s, module=MODULE)
        return RayEngine(logs=logs, start_s=start_s, roles=ROLES)

    return make


@pytest.fixture
def engine(make: Make) -> Iterator[LocalEngine | RayEngine]:
    with make() as engine:
        yield engine


def processes_that_log_to(folder: Path) -> list[int]:
    """Processes, however they were started, that hold a file of this folder open."""
    found = []
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if fd.readlink().is_relative_to(folder):
                found.append(int(fd.parts[2]))
    return found


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


def test_a_started_process_answers_where_it_says(engine: Engine) -> None:
    process = engine.start("echo", "e0", SPEC)
    assert (process.name, process.role) == ("e0", "echo")
    assert ask_pid(process) == process.pid != os.getpid()


def test_many_processes_start_together(engine: Engine) -> None:
    processes = engine.start_many([Start("echo", f"e{n}", SPEC) for n in range(3)])
    assert [p.name for p in processes] == ["e0", "e1", "e2"]
    assert [ask_pid(p) for p in processes] == [p.pid for p in processes]


def test_a_token_shows_in_no_argument_and_no_environment(engine: Engine) -> None:
    process = engine.start("echo", "e0", {"token": "secret4711"})
    for file in ("cmdline", "environ"):
        assert b"secret4711" not in Path(f"/proc/{process.pid}/{file}").read_bytes()


def test_a_death_is_told_once_with_its_reason(engine: Engine, kind: str) -> None:
    deaths: queue.Queue[tuple[Process, str]] = queue.Queue()
    engine.watch(lambda process, how: deaths.put((process, how)))
    first, second = engine.start_many([Start("echo", f"e{n}", SPEC) for n in range(2)])
    os.kill(first.pid, signal.SIGKILL)
    process, how = deaths.get(timeout=LONG_S)
    assert process == first
    assert re.fullmatch(f"{KILLED[kind]}\na role may print", how)
    with Stream(second.address, token=TOKEN, name="test") as stream, pytest.raises(HoldfastError):
        stream.ask(Message("vanish"))
    process, how = deaths.get(timeout=LONG_S)
    assert process == second
    assert re.match(VANISHED[kind], how)
    assert "vanishing as told" in how
    engine.stop()
    assert deaths.empty()


def test_a_death_before_anyone_watched_is_told_too(engine: Engine) -> None:
    process = engine.start("echo", "e0", SPEC)
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not is_running(process.pid))
    deaths: queue.Queue[Process] = queue.Queue()
    engine.watch(lambda process, how: deaths.put(process))
    assert deaths.get(timeout=LONG_S) == process


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
def test_a_killed_process_is_gone_and_no_death_is_told(engine: Engine, is_stopped: bool) -> None:
    deaths: list[Process] = []
    engine.watch(lambda process, how: deaths.append(process))
    process = engine.start("echo", "e0", SPEC)
    if is_stopped:
        os.kill(process.pid, signal.SIGSTOP)
    engine.kill(process)
    assert not is_running(process.pid)
    engine.kill(process)  # once more does no harm
    engine.stop()
    assert deaths == []


def test_a_name_is_free_again_after_its_process_has_gone(engine: Engine) -> None:
    process = engine.start("echo", "e0", SPEC)
    with pytest.raises(InvalidRequestError, match="of this name"):
        engine.start("echo", "e0", SPEC)
    engine.kill(process)
    again = engine.start("echo", "e0", SPEC)
    engine.kill(process)
    assert ask_pid(again) == again.pid != process.pid


def test_killing_a_process_of_another_is_refused(engine: Engine) -> None:
    with pytest.raises(NotFoundError):
        engine.kill(Process("me", "echo", os.getpid(), ""))


def test_no_process_is_left_after_stop(engine: Engine) -> None:
    processes = engine.start_many(
        [Start("echo", "e0", SPEC), Start("deaf", "d0", {}), Start("echo", "e1", SPEC)]
    )
    os.kill(processes[2].pid, signal.SIGSTOP)
    engine.stop()
    assert not [p for p in processes if is_running(p.pid)]
    engine.stop()
    with pytest.raises(InvalidRequestError, match="stopped"):
        engine.start("echo", "e2", SPEC)
    ours = ("holdfast-child", "holdfast-ray")
    assert not [t for t in threading.enumerate() if t.name.startswith(ours)]


def test_a_refusal_at_the_start_is_raised_as_it_was(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="no rows to serve") as caught:
        engine.start("refuses", "r0", {"rows": 0})
    assert (caught.value.facts, caught.value.todo) == ({"rows": 0}, "give it rows")


def test_a_crash_at_the_start_shows_what_it_wrote(engine: Engine, kind: str) -> None:
    with pytest.raises(UnavailableError, match=rf"(?s){CRASHED[kind]}.*the rollup gave way"):
        engine.start("crashes", "c0", {})


def test_a_process_that_compiles_first_is_ready_all_the_same(engine: Engine) -> None:
    process = engine.start("compiles", "k0", SPEC)
    assert ask_pid(process) == process.pid


def test_an_unknown_role_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="unknown role"):
        engine.start("os:system", "x0", {})


def test_a_process_that_never_gets_ready_is_given_up(make: Make, tmp_path: Path) -> None:
    with make(start_s=1.5) as engine:
        with pytest.raises(UnavailableError, match="in time"):
            engine.start("silent", "s0", {})
        assert not processes_that_log_to(tmp_path / "logs")


def test_what_a_process_printed_before_it_was_given_up_is_told(make: Make, kind: str) -> None:
    with (
        make(start_s={"local": 4, "ray": 8}[kind]) as engine,  # enough to print, if all is busy
        pytest.raises(UnavailableError, match=r"(?s)in time.*still thinking"),
    ):
        engine.start("silent", "s0", {})


def test_when_one_of_many_fails_none_is_left(engine: Engine, kind: str, tmp_path: Path) -> None:
    process = engine.start("echo", "e0", SPEC)
    assert processes_that_log_to(tmp_path / "logs")
    engine.kill(process)
    with pytest.raises(UnavailableError, match=CRASHED[kind]):
        engine.start_many([Start("echo", "e0", SPEC), Start("crashes", "c0", {})])
    assert not processes_that_log_to(tmp_path / "logs")


def test_a_spec_that_is_no_json_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="JSON"):
        engine.start("echo", "e0", {"token": object()})


DRIVER = """
import json, sys, time
from holdfast.cluster.engine import LocalEngine, Start
from holdfast.cluster.rayengine import RayEngine
from tests.cluster.test_engine import MODULE, ROLES
kind, address = sys.argv[1:3]
engine = LocalEngine(module=MODULE) if kind == "local" else RayEngine(address, roles=ROLES)
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

StartDriver = Callable[..., tuple[subprocess.Popen[str], list[int]]]


@pytest.fixture
def start_driver(kind: str) -> Iterator[StartDriver]:
    """Starts a driver of its own; on Ray, one that joins the Ray that runs here."""
    address = ""
    if kind == "ray":
        with RayEngine() as joined:
            address = joined.address
    drivers = []

    def start(*how: str) -> tuple[subprocess.Popen[str], list[int]]:
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, kind, address, *how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        drivers.append(driver)
        assert driver.stdout is not None
        pids = json.loads(driver.stdout.readline())
        assert all(is_running(pid) for pid in pids)
        return driver, pids

    yield start
    for driver in drivers:
        driver.kill()
        driver.communicate()


def test_no_process_outlives_a_killed_driver(start_driver: StartDriver) -> None:
    driver, pids = start_driver("deaf")
    driver.kill()
    driver.communicate(timeout=LONG_S)
    wait_until(lambda: not any(map(is_running, pids)))


def test_no_process_outlives_an_interrupted_driver(start_driver: StartDriver) -> None:
    # As a terminal does it: Ctrl-C goes to the driver and to all its children.
    driver, pids = start_driver()
    os.killpg(driver.pid, signal.SIGINT)
    assert driver.wait(LONG_S) != 0
    assert not any(map(is_running, pids))
    assert driver.communicate()[1].count("Traceback") == 1  # the driver's own, and no child's


def test_children_go_on_through_an_interrupt_that_the_driver_survives(
    start_driver: StartDriver,
) -> None:
    driver, pids = start_driver("survive")
    os.killpg(driver.pid, signal.SIGINT)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "alive\n"
    assert all(map(is_running, pids))
    driver.communicate("go\n", timeout=LONG_S)
    assert not any(map(is_running, pids))


def test_no_process_outlives_a_driver_that_just_ends(start_driver: StartDriver) -> None:
    driver, pids = start_driver()
    _, stderr = driver.communicate("go\n", timeout=LONG_S)
    assert driver.returncode == 0
    assert not any(map(is_running, pids))
    assert "Traceback" not in stderr
