"""What a foreign checkpoint holds, in one form: a model's tensors, optimizers, a step.

    a tree of stored tensors and values -> which part is the model, which the optimizers -> Source

Invariant: nothing is guessed between two parts that could both be meant; the error names them.

Not here: reading files (torchfile.py, dcpfolder.py), which tensors are tables (adopt.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast.errors import CorruptDataError, InvalidRequestError
from holdfast.interchange.fused import KEY as FUSED_KEY
from holdfast.interchange.fused import unpack
from holdfast.names import plain_name
from holdfast.tensors import as_tensor

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "model_state", "module")
OPTIMIZER_KEYS = (
    "optimizer", "optimizers", "optimizer_state_dict", "optimizer_states", "optim"
)  # fmt: skip
PARAMETER_NAMES = "parameter_names"
STEP_KEYS = ("step", "global_step")


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a tensor, and where it begins in it."""

    offsets: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in pieces that lie in files: read a part at a time."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        """Size of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize

    def rows_into(self, start: int, stop: int, out_ND: np.ndarray) -> None:
        """Copy the rows ``start`` to ``stop``, each as one line of numbers."""
        out = as_tensor(out_ND).view(stop - start, *self.shape[1:])
        for piece in self.pieces:
            first, *rest = piece.offsets
            lo, hi = max(start, first), min(stop, first + piece.tensor.shape[0])
            if lo < hi:
                sizes = piece.tensor.shape[1:]
                where = [slice(a, a + size) for a, size in zip(rest, sizes, strict=True)]
                rows = slice(lo - start, hi - start)
                out[(rows, *where)] = piece.tensor[lo - first : hi - first]

    def as_column(self) -> StoredTensor:
        """One number a row as [rows, 1], as tables have it."""
        pieces = tuple(Piece((*p.offsets, 0), p.tensor.unsqueeze(1)) for p in self.pieces)
        return dataclasses.replace(self, shape=(*self.shape, 1), pieces=pieces)

    def whole(self) -> torch.Tensor:
        """All of it, in memory of its own."""
        made = torch.empty(self.shape, dtype=self.dtype)
        for piece in self.pieces:
            sizes = piece.tensor.shape
            where = [slice(a, a + s) for a, s in zip(piece.offsets, sizes, strict=True)]
            made[tuple(where)] = piece.tensor
        return made


def stored(tensor: torch.Tensor) -> StoredTensor:
    """A tensor that is one piece.

    Raises:
        InvalidRequestError: it is no plain tensor.
    """
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise InvalidRequestError(
            "a tensor of a layout that is not imported", layout=str(tensor.layout)
        )
    piece = Piece((0,) * tensor.ndim, tensor.detach())
    return StoredTensor(tuple(tensor.shape), tensor.dtype, (piece,))


