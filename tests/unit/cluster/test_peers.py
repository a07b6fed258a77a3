"""Streams follow the newest view that anybody entered, and names of freezes never come back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.cluster.freezer import Freezer
from holdfast.cluster.message import Message
from holdfast.cluster.peers import Peers
from holdfast.cluster.shard import Shard
from holdfast.cluster.spec import ClusterSpec, TableSpec
from holdfast.cluster.view import View
from holdfast.cluster.wire import Caller, Listener
from holdfast.errors import UnavailableError
from holdfast.model.placement import Placement

TOKEN = "f00d"
ALONE = ClusterSpec((TableSpec("users", 4, 2, Placement(1), "none"),))


def echo(caller: Caller, message: Message) -> Message:
    return Message(message.kind, {"epoch": caller.epoch})


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener(echo, token=TOKEN) as listener:
        yield listener


def test_a_slow_thread_does_not_take_streams_back_to_an_older_epoch(listener: Listener) -> None:
    peers = Peers("server-1", TOKEN)
    old = View(1, (listener.address,), version=1)
    new = old.replacing({0: listener.address}, epoch=2)
    peers.enter(old)
    assert peers.ask(0, Message("who")).meta["epoch"] == 1
    peers.enter(new)
    listener.epoch = 2
    peers.enter(old)
    assert peers.view == new
    assert peers.ask(0, Message("who")).meta["epoch"] == 2
    peers.close()


def test_a_listener_of_another_cluster_is_not_the_server_that_had_its_port() -> None:
    with Listener(echo, token="other") as stranger:
        peers = Peers("server-1", TOKEN)
        peers.enter(View(1, (stranger.address,), version=1))
        answers, failures = peers.ask_all({0: Message("who")})
        assert (answers, set(failures)) == ({}, {0})
        assert isinstance(failures[0], UnavailableError)
        peers.close()


def test_whoever_took_a_place_is_told_from_who_had_it_before_on_the_same_address() -> None:
    old = View(3, ("a:1", "b:2"), version=5)
    new = old.replacing({1: "b:2"}, epoch=4)
    assert new.replaced_since(old) == {1}
    assert new.with_rows(1).replaced_since(new) == frozenset()
    assert View.from_json(new.to_json()).replaced_since(old) == {1}


def test_a_ticket_is_never_used_again_by_who_takes_the_same_place() -> None:
    tickets = []
    for epoch in (1, 2):  # a server, and the one in its place: both count from 0
        shard = Shard(ALONE, 0, epoch=epoch)
        freezer = Freezer(shard, Peers("server-0", TOKEN), name="rows")
        for _ in range(2):
            with freezer.frozen(View(epoch, ("a:1",)), [0]) as (ticket, _):
                tickets.append(ticket)
    assert len(set(tickets)) == 4
