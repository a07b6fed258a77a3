"""The click models on a cluster: tables on servers, the same samples whoever trains them.

    Workload, Layout -> ClusterSpec -> servers
    Workload -> args of ``train`` -> every worker: model, click stream, batches by lease
    driver: first networks before, AUC on held-out samples after

Invariants:
- Batch b holds the same samples in every process: it is a pure function of the workload and b.
- Tables have the names they have in the local training's ``state_dict()``.
- The driver and all workers build the same networks from the same seed.

Not here: the same training without servers (train.py), processes (cluster/), printing (cli/).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from holdfast.cluster.dense import DIM as DENSE_DIM
from holdfast.cluster.dense import NAME as DENSE
from holdfast.cluster.dense import Dense
from holdfast.cluster.spec import ClusterSpec, Optimizer, TableSpec
from holdfast.cluster.worker import Session
from holdfast.errors import InvalidRequestError
from holdfast.model.placement import Placement
from holdfast.recsys.auc import auc
from holdfast.recsys.data.batch import Batch
from holdfast.recsys.data.clicks import ClickStream
from holdfast.recsys.data.skew import Skew
from holdfast.recsys.models.presets import PRESETS, ModelKind, make_model
from holdfast.recsys.train import Recipe, evaluate

ENTRY = "holdfast.recsys.cluster_train:train"

# of tables: as in the local training, and what does as well there with the other optimizers
RATES = {"sgd": 0.5, "momentum": 0.05, "adagrad": 0.05, "rowwise-adagrad": 0.05, "adam": 0.003}
_DENSE_RATE = 2e-3

_HELD_OUT_SAMPLES = 32_768
_HELD_OUT_BATCH = 2048
_SEED_STEP = 1_000_003  # between the first rows of one table and the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained: model and samples. The same in every process."""

    model: ModelKind = "dlrm"
    preset: str = "small"
    rows: int = 200_000
    batch_size: int = 1024
    seed: int = 0
    skew: Skew = dataclasses.field(default_factory=Skew)

    @property
    def recipe(self) -> Recipe:
        """The same as the local training names it; checks it too."""
        return Recipe(
            model=self.model,
            preset=self.preset,
            rows=self.rows,
            batch_size=self.batch_size,
            seed=self.seed,
        )

    @property
    def table_rows(self) -> tuple[int, ...]:
        """The rows of each categorical feature's table."""
        return self.recipe.table_rows

    def to_args(self) -> dict[str, Any]:
        """Plain values for a worker."""
        return dataclasses.asdict(self)

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> Workload:
        """What ``to_args`` wrote."""
        return cls(**{**args, "skew": Skew(**args["skew"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How rows lie on servers, are coded, and trained there."""

    servers: int = 5
    data: int = 4
    """Rows of a stripe."""
    parity: int = 1
    """Coded rows of a stripe; 0: nothing is coded."""
    code: str | None = None
    """None: XOR for one parity row, Reed-Solomon for more."""
    optimizer: str = "adagrad"
    lr: float | None = None
    replicate_networks: bool = True
    """Otherwise they are there once."""
    hold_networks: bool | None = None
    """Whether workers give a replacement the networks as they last saw them, where these are there
    once. None: where rows are coded (ECRM)."""
    locks: int = 10
    hot: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """Rows that are replicated instead of coded, by table (research/hot_rows.py finds them)."""

    def code_for(self, parity: int) -> str:
        """The code of stripes with so many parity rows."""
        if parity == 0:
            return "none"
        return self.code or ("xor" if parity == 1 else "rs")


def make_cluster_spec(workload: Workload, layout: Layout) -> ClusterSpec:
    """The tables of a model as a cluster holds them, its networks among them.

    Raises:
        InvalidRequestError: the layout or the workload cannot be.
    """
    if layout.optimizer not in RATES:
        raise InvalidRequestError(
            "unknown optimizer", optimizer=layout.optimizer, known=list(RATES)
        )
    if layout.servers < 2 and layout.parity > 0:
        raise InvalidRequestError(
            "one server has no other that could hold its parity",
            servers=layout.servers,
            todo="have at least two servers, or none of the codes",
        )
    rate = RATES[layout.optimizer] if layout.lr is None else layout.lr
    how = Optimizer(layout.optimizer, lr=rate)
    placed = Placement(layout.servers, data=layout.data, parity=layout.parity)
    tables = [
        TableSpec(
            name,
            rows,
            width,
            placed,
            layout.code_for(layout.parity),
            how,
            seed=workload.seed + _SEED_STEP * number,
            bound=1 / math.sqrt(rows),
        )
        for number, (name, rows, width) in enumerate(name_tables(workload))
    ]
    copies = layout.parity if layout.replicate_networks else 0
    is_held = layout.parity > 0 if layout.hold_networks is None else layout.hold_networks
    networks = TableSpec(
        DENSE,
        Dense(_make_networks(workload)).rows,
        DENSE_DIM,
        Placement(layout.servers, data=1, parity=copies),
        # one data row a stripe: either code is a copy, and a float sum would drift from it
        "none" if copies == 0 else "xor" if copies == 1 else "rs",
        Optimizer("adam", lr=_DENSE_RATE, eps=1e-8),
        is_held=copies == 0 and is_held,
    )
    return ClusterSpec((*tables, networks), locks=layout.locks, hot=layout.hot)


def name_tables(workload: Workload) -> list[tuple[str, int, int]]:
    """(name, rows, width) of every table, in the order of the model's modules."""
    if workload.preset not in PRESETS:
        raise InvalidRequestError("unknown preset", preset=workload.preset, known=list(PRESETS))
    width = PRESETS[workload.preset].width
    rows = workload.table_rows
    found = [(f"tables.{at}.weight", count, width) for at, count in enumerate(rows)]
    if workload.model == "deepfm":
        found += [(f"weights.{at}.weight", count, 1) for at, count in enumerate(rows)]
    return found


def _make_networks(workload: Workload) -> nn.Module:
    """The model without its tables: nothing stands in their place."""
    torch.manual_seed(workload.seed)
    small = make_model(workload.preset, [1] * len(workload.table_rows), kind=workload.model)
    for name in ("tables", "weights"):
        modules = getattr(small, name, None)
        if isinstance(modules, nn.ModuleList):
            for at in range(len(modules)):
                modules[at] = nn.Identity()
    return small


def make_cluster_model(workload: Workload, session: Session) -> nn.Module:
    """The model with the cluster's tables in the place of its own."""
    model = _make_networks(workload)
    for name, _, _ in name_tables(workload):
        group, at, _ = name.split(".")
        table = session.embedding_bag(name) if group == "tables" else session.embedding(name)
        getattr(model, group)[int(at)] = table
    return model


def ids_by_table(workload: Workload, batch: Batch) -> dict[str, torch.Tensor]:
    """What a batch will look up, to be announced."""
    columns = batch.ids.unbind(dim=1)
    groups = ("tables", "weights") if workload.model == "deepfm" else ("tables",)
    return {f"{g}.{at}.weight": ids_B for g in groups for at, ids_B in enumerate(columns)}


def make_stream(workload: Workload) -> ClickStream:
    """The training batches by number."""
    return ClickStream(
        workload.table_rows,
        batch_size=workload.batch_size,
        seed=workload.seed,
        skew=workload.skew,
    )


def train(session: Session, *, workload: Mapping[str, Any], told: str | None = None) -> None:
    """What a worker does. ``told`` is a folder in which it says what every batch came to."""
    found = Workload.from_args(workload)
    stream = make_stream(found)
    model = make_cluster_model(found, session)
    optimizer = session.optimizer(model)
    with _telling(told, session) as tell:
        for number in session.batches():
            batch = stream[number]
            session.prefetch(ids_by_table(found, batch))
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            tell(number, loss.item())


@contextmanager
def _telling(folder: str | None, session: Session) -> Iterator[Callable[[int, float], None]]:
    if folder is None:
        yield lambda batch, loss: None
        return
    path = Path(folder) / f"worker-{session.client.worker}.jsonl"
    with path.open("ab", buffering=0) as file:  # a line is one write: whole, or torn at the end

        def tell(batch: int, loss: float) -> None:
            line = {
                "time": time.time(),
                "batch": batch,
                "loss": loss,
                "cpu_s": time.process_time(),
                "pushes_lost": session.client.pushes_lost,
                "bytes_sent": session.client.bytes_sent,
            }
            file.write(json.dumps(line).encode() + b"\n")

        yield tell


@dataclass(frozen=True, slots=True)
class BatchTold:
    """What a worker said of one batch."""

    worker: int
    time: float
    batch: int
    loss: float
    cpu_s: float
    """Of the worker's process, so far."""
    pushes_lost: int
    """Without two-phase commit, so far: pushes that a lost server had and nobody has any more."""
    bytes_sent: int = 0
    """Ids and gradients, so far."""


class Told:
    """Reads what workers say into a folder, while they do."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def read(self) -> list[BatchTold]:
        """What is new, in the order of time; a line that a kill tore is left out."""
        found = []
        for path in sorted(self._folder.glob("worker-*.jsonl")):
            worker = int(path.stem.removeprefix("worker-"))
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            found += [BatchTold(worker, **json.loads(line)) for line in whole.splitlines()]
        return sorted(found, key=lambda each: each.time)


# The driver.


def start_networks(workload: Workload, session: Session) -> None:
    """Give servers the first values of the networks; before workers start."""
    session.first_dense(_make_networks(workload))


def evaluate_cluster(
    workload: Workload, session: Session, *, samples: int = _HELD_OUT_SAMPLES
) -> float | None:
    """The AUC on held-out samples of the rows as they are now; None without both classes."""
    model = make_cluster_model(workload, session)
    session.optimizer(model)  # for the networks' values; no step is taken

    def announced() -> Iterable[Batch]:
        stream = heldout_stream(workload, samples)
        for batch in (stream[at] for at in range(len(stream))):
            session.prefetch(ids_by_table(workload, batch))
            yield batch

    with torch.no_grad():
        return evaluate(model, announced())


def best_auc(workload: Workload, *, samples: int = _HELD_OUT_SAMPLES) -> float | None:
    """What a model that knows the truth reaches on the held-out samples."""
    stream = heldout_stream(workload, samples)
    labels_N = np.concatenate([stream[at].labels.numpy() for at in range(len(stream))])
    truth_N = np.concatenate([stream.probability(at) for at in range(len(stream))])
    return auc(labels_N, truth_N) if 0 < labels_N.mean() < 1 else None


def heldout_stream(workload: Workload, samples: int) -> ClickStream:
    """Samples that training never sees; the local training's own."""
    size = min(_HELD_OUT_BATCH, samples)
    return make_stream(dataclasses.replace(workload, batch_size=size)).heldout(samples // size)


def cpu_seconds() -> float:
    """What this process and the children it has waited for used, in all."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system
