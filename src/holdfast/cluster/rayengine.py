"""Processes of a cluster as Ray actors: on this machine, or on all machines of a Ray cluster.

    start -> one actor a process, which runs a role of child.py -> Process
    a thread waits in a call that ends with the role, and fails when its process dies -> on_death

Without an address Ray itself is started here, reachable from this machine alone, and ended by
``stop``; where this process is connected to Ray already, that Ray is used and left running.

Invariants: those of engine.py, and
- Ray never restarts a process: a lost server's place is the coordinator's to fill.
- A process is taken for gone when its machine says so; Ray forgets hung ones that still live.
- Nothing listens beyond a machine unless ``allow_remote`` says so.
- What is secret travels in a call's arguments; titles show the names of calls alone.

This is the only file that imports Ray, and only when an engine is made: how Ray listens is decided
by the environment in which it is imported.

Not here: hung processes (pulse.py), replacement (coordinator.py).
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from holdfast.cluster.child import ROLES, find_role, parse_order
from holdfast.cluster.engine import START_S, OnDeath, Process, Start
from holdfast.cluster.logs import print_to, read_tail
from holdfast.cluster.machines import (
    LOOPBACK,
    began,
    check_answers,
    choose_host,
    end_process,
    is_local,
    this_machine,
)
from holdfast.cluster.message import ERROR, Message, as_error, error_message
from holdfast.cluster.roster import Roster, Starting
from holdfast.errors import HoldfastError, InvalidRequestError, UnavailableError
from holdfast.kernels.compiling import reporting

_ENVIRONMENT = {  # on_death tells it; Ray would write to the driver's stdout
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",
}
_LOCAL_ENVIRONMENT = {
    **_ENVIRONMENT,
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else Ray replaces 127.0.0.1 by an outer address
    "RAY_worker_niceness": "0",  # else servers yield to everything else on the machine
    "RAY_USAGE_STATS_ENABLED": "0",
}
_OBJECT_STORE_BYTES = 80 << 20  # about the least Ray takes; rows do not travel through it
_CPUS = 0.01  # of what Ray counts, a process: they wait for nobody's turn
_BEGINNINGS = 2  # of a Ray of our own, before it is given up
_CALLS = 4  # of an actor at the same time: its role, and what is asked meanwhile
_SOON_S = 5.0  # for an actor to answer while its role starts
_END_S = 90.0  # for another machine to end a process; Ray takes up to a minute to miss a machine


class RayEngine:
    """Runs processes as Ray actors, spread over the machines there are."""

    def __init__(
        self,
        address: str | None = None,
        *,
        allow_remote: bool = False,
        logs: Path | None = None,
        start_s: float = START_S,
        roles: Mapping[str, str] = ROLES,
    ) -> None:
        """``logs`` is a folder, on each machine, for what processes print; else Ray keeps that.

        Raises:
            UnavailableError: no Ray cluster answers at ``address``.
            InvalidRequestError: Ray is not installed; or it has several machines, and servers may
                not listen beyond theirs.
        """
        self._ray = _Ray(address)
        try:
            self.host = choose_host(self._ray.hosts(), self._ray.host, allow_remote)
        except BaseException:
            self._ray.close()
            raise
        self._allow_remote, self._logs, self._roles = allow_remote, logs, dict(roles)
        self._roster = Roster(self._launch, start_s=start_s)
        atexit.register(self.stop)

    @property
    def address(self) -> str:
        """Where this Ray is joined by other drivers of this machine, and of others if there are."""
        return self._ray.address

    def start(self, role: str, name: str, spec: Mapping[str, Any]) -> Process:
        """Start a process; returns when it has said where it listens.

        Raises:
            UnavailableError: it died or said nothing in time.
            HoldfastError: what it raised before it was ready.
        """
        return self.start_many([Start(role, name, spec)])[0]

    def start_many(self, starts: Sequence[Start]) -> list[Process]:
        """Start processes at the same time: all of them, or none and an error."""
        return self._roster.start_many(starts)

    def watch(self, on_death: OnDeath) -> None:
        """Call this with every process that dies unasked (also before now), and with how."""
        self._roster.watch(on_death)

    def kill(self, process: Process) -> None:
        """End a process at once, also a hung one; returns when it is gone."""
        self._roster.kill(process)

    def stop(self) -> None:
        """End all processes, and Ray if it was started here. May be called again."""
        try:
            self._roster.stop()
        finally:
            self._ray.close()
        atexit.unregister(self.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _launch(self, start: Start, line: str, told: OnDeath) -> _Actor:
        log = None if self._logs is None else self._logs / f"{start.name}.log"
        actor = _Actor(self._ray, start, log, allow_remote=self._allow_remote, told=told)
        actor.begin(line, self._roles)
        return actor


class _Actor:
    """One actor as the driver sees it, and the thread that waits for it."""

    def __init__(
        self, ray: _Ray, start: Start, log: Path | None, *, allow_remote: bool, told: OnDeath
    ) -> None:
        self._ray, self._start, self._log, self._told = ray, start, log, told
        self._allow_remote = allow_remote
        self.name = start.name
        self.process: Process | None = None
        self._where: dict[str, Any] = {}
        self._is_asked = False
        self._ready, self._starting = threading.Event(), Starting()
        self._compiled_s = 0.0
        self._error: HoldfastError | None = None
        self._handle = ray.new_actor()
        self._thread = threading.Thread(
            target=self._follow, name=f"holdfast-ray-{start.name}", daemon=True
        )

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, and its death was told."""
        return not self._thread.is_alive()

    def is_of(self, process: Process) -> bool:
        """Whether this is that process."""
        return self.process == process

    def begin(self, line: str, roles: Mapping[str, str]) -> None:
        """Tell it what to be."""
        log = None if self._log is None else str(self._log.absolute())
        self._ended = self._handle.run.remote(line, roles, log, self._allow_remote)
        self._thread.start()

    def wait_ready(self, ends_at: float) -> Process:
        """The process, when it has said where it listens."""
        while not self._starting.wait(self._ready, ends_at):
            if self._has_compiled():
                continue
            raise UnavailableError("a process did not start in time", **self._facts())
        if self._error is not None:
            raise self._error
        assert self.process is not None
        return self.process

    def _has_compiled(self) -> bool:
        """Whether it has compiled kernels since it was last asked."""
        if not self._where:
            return False  # it is no process yet
        seconds = self._ray.get_soon(self._handle.compiling_s.remote())
        if seconds is None or seconds <= self._compiled_s:
            return False
        self._compiled_s = seconds
        self._starting.tell(seconds)
        return True

    def ask_to_end(self) -> None:
        """It ends when it has put its things in order."""
        self._is_asked = True
        if not self.is_gone:
            self._handle.stop.remote()

    def wait_gone(self, ends_at: float) -> None:
        """Wait until it is gone, or until then."""
        if self._thread is not threading.current_thread():
            self._thread.join(max(0.0, ends_at - time.monotonic()))

    def kill(self) -> None:
        """End it, also when it hangs; returns when it is gone."""
        self._is_asked = True
        if self._thread is threading.current_thread() or self.is_gone:
            return  # it was gone before its death was told
        self._end()
        self._thread.join()

    def _follow(self) -> None:
        """Hear where it is and listens, wait until it dies. The edge of a thread."""
        try:
            self._where = self._ray.get(self._handle.where.remote())
            self._check_place()
            self._hear(self._ray.get(self._handle.ready.remote()))
            how = f"ended with code {self._ray.get(self._ended)}"
        except HoldfastError as error:
            self._error, how = error, ""
        except Exception as error:
            how = f"died: {_reason(error)}"
        try:
            self._end()
        except HoldfastError as error:
            self._error, how = error, f"{how}; {error}"
        if self.process is None and self._error is None:
            facts = {**self._facts(), "found": how}
            self._error = UnavailableError("a process died before it was ready", **facts)
        self._ready.set()
        if self.process is not None and not self._is_asked:
            tail = read_tail(self._log)
            self._told(self.process, f"{how}\n{tail}" if tail else how)

    def _check_place(self) -> None:
        if not self._allow_remote and self._where["machine"] != this_machine():
            raise InvalidRequestError(
                "a process was started on another machine, and nothing may listen beyond its own",
                name=self.name,
                machine=self._where["host"],
                todo="allow remote peers, in a network that you trust",
            )

    def _hear(self, answer: Mapping[str, Any]) -> None:
        if ERROR in answer:
            raise as_error(Message(ERROR, answer[ERROR]))
        pid, address = self._where["pid"], answer["address"]
        self.process = Process(self.name, self._start.role, pid, address)
        self._ready.set()

    def _end(self) -> None:
        """Let Ray forget it, and its machine end it."""
        self._ray.forget(self._handle)
        where = self._where
        if not where:
            return  # not a process yet, or one that ended at once: Ray's alone
        if where["machine"] == this_machine():
            end_process(where["pid"], where["began"])
        else:
            self._ray.end_process(where["node"], where["pid"], where["began"])

    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"name": self._start.name, "role": self._start.role}
        tail = read_tail(self._log)
        return {**facts, "stderr": tail} if tail else facts


