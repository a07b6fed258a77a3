from __future__ import annotations

import signal
import socket
import threading

import numpy as np
import pytest

from holdfast.kernels.servers.relay import relay

QUIET = getattr(socket, "MSG_NOSIGNAL", 0)


@pytest.fixture
def ends():  # type: ignore[no-untyped-def]
    (outer, source), (target, inner) = socket.socketpair(), socket.socketpair()
    moved_1 = np.zeros(1, np.int64)
    thread = threading.Thread(
        target=relay,
        args=(source.fileno(), target.fileno(), np.empty(1000, np.uint8), moved_1, QUIET),
    )
    thread.start()
    yield outer, inner, moved_1, thread
    for each in (outer, source, target, inner):
        each.close()
    thread.join()


def test_bytes_arrive_in_order_and_are_counted(ends) -> None:  # type: ignore[no-untyped-def]
    outer, inner, moved_1, thread = ends
    sent = np.random.default_rng(1).integers(0, 256, 3_000_001).astype(np.uint8).tobytes()
    sender = threading.Thread(target=outer.sendall, args=(sent,))
    sender.start()
    found = bytearray()
    while len(found) < len(sent):
        found += inner.recv(1 << 16)
    sender.join()
    assert bytes(found) == sent
    outer.shutdown(socket.SHUT_WR)
    thread.join(20)
    assert not thread.is_alive()
    assert moved_1[0] == len(sent)


def test_it_ends_when_nobody_takes_the_bytes(ends) -> None:  # type: ignore[no-untyped-def]
    outer, inner, _, thread = ends
    inner.close()
    while thread.is_alive():
        try:
            outer.sendall(b"x")
        except OSError:
            break
        thread.join(0.01)
    assert not thread.is_alive()


def test_signals_do_not_end_it(ends) -> None:  # type: ignore[no-untyped-def]
    outer, inner, _, thread = ends
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        for turn in range(20):
            assert thread.ident is not None
            signal.pthread_kill(thread.ident, signal.SIGUSR1)
            outer.sendall(bytes([turn]))
            assert inner.recv(1) == bytes([turn])
    finally:
        signal.signal(signal.SIGUSR1, before)
