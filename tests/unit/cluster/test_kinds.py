from __future__ import annotations

import json

import pytest

from holdfast.cluster import kinds
from holdfast.cluster.kinds import (
    COORDINATOR_KINDS,
    SERVER_KINDS,
    Kind,
    check_sender,
    check_size,
    role_of,
)
from holdfast.cluster.message import Caller, Message, encode
from holdfast.cluster.server import Server
from holdfast.errors import CorruptDataError, InvalidRequestError


def test_every_kind_that_a_server_handles_has_bounds() -> None:
    server = Server("token")
    try:
        assert set(server._handlers) | {"pulse"} == set(SERVER_KINDS)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("coordinator", ("coordinator", -1)),
        ("driver", ("driver", -1)),
        ("worker-0", ("worker", 0)),
        ("worker-255", ("worker", 255)),
        ("server-3", ("server", 3)),
        ("server-3-recovery", ("server", 3)),
        ("server-3-sweep", ("server", 3)),
        *((name, ("", -1)) for name in (
            "", "worker", "worker-", "worker--1", "worker-01", "worker-1x", "worker-1\n",
            "worker-9999999", "server-3-else", "server-3-sweep-sweep", "Coordinator",
            "coordinator-0", "xserver-1", "worker-\u0661",
        )),
    ],
)  # fmt: skip
def test_a_name_says_what_a_caller_is(name: str, role: tuple[str, int]) -> None:
    assert role_of(Caller(name, 0)) == role


ROLES = {
    "coordinator": "coordinator",
    "driver": "driver",
    "worker": "worker-3",
    "server": "server-3",
    "": "somebody",
}


@pytest.mark.parametrize("table", [SERVER_KINDS, COORDINATOR_KINDS], ids=["server", "coordinator"])
def test_orders_of_a_role_are_refused_from_all_others(table: kinds.Kinds) -> None:
    for name, kind in table.items():
        for role, caller in ROLES.items():
            message = Message(name, {"worker": 3})
            if not kind.senders or role in kind.senders:
                check_sender(table, Caller(caller, 0), message)
            else:
                with pytest.raises(InvalidRequestError, match="may ask for this"):
                    check_sender(table, Caller(caller, 0), message)


@pytest.mark.parametrize("worker", [2, 4, "3", None, 3.5, [3], -1])
def test_a_worker_speaks_for_itself(worker: object) -> None:
    with pytest.raises(InvalidRequestError, match="speaks for itself"):
        check_sender(SERVER_KINDS, Caller("worker-3", 0), Message("push", {"worker": worker}))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="unknown kind"):
        check_sender(SERVER_KINDS, Caller("coordinator", None), Message("x" * 1000))


TABLE = {"pull": Kind(payload_bytes_max=100, header_bytes_max=200), "stats": Kind()}


def header(kind: str, size: int = 0) -> bytes:
    return encode(Message(kind, {"x": "y" * size}))[0]


def test_a_message_is_as_long_as_its_kind_may_be() -> None:
    check_size(TABLE, header("pull"), 100)
    with pytest.raises(CorruptDataError, match="longer than its kind"):
        check_size(TABLE, header("pull"), 101)
    with pytest.raises(CorruptDataError, match="longer than its kind"):
        check_size(TABLE, header("pull", 200), 0)
    check_size(TABLE, header("stats", 1000), 1000)


@pytest.mark.parametrize(
    "start",
    [b"", b"{", b'["', b"[1, ", b'["\\u0070ull", ', b'["' + b"x" * 50 + b'", ', b"\xff" * 20],
    ids=repr,
)
def test_what_has_no_kind_of_ours_may_not_be_long(start: bytes) -> None:
    check_size(TABLE, start, 0)
    with pytest.raises(CorruptDataError):
        check_size(TABLE, start + b" " * (2 << 20), 0)
    with pytest.raises(CorruptDataError):
        check_size(TABLE, start, 1 << 20)


def test_only_kinds_that_describe_a_cluster_have_long_headers() -> None:
    long = {name for name, kind in SERVER_KINDS.items() if kind.header_bytes_max > 1 << 20}
    assert long == {"reserve", "begin", "adopt", "load", "entrust", "inherit"}
    large = {name for name, kind in SERVER_KINDS.items() if kind.payload_bytes_max > 1 << 16}
    assert large == {
        "adopt", "entrust", "inherit", "pull", "present", "push", "stage", "assign", "supply",
        "fold", "fetch",
    }  # fmt: skip
    assert not any(kind.payload_bytes_max > 1 << 16 for kind in COORDINATOR_KINDS.values())


def test_a_header_of_ours_names_its_kind_first() -> None:
    assert json.loads(header("pull"))[0] == "pull"


def test_a_server_that_the_cluster_does_not_have_gives_no_orders() -> None:
    freeze = Message("freeze", {"ticket": "1.2.rows.0", "granules": [0]})
    for servers, name in ((5, "server-4"), (5, "server-4-recovery"), (None, "server-77")):
        check_sender(SERVER_KINDS, Caller(name, 0), freeze, servers=servers)
    for name in ("server-5", "server-77-sweep"):
        with pytest.raises(InvalidRequestError, match="no such server"):
            check_sender(SERVER_KINDS, Caller(name, 0), freeze, servers=5)
