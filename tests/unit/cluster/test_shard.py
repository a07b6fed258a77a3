from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from holdfast.cluster.flush import Flush, Report, choose_settlement
from holdfast.cluster.pushes import Entrusted, Gradients
from holdfast.cluster.shard import WORKERS_MAX, Shard
from holdfast.cluster.spec import ClusterSpec, Optimizer, TableSpec
from holdfast.errors import ConflictError, HoldfastError, InvalidRequestError, UnavailableError
from holdfast.model.placement import Placement

SGD = Optimizer("sgd", lr=1.0)
ONE = ClusterSpec(
    (TableSpec("users", 24, 2, Placement(3, data=2, parity=1), "xor", SGD),),
    locks=2,
    waiting_rows=2,
)
TWO = ClusterSpec((TableSpec("users", 24, 2, Placement(5, data=2, parity=2), "rs", SGD),), locks=2)


def begun(spec: ClusterSpec, server: int = 0, *, epoch: int = 1) -> Shard:
    shard = Shard(spec, server, epoch=epoch)
    shard.begin()
    return shard


def gradients(slots: list[int], value: float = 1.0) -> list[Gradients]:
    return [Gradients(0, np.array(slots), np.full((len(slots), 2), value, np.float32))]


def flushed(shard: Shard) -> Flush:
    flush = shard.begin_flush()
    assert flush is not None
    return flush


