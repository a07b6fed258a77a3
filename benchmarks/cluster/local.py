"""The peer of a worker on servers: the same model with its own tables, in one process.

Model, samples, learning rates and optimizers are those of the cluster's workers; torch's sparse
gradients and its own Adagrad stand where servers would.

Not here: the cluster's side (trainer.py), the comparison (overhead.py).
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from benchmarks.one_thread import one_thread
from holdfast import events
from holdfast.recsys.cluster_train import Workload
from holdfast.recsys.train import Plan, make_training, train

_TAIL = 0.1  # of the batches: their losses are averaged


@dataclass(frozen=True, slots=True)
class Local:
    """What a training in one process cost; seconds are of one batch."""

    batch_s: float
    cpu_s: float
    loss: float


def train_local(workload: Workload, *, batches: int) -> Local:
    """Train once; the first batch is not counted, as it is not for workers."""
    training = make_training(Plan(workload.recipe, workload.skew), steps=batches)
    moments: list[tuple[float, float]] = []
    losses: list[float] = []

    def note(event: events.Event) -> None:
        if isinstance(event, events.TrainProgress):
            losses.append(event.loss)

    with one_thread():
        train(
            training,
            start=0,
            steps=batches,
            after_step=lambda: moments.append((time.perf_counter(), time.process_time())),
            emit=note,
        )
    (start, cpu_start), (end, cpu_end) = moments[0], moments[-1]
    last = losses[-max(1, round(_TAIL * batches)) :]
    return Local(
        batch_s=(end - start) / (batches - 1),
        cpu_s=(cpu_end - cpu_start) / (batches - 1),
        loss=statistics.fmean(last),
    )
