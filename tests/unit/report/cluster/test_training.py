"""What is told of a training on a cluster follows from its events."""

from __future__ import annotations

import dataclasses
import io
import itertools
from pathlib import Path

import pytest
from rich.console import Console

from holdfast import events
from holdfast.errors import InvalidRequestError
from holdfast.report.cluster import live as clusterlive
from holdfast.report.cluster import training as cluster
from holdfast.report.cluster.failures import Failure, Progress, find_failures
from holdfast.report.cluster.load import balance, find_load
from holdfast.report.cluster.picture import draw_cluster, throughput

SETUP = events.ClusterStarted(
    strategy="ecrec", second_layer=None, every=None, engine="local", servers=5, workers=2, data=4,
    parity=1, code="xor", two_phase=True, rows=5000, batches=100, batch_size=10, seed=0,
    rows_of=(0, 40, 0, 41, 0), row_bytes=4000, parity_bytes=1000,
)  # fmt: skip
KILL = events.ServerStruck(server=1, pid=11, signal="SIGKILL", batches=91, time=10.0)


def progress(batches: int, at: float) -> events.ClusterProgress:
    return events.ClusterProgress(
        batches=batches, batches_total=100, samples=10 * batches, seconds=at,
        samples_per_s=float(batches), loss=0.5, time=at,
    )  # fmt: skip


def told(worker: int, at: float, loss: float, cpu_s: float, lost: int = 0) -> events.BatchTrained:
    return events.BatchTrained(
        worker=worker, batch=round(10 * at), loss=loss, at=at, cpu_s=cpu_s, pushes_lost=lost,
        bytes_sent=100, time=at + 0.05,
    )  # fmt: skip


TOLD = [
    told(7, 9.0, 0.5, 1.0),
    told(8, 9.5, 0.5, 1.0),
    told(7, 11.0, 0.4, 2.0),
    told(8, 11.75, 0.4, 3.0, lost=2),
    told(7, 12.0, 0.3, 4.0, lost=1),
]


def one_failure() -> list[events.Event]:
    """100 samples/s, 50 while server 1 is missing (10 to 14), 200 after; a spare dies too."""
    return [
        SETUP,
        events.ServerStarted(server=1, name="a", pid=11, address="x", time=0.0),
        events.ServerStarted(server=-1, name="b", pid=99, address="y", time=0.0),
        events.WorkerStarted(worker=7, pid=70, time=0.0),
        progress(0, 0.0),
        progress(1, 1.0),
        progress(91, 10.0),
        events.ServerLost(server=1, pid=11, how="was killed by signal 9\nlog", time=10.5),
        events.ServerLost(server=-1, pid=98, how="gone", time=10.6),
        events.ServerReplaced(server=1, pid=99, epoch=2, seconds=0.5, time=11.0),
        events.RangeRecovered(server=1, granule=0, rows=15, left=20, seconds=1, time=12.0),
        events.RangeRecovered(server=1, granule=1, rows=20, left=0, seconds=1, time=13.0),
        events.ServerRecovered(server=1, what="rows", seconds=2, time=13.0),
        events.ServerRecovered(server=1, what="parities", seconds=3, time=14.0),
        progress(111, 14.0),
        progress(131, 15.0),
    ]


def with_kill() -> list[events.Event]:
    return sorted([*one_failure(), KILL, *TOLD], key=lambda e: e.time)


def going_back() -> list[events.Event]:
    """100 samples/s; at 10 a kill; at 12 everybody is at batch 60; from 15 on 100 samples/s."""
    setup = dataclasses.replace(
        SETUP, strategy="full", second_layer="full", every=30, parity=0, code="none",
        two_phase=False, parity_bytes=0,
    )  # fmt: skip
    saved = [
        events.SaveDurable(
            step=step, checkpoint="base", codec="fp32", rows=9, bytes=500, full_bytes=500,
            stall_s=0.1, durable_s=0.2, time=step / 10,
        )
        for step in (0, 30, 60)
    ]  # fmt: skip
    staged = [
        events.SaveStaged(step=e.step, rows=9, bytes=500, stall_s=0.25, time=e.time) for e in saved
    ]
    found = [
        setup,
        *saved,
        *staged,
        progress(0, 0.0),
        progress(1, 0.1),
        progress(100, 10.0),
        KILL,
        events.ServerLost(server=1, pid=11, how="gone", time=10.1),
        events.ServerReplaced(server=1, pid=99, epoch=2, seconds=0.5, time=11.9),
        events.ServerReplaced(server=0, pid=98, epoch=2, seconds=0.5, time=11.9),
        events.Restored(step=60, rows=81, bytes=1500, seconds=1.8, restores=1, time=12.0),
        events.ServerRecovered(server=1, what="parities", seconds=0, time=12.1),
        progress(60, 15.0),
        progress(90, 18.0),
        progress(120, 21.0),
        *(dataclasses.replace(told(w, at, 0.5, 1.0), batch=batch)
          for w, at, batch in [(7, 9.0, 61), (8, 9.5, 62), (7, 10.05, 63), (9, 15.5, 61),
                               (10, 16.0, 63), (9, 16.5, 62), (10, 17.0, 64)]),
    ]  # fmt: skip
    return [found[0], *sorted(found[1:], key=lambda e: e.time)]