def started(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


# Pushes.


def test_a_push_changes_rows_once() -> None:
    shard = begun(ONE)
    assert shard.push(0, 3, gradients([1]))
    for number in (3, 2, 0):
        assert not shard.push(0, number, gradients([1]))
    assert shard.push(1, 0, gradients([1]))
    assert shard.pull([(0, np.array([1]))])[0].tolist() == [[-2, -2]]
    assert shard.applied_W[:3].tolist() == [3, 0, -1]


def test_a_staged_push_changes_nothing_until_it_is_pushed() -> None:
    shard = begun(ONE)
    shard.stage(0, 0, gradients([1]))
    assert shard.pull([(0, np.array([1]))])[0].tolist() == [[0, 0]]
    assert list(shard.staged(0)) == [0]
    assert shard.push(0, 0, shard.staged(0)[0])
    assert shard.staged(0) == {}
    shard.stage(0, 0, gradients([1]))  # sent again after it was applied
    assert shard.staged(0) == {}


def test_a_dropped_push_is_forgotten() -> None:
    shard = begun(ONE)
    shard.stage(2, 4, gradients([1]))
    shard.stage(2, 5, gradients([1]), {2: gradients([0])})
    shard.begin_resolving(2, 4)
    assert list(shard.staged(2)) == [4]
    assert shard.copies(2, [2]) == []


# Parts that parity may lack, and copies of others'.


def witnessed(spec: ClusterSpec, server: int = 0) -> Shard:
    shard = Shard(spec, server, epoch=1, has_witnesses=True)
    shard.begin()
    return shard


def numbers(given: list[Entrusted]) -> list[tuple[int, int]]:
    return [(each.worker, each.number) for each in given]


def test_a_part_is_kept_until_parity_has_it_and_its_copy_until_witnesses_hear_of_that() -> None:
    owner, witness = witnessed(ONE), witnessed(ONE, 1)
    assert ONE.witnesses == ((1,), (2,), (0,))
    for number in range(2):
        owner.stage(0, number, gradients([number]))
        witness.stage(0, number, [], {0: gradients([number])})
    assert numbers(owner.owed([0])) == [(0, 0), (0, 1)]
    owner.push(0, 0, owner.staged(0)[0])
    assert list(owner.staged(0)) == [1]
    assert numbers(owner.owed([0])) == [(0, 0), (0, 1)]  # applied, and parity lacks it
    first = flushed(owner)
    witness.fold(0, first, epoch=1)
    assert numbers(witness.copies(0, [0])) == [(0, 0), (0, 1)]  # others may not have it yet
    owner.end_flush()
    assert numbers(owner.owed([0])) == [(0, 1)]
    second = flushed(owner)  # though no difference waits
    assert second.receivers == (1,) and second.rows == 0
    witness.fold(0, second, epoch=1)
    owner.end_flush()
    assert numbers(witness.copies(0, [0])) == [(0, 1)]
    assert owner.begin_flush() is None


def test_copies_are_given_by_worker_and_in_order() -> None:
    witness = witnessed(TWO, 2)
    assert TWO.witnesses[0] == (1, 2) and TWO.witnesses[4] == (0, 1)
    for worker, number in ((3, 1), (1, 5), (3, 0)):
        witness.stage(worker, number, [], {0: gradients([0]), 1: gradients([1])})
    assert numbers(witness.copies(0, [3, 7])) == [(3, 0), (3, 1)]
    assert witness.bar(3).copies == {0: [0, 1], 1: [0, 1]}
    with pytest.raises(InvalidRequestError, match="no witness"):
        witness.stage(0, 0, [], {3: gradients([0])})
    with pytest.raises(InvalidRequestError, match="no witness"):
        witness.entrust(2, [])


def test_what_a_lost_worker_committed_is_applied_to_a_server_that_lacks_it() -> None:
    shard = witnessed(ONE)
    given = [Entrusted(0, number, gradients([number])) for number in range(3)]
    shard.push(0, 0, gradients([0]))
    shard.inherit(given)
    shard.begin_resolving(0, 1)
    assert list(shard.staged(0)) == [1]  # the first is here, the last never happened
    drained = started(shard.wait_until_drained)
    flushed(shard)
    shard.end_flush()
    drained.join(0.05)
    assert drained.is_alive()  # more will be applied
    shard.push(0, 1, shard.staged(0)[1], is_resolved=True)
    shard.end_resolving()
    flushed(shard)
    shard.end_flush()
    drained.join(20)
    assert not drained.is_alive()
    assert shard.pull([(0, np.arange(3))])[0][:, 0].tolist() == [-1, -1, 0]


def test_a_worker_taken_for_lost_is_not_heard_any_more() -> None:
    shard = begun(ONE)
    shard.push(0, 0, gradients([0]))
    shard.stage(0, 1, gradients([0]))
    held = shard.bar(0)
    assert (list(held.staged), held.applied) == ([1], 0)
    for speak in (
        lambda: shard.stage(0, 2, gradients([0])),
        lambda: shard.push(0, 2, gradients([0])),
    ):
        with pytest.raises(ConflictError, match="taken for lost"):
            speak()
    shard.push(1, 0, gradients([0]))
    assert shard.push(0, 1, shard.staged(0)[1], is_resolved=True)
    assert shard.pull([(0, np.array([0]))])[0].tolist() == [[-3, -3]]


@pytest.mark.parametrize(
    ("worker", "parts"),
    [
        (-1, gradients([0])),
        (WORKERS_MAX, gradients([0])),
        (0, gradients([8])),
        (0, gradients([-1])),
        (0, [Gradients(1, np.array([0]), np.ones((1, 2), np.float32))]),
        (0, [Gradients(-1, np.array([0]), np.ones((1, 2), np.float32))]),
        (0, [Gradients(0, np.array([0]), np.ones((1, 3), np.float32))]),
        (0, [Gradients(0, np.array([0]), np.ones((2, 2), np.float32))]),
        (0, [*gradients([0]), *gradients([8])]),
    ],
)
def test_a_push_that_does_not_fit_changes_nothing(worker: int, parts: list[Gradients]) -> None:
    shard = begun(ONE)
    for refuse in (shard.push, shard.stage):
        with pytest.raises(InvalidRequestError):
            refuse(worker, 0, parts)
    assert not shard.arenas[0].records_MW.any()
    assert shard.waiting() == 0
    assert (shard.applied_W == -1).all()


def test_a_push_waits_while_too_many_differences_wait() -> None:
    shard = begun(ONE)
    shard.push(0, 0, gradients([0, 1]))
    pushing = started(lambda: shard.push(0, 1, gradients([2, 3])))
    pushing.join(0.05)
    assert pushing.is_alive()
    assert shard.applied_W[0] == 0
    shard_flush = flushed(shard)
    shard.end_flush()
    pushing.join(20)
    assert not pushing.is_alive()
    assert shard_flush.marks_W[0] == 0
    assert shard.applied_W[0] == 1


def test_a_push_that_waits_for_room_is_not_applied_once_its_worker_is_taken_for_lost() -> None:
    shard = begun(ONE)
    shard.push(1, 0, gradients([0, 1]))
    shard.stage(0, 0, gradients([2, 3]))
    raised: list[BaseException] = []

    def commit() -> None:
        try:
            shard.push(0, 0, shard.staged(0)[0])
        except ConflictError as error:
            raised.append(error)

    committing = started(commit)
    committing.join(0.05)
    assert committing.is_alive()
    held = shard.bar(0)
    assert (list(held.staged), held.applied) == ([0], -1)  # what waits is still staged
    shard.begin_resolving(0, -1)
    flushed(shard)
    shard.end_flush()
    committing.join(20)
    assert len(raised) == 1 and "taken for lost" in str(raised[0])
    assert shard.applied_W[0] == -1
    assert not shard.pull([(0, np.array([2, 3]))])[0].any()


def test_whoever_waits_at_a_shard_that_closes_waits_no_longer() -> None:
    shard = begun(ONE)
    shard.push(0, 0, gradients([0, 1]))
    raised: list[BaseException] = []

    def waiting(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except UnavailableError as error:
                raised.append(error)

        return run

    threads = [
        started(waiting(lambda: shard.push(0, 1, gradients([2, 3])))),
        started(waiting(shard.wait_until_drained)),
    ]
    for thread in threads:
        thread.join(0.05)
        assert thread.is_alive()
    shard.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert len(raised) == 2


def test_draining_does_not_wait_for_pushes_that_come_later() -> None:
    shard = begun(TWO)
    shard.push(0, 0, gradients([0]))
    draining = started(shard.wait_until_drained)
    while not shard._hurried:  # it has not begun to wait
        time.sleep(0.001)
    flushed(shard)
    shard.push(0, 1, gradients([1]))
    assert draining.is_alive()
    shard.end_flush()
    draining.join(20)
    assert not draining.is_alive()
    assert shard.waiting() > 0


def test_while_ranges_are_frozen_no_push_waits() -> None:
    shard = begun(ONE)
    shard.freeze("t", [0, 1], epoch=1)
    for number in range(4):
        shard.push(0, number, gradients(list(range(8))))
    assert shard.waiting() == 8


def test_a_push_larger_than_the_room_happens_when_nothing_waits() -> None:
    shard = begun(ONE)
    assert shard.push(0, 0, gradients(list(range(8))))
    assert shard.waiting() == 8


# Durability.


def test_a_push_is_durable_when_its_differences_have_arrived() -> None:
    shard = begun(ONE)
    shard.push(0, 5, gradients([0]))
    assert shard.durable_W()[0] == -1
    flushed(shard)
    assert shard.durable_W()[0] == -1
    shard.push(0, 6, gradients([0]))
    shard.end_flush()
    assert shard.durable_W()[0] == 5
    flushed(shard)
    shard.end_flush()
    assert shard.durable_W()[0] == 6
    assert shard.begin_flush() is None


def test_what_waits_in_a_frozen_range_is_not_durable() -> None:
    shard = begun(ONE)
    slots = [int(np.flatnonzero(shard.arenas[0].granules(np.arange(8)) == g)[0]) for g in (0, 1)]
    shard.freeze("t", [1], epoch=1)
    shard.push(0, 0, gradients(slots))
    assert flushed(shard).frozen == (1,)
    shard.end_flush()
    assert shard.waiting() == 1
    assert shard.durable_W()[0] == -1
    shard.thaw("t")
    assert flushed(shard).frozen == ()
    shard.end_flush()
    assert shard.durable_W()[0] == 0


def test_without_codes_what_is_applied_is_as_durable_as_it_gets() -> None:
    table = TableSpec("alone", 24, 2, Placement(3), "none", SGD)
    shard = begun(ClusterSpec((table,)))
    shard.push(0, 7, gradients([0]))
    assert shard.durable_W()[0] == 7
    assert shard.waiting() == 0


def test_drained_means_nothing_waits_and_nothing_is_on_its_way() -> None:
    shard = begun(ONE)
    shard.push(0, 0, gradients([0]))
    draining = started(shard.wait_until_drained)
    flushed(shard)
    draining.join(0.1)
    assert draining.is_alive()
    shard.end_flush()
    draining.join(20)
    assert not draining.is_alive()


# Differences in.


def receiver_of(flush: Flush, spec: ClusterSpec) -> Shard:
    return begun(spec, flush.receivers[0])


def has_folded(parity: Shard) -> bool:
    """Whether its parities are not the first ones any more."""
    first_QW = begun(parity.spec, parity.server).arenas[0].parities_QW
    found_QW = parity.arenas[0].parities_QW
    return not np.array_equal(found_QW.view(np.uint32), first_QW.view(np.uint32))


def test_a_flush_is_folded_once() -> None:
    shard = begun(ONE)
    shard.push(0, 4, gradients([0]))
    flush = flushed(shard)
    parity = receiver_of(flush, ONE)
    parity.fold(0, flush, epoch=1)
    assert has_folded(parity)
    first_QW = parity.arenas[0].parities_QW.copy()
    parity.fold(0, flush, epoch=1)
    np.testing.assert_array_equal(parity.arenas[0].parities_QW, first_QW)
    assert parity.report(0).flushed == flush.number
    assert (parity.report(0).marks_GW[:, 0] == 4).all()


def test_with_two_parities_a_flush_is_kept_until_all_have_it() -> None:
    shard = begun(TWO)
    shard.push(0, 4, gradients([0]))
    flush = flushed(shard)
    parity = receiver_of(flush, TWO)
    parity.fold(0, flush, epoch=1)
    assert not has_folded(parity)
    report = parity.report(0)
    assert (report.flushed, report.kept, report.receivers) == (0, flush.number, flush.receivers)
    parity.apply_flush(0, flush.number + 1, epoch=1)  # another one
    assert parity.report(0).kept == flush.number
    for _ in range(2):
        parity.apply_flush(0, flush.number, epoch=1)
        assert has_folded(parity)
        assert (parity.report(0).flushed, parity.report(0).kept) == (flush.number, None)


@pytest.mark.parametrize("epoch", [0, 2])
def test_nothing_of_another_epoch_is_folded(epoch: int) -> None:
    shard = begun(TWO)
    shard.push(0, 4, gradients([0]))
    flush = flushed(shard)
    parity = receiver_of(flush, TWO)
    with pytest.raises(ConflictError, match="the cluster has changed"):
        parity.fold(0, flush, epoch=epoch)
    parity.fold(0, flush, epoch=1)
    with pytest.raises(ConflictError, match="the cluster has changed"):
        parity.apply_flush(0, flush.number, epoch=epoch)
    assert not has_folded(parity)


@pytest.mark.parametrize("source", [-1, 3])
def test_differences_of_no_server_are_refused(source: int) -> None:
    shard = begun(ONE)
    shard.push(0, 0, gradients([0]))
    flush = flushed(shard)
    with pytest.raises(InvalidRequestError, match="no such server"):
        receiver_of(flush, ONE).fold(source, flush, epoch=1)


# Settlement: of a lost server's last flush.


def histories(receivers: int) -> Iterator[tuple[list[str], set[int]]]:
    """Every state of a flush when its sender is lost, and which receivers live on."""
    for applying in (False, True):
        states = ("kept", "folded") if applying else ("nothing", "kept")
        for found in itertools.product(states, repeat=receivers):
            for size in range(1, receivers + 1):
                for living in itertools.combinations(range(receivers), size):
                    yield list(found), set(living)


@pytest.mark.parametrize("receivers", [1, 2, 3, 4])
def test_a_lost_servers_flush_is_folded_by_all_who_live_or_by_none(receivers: int) -> None:
    everyone = tuple(range(receivers))
    marks_GW = np.empty((0, 0))
    for states, living in histories(receivers):
        reports = {
            server: Report(
                flushed=5 if states[server] == "folded" else 4,
                kept=5 if states[server] == "kept" else None,
                receivers=everyone if states[server] == "kept" else (),
                marks_GW=marks_GW,
            )
            for server in living
        }
        reports[receivers] = Report(2, None, (), marks_GW)  # this flush was not for it
        number = choose_settlement(reports)
        after = {
            server
            for server in living
            if states[server] == "folded" or (states[server] == "kept" and number == 5)
        }
        assert after in (set(), living)
        if any(states[server] == "folded" for server in living):
            assert after == living
        assert number in (4, 5)


def test_a_settled_flush_is_folded_or_forgotten() -> None:
    shard = begun(TWO)
    shard.push(0, 4, gradients([0]))
    flush = flushed(shard)
    for number, is_folded in ((flush.number, True), (flush.number - 1, False)):
        parity = receiver_of(flush, TWO)
        parity.fold(0, flush, epoch=1)
        parity.settle(0, number)
        assert parity.report(0).kept is None
        assert has_folded(parity) == is_folded
        parity.settle(0, number)
        parity.apply_flush(0, flush.number, epoch=1)
        assert has_folded(parity) == is_folded


# Freezing.


def test_a_freeze_returns_when_nothing_is_on_its_way() -> None:
    shard = begun(ONE)
    shard.push(0, 3, gradients([0]))
    flushed(shard)
    found: list[np.ndarray] = []
    freezing = started(lambda: found.append(shard.freeze("t", [0, 1], epoch=1)))
    freezing.join(0.05)
    assert freezing.is_alive()
    shard.end_flush()
    freezing.join(20)
    assert not freezing.is_alive()
    assert (found[0][:, 0] == 3).all()


def test_a_freeze_that_waits_is_void_when_members_change() -> None:
    shard = begun(ONE)
    shard.push(0, 3, gradients([0]))
    flushed(shard)
    errors: list[HoldfastError] = []

    def freeze() -> None:
        try:
            shard.freeze("t", [0], epoch=1)
        except HoldfastError as error:
            errors.append(error)

    freezing = started(freeze)
    freezing.join(0.05)
    shard.enter(2)
    freezing.join(20)
    assert not freezing.is_alive()
    assert isinstance(errors[0], ConflictError)


def test_only_what_is_frozen_can_be_fetched_and_built() -> None:
    shard = begun(ONE)
    none_N, slots_N = np.zeros(0, np.int64), np.array([0])
    with pytest.raises(ConflictError, match="not frozen any more"):
        shard.fetch("t", 0, slots_N, none_N)
    shard.freeze("t", [0], epoch=1)
    shard.push(0, 0, gradients([0]))
    assert shard.fetch("t", 0, slots_N, none_N)[0].tolist() == [[0, 0]]  # as parity knows it
    shard.enter(2)
    for attempt in (
        lambda: shard.fetch("t", 0, slots_N, none_N),
        lambda: shard.install_parities("t", [0], [], {}),
        lambda: shard.freeze("u", [0], epoch=1),
    ):
        with pytest.raises(ConflictError):
            attempt()


def test_what_is_frozen_stays_so_within_an_epoch() -> None:
    """Others hear of it when a server is whole again: no reason to let differences go."""
    shard = begun(ONE)
    shard.freeze("t", [0, 1], epoch=1)
    shard.enter(1)
    shard.push(0, 0, gradients([0]))
    flush = shard.begin_flush()
    assert flush is not None and flush.rows == 0
    assert shard.fetch("t", 0, np.array([0]), np.zeros(0, np.int64))[0].tolist() == [[0, 0]]


def test_rows_that_are_missing_cannot_be_fetched() -> None:
    shard = Shard(ONE, 0, epoch=1)
    shard.freeze("t", [0, 1], epoch=1)
    none_N = np.zeros(0, np.int64)
    with pytest.raises(ConflictError, match="rows are missing here"):
        shard.fetch("t", 0, np.array([0]), none_N)
    assert shard.missing([(0, np.array([0, 1]))])[0][1].tolist() == [0, 1]
    assert shard.rows_missing == 8


# Adoption.


def marks(value: int) -> np.ndarray:
    found_GW = np.full((2, WORKERS_MAX), -1, np.int64)
    found_GW[:, 0] = value
    return found_GW


def test_a_push_sent_again_changes_only_rows_that_lack_it() -> None:
    placement = ONE.tables[0].placement
    shard = Shard(dataclasses.replace(ONE, waiting_rows=99), 0, epoch=2)
    ids_M = shard.arenas[0].ids_M
    servers_M = placement.parity_servers_of(placement.stripes_of(ids_M))[:, 0]
    shard.adopt({1: Report(3, None, (), marks(6)), 2: Report(2, None, (), marks(4))})
    shard.install(0, np.arange(8), np.zeros((8, 2), np.float32))
    for number in (5, 6, 7):
        assert shard.push(0, number, gradients(list(range(8))))
        assert not shard.push(0, number, gradients(list(range(8))))
    found_M = shard.pull([(0, np.arange(8))])[0][:, 0]
    np.testing.assert_array_equal(found_M, np.where(servers_M == 1, -1, -3))
    assert shard.counts["rows_kept_by_parity"] == 2 * (servers_M == 1).sum()


def test_a_replacements_flushes_are_numbered_after_those_of_the_lost() -> None:
    shard = Shard(ONE, 0, epoch=2)
    shard.adopt({1: Report(3, None, (), marks(0)), 2: Report(5, None, (), marks(0))})
    shard.install(0, np.arange(8), np.zeros((8, 2), np.float32))
    shard.push(0, 1, gradients([0]))
    assert flushed(shard).number == 6


def test_weights_that_workers_hold_are_taken_where_rows_are_missing() -> None:
    held = dataclasses.replace(ONE.tables[0], is_held=True)
    shard = Shard(dataclasses.replace(ONE, tables=(held,)), 0, epoch=2)
    shard.install(0, np.array([0]), np.full((1, 2), 9.0, np.float32))
    assert shard.supply(gradients([0, 1], 4.0)) == 1
    assert shard.pull([(0, np.array([0, 1]))])[0].tolist() == [[9, 9], [4, 4]]
    assert shard.waiting() == 0


def test_rows_that_workers_do_not_hold_are_not_supplied() -> None:
    shard = Shard(ONE, 0, epoch=2)
    with pytest.raises(InvalidRequestError, match="not held by workers"):
        shard.supply(gradients([0, 1], 4.0))
    assert shard.rows_missing == 8


def test_an_epoch_never_falls() -> None:
    shard = begun(ONE, epoch=4)
    shard.enter(3)
    assert shard.epoch == 4
    shard.enter(6)
    assert shard.epoch == 6
