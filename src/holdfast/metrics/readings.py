"""Which metrics there are, and what an event does to them: one list, one pure function.

Invariant: every reading is of a metric in ``METRICS`` and has exactly its labels; labels have few
values (a kind, a reason, a server's number), never a url or an error's text.

Not here: adding up (counts.py). docs/metrics.md explains each; a test keeps it complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast import events

COUNTER, GAUGE, SUMMARY = "counter", "gauge", "summary"


@dataclass(frozen=True, slots=True)
class Metric:
    """A name, what kind of number it is, what it means."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """What an event says of a metric: add to a counter, set a gauge, or one more of a summary."""

    metric: str
    value: float
    labels: tuple[str, ...] = ()


METRICS = {
    metric.name: metric
    for metric in (
        Metric("holdfast_run_tables", GAUGE, "Tables of the model."),
        Metric("holdfast_run_rows", GAUGE, "Rows of all tables."),
        Metric("holdfast_run_row_bytes", GAUGE, "Bytes of all rows with their state, as fp32."),
        Metric("holdfast_checkpoints_total", COUNTER, "Checkpoints committed.", ("kind",)),
        Metric("holdfast_checkpoint_rows_total", COUNTER, "Rows stored by checkpoints."),
        Metric("holdfast_checkpoint_bytes_total", COUNTER, "Bytes stored by checkpoints."),
        Metric("holdfast_checkpoint_full_bytes_total", COUNTER,
               "Bytes the same checkpoints would take whole, as fp32."),
        Metric("holdfast_checkpoint_stall_seconds", SUMMARY, "Time training stood still."),
        Metric("holdfast_checkpoint_durable_seconds", SUMMARY, "From start to commit."),
        Metric("holdfast_checkpoint_last_step", GAUGE, "Step of the last committed checkpoint."),
        Metric("holdfast_checkpoint_last_timestamp_seconds", GAUGE,
               "When it was committed, in Unix time."),
        Metric("holdfast_checkpoint_failures_total", COUNTER, "Saves that failed."),
        Metric("holdfast_checkpoint_cancellations_total", COUNTER,
               "Saves that gave way to a newer one."),
        Metric("holdfast_checkpoints_dropped_total", COUNTER, "Checkpoints let go.", ("reason",)),
        Metric("holdfast_deleted_bytes_total", COUNTER, "Bytes of objects deleted."),
        Metric("holdfast_collection_failures_total", COUNTER, "Deletions that failed."),
        Metric("holdfast_extraction_seconds", SUMMARY, "Rounds of extraction in the grid."),
        Metric("holdfast_extraction_written_bytes_total", COUNTER, "Bytes moved by extraction."),
        Metric("holdfast_extraction_garbage_bytes", GAUGE, "Bytes of objects that are dead."),
        Metric("holdfast_extraction_failures_total", COUNTER, "Rounds that failed."),
        Metric("holdfast_restore_seconds", SUMMARY, "Checkpoints loaded into the model."),
        Metric("holdfast_restore_bytes_total", COUNTER, "Bytes read by restores."),
        Metric("holdfast_recovery_seconds", SUMMARY,
               "Rows of failed servers loaded from a checkpoint, all others going on."),
        Metric("holdfast_recovery_rows_total", COUNTER, "Rows that came back that way."),
        Metric("holdfast_pls", GAUGE, "Portion of lost samples so far (CPR)."),
        Metric("holdfast_train_step", GAUGE, "Steps, or batches of a cluster, trained."),
        Metric("holdfast_train_samples", GAUGE, "Samples trained."),
        Metric("holdfast_train_samples_per_second", GAUGE, "Throughput."),
        Metric("holdfast_train_loss", GAUGE, "Loss of the last report."),
        Metric("holdfast_train_auc", GAUGE, "AUC on held-out samples."),
        Metric("holdfast_cluster_servers", GAUGE, "Servers the rows are divided among."),
        Metric("holdfast_cluster_workers", GAUGE, "Workers."),
        Metric("holdfast_server_losses_total", COUNTER, "Servers and spares lost."),
        Metric("holdfast_server_replacement_seconds", SUMMARY,
               "From the loss of a server to another that answers."),
        Metric("holdfast_server_recovery_seconds", SUMMARY,
               "From the loss of a server until all is whole.", ("what",)),
        Metric("holdfast_decoded_rows_total", COUNTER, "Rows decoded from their stripes."),
        Metric("holdfast_server_missing_rows", GAUGE, "Rows a replacement lacks.", ("server",)),
        Metric("holdfast_data_losses_total", COUNTER, "Losses beyond what parities make up for."),
        Metric("holdfast_worker_losses_total", COUNTER, "Workers lost."),
        Metric("holdfast_server_rows_updated", GAUGE, "Rows updated by pushes.", ("server",)),
        Metric("holdfast_server_cpu_seconds", GAUGE, "Processor time of a server.", ("server",)),
        Metric("holdfast_server_resident_bytes", GAUGE, "Most memory it held.", ("server",)),
        Metric("holdfast_cluster_wrong_parities", GAUGE, "Parities an audit found wrong."),
    )
}  # fmt: skip


def readings(event: events.Event) -> Iterator[Reading]:
    """What an event changes; nothing for events that no metric is made of.

    >>> [(r.metric, r.value) for r in readings(events.SaveFailed(step=3, error="disk full"))]
    [('holdfast_checkpoint_failures_total', 1)]
    """
    match event:
        case events.RunOpened():
            yield Reading("holdfast_run_tables", event.tables)
            yield Reading("holdfast_run_rows", event.rows)
            yield Reading("holdfast_run_row_bytes", event.row_bytes)
        case events.SaveDurable():
            yield Reading("holdfast_checkpoints_total", 1, (event.checkpoint,))
            yield Reading("holdfast_checkpoint_rows_total", event.rows)
            yield Reading("holdfast_checkpoint_bytes_total", event.bytes)
            yield Reading("holdfast_checkpoint_full_bytes_total", event.full_bytes)
            yield Reading("holdfast_checkpoint_stall_seconds", event.stall_s)
            yield Reading("holdfast_checkpoint_durable_seconds", event.durable_s)
            yield Reading("holdfast_checkpoint_last_step", event.step)
            yield Reading("holdfast_checkpoint_last_timestamp_seconds", event.time)
        case events.SaveFailed():
            yield Reading("holdfast_checkpoint_failures_total", 1)
        case events.SaveCancelled():
            yield Reading("holdfast_checkpoint_cancellations_total", 1)
        case events.CheckpointsDropped():
            yield Reading("holdfast_checkpoints_dropped_total", len(event.steps), (event.reason,))
        case events.ObjectsDeleted():
            yield Reading("holdfast_deleted_bytes_total", event.bytes)
        case events.CollectionFailed():
            yield Reading("holdfast_collection_failures_total", 1)
        case events.Extracted():
            yield Reading("holdfast_extraction_seconds", event.seconds)
            yield Reading("holdfast_extraction_written_bytes_total", event.written_bytes)
            yield Reading("holdfast_extraction_garbage_bytes", event.garbage_bytes)
        case events.ExtractionFailed():
            yield Reading("holdfast_extraction_failures_total", 1)
        case events.Restored():
            yield Reading("holdfast_restore_seconds", event.seconds)
            yield Reading("holdfast_restore_bytes_total", event.bytes)
        case events.Recovered():
            yield Reading("holdfast_recovery_seconds", event.seconds)
            yield Reading("holdfast_recovery_rows_total", event.rows)
            if event.pls is not None:
                yield Reading("holdfast_pls", event.pls)
        case events.TrainProgress():
            yield from _training(event)
        case _:
            yield from _of_cluster(event)


def _training(event: events.TrainProgress) -> Iterator[Reading]:
    yield Reading("holdfast_train_step", event.step)
    yield Reading("holdfast_train_samples", event.samples)
    yield Reading("holdfast_train_loss", event.loss)
    if event.seconds > 0:
        yield Reading("holdfast_train_samples_per_second", event.samples / event.seconds)
    if event.auc is not None:
        yield Reading("holdfast_train_auc", event.auc)


def _of_cluster(event: events.Event) -> Iterator[Reading]:
    match event:
        case events.ClusterStarted():
            yield Reading("holdfast_cluster_servers", event.servers)
            yield Reading("holdfast_cluster_workers", event.workers)
            yield Reading("holdfast_run_rows", event.rows)
            yield Reading("holdfast_run_row_bytes", event.row_bytes)
        case events.ClusterProgress():
            yield Reading("holdfast_train_step", event.batches)
            yield Reading("holdfast_train_samples", event.samples)
            yield Reading("holdfast_train_samples_per_second", event.samples_per_s)
            if event.loss is not None:
                yield Reading("holdfast_train_loss", event.loss)
        case events.ServerLost():
            yield Reading("holdfast_server_losses_total", 1)
        case events.ServerReplaced():
            yield Reading("holdfast_server_replacement_seconds", event.seconds)
        case events.RangeRecovered():
            yield Reading("holdfast_decoded_rows_total", event.rows)
            yield Reading("holdfast_server_missing_rows", event.left, (str(event.server),))
        case events.ServerRecovered():
            yield Reading("holdfast_server_recovery_seconds", event.seconds, (event.what,))
            if event.what == "rows":
                yield Reading("holdfast_server_missing_rows", 0, (str(event.server),))
        case events.RowsLost():
            yield Reading("holdfast_data_losses_total", 1)
        case events.WorkerLost():
            yield Reading("holdfast_worker_losses_total", 1)
        case events.ServerCounted():
            server = (str(event.server),)
            yield Reading("holdfast_server_rows_updated", event.rows_updated, server)
            yield Reading("holdfast_server_cpu_seconds", event.cpu_s, server)
            if event.resident_bytes is not None:
                yield Reading("holdfast_server_resident_bytes", event.resident_bytes, server)
        case events.ClusterAudited():
            yield Reading("holdfast_cluster_wrong_parities", event.wrong)
        case events.ClusterEnded() if event.auc is not None:
            yield Reading("holdfast_train_auc", event.auc)
