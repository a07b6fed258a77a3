"""A budget grows with the input and with nothing else; trust alone lifts it."""

from __future__ import annotations

import threading

import pytest

import holdfast as hf
from holdfast.boundary.budget import Account, Budget

KINDS = ["memory", "written"]


def limit(budget: Budget, kind: str) -> int:
    return getattr(budget, f"{kind}_bytes")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0, 1, 4096, 1 << 30])
def test_limit_is_a_factor_of_the_input_and_a_constant(kind: str, size: int) -> None:
    at_nothing, at_size = limit(Budget(0), kind), limit(Budget(size), kind)
    assert at_size - at_nothing == size * (limit(Budget(1), kind) - at_nothing)
    check = getattr(Budget(size), f"check_{kind}")
    check(at_size, claim="all of it")
    with pytest.raises(hf.InvalidRequestError, match="--trust, or trust=True") as caught:
        check(at_size + 1, claim="tensor 'm'")
    facts = caught.value.facts
    assert facts["claim"] == "tensor 'm'"
    assert (facts["needed_bytes"], facts["limit_bytes"]) == (at_size + 1, at_size)
    assert facts["input_bytes"] == size


@pytest.mark.parametrize("kind", KINDS)
def test_trust_lifts_the_limit(kind: str) -> None:
    getattr(Budget(1, is_trusted=True), f"check_{kind}")(1 << 70, claim="anything")


@pytest.mark.parametrize("kind", KINDS)
def test_account_refuses_what_is_too_much_together_and_takes_none_of_it(kind: str) -> None:
    account = Budget(0).open_account()
    half = limit(account.budget, kind) // 2 + 1
    take = getattr(account, f"take_{kind}")
    take(half, claim="one")
    for _ in range(2):
        with pytest.raises(hf.InvalidRequestError, match="two"):
            take(half, claim="two")
    assert limit(account, kind) == half
    take(half - 2, claim="the rest")


def test_memory_that_is_free_again_can_be_taken_again() -> None:
    account = Budget(0).open_account()
    for _ in range(5):
        account.take_memory(account.budget.memory_bytes, claim="all")
        account.give_back_memory(account.budget.memory_bytes)
    assert account.memory_bytes == 0


def test_threads_share_one_account() -> None:
    account = Account(Budget(0))
    threads = [
        threading.Thread(target=lambda: [account.take_memory(7, claim="") for _ in range(1000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert account.memory_bytes == 4 * 7 * 1000
