"""A model's tables and their row state, found by themselves.

First thing in the flow: from a model and its optimizers to (a) tables, each a set of columns over
the same rows (the weights first, then the optimizer's row state), and (b) dense state, which is
everything else. What is a table is decided here and nowhere else.

Invariants:
- A tensor belongs to exactly one of the two: no tensor is saved twice, none is left out.
- Columns of a table share row ids: row ``i`` of every column is one record.

Not here: which rows changed (checkpoint/tracker.py), how rows become bytes (checkpoint/codec.py).

# N rows, D floats of one column
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from holdfast.errors import CorruptDataError, InvalidRequestError
from holdfast.kernels import rows as row_kernels
from holdfast.placement import Placement
from holdfast.schema import WEIGHT, Column, TableSchema


def as_optimizers(optimizer: Any) -> dict[str, torch.optim.Optimizer]:
    """One optimizer, several, or a mapping of them, each under a stable name."""
    if optimizer is None:
        return {}
    if isinstance(optimizer, Mapping):
        named = {str(name): item for name, item in optimizer.items()}
    elif isinstance(optimizer, Sequence):
        named = {str(index): item for index, item in enumerate(optimizer)}
    else:
        named = {"0": optimizer}
    for name, item in named.items():
        if not isinstance(item, torch.optim.Optimizer):
            raise InvalidRequestError(
                "not an optimizer",
                name=name,
                type=type(item).__name__,
                todo="pass a torch.optim.Optimizer, a list of them or a dict of them",
            )
    return named


class Table:
    """One embedding table of a live model: its parameter, its modules, its optimizer."""

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        modules: list[nn.Module],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.name = name
        self.parameter = parameter
        self.modules = modules
        self.optimizer = optimizer
        self.rows = int(parameter.shape[0])
        self.width = int(parameter.shape[1])

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The optimizer's row state that exists now (some optimizers create it late)."""
        if self.optimizer is None:
            return {}
        state = self.optimizer.state.get(self.parameter, {})
        return {
            key: value for key, value in sorted(state.items()) if is_row_state(value, self.rows)
        }

    def schema(self) -> TableSchema:
        """The columns as of now."""
        state = [
            Column(key, value.numel() // max(1, self.rows))
            for key, value in self.state_tensors().items()
        ]
        return TableSchema(self.name, self.rows, (Column(WEIGHT, self.width), *state))

    def tensors(self) -> list[torch.Tensor]:
        """Every column as a [rows, width] tensor that shares memory, in schema order."""
        with torch.no_grad():
            columns = [self.parameter.detach(), *self.state_tensors().values()]
            return [column.view(self.rows, -1) for column in columns]

    def arrays(self) -> list[np.ndarray]:
        """Every column as a NumPy view; a column on another device is copied to the host."""
        return [column.cpu().numpy() for column in self.tensors()]

    def load_arrays(self, arrays: Sequence[np.ndarray]) -> None:
        """Take over what was written into ``arrays()``; a column on the host shares it already."""
        for column, array_ND in zip(self.tensors(), arrays, strict=True):
            if column.device.type != "cpu":
                column.copy_(torch.from_numpy(array_ND))

    def gather(self, ids_N: np.ndarray, out: Sequence[np.ndarray]) -> None:
        """Copy some rows, every column, into the caller's arrays."""
        for column, out_ND in zip(self.tensors(), out, strict=True):
            if column.device.type == "cpu":
                row_kernels.gather(column.numpy(), ids_N, out_ND)
            else:
                chosen = torch.from_numpy(ids_N).to(column.device)
                torch.from_numpy(out_ND).copy_(column.index_select(0, chosen))

    def hash_rows(self, ids_N: np.ndarray | None = None) -> np.ndarray:
        """A 64-bit hash of every row with its state, or of some rows."""
        if ids_N is None:
            arrays = self.arrays()
        else:
            widths = [column.width for column in self.schema().columns]
            arrays = [np.empty((len(ids_N), width), np.float32) for width in widths]
            self.gather(ids_N, arrays)
        hashes_N = np.zeros(len(arrays[0]), np.uint64)
        for array_ND in arrays:
            row_kernels.hash_rows(array_ND, hashes_N)
        return hashes_N

    def gather_range(self, start: int, stop: int, out: Sequence[np.ndarray]) -> None:
        """Copy the rows ``start`` to ``stop``, every column, into the caller's arrays."""
        for column, out_ND in zip(self.tensors(), out, strict=True):
            if column.device.type == "cpu":
                np.copyto(out_ND, column.numpy()[start:stop])
            else:
                torch.from_numpy(out_ND).copy_(column[start:stop])


def is_row_state(value: object, rows: int) -> bool:
    """Whether an optimizer's state entry holds numbers for every row of a table."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.dtype == torch.float32
        and value.ndim >= 1
        and value.shape[0] == rows
        and value.numel() >= rows
        and value.is_contiguous()
    )


def _is_table(module: nn.Module) -> bool:
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return False
    weight = module.weight
    return (
        isinstance(weight, nn.Parameter)
        and weight.dtype == torch.float32
        and weight.is_contiguous()
        and weight.numel() > 0
    )


def find_tables(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> list[Table]:
    """The model's tables in the order of its modules, each named as in ``state_dict()``.

    Two modules that share one weight are one table. Embeddings that are not fp32 and contiguous
    are not tables: they go along whole as dense state.
    """
    owner: dict[int, torch.optim.Optimizer] = {}
    shared: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if owner.setdefault(id(parameter), optimizer) is not optimizer:
                    shared.add(id(parameter))
    found: dict[int, Table] = {}
    for path, module in model.named_modules():
        if not _is_table(module):
            continue
        weight: nn.Parameter = module.weight
        if id(weight) in found:
            found[id(weight)].modules.append(module)
            continue
        name = f"{path}.weight" if path else "weight"
        if id(weight) in shared:
            raise InvalidRequestError(
                "a table is in two optimizers", table=name, todo="give each table one optimizer"
            )
        found[id(weight)] = Table(name, weight, [module], owner.get(id(weight)))
    return list(found.values())


def lose_rows(tables: Iterable[Table], placement: Placement, servers: Iterable[int]) -> None:
    """What a failure does: the rows of these servers, with their state, are gone (NaN)."""
    lost = list(servers)
    with torch.no_grad():
        for table in tables:
            for server in lost:
                ids = torch.from_numpy(placement.rows_of(server, table.rows))
                for column in table.tensors():
                    column[ids.to(column.device)] = torch.nan


class ModelState:
    """A live model with its optimizers: what a snapshot reads and a restore writes."""

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        if not isinstance(model, nn.Module):
            raise InvalidRequestError(
                "not a model", type=type(model).__name__, todo="pass a torch.nn.Module"
            )
        self.model = model
        self.optimizers = as_optimizers(optimizer)
        self.tables = find_tables(model, self.optimizers.values())
        by_id = {id(table.parameter): table for table in self.tables}
        self._table_names = {
            name
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if id(parameter) in by_id
        }
        self._by_id = by_id

    def schemas(self) -> tuple[TableSchema, ...]:
        """Every table's columns as of now."""
        return tuple(table.schema() for table in self.tables)

    def check_parameters(self) -> None:
        """Refuse to go on with tables that the model no longer has.

        Raises:
            InvalidRequestError: a weight was replaced by another tensor, for instance by
                ``load_state_dict(assign=True)``; its rows would be saved as they were before.
        """
        for table in self.tables:
            if any(
                module.weight is not table.parameter or not _is_table(module)
                for module in table.modules
            ):
                raise InvalidRequestError(
                    "a table's weight was replaced by another tensor",
                    table=table.name,
                    todo="make the Checkpointer after the model is complete",
                )

    def full_bytes(self) -> int:
        """What all rows with their state take in fp32."""
        return sum(schema.rows * schema.row_bytes for schema in self.schemas())

    def dense(self) -> dict[str, Any]:
        """Everything that is not a row: other parameters, buffers, optimizer scalars, groups."""
        model = {
            name: value
            for name, value in self.model.state_dict().items()
            if name not in self._table_names
        }
        return {
            "model": model,
            "optimizers": {name: self._dense_of(opt) for name, opt in self.optimizers.items()},
            "row_state_shapes": {
                table.name: {key: list(t.shape) for key, t in table.state_tensors().items()}
                for table in self.tables
            },
        }

    def _dense_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        packed = optimizer.state_dict()
        tables = self._tables_by_index(optimizer)
        state = {}
        for index, entries in packed["state"].items():
            rows = tables[index].rows if index in tables else None
            state[index] = {
                key: value
                for key, value in entries.items()
                if rows is None or not is_row_state(value, rows)
            }
        return {"state": state, "param_groups": packed["param_groups"]}

    def _tables_by_index(self, optimizer: torch.optim.Optimizer) -> dict[int, Table]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return {
            index: self._by_id[id(parameter)]
            for index, parameter in enumerate(parameters)
            if id(parameter) in self._by_id
        }

    def check_schemas(self, stored: Sequence[TableSchema]) -> None:
        """Refuse a checkpoint of another model before anything is written.

        Raises:
            InvalidRequestError: names the first table that differs.
        """
        live = {table.name: table for table in self.tables}
        for schema in stored:
            table = live.pop(schema.name, None)
            if table is None:
                raise InvalidRequestError(
                    "the checkpoint has a table that the model lacks",
                    table=schema.name,
                    todo="build the model as it was when the checkpoint was taken",
                )
            shape = (schema.rows, schema.columns[0].width)
            if shape != (table.rows, table.width):
                raise InvalidRequestError(
                    "a table has another shape in the checkpoint",
                    table=schema.name,
                    checkpoint=shape,
                    model=(table.rows, table.width),
                    todo="build the model as it was when the checkpoint was taken",
                )
        if live:
            raise InvalidRequestError(
                "the model has tables that the checkpoint lacks",
                tables=sorted(live),
                todo="build the model as it was when the checkpoint was taken",
            )

    def load_dense(self, dense: Mapping[str, Any], schemas: Sequence[TableSchema]) -> None:
        """Load dense state and make room for every table's row state as the schemas say.

        Raises:
            InvalidRequestError: the model's or an optimizer's structure differs.
        """
        missing = set(dense["optimizers"]) ^ set(self.optimizers)
        if missing:
            raise InvalidRequestError(
                "the checkpoint was taken with other optimizers",
                checkpoint=sorted(dense["optimizers"]),
                given=sorted(self.optimizers),
                todo="pass the same optimizers in the same order",
            )
        try:
            result = self.model.load_state_dict(dense["model"], strict=False)
        except RuntimeError as error:
            raise InvalidRequestError(
                "the checkpoint's dense state does not fit the model", detail=str(error)
            ) from error
        absent = [name for name in result.missing_keys if name not in self._table_names]
        if absent or result.unexpected_keys:
            raise InvalidRequestError(
                "the checkpoint's dense state does not fit the model",
                missing=absent,
                unexpected=list(result.unexpected_keys),
            )
        shapes = dense["row_state_shapes"]
        for schema in schemas:
            for column in schema.columns[1:]:
                shape = shapes[schema.name][column.name]
                if shape[0] != schema.rows or math.prod(shape) != schema.rows * column.width:
                    raise CorruptDataError("row state has another shape than its column",
                                           table=schema.name, column=column.name)  # fmt: skip
        for name, optimizer in self.optimizers.items():
            self._load_optimizer(optimizer, dense["optimizers"][name], shapes)

    def _load_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        packed: Mapping[str, Any],
        shapes: Mapping[str, Mapping[str, Sequence[int]]],
    ) -> None:
        state = {index: dict(entries) for index, entries in packed["state"].items()}
        for index, table in self._tables_by_index(optimizer).items():
            existing = table.state_tensors()
            for key, shape in shapes.get(table.name, {}).items():
                tensor = existing.get(key)
                if tensor is None or list(tensor.shape) != list(shape):
                    tensor = torch.zeros(*shape, device=table.parameter.device)
                state.setdefault(index, {})[key] = tensor
        try:
            optimizer.load_state_dict({"state": state, "param_groups": packed["param_groups"]})
        except ValueError as error:
            raise InvalidRequestError(
                "the checkpoint's optimizer does not fit this one", detail=str(error)
            ) from error
