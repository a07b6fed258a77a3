"""The first lines of every process the engine starts: read what to be, be it, end with the driver.

    stdin:  {"role": ..., "name": ..., "spec": {...}}    one line; then open while the driver lives
    stdout: {"compiling_s": ...}                         while kernels are compiled
            {"address": ...} or {"error": ...}           the last line

Invariants:
- What to run comes from a fixed table, never from what was received.
- When stdin closes, the process ends: its driver has stopped it, or is dead.
- Ctrl-C is the driver's to handle; it stops its processes.

Not here: what a server or a worker does (server.py, workerprocess.py).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, BinaryIO, NoReturn

from holdfast.checkpoint.format import stored_json
from holdfast.cluster.message import error_message
from holdfast.errors import InvalidRequestError
from holdfast.kernels.compiling import reporting

Run = Callable[[Mapping[str, Any], Callable[[str], None], threading.Event], None]
"""``run(spec, ready, stop)`` calls ``ready(address)`` once, and returns when ``stop`` is set."""

ROLES = {
    "server": "holdfast.cluster.server:run",
    "worker": "holdfast.cluster.workerprocess:run",
}
STOP_S = 2.0  # how long a role may take to end


def main(roles: Mapping[str, str] = ROLES) -> NoReturn:
    """Be what the line on stdin says, until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a role prints is no answer
    stop = threading.Event()
    is_ready = False

    def ready(address: str) -> None:
        nonlocal is_ready
        is_ready = True
        _answer(answers, {"address": address})

    code = 1
    try:
        order = parse_order(sys.stdin.buffer.readline())
        threading.Thread(target=_end_with, args=(sys.stdin.buffer, stop), daemon=True).start()
        run = find_role(order["role"], roles)
        with reporting(lambda seconds: _tell(answers, {"compiling_s": seconds})):
            run(order["spec"], ready, stop)
        code = 0
    except BaseException as error:  # the edge of a process: its driver shall know why
        traceback.print_exc()
        if not is_ready:
            _answer(answers, {"error": error_message(error).meta})
    _leave(code)


def parse_order(line: bytes) -> dict[str, Any]:
    """What a process is told to be: role, name, spec."""
    try:
        order = stored_json.parse(line)
        stored_json.text(order["role"])
        if type(order["spec"]) is not dict:
            raise ValueError("not a spec")
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise InvalidRequestError("unreadable order to a new process") from error
    found: dict[str, Any] = order
    return found


def find_role(role: str, roles: Mapping[str, str]) -> Run:
    """What does a role's work."""
    if role not in roles:
        raise InvalidRequestError("unknown role of a process", role=role, known=list(roles))
    module, function = roles[role].split(":")
    found: Run = getattr(import_module(module), function)
    return found


def _end_with(stdin: BinaryIO, stop: threading.Event) -> None:
    """Wait until the driver closes our stdin or dies; then end, with or without the role's help."""
    while stdin.read(1 << 16):
        pass
    stop.set()
    threading.Event().wait(STOP_S)
    _leave(1)


def _answer(answers: Any, value: Mapping[str, Any]) -> None:
    """Say the last thing."""
    _tell(answers, value)
    with suppress(OSError):
        answers.close()


def _tell(answers: Any, value: Mapping[str, Any]) -> None:
    # Nobody may be there to read it; stdin tells the same. After the last thing nothing is said.
    with suppress(OSError, ValueError):
        answers.write(json.dumps(value) + "\n")
        answers.flush()


def _leave(code: int) -> NoReturn:
    """End at once: nothing that libraries do at exit may keep a process alive."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
