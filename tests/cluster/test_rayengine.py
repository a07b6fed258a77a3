"""What only Ray can do wrong: its own processes, its addresses, machines that are not this one."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from holdfast import events
from holdfast.cluster import rayengine
from holdfast.cluster.cluster import Cluster
from holdfast.cluster.coordinator import Settings
from holdfast.cluster.engine import Process
from holdfast.cluster.machines import began, choose_host, end_process
from holdfast.cluster.rayengine import RayEngine
from holdfast.errors import InvalidRequestError
from tests.cluster.oracle import Oracle, random_gradients
from tests.cluster.test_engine import LONG_S, ROLES, ROOT, SPEC, ask_pid, is_running, wait_until
from tests.cluster.test_protocol import check_same, make_spec

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module")
def running() -> Iterator[RayEngine]:
    """A Ray of this module's own; engines made meanwhile share it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        with RayEngine() as engine:
            yield engine


@pytest.fixture
def engine(running: RayEngine, tmp_path: Path) -> Iterator[RayEngine]:
    with RayEngine(logs=tmp_path / "logs", roles=ROLES) as engine:
        yield engine


def test_a_killed_server_is_replaced_and_no_update_is_lost(
    running: RayEngine, tmp_path: Path
) -> None:
    spec = make_spec()
    # Silence is no test here: a loaded machine is silent too.
    started: queue.Queue[events.Event] = queue.Queue()
    cluster = Cluster(
        spec,
        engine=RayEngine(logs=tmp_path / "logs"),
        settings=Settings(spares=1, pulse_s=0),
        log=events.EventLog([started.put]),
    )
    oracle, rng = Oracle(spec), np.random.default_rng(4)
    with cluster:
        client = cluster.connect()
        lost = cluster.coordinator.process(2)
        for number in range(30):
            gradients = random_gradients(rng, spec)
            client.push(number, gradients)
            oracle.push(gradients)
            if number == 10:
                os.kill(lost.pid, signal.SIGKILL)
        client.drain()
        wait_until(lambda: cluster.coordinator.process(2) != lost)
        cluster.wait_whole(LONG_S)
        check_same(cluster, oracle)
        client.close()
        seen = []
        while len(seen) < spec.servers + 2:  # a new spare too, so that nothing is under way
            event = started.get(timeout=LONG_S)
            seen += [event] if isinstance(event, events.ServerStarted) else []
        pids = [cluster.coordinator.process(server).pid for server in range(spec.servers)]
        assert len({lost.pid, *pids}) == spec.servers + 1
    assert not [pid for pid in pids if is_running(pid)]


def test_servers_on_ray_never_import_torch(running: RayEngine, tmp_path: Path) -> None:
    with RayEngine(logs=tmp_path / "logs") as engine:
        process = engine.start("server", "s0", SPEC)
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()


def test_ray_and_its_processes_listen_on_this_machine_alone(engine: RayEngine) -> None:
    process = engine.start("echo", "e0", SPEC)
    raylet = parent_of(process.pid)
    pids = {process.pid, raylet, *children_of(os.getpid()), *children_of(raylet)}
    listening = [address for pid in pids for address in listening_addresses(pid)]
    assert listening
    assert {address for address in listening if not is_loopback(address)} == set()


def test_a_process_runs_at_no_lower_priority_than_its_driver(engine: RayEngine) -> None:
    process = engine.start("echo", "e0", SPEC)
    ours = os.getpriority(os.PRIO_PROCESS, os.getpid())
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == ours


def test_an_engine_that_joined_leaves_ray_running(running: RayEngine) -> None:
    for _ in range(2):
        with RayEngine(roles=ROLES) as engine:
            process = engine.start("echo", "e0", SPEC)
            assert ask_pid(process) == process.pid


def test_a_second_ray_is_not_joined_from_the_same_process(running: RayEngine) -> None:
    with pytest.raises(InvalidRequestError, match="already"):
        RayEngine("127.0.0.1:1")


