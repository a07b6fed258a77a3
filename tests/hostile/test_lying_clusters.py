"""Checkpoints of a cluster whose dense state lies: an error of ours, before anything is loaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.checkpoint.format import tree
from holdfast.cluster.checkpoints import ClusterCheckpointer
from holdfast.cluster.cluster import Cluster
from holdfast.cluster.stored_state import EXTRA
from holdfast.errors import CorruptDataError
from tests.cluster.test_protocol import make_spec
from tests.cluster.threads import ThreadEngine
from tests.hostile.campaign_runs import read_folder
from tests.hostile.mutators.stored_run import lay_out, take_apart

SPEC = make_spec(optimizer="sgd")
DONE = {"start": 0, "started": 3, "again": [1]}
BAD_BATCHES: dict[str, Any] = {
    "text": "x",
    "list": [1],
    "lacks a part": {"start": 0, "started": 3},
    "text as number": {**DONE, "started": "x"},
    "beyond counts": {**DONE, "started": 1 << 60},
    "negative": {**DONE, "started": -1},
    "infinite": {**DONE, "start": float("inf")},
    "again is a number": {**DONE, "again": 7},
    "again holds texts": {**DONE, "again": ["1"]},
    "again twice": {**DONE, "again": [1, 1]},
    "more again than begun": {**DONE, "again": [0, 1, 2, 3]},
}
Change = Callable[[dict[str, Any]], Any]
LIES: dict[str, Change] = {
    "a tensor": lambda extra: torch.zeros(3),
    "an array": lambda extra: np.zeros(3),
    "a list": lambda extra: [1, 2],
    "layout: a tensor": lambda extra: {**extra, "layout": torch.zeros(3)},
    "layout: an array": lambda extra: {**extra, "layout": np.zeros(3)},
    "layout: of arrays": lambda extra: {**extra, "layout": {"users": np.zeros(4)}},
    "timeline: an array": lambda extra: {**extra, "timeline": np.zeros(3)},
    "timeline: a number": lambda extra: {**extra, "timeline": 7},
    "applied: a number": lambda extra: {**extra, "applied": 7},
    "applied: of no server": lambda extra: {**extra, "applied": []},
    "applied: texts": lambda extra: {**extra, "applied": [["x"]] * SPEC.servers},
    "applied: a tensor": lambda extra: {**extra, "applied": torch.zeros(SPEC.servers, 2)},
    "applied: too far": lambda extra: {**extra, "applied": [[1 << 60]] * SPEC.servers},
    "applied: too many": lambda extra: {**extra, "applied": [[0] * 300] * SPEC.servers},
    **{
        f"batches: {name}": lambda extra, value=value: {**extra, "batches": value}
        for name, value in BAD_BATCHES.items()
    },
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    found = Cluster(SPEC, engine=ThreadEngine())
    found.start()
    yield found
    found.close()


@pytest.fixture(scope="module")
def good(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("good")
    with ClusterCheckpointer(cluster, path) as layer:
        layer.save(step=0)
    return read_folder(path)


def write(path: Path, good: dict[str, bytes], change: Change) -> None:
    """The run with what a cluster says in its dense state changed, and every checksum right."""
    shutil.rmtree(path, ignore_errors=True)
    run = take_apart(good)
    for _, part in run.parts("dense"):
        dense = tree.from_bytes(part.data)
        dense["extras"][EXTRA] = change(dense["extras"][EXTRA])
        part.data = tree.to_bytes(*tree.flatten(dense))
    for name, data in lay_out(run).files().items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_what_a_cluster_never_says_is_refused_before_anything_is_loaded(
    cluster: Cluster, good: dict[str, bytes], tmp_path: Path, lie: Change
) -> None:
    write(tmp_path, good, lie)
    assert hf.verify(tmp_path).is_sound  # what extras hold is their reader's to know
    epoch = cluster.coordinator.view.epoch
    with (
        ClusterCheckpointer(cluster, tmp_path) as layer,
        pytest.raises(CorruptDataError, match="not a checkpoint of a cluster"),
    ):
        layer.resume()
    assert cluster.coordinator.view.epoch == epoch


def test_what_a_cluster_says_is_taken(
    cluster: Cluster, good: dict[str, bytes], tmp_path: Path
) -> None:
    write(tmp_path, good, lambda extra: {**extra, "batches": DONE})
    with ClusterCheckpointer(cluster, tmp_path) as layer:
        restore = layer.hold()
        layer.release(is_restored=False)
    assert restore is not None and restore.batches == DONE and restore.loading.is_apart