def failures(happened: list[events.Event], parity: int = 1) -> tuple[Failure, ...]:
    return find_failures(happened, rows_of=SETUP.rows_of, workers=2, parity=parity)


def shown(renderable: object, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(renderable)
    return console.export_text()


def test_a_failure_is_timed_from_the_kill_and_its_rates_are_those_between_the_moments() -> None:
    (found,) = failures(with_kill())
    assert (found.server, found.how, found.rows, found.rows_swept) == (1, "SIGKILL", 40, 35)
    assert (found.seen_s, found.replaced_s, found.rows_s, found.whole_s) == (0.5, 1.0, 3.0, 4.0)
    assert found.steps_s == 1.75
    assert (found.before, found.during, found.after) == (100.0, 50.0, 200.0)
    assert found.lost_s == pytest.approx(2.0)  # 4 s at half the rate
    assert not found.is_loaded


def test_a_failure_nobody_asked_for_is_timed_from_when_it_was_seen() -> None:
    (found,) = failures(one_failure())
    assert (found.how, found.time, found.seen_s) == ("was killed by signal 9", 10.5, 0.0)
    assert found.replaced_s == 0.5
    assert found.steps_s is None


def test_a_failure_that_lasts_has_no_end_and_spoils_the_next_ones_before() -> None:
    happened = [e for e in one_failure() if getattr(e, "what", "") != "parities"]
    happened.append(events.ServerLost(server=3, pid=13, how="gone", time=14.5))
    first, second = failures(happened)
    assert (first.whole_s, first.during, first.after, first.lost_s) == (None, None, None, None)
    assert first.rows_s == 2.5
    assert (second.before, second.replaced_s) == (None, None)


def test_a_server_lost_twice_is_two_failures() -> None:
    again = [
        events.ServerLost(server=1, pid=99, how="gone", time=14.5),
        events.ServerReplaced(server=1, pid=55, epoch=3, seconds=0.25, time=14.75),
    ]
    happened = sorted([*one_failure()[:-1], KILL, *again, one_failure()[-1]], key=lambda e: e.time)
    first, second = failures(happened)
    assert (first.replaced_s, first.whole_s, first.after) == (1.0, 4.0, 200.0)
    assert (second.replaced_s, second.whole_s, second.rows_swept) == (0.25, None, 0)
    assert second.before == 200.0


def test_going_back_ends_when_new_workers_train_and_costs_what_is_trained_again() -> None:
    (found,) = failures(going_back(), parity=0)
    assert found.is_loaded
    assert found.replaced_s == pytest.approx(1.9)
    assert (found.rows_s, found.whole_s) == (2.0, 2.0)  # there are no parities to wait for
    assert found.steps_s == 6.0  # workers of before do not count, though one said so after the kill
    assert found.regained_s == 11.0
    assert found.before == pytest.approx(100.0)
    assert found.during == pytest.approx(100 / 6)
    assert found.after == pytest.approx(100.0)
    # 6 s without progress, and 40 batches of 10 done before: at 100 samples/s, less one second won
    assert found.lost_s == pytest.approx(6 + 4, abs=0.1)


def test_a_server_killed_and_replaced_with_everybody_is_a_failure_that_nobody_saw() -> None:
    also = dataclasses.replace(KILL, server=0)
    first, second = failures(sorted([*going_back(), also], key=lambda e: e.time), parity=0)
    assert (first.server, second.server) == (1, 0)
    assert (second.how, second.seen_s, second.whole_s) == ("SIGKILL", None, 2.0)
    assert second.replaced_s == pytest.approx(1.9)


def test_samples_that_are_trained_again_count_as_trained_but_not_as_done() -> None:
    found = Progress(going_back())
    assert found.done_at(11.99) == 1000
    assert found.done_at(12.0) == 600
    assert found.samples_at(15.0) == 1000
    assert found.samples_at(21.0) == 1600


def test_the_second_layer_adds_up_from_events() -> None:
    layer = cluster.summarize(going_back()).layer
    assert layer is not None
    assert (layer.checkpoints, layer.bytes, layer.given_up) == (3, 1500, 0)
    assert layer.stall_s == 0.75
    assert (layer.restores, layer.recoveries, layer.restore_s) == (1, 0, 1.8)
    assert layer.batches_again == 3
    part = events.Recovered(
        step=70, checkpoint_step=60, servers=(1,), rows=9, bytes=70, seconds=0.5, pls=0.25, time=13
    )
    layer = cluster.summarize([*going_back(), part, dataclasses.replace(part, pls=0.5)]).layer
    assert layer is not None
    assert (layer.recoveries, layer.pls) == (2, 0.75)
    assert cluster.summarize(one_failure()).layer is None


def test_partial_recovery_gives_lost_servers_alone_their_rows() -> None:
    happened: list[events.Event] = [
        events.Recovered(
            step=70, checkpoint_step=60, servers=(1,), rows=9, bytes=70, seconds=0.5, pls=0.1,
            time=e.time,
        ) if isinstance(e, events.Restored) else e
        for e in going_back()
    ]  # fmt: skip
    lost = events.ServerLost(server=3, pid=5, how="gone", time=10.2)
    first, second = failures(sorted([*happened, lost], key=lambda e: e.time), parity=0)
    assert (first.is_loaded, first.whole_s) == (True, 2.0)
    assert (second.is_loaded, second.whole_s) == (False, None)


def test_the_summary_counts_from_the_first_step_and_adds_up_workers() -> None:
    run = cluster.summarize(with_kill())
    assert (run.seconds, run.samples) == (14.0, 1300)
    assert run.samples_per_s == pytest.approx(1300 / 14)
    assert run.worker_cpu_s == 7.0
    assert run.pushes_lost is None  # two-phase commit loses none
    assert run.to_dict()["failures"][0]["server"] == 1
    loose = dataclasses.replace(SETUP, strategy="ecrm", two_phase=False)
    assert cluster.summarize([loose, *TOLD]).pushes_lost == 3


def test_a_run_that_told_nothing_is_told_as_nothing() -> None:
    run = cluster.summarize([SETUP])
    assert (run.seconds, run.samples, run.samples_per_s, run.loss) == (0.0, 0, None, None)
    assert (run.load, run.error, run.is_sound) == (None, None, True)
    assert "nothing failed" in shown(cluster.render(run))
    with pytest.raises(InvalidRequestError, match="not the events"):
        cluster.summarize([KILL])


def test_runs_of_one_file_are_told_apart() -> None:
    again = dataclasses.replace(SETUP, seed=1)
    runs = cluster.split_runs([KILL, SETUP, *TOLD, again, KILL])
    assert [(len(run), run[0]) for run in runs] == [(6, SETUP), (2, again)]


def test_a_servers_processes_add_up_and_the_last_count_of_each_holds() -> None:
    def count(server: int, address: str, updated: int, folded: int) -> events.ServerCounted:
        return events.ServerCounted(
            server=server, address=address, rows_updated=updated, rows_folded=folded,
            differences=1, cpu_s=0.5, resident_bytes=100, queue_bytes=5,
        )  # fmt: skip

    happened = [
        count(0, "a", 10, 0),
        count(1, "b", 20, 4),
        count(0, "a", 30, 8),
        count(1, "c", 10, 0),  # took b's place
    ]
    load = find_load(happened, 2)
    assert load is not None
    assert (load.updated_S, load.folded_S) == ((30, 30), (8, 4))
    assert load.rows == balance([30, 30])
    assert load.both.most_over_mean == pytest.approx(38 / 36)
    assert load.both.most_over_least == pytest.approx(38 / 34)
    assert (load.cpu_s, load.resident_bytes, load.queue_bytes) == (1.5, 200, 10)
    assert load.worker_bytes is None  # nobody said
    assert find_load([], 2) is None


def test_the_panel_fits_a_terminal_and_names_what_matters() -> None:
    audited = events.ClusterAudited(stripes=30, parities=30, wrong=0)
    ended = events.ClusterEnded(auc=0.7811, train_cpu_s=8.0, cpu_s=12.0)
    run = cluster.summarize([*with_kill(), audited, ended])
    calm = cluster.summarize(
        [*one_failure()[:7], events.ClusterEnded(auc=0.7822, train_cpu_s=None, cpu_s=None)]
    )
    text = shown(cluster.render(run, calm=calm, best_auc=0.82, picture=Path("p.png")))
    for part in ("1 SIGKILL", "0.7811", "0.7822 without", "0.8200 at best", "bit for bit", "p.png",
                 "100", "50", "200", "2.00 s of training", "8.0 s"):  # fmt: skip
        assert part in text
    assert "…" not in text
    text = shown(cluster.render(cluster.summarize(going_back())))
    for part in ("went back", "3 by full: 1.5 kB", "3 batches", "1.80 s"):
        assert part in text


def test_an_audit_says_what_was_compared_and_what_is_wrong() -> None:
    def line(stripes: int, wrong: int, deviation: float = 0.0) -> str:
        return cluster.audit_line(
            events.ClusterAudited(
                stripes=stripes, parities=2 * stripes, wrong=wrong, deviation_max=deviation
            )
        )

    assert "18 parities of 9 stripes recomputed" in line(9, 0)
    assert "each equals the one that is held, bit for bit" in line(9, 0)
    assert "2 of those held are WRONG" in line(9, 2)
    assert "at most 0.0001" in line(9, 0, 1e-4)
    assert "nothing can be checked" in line(0, 0)


def test_the_live_view_follows_servers_through_a_failure() -> None:
    live = clusterlive.Live(batches=100, rows_of={1: 40, 3: 41})
    states = []
    for event in one_failure()[1:]:
        live(event)
        states.append((live.servers[1].pid, live.servers[1].state, live.servers[1].left))
    assert list(dict.fromkeys(states)) == [
        (11, "serving", 0),
        (11, "lost", 0),
        (99, "recovering", 40),
        (99, "recovering", 20),
        (99, "recovering", 0),
        (99, "re-encoding", 0),
        (99, "serving", 0),
    ]
    assert live.spares == set()
    text = shown(live.render())
    for part in ("131/100", "131 samples/s", "server 1", "pid 99", "worker 7"):
        assert part in text


@pytest.mark.parametrize(("is_coded", "state"), [(True, "re-encoding"), (False, "serving")])
def test_the_live_view_follows_a_cluster_that_goes_back(is_coded: bool, state: str) -> None:
    live = clusterlive.Live(batches=100, rows_of={1: 40}, is_coded=is_coded)
    live(events.WorkerStarted(worker=7, pid=70))
    for event in going_back():
        live(event)
        if isinstance(event, events.ServerReplaced):
            assert live.servers[event.server].state == "recovering"
        if isinstance(event, events.Restored):
            break
    assert {now.state for now in live.servers.values()} == {state}
    assert live.workers == {}


def test_the_live_view_shows_how_much_is_recovered() -> None:
    live = clusterlive.Live(batches=100, rows_of={1: 40, 3: 41})
    for event in one_failure():
        live(event)
        if isinstance(event, events.RangeRecovered):
            break
    assert "50.0 % of its rows recovered" in shown(live.render())


def test_without_a_terminal_only_what_happened_is_said() -> None:
    said = [line for line in map(clusterlive.line, [*one_failure(), KILL]) if line]
    assert [line.split(",")[0] for line in said] == [
        "server 1 (pid 11) was killed by signal 9",
        "server 1 is pid 99 now",
        "server 1 has all rows again",
        "server 1 has all parities again",
        "SIGKILL to server 1 (pid 11)",
    ]
    lost = events.WorkerLost(worker=3, pid=5, how="ended with code 1\ntrace\nboom", batches=(4,))
    assert clusterlive.line(lost) == "worker 3 (pid 5) ended with code 1: boom"
    back = [line for line in map(clusterlive.line, going_back()) if line]
    assert "everybody is at the checkpoint of batch 60: 1.5 kB in 1.80 s" in back
    two = events.Recovered(
        step=9, checkpoint_step=6, servers=(0, 2), rows=1, bytes=1, seconds=1, pls=None
    )
    assert clusterlive.line(two) == "servers 0 and 2 have the rows of batch 6: 1 B in 1.00 s"


def test_throughput_over_time_adds_up_to_all_samples() -> None:
    moments, rates = throughput(Progress(one_failure()))
    spans = [end - start for start, end in itertools.pairwise(moments)]
    total = sum(rate * span for rate, span in zip(rates, spans, strict=False))
    assert total == pytest.approx(1300, rel=0.05)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture_is_drawn(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "deep" / f"p.{suffix}"
    assert draw_cluster(cluster.summarize(with_kill()), with_kill(), path)
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
    assert not draw_cluster(cluster.summarize([SETUP]), [], tmp_path / "none.png")
