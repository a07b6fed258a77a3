"""Nested state (dicts, lists, tensors, numbers) as JSON plus raw tensors, and back.

Dense state, RNG state and a reader's state pass through here on their way to a dense segment. The
structure becomes JSON, every tensor and array a numbered entry beside it: nothing is pickled, so
loading an untrusted store can fail but never execute.

Invariants:
- ``unflatten(*flatten(tree))`` equals ``tree``, types of containers and keys included.
- A value of an unknown type is refused by name when saving, never dropped.
- Reading takes no more than a small multiple of the bytes: every tensor is named exactly once.
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from holdfast.checkpoint.format import stored_json
from holdfast.errors import CorruptDataError, InvalidRequestError

_STRUCTURE = "holdfast.tree"
_INTEGER_END = 1 << 256  # random generators have numbers of 128 bits


def flatten(tree: object) -> tuple[Any, dict[str, torch.Tensor]]:
    """A tree's JSON structure and its tensors, which still share the tree's memory.

    >>> flatten({"lr": 0.5, "shape": (2, 3)})[0]
    {'d': [['lr', 0.5], ['shape', {'t': [2, 3]}]]}

    Raises:
        InvalidRequestError: names the path of a value that cannot be stored.
    """
    tensors: dict[str, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> str:
        name = str(len(tensors))
        tensors[name] = tensor
        return name

    def visit(value: object, path: str) -> Any:
        if value is None or isinstance(value, bool | str) or type(value) is int:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"f": repr(value)}
        if isinstance(value, torch.Tensor):
            if value.layout == torch.sparse_coo:
                return {
                    "sparse": [
                        keep(value.detach()._indices()),
                        keep(value.detach()._values()),
                        list(value.shape),
                        value.is_coalesced(),
                    ]
                }
            return {"x": keep(value.detach())}
        if isinstance(value, np.ndarray):
            return {"n": keep(torch.from_numpy(_storable(value, path).copy(order="C")))}
        if isinstance(value, np.generic):
            return {"s": [keep(torch.from_numpy(np.atleast_1d(_storable(value, path))))]}
        if isinstance(value, bytes):
            return {"b": base64.b64encode(value).decode()}
        if isinstance(value, dict):
            return {"d": [[visit(k, path), visit(v, f"{path}[{k!r}]")] for k, v in value.items()]}
        if isinstance(value, list):
            return {"l": [visit(item, f"{path}[{i}]") for i, item in enumerate(value)]}
        if isinstance(value, tuple):
            return {"t": [visit(item, f"{path}[{i}]") for i, item in enumerate(value)]}
        raise InvalidRequestError(
            "state holds a value that cannot be stored",
            path=path,
            type=type(value).__name__,
            todo="make state_dict() return numbers, strings, bytes, tensors, lists and dicts",
        )

    return visit(tree, "state"), tensors


def _storable(value: np.ndarray | np.generic, path: str) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" or array.dtype.byteorder == ">":
        raise InvalidRequestError("state holds an array that cannot be stored", path=path,
                                  dtype=str(array.dtype), todo="use a numeric dtype")  # fmt: skip
    return array


def unflatten(structure: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The tree that ``flatten`` took apart.

    Raises:
        CorruptDataError: the structure is not one that ``flatten`` makes.
    """
    left = dict(tensors)
    try:
        built = _build(structure, left)
    except CorruptDataError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, RecursionError, RuntimeError) as error:
        raise CorruptDataError("dense state has an impossible structure") from error
    if left:
        raise CorruptDataError("dense state has tensors that nothing names", tensors=len(left))
    return built


def _build(node: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """What a node stands for; a tensor is taken out when it is named."""
    if not isinstance(node, dict):
        if type(node) is int and abs(node) >= _INTEGER_END:
            raise CorruptDataError("dense state has a number that is too large")
        if isinstance(node, str):
            node.encode()  # half of a surrogate pair raises ValueError
        if node is None or isinstance(node, bool | str | int | float):
            return node
        raise CorruptDataError("dense state has an impossible structure")
    ((tag, value),) = node.items()
    match tag:
        case "d":
            built = {_build(k, tensors): _build(v, tensors) for k, v in value}
            if len(built) != len(value):
                raise CorruptDataError("dense state names something twice")
            return built
        case "l":
            return [_build(item, tensors) for item in value]
        case "t":
            return tuple(_build(item, tensors) for item in value)
        case "x":
            return tensors.pop(value)
        case "n":
            return tensors.pop(value).numpy()
        case "s":
            (name,) = value
            (scalar,) = tensors.pop(name).numpy()
            return scalar
        case "b":
            return base64.b64decode(value, validate=True)
        case "f":
            return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[value]
        case "sparse":
            indices, values, shape, is_coalesced = value
            return torch.sparse_coo_tensor(
                tensors.pop(indices),
                tensors.pop(values),
                shape,
                device="cpu",
                is_coalesced=bool(is_coalesced),
                check_invariants=True,
            )
    raise CorruptDataError("dense state has an unknown tag", tag=str(tag)[:20])


def to_bytes(structure: Any, tensors: dict[str, torch.Tensor]) -> bytes:
    """A dense segment: a safetensors file whose metadata holds the structure."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    text = json.dumps(structure, allow_nan=False, separators=(",", ":"))
    return safetensors.torch.save(contiguous, metadata={_STRUCTURE: text})


def from_bytes(data: bytes) -> Any:
    """The tree a dense segment holds.

    Raises:
        CorruptDataError: not a dense segment.
    """
    try:
        tensors = safetensors.torch.load(data)
        header_bytes = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + header_bytes])
        structure = stored_json.parse(header["__metadata__"][_STRUCTURE])
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptDataError("not a dense segment", bytes=len(data)) from error
    return unflatten(structure, tensors)
