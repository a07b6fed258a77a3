"""The kinds of messages that servers and the coordinator take: who asks, and how much it may be.

    received -> the kind is looked up before the header is parsed -> too long? the stream ends
             -> is it this caller's to ask? else refused -> its handler

Invariants:
- A message longer than its kind allows is refused before its header is parsed or its arrays are
  looked at. The transport library has taken it in by then, and frees it.
- An order that only one role gives is refused from all others, so that a peer in confusion cannot
  change members, parities or other workers' pushes. (Names are not proven: a process that
  has the token is trusted to say what it is.)

Not here: the token (gate.py, wire.py), what is in a message (server.py, parts.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.cluster.message import (
    HEADER_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    Caller,
    Message,
    kind_of,
)
from holdfast.errors import CorruptDataError, InvalidRequestError

COORDINATOR, DRIVER, SERVER, WORKER = "coordinator", "driver", "server", "worker"
_ANYBODY = frozenset[str]()
_NUMBER = r"(0|[1-9][0-9]{0,5})"
_ROLES = (
    (COORDINATOR, re.compile("coordinator")),
    (DRIVER, re.compile("driver")),
    (WORKER, re.compile(f"worker-{_NUMBER}")),
    (SERVER, re.compile(f"server-{_NUMBER}(?:-recovery|-sweep)?")),
)
_FEW = 1 << 20  # bytes of a header that names no single rows
_LITTLE = 1 << 16  # bytes of arrays that a kind has none of
_ALL = MESSAGE_BYTES_MAX
_HEAD_BYTES = 64  # of a header, with its kind in them


@dataclass(frozen=True, slots=True)
class Kind:
    """What a message of one kind may be, and who sends it."""

    senders: frozenset[str] = _ANYBODY
    """Roles; empty: all."""
    payload_bytes_max: int = _LITTLE
    header_bytes_max: int = _FEW


Kinds = Mapping[str, Kind]
_UNKNOWN = Kind()


def _kinds(
    names: str, *senders: str, payload: int = _LITTLE, header: int = _FEW
) -> dict[str, Kind]:
    kind = Kind(frozenset(senders), payload, header)
    return dict.fromkeys(names.split(), kind)


SERVER_KINDS: Kinds = {
    **_kinds("reserve begin load", COORDINATOR, header=HEADER_BYTES_MAX),
    **_kinds("adopt", COORDINATOR, payload=_ALL, header=HEADER_BYTES_MAX),
    **_kinds("recover view report settle bar held resolve copies owed", COORDINATOR),
    **_kinds("entrust inherit", COORDINATOR, payload=_ALL, header=HEADER_BYTES_MAX),
    **_kinds("job", COORDINATOR, DRIVER),
    **_kinds("prepare snapshot store", DRIVER),
    **_kinds("pull present", payload=_ALL),
    **_kinds("read drain stats"),
    **_kinds("push stage assign supply", WORKER, payload=_ALL),
    **_kinds("commit past", WORKER),
    **_kinds("fold", SERVER, payload=_ALL),
    **_kinds("apply freeze thaw handover slab", SERVER),
    **_kinds("fetch", SERVER, payload=_ALL),
    **_kinds("pulse"),
}
COORDINATOR_KINDS: Kinds = {
    **_kinds("view pulse"),
    **_kinds("progress", SERVER),
    **_kinds("turn lease", WORKER),
}


def check_size(kinds: Kinds, header: bytes | memoryview, payload_bytes: int) -> None:
    """Refuse a message that is longer than its kind may be, before it is parsed.

    Raises:
        CorruptDataError: none of ours is so long.
    """
    name = kind_of(bytes(header[:_HEAD_BYTES]))
    kind = kinds.get(name, _UNKNOWN) if name is not None else _UNKNOWN
    if len(header) > kind.header_bytes_max or payload_bytes > kind.payload_bytes_max:
        raise CorruptDataError(
            "a message is longer than its kind may be",
            kind=name,
            header_bytes=len(header),
            payload_bytes=payload_bytes,
        )


def role_of(caller: Caller) -> tuple[str, int]:
    """What a caller is by its name, and its number; an empty text if it is none of ours.

    >>> role_of(Caller("server-2-sweep", 4)), role_of(Caller("somebody", 4))
    (('server', 2), ('', -1))
    """
    for role, pattern in _ROLES:
        if (found := pattern.fullmatch(caller.name)) is not None:
            return role, int(found[1]) if found.groups() else -1
    return "", -1


def check_sender(
    kinds: Kinds, caller: Caller, message: Message, *, servers: int | None = None
) -> None:
    """Refuse what is not a caller's to ask: orders of other roles, pushes of other workers, and
    orders of a server that the cluster does not have (``servers``: how many it has, if known).

    Raises:
        InvalidRequestError: names the caller.
    """
    kind = kinds.get(message.kind)
    if kind is None:
        raise InvalidRequestError("unknown kind of message", kind=message.kind[:40])
    if not kind.senders:
        return
    role, number = role_of(caller)
    if role not in kind.senders:
        raise InvalidRequestError(
            f"only a {' or '.join(sorted(kind.senders))} may ask for this",
            kind=message.kind,
            caller=caller.name,
        )
    if role == SERVER and servers is not None and number >= servers:
        raise InvalidRequestError("there is no such server", caller=caller.name, servers=servers)
    if role == WORKER and message.meta.get(WORKER, number) != number:
        raise InvalidRequestError(
            "a worker speaks for itself", kind=message.kind, caller=caller.name
        )
