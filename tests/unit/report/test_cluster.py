"""What is told of a training on a cluster follows from events, kills and workers' own words."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import pytest
from rich.console import Console

from holdfast import events
from holdfast.report import cluster, clusterlive
from holdfast.report.clusterpicture import draw_cluster, throughput

SETUP = cluster.Setup("ecrec", 5, 2, 4, 1, "xor", True, 5000, 100, 10)
ROWS_OF = {1: 40, 3: 41}


def progress(batches: int, at: float) -> events.ClusterProgress:
    return events.ClusterProgress(
        batches=batches, batches_total=100, samples=10 * batches, seconds=at,
        samples_per_s=float(batches), loss=0.5, time=at,
    )  # fmt: skip


def one_failure() -> list[events.Event]:
    """100 samples/s, 50 while server 1 is missing (10 to 14), 200 after; a spare dies too."""
    return [
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


KILL = cluster.Kill(server=1, signal="SIGKILL", time=10.0, batches=91)
TOLD = [
    cluster.Told(7, 9.0, 0.5, 1.0),
    cluster.Told(8, 9.5, 0.5, 1.0),
    cluster.Told(7, 11.0, 0.4, 2.0),
    cluster.Told(8, 11.75, 0.4, 3.0, pushes_lost=2),
    cluster.Told(7, 12.0, 0.3, 4.0, pushes_lost=1),
]


def shown(renderable: object, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(renderable)
    return console.export_text()


def test_a_failure_is_timed_from_the_kill_and_its_rates_are_those_between_the_moments() -> None:
    (found,) = cluster.find_failures(one_failure(), [KILL], TOLD, rows_of=ROWS_OF)
    assert (found.server, found.how, found.rows, found.rows_swept) == (1, "SIGKILL", 40, 35)
    assert (found.seen_s, found.replaced_s, found.rows_s, found.whole_s) == (0.5, 1.0, 3.0, 4.0)
    assert found.steps_s == 1.75
    assert (found.before, found.during, found.after) == (100.0, 50.0, 200.0)


def test_a_failure_nobody_asked_for_is_timed_from_when_it_was_seen() -> None:
    (found,) = cluster.find_failures(one_failure(), rows_of={})
    assert (found.how, found.time, found.seen_s) == ("was killed by signal 9", 10.5, 0.0)
    assert found.replaced_s == 0.5
    assert found.steps_s is None


def test_a_failure_that_lasts_has_no_end_and_spoils_the_next_ones_before() -> None:
    happened = [e for e in one_failure() if getattr(e, "what", "") != "parities"]
    happened.append(events.ServerLost(server=3, pid=13, how="gone", time=14.5))
    first, second = cluster.find_failures(happened, rows_of=ROWS_OF)
    assert (first.whole_s, first.during, first.after) == (None, None, None)
    assert first.rows_s == 2.5
    assert (second.before, second.replaced_s) == (None, None)


def test_a_server_lost_twice_is_two_failures() -> None:
    again = [
        events.ServerLost(server=1, pid=99, how="gone", time=14.5),
        events.ServerReplaced(server=1, pid=55, epoch=3, seconds=0.25, time=14.75),
    ]
    happened = [*one_failure()[:-1], *again, one_failure()[-1]]
    first, second = cluster.find_failures(happened, [KILL], rows_of=ROWS_OF)
    assert (first.replaced_s, first.whole_s, first.after) == (1.0, 4.0, 200.0)
    assert (second.replaced_s, second.whole_s, second.rows_swept) == (0.25, None, 0)
    assert second.before == 200.0


def test_the_summary_counts_from_the_first_step_and_adds_up_workers() -> None:
    run = cluster.summarize(SETUP, one_failure(), kills=[KILL], told=TOLD, rows_of=ROWS_OF)
    assert (run.seconds, run.samples) == (14.0, 1300)
    assert run.samples_per_s == pytest.approx(1300 / 14)
    assert run.worker_cpu_s == 7.0
    assert run.pushes_lost is None  # two-phase commit loses none
    assert run.to_dict()["failures"][0]["server"] == 1
    loose = cluster.Setup("ecrm", 5, 2, 4, 1, "xor", False, 5000, 100, 10)
    assert cluster.summarize(loose, [], told=TOLD, rows_of={}).pushes_lost == 3


def test_a_run_that_told_nothing_is_told_as_nothing() -> None:
    run = cluster.summarize(SETUP, [], rows_of={})
    assert (run.seconds, run.samples, run.samples_per_s, run.loss) == (0.0, 0, None, None)
    assert "nothing failed" in shown(cluster.render(run))


def test_the_panel_fits_a_terminal_and_names_what_matters() -> None:
    run = cluster.summarize(
        SETUP, one_failure(), kills=[KILL], told=TOLD, rows_of=ROWS_OF, auc=0.7811,
        audit=cluster.Checked(30, 30, 0), cpu_s=12.0, server_cpu_s=3.0,
    )  # fmt: skip
    calm = cluster.summarize(SETUP, one_failure()[:6], rows_of=ROWS_OF, auc=0.7822)
    text = shown(cluster.render(run, calm=calm, best_auc=0.82, picture=Path("p.png")))
    for part in ("1 SIGKILL", "0.7811", "0.7822 without", "0.8200 at best", "bit for bit", "p.png",
                 "100", "50", "200"):  # fmt: skip
        assert part in text
    assert "…" not in text


def test_an_audit_says_what_is_wrong() -> None:
    assert "2 parities WRONG" in cluster.audit_line(cluster.Checked(9, 9, 2))
    assert not cluster.Checked(9, 9, 2).is_sound
    assert "at most 0.0001" in cluster.audit_line(cluster.Checked(9, 9, 0, 1e-4))
    assert "nothing can be checked" in cluster.audit_line(cluster.Checked(0, 0, 0))


def test_the_live_view_follows_servers_through_a_failure() -> None:
    live = clusterlive.Live(batches=100, rows_of=ROWS_OF)
    states = []
    for event in one_failure():
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


def test_the_live_view_shows_how_much_is_recovered() -> None:
    live = clusterlive.Live(batches=100, rows_of=ROWS_OF)
    for event in one_failure():
        live(event)
        if isinstance(event, events.RangeRecovered):
            break
    assert "50.0 % of its rows recovered" in shown(live.render())


def test_without_a_terminal_only_what_happened_is_said() -> None:
    said = [line for line in map(clusterlive.line, one_failure()) if line]
    assert [line.split(",")[0] for line in said] == [
        "server 1 (pid 11) was killed by signal 9",
        "server 1 is pid 99 now",
        "server 1 has all rows again",
        "server 1 has all parities again",
    ]
    lost = events.WorkerLost(worker=3, pid=5, how="ended with code 1\ntrace\nboom", batches=(4,))
    assert clusterlive.line(lost) == "worker 3 (pid 5) ended with code 1: boom"


def test_throughput_over_time_adds_up_to_all_samples() -> None:
    moments, rates = throughput(cluster.Progress(one_failure()))
    spans = [end - start for start, end in itertools.pairwise(moments)]
    total = sum(rate * span for rate, span in zip(rates, spans, strict=False))
    assert total == pytest.approx(1300, rel=0.05)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture_is_drawn(tmp_path: Path, suffix: str) -> None:
    run = cluster.summarize(SETUP, one_failure(), kills=[KILL], told=TOLD, rows_of=ROWS_OF)
    path = tmp_path / f"p.{suffix}"
    assert draw_cluster(run, one_failure(), path)
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
    assert not draw_cluster(cluster.summarize(SETUP, [], rows_of={}), [], tmp_path / "none.png")
