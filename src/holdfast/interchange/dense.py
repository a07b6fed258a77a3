"""Dense state of a foreign checkpoint, in memory: checked first, then read.

    adopted dense state (stored tensors, values) -> what it costs, what it is -> DenseState

Invariant: what is read here is of types that dense state can hold (checkpoint/format/tree.py), and
its cost was taken out of the account before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from holdfast.boundary.budget import Account
from holdfast.checkpoint.format import tree
from holdfast.checkpoint.saving.snapshot import DenseState
from holdfast.errors import InvalidRequestError
from holdfast.interchange.archive.names import Opaque, PickledArray
from holdfast.interchange.archive.nested import measure
from holdfast.interchange.archive.tensors import StoredTensor

# The types that a dense segment can hold.
_DTYPES = {
    getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8",
        "bool", "uint16", "uint32", "uint64", "complex64", "float8_e4m3fn", "float8_e5m2",
    )
    if hasattr(torch, name)
}  # fmt: skip
_HELD = 3  # times that a tensor is in memory while it is stored: itself, encoded, as one object
_HEADER_BYTES_MAX, _HEADER_BYTES_A_TENSOR = 99_000_000, 400  # safetensors reads up to 100 MB
_VALUE_BYTES, _TEXT_FACTOR = 200, 8  # of memory that a value takes, and a character, as JSON


def load_dense(dense: Mapping[str, Any], account: Account) -> DenseState:
    """Dense state as a checkpoint has it; this is small and may be whole in memory.

    Raises:
        InvalidRequestError: it holds what cannot be stored, or more than the input's size allows.
        CorruptDataError: a tensor's file ends too early.
    """
    found = measure(dense, what="dense state")
    account.take_memory(
        found.values * _VALUE_BYTES + found.bytes * _TEXT_FACTOR,
        claim=f"{found.values} values of dense state",
    )
    account.take_written(found.bytes * _TEXT_FACTOR, claim="texts of dense state")
    _check(dense, "", account)
    structure, tensors = tree.flatten(_loaded(dense))
    _check_header(structure, len(tensors))
    return DenseState(structure, tensors)


def _check_header(structure: Any, tensors: int) -> None:
    """Refuse what does not fit into the header of a dense segment, where its JSON is a text."""
    text = json.dumps(structure, separators=(",", ":"))
    size = len(text) + text.count('"') + text.count("\\") + tensors * _HEADER_BYTES_A_TENSOR
    if size > _HEADER_BYTES_MAX:
        raise InvalidRequestError(
            "the file holds more values beside its tables than a checkpoint can hold",
            bytes=size, most=_HEADER_BYTES_MAX,
            todo="leave them out, or import weights alone: --weights-only",
        )  # fmt: skip


def _check(value: Any, path: str, account: Account) -> None:
    """Refuse what cannot be stored, and take what the rest costs."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_text(key, path)
            _check(item, f"{path}[{str(key)[:40]!r}]", account)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check(item, f"{path}[{index}]", account)
    elif isinstance(value, StoredTensor):
        if value.dtype not in _DTYPES:
            raise InvalidRequestError(
                "a tensor is of a type that is not imported", where=path[-200:],
                dtype=str(value.dtype), todo="convert it first, or leave it out",
            )  # fmt: skip
        account.take_memory(_HELD * value.bytes, claim=f"tensor {path[-200:]}")
        account.take_written(value.bytes, claim=f"tensor {path[-200:]}")
    elif isinstance(value, PickledArray):
        size = value.array().nbytes
        account.take_memory(_HELD * size, claim=f"array {path[-200:]}")
        account.take_written(size, claim=f"array {path[-200:]}")
    elif isinstance(value, str):
        _check_text(value, path)
    elif not (value is None or isinstance(value, bool | int | float | bytes | np.generic)):
        kind = value.kind if isinstance(value, Opaque) else type(value).__name__
        raise InvalidRequestError(
            "the file holds a value that cannot be imported", where=path[-200:], kind=kind,
            todo="leave it out, or import weights alone: --weights-only",
        )  # fmt: skip


def _check_text(value: Any, path: str) -> None:
    texts = value if isinstance(value, tuple) else (value,)
    for text in texts:
        if isinstance(text, str) and not text.isascii() and not _is_encodable(text):
            raise InvalidRequestError(
                "the file holds a text with half a character", where=path[-200:]
            )


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _loaded(value: Any) -> Any:
    if isinstance(value, StoredTensor):
        return value.whole()
    if isinstance(value, PickledArray):
        return value.array()
    if isinstance(value, Mapping):
        return {key: _loaded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_loaded(item) for item in value)
    return value
