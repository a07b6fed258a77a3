"""Tensors of a model as the arrays that travel to storage, and back: the same bits.

Invariant: an array and its tensor share memory wherever the tensor is in host memory.

Not here: the types without torch (dtypes.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from holdfast.model import devices
from holdfast.model.schema import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

TORCH_DTYPES: dict[str, torch.dtype] = {
    FLOAT32: torch.float32,
    FLOAT16: torch.float16,
    BFLOAT16: torch.bfloat16,
    FLOAT64: torch.float64,
}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def is_column_dtype(dtype: torch.dtype) -> bool:
    """Whether a column of a table may have this type."""
    return dtype in _NAMES


def dtype_name(dtype: torch.dtype) -> str:
    """A column type by its name in a schema.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return _NAMES[dtype]


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A tensor's memory as an array (dtypes.py); of one on another device, a copy of it."""
    tensor = devices.to_host(tensor)
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    array: npt.NDArray[Any] = tensor.numpy()
    return array


def as_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """An array's memory as a tensor: what ``as_array`` made an array of."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
