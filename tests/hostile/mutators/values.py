"""Values that no importer expects, put anywhere into what a program saves."""

from __future__ import annotations

import argparse
import collections
import random
import warnings
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch

from tests.hostile.mutators.pickles import NUMBERS, TEXTS


def shared_lists(depth: int) -> list[Any]:
    """Lists that each hold the one before twice: a tree of 2^depth."""
    made: list[Any] = [1]
    for _ in range(depth):
        made = [made, made]
    return made


def nested_lists(depth: int) -> list[Any]:
    """A list in a list in a list."""
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


def circle() -> list[Any]:
    """A list that holds itself."""
    made: list[Any] = []
    made.append({"self": made})
    return made


_SMALL = torch.arange(12.0).reshape(3, 4)
VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "NaN": lambda: float("nan"),
    "infinity": lambda: float("-inf"),
    "True": lambda: True,
    "2^2000": lambda: 1 << 2000,
    "complex": lambda: 1 + 2j,
    "set": lambda: {1, "a"},
    "bytes": lambda: b"\0\xff",
    "empty dict": dict,
    "empty tuple": tuple,
    "shared lists, 26 deep": lambda: shared_lists(26),
    "shared lists, 12 deep": lambda: shared_lists(12),
    "60 lists": lambda: nested_lists(60),
    "64 lists": lambda: nested_lists(64),
    "300 lists": lambda: nested_lists(300),
    "circle": circle,
    "one number, expanded": lambda: torch.ones(1).expand(1 << 45),
    "one row, expanded": lambda: torch.ones(1, 64).expand(1 << 24, 64),
    "a small expansion": lambda: torch.ones(1, 4).expand(50, 4),
    "transposed": lambda: _SMALL.t(),
    "sliced": lambda: _SMALL[:, 1:3],
    "every second": lambda: _SMALL[::2, ::3],
    "no rows": lambda: torch.ones(0, 4),
    "a number": lambda: torch.tensor(7),
    "bfloat16": lambda: _SMALL.bfloat16(),
    "float16 table": lambda: torch.ones(50, 4, dtype=torch.float16),
    "float64 table": lambda: torch.ones(50, 4, dtype=torch.float64),
    "other rows": lambda: torch.ones(49, 4),
    "three dimensions": lambda: torch.ones(50, 2, 2),
    "wide row": lambda: torch.ones(1, 1).expand(1, 1 << 26),
    "bool": lambda: _SMALL > 3,
    "uint16": lambda: torch.ones(3, dtype=torch.uint16),
    "complex64": lambda: torch.ones(3, dtype=torch.complex64),
    "complex32": lambda: torch.ones(3, dtype=torch.complex32),
    "complex128": lambda: torch.ones(3, dtype=torch.complex128),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "float8 fnuz": lambda: torch.ones(3).to(torch.float8_e5m2fnuz),
    "quantized": lambda: torch.quantize_per_tensor(_SMALL, 0.1, 0, torch.qint8),
    "sparse": lambda: _SMALL.to_sparse(),
    "sparse rows": lambda: _SMALL.to_sparse_csr(),
    "meta": lambda: torch.ones(50, 4, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "lazily negated": lambda: torch._neg_view(_SMALL),
    "lazily conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "parameter": lambda: torch.nn.Parameter(torch.full((50, 4), 3.0)),
    "numpy number": lambda: np.float64(2.5),
    "numpy array": lambda: np.arange(6, dtype=np.int32).reshape(2, 3).T,
    "numpy objects": lambda: np.array([None, 1]),
    "numpy text": lambda: np.str_("x"),
    "big-endian": lambda: np.arange(3, dtype=">f4"),
    "dtype": lambda: torch.float16,
    "device": lambda: torch.device("cpu"),
    "size": lambda: torch.Size((50, 4)),
    "ordered": lambda: collections.OrderedDict(a=1, b=torch.ones(2)),
    "default": lambda: collections.defaultdict(list, {"a": [1]}),
    "namespace": lambda: argparse.Namespace(a=1, b=[2]),
    "path": lambda: PurePosixPath("/a/b"),
}
KEYS: tuple[Any, ...] = (
    0, 1, -1, 2**57, 1.5, float("nan"), True, None, b"x", (), (1, "a"), ("a",) * 3
)  # fmt: skip


def some_value(rng: random.Random) -> tuple[Any, str]:
    """A value, and what it is."""
    name = rng.choice((*VALUES, "number", "text"))
    if name == "number":
        value: Any = rng.choice(NUMBERS)
        return value, f"{value}"[:24]
    if name == "text":
        value = rng.choice(TEXTS)
        return value, repr(value)[:24]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that some of these are experimental
        return VALUES[name](), name


def mutate_values(tree: dict[Any, Any], rng: random.Random) -> str:
    """Change what a program would save: a value, a key, or a place."""
    places = [place for place in _places(tree) if isinstance(place[0], dict | list)]
    holder, key = rng.choice(places)
    shown = repr(key)[:30]
    lie = rng.choice(("value", "value", "value", "value", "key", "drop", "copy", "add"))
    if lie == "value":
        holder[key], what = some_value(rng)
        return f"value: {shown} is {what}"
    if lie == "drop":
        del holder[key]
        return f"value: no {shown}"
    if lie == "copy":
        other, from_ = rng.choice(places)
        if from_ in other if isinstance(other, dict) else from_ < len(other):
            holder[key] = other[from_]
        return f"value: {shown} is that of {from_!r}"[:80]
    name: Any = rng.choice((*KEYS, *TEXTS, *NUMBERS))
    if isinstance(holder, list):
        holder.append(name)
        return f"value: one more, {name!r}"[:80]
    if lie == "key":
        holder[name] = holder.pop(key)
        return f"value: {shown} called {name!r}"[:80]
    holder[name], what = some_value(rng)
    return f"value: {name!r} added, {what}"[:80]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every key of every dict and list."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        for key, item in value.items():
            found += [(value, key), *_places(item)]
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += [(value, index), *_places(item)]
    return found