@dataclass(frozen=True, slots=True)
class PackedOptimizer:
    """An optimizer's ``state_dict``: state by parameter number, groups, and names if known."""

    state: Mapping[int, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    names: tuple[str | None, ...] | None

    @property
    def parameters(self) -> int:
        """How many parameters it has."""
        return sum(len(group["params"]) for group in self.groups)


@dataclass(frozen=True, slots=True)
class Source:
    """A foreign checkpoint."""

    path: str
    format: str
    model: Mapping[str, Any]
    optimizers: Mapping[str, PackedOptimizer] | None
    """None: it holds none."""
    step: int | None
    fused: tuple[Mapping[str, Mapping[str, Any]], Mapping[str, Mapping[str, Any]]] | None = None
    """Of fused optimizers (fused.py): row state by table and column, the rest by table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which parts of a foreign checkpoint are meant; None: found by their usual names."""

    model_key: str | None = None
    optimizer_key: str | None = None
    strip_prefix: str = ""
    """What to leave out at the beginning of names, like ``module.``."""
    weights_only: bool = False
    """Leave optimizer state out."""


def find_parts(tree: Any, choice: Choice, *, path: str, format: str) -> Source:
    """A foreign checkpoint's model, optimizers and step, by their usual names or by those given.

    Raises:
        InvalidRequestError: it is not clear which part is the model, or there is none.
        CorruptDataError: an optimizer is not what ``state_dict()`` gives.
    """
    if not isinstance(tree, Mapping) or not all(isinstance(key, str) for key in tree):
        raise InvalidRequestError(
            "this is no checkpoint of a model", path=path, type=type(tree).__name__,
            todo="save a state_dict, or a dict with one under 'model'",
        )  # fmt: skip
    if choice.model_key is None and _is_state_dict(tree):
        return Source(path, format, _renamed(tree, choice.strip_prefix), None, None)
    model_key = _choose_key(tree, choice.model_key, MODEL_KEYS, what="model")
    if model_key is None or not _is_state_dict(tree[model_key]):
        raise InvalidRequestError(
            "no state_dict of a model found", path=path, keys=sorted(tree)[:20],
            todo="name it: model_key=, or --model-key",
        )  # fmt: skip
    optimizers = None
    if not choice.weights_only:
        key = _choose_key(tree, choice.optimizer_key, OPTIMIZER_KEYS, what="optimizer")
        if key is not None:
            optimizers = _optimizers(tree[key], key, choice.strip_prefix)
            optimizers = _with_names(optimizers, tree.get(PARAMETER_NAMES))
    steps = [tree[key] for key in STEP_KEYS if key in tree]
    steps = [s.whole().item() if isinstance(s, StoredTensor) and not s.shape else s for s in steps]
    step = next((s for s in steps if type(s) is int and s >= 0), None)
    model = _renamed(tree[model_key], choice.strip_prefix)
    fused = None
    if not choice.weights_only and FUSED_KEY in tree:
        states, scalars = unpack(tree[FUSED_KEY])
        prefix = choice.strip_prefix
        fused = _renamed(states, prefix), _renamed(scalars, prefix)
    return Source(path, format, model, optimizers, step, fused)


def _is_state_dict(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and all(isinstance(name, str) for name in value)
        and any(isinstance(item, StoredTensor) for item in value.values())
        and not any(isinstance(item, Mapping) for item in value.values())
    )


def _choose_key(
    tree: Mapping[str, Any], given: str | None, usual: Sequence[str], *, what: str
) -> str | None:
    if given is not None:
        if given not in tree:
            raise InvalidRequestError(f"no such {what} key", key=given, keys=sorted(tree)[:20])
        return given
    found = [key for key in usual if key in tree]
    if len(found) > 1:
        raise InvalidRequestError(
            f"more than one key could be the {what}", keys=found,
            todo=f"name it: {what}_key=, or --{what}-key",
        )  # fmt: skip
    return found[0] if found else None


def _renamed(model: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in model.items():
        new = plain_name(name.removeprefix(prefix))
        if new in made:
            raise InvalidRequestError(
                "two tensors have one name without the prefix and torch.compile's", name=new,
                prefix=prefix,
                todo="leave the prefix out",
            )  # fmt: skip
        made[new] = value
    return made


def _optimizers(value: Any, key: str, prefix: str) -> dict[str, PackedOptimizer]:
    """One optimizer, a list or a dict of them, named as a Checkpointer would name them."""
    if isinstance(value, Mapping) and "param_groups" in value:
        items: Iterator[tuple[str, Any]] = iter([("0", value)])
    elif isinstance(value, list | tuple):
        items = ((str(index), item) for index, item in enumerate(value))
    elif isinstance(value, Mapping):
        items = ((str(name), item) for name, item in value.items())
    else:
        raise CorruptDataError("not an optimizer's state_dict", key=key)
    return {name: _packed(item, f"{key}[{name}]", prefix) for name, item in items}


def _with_names(optimizers: dict[str, PackedOptimizer], told: Any) -> dict[str, PackedOptimizer]:
    """With names of parameters that the file has beside its optimizers, as our own have."""
    made = dict(optimizers)
    for key, packed in optimizers.items():
        names = told.get(key) if isinstance(told, Mapping) else None
        if packed.names is not None or not isinstance(names, list):
            continue
        is_fit = len(names) == packed.parameters
        if is_fit and all(name is None or isinstance(name, str) for name in names):
            made[key] = dataclasses.replace(packed, names=tuple(names))
    return made


def _packed(value: Any, where: str, prefix: str) -> PackedOptimizer:
    """An optimizer as ``state_dict()`` has it, or with names for numbers, as DCP's helpers do."""
    try:
        groups = [dict(group) for group in value["param_groups"]]
        order = [parameter for group in groups for parameter in group["params"]]
        named = [name for group in groups for name in group.get("param_names", ())]
        state = {key: dict(entries) for key, entries in value.get("state", {}).items()}
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise CorruptDataError("not an optimizer's state_dict", where=where) from error
    if len(set(map(repr, order))) != len(order) or not set(state) <= set(order):
        raise CorruptDataError("an optimizer's state and groups do not fit", where=where)
    number = {parameter: index for index, parameter in enumerate(order)}
    if len(named) != len(order) and all(isinstance(parameter, str) for parameter in order):
        named = order
    at = 0
    for group in groups:
        count = len(group["params"])
        group["params"] = list(range(at, at + count))
        at += count
    names = tuple(plain_name(str(name).removeprefix(prefix)) for name in named) if named else None
    if names is not None and len(names) != len(order):
        raise CorruptDataError("an optimizer names other parameters than it has", where=where)
    return PackedOptimizer({number[key]: entries for key, entries in state.items()}, groups, names)
