"""A step's state as torch would have it, tables still without numbers; and the numbers, into files.

    run, step -> a state_dict whose tables are placeholders -> torch writes it without numbers
    -> rows are decoded straight into the mapped file

Invariants:
- No table is ever whole in memory: a placeholder takes room in no memory, a mapped file can leave.
- Every tensor of what was written is filled, tables and others.

Not here: the formats (torchfile.py, dcpfolder.py).
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from holdfast.boundary.dense import check_aliases, check_row_state, part_of, part_or_none
from holdfast.checkpoint.restoring.restore import check_complete
from holdfast.checkpoint.run import Run
from holdfast.errors import HoldfastError, InvalidRequestError
from holdfast.interchange.archive.tensors import TensorRef
from holdfast.interchange.fused import pack
from holdfast.model.dtypes import array_dtype
from holdfast.model.model_state import Order, in_state_order, is_unnamed
from holdfast.model.schema import WEIGHT, TableSchema, cuts_of, state_shape
from holdfast.model.tensors import TORCH_DTYPES

OnTable = Callable[[int, int], None]

# of Linux; Python knows it by name from 3.13 on
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_INSTEAD = "export weights alone: --weights-only"


@dataclass(frozen=True, slots=True)
class Handout:
    """A step's state. ``columns`` says of a placeholder (by ``id``) which column it stands for."""

    run: Run
    step: int
    model: dict[str, Any]
    optimizers: dict[str, dict[str, Any]]
    parameters: dict[str, list[str | None]]
    fused: dict[str, Any] | None = None
    """TorchRec's fused optimizers (fused.py), where tables have one."""
    columns: dict[int, tuple[str, int]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        return sum(schema.rows for schema in self.run.tables(self.step))


def hand_out(run: Run, step: int, *, weights_only: bool) -> Handout:
    """A step's state as ``state_dict()`` gives it, with placeholders for tables and row state.

    Raises:
        NotFoundError: no such step.
        InvalidRequestError: the checkpoint does not say which optimizer holds a table's state.
    """
    schemas = run.tables(step)
    check_complete(run.catalog, step)  # before a lying row count costs room
    cuts = cuts_of(run.catalog.schema_of(run.catalog.checkpoint(step)))
    dense = run.dense(step)
    columns: dict[int, tuple[str, int]] = {}

    def place(schema: TableSchema, column: int, shape: tuple[int, ...]) -> torch.Tensor:
        made = _placeholder(shape, TORCH_DTYPES[schema.columns[column].dtype])
        columns[id(made)] = (schema.name, column)
        return made

    model: dict[str, Any] = dict(part_of(dense, "model"))
    for schema in schemas:
        model[schema.name] = place(schema, 0, (schema.rows, schema.columns[0].width))
    stored_tables = run.catalog.schema_of(run.catalog.checkpoint(step))
    check_aliases(dense, stored_tables)
    for alias, name in (dense.get("aliases") or {}).items():
        model[alias] = model[name]
    if weights_only:
        return Handout(run, step, model, {}, {}, columns=columns)
    check_row_state(dense, stored_tables)
    orders = dense.get("parameters") or {}
    optimizers: dict[str, dict[str, Any]] = {}
    parameters: dict[str, list[str | None]] = {}
    for key, stored in (part_or_none(dense, "optimizers") or {}).items():
        optimizers[key], parameters[key] = _pack(stored, orders.get(key, ()))
    homes = {
        name: (key, index)
        for key, names in parameters.items()
        for index, name in enumerate(names)
        if name is not None
    }
    table_state = dense.get("table_state") or {}
    # Nothing but a fused kernel has a rate of its own for a table.
    is_fused = {table: "lr" in held and table not in homes for table, held in table_state.items()}
    fused: dict[str, dict[str, Any]] = {table: {} for table in is_fused if is_fused[table]}
    for table, scalars in table_state.items():
        if table in homes and scalars:
            key, index = homes[table]
            optimizers[key]["state"].setdefault(index, {}).update(scalars)
    for schema in schemas:
        for column, each in enumerate(schema.columns):
            if each.name == WEIGHT and column == 0:
                continue
            parts = cuts[schema.name]
            shapes = (dense.get("row_state_shapes") or {}).get(parts[0].name)
            if not shapes or each.name not in shapes:
                raise InvalidRequestError(
                    "the checkpoint does not say what shape a table's state has",
                    table=schema.name, column=each.name, todo=_INSTEAD,
                )  # fmt: skip
            shape = shapes[each.name]
            rest = state_shape(parts, column, shape, width=schema.width)
            if schema.name in fused:
                rest = [] if rest == [1] else rest  # as TorchRec has one number a row
                fused[schema.name][each.name] = place(schema, column, (schema.rows, *rest))
                continue
            if schema.name not in homes:
                raise InvalidRequestError(
                    "the checkpoint does not say whose state a table's is", table=schema.name,
                    column=each.name, todo=_INSTEAD,
                )  # fmt: skip
            key, index = homes[schema.name]
            state = optimizers[key]["state"].setdefault(index, {})
            state[each.name] = place(schema, column, (schema.rows, *rest))
    for packed in optimizers.values():
        packed["state"] = in_state_order(packed["state"])
    packed_fused = pack(fused, {t: table_state[t] for t in fused}) if fused else None
    return Handout(run, step, model, optimizers, parameters, packed_fused, columns)


def _pack(stored: Mapping[str, Any], order: Order) -> tuple[dict[str, Any], list[str | None]]:
    """An optimizer's dense state as its ``state_dict()``, with all its parameters, and their names.

    Without tables' state. Of checkpoints that have it by positions the names are not known.

    >>> stored = {"named": {"b": {"step": 2}}, "param_groups": [{"lr": 1, "params": ["b"]}]}
    >>> packed, names = _pack(stored, [["t", "b"]])
    >>> packed["state"], packed["param_groups"], names
    ({1: {'step': 2}}, [{'lr': 1, 'params': [0, 1]}], ['t', 'b'])
    >>> _pack({**stored, "beside": {"k": 7}}, [["t", "b"]])[0]["state"]
    {1: {'step': 2}, 'k': 7}
    """
    groups: list[dict[str, Any]] = [dict(group) for group in stored["param_groups"]]
    if "state" in stored:
        state = {index: dict(entries) for index, entries in stored["state"].items()}
        return {"state": state, "param_groups": groups}, [None for g in groups for _ in g["params"]]
    order = order or [group["params"] for group in groups]
    names = [name for group in order for name in group]
    number = {name: index for index, name in enumerate(names)}
    for group, members in zip(groups, order, strict=True):
        group["params"] = [number[name] for name in members]
    state = {number[name]: dict(entries) for name, entries in stored["named"].items()}
    state |= stored.get("beside") or {}
    told = [None if is_unnamed(name) else name for name in names]
    return {"state": state, "param_groups": groups}, told


def _placeholder(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that nobody looks into: address space without memory behind it."""
    size = math.prod(shape) * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    room = mmap.mmap(-1, max(1, size), flags=flags)
    return torch.frombuffer(room, dtype=dtype, count=math.prod(shape)).view(shape)


def fill(handout: Handout, places: list[tuple[torch.Tensor, TensorRef]], on_table: OnTable) -> None:
    """Put every number where it belongs in the files: dense tensors, then tables one by one.

    Raises:
        CorruptDataError: the checkpoint is damaged.
    """
    targets: dict[tuple[str, int], list[TensorRef]] = {}
    for tensor, ref in places:
        column = handout.columns.get(id(tensor))
        if column is not None:
            targets.setdefault(column, []).append(ref)
        elif tensor.numel():
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            np.copyto(ref.map(), flat)
    schemas = handout.run.tables(handout.step)
    for done, schema in enumerate(schemas):
        on_table(done, len(schemas))
        found = [
            (targets[schema.name, index], array_dtype(column.dtype))
            for index, column in enumerate(schema.columns)
            if (schema.name, index) in targets
        ]
        held = [refs for refs, _ in found]
        flats = [refs[0].map() for refs in held]
        arrays = [
            flat_B.view(dtype).reshape(schema.rows, -1)
            for flat_B, (_, dtype) in zip(flats, found, strict=True)
        ]
        handout.run.restore_into(handout.step, {schema.name: arrays})
        for flat_B, refs in zip(flats, held, strict=True):
            for ref in refs[1:]:  # a table that modules share, where a format keeps it for each
                if ref != refs[0]:
                    np.copyto(ref.map(), flat_B)
    on_table(len(schemas), len(schemas))


@contextmanager
def reporting(program: str, also: type[BaseException] = Exception) -> Iterator[None]:
    """Turn what a program raises that cannot write a state into an error of ours: any exception,
    and ``also`` one that is none."""
    try:
        yield
    except (HoldfastError, OSError):
        raise
    except (Exception, also) as error:  # what torch raises for a state it cannot write is anything
        raise InvalidRequestError(
            f"{program} cannot write this checkpoint's state", cause=str(error)[:120],
            todo="export weights alone: --weights-only, or another format",
        ) from error  # fmt: skip


def check_skips_data() -> None:
    """Refuse a torch that cannot write files without numbers.

    Raises:
        InvalidRequestError: it is too old.
    """
    if not hasattr(torch.serialization, "skip_data"):
        raise InvalidRequestError(
            "this torch cannot write a file table by table", torch=torch.__version__,
            todo="use torch 2.6 or newer, or export safetensors",
        )  # fmt: skip
