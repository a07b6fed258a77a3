"""DLRM, DeepFM, PNN: shapes of the papers, gradients, and that they learn."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.errors import InvalidRequestError
from holdfast.recsys.auc import auc
from holdfast.recsys.data.batch import Batch
from holdfast.recsys.data.clicks import ClickStream
from holdfast.recsys.models.dlrm import DLRM
from holdfast.recsys.models.layers import split_parameters
from holdfast.recsys.models.presets import (
    CRITEO_KAGGLE_ROWS,
    PRESETS,
    ModelKind,
    make_model,
    scaled_rows,
)

KINDS: tuple[ModelKind, ...] = ("dlrm", "deepfm", "pnn")
TABLE_ROWS = scaled_rows(CRITEO_KAGGLE_ROWS, total_rows=2_000)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    # tiny operations: on a busy machine threads that wait for each other take most of the time
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def linear_sizes(network: nn.Sequential) -> list[tuple[int, int]]:
    return [(m.in_features, m.out_features) for m in network if isinstance(m, nn.Linear)]


def test_kaggle_and_terabyte_have_the_layers_of_cpr() -> None:
    kaggle, terabyte = make_model("kaggle", [3] * 26), make_model("terabyte", [3] * 26)
    assert isinstance(kaggle, DLRM)
    assert isinstance(terabyte, DLRM)
    assert linear_sizes(kaggle.bottom) == [(13, 512), (512, 256), (256, 64), (64, 16)]
    assert linear_sizes(kaggle.top) == [(432, 512), (512, 256), (256, 1)]
    assert linear_sizes(terabyte.bottom) == [(13, 512), (512, 256), (256, 64)]
    assert linear_sizes(terabyte.top) == [(1728, 512), (512, 512), (512, 256), (256, 1)]
    assert kaggle.tables[0].weight[0].nbytes == 64
    assert terabyte.tables[0].weight[0].nbytes == 256


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_of_every_kind_predicts(kind: ModelKind, preset: str) -> None:
    batch = ClickStream(TABLE_ROWS, batch_size=5, seed=0)[0]
    logits = make_model(preset, TABLE_ROWS, kind=kind)(batch)
    assert logits.shape == (5,)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("interaction", ["dot", "cat"])
def test_dlrm_computes_what_a_loop_over_samples_computes(interaction: str) -> None:
    torch.manual_seed(0)
    batch = ClickStream([5, 4, 3], batch_size=6, seed=0)[0]
    model = DLRM([5, 4, 3], width=2, bottom=(13, 2), top=(1,), interaction=interaction)
    expected = []
    for dense, ids in zip(batch.dense, batch.ids, strict=True):
        bottom = torch.relu(model.bottom[0].weight @ dense + model.bottom[0].bias)
        vectors = [bottom, *(t.weight[i] for t, i in zip(model.tables, ids, strict=True))]
        if interaction == "cat":
            seen = torch.cat(vectors)
        else:
            pairs = [vectors[i] @ vectors[j] for i in range(4) for j in range(i)]
            seen = torch.cat([bottom, torch.stack(pairs)])
        expected.append(model.top[0].weight[0] @ seen + model.top[0].bias[0])
    assert torch.allclose(model(batch), torch.stack(expected), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_only_looked_up_rows_get_gradients(kind: ModelKind) -> None:
    model = make_model("tiny", TABLE_ROWS, kind=kind)
    batch = ClickStream(TABLE_ROWS, batch_size=3, seed=0)[0]
    model(batch).sum().backward()
    tables, _ = split_parameters(model)
    for number, table in enumerate(tables):
        assert table.grad is not None
        assert table.grad.is_sparse
        looked_up = batch.ids[:, number % len(TABLE_ROWS)].unique()
        assert torch.equal(table.grad.coalesce().indices()[0], looked_up)


@pytest.mark.parametrize(("kind", "tables_expected"), [("dlrm", 26), ("deepfm", 52), ("pnn", 26)])
def test_parameters_are_split_without_loss(kind: ModelKind, tables_expected: int) -> None:
    model = make_model("tiny", TABLE_ROWS, kind=kind, sparse=False)
    tables, dense = split_parameters(model)
    assert len(tables) == tables_expected
    assert {id(p) for p in tables + dense} == {id(p) for p in model.parameters()}
    assert len(tables) + len(dense) == len(list(model.parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_torchs_seed_fixes_the_model(kind: ModelKind) -> None:
    def made(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return list(make_model("tiny", TABLE_ROWS, kind=kind).parameters())

    assert all(torch.equal(a, b) for a, b in zip(made(1), made(1), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(made(1), made(2), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_hundred_steps_beat_070(kind: ModelKind) -> None:
    torch.manual_seed(0)
    rows = scaled_rows(CRITEO_KAGGLE_ROWS, total_rows=3_000)
    stream = ClickStream(rows, batch_size=128, seed=0)
    model = make_model("tiny", rows, kind=kind)
    tables, dense = split_parameters(model)
    optimizers = [torch.optim.SparseAdam(tables, lr=0.02), torch.optim.Adam(dense, lr=0.005)]
    for step in range(200):
        batch = stream[step]
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    held_out = [stream.heldout(20)[i] for i in range(20)]
    assert measured(model, held_out) > 0.70


def measured(model: nn.Module, batches: list[Batch]) -> float:
    with torch.no_grad():
        scores = np.concatenate([model(batch).numpy() for batch in batches])
    return auc(np.concatenate([batch.labels.numpy() for batch in batches]), scores)


def test_refuses_sizes_that_do_not_fit() -> None:
    with pytest.raises(InvalidRequestError, match="networks"):
        DLRM([3], width=4, bottom=(13, 5))
    with pytest.raises(InvalidRequestError, match="row"):
        DLRM([3, 0], width=16)
    with pytest.raises(InvalidRequestError, match="kaggle"):
        make_model("huge", [3])


def test_scaled_rows_keep_total_proportions_and_floor() -> None:
    rows = scaled_rows(CRITEO_KAGGLE_ROWS, total_rows=100_000)
    assert sum(rows) == 100_000
    assert min(rows) == 3
    assert rows[2] / rows[3] == pytest.approx(10131227 / 2202608, rel=0.01)
    assert scaled_rows(CRITEO_KAGGLE_ROWS, scale=1.0) == CRITEO_KAGGLE_ROWS
    assert sum(scaled_rows([5, 5, 5], total_rows=400)) == 400
    with pytest.raises(InvalidRequestError):
        scaled_rows([5, 5], total_rows=3)
    with pytest.raises(InvalidRequestError):
        scaled_rows([5, 5])
