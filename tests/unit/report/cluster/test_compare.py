"""Strategies side by side: everything is against none without kills; lost runs are not compared."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from holdfast import events
from holdfast.report.cluster import compare
from holdfast.report.cluster.compare_picture import draw_comparison, progress_points
from holdfast.report.cluster.training import summarize
from tests.unit.report.cluster.test_training import SETUP, going_back, progress, shown, with_kill

NONE = dataclasses.replace(
    SETUP, strategy="none", parity=0, code="none", two_phase=False, parity_bytes=0
)


def counted(updated: int, folded: int) -> list[events.Event]:
    return [
        events.ServerCounted(
            server=server, address=f"a{server}", rows_updated=updated + server, rows_folded=folded,
            differences=folded, cpu_s=1.0, resident_bytes=1000, queue_bytes=50,
            worker_bytes=700, server_bytes=30,
        )
        for server in range(5)
    ]  # fmt: skip


def calm() -> list[events.Event]:
    """13 s, 100 samples/s."""
    return [
        NONE, progress(0, 0.0), progress(1, 1.0), progress(131, 14.0), *counted(100, 0),
        events.ClusterEnded(auc=0.75, train_cpu_s=20.0, cpu_s=30.0, time=15.0),
    ]  # fmt: skip


def coded() -> list[events.Event]:
    return [
        *with_kill(), *counted(100, 90),
        events.ClusterAudited(stripes=9, parities=9, wrong=0, time=15.0),
        events.ClusterEnded(auc=0.76, train_cpu_s=25.0, cpu_s=30.0, time=16.0),
    ]  # fmt: skip


def lost() -> list[events.Event]:
    return [
        NONE, progress(0, 0.0), progress(1, 1.0), progress(50, 5.0),
        events.ServerStruck(server=1, pid=1, signal="SIGKILL", batches=50, time=5.0),
        events.ServerLost(server=1, pid=1, how="gone", time=5.1),
        events.ClusterEnded(auc=None, train_cpu_s=None, cpu_s=9.0, error="rows are gone", time=6),
    ]  # fmt: skip


def comparison() -> compare.Comparison:
    runs = tuple(summarize(each) for each in (lost(), going_back(), coded()))
    return compare.Comparison(summarize(calm()), runs, best_auc=0.8, picture=None, seconds=61.0)


def test_overheads_are_shares_of_the_base() -> None:
    against = compare.compare(summarize(coded()), summarize(calm()))
    assert against.time_overhead == pytest.approx(14 / 13 - 1)
    assert against.cpu_overhead == pytest.approx(0.25)
    assert against.auc_difference == pytest.approx(0.01)
    assert against.during_share == pytest.approx(0.5)
    assert (against.replaced_s, against.steps_s, against.whole_s) == (1.0, 1.75, 4.0)
    assert against.lost_s == pytest.approx(2.0)


def test_a_lost_run_is_told_as_lost_and_not_compared() -> None:
    found = comparison()
    against = compare.compare(found.runs[0], found.base)
    assert set(dataclasses.astuple(against)) == {None}
    facts = found.to_dict()
    assert [run["is_lost"] for run in facts["runs"]] == [True, False, False]
    assert "none is lost: rows are gone" in shown(compare.render(found))


def test_what_is_not_measured_is_not_compared() -> None:
    run = summarize(with_kill())
    against = compare.compare(run, summarize(calm()))
    assert (against.cpu_overhead, against.auc_difference) == (None, None)
    assert against.time_overhead is not None


def test_the_report_fits_a_terminal_and_shows_every_strategy() -> None:
    text = shown(compare.render(comparison()))
    for part in ("none, no kills", "lost", "full", "ecrec", "+7.7 %", "+25.0 %", "+0.0100",
                 "3.5 kB", "1.02 | 1.04", "bit for bit", "seed 0"):  # fmt: skip
        assert part in " ".join(text.split()), part
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_strategy_is_named_with_its_second_layer() -> None:
    both = dataclasses.replace(SETUP, second_layer="cpr")
    assert compare.name_of(summarize([both])) == "ecrec + cpr"
    assert compare.name_of(summarize(going_back())) == "full"


def test_a_wrong_parity_makes_a_comparison_unsound() -> None:
    found = comparison()
    assert found.is_sound
    bad = events.ClusterAudited(stripes=9, parities=9, wrong=1, time=16.0)
    wrong = dataclasses.replace(found, runs=(*found.runs, summarize([*coded(), bad])))
    assert not wrong.is_sound
    assert "WRONG" in shown(compare.render(wrong))


def test_progress_starts_at_the_first_step_and_falls_when_everybody_goes_back() -> None:
    moments, samples = progress_points(going_back())
    assert (moments[0], samples[0]) == (0.0, 10)
    at = moments.index(pytest.approx(11.9))
    assert samples[at : at + 2] == [1000, 600]
    assert moments == sorted(moments)
    assert progress_points([SETUP]) == ([], [])


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture_is_drawn(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "deep" / f"c.{suffix}"
    happened = [lost(), going_back(), coded()]
    assert draw_comparison(comparison(), calm(), happened, path)
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
    quiet = dataclasses.replace(comparison(), runs=(summarize(calm()),))
    assert draw_comparison(quiet, calm(), [calm()], path)
