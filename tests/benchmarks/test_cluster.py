"""A cluster's costs: windows and counters are right, and a quick run measures real trainings."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.cluster import overhead as cluster
from benchmarks.cluster.local import train_local
from benchmarks.cluster.network_bytes import count_bytes
from benchmarks.cluster.shard import count_shard
from benchmarks.cluster.trainer import (
    COMPARED,
    ECREC,
    ECRM,
    GRADIENTS,
    NONE,
    STRATEGIES,
    SUMS,
    Job,
    Trained,
    count_window,
    find_steady,
    find_strays,
    resident_max,
    train_calm,
    worker_cpu,
)
from holdfast import events
from holdfast.cluster.arenashard import ArenaShard
from holdfast.cluster.pushes import Gradients
from holdfast.cluster.shard import Shard
from holdfast.cluster.spec import DIFFERENCE, GRADIENT
from holdfast.errors import DataLossError, InvalidRequestError, UnavailableError
from holdfast.recsys.cluster_train import BatchTold, Workload

TINY = Workload(preset="tiny", rows=2000, batch_size=64)

SECTION = "cluster"


def told(worker: int, *moments: float, cpu_s: float = 0.0) -> list[BatchTold]:
    """Batches of one worker; each took ``cpu_s``."""
    return [
        BatchTold(worker, time, batch=at, loss=0.5, cpu_s=7.0 + at * cpu_s, pushes_lost=0)
        for at, time in enumerate(moments)
    ]


def test_a_window_counts_what_ended_in_it() -> None:
    window = count_window([1.0, 2.0, 3.0, 3.5, 9.0], 1.0, 3.5)
    assert (window.batches, window.seconds) == (3, 2.5)
    assert window.rate == pytest.approx(1.2)
    assert count_window([1.0], 2.0, 2.0).rate == 0.0


def test_steady_is_when_all_workers_train() -> None:
    # The second begins late and the first ends early: only 4 to 6 counts.
    window = find_steady([*told(0, 1.0, 2.0, 3.0, 5.0, 6.0), *told(1, 4.0, 5.5, 7.0)])
    assert (window.start, window.end, window.batches) == (4.0, 6.0, 3)


def test_workers_that_never_trained_together_cannot_be_measured() -> None:
    with pytest.raises(InvalidRequestError, match="too few batches"):
        find_steady([*told(0, 1.0, 2.0), *told(1, 3.0, 4.0)])
    with pytest.raises(InvalidRequestError, match="too few batches"):
        find_steady([])


def test_cpu_of_a_batch_is_without_the_start_of_its_worker() -> None:
    assert worker_cpu([*told(0, 1, 2, 3, cpu_s=0.5), *told(1, 1, 2, cpu_s=2.0)]) == pytest.approx(
        (2 * 0.5 + 2.0) / 3
    )


def test_memory_of_no_process_is_not_known() -> None:
    assert resident_max(1 << 30) is None


def test_strategies_differ_in_what_is_coded_and_committed() -> None:
    specs = {name: Job(strategy=name, workload=TINY).spec for name in STRATEGIES}
    held = {name: count_bytes(spec) for name, spec in specs.items()}
    assert held[NONE].parities == 0
    assert held[NONE].rows == held[ECRM].rows == held[ECREC].rows
    networks = specs[ECREC].tables[-1]
    assert held[ECREC].parities - held[ECRM].parities == 4 * networks.rows * networks.width
    assert [Job(strategy=s, workload=TINY).settings().two_phase for s in STRATEGIES] == [
        False,
        False,
        True,
    ]


def test_gradients_are_sent_to_sums_that_keep_the_state_of_all_rows() -> None:
    specs = {name: Job(strategy=name, workload=TINY).spec for name in (ECRM, *COMPARED)}
    held = {name: count_bytes(spec) for name, spec in specs.items()}
    # The same cluster else, whose sums are as large as parities by XOR.
    assert held[ECRM] == held[SUMS] == replace(held[GRADIENTS], states=0)
    shards = [
        ArenaShard(at, arena, server, locks=1, room=1)
        for at, arena in enumerate(specs[GRADIENTS].arenas)
        for server in range(specs[GRADIENTS].servers)
    ]
    # Servers round tables up to whole turns of stripes: shares are equal, not bytes.
    states = sum(shard.state_bytes for shard in shards)
    parities = sum(shard.parities_QW.nbytes for shard in shards)
    assert held[GRADIENTS].states / held[GRADIENTS].parities == states / parities == 2
    for name, told in ((SUMS, DIFFERENCE), (GRADIENTS, GRADIENT)):
        *tables, networks = specs[name].tables
        assert {(table.code, table.propagation) for table in tables} == {("sum", told)}
        assert networks == specs[ECRM].tables[-1]
        assert not Job(strategy=name, workload=TINY).settings().two_phase


def test_servers_send_gradients_or_differences_as_the_strategy_says() -> None:
    for strategy, sent, other in (
        (SUMS, DIFFERENCE, GRADIENT),
        (GRADIENTS, GRADIENT, DIFFERENCE),
    ):
        spec = Job(strategy=strategy, workload=TINY).spec
        shard = Shard(spec, 0, epoch=1)
        shard.begin()
        arena, _ = spec.places[spec.tables[0].name]
        grads_ND = np.ones((3, spec.tables[0].dim), np.float32)
        shard.push(0, 0, [Gradients(arena, np.arange(3), grads_ND)])
        flush = shard.begin_flush()
        assert flush is not None
        assert flush.bytes_of(sent) > 0 and flush.bytes_of(other) == 0


def test_a_ratio_is_against_the_same_turns() -> None:
    jobs = {name: Job(strategy=name, workload=TINY) for name in cluster.HEAVY}
    runs = {
        job: [Trained(job, s, s, s, 8.0, 9.0 * s, 7, 0.5) for s in seconds]
        for job, seconds in zip(
            jobs.values(), [(1.0, 3.0), (2.0, 6.0), (3.0, 9.0), (7.0,), (5.0,)], strict=True
        )
    }
    found = {r.name: (r.ours, r.peer) for r in cluster._overhead_ratios(jobs, runs)}
    assert found["time of a batch: ecrm"] == (4000, 2000)
    assert found[f"time of a batch: {SUMS}"] == (5000, 1000)
    assert found[f"CPU of a batch, all processes: {GRADIENTS}"] == (14_000, 2000)
    sheet = cluster._strategies_sheet("", jobs, runs)
    assert [row[2] for row in sheet.rows] == ["1.000×", "2.000×", "3.000×", "7.000×", "5.000×"]
    assert "of `ecrm, gradients` and `ecrm, sums` 1 turn, beside none" in sheet.note
    light = {name: jobs[name] for name in cluster.LIGHT}
    assert "; of `ecrm, gradients` 1 turn" in cluster._strategies_sheet("", light, runs).note
    size = replace(cluster.QUICK, light=Workload(preset="small"))
    lines = {line.label: line for line in cluster._overhead_plot(size, jobs, light, runs).lines}
    assert lines[ECRM].y == (100, 100, 100, 100)
    # What was not trained has no bar, and the others keep their places.
    assert dict(zip(lines[SUMS].x, lines[SUMS].y, strict=True)) == {
        "DLRM tiny, time": 400,
        "DLRM tiny, CPU": 400,
    }
    assert lines[GRADIENTS].x == lines[ECRM].x and lines[GRADIENTS].y == (600, 600, 600, 600)


def test_losses_that_nobody_asked_for_are_told_apart() -> None:
    happened: list[events.Event] = [
        events.ServerLost(server=1, pid=7, how="was killed by signal 9\nits last words"),
        events.ServerLost(server=2, pid=8, how="silent: nothing for 1 s"),
        events.WorkerLost(worker=0, pid=9, how="ended with code 1", batches=()),
    ]
    assert find_strays(happened, [7]) == ("silent: nothing for 1 s", "ended with code 1")
    assert find_strays(happened)[0] == "was killed by signal 9"


def test_a_training_that_was_spoilt_is_repeated_and_said_so() -> None:
    whole = Trained(Job(strategy=NONE, workload=TINY), 1.0, 1.0, 1.0, None, None, None, 0.5)
    spoilt = [UnavailableError("a server was lost"), DataLossError("rows are gone")]

    def attempt() -> Trained:
        if spoilt:
            raise spoilt.pop(0)
        return whole

    found, reasons = train_calm(attempt)
    assert (found, reasons) == (whole, ("a server was lost", "rows are gone"))
    assert "2 trainings (a server was lost / rows are gone)" in cluster.describe_repeats(reasons)[0]


def test_trainings_that_are_always_spoilt_end_with_an_error() -> None:
    def attempt() -> Trained:
        raise UnavailableError("a server was lost")

    with pytest.raises(UnavailableError, match="every attempt"):
        train_calm(attempt, times=2)


@pytest.mark.parametrize("strategy", [*STRATEGIES, *COMPARED])
def test_shards_of_all_servers_are_all_rows_and_parities(strategy: str) -> None:
    spec = Job(strategy=strategy, workload=TINY).spec
    held = count_bytes(spec)
    assert sum(count_shard(spec, server) for server in range(5)) == held.rows + held.parities


def test_local_training_learns_and_takes_time() -> None:
    local = train_local(TINY, batches=12)
    assert local.batch_s > 0 and local.cpu_s > 0
    assert 0.2 < local.loss < 1.0


def test_every_ratio_has_two_real_sides(section: SimpleNamespace) -> None:
    for ratio in section.ratios:
        assert ratio.ours > 0 and ratio.peer > 0 and math.isfinite(ratio.ratio), ratio.name
    targets = {r.name: (r.sense, r.target) for r in section.ratios if r.target is not None}
    assert targets == {
        "time of a batch: ecrm": ("at most", 1.05),
        "time of a batch: ecrec": ("at most", 1.18),
        "throughput of one worker on servers: none": ("at least", 0.7),
    }


def test_bytes_and_losses_are_those_of_the_same_training(section: SimpleNamespace) -> None:
    sheets = {sheet.title: sheet for sheet in section.sheets}
    strategies = sheets["DLRM tiny: networks dominate"].rows
    assert [row[0] for row in strategies] == [*STRATEGIES, *COMPARED]
    losses = [float(row[-1]) for row in strategies]
    assert np.ptp(losses) < 1e-3  # one worker, the same batches: the same training
    pulled = [float(row[1]) for row in sheets["Network: MB of a batch"].rows if row[1] != "–"]
    assert all(each > 0 for each in pulled)
    memory = sheets["Memory: MB on all servers together"].rows
    assert memory[0][4] == "0.0%" and memory[2][4] == "100.0%"  # of two servers: copies
    assert all(float(row[5]) > 0 for row in memory if row[5] != "–")


def test_what_is_compared_alone_is_in_every_table_and_plot(section: SimpleNamespace) -> None:
    ratios = [ratio.name for ratio in section.ratios if ratio.target is None]
    for what in ("time of a batch", "CPU of a batch, all processes", "memory for parities"):
        assert {f"{what}: {name}" for name in COMPARED} <= set(ratios)
    first, _, *others = section.sheets  # one worker alone has no such lines
    for sheet in (first, *others):
        assert [row[0] for row in sheet.rows][-2:] == list(COMPARED), sheet.title
    overhead, network = section.plots
    assert [line.label for line in overhead.lines] == [ECRM, ECREC, *COMPARED]
    assert all(line.x == [*STRATEGIES, *COMPARED] for line in network.lines)
