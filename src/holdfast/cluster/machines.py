"""Machines of a cluster: which is this one, who may reach it, how a process on it surely ends.

Invariants:
- A number means a process only on one machine and with the time it began: no other is ever ended.
- Nothing listens beyond its machine unless that is allowed.

Not here: who starts processes there (rayengine.py).
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from holdfast.errors import InvalidRequestError

LOOPBACK = ("127.0.0.1", "::1")
_CONNECT_S = 10.0


def choose_host(hosts: Sequence[str], own: str, allow_remote: bool) -> str:
    """Where processes of this machine listen, in a Ray cluster of machines at these hosts.

    >>> choose_host(["10.0.0.1"], "10.0.0.1", allow_remote=False)
    '127.0.0.1'
    >>> choose_host(["10.0.0.1", "10.0.0.2"], "10.0.0.1", allow_remote=True)
    '10.0.0.1'

    Raises:
        InvalidRequestError: there are others, and nothing may listen beyond its machine.
    """
    if allow_remote:
        return own
    others = sorted(set(hosts) - {own})
    if others:
        raise InvalidRequestError(
            "this Ray cluster has several machines, and nothing may listen beyond its own",
            machines=len(others) + 1,
            others=others[:5],
            todo="allow remote peers, in a network that you trust",
        )
    return LOOPBACK[0]


def is_local(address: str | None) -> bool:
    """Whether a Ray at this address is one that only this machine reaches.

    >>> is_local(None), is_local("127.0.0.1:6379"), is_local("auto"), is_local("10.0.0.1:6379")
    (True, True, False, False)
    """
    return not address or address.rpartition(":")[0].strip("[]") in LOOPBACK


def check_answers(address: str) -> None:
    """Raise OSError if nobody listens at an address; ``auto`` is Ray's to find."""
    host, _, port = address.rpartition(":")
    if host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()


def end_process(pid: int, began_at: int) -> None:
    """SIGKILL the process of this number that began then; returns when it runs no more."""
    try:
        held = os.pidfd_open(pid)  # from here on the number means the same process
    except ProcessLookupError:
        return
    try:
        if began(pid) == began_at:
            signal.pidfd_send_signal(held, signal.SIGKILL)
            ended = select.poll()
            ended.register(held, select.POLLIN)
            ended.poll()
    except ProcessLookupError:
        pass
    finally:
        os.close(held)


def began(pid: int) -> int:
    """When a process began, in the machine's ticks: no two of one number began at the same."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError as error:
        raise ProcessLookupError(pid) from error


def this_machine() -> str:
    """What process numbers are good for: one start of one kernel, one space of numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
