"""recsys/data/clicks.py: every batch is a function of (seed, index), and worth learning from."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import numpy as np
import pytest
import torch

from holdfast.errors import InvalidRequestError
from holdfast.recsys.auc import auc
from holdfast.recsys.data.batch import Batch
from holdfast.recsys.data.clicks import ClickReader, ClickStream, _Spread
from holdfast.recsys.data.skew import skew_for_touched
from holdfast.recsys.models.presets import CRITEO_KAGGLE_ROWS, scaled_rows

TABLE_ROWS = scaled_rows(CRITEO_KAGGLE_ROWS, total_rows=20_000)


def digest(batch: Batch) -> str:
    parts = [batch.dense, batch.ids, batch.labels]
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()


GOLDEN_IDS = [[20, 5, 188], [15, 6, 147], [14, 4, 518], [0, 2, 266], [14, 1, 772], [2, 4, 10]]
GOLDEN_LABELS = [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
GOLDEN_DENSE = [0.0862, 1.9435, 0.8121, -0.1047, -0.3727, -0.3683]


DIGEST_SCRIPT = """
import hashlib, sys
from holdfast.recsys.data.clicks import ClickStream
stream = ClickStream([50, 7, 1000], batch_size=16, seed=5, skew=1.1)
for index in map(int, sys.argv[1:]):
    b = stream[index]
    data = b"".join(p.numpy().tobytes() for p in (b.dense, b.ids, b.labels))
    print(hashlib.sha256(data).hexdigest())
"""


def test_another_process_makes_the_same_batches_in_any_order() -> None:
    stream = ClickStream([50, 7, 1000], batch_size=16, seed=5, skew=1.1)
    here = [digest(stream[index]) for index in (0, 9, 2**40)]
    there = subprocess.run(
        [sys.executable, "-c", DIGEST_SCRIPT, str(2**40), "9", "0"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert there == here[::-1]
    assert len(set(here)) == 3


def test_the_first_batch_never_changes_between_versions() -> None:
    batch = ClickStream([50, 7, 1000], batch_size=6, seed=5, skew=1.1)[0]
    assert batch.ids.tolist() == GOLDEN_IDS
    assert batch.labels.tolist() == GOLDEN_LABELS
    assert [round(value, 4) for value in batch.dense[:, 0].tolist()] == GOLDEN_DENSE


def test_seeds_and_held_out_batches_differ() -> None:
    stream = ClickStream(TABLE_ROWS, batch_size=8, seed=1)
    other_seed = ClickStream(TABLE_ROWS, batch_size=8, seed=2)
    held_out = stream.heldout(3)
    assert len(held_out) == 3
    made = [digest(s[i]) for s in (stream, other_seed, held_out) for i in range(3)]
    assert len(set(made)) == 9
    with pytest.raises(IndexError):
        held_out[3]


def test_batches_have_the_shape_the_models_take() -> None:
    batch = ClickStream(TABLE_ROWS, batch_size=64, seed=0)[0]
    assert (batch.dense.shape, batch.dense.dtype) == ((64, 13), torch.float32)
    assert (batch.ids.shape, batch.ids.dtype) == ((64, 26), torch.int64)
    assert (batch.labels.shape, batch.labels.dtype) == ((64,), torch.float32)
    assert (batch.ids >= 0).all()
    assert (batch.ids < torch.tensor(TABLE_ROWS)).all()


def test_samples_end_the_stream_with_a_short_batch() -> None:
    stream = ClickStream([10], batch_size=4, samples=10)
    assert [len(batch) for batch in ClickReader(stream)] == [4, 4, 2]
    endless = ClickStream([10], batch_size=4)
    with pytest.raises(TypeError):
        len(endless)
    assert torch.equal(stream[2].ids, endless[2].ids[:2])
    with pytest.raises(IndexError):
        stream[-1]


@pytest.mark.parametrize("rows", [1, 2, 3, 10, 64, 997, 5000])
def test_spreading_is_a_bijection_and_moves_hot_rows_apart(rows: int) -> None:
    ranks = np.arange(rows)[:, None]
    ids = _Spread([rows], seed=3).ids(ranks)[:, 0]
    assert sorted(ids.tolist()) == list(range(rows))
    if rows > 64:
        quarters = np.bincount(ids[: rows // 8] * 4 // rows, minlength=4)
        assert quarters.min() > 0.5 * quarters.mean()


def test_the_teacher_clicks_a_quarter_and_can_be_predicted_to_082() -> None:
    stream = ClickStream(TABLE_ROWS, batch_size=4096, seed=0)
    labels = np.concatenate([stream[i].labels.numpy() for i in range(6)])
    truth = np.concatenate([stream.probability(i) for i in range(6)])
    assert labels.mean() == pytest.approx(0.25, abs=0.02)
    assert auc(labels, truth) == pytest.approx(0.82, abs=0.015)


def test_an_interval_of_the_stream_touches_a_quarter_of_all_rows() -> None:
    batch_size, batches = 256, 30
    skew = skew_for_touched(TABLE_ROWS, batch_size=batch_size, batches=batches)
    stream = ClickStream(TABLE_ROWS, batch_size=batch_size, seed=4, skew=skew)
    seen = [np.zeros(rows, dtype=bool) for rows in TABLE_ROWS]
    for index in range(batches):
        for rows_seen, ids in zip(seen, stream[index].ids.numpy().T, strict=True):
            rows_seen[ids] = True
    share = sum(int(s.sum()) for s in seen) / sum(TABLE_ROWS)
    assert share == pytest.approx(0.26, abs=0.02)


def test_a_resumed_reader_goes_on_behind_the_last_batch() -> None:
    stream = ClickStream([100, 20], batch_size=8, seed=3, samples=100)
    whole = [digest(batch) for batch in ClickReader(stream)]
    first = ClickReader(stream)
    begun = [digest(next(first)) for _ in range(5)]
    second = ClickReader(ClickStream([100, 20], batch_size=8, seed=3, samples=100))
    second.load_state_dict(first.state_dict())
    assert begun + [digest(batch) for batch in second] == whole
    assert len(second) == len(whole) == 13


@pytest.mark.parametrize(
    "state", [{"batch": 1, "batch_size": 8, "seed": 4}, {"batch": -1, "batch_size": 8, "seed": 3}]
)
def test_a_reader_refuses_the_state_of_another_stream(state: dict[str, int]) -> None:
    reader = ClickReader(ClickStream([10], batch_size=8, seed=3))
    with pytest.raises(InvalidRequestError):
        reader.load_state_dict(state)


@pytest.mark.parametrize("rows", [[], [0], [2**31]])
def test_refuses_tables_out_of_range(rows: list[int]) -> None:
    with pytest.raises(InvalidRequestError):
        ClickStream(rows, batch_size=4)
