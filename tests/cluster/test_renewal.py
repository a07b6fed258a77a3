"""Parities that all servers build anew at once, while training goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.cluster.message import Message
from holdfast.cluster.wire import Caller
from tests.cluster.test_protocol import make_spec
from tests.cluster.trial import trial

Handler = Callable[[Caller, Message], Message]


def delayed(handler: Handler, before_s: float, after_s: float) -> Handler:
    def handle(caller: Caller, message: Message) -> Message:
        time.sleep(before_s)
        answer = handler(caller, message)
        time.sleep(after_s)
        return answer

    return handle


@pytest.mark.parametrize("seed", range(3))
def test_differences_do_not_pass_by_parities_that_are_being_built(
    seed: int, tmp_path: Path
) -> None:
    """Each time a server is whole all hear of it, some later than others: freezes must stay."""
    with trial(make_spec(), tmp_path, seed=seed, strategy="full", recovery="partial") as t:
        t.layer.save(step=0)
        for at, server in enumerate(t.engine.servers.values()):
            handlers = server._handlers
            handlers["view"] = delayed(handlers["view"], 0.01 * at, 0)
            handlers["fetch"] = delayed(handlers["fetch"], 0, 0.004)
        t.crash(0, 1)
        t.push(1)
        while t.cluster.coordinator.view.lacking:
            t.push(1)
        t.client.drain()
        assert t.cluster.audit().is_sound


def test_a_server_knows_the_view_before_its_shard_lets_differences_go(tmp_path: Path) -> None:
    with trial(make_spec(), tmp_path, strategy="full") as t:
        epochs = []
        for server in t.engine.servers.values():
            if server._shard is None:
                continue
            enter = server.shard.enter

            def enter_and_see(epoch, renewal, server=server, enter=enter) -> None:  # type: ignore[no-untyped-def]
                epochs.append((epoch, server._view.epoch, server._listener.epoch))
                enter(epoch, renewal)

            server.shard.enter = enter_and_see  # type: ignore[method-assign]
        t.crash(2)
        t.push(1)
        t.cluster.wait_whole(30)
        assert epochs and all(shown >= epoch for epoch, *known in epochs for shown in known)
