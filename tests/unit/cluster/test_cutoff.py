from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cluster.cutoff import OPENINGS, Accepted, Openings, cut_connection


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s")


@pytest.fixture
def listening(path: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as found:
        found.bind(path)
        found.listen()
        yield found


def connect(path: str) -> tuple[socket.socket, int]:
    with OPENINGS.take_turn(path, 5) as opening:
        found = socket.socket(socket.AF_UNIX)
        found.connect(path)
        return found, opening.find()


def is_cut(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


def test_the_connection_that_was_opened_is_found_and_no_other_is_cut(
    listening: socket.socket, path: str
) -> None:
    opened = [connect(path) for _ in range(3)]
    inodes = [inode for _, inode in opened]
    assert inodes == [os.fstat(each.fileno()).st_ino for each, _ in opened]
    cut_connection(inodes[1])
    assert [is_cut(each) for each, _ in opened] == [False, True, False]
    cut_connection(0)
    cut_connection(1 << 60)  # it is gone
    for each, _ in opened:
        each.close()


def test_a_connection_over_tcp_is_found_by_its_port() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        OPENINGS.take_turn(server.getsockname()[1], 5) as opening,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as accepted,
    ):
        inode = opening.find()
        assert inode == os.fstat(client.fileno()).st_ino
        cut_connection(inode)
        assert is_cut(accepted)


def test_other_connections_are_not_mistaken_for_it(path: str, listening: socket.socket) -> None:
    with OPENINGS.take_turn(path, 5) as opening:
        others = socket.socketpair()
        assert opening.find() == 0
        for each in others:
            each.close()


def test_all_that_were_accepted_are_cut_and_those_that_lead_elsewhere_stay(
    listening: socket.socket, path: str
) -> None:
    clients = [connect(path)[0] for _ in range(2)]
    accepted = [listening.accept()[0] for _ in clients]
    others = socket.socketpair()
    Accepted(path).cut()
    assert all(is_cut(each) for each in clients)
    assert not is_cut(others[0])
    late, _ = connect(path)  # it still listens
    assert not is_cut(late)
    for each in (*clients, *accepted, *others, late):
        each.close()


def test_accepted_connections_are_given_wide_buffers(listening: socket.socket, path: str) -> None:
    client, _ = connect(path)
    before = socket.socketpair()
    accepted = listening.accept()[0]
    Accepted(path).widen()
    sizes = [
        each.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        for each in (client, accepted, before[0])
    ]
    assert sizes[0] == sizes[1] > sizes[2]
    for each in (client, accepted, *before):
        each.close()


def test_connections_to_one_place_are_opened_one_after_the_other() -> None:
    openings, order = Openings(), []
    is_inside, may_leave = threading.Event(), threading.Event()

    def first() -> None:
        with openings.take_turn("here", 5):
            is_inside.set()
            may_leave.wait(20)
            order.append("first")

    def second() -> None:
        with openings.take_turn("here", 20):
            order.append("second")

    threads = [threading.Thread(target=work) for work in (first, second)]
    threads[0].start()
    is_inside.wait(20)
    threads[1].start()
    with openings.take_turn("elsewhere", 0.01):
        pass
    with pytest.raises(TimeoutError), openings.take_turn("here", 0.01):
        pass
    may_leave.set()
    for thread in threads:
        thread.join(20)
    assert order == ["first", "second"]
    assert not openings._turns
    assert not openings._waiting
