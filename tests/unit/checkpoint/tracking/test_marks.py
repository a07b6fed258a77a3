"""Marks on a device and on the host name the same rows."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.checkpoint.tracking.marks import (
    DeviceMarks,
    all_rows,
    arriving_ids,
    arriving_nonzero,
    nonzero_rows,
)
from holdfast.checkpoint.tracking.watch import TableWatch
from holdfast.kernels.rows import bitmap
from holdfast.model.tables import find_tables

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU"))]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 1000])
def test_device_marks_are_the_rows_that_were_marked(rows: int, device: str) -> None:
    marks = DeviceMarks(rows, torch.device(device))
    ids = torch.randint(0, rows, (rows // 3 + 1,), generator=torch.Generator().manual_seed(rows))
    marks.mark_ids(ids.to(device))
    gradient = torch.zeros(rows, 4)
    gradient[rows // 2, 3] = -1e-30
    marks.mark_nonzero(gradient.to(device))
    expected = sorted({*ids.tolist(), rows // 2})
    assert bitmap.ids(marks.take(), 0, rows).tolist() == expected
    assert bitmap.count(marks.take()) == 0


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("width", [1, 2, 3, 16, 33])
def test_rows_that_are_not_zero_are_found_in_any_type(dtype: torch.dtype, width: int) -> None:
    rows = 130
    values = torch.zeros(rows, width, dtype=dtype)
    chosen = [0, 1, 63, 64, 100, 129]
    values[chosen, width - 1] = 1e-3
    values[7, 0] = -0.0  # can change the sign of a zero
    words_W = np.full(3, ~np.uint64(0))
    nonzero_rows(values, words_W)
    assert bitmap.ids(words_W, 0, 192).tolist() == sorted({*chosen, 7})
    nonzero_rows(values.t().contiguous().t(), words_W)  # rows that are not contiguous
    assert bitmap.ids(words_W, 0, 192).tolist() == sorted({*chosen, 7})


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_rows_that_are_not_zero_are_found_anywhere_in_a_buffer(
    dtype: torch.dtype, start: int
) -> None:
    buffer = torch.zeros(50 * 4 + 3, dtype=dtype)
    values = buffer[start : start + 200].view(50, 4)
    values[[3, 41], 2] = 1
    words_W = bitmap.new(50)
    nonzero_rows(values, words_W)
    assert bitmap.ids(words_W, 0, 50).tolist() == [3, 41]


@pytest.mark.parametrize("rows", [1, 64, 65, 200])
def test_all_rows_are_all_and_no_more(rows: int) -> None:
    assert bitmap.ids(all_rows(rows), 0, 1000).tolist() == list(range(rows))


def test_marks_on_a_device_that_a_table_left_are_kept() -> None:
    watch = TableWatch(find_tables(nn.Embedding(100, 4))[0], range(100))
    here, elsewhere = torch.device("cpu"), torch.device("cuda:7")
    watch._device_marks(here).mark_ids(torch.tensor([3, 70]))
    with mock.patch.object(DeviceMarks, "device", elsewhere):  # it was there until now
        marks = watch._device_marks(here)
    marks.mark_ids(torch.tensor([4]))
    assert bitmap.ids(watch._take_fresh(), 0, 100).tolist() == [3, 4, 70]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("width", [1, 3, 16])
def test_a_device_finds_the_same_rows_as_the_host(
    dtype: torch.dtype, width: int, device: str
) -> None:
    rows = 130
    values = torch.zeros(rows, width, dtype=dtype)
    values[[0, 1, 64, 129], width - 1] = 1e-3
    values[7, 0] = -0.0
    expected = bitmap.new(rows)
    nonzero_rows(values, expected)
    marks = DeviceMarks(rows, torch.device(device))
    marks.mark_nonzero(values.to(device))
    assert (marks.take() == expected).all()
    ids_N = arriving_nonzero(values.to(device)).ids()
    assert ids_N.tolist() == bitmap.ids(expected, 0, rows).tolist() == [0, 1, 7, 64, 129]


@pytest.mark.parametrize("device", DEVICES)
def test_arriving_ids_are_those_of_when_they_were_asked_for(device: str) -> None:
    ids = torch.tensor([[5, 2], [5, 9]], device=device)
    arriving = arriving_ids(ids)
    ids.zero_()
    assert arriving.ids().tolist() == [5, 2, 5, 9]