def test_a_process_that_ends_by_itself_is_told_as_dead(engine: RayEngine) -> None:
    deaths: queue.Queue[tuple[Process, str]] = queue.Queue()
    engine.watch(lambda process, how: deaths.put((process, how)))
    process = engine.start("echo", "e0", SPEC)
    engine._roster._handles[-1]._handle.stop.remote()
    assert deaths.get(timeout=LONG_S) == (process, "ended with code 0\na role may print")
    assert not is_running(process.pid)


def test_a_stopped_process_of_another_machine_is_ended_there(
    running: RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RayEngine(allow_remote=True, roles=ROLES) as engine:
        process = engine.start("echo", "e0", SPEC)
        os.kill(process.pid, signal.SIGSTOP)
        # The driver believes to be elsewhere: what it does then happens through Ray.
        monkeypatch.setattr(rayengine, "this_machine", lambda: "another")
        engine.kill(process)
        assert not is_running(process.pid)


def test_a_process_on_another_machine_is_refused_unless_allowed(
    engine: RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rayengine, "this_machine", lambda: "another")
    with pytest.raises(InvalidRequestError, match="allow remote peers"):
        engine.start("echo", "e0", SPEC)


def test_several_machines_are_refused_unless_allowed() -> None:
    with pytest.raises(InvalidRequestError, match=r"machines=3.*allow remote peers"):
        choose_host(["10.0.0.1", "10.0.0.2", "10.0.0.3"], "10.0.0.1", allow_remote=False)


def test_only_the_process_that_began_then_is_ended() -> None:
    with subprocess.Popen(["sleep", "600"]) as other:
        end_process(other.pid, began(other.pid) + 1)
        assert other.poll() is None
        end_process(other.pid, began(other.pid))
        assert other.wait() == -signal.SIGKILL
    end_process(other.pid, 0)


DRIVER = """
import json, os, queue, signal, sys, time
from holdfast.cluster.engine import Start
from holdfast.cluster.rayengine import RayEngine
from holdfast.errors import UnavailableError
from tests.cluster.test_engine import ROLES
try:
    RayEngine("127.0.0.1:1")
except UnavailableError as error:
    refused = str(error)
engine = RayEngine(roles=ROLES)
starts = [Start("echo", "e0", {"token": "a"}), Start("deaf", "d0", {})]
pids = [process.pid for process in engine.start_many(starts)]
deaths = queue.Queue()
engine.watch(lambda process, how: deaths.put(process.pid))
os.kill(engine.start("echo", "e1", {"token": "a"}).pid, signal.SIGKILL)
deaths.get()
print(json.dumps([refused, pids]), flush=True)
time.sleep(1)  # what Ray has to say of a death comes a little after it
print("quiet", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_neither_processes_nor_ray_outlive_a_driver_that_started_ray(
    how: signal.Signals,
) -> None:
    with tempfile.TemporaryDirectory(prefix="hf-") as folder:  # tmp_path is too long for sockets
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "TMPDIR": folder},
            start_new_session=True,
        )
        assert driver.stdout is not None
        refused, pids = json.loads(driver.stdout.readline())
        assert "no Ray cluster answers" in refused
        assert driver.stdout.readline() == "quiet\n"
        raylet = parent_of(pids[0])
        pids += [raylet, *children_of(driver.pid)]
        if how == signal.SIGINT:  # as a terminal does it: to all
            pids += children_of(raylet)
            os.killpg(driver.pid, how)
        else:  # then two agents of Ray look for it for a minute before they end too
            driver.send_signal(how)
        driver.communicate(timeout=LONG_S)
        wait_until(lambda: not any(map(is_running, pids)))
        if how == signal.SIGINT:
            assert list(Path(folder).iterdir()) == []


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def listening_addresses(pid: int) -> list[str]:
    """The addresses, as the kernel writes them, at which a process accepts connections."""
    sockets = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(str(fd.readlink()))
        except OSError:  # closed meanwhile
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.append(fields[1].partition(":")[0])
    return found


def is_loopback(address: str) -> bool:
    """127.0.0.1, ::1, or ::ffff:127.0.0.1, in words of the machine's byte order."""
    mapped = "0000000000000000FFFF00000100007F"
    return address in ("0100007F", "00000000000000000000000001000000", mapped)
