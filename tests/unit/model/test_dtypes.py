"""Number types of columns as arrays: which array holds which, and conversions that lose nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.model.dtypes import (
    array_dtype,
    as_bits,
    fill_nan,
    for_users,
    from_float32,
    name_of,
    to_float32,
)
from holdfast.model.schema import BFLOAT16, DTYPE_BYTES, FLOAT16
from holdfast.model.tensors import TORCH_DTYPES, as_array, as_tensor

ALL_16 = np.arange(1 << 16, dtype=np.uint16)


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_a_type_has_one_array_type_of_its_size(name: str) -> None:
    array = np.zeros((2, 3), array_dtype(name))
    assert array.itemsize == DTYPE_BYTES[name] == TORCH_DTYPES[name].itemsize
    assert name_of(array) == name
    assert as_bits(array).itemsize == array.itemsize
    tensor = as_tensor(array)
    assert tensor.dtype == TORCH_DTYPES[name]
    tensor[1, 2] = 1  # shares memory
    assert for_users(array)[1, 2] == 1
    again = as_array(tensor)
    assert again.ctypes.data == array.ctypes.data and again.dtype == array.dtype


def test_arrays_of_other_types_hold_no_column() -> None:
    assert name_of(np.zeros(3, np.int32)) is None


def test_every_bf16_is_the_same_number_for_users() -> None:
    mine = for_users(ALL_16)
    theirs = torch.from_numpy(ALL_16.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert np.array_equal(mine, theirs, equal_nan=True)
    assert np.array_equal(from_float32(mine, BFLOAT16)[~np.isnan(mine) & np.isfinite(mine)],
                          ALL_16[np.isfinite(mine)])  # fmt: skip


@pytest.mark.parametrize("name", [FLOAT16, BFLOAT16])
def test_rounding_is_torchs_but_for_infinity(name: str) -> None:
    draw = np.random.default_rng(1)
    values = draw.standard_normal(10_000).astype(np.float32) * np.float32(10) ** draw.integers(
        -9, 39, 10_000
    ).astype(np.float32)
    values = values[np.isfinite(values)]
    mine = as_tensor(from_float32(values, name)).float()
    theirs = torch.from_numpy(values).to(TORCH_DTYPES[name]).float()
    assert torch.isfinite(mine).all()
    assert torch.equal(mine[torch.isfinite(theirs)], theirs[torch.isfinite(theirs)])
    assert torch.isnan(as_tensor(from_float32(np.float32([np.nan]), name))).all()


def test_float64_beyond_float32_is_infinite_without_a_warning() -> None:
    assert np.isinf(to_float32(np.array([1e300]))).all()


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_lost_rows_are_nan_in_every_type(name: str) -> None:
    array = np.zeros((4, 2), array_dtype(name))
    fill_nan(array, np.array([1, 3]))
    assert np.isnan(for_users(array)).all(axis=1).tolist() == [False, True, False, True]
