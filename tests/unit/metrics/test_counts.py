"""Metrics are what events say, in the format Prometheus reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast import events
from holdfast.metrics import Metrics, TensorBoard
from holdfast.metrics.readings import METRICS, readings
from tests.unit.metrics.exposition import parse

SAVED = events.SaveDurable(step=20, checkpoint="delta", codec="fp32", rows=7, bytes=100,
                           full_bytes=900, stall_s=0.25, durable_s=1.5, time=5.0)  # fmt: skip


def one_of_each() -> list[events.Event]:
    """An event of every kind."""
    samples = {"int": 3, "float": 0.5, "str": 'why "so"\n\\', "int | None": 4,
               "float | None": 0.25, "str | None": "so", "bool": True,
               "tuple[int, ...]": (1, 2)}  # fmt: skip
    return [
        cls(**{name: samples[kind] for name, kind in cls.__annotations__.items()
               if not kind.startswith("ClassVar")})
        for cls in events.KINDS.values()
    ]  # fmt: skip


def test_every_reading_is_of_a_metric_with_its_labels() -> None:
    found = [reading for event in one_of_each() for reading in readings(event)]
    for reading in found:
        assert len(reading.labels) == len(METRICS[reading.metric].labels)
    recovered = events.ServerRecovered(server=1, what="rows", seconds=2.0)
    told = {r.metric for r in found} | {r.metric for r in readings(recovered)}
    assert told == set(METRICS)  # none is listed that nothing changes


def test_text_of_every_event_is_what_the_format_allows() -> None:
    metrics = Metrics()
    empty = parse(metrics.text())
    assert all(value == 0 for family in empty.values() for value in family.samples.values())
    for event in one_of_each():
        metrics(event)
    found = parse(metrics.text())
    assert set(found) == set(METRICS)
    assert all(found[name].kind == metric.kind for name, metric in METRICS.items())


def test_counters_add_gauges_hold_summaries_count() -> None:
    metrics = Metrics()
    for event in (SAVED, SAVED, events.SaveFailed(step=30, error="disk full")):
        metrics(event)
    found = parse(metrics.text())
    delta = (("kind", "delta"),)
    assert found["holdfast_checkpoints_total"].samples == {("holdfast_checkpoints_total", delta): 2}
    assert found["holdfast_checkpoint_bytes_total"].samples == {
        ("holdfast_checkpoint_bytes_total", ()): 200
    }
    assert found["holdfast_checkpoint_last_step"].samples == {
        ("holdfast_checkpoint_last_step", ()): 20
    }
    assert found["holdfast_checkpoint_stall_seconds"].samples == {
        ("holdfast_checkpoint_stall_seconds_sum", ()): 0.5,
        ("holdfast_checkpoint_stall_seconds_count", ()): 2,
    }
    assert metrics.value("holdfast_checkpoint_failures_total") == 1
    assert metrics.value("holdfast_pls") is None


def test_page_explains_every_metric_and_no_other() -> None:
    page = Path(__file__).parents[3] / "docs" / "metrics.md"
    named = set(re.findall(r"`(holdfast_[a-z_]+)`", page.read_text()))
    assert named == set(METRICS)


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with TensorBoard(tmp_path) as board:
        log = events.EventLog([board], clock=lambda: 9.0)
        for step in (10, 20):
            log.emit(events.TrainProgress(step=step, steps_total=20, samples=step, loss=1 / step,
                                          seconds=2.0))  # fmt: skip
            log.emit(SAVED)
    read = loading.EventAccumulator(str(tmp_path))
    read.Reload()
    scalars = read.Scalars("holdfast/train_loss")
    assert [(s.step, round(s.value, 6), s.wall_time) for s in scalars] == [
        (10, 0.1, 9.0), (20, 0.05, 9.0)
    ]  # fmt: skip
    totals = read.Scalars("holdfast/checkpoints_total/delta")
    assert [s.value for s in totals] == [1.0, 2.0]
