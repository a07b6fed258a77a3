"""What a process is told when it becomes a server, checked whole before anything is made of it.

    begin, adopt, load -> ServerOrder      view -> check_view, check_next

Invariants:
- A spec whose shard would not fit into this machine's memory is refused, not tried.
- A view names every server of the spec, by addresses that can be connected to.
- A view that follows another is no further ahead than changes of members can have brought it.

Not here: who gives orders (members.py), what a server does with one (server.py).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.cluster.numbers import whole
from holdfast.cluster.pace import check_share
from holdfast.cluster.reserve import shard_bytes
from holdfast.cluster.shard import Renewal, books_bytes
from holdfast.cluster.spec import ClusterSpec
from holdfast.cluster.view import View
from holdfast.errors import InvalidRequestError

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%a-z]{2,60}\]|[A-Za-z0-9._-]{1,255}):([0-9]{1,5})")
_EPOCHS_MAX = 1 << 16  # between two views that a server hears of
_FLUSH_EVERY_MAX_S = 86400.0


@dataclass(frozen=True, slots=True)
class ServerOrder:
    """Which server of which cluster a process is to be, and how."""

    spec: ClusterSpec
    server: int
    view: View
    coordinator: str
    """Where to report to; empty: nowhere."""
    flush_every_s: float
    recovery_share: float
    two_phase: bool
    renewal: int

    @classmethod
    def from_json(cls, meta: Mapping[str, Any]) -> ServerOrder:
        """An order of the coordinator.

        Raises:
            InvalidRequestError: it is none, or this machine cannot follow it.
        """
        spec = ClusterSpec.from_json(meta["spec"])
        server = whole(meta["server"], most=spec.servers - 1)
        view = View.from_json(meta["view"])
        check_view(view, spec)
        coordinator = meta.get("coordinator", "")
        if coordinator != "":
            check_address(coordinator)
        flush_every_s = meta.get("flush_every_s", 0.0)
        is_time = type(flush_every_s) in (int, float) and 0 <= flush_every_s <= _FLUSH_EVERY_MAX_S
        if not is_time:
            raise InvalidRequestError("not a time between flushes", flush_every_s=flush_every_s)
        share = meta.get("recovery_share", 1.0)
        check_share(share)
        check_fits(spec, server)
        return cls(
            spec=spec,
            server=server,
            view=view,
            coordinator=coordinator,
            flush_every_s=float(flush_every_s),
            recovery_share=float(share),
            two_phase=meta.get("two_phase", False) is True,
            renewal=whole(meta.get("renewal", 0)),
        )


def check_address(address: Any) -> None:
    """Refuse what is no host and port.

    >>> check_address("127.0.0.1:4711")

    Raises:
        InvalidRequestError: says what was found.
    """
    found = _ADDRESS.fullmatch(address) if type(address) is str else None
    if found is None or int(found[2]) > 65535:
        raise InvalidRequestError("not an address", address=repr(address)[:80])


def check_view(view: View, spec: ClusterSpec) -> None:
    """Refuse a view of other servers, or of none that can be reached.

    Raises:
        InvalidRequestError: says why.
    """
    servers = range(spec.servers)
    if len(view.addresses) != len(servers):
        raise InvalidRequestError("a view names every server", addresses=len(view.addresses))
    for address in view.addresses:
        check_address(address)
    if not view.lacking.issubset(servers):
        raise InvalidRequestError("a view names no other servers", lacking=sorted(view.lacking)[:5])
    if max(view.joined) > view.epoch:
        raise InvalidRequestError("a server cannot have joined later", epoch=view.epoch)


def check_next(view: View, old: View) -> None:
    """Refuse a view that no change of members makes of an older one: whoever entered it would be
    deaf to all others for good.

    Raises:
        InvalidRequestError: says how far ahead it is.
    """
    epochs, versions = view.epoch - old.epoch, view.version - old.version
    if not 0 <= epochs <= _EPOCHS_MAX or versions < epochs or versions > 2 * _EPOCHS_MAX:
        raise InvalidRequestError(
            "no such view follows this one",
            epoch=view.epoch, version=view.version, epoch_now=old.epoch, version_now=old.version,
        )  # fmt: skip


def renewal_of(value: Any, spec: ClusterSpec) -> Renewal | None:
    """What a message says of parities that are built anew; None: nothing."""
    if value is None:
        return None
    number, servers = value
    return Renewal(whole(number), tuple(whole(each, most=spec.servers - 1) for each in servers))


def memory_bytes() -> int:
    """What this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_fits(spec: ClusterSpec, server: int) -> None:
    """Refuse a shard that is larger than this machine's memory.

    Raises:
        InvalidRequestError: says how large it is.
    """
    size = shard_bytes(spec, server) + books_bytes(spec)
    memory = memory_bytes()
    if size > memory:
        raise InvalidRequestError(
            "this server's rows do not fit into the memory of its machine",
            gib=math.ceil(size / 2**30),
            memory_gib=memory // 2**30,
            todo="have more servers, or larger machines",
        )
