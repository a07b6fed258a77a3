"""Memory that nobody wrote, made visible: what the project allocates begins as a pattern.

``np.empty`` and its kin are replaced where the project's modules look them up; compiled kernels
keep theirs. A row that is handed out and still holds the pattern was never written.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import torch

BYTE = 0xA5


class _Numpy(ModuleType):
    """NumPy, but for arrays that are not initialised."""

    def __init__(self) -> None:
        super().__init__("numpy")

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def empty(*args: Any, **kwargs: Any) -> np.ndarray:
        """An array full of the pattern."""
        return poisoned(np.empty(*args, **kwargs))

    @staticmethod
    def empty_like(*args: Any, **kwargs: Any) -> np.ndarray:
        """An array full of the pattern."""
        return poisoned(np.empty_like(*args, **kwargs))


def poisoned(array: np.ndarray) -> np.ndarray:
    """The array, full of the pattern."""
    if array.dtype != object and array.size and array.flags.c_contiguous:
        array.reshape(-1).view(np.uint8).fill(BYTE)
    return array


def poison_tensor(tensor: torch.Tensor) -> None:
    """Fill a tensor's memory with the pattern."""
    poisoned(tensor.detach().view(torch.uint8).numpy())


def is_poison(rows_ND: np.ndarray) -> bool:
    """Whether a row of an array is nothing but the pattern."""
    if not rows_ND.size or rows_ND.ndim != 2 or rows_ND.shape[1] * rows_ND.itemsize < 4:
        return False
    bytes_NB = np.ascontiguousarray(rows_ND).view(np.uint8).reshape(len(rows_ND), -1)
    return bool((bytes_NB == BYTE).all(axis=1).any())


def install() -> None:
    """Have the project's modules, those that are loaded, allocate poisoned arrays."""
    stand_in = _Numpy()
    for name, module in list(sys.modules.items()):
        is_ours = name.startswith("holdfast.") and not name.startswith("holdfast.kernels")
        if is_ours and getattr(module, "np", None) is np:
            module.np = stand_in  # type: ignore[attr-defined]