class _Role:
    """What runs in an actor's process: one role, and what the driver asks of it meanwhile."""

    def __init__(self) -> None:
        self._stop, self._has_answer = threading.Event(), threading.Event()
        self._answer: dict[str, Any] = {}
        self._compiling_s = 0.0

    def where(self) -> dict[str, Any]:
        """The process: its number, when it began, on which machine, on which node of Ray."""
        import ray

        return {
            "pid": os.getpid(),
            "began": began(os.getpid()),
            "machine": this_machine(),
            "host": ray.util.get_node_ip_address(),
            "node": ray.get_runtime_context().get_node_id(),
        }

    def run(self, line: str, roles: Mapping[str, str], log: str | None, allow_remote: bool) -> int:
        """Be what the line says until told to stop; returns the code to end with."""
        try:
            if log is not None:
                print_to(Path(log))
            order = parse_order(line.encode())
            spec = order["spec"]
            if allow_remote:
                spec = {**spec, "host": self.where()["host"], "allow_remote": True}
            run = find_role(order["role"], roles)
            with reporting(self._compiles):
                run(spec, lambda address: self._tell({"address": address}), self._stop)
        except BaseException as error:  # the edge of a process: its driver shall know why
            traceback.print_exc()
            if not self._has_answer.is_set():
                self._tell({ERROR: dict(error_message(error).meta)})
            return 1
        return 0

    def ready(self) -> dict[str, Any]:
        """Where it listens, or why it does not."""
        self._has_answer.wait()
        return self._answer

    def compiling_s(self) -> float:
        """How long it has compiled kernels until now."""
        return self._compiling_s

    def _compiles(self, seconds: float) -> None:
        self._compiling_s = seconds

    def stop(self) -> None:
        """Let the role end."""
        self._stop.set()

    def _tell(self, answer: dict[str, Any]) -> None:
        self._answer = answer
        self._has_answer.set()


