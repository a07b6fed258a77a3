"""A lost worker's push happens on all its servers or on none, from every state it can leave."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from holdfast.cluster.commit import Held, choose_commits

NUMBER = 7


def left_behind(servers: int) -> Iterator[tuple[frozenset[int], dict[int, Held]]]:
    """Every state after a worker was lost in push 7: whose rows it changes, what servers hold.

    Earlier pushes are done, each on some of the servers. A server outside of the push holds
    nothing of it; in the first phase some have staged and none has applied; in the second all have
    staged, and some have applied and hold it no more.
    """
    everyone = range(servers)
    for earlier in itertools.product((-1, 3, NUMBER - 1), repeat=servers):
        for size in range(servers + 1):
            for inside in itertools.combinations(everyone, size):
                for phase in ("stage", "commit"):
                    for states in itertools.product((False, True), repeat=size):
                        is_reached = dict(zip(inside, states, strict=True))
                        held = {}
                        for server in everyone:
                            reached = is_reached.get(server, False)
                            if server not in is_reached or (phase == "stage" and not reached):
                                held[server] = Held((), earlier[server])
                            elif phase == "commit" and reached:
                                held[server] = Held((), NUMBER)
                            else:
                                held[server] = Held((NUMBER,), earlier[server])
                        yield frozenset(inside), held


@pytest.mark.parametrize("servers", [1, 2, 3, 4])
def test_a_push_happens_on_all_its_servers_or_on_none(servers: int) -> None:
    outcomes = set()
    for inside, held in left_behind(servers):
        commits, last = choose_commits(held)
        applied = {
            server
            for server, each in held.items()
            if each.applied == NUMBER or set(each.staged) & commits
        }
        assert applied in (set(), inside)
        # What some server applied already cannot be taken back.
        assert applied >= {server for server, each in held.items() if each.applied == NUMBER}
        assert commits <= {NUMBER}
        assert last == (NUMBER if applied else max(each.applied for each in held.values()))
        if inside:
            outcomes.add(bool(applied))
    assert outcomes == {False, True}


def test_a_worker_that_did_nothing_leaves_nothing() -> None:
    assert choose_commits({}) == (frozenset(), -1)
    assert choose_commits({0: Held((), -1), 1: Held((), -1)}) == (frozenset(), -1)


def test_only_what_was_applied_somewhere_is_committed() -> None:
    held = {0: Held((6, 7), 5), 1: Held((7,), 6)}
    assert choose_commits(held) == (frozenset({6}), 6)
