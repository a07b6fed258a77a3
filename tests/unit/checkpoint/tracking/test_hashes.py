"""Hashes belong to rows as they were saved; what differs from them is found, part by part."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.checkpoint.tracking.hashes import RowHashes, hash_tensors
from holdfast.model.tables import Table, find_tables

ROWS = 1000


def make_table(seed: int = 1) -> tuple[nn.Embedding, Table]:
    torch.manual_seed(seed)
    model = nn.Embedding(ROWS, 4)
    optimizer = torch.optim.Adagrad(model.parameters())
    return model, find_tables(model, [optimizer])[0]


def stage(hashes: RowHashes, table: Table, ids_N: np.ndarray | range) -> None:
    rows_N = np.asarray(ids_N)
    names = [column.name for column in table.schema().columns]
    hashes.learn(ids_N, names, [array_ND[rows_N] for array_ND in table.arrays()])


def test_a_whole_turn_finds_every_row_that_differs() -> None:
    model, table = make_table()
    hashes = RowHashes(table, range(ROWS))
    hashes.begin_whole()
    for start in range(0, ROWS, 300):
        assert not hashes.is_known
        stage(hashes, table, range(start, min(ROWS, start + 300)))
    assert hashes.is_known
    model.weight.data[[3, 500, 999], 2] += 1e-6
    found = [hashes.scan(16) for _ in range(16)]
    assert np.concatenate(found).tolist() == [3, 500, 999]
    assert hashes.differing(np.arange(ROWS)).tolist() == [3, 500, 999]
    stage(hashes, table, np.array([3, 500]))  # they were saved
    assert hashes.differing(np.arange(ROWS)).tolist() == [999]


def test_rows_of_deltas_alone_make_nothing_known() -> None:
    _, table = make_table()
    hashes = RowHashes(table, range(ROWS))
    for _ in range(5):
        stage(hashes, table, range(ROWS // 2))
    assert not hashes.is_known


def test_only_rows_of_the_span_are_kept() -> None:
    model, table = make_table()
    hashes = RowHashes(table, range(200, 300))
    hashes.learn_all(is_exact=False)
    assert hashes.bytes == 400
    model.weight.data[[100, 250, 299, 300]] += 1
    assert np.concatenate([hashes.scan(7) for _ in range(7)]).tolist() == [250, 299]


def test_comparing_names_changed_rows_once() -> None:
    model, table = make_table()
    hashes = RowHashes(table, range(ROWS))
    assert hashes.compare_all() is None
    model.weight.data[17] = 0
    table.state_tensors()["sum"].numpy()[18, 1] = -0.0
    first, second = hashes.compare_all(), hashes.compare_all()
    assert first is not None and np.flatnonzero(first).tolist() == [17, 18]
    assert second is not None and not second.any()


def test_row_state_that_appears_makes_all_rows_unknown() -> None:
    model = nn.Embedding(ROWS, 4)
    optimizer = torch.optim.Adam(model.parameters())
    (table,) = find_tables(model, [optimizer])
    hashes = RowHashes(table, range(ROWS))
    hashes.learn_all(is_exact=True)
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert len(hashes.scan(1)) == 0
    assert hashes.compare_all() is None


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU"))]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_hashes_by_torch_operations_show_every_flipped_bit(dtype: torch.dtype, device: str) -> None:
    values = torch.randn(64, 5).to(dtype)
    before = hash_tensors([values.to(device), values[:, :1].to(device)]).cpu()
    assert len(before.unique()) == 64
    bits = values.view(torch.uint8)
    for row in range(64):
        bits[row, row % bits.shape[1]] ^= 1 << row % 8
    after = hash_tensors([values.to(device), values[:, :1].to(device)]).cpu()
    assert (before != after).all()


def test_exact_hashes_can_be_learned_from_the_first_save() -> None:
    model, table = make_table()
    hashes = RowHashes(table, range(ROWS))
    hashes.begin_whole(is_exact=True)
    assert not hashes.is_comparable
    stage(hashes, table, range(ROWS))
    assert hashes.is_comparable
    model.weight.data[7] += 1
    assert np.flatnonzero(hashes.compare_all()).tolist() == [7]
    assert hashes.bytes == 8 * ROWS
    hashes.shorten()
    assert (hashes.bytes, hashes.is_known, hashes.is_exact) == (4 * ROWS, True, False)
    assert hashes.differing(np.arange(ROWS)).tolist() == []


def test_hashes_of_a_save_that_ended_half_way_are_forgotten() -> None:
    _, table = make_table()
    hashes = RowHashes(table, range(ROWS))
    hashes.begin_whole()
    stage(hashes, table, range(500))
    hashes.end_save(is_committed=False)
    stage(hashes, table, range(500))  # the same rows again do not make the others known
    assert not hashes.is_known


@pytest.mark.parametrize("width", [2, 4, 16])
def test_half_of_a_device_hash_tells_rows_apart_whose_signs_were_flipped(width: int) -> None:
    rows = torch.randn(200, width)
    flipped = rows.clone()
    flipped[:, :2] *= -1
    halves = [hash_tensors([each]).numpy().astype(np.uint32) for each in (rows, flipped)]
    assert (halves[0] != halves[1]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hashes_do_not_depend_on_where_in_a_buffer_rows_lie(dtype: torch.dtype) -> None:
    buffer = torch.randn(101).to(dtype)
    rows = buffer[1:].view(25, 4)
    assert torch.equal(hash_tensors([rows]), hash_tensors([rows.clone()]))
