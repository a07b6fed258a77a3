"""A lost worker's push happens on all its servers or on none, from every state it can leave."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from holdfast.cluster.commit import Commits, Held, choose_commits

NUMBER = 7


def left_behind(servers: int) -> Iterator[tuple[frozenset[int], dict[int, Held]]]:
    """Every state after a worker was lost in push 7: whose rows it changes, what servers hold.

    Earlier pushes are done, each on some of the servers. A server outside of the push holds
    nothing of it; in the first phase some have staged and none has applied; in the second all have
    staged, and some have applied. The next server has a copy of what a server staged. One server
    at most was lost since, and another process has its place: parity had all of the push, some of
    it, or nothing.
    """
    everyone = range(servers)
    for earlier in itertools.product((-1, NUMBER - 1), repeat=servers):
        for size in range(servers + 1):
            for inside in itertools.combinations(everyone, size):
                for phase in ("stage", "commit"):
                    for states in itertools.product((False, True), repeat=size):
                        is_reached = dict(zip(inside, states, strict=True))
                        held = {}
                        for server in everyone:
                            reached = is_reached.get(server, False)
                            ward = (server - 1) % servers
                            has_copy = (
                                servers > 1
                                and ward in is_reached
                                and (phase == "commit" or is_reached[ward])
                            )
                            copies = {ward: (NUMBER,)} if has_copy else {}
                            if server not in is_reached or (phase == "stage" and not reached):
                                held[server] = Held((), earlier[server], copies=copies)
                            elif phase == "commit" and reached:
                                held[server] = Held((), NUMBER, copies=copies)
                            else:
                                held[server] = Held((NUMBER,), earlier[server], copies=copies)
                        yield frozenset(inside), held
                        if servers > 1:
                            yield from replaced(frozenset(inside), held)


def replaced(
    inside: frozenset[int], held: dict[int, Held]
) -> Iterator[tuple[frozenset[int], dict[int, Held]]]:
    for lost, before in held.items():
        new = {-1: Held((), -1)}
        if before.applied == NUMBER:
            new[NUMBER - 1] = Held((), -1, seen=NUMBER)
            new[NUMBER] = Held((), NUMBER)
        for after in new.values():
            yield inside, {**held, lost: after}


@pytest.mark.parametrize("servers", [1, 2, 3, 4])
def test_a_push_happens_on_all_its_servers_or_on_none(servers: int) -> None:
    outcomes = set()
    for inside, held in left_behind(servers):
        commits = choose_commits(held)
        applied = {
            server
            for server, each in held.items()
            if each.applied == NUMBER
            or (commits.last == NUMBER and NUMBER in each.staged)
            or any(NUMBER in numbers for numbers in commits.given.get(server, {}).values())
        }
        assert applied in (set(), inside), held
        # What some server, or parity, has already cannot be taken back.
        assert applied >= {s for s, each in held.items() if NUMBER in (each.applied, each.seen)}
        for server, given in commits.given.items():
            for witness, numbers in given.items():
                assert set(numbers) <= set(held[witness].copies[server])
                assert all(held[server].applied < number <= commits.last for number in numbers)
        if inside:
            outcomes.add(bool(applied))
    assert outcomes == {False, True}


def test_a_worker_that_did_nothing_leaves_nothing() -> None:
    assert choose_commits({}) == Commits(-1, {})
    assert choose_commits({0: Held((), -1), 1: Held((), -1)}) == Commits(-1, {})


def test_only_what_was_applied_somewhere_is_committed() -> None:
    held = {0: Held((6, 7), 5), 1: Held((7,), 6)}
    assert choose_commits(held).last == 6


def test_what_was_decided_before_stays_decided() -> None:
    """The one server that had applied it was lost when the others had been told."""
    held = {0: Held((7,), 6), 1: Held((), 6, copies={2: (7,)}), 2: Held((), 3)}
    assert choose_commits(held, at_least=7) == Commits(7, {2: {1: [7]}})
    assert choose_commits(held).last == 6


def test_each_part_is_given_by_one_witness() -> None:
    held = {0: Held((), 2), 1: Held((), 5, copies={0: (3, 4)}), 2: Held((), 5, copies={0: (4, 5)})}
    assert choose_commits(held) == Commits(5, {0: {1: [3, 4], 2: [5]}})
