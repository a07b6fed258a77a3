"""Messages through a store: whole or not at all, and nobody waits for the silent."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from holdfast.checkpoint.ranks.mailbox import Mailbox, Watch
from holdfast.errors import UnavailableError


@pytest.fixture
def box() -> Mailbox:
    return Mailbox(dist.HashStore())


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (5 << 20) + 3])
def test_a_message_of_any_size_arrives_whole(box: Mailbox, size: int) -> None:
    data = bytes(i % 251 for i in range(1000)) * (size // 1000 + 1)
    assert box.get("m") is None
    box.put("m", data[:size])
    assert box.get("m") == data[:size]
    box.delete("m")
    assert box.get("m") is None
    box.delete("m")


def test_who_lives_is_waited_for_and_who_is_silent_is_named(box: Mailbox) -> None:
    watch = Watch(box, [(1, "beat/1"), (2, "beat/2")], timeout_s=1.2)
    with box.beating("beat/1"), pytest.raises(UnavailableError, match=r"ranks=\[2\]"):
        while True:
            watch.check([1, 2], what="testing")


def test_a_store_that_is_gone_is_an_error_of_ours() -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("Connection reset by peer")

    with pytest.raises(UnavailableError, match="Connection reset"):
        Mailbox(Gone()).get("m")
