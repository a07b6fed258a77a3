"""Load some of a checkpoint's dense state into a live model, by pairs of names.

Parameters take their optimizer state along. State of an optimizer that the model has no more goes
nowhere; a parameter that comes without state begins without.

Invariant: what is not in a pair keeps its values and its optimizer state.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast.errors import InvalidRequestError
from holdfast.model.model_state import ModelState
from holdfast.model.names import plain_name
from holdfast.model.schema import TableSchema


def load_part(
    state: ModelState,
    dense: Mapping[str, Any],
    schemas: Sequence[TableSchema],
    pairs: Mapping[str, str],
    *,
    takes_options: bool,
) -> None:
    """Load dense tensors, and make room for the row state of tables.

    ``pairs``: stored names by those of the model. ``takes_options``: also learning rates and what
    else optimizers keep for all parameters of a group.

    Raises:
        InvalidRequestError: something does not fit.
    """
    if not all(table.has_parameter for table in state.tables):
        raise InvalidRequestError(
            "tables of TorchRec's fused kernels are restored whole",
            todo="restore without strict=, only=, skip= and rename=",
        )
    tables = {table.whole_name for table in state.tables}
    real = {plain_name(name): name for name in state.model.state_dict()}
    network = {real[n]: dense["model"][old] for n, old in pairs.items() if n not in tables}
    loading = state.load_network(state.model, network)
    if loading.errors or loading.unexpected:
        raise InvalidRequestError(
            "the checkpoint's dense state does not fit the model",
            unexpected=loading.unexpected,
            detail="; ".join(loading.errors),
        )
    stored = dense["optimizers"]
    if stored is None:
        return
    if any("named" not in packed for packed in stored.values()):
        raise InvalidRequestError(
            "the checkpoint's optimizer state goes by positions, as in early versions",
            todo="restore it into the model it was taken of, and save that",
        )
    new_names = {old: name for name, old in pairs.items()}
    renamed = [_renamed(s, new_names[s.whole_name]) for s in schemas if s.whole_name in new_names]
    shapes = {
        _renamed(s, new_names[s.whole_name]).name: dense["row_state_shapes"].get(s.name, {})
        for s in schemas
        if s.whole_name in new_names
    }
    own_shapes, dtypes = state.own_shapes(shapes, renamed)
    scalars = {
        new_names[old]: values
        for old, values in dense.get("table_state", {}).items()
        if old in new_names
    }
    entries = {name: held for packed in stored.values() for name, held in packed["named"].items()}
    for key, optimizer in state.optimizers.items():
        packed = optimizer.state_dict()
        names = list(itertools.chain(*state.names_in(optimizer)))
        held = dict(packed["state"])
        for index, name in enumerate(names):
            if name in pairs and name not in tables:
                held.pop(index, None)
                if pairs[name] in entries:
                    held[index] = dict(entries[pairs[name]])
        groups = packed["param_groups"]
        if takes_options:
            groups = _with_options(groups, stored.get(key, {}).get("param_groups", ()))
        state.load_optimizer(optimizer, held, groups, own_shapes, dtypes, scalars)


def _with_options(
    live: Sequence[Mapping[str, Any]], stored: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The groups of an optimizer with stored options, where there are as many and of the same
    kind of optimizer."""
    is_same = len(live) == len(stored) and all(
        set(a) == set(b) for a, b in zip(live, stored, strict=True)
    )
    if not is_same:
        return [dict(group) for group in live]
    return [{**b, "params": a["params"]} for a, b in zip(live, stored, strict=True)]


def _renamed(schema: TableSchema, name: str) -> TableSchema:
    if schema.cut is None:
        return dataclasses.replace(schema, name=name)
    return dataclasses.replace(schema, cut=dataclasses.replace(schema.cut, table=name))


def kinds_of_model(state: ModelState) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Every name that can be loaded into: what it is, its shape, of a table its number type."""
    found: dict[str, tuple[str, tuple[int, ...], str]] = {}
    for name, value in state.dense()["model"].items():
        is_tensor = isinstance(value, torch.Tensor)
        found[name] = ("tensor", tuple(value.shape), "") if is_tensor else ("value", (), "")
    for table in state.tables:
        dtype = table.schema().columns[0].dtype
        found[table.whole_name] = ("table", (table.shard.rows, table.shard.width), dtype)
    return found
