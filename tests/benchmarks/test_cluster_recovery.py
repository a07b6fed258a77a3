"""What a lost server costs: moments and windows are found right, and a quick run kills for real."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.cluster import recovery
from benchmarks.cluster.checkpoints import Saved, plan_intervals
from benchmarks.cluster.kills import (
    Struck,
    count_spares,
    describe_kill,
    find_steps,
    find_whole,
)
from benchmarks.cluster.shard import Bare, count_shard, rows_for, wait_until
from benchmarks.cluster.trainer import ECREC, Job, Window
from holdfast import events
from holdfast.errors import UnavailableError
from holdfast.recsys.cluster_train import BatchTold, Workload

SECTION = "clusterrecovery"


def told(worker: int, *moments: float) -> list[BatchTold]:
    return [BatchTold(worker, time, 0, 0.5, 0.0, 0) for time in moments]


def recovered(server: int, what: str, time: float) -> events.ServerRecovered:
    return events.ServerRecovered(server=server, what=what, seconds=0.0, time=time)


HAPPENED: list[events.Event] = [
    recovered(1, "rows", 3.0),  # of an earlier loss
    recovered(1, "parities", 3.5),
    events.ServerLost(server=1, pid=7, how="was killed", time=10.1),
    events.ServerReplaced(server=1, pid=8, epoch=2, seconds=0.1, time=10.2),
    recovered(1, "rows", 12.0),
    recovered(0, "parities", 12.5),  # somebody else's
    recovered(1, "parities", 14.0),
]


def test_whole_is_the_lost_servers_and_after_its_loss() -> None:
    assert find_whole(HAPPENED, 1, 10.0) == (12.0, 14.0)
    assert find_whole(HAPPENED[:-1], 1, 10.0) is None
    assert find_whole(HAPPENED, 1, 14.0) is None


def test_a_new_step_is_begun_after_the_kill_by_every_worker() -> None:
    steps = [*told(0, 9.0, 10.1, 10.6), *told(1, 9.5, 10.9, 11.5)]
    assert find_steps(steps, 10.0, workers=2) == (10.9, 11.5)
    assert find_steps(steps[:-1], 10.0, workers=2) is None  # the last is still at it
    assert find_steps(steps, 10.0, workers=3) is None


def test_spares_are_those_started_and_not_used() -> None:
    started = events.ServerStarted(server=-1, name="s", pid=1, address="a")
    lost = events.ServerLost(server=-1, pid=1, how="was killed")
    member = events.ServerStarted(server=0, name="m", pid=2, address="b")
    assert count_spares([member, started, started]) == 2
    assert count_spares([started, started, lost]) == 1
    assert count_spares([started, *HAPPENED]) == 0


def test_a_kill_is_told_in_seconds_and_windows_of_its_own() -> None:
    batches = [
        *told(0, 2.0, 4.0, 6.0, 8.0, 10.0, 11.0, 12.0, 13.0),
        *told(1, 5.0, 7.0, 9.0, 11.5, 13.5, 20.0),
    ]
    found = describe_kill(HAPPENED, batches, server=1, time=10.0, calm=4.0, workers=2)
    assert (found.server, found.rows_s, found.whole_s) == (1, 2.0, 4.0)
    assert found.replaced_s == pytest.approx(0.2)
    assert (found.stepped_s, found.begun_s) == (1.5, 3.5)
    assert (found.before, found.during) == (Window(4.0, 10.0, 6), Window(10.0, 14.0, 5))
    assert found.kept == pytest.approx(1.25)
    assert found.lost_s == found.replaced_s  # it was not slower: no more is claimed


def test_time_lost_is_what_batches_took_longer() -> None:
    slow = Struck(0, 0.1, 0.5, 0.8, 1.0, 4.0, Window(0, 10, 100), Window(10, 14, 30))
    assert slow.lost_s == pytest.approx(1.0)
    during, before = recovery.pool_rates(
        [slow, Struck(0, 0.1, 0.5, 0.8, 1.0, 2.0, Window(20, 30, 140), Window(30, 32, 18))]
    )
    assert (during, before) == (8.0, 12.0)


def test_a_kill_during_which_nobody_could_train_has_a_window_until_they_did() -> None:
    batches = told(0, 8.0, 9.0, 14.5, 15.0)
    found = describe_kill(HAPPENED, batches, server=1, time=10.0, calm=7.0, workers=1)
    assert found.during == Window(10.0, 14.5, 1)


def test_intervals_are_as_many_saves_long_as_in_the_paper() -> None:
    saved = Saved(bytes=1, save_s=2.7, restore_s=5.0, killed_s=5.5, times=3)
    smallest = plan_intervals(saved)[0]
    assert smallest.minutes == 30
    assert smallest.seconds == pytest.approx(30, rel=0.01)  # a save of 9 % of the interval
    assert smallest.best_s == 5.0
    assert smallest.average_s == pytest.approx(5 + smallest.seconds / 2)
    assert smallest.worst_s == pytest.approx(5 + smallest.seconds)


def test_bare_gives_the_sum_of_its_arrays() -> None:
    bare = Bare(4096, data=3)
    assert bare.warm_s() > 0 and bare.fresh_s() > 0
    assert np.array_equal(bare.sum_N, np.full(1024, 1 ^ 2 ^ 3, np.uint32))


def test_a_shard_is_about_as_large_as_wished() -> None:
    job = Job(strategy=ECREC, workload=Workload(preset="small"), servers=5)
    rows = rows_for(job, 20_000_000)
    spec = Job(strategy=ECREC, workload=Workload(preset="small", rows=rows)).spec
    assert count_shard(spec, 2) == pytest.approx(20_000_000, rel=0.01)


def test_waiting_for_what_never_comes_ends_with_an_error() -> None:
    with pytest.raises(UnavailableError, match="in time"):
        wait_until(lambda: False, patience_s=0.05)


def test_every_ratio_has_two_real_sides(section: SimpleNamespace) -> None:
    for ratio in section.ratios:
        assert ratio.ours > 0 and ratio.peer > 0 and math.isfinite(ratio.ratio), ratio.name
    targets = {r.name: (r.sense, r.target) for r in section.ratios if r.target is not None}
    assert targets == {
        "kill to a new step by every worker": ("at most", 1.0),
        "throughput from the kill until whole": ("at least", 0.87),
        "recovery of a whole shard, rows and parities": ("at least", 0.3),
        "recovery with 10 locks": ("at most", 1.25),
    }


def test_nothing_was_lost_but_what_was_killed(section: SimpleNamespace) -> None:
    assert section.findings == []


def test_moments_of_a_kill_come_in_their_order(section: SimpleNamespace) -> None:
    for row in section.sheets[0].rows:
        replaced, stepped, begun, rows, whole = map(float, row[1:6])
        assert 0 < replaced <= rows <= whole
        assert 0 < stepped < begun


def test_recovery_counts_from_the_replacement_and_bare_stands_beside_it(
    section: SimpleNamespace,
) -> None:
    rows = section.sheets[1].rows
    assert {row[0] for row in rows} == {"10", "1"}
    for row in rows:
        decoded, whole, killed, bare, _ = map(float, row[2:])
        assert 0 < decoded <= whole <= killed
        assert bare > 0
