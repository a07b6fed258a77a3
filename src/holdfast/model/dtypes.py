"""The number types that a column of a table may have, as NumPy arrays. No torch.

    float32  float16  float64   NumPy's own
    bfloat16                    NumPy has none: its bit patterns, as uint16

An array of a column between model and storage has one of these four types, and the type alone says
which column type it is: uint16 always means bfloat16. People never see patterns: ``for_users``
gives them float32 arrays, which hold every bfloat16 exactly.

Invariants:
- ``as_bits`` and ``for_users`` change no value. Rows that are copied are copied as bits: a NaN
  keeps its payload, -0.0 its sign.
- Only a codec that approximates goes through ``to_float32`` and ``from_float32``.

Not here: the names and sizes of the types (schema.py), tensors (tensors.py).

# N rows, D numbers of one column
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.model.schema import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

Array = npt.NDArray[Any]

_ARRAYS: dict[str, np.dtype[Any]] = {
    FLOAT32: np.dtype(np.float32),
    FLOAT16: np.dtype(np.float16),
    BFLOAT16: np.dtype(np.uint16),
    FLOAT64: np.dtype(np.float64),
}
_NAMES = {array: name for name, array in _ARRAYS.items()}
_BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}
_LARGEST = {FLOAT16: np.float32(65504.0), BFLOAT16: np.float32(2.0**127 * (2 - 2.0**-7))}
_S16, _ONE, _ROUND, _NAN = np.uint32(16), np.uint32(1), np.uint32(0x7FFF), np.uint32(0x7FC0)


def array_dtype(name: str) -> np.dtype[Any]:
    """The type of arrays that hold a column of this type.

    >>> array_dtype("bfloat16"), array_dtype("float64")
    (dtype('uint16'), dtype('float64'))
    """
    return _ARRAYS[name]


def name_of(array_ND: Array) -> str | None:
    """The column type that an array holds; None: it holds no column."""
    return _NAMES.get(array_ND.dtype)


def as_bits(array_ND: Array) -> Array:
    """The same memory as unsigned words of the same size: what is copied so keeps every bit."""
    return array_ND.view(_BITS[array_ND.dtype.itemsize])


def to_float32(array_ND: Array) -> npt.NDArray[np.float32]:
    """The values as float32: exact for the smaller types, rounded for float64."""
    if array_ND.dtype == np.float32:
        return array_ND
    if array_ND.dtype == np.uint16:
        return (array_ND.astype(np.uint32) << _S16).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return array_ND.astype(np.float32)


def from_float32(values_ND: Array, name: str) -> Array:
    """Values as a column type: rounded to the nearest, never to infinity. A NaN stays one.

    >>> from_float32(np.float32([1e9, -0.5]), "float16").tolist()
    [65504.0, -0.5]
    """
    if name in _LARGEST:
        values_ND = np.clip(values_ND, -_LARGEST[name], _LARGEST[name])
    if name == BFLOAT16:
        bits_ND = np.ascontiguousarray(values_ND, np.float32).view(np.uint32)
        rounded_ND = (bits_ND + _ROUND + ((bits_ND >> _S16) & _ONE)) >> _S16
        return np.where(np.isnan(values_ND), _NAN, rounded_ND).astype(np.uint16)
    return values_ND.astype(_ARRAYS[name])


def for_users(array_ND: Array) -> Array:
    """The array as people get it: bfloat16 as the same numbers in float32.

    >>> for_users(np.array([[0x3FC0]], np.uint16))
    array([[1.5]], dtype=float32)
    """
    return to_float32(array_ND) if array_ND.dtype == np.uint16 else array_ND


def fill_nan(array_ND: Array, ids_N: Array) -> None:
    """Make rows NaN, whatever their type: all bits set are NaN in each."""
    bits_ND = as_bits(array_ND)
    bits_ND[ids_N] = np.iinfo(bits_ND.dtype).max