class _Ray:
    """The connection of this process to Ray, and Ray itself where it was started here."""

    def __init__(self, address: str | None) -> None:
        if not hasattr(os, "pidfd_open"):
            raise InvalidRequestError("the Ray engine needs Linux", todo="use the local engine")
        self._folder: str | None = None
        self._is_ours = False
        with _environment(_LOCAL_ENVIRONMENT if is_local(address) else _ENVIRONMENT):
            try:
                import ray
            except ImportError as error:
                raise InvalidRequestError(
                    "the Ray engine needs Ray", todo="pip install 'holdfast[cluster]'"
                ) from error
            self._api: Any = ray
            if not ray.is_initialized():
                self._is_ours = True
                try:
                    self._connect(address)
                except BaseException:
                    self.close()
                    raise
            elif address:
                raise InvalidRequestError(
                    "this process is connected to Ray already",
                    address=address,
                    todo="leave the address out to use that",
                )
        self.host: str = ray.util.get_node_ip_address()
        self._actor_class = ray.remote(_Role)

    def _connect(self, address: str | None) -> None:
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        if not address:
            if self._api.util.get_node_ip_address() not in LOOPBACK:
                raise InvalidRequestError(
                    "Ray was imported before, and would listen beyond this machine",
                    todo="make the engine first, or set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0",
                )
            self._begin_here(quiet)
            return
        if "://" in address:
            raise InvalidRequestError(
                "the driver must run on a machine of the Ray cluster",
                address=address,
                todo="give an address like 'host:6379', or 'auto'",
            )
        try:
            check_answers(address)  # Ray itself would try for minutes
            self._api.init(address=address, **quiet)
        except (OSError, RuntimeError, ValueError, self._api.exceptions.RayError) as error:
            raise UnavailableError(
                "no Ray cluster answers here",
                address=address,
                found=_reason(error),
                todo="give the address that 'ray start' told",
            ) from error

    def _begin_here(self, quiet: Mapping[str, Any]) -> None:
        """Start Ray on this machine. It gives itself half a minute, which a machine that is very
        busy may need more than once."""
        self._folder = tempfile.mkdtemp(prefix="hf-ray-")  # short: sockets have short names
        for left in reversed(range(_BEGINNINGS)):
            try:
                self._api.init(
                    address="local",
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    _node_ip_address=LOOPBACK[0],
                    _temp_dir=self._folder,
                    **quiet,
                )
                return
            except Exception as error:  # a foreign edge: Ray raises plain exceptions here
                self._api.shutdown()
                if not left:
                    raise UnavailableError(
                        "Ray could not be started here",
                        found=_reason(error),
                        todo="try again when the machine is less busy, or use the local engine",
                    ) from error

    @property
    def address(self) -> str:
        """Where other drivers join."""
        return str(self._api.get_runtime_context().gcs_address)

    def hosts(self) -> list[str]:
        """The addresses of its machines."""
        return [node["NodeManagerAddress"] for node in self._api.nodes() if node["Alive"]]

    def new_actor(self) -> Any:
        """Begin to start a process, on a machine that has few."""
        return self._actor_class.options(
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=_CALLS,
            num_cpus=_CPUS,
            scheduling_strategy="SPREAD",
        ).remote()

    def get(self, answer: Any) -> Any:
        """Wait for the answer to a call."""
        return self._api.get(answer)

    def get_soon(self, answer: Any) -> Any:
        """The answer to a call, or None where there is none soon."""
        with suppress(self._api.exceptions.RayError):
            return self._api.get(answer, timeout=_SOON_S)
        return None

    def forget(self, actor: Any) -> None:
        """Make Ray end an actor; a hung one is forgotten, and lives on."""
        with suppress(Exception):  # Ray itself may be gone
            self._api.kill(actor, no_restart=True)

    def end_process(self, node: str, pid: int, began_at: int) -> None:
        """End a process from its own machine; one that is gone itself has ended it."""
        strategies, exceptions = self._api.util.scheduling_strategies, self._api.exceptions
        there = strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        task = self._api.remote(end_process).options(
            num_cpus=0, max_retries=0, scheduling_strategy=there
        )
        try:
            self._api.get(task.remote(pid, began_at), timeout=_END_S)
        except (exceptions.TaskUnschedulableError, exceptions.NodeDiedError):
            return
        except exceptions.RayError as error:
            raise UnavailableError(
                "a process on another machine could not be ended", pid=pid, found=_reason(error)
            ) from error

    def close(self) -> None:
        """Leave Ray, and end it, if this began it."""
        if self._is_ours:
            self._is_ours = False
            self._api.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _reason(error: BaseException) -> str:
    """What Ray says of a failure: the last of many lines, and its beginning.

    >>> _reason(RuntimeError("The actor died.\\n\\tpid: 7\\nIts node is gone. "))
    'Its node is gone.'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:200]


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """These variables are set meanwhile, for what is imported and started."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
