"""Small roles for tests of processes: a child's main module with a table of its own."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.cluster import child
from holdfast.cluster.message import Message
from holdfast.cluster.wire import Caller, Listener
from holdfast.errors import InvalidRequestError
from holdfast.kernels import compiling

MODULE = "tests.cluster.roles"
TOKEN = "7f3a"

Ready = Callable[[str], None]


def answer(caller: Caller, message: Message) -> Message:
    """Echo; or sleep, fail, or vanish, as told."""
    if message.kind == "sleep":
        time.sleep(message.meta["s"])
    if message.kind == "compute":
        until = time.monotonic() + message.meta["s"]
        while time.monotonic() < until:
            pass
    if message.kind == "vanish":
        sys.stderr.write("vanishing as told\n")
        sys.stderr.flush()
        os._exit(3)
    meta = {**message.meta, "caller": caller.name, "pid": os.getpid()}
    return Message(message.kind, meta, message.arrays)


def echo(spec: Mapping[str, Any], ready: Ready, stop: threading.Event) -> None:
    """A listener until stopped."""
    print("a role may print")
    with Listener(answer, token=spec["token"]) as listener:
        ready(listener.address)
        stop.wait()


def deaf(spec: Mapping[str, Any], ready: Ready, stop: threading.Event) -> None:
    """Ready, and then deaf to being stopped."""
    ready("127.0.0.1:1")
    time.sleep(600)


def silent(spec: Mapping[str, Any], ready: Ready, stop: threading.Event) -> None:
    """Never ready."""
    sys.stderr.write("still thinking\n")
    sys.stderr.flush()
    stop.wait()


def compiles(spec: Mapping[str, Any], ready: Ready, stop: threading.Event) -> None:
    """Ready after it has told that it compiles."""
    for _ in range(2):
        with compiling._progress.compiling():
            pass
    echo(spec, ready, stop)


def refuses(spec: Mapping[str, Any], ready: Ready, stop: threading.Event) -> None:
    """Refuses its spec."""
    raise InvalidRequestError("no rows to serve", rows=spec["rows"], todo="give it rows")


def crashes(spec: Mapping[str, Any], ready: Ready, stop: threading.Event) -> None:
    """Ends in the middle of its start, without a word to its driver."""
    sys.stderr.write("the rollup gave way\n")
    sys.stderr.flush()
    os._exit(7)


if __name__ == "__main__":
    names = ("echo", "deaf", "silent", "compiles", "refuses", "crashes")
    child.main({name: f"{MODULE}:{name}" for name in names})
